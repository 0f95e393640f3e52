"""Mounts made by the real command line, and what tests ask of them."""

import errno
import os
import re
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from fusecache.mount.control_client import ask, find_mount
from fusecache.mount.launch import READY
from tests.support.s3_buckets import Bucket
from tests.support.starter import FUSECACHE, can_fork, run_forked, start_forked

SYNC_SECONDS = 60.0
COMMAND_SECONDS = 60.0
UNMOUNT_SECONDS = 60.0
# What a line of the daemon's log looks like when a person should look; a traceback has no level.
ALARM = re.compile(r"^\S+ \S+ (WARNING|ERROR|CRITICAL) |^Traceback")
# Depends on the machine, not on the daemon.
HARMLESS = re.compile(
    r"kernel settings refused|the cache directory \S+ is (in memory|on a network)"
    r"|cache disk is slower than the bucket"
    # R2 takes one write of a key a second: files that are written again sooner meet that on a slow machine.
    r"|TooManyRequests \(429\): Reduce your concurrent request rate for the same object"
)
_POLL_SECONDS = 0.02


def wait_until(condition: Callable[[], Any], what: str, seconds: float = 30.0) -> Any:
    """Return the condition's value once it is true. Fails the test after `seconds`."""
    deadline = time.monotonic() + seconds
    while True:
        value = condition()
        if value:
            return value
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {seconds:g} s: {what}")
        time.sleep(_POLL_SECONDS)


def run(
    *command: str | Path, check: bool = True, seconds: float = COMMAND_SECONDS, **more: Any
) -> "subprocess.CompletedProcess[str]":
    """Run a program; fails the test with its words if it fails and `check` is set."""
    words = [str(word) for word in command]
    environment = more.get("env") or os.environ
    if more.keys() <= {"env", "cwd"} and can_fork(command, environment):
        done = run_forked(command, environment, seconds, more.get("cwd", ""))
    else:
        done = subprocess.run(
            words,
            check=False,
            text=True,
            timeout=seconds,
            **{"stdin": subprocess.DEVNULL, "capture_output": True, **more},
        )
    assert not check or done.returncode == 0, (
        f"{words} ended with {done.returncode}:\n{done.stdout}{done.stderr}"
    )
    return done


def run_python(program: str, *arguments: str | Path, **more: Any) -> "subprocess.CompletedProcess[str]":
    """Run a program text in an interpreter of its own."""
    return run(sys.executable, "-c", program, *arguments, **more)


def refusal(call: Callable[[], object]) -> int | None:
    """Return the errno with which a call fails; None if it succeeds."""
    try:
        call()
    except OSError as exc:
        return exc.errno
    return None


def mounted_at(path: Path) -> bool:
    """Return whether anything is mounted there; never asks the mount itself."""
    return f" {path} " in Path("/proc/self/mountinfo").read_text()


def open_to_other_users(path: Path) -> None:
    """Let other users pass through pytest's own folders to `path`; pytest closes them whenever a run begins."""
    for folder in path.parents:
        if any(part.startswith("pytest-of-") for part in folder.parts):
            folder.chmod(folder.stat().st_mode | 0o011)


def is_running(pid: int) -> bool:
    """Return whether a process is there and has not ended: its first thread may, and others still hold its files."""
    try:
        threads = os.listdir(f"/proc/{pid}/task")
    except (FileNotFoundError, ProcessLookupError):
        return False
    for thread in threads:
        with suppress(FileNotFoundError, ProcessLookupError):
            stat = Path(f"/proc/{pid}/task/{thread}/stat").read_text()
            if stat[stat.rindex(")") + 2] not in "ZX":
                return True
    return False


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def parent_of(pid: int) -> int:
    """Return the process that started another."""
    stat = Path(f"/proc/{pid}/stat").read_text()
    return int(stat[stat.rindex(")") + 2 :].split()[1])


# Whether the mounts of this run are pyfuse3's.
ON_PYFUSE3 = "pyfuse3" in {
    os.environ.get("FUSECACHE_FUSE_LIBRARY"),
    os.environ.get("FUSECACHE_TEST_FUSE_LIBRARY"),
}
NEEDS_OWN_SESSION = pytest.mark.skipif(
    ON_PYFUSE3,
    reason="pyfuse3 tells neither of signals nor why mounting failed, and its mount ends with the daemon",
)


class Mount:
    """One mount: its directory `path`, its daemon, its cache directory and log."""

    def __init__(self, bucket: Bucket, path: Path, cache: Path) -> None:
        self.bucket = bucket
        self.path = path
        self.cache = cache
        self.log_path = cache / "fusecache.log"
        self.pid = 0
        self._read_to = 0

    def command(self, *flags: str) -> list[str | Path]:
        """Return the words of the command line that mounts it. Without a source, the flags say what is mounted."""
        source, url = self.bucket.source, self.bucket.service.endpoint_url
        words = [FUSECACHE, "mount", *([source] if source else []), self.path, "--cache-dir", self.cache]
        return [*words, *(["--endpoint-url", url] if source else []), *flags]

    def start(self, *flags: str) -> str:
        """Mount; returns when it answers, with what it said.

        The daemon is started as the command does it, without the command: hundreds of tests mount.
        """
        self._read_to = self.log_path.stat().st_size if self.log_path.exists() else 0
        self.cache.mkdir(mode=0o700, exist_ok=True)
        command, mount, *words = self.command(*flags)
        reader, writer = os.pipe()
        environment = self.bucket.service.environment()
        with open(reader) as told, open(self.log_path, "ab", opener=_private) as log:
            foreground = [command, mount, "--foreground", "--ready-fd", str(writer), *words]
            try:
                if can_fork(foreground, environment):
                    start_forked(
                        foreground, environment, stdout=log.fileno(), stderr=log.fileno(), pass_fds=[writer]
                    ).leave()
                else:
                    run(
                        *("setsid", "--fork", *foreground),
                        capture_output=False,
                        stdout=log,
                        stderr=log,
                        pass_fds=[writer],
                        env=environment,
                    )
            finally:
                os.close(writer)
            assert select.select([told], [], [], COMMAND_SECONDS)[0], f"no answer:\n{self.log()[-3000:]}"
            said = told.readline().strip()
        assert said.split(" ")[0] == READY, f"{said}\n{self.log()[-3000:]}"
        self.pid = self.status()["pid"]
        return said.removeprefix(READY).strip()

    def status(self, path: str = "") -> dict[str, Any]:
        """Return what the daemon says of itself, or of one path."""
        mount, _ = find_mount(self.path, os.environ)
        return ask(mount, "status", path).status

    def sync(self, path: str = "") -> None:
        """Return when the bucket has what was closed at or below `path`."""
        mount, _ = find_mount(self.path, os.environ)
        answer = ask(mount, "sync", path, timeout_seconds=SYNC_SECONDS)
        assert answer.result == "durable", f"{answer.result}: {answer.message}; log:\n{self.log()}"

    def read_by_daemon(self) -> int:
        """Return how many bytes the daemon has answered reads with."""
        return sum(self.status()["cache"]["bytes_from"].values())

    def cache_file(self, size: int) -> Path:
        """Return the only cache file for an object of `size` bytes. The cache pads its files to whole pages."""
        files = (self.cache / "cache" / "files").glob("??/*")
        (found,) = [path for path in files if 0 <= path.stat().st_size - size < 4096]
        return found

    def is_alive(self) -> bool:
        """Return whether the daemon's process is there; one that only waits to be collected is not."""
        return self.pid != 0 and is_running(self.pid)

    def helpers(self, module: ModuleType) -> list[int]:
        """Return the processes that the daemon has started for a module, and that run."""
        found: list[int] = []
        children: list[str] = []
        with suppress(OSError):  # the daemon has ended
            for task in os.listdir(f"/proc/{self.pid}/task"):
                with suppress(OSError):  # the thread has ended
                    children += Path(f"/proc/{self.pid}/task/{task}/children").read_text().split()
        for child in children:
            with suppress(OSError):  # it has ended
                if module.__name__.encode() in Path(f"/proc/{child}/cmdline").read_bytes().split(b"\0"):
                    found.append(int(child))
        return found

    def keeper(self) -> int:
        """Return the process that holds a mount with `--keep-mounted`."""
        return parent_of(self.pid)

    def standby(self) -> int:
        """Return the process that waits to be the next daemon, once there is one."""
        daemon = Path(f"/proc/{self.pid}/cmdline").read_bytes()

        def found() -> list[int]:
            children = (Path(f"/proc/{pid}/task/{pid}/children") for pid in (self.keeper(), self.pid))
            others = {int(word) for each in children for word in each.read_text().split()} - {self.pid}
            return [pid for pid in others if Path(f"/proc/{pid}/cmdline").read_bytes() == daemon]

        return int(wait_until(found, "the standby")[0])

    def log(self) -> str:
        """Return the daemon's log since this mount was started."""
        if not self.log_path.exists():
            return ""
        with open(self.log_path, encoding="utf-8", errors="replace") as file:
            return file.read()

    def new_alarms(self) -> list[str]:
        """Return the lines of the log, since the last call, that a person should look at."""
        if not self.log_path.exists():
            return []
        with open(self.log_path, encoding="utf-8", errors="replace") as file:
            file.seek(self._read_to)
            text = file.read()
            self._read_to = file.tell()
        lines = text.splitlines()
        return [
            "\n".join(lines[index : index + 30]) if line.startswith("Traceback") else line
            for index, line in enumerate(lines)
            if ALARM.search(line) and not HARMLESS.search(line)
        ]

    def unmount(self, *flags: str) -> str:
        """Upload what is left, unmount, and see the daemon end; return what the command said."""
        done = run(FUSECACHE, "unmount", self.path, *flags)
        wait_until(lambda: not self.is_alive(), f"the end of daemon {self.pid}")
        assert not mounted_at(self.path)
        self.pid = 0
        return done.stderr

    def stop(self) -> None:
        """Stop the daemon: it reads no request until it is continued, or killed."""
        os.kill(self.pid, signal.SIGSTOP)

    def kill(self) -> None:
        """End the daemon with SIGKILL, and clear the dead mount away."""
        os.kill(self.pid, 9)
        wait_until(lambda: not self.is_alive(), f"the end of daemon {self.pid}")
        self.pid = 0
        self.detach()

    def detach(self) -> None:
        """Take the mount away, whatever state it is in."""
        if mounted_at(self.path):
            run("fusermount3", "-u", "-z", self.path)

    def remove(self) -> list[str]:
        """End it for good, whatever state it is in; return what went wrong on the way."""
        wrong = []
        if self.is_alive():
            with suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGTERM)
            deadline = time.monotonic() + UNMOUNT_SECONDS
            while self.is_alive() and time.monotonic() < deadline:
                time.sleep(_POLL_SECONDS)
        self.detach()
        if self.is_alive():
            wrong.append(f"daemon {self.pid} was left; log:\n{self.log()[-3000:]}")
            os.kill(self.pid, 9)
            wait_until(lambda: not self.is_alive(), f"the end of daemon {self.pid}")
        self.pid = 0
        return wrong


class BucketMounts:
    """The mounts of several buckets, made by one command, in the folder `path`; `of` has each by its name."""

    def __init__(self, path: Path, cache: Path) -> None:
        self.path = path
        self.cache = cache
        self.of: dict[str, Mount] = {}

    def start(self, bucket: Bucket, *words: str) -> str:
        """Mount them; return what the command said. words: of the command line, after those of the suite."""
        command = [FUSECACHE, "mount", *words, "--cache-dir", self.cache, self.path]
        said = run(*command, env=bucket.service.environment()).stderr
        for name in sorted(os.listdir(self.path)):
            mount = self.of.setdefault(name, Mount(bucket, self.path / name, self.cache / name))
            mount.pid = mount.status()["pid"]
        return said

    def sync(self, name: str = "") -> None:
        """Return when the buckets, or the one of this name, have what was closed."""
        for each in self.of if not name else [name]:
            self.of[each].sync()

    def log(self) -> str:
        """Return the logs of all daemons."""
        return "".join(each.log() for each in self.of.values())

    def unmount(self, *flags: str) -> str:
        """Upload what is left, unmount all, and see the daemons end; return what the command said."""
        done = run(FUSECACHE, "unmount", self.path, *flags)
        for each in self.of.values():
            wait_until(lambda each=each: not each.is_alive(), f"the end of daemon {each.pid}")  # type: ignore[misc]
            assert not mounted_at(each.path)
            each.pid = 0
        return done.stderr


def read_newest(path: Path) -> bytes | None:
    """Return a file's bytes; None if it is not there, or was replaced in the bucket since it was last looked at."""
    try:
        return path.read_bytes()
    except OSError as exc:
        if exc.errno in (errno.ESTALE, errno.ENOENT):
            return None
        raise


def tree_of(root: Path) -> dict[str, bytes | str | None]:
    """Return everything below `root`: bytes of files, targets of symlinks, None for directories."""
    found: dict[str, bytes | str | None] = {}
    for folder, folders, files in os.walk(root):
        for name in [*folders, *files]:
            path = Path(folder) / name
            place = path.relative_to(root).as_posix()
            if path.is_symlink():
                found[place] = os.readlink(path)
            else:
                found[place] = None if path.is_dir() else path.read_bytes()
    return found


def pattern(size: int, seed: int = 1) -> bytes:
    """Return `size` bytes in which every place differs from its neighbours, the same for the same seed."""
    import numpy

    return numpy.random.Generator(numpy.random.PCG64(seed)).bytes(size)


def remove_all(paths: Sequence[Path]) -> None:
    """Remove directories that no mount uses any more."""
    for path in paths:
        shutil.rmtree(path, ignore_errors=True)
