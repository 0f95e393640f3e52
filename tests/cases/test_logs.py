"""Logs on a real mount: held open, or reopened for each line. The daemon's intervals are seconds here, not minutes."""

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from tests.crash.test_kill import shows
from tests.s3server import ServerProcess
from tests.support.daemons import Daemon
from tests.support.mounts import wait_until

# An open file is published after 1 s instead of 60, one that is rewritten all the time after 2 s instead of 10.
HURRIED = (
    "import sys; from fusecache.engine.write import snapshots;"
    "from fusecache.engine.writeback import placement;"
    "snapshots.snapshot_interval = lambda seconds, last_upload: seconds / 60; placement._REWRITE_SECONDS = 2.0;"
    "from fusecache.cli.main import main; sys.exit(main())"
)
LINES = 60
SYNCED_LINES = 3
PAUSE_SECONDS = 0.1
PUTS_APART_SECONDS = 1.1
LINE = "line {}\n"


@pytest.fixture
def hurried(make_daemon: Callable[..., Daemon]) -> Daemon:
    daemon = make_daemon()
    daemon.program = [sys.executable, "-c", HURRIED]
    daemon.mount()
    return daemon


def lines_in_time() -> Iterator[str]:
    for number in range(LINES):
        yield LINE.format(number)
        threading.Event().wait(PAUSE_SECONDS)


def assert_published_at_intervals(server: ServerProcess, began: float) -> None:
    """Every version was whole lines from the first on; not one more than a key bears."""
    sent = len(server.control.log("PutObject", "log"))
    finished = server.control.wait_requests(sent, "PutObject", "log")  # only then their bytes are counted
    puts = [entry for entry in finished if entry.status == 200]
    assert 2 <= len(puts) <= (time.monotonic() - began) / PUTS_APART_SECONDS + 1
    ends, size = {0}, 0
    for number in range(LINES):
        size += len(LINE.format(number))
        ends.add(size)
    sizes = [entry.bytes_in for entry in puts]
    assert set(sizes) <= ends
    assert sizes == sorted(sizes)


@pytest.mark.case(18)
def test_a_log_that_is_reopened_for_each_line_is_published_now_and_then_and_whole_in_the_end(
    server: ServerProcess, hurried: Daemon
):
    began = time.monotonic()
    for line in lines_in_time():
        with (hurried.path / "log").open("a") as log:
            log.write(line)
    assert hurried.sync() == 0
    assert shows(server) == {"log": "".join(LINE.format(number) for number in range(LINES)).encode()}
    assert_published_at_intervals(server, began)


@pytest.mark.case(53)
def test_a_log_that_is_held_open_is_published_as_it_is_and_whole_in_the_end(
    server: ServerProcess, hurried: Daemon
):
    """The kernel keeps lines to itself for half a minute before it writes them back, unless somebody says fsync."""
    began = time.monotonic()
    with (hurried.path / "log").open("a", buffering=1) as log:
        for number, line in enumerate(lines_in_time()):
            log.write(line)
            if number % SYNCED_LINES == 0:
                os.fdatasync(log.fileno())
        wait_until(
            lambda: shows(server).get("log", b"").startswith(LINE.format(0).encode()), "the open log's lines"
        )
    assert hurried.sync() == 0
    assert shows(server) == {"log": "".join(LINE.format(number) for number in range(LINES)).encode()}
    assert_published_at_intervals(server, began)
