"""A node of the demo: one cache directory, one mount, and trainers that a launcher starts on it.

Real nodes are machines. These share one, and nothing else: each has its own daemon, cache and mountpoint, and
what one of them leaves behind reaches the next through the bucket alone.
"""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from examples.demo.bucket import DemoBucket
from examples.demo.processes import (
    StepError,
    descendants,
    kill_all,
    reap_when_gone,
    run,
    start,
    tail,
    wait_gone,
)

FUSECACHE = [sys.executable, "-m", "fusecache"]
MOUNT_TIMEOUT_SECONDS = 60.0
UNMOUNT_TIMEOUT_SECONDS = 10.0
DRAIN_TIMEOUT_SECONDS = 180.0  # more than any of the demo's uploads takes on a slow line
LOOK_SECONDS = 0.05  # how often a log, a process or the bucket is looked at while waiting


@dataclass(frozen=True, slots=True)
class Counters:
    """What a mount has counted since it began."""

    cache_hits: int
    cache_misses: int
    fetched_bytes: int


class Node:
    """One machine, with the bucket mounted. A context manager that leaves no mount and no process behind."""

    def __init__(self, name: str, bucket: DemoBucket, folder: Path) -> None:
        """folder: new and on a local disk; it holds this node's cache, mountpoint and logs."""
        self.name = name
        self.mountpoint = folder / "mount"
        self._bucket = bucket
        self._folder = folder
        self._cache = folder / "cache"
        self._environment = {
            name: value for name, value in os.environ.items() if not name.startswith("FUSECACHE_")
        } | {"FUSECACHE_KEEP_MOUNTED": "no"}  # a machine that is lost has no keeper, either
        self._daemon: set[int] = set()
        self._socket: Path | None = None  # the daemon's, outside the node's folder

    def __enter__(self) -> Self:
        """Mount; returns when the mount answers."""
        self._cache.mkdir(parents=True)
        self.mountpoint.mkdir()
        before = descendants()
        command = [*FUSECACHE, "mount", self._bucket.url, str(self.mountpoint)]
        command += ["--cache-dir", str(self._cache), "--cache-size", "2GiB"]
        if self._bucket.endpoint_url is not None:
            command += ["--endpoint-url", self._bucket.endpoint_url]
        try:
            run(command, self._environment, MOUNT_TIMEOUT_SECONDS)
        except BaseException:
            self._daemon = descendants() - before
            self.kill()
            raise
        self._daemon = descendants() - before
        reap_when_gone(self._daemon)
        self._socket = Path((self.mountpoint / ".fusecache" / "socket").read_text().strip())
        return self

    def __exit__(self, *_: object) -> None:
        """Take down what is still there, at once: a node that is to end well was unmounted before."""
        self.kill()

    def sync(self, folder: str) -> None:
        """Wait until everything below `folder` of the mount is in the bucket."""
        run([*FUSECACHE, "sync", str(self.mountpoint / folder)], self._environment, DRAIN_TIMEOUT_SECONDS)

    def unmount(self) -> None:
        """Unmount in peace: what was closed goes to the bucket first."""
        run([*FUSECACHE, "unmount", str(self.mountpoint)], self._environment, DRAIN_TIMEOUT_SECONDS)
        left = wait_gone(self._daemon, 10.0)
        if left or mounts_below(self._folder):
            raise StepError(f"node {self.name}: the daemon or its mount outlived `fusecache unmount`")

    def kill(self) -> None:
        """Kill the daemon as a lost machine would: SIGKILL, nothing uploaded, its disk gone."""
        kill_all(self._daemon & descendants())
        wait_gone(self._daemon, 10.0)
        unmount_below(self._folder)
        if self._socket is not None:
            self._socket.unlink(missing_ok=True)
        with contextlib.suppress(FileNotFoundError):
            shutil.copy(self._cache / "fusecache.log", self._folder / "daemon.log")
        shutil.rmtree(self._cache, ignore_errors=True)

    def counters(self) -> Counters:
        """Return what the mount has counted so far."""
        text = (self.mountpoint / ".fusecache" / "stats.json").read_text()
        return parse_counters(json.loads(text))

    def trainers(self, ranks: int, log_folder: Path, options: list[str]) -> "Trainers":
        """Start `ranks` trainers on this node; `options` go to every one of them."""
        command = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={ranks}"]
        # a rendezvous on a free port of this machine; the host's own name may not resolve
        command += ["--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0", "--local-addr=127.0.0.1"]
        command += ["-m", "examples.demo.train", f"--phase={self.name}", f"--log-dir={log_folder}"]
        command += [f"--data={self.mountpoint / 'dataset'}"]
        command += [f"--checkpoints={self.mountpoint / 'checkpoints'}", *options]
        environment = self._environment | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        output = self._folder / "trainers.log"
        rank_logs = [log_folder / f"{self.name}-rank{rank}.jsonl" for rank in range(ranks)]
        return Trainers(start(command, output, environment), output, rank_logs)


class Trainers:
    """The trainers of one node: a launcher and its workers. A context manager that ends what still runs."""

    def __init__(self, launcher: subprocess.Popen[bytes], output: Path, rank_logs: list[Path]) -> None:
        """output: what they print; rank_logs: their step logs, rank 0 first."""
        self._launcher = launcher
        self._output = output
        self._rank_logs = rank_logs

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: TracebackType | BaseException | None) -> None:
        self.kill()

    def follow(self, timeout_seconds: float) -> Iterator[dict[str, Any]]:
        """Yield the events of rank 0 as they are written, until the launcher ends.

        Raises StepError if `timeout_seconds` pass without an event: a hang is an error, not a wait.
        """
        position = 0
        heard = time.monotonic()
        while True:
            ended = self._launcher.poll() is not None  # before the log is read: nothing is missed
            with contextlib.suppress(FileNotFoundError), self._rank_logs[0].open("rb") as log:
                log.seek(position)
                for line in log:
                    if not line.endswith(b"\n"):
                        break  # still being written
                    position += len(line)
                    heard = time.monotonic()
                    yield json.loads(line)
            if ended:
                return
            if time.monotonic() - heard > timeout_seconds:
                raise StepError(f"no step within {timeout_seconds:.0f} s\n{self._last_words()}")
            time.sleep(LOOK_SECONDS)

    def wait(self, timeout_seconds: float) -> None:
        """Wait for the end; raises StepError unless all trainers ended well."""
        try:
            status = self._launcher.wait(timeout_seconds)
        except subprocess.TimeoutExpired as exc:
            raise StepError(
                f"trainers still run after {timeout_seconds:.0f} s\n{self._last_words()}"
            ) from exc
        if status != 0:
            raise StepError(f"trainers ended with status {status}\n{self._last_words()}")

    def terminate(self) -> None:
        """Give notice: SIGTERM to the workers, which save a checkpoint and end."""
        # not to the launcher: it would count that as a failure
        kill_all(descendants(self._launcher.pid), signal.SIGTERM)

    def kill(self) -> None:
        """Kill launcher and workers with SIGKILL, all at once."""
        pids = (
            {self._launcher.pid, *descendants(self._launcher.pid)} if self._launcher.poll() is None else set()
        )
        kill_all(pids)
        self._launcher.wait()
        left = wait_gone(pids, 10.0)
        if left:
            raise StepError(f"trainers outlived SIGKILL: {sorted(left)}")

    def _last_words(self) -> str:
        return tail(self._output.read_bytes())


def wait_until(what: str, condition: Callable[[], bool], timeout_seconds: float) -> float:
    """Wait until `condition()` holds; return the seconds. Raises StepError after `timeout_seconds`."""
    began = time.monotonic()
    while not condition():
        if time.monotonic() - began > timeout_seconds:
            raise StepError(f"not within {timeout_seconds:.0f} s: {what}")
        time.sleep(LOOK_SECONDS)
    return time.monotonic() - began


def mounts_below(folder: Path) -> list[str]:
    """Return the mountpoints below `folder`, dead ones too, where stat(2) would fail."""
    lines = Path("/proc/self/mountinfo").read_text().splitlines()
    # blanks and backslashes are written in octal there, proc(5)
    found = [line.split()[4].replace("\\040", " ").replace("\\134", "\\") for line in lines]
    return [path for path in found if Path(path).is_relative_to(folder.resolve())]


def unmount_below(folder: Path) -> None:
    """Take every mount below `folder` out of the tree, lazily: its daemon may be dead."""
    tool = ["fusermount3", "-u", "-z"] if shutil.which("fusermount3") else ["umount", "-l"]
    for path in mounts_below(folder):
        run([*tool, path], os.environ, UNMOUNT_TIMEOUT_SECONDS)


def parse_counters(statistics: dict[str, Any]) -> Counters:
    """Return the demo's counters out of `stats.json`."""
    cache = statistics["cache"]
    fetched_bytes = sum(cache["bytes_by_cause"].values())  # by readers, by read-ahead, by hints
    return Counters(cache_hits=cache["hits"], cache_misses=cache["misses"], fetched_bytes=fetched_bytes)
