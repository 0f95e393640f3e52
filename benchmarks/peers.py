"""The competitors that are mounted: how each is started, seen to be ready, and ended.

A peer is a frozen value; `mounted` runs it on a site, with a cache directory of its own that is gone afterwards.
"""

import contextlib
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from benchmarks.origins import Site
from benchmarks.processes import (
    BenchmarkError,
    MemoryWatch,
    children,
    cpu_seconds,
    end,
    is_mounted,
    remove_folder,
    run_command,
    start,
    unmount,
    wait_until,
)

READY_SECONDS = 30.0
# A second after the mount, this project's keeper starts the next daemon, which then waits.
_STANDBY_SECONDS, _STILL_SECONDS = 5.0, 0.2
CACHE = "cache"  # the name of the cache's folder beside a mount
SCRIPTS = Path(sys.executable).parent


class Peer(Protocol):
    """A program that shows a bucket as a directory."""

    @property
    def name(self) -> str:
        """Its name in tables and JSON."""
        ...

    def command(self, site: Site, path: Path, cache: Path) -> list[str]:
        """Return the words that mount it at `path` in the foreground, with its files in `cache`."""
        ...

    def environment(self, site: Site) -> dict[str, str]:
        """Return its variables."""
        ...

    def is_ready(self, log: str) -> bool:
        """Return whether it has set up what it sets up after mounting, by the log so far."""
        ...


@dataclass(frozen=True, slots=True)
class Fusecache:
    """This project's daemon, with its defaults."""

    name: str = "fusecache"
    flags: tuple[str, ...] = ()

    def command(self, site: Site, path: Path, cache: Path) -> list[str]:
        """Return the words that mount it."""
        # As a module: the packages of the tree that the benchmark runs in.
        words = [sys.executable, "-m", "fusecache", "mount", f"s3://{site.bucket}", str(path), "--foreground"]
        return [*words, "--cache-dir", str(cache), "--endpoint-url", site.endpoint_url, *self.flags]

    def environment(self, site: Site) -> dict[str, str]:
        """Return its variables."""
        return site.environment()

    def is_ready(self, log: str) -> bool:
        """Return whether the kernel's settings are written."""
        return " mounted source=" in log


@dataclass(frozen=True, slots=True)
class Rclone:
    """`rclone mount` with a cache of whole files on disk. cache_mode: its --vfs-cache-mode."""

    name: str = "rclone"
    flags: tuple[str, ...] = ()
    cache_mode: str = "full"

    def command(self, site: Site, path: Path, cache: Path) -> list[str]:
        """Return the words that mount it."""
        words = [find_program("rclone"), "mount", f":s3:{site.bucket}", str(path)]
        words += ["--config", "/dev/null", "--cache-dir", str(cache), "--vfs-cache-mode", self.cache_mode]
        if site.ca_path is not None:
            words += ["--ca-cert", site.ca_path]
        return [*words, *self.flags]

    def environment(self, site: Site) -> dict[str, str]:
        """Return its variables."""
        return {
            **site.environment(),
            "RCLONE_S3_PROVIDER": "Other",
            "RCLONE_S3_REGION": "auto",
            "RCLONE_S3_LIST_VERSION": "2",
            "RCLONE_S3_ENDPOINT": site.endpoint_url,
            "RCLONE_S3_ACCESS_KEY_ID": site.access_key,
            "RCLONE_S3_SECRET_ACCESS_KEY": site.secret_key,
        }

    def is_ready(self, log: str) -> bool:
        """Nothing is set up after mounting."""
        return True


@dataclass(frozen=True, slots=True)
class S3fs:
    """s3fs-fuse. options: more for -o, in which {cache} is its cache directory."""

    name: str = "s3fs"
    options: tuple[str, ...] = ("use_cache={cache}", "parallel_count=16", "multireq_max=20")

    def command(self, site: Site, path: Path, cache: Path) -> list[str]:
        """Return the words that mount it."""
        options = [
            f"url={site.endpoint_url}",
            "use_path_request_style",
            "endpoint=auto",
            "sigv4",
            "listobjectsv2",
            *(option.format(cache=cache) for option in self.options),
        ]
        return [find_program("s3fs"), site.bucket, str(path), "-f", "-o", ",".join(options)]

    def environment(self, site: Site) -> dict[str, str]:
        """Return its variables."""
        return {
            **site.environment(),
            "AWSACCESSKEYID": site.access_key,
            "AWSSECRETACCESSKEY": site.secret_key,
        }

    def is_ready(self, log: str) -> bool:
        """Nothing is set up after mounting."""
        return True


FUSECACHE = Fusecache()
RCLONE = Rclone()
RCLONE_TUNED = Rclone(
    "rclone-tuned", ("--vfs-read-chunk-streams", "16", "--vfs-read-chunk-size", "8M", "--no-modtime")
)
S3FS = S3fs()
MOUNTED: tuple[Peer, ...] = (FUSECACHE, RCLONE, RCLONE_TUNED, S3FS)
# The same programs as writers. rclone waits 5 s before an upload; tuned, as long as we do.
FUSECACHE_REMOTE = Fusecache("fusecache-remote", ("--fsync", "remote"))
RCLONE_WRITES = Rclone(cache_mode="writes")
RCLONE_WRITES_TUNED = Rclone(
    "rclone-tuned",
    ("--write-back-cache", "--vfs-write-back", "1s", "--no-modtime", "--transfers", "32",
     "--s3-chunk-size", "64M", "--s3-upload-concurrency", "16"),
    cache_mode="writes",
)  # fmt: skip
S3FS_WRITES = S3fs(options=("tmpdir={cache}",))
S3FS_WRITES_TUNED = S3fs("s3fs-tuned", (*S3FS_WRITES.options, "parallel_count=16", "multireq_max=20"))
WRITERS: tuple[Peer, ...] = (
    FUSECACHE, RCLONE_WRITES, RCLONE_WRITES_TUNED, S3FS_WRITES, S3FS_WRITES_TUNED,
)  # fmt: skip


def find_program(name: str) -> str:
    """Return where a program is: beside this interpreter, or on the path. Raises BenchmarkError."""
    found = shutil.which(name, path=os.pathsep.join((str(SCRIPTS), os.environ.get("PATH", ""))))
    if found is None:
        raise BenchmarkError(f"{name} is not installed")
    return found


def has_option(flag: str) -> bool:
    """Return whether this project's daemon knows an option."""
    return flag in run_command([sys.executable, "-m", "fusecache", "mount", "--help"], seconds=READY_SECONDS)


@dataclass(frozen=True, slots=True)
class Mount:
    """One live mount: its directory, its cache, its process. ready_seconds: from its start until it answered."""

    path: Path
    cache: Path
    pid: int
    memory: MemoryWatch
    ready_seconds: float

    def cpu_seconds(self) -> float:
        """Return the CPU time of its process so far."""
        return cpu_seconds(self.pid)

    def kill(self) -> None:
        """End its process at once, without a chance to write or upload anything more."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(os.getpgid(self.pid), signal.SIGKILL)


@contextmanager
def mounted(peer: Peer, site: Site, directory: Path) -> Iterator[Mount]:
    """Mount a peer with an empty cache below `directory`; leaves nothing behind. Raises BenchmarkError."""
    folder = Path(tempfile.mkdtemp(prefix=f"{peer.name.replace(' ', '-')}-", dir=directory))
    try:
        with mounted_again(peer, site, folder) as mount:
            yield mount
    finally:
        remove_folder(folder)


@contextmanager
def mounted_again(peer: Peer, site: Site, folder: Path) -> Iterator[Mount]:
    """Mount a peer with the cache that an earlier mount left in `folder`, if there was one. Raises BenchmarkError."""
    path, cache, log_path = folder / "mount", folder / CACHE, folder / "log"
    for each in (path, cache):
        each.mkdir(exist_ok=True)
    log_path.unlink(missing_ok=True)
    process = None
    memory = None
    try:
        began = time.monotonic()
        process = start(peer.command(site, path, cache), peer.environment(site), log_path)
        running = process

        def ready() -> bool:
            if running.poll() is not None:
                raise BenchmarkError(f"{peer.name} ended: {_last_words(log_path)}")
            return is_mounted(path) and peer.is_ready(log_path.read_text(errors="replace"))

        if not wait_until(ready, READY_SECONDS):
            raise BenchmarkError(f"{peer.name} was not mounted within {READY_SECONDS:g} s")
        try:
            os.statvfs(path)  # answered by the peer itself
        except OSError as exc:
            raise BenchmarkError(f"{peer.name}: the mount does not answer: {exc.strerror}") from exc
        seconds = time.monotonic() - began
        served_by = serving_process(process.pid)
        if served_by != process.pid:
            _wait_for_standby(process.pid, served_by)
        memory = MemoryWatch(served_by)
        yield Mount(path, cache, served_by, memory, seconds)
    finally:
        if memory is not None:
            memory.stop()
        unmount(path)
        if process is not None:
            end(process)
        unmount(path)


def serving_process(started: int) -> int:
    """Return the process that serves a mount: the one that was started, or the first child of this project's keeper."""
    words = Path(f"/proc/{started}/cmdline").read_bytes().split(b"\0")
    if not any(word.endswith(b"/keeper.py") for word in words):
        return started
    return children(started)[0]


def _wait_for_standby(keeper: int, daemon: int) -> None:
    """Wait until the keeper's next daemon has started: of earlier versions it takes a third of a processor second."""
    if not wait_until(lambda: bool(children(keeper)[1:] or children(daemon)), _STANDBY_SECONDS):
        return
    standby = (children(keeper)[1:] or children(daemon))[0]
    used = -1.0
    while (now := cpu_seconds(standby)) != used:
        used = now
        time.sleep(_STILL_SECONDS)


def _last_words(log_path: Path) -> str:
    lines = log_path.read_text(errors="replace").strip().splitlines()
    return lines[-1][-300:] if lines else "without a word"
