"""A daemon with few file descriptors: what was closed reaches the bucket, and commands are answered."""

import json
import mmap
import os
import resource
import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest

from tests.s3server import ServerProcess
from tests.support.daemons import MIB, Daemon, some_bytes

LIMIT = 256
# The test holds as many open itself, and a login shell allows it 1 024.
FILES = 800


@pytest.fixture
def small_limit(make_daemon: Callable[..., Daemon]) -> Daemon:
    """A mounted daemon that may have LIMIT descriptors."""
    daemon = make_daemon()
    daemon.program = ["prlimit", f"--nofile={LIMIT}:{LIMIT}", *daemon.program]
    daemon.mount()
    return daemon


def test_more_files_than_descriptors_are_written(server: ServerProcess, small_limit: Daemon) -> None:
    """More files are open for writing than the daemon has descriptors; each close that gave 0 reaches the bucket."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 4 * FILES), hard))
    opened: list[int] = []
    closed = []
    try:
        for number in range(FILES):
            with suppress(OSError):
                opened.append(os.open(small_limit.path / f"file-{number:04}", os.O_WRONLY | os.O_CREAT))
                os.write(opened[-1], b"%d" % number)
        status = small_limit.command("status", small_limit.path, "--json")
        assert json.loads(status.stdout)["dirty_files"] > 0
        assert len(opened) == FILES
        while opened:
            number = len(opened) - 1
            with suppress(OSError):
                os.close(opened.pop())
                closed.append(f"file-{number:04}")
    finally:
        for descriptor in opened:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert len(closed) == FILES
    assert small_limit.sync() == 0
    objects = server.control.objects()
    assert sorted(objects) == sorted(closed)
    assert all(server.control.read(name) == b"%d" % int(name[5:]) for name in closed[::50])
    small_limit.signal(signal.SIGTERM)
    assert small_limit.wait() == 0


# A mount needs 21 when idle; a burst of reads wants a connection for each GET, up to 64.
VERY_FEW = 48
PIECE_BYTES = 64 * 1024


@pytest.mark.parametrize("movers", ["0", "2"], ids=["alone", "movers"])
def test_commands_are_answered_after_a_burst_of_reads_has_used_all_descriptors(
    server: ServerProcess, make_daemon: Callable[..., Daemon], movers: str
) -> None:
    data = some_bytes(48 * MIB, 1)
    names = [f"file-{number}" for number in range(8)]
    for name in names:
        server.control.put(name, data)
    daemon = make_daemon("--memory", "512MiB", "--movers", movers)
    daemon.program = ["prlimit", f"--nofile={VERY_FEW}:{VERY_FEW}", *daemon.program]
    daemon.mount()
    server.control.set(latency=0.5)

    def read(number: int) -> bool:
        descriptor = os.open(daemon.path / names[number % 8], os.O_RDONLY | os.O_DIRECT)
        try:
            with mmap.mmap(-1, PIECE_BYTES) as buffer:
                places = [(7 * number + 11 * step) % 48 * MIB for step in range(6)]
                return all(
                    os.preadv(descriptor, [buffer], place) == PIECE_BYTES
                    and buffer[:] == data[place : place + PIECE_BYTES]
                    for place in places
                )
        finally:
            os.close(descriptor)

    for _ in range(2):
        with ThreadPoolExecutor(64) as threads:
            assert all(threads.map(read, range(64)))
        done = daemon.command("evict", *(daemon.path / name for name in names), seconds=20)
        assert done.returncode == 0, done.stderr
    server.control.set(latency=0.0)
    assert read(0)


def test_the_limit_of_open_files_is_raised(make_daemon: Callable[..., Daemon]) -> None:
    """The daemon raises its soft limit to the hard one."""
    daemon = make_daemon()
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    daemon.program = ["prlimit", f"--nofile=512:{hard}", *daemon.program]
    daemon.mount()
    pid = json.loads(daemon.command("status", daemon.path, "--json").stdout)["pid"]
    assert resource.prlimit(pid, resource.RLIMIT_NOFILE) == (hard, hard)
    assert Path(f"/proc/{pid}").exists()
