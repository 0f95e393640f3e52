"""The own FUSE session against pyfuse3: both serve the same empty file system, in turns, in one run.

`python -m benchmarks.session` prints a table of ratios, own to pyfuse3: medians over rounds. Idle: the daemon has
nothing else to do. Busy: a thread of it wants the interpreter's lock half of the time, as the engine's threads do. Exit
status 1 if a bar was missed.
"""

import argparse
import contextlib
import errno
import json
import os
import signal
import stat
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import trio

from benchmarks.session_client import CASES, FILE_BYTES, MIB
from fusecache.config.node_limits import request_memory
from fusecache.daemon.main import SWITCH_INTERVAL_SECONDS
from fusecache.fs.kernel import tune
from fusecache.fuse.handlers import RequestHandlers
from fusecache.fuse.library import open_session
from fusecache.fuse.values import (
    EntryAttributes,
    FileInfo,
    FUSEError,
    MountPlan,
    RequestContext,
    SetattrFields,
    StatvfsData,
)

FILE_INODE = 2
LIBRARIES = ("own", "pyfuse3")
# The least ratios, idle and busy.
BARS = {"stat": (1.0, 1.5), "open and close": (1.0, 1.5), "random 4 KiB, 4 processes": (1.0, 1.5)}
# The thread that wants the lock computes this long, and then sleeps as long.
BUSY_SECONDS = 0.005


class EmptyFile(RequestHandlers):
    """One file, `data`: its bytes come from memory, what is written is thrown away, its attributes are never cached."""

    enable_writeback_cache = True

    def __init__(self) -> None:
        self._memory = memoryview(os.urandom(MIB))

    async def getattr(self, inode: int, ctx: RequestContext | None = None) -> EntryAttributes:
        """Return the root's or the file's attributes."""
        entry = EntryAttributes()
        entry.st_ino = inode
        entry.st_mode = (stat.S_IFREG | 0o644) if inode == FILE_INODE else (stat.S_IFDIR | 0o755)
        entry.st_size = FILE_BYTES if inode == FILE_INODE else 0
        entry.attr_timeout = 0
        return entry

    async def setattr(
        self, inode: int, attr: EntryAttributes, fields: SetattrFields, fh: int | None, ctx: RequestContext
    ) -> EntryAttributes:
        """Change nothing."""
        return await self.getattr(inode)

    async def lookup(self, parent_inode: int, name: bytes, ctx: RequestContext) -> EntryAttributes:
        """Find the file."""
        if name != b"data":
            raise FUSEError(errno.ENOENT)
        return await self.getattr(FILE_INODE)

    async def open(self, inode: int, flags: int, ctx: RequestContext) -> FileInfo:
        """Open the file."""
        return FileInfo(fh=inode, keep_cache=True)

    async def read(self, fh: int, off: int, size: int) -> memoryview:
        """Return bytes of the memory."""
        return self._memory[:size]

    async def write(self, fh: int, off: int, buf: bytes) -> int:
        """Throw the bytes away."""
        return len(buf)

    async def flush(self, fh: int) -> None:
        """Nothing is kept."""

    async def release(self, fh: int) -> None:
        """Nothing is held open."""

    async def statfs(self, ctx: RequestContext) -> StatvfsData:
        """Return zeros."""
        return StatvfsData()


# ---- the daemon


def serve(library: str, mountpoint: str, border: int) -> None:
    """Serve until unmounted. SIGUSR1 turns the busy thread on, SIGUSR2 off. border: 0 for the library's own."""
    if border:
        from fusecache.fuse import device, session

        device.RELEASE_BYTES = session.RELEASE_BYTES = border  # type: ignore[attr-defined]
    sys.setswitchinterval(SWITCH_INTERVAL_SECONDS)
    is_busy = threading.Event()
    signal.signal(signal.SIGUSR1, lambda *_: is_busy.set())
    signal.signal(signal.SIGUSR2, lambda *_: is_busy.clear())
    threading.Thread(target=_want_the_lock, args=(is_busy,), daemon=True).start()
    session_of_mount = open_session(EmptyFile(), MountPlan(mountpoint, "empty", "empty"), library)

    async def run() -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(session_of_mount.serve)
            await trio.to_thread.run_sync(os.stat, mountpoint)
            await trio.to_thread.run_sync(tune, mountpoint, request_memory())
            sys.stdout.write("ready\n")
            sys.stdout.flush()

    try:
        trio.run(run)
    finally:
        session_of_mount.close()


def _want_the_lock(is_busy: threading.Event) -> None:
    while is_busy.wait():
        end = time.perf_counter() + BUSY_SECONDS
        while time.perf_counter() < end:
            pass
        time.sleep(BUSY_SECONDS)


class Daemon:
    """One daemon and its mount."""

    def __init__(self, library: str, folder: Path, border: int = 0) -> None:
        self.library = library
        self.mountpoint = folder / f"{library}-{border}"
        self.mountpoint.mkdir()
        words = [
            sys.executable,
            "-m",
            "benchmarks.session",
            "--serve",
            library,
            str(self.mountpoint),
            str(border),
        ]
        self._process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        if self._process.stdout.readline() != "ready\n":
            raise RuntimeError(f"{library}: the daemon did not start")

    def be_busy(self, *, is_busy: bool) -> None:
        """Turn the thread that wants the lock on or off."""
        self._process.send_signal(signal.SIGUSR1 if is_busy else signal.SIGUSR2)
        time.sleep(2 * BUSY_SECONDS)

    def cpu_seconds(self) -> float:
        """Return the processor time of the daemon so far; coarse: ticks of 10 ms."""
        fields = Path(f"/proc/{self._process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def close(self) -> None:
        """Unmount, and see it end."""
        subprocess.run(["fusermount3", "-u", "-z", self.mountpoint], check=True)
        self._process.wait(20)
        assert self._process.stdout is not None
        self._process.stdout.close()


# ---- the comparison


def _rate(case: str, daemon: Daemon, seconds: float) -> tuple[float, float]:
    """Return operations a second of a case, and the daemon's microseconds of processor for each."""
    words = [
        sys.executable,
        "-m",
        "benchmarks.session_client",
        case,
        f"{daemon.mountpoint}/data",
        str(seconds),
    ]
    used = daemon.cpu_seconds()
    clients = [subprocess.Popen(words, stdout=subprocess.PIPE, text=True) for _ in range(CASES[case][1])]
    count = sum(int(client.communicate()[0]) for client in clients)
    return count / seconds, (daemon.cpu_seconds() - used) / count * 1e6


@contextlib.contextmanager
def _daemons(variants: list[tuple[str, int]]) -> Iterator[list[Daemon]]:
    with tempfile.TemporaryDirectory() as folder:
        daemons = [Daemon(library, Path(folder), border) for library, border in variants]
        try:
            yield daemons
        finally:
            for daemon in daemons:
                daemon.close()


def compare(rounds: int, seconds: float, cases: list[str]) -> dict[str, dict[str, float]]:
    """Return for each case, idle and busy: the ratio own / pyfuse3 and its bar [0], rates, processor microseconds."""
    found: dict[str, dict[str, float]] = {}
    with _daemons([(library, 0) for library in LIBRARIES]) as daemons:
        for case in cases:
            for is_busy in (False, True):
                samples: dict[str, list[tuple[float, float]]] = {library: [] for library in LIBRARIES}
                for number in range(rounds):
                    for daemon in daemons if number % 2 else reversed(daemons):
                        daemon.be_busy(is_busy=is_busy)
                        samples[daemon.library].append(_rate(case, daemon, seconds))
                        daemon.be_busy(is_busy=False)
                own, other = (samples[library] for library in LIBRARIES)
                found[f"{case}, {'busy' if is_busy else 'idle'}"] = {
                    "ratio": statistics.median(a / b for (a, _), (b, _) in zip(own, other, strict=True)),
                    "bar": BARS.get(case, (0.0, 0.0))[is_busy],
                    "own": statistics.median(rate for rate, _ in own),
                    "pyfuse3": statistics.median(rate for rate, _ in other),
                    "own_us": statistics.median(cost for _, cost in own),
                    "pyfuse3_us": statistics.median(cost for _, cost in other),
                }
    return found


def _table(found: dict[str, dict[str, float]]) -> str:
    rows = [
        "| case | own / pyfuse3 | bar | own a second | pyfuse3 a second | CPU µs of own | of pyfuse3 |",
        "|---|---|---|---|---|---|---|",
    ]
    rows += [
        f"| {case} | {row['ratio']:.2f} | {row['bar'] or '-'} | {row['own']:.0f} | {row['pyfuse3']:.0f} "
        f"| {row['own_us']:.0f} | {row['pyfuse3_us']:.0f} |"
        for case, row in found.items()
    ]
    return "\n".join(rows)


def main() -> None:
    """Parse the words, and run one part."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.session", description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=0.7, help="of each case, library and round")
    parser.add_argument("--cases", nargs="*", default=list(CASES), choices=list(CASES))
    parser.add_argument("--json", type=Path, help="write the figures here, too")
    parser.add_argument("--serve", nargs=3, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve:
        library, mountpoint, border = arguments.serve
        serve(library, mountpoint, int(border))
    else:
        found = compare(arguments.rounds, arguments.seconds, arguments.cases)
        sys.stdout.write(_table(found) + "\n")
        if arguments.json:
            arguments.json.write_text(json.dumps(found, indent=1) + "\n")
        if any(row["ratio"] < row["bar"] for row in found.values()):
            sys.exit(1)


if __name__ == "__main__":
    main()
