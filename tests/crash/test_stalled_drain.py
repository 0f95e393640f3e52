"""A stop that only a person could end: it says why, ends, and keeps everything pending for the next mount."""

import signal
from collections.abc import Callable

import pytest

from tests.crash.test_kill import shows
from tests.s3server import Fault, FaultAction, ServerProcess
from tests.support.daemons import MIB, Daemon, some_bytes
from tests.support.mounts import wait_until

REFUSED = Fault(FaultAction.ANSWER, operation="PutObject", status=403, code="AccessDenied")


def test_a_stop_with_refused_keys_ends(server: ServerProcess, make_daemon: Callable[..., Daemon]) -> None:
    """With exit status 1, the reason, and the place of the bytes. The next mount uploads them."""
    daemon = make_daemon("--drain-timeout", "3")
    daemon.mount()
    server.control.faults(REFUSED)
    (daemon.path / "file").write_bytes(b"kept")
    daemon.signal(signal.SIGTERM)
    assert daemon.wait(20) == 1
    log = daemon.log()
    assert "nothing was uploaded for 3.0 s: PUT s3://bucket/file: AccessDenied" in log
    assert f"cache_dir={daemon.cache}; the next mount resumes them" in log
    server.control.clear_faults()
    daemon.mount()
    assert daemon.sync() == 0
    assert shows(server) == {"file": b"kept"}


@pytest.mark.parametrize("outage", ["refuse", "blackhole"])
def test_a_stop_without_a_bucket_ends(
    server: ServerProcess, make_daemon: Callable[..., Daemon], outage: str
) -> None:
    daemon = make_daemon("--drain-timeout", "3")
    daemon.mount(
        "--settle-seconds", "3600"
    )  # nothing is sent before the outage, however long it takes to begin
    (daemon.path / "file").write_bytes(b"kept")
    server.control.pause(outage)
    try:
        daemon.signal(signal.SIGTERM)
        assert daemon.wait(20) == 1
    finally:
        server.control.resume()
    assert "nothing was uploaded for 3.0 s" in daemon.log()
    daemon.mount()
    assert daemon.sync() == 0
    assert shows(server) == {"file": b"kept"}


def test_a_slow_upload_is_waited_for(server: ServerProcess, make_daemon: Callable[..., Daemon]) -> None:
    """However long it takes in all."""
    daemon = make_daemon("--drain-timeout", "2")
    daemon.mount()
    data = some_bytes(24 * MIB, 1)
    server.control.set(upload_bandwidth=3e6)
    (daemon.path / "file").write_bytes(data)
    daemon.signal(signal.SIGTERM)
    assert daemon.wait(60) == 0
    assert shows(server) == {"file": data}


def test_unmount_says_why_it_ends(server: ServerProcess, make_daemon: Callable[..., Daemon]) -> None:
    """Exit status 1; the mount stays, and the message names the reason, the place and the way out."""
    daemon = make_daemon("--drain-timeout", "3")
    daemon.mount()
    server.control.faults(REFUSED)
    (daemon.path / "file").write_bytes(b"kept")
    done = daemon.command("unmount", daemon.path)
    assert done.returncode == 1
    assert "nothing was uploaded for 3.0 s: PUT s3://bucket/file: AccessDenied" in done.stderr
    assert str(daemon.cache) in done.stderr
    assert "--force" in done.stderr
    assert daemon.is_running()
    assert daemon.command("unmount", "--force", daemon.path).returncode == 0
    wait_until(lambda: not daemon.is_running(), "the daemon's end")
