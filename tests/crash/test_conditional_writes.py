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


def test_a_good_store_costs_one_request(server: ServerProcess, make_daemon: Callable[..., Daemon]) -> None:
    daemon = make_daemon()
    daemon.mount()
    assert daemon.status()["conditional_writes"] == "kept"
    (probe,) = server.control.log("PutObject")
    assert (probe.status, probe.took_effect) == (412, False)
