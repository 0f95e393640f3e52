"""Stores that do not honour If-Match of writes: the mount says so, and writes only if that is wanted."""

from collections.abc import Callable

import pytest

from tests.crash.test_kill import shows
from tests.s3server import ServerProcess
from tests.support.daemons import Daemon

KINDS = pytest.mark.parametrize(("kind", "verb"), [("refused", "refuses"), ("ignored", "ignores")])


@KINDS
def test_a_mount_that_keeps_both_is_refused(
    server: ServerProcess, make_daemon: Callable[..., Daemon], kind: str, verb: str
) -> None:
    server.control.set_rules(conditional_writes=kind)
    with pytest.raises(AssertionError, match=f"the store {verb} If-Match.*--conflict last-wins.*--read-only"):
        make_daemon().mount()
    assert shows(server) == {}


@KINDS
def test_last_wins_writes_without_conditions(
    server: ServerProcess, make_daemon: Callable[..., Daemon], kind: str, verb: str
) -> None:
    server.control.set_rules(conditional_writes=kind, write_interval_seconds=0)
    daemon = make_daemon("--conflict", "last-wins")
    daemon.mount()
    server.control.clear_log()
    for data in (b"1", b"2"):
        (daemon.path / "small").write_bytes(data)
        assert daemon.sync() == 0
    (daemon.path / "large").write_bytes(bytes(70 << 20))
    assert daemon.sync() == 0
    assert shows(server) == {"small": b"2", "large": bytes(70 << 20)}
    assert daemon.status()["conditional_writes"] == kind
    assert "does not honour If-Match" in daemon.command("status", daemon.path).stdout
    assert f"the store {verb} If-Match" in daemon.log()
    assert not [
        entry for entry in server.control.log() if {"if-match", "if-none-match"} & entry.headers.keys()
    ]


def test_a_store_is_tested_once_for_a_cache_directory(
    server: ServerProcess, make_daemon: Callable[..., Daemon]
) -> None:
    daemon = make_daemon()
    daemon.mount()
    assert daemon.status()["conditional_writes"] == "kept"
    assert shows(server) == {}
    daemon.command("unmount", daemon.path)
    assert daemon.wait() == 0
    server.control.clear_log()
    daemon.mount()
    assert daemon.status()["conditional_writes"] == "kept"
    (probe,) = server.control.log("PutObject")
    assert (probe.status, probe.took_effect) == (412, False)


def test_a_store_that_refuses_true_conditions_is_as_good_as_one_without(
    server: ServerProcess, make_daemon: Callable[..., Daemon]
) -> None:
    """As Ceph 16 does in a bucket with versioning."""
    server.control.set_rules(conditional_writes="never-holds", write_interval_seconds=0)
    with pytest.raises(AssertionError, match="the store refuses If-Match"):
        make_daemon().mount()
    daemon = make_daemon("--conflict", "last-wins")
    daemon.mount()
    for data in (b"1", b"2"):
        (daemon.path / "file").write_bytes(data)
        assert daemon.sync() == 0
    assert shows(server) == {"file": b"2"}


def test_a_store_that_ignores_conditions_of_uploads_in_parts_is_told(
    server: ServerProcess, make_daemon: Callable[..., Daemon]
) -> None:
    server.control.set_rules(conditional_writes="not-of-parts")
    daemon = make_daemon()
    daemon.mount()
    assert daemon.status()["conditional_writes"] == "not-of-parts"
    assert "takes no If-Match for a file over 64 MiB" in daemon.command("status", daemon.path).stdout


@pytest.mark.parametrize("conflict", ["keep-both", "last-wins"])
def test_a_bucket_that_gets_versioning_under_a_mount_is_reported(
    server: ServerProcess, make_daemon: Callable[..., Daemon], conflict: str
) -> None:
    """The daemon reports neither a conflict, as no other client wrote, nor does it retry for ever."""
    server.control.set_rules(write_interval_seconds=0)
    daemon = make_daemon("--conflict", conflict)
    daemon.mount()
    (daemon.path / "file").write_bytes(b"1")
    assert daemon.sync() == 0
    server.control.set_rules(conditional_writes="never-holds")
    (daemon.path / "file").write_bytes(b"2")
    assert daemon.sync() != 0
    health = daemon.command("health", daemon.path)
    assert health.stdout.startswith("ACTION")
    assert "refuses If-Match although" in daemon.log()
    assert shows(server) == {"file": b"1"}
