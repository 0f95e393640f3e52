"""A daemon with few file descriptors: what was closed reaches the bucket, and commands are answered."""

import json
import os
import resource
import signal
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from tests.s3server import ServerProcess
from tests.support.daemons import Daemon

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


def test_the_limit_of_open_files_is_raised(make_daemon: Callable[..., Daemon]) -> None:
    """The daemon raises its soft limit to the hard one."""
    daemon = make_daemon()
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    daemon.program = ["prlimit", f"--nofile=512:{hard}", *daemon.program]
    daemon.mount()
    pid = json.loads(daemon.command("status", daemon.path, "--json").stdout)["pid"]
    assert resource.prlimit(pid, resource.RLIMIT_NOFILE) == (hard, hard)
    assert Path(f"/proc/{pid}").exists()
