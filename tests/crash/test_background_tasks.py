"""A bug in a background task of the daemon: the mount stays, the log and the status tell."""

import errno
import sys
from collections.abc import Callable

import pytest

from tests.crash.test_kill import shows
from tests.s3server import ServerProcess
from tests.support.daemons import Daemon
from tests.support.mounts import wait_until

# A daemon whose status line fails twice, and whose control socket is lost once.
FAULTY = """
import sys
import fusecache.daemon.main as daemon
import trio
from fusecache.cli.main import main

daemon.STATUS_SECONDS = 0.05
failures = ["first", "second"]
serve, notify = trio.serve_listeners, daemon.notify


def faulty_notify(**fields):
    if failures and list(fields) == ["STATUS"]:
        raise RuntimeError(failures.pop(0))
    notify(**fields)


async def faulty_serve(*_arguments, **_options):
    trio.serve_listeners = serve
    await trio.sleep(0.1)
    raise OSError("accept failed")


daemon.notify, trio.serve_listeners = faulty_notify, faulty_serve
sys.exit(main())
"""


def test_failed_tasks_are_restarted(server: ServerProcess, make_daemon: Callable[..., Daemon]) -> None:
    daemon = make_daemon()
    daemon.program = [sys.executable, "-c", FAULTY]
    daemon.mount()

    def failures() -> dict[str, int]:
        return {name: task["failures"] for name, task in daemon.status()["failed_tasks"].items()}

    wait_until(lambda: failures() == {"status": 2, "control": 1}, "the failures")
    # The status is a file: the socket comes back later, after the supervisor's pause.
    wait_until(lambda: daemon.command("status", daemon.path).returncode == 0, "the control socket")
    (daemon.path / "file").write_bytes(b"1")
    assert daemon.sync() == 0
    assert shows(server) == {"file": b"1"}
    assert daemon.log().count("Traceback") == 3
    assert "the daemon's task control failed 1 time" in daemon.command("status", daemon.path).stdout


# A daemon that fails in GETs, in a LIST for a name, after an upload, and in a pass of its publisher.
FAULTY_REQUESTS = """
import sys
from fusecache.cli.main import main
from fusecache.engine.namespace.lookup import Lookup
from fusecache.engine.namespace_ops.operations import NamespaceOps
from fusecache.engine.write.file_io import FileIO
from fusecache.engine.publish.publisher import Publisher
from fusecache.remote.s3.store import S3Store


def fail(owner, name, times=1, after_effect=False):
    real, left = getattr(owner, name), [name] * times

    def faulty(*arguments, **options):
        if left and after_effect:
            real(*arguments, **options)
        if left:
            raise RuntimeError(left.pop())
        return real(*arguments, **options)

    setattr(owner, name, faulty)


fail(S3Store, "get_into", times=2)  # the kernel repeats a read that it made ahead
fail(S3Store, "put", after_effect=True)
fail(Lookup, "_correct")
fail(Publisher, "_next_item")
fail(NamespaceOps, "mkdir")
fail(FileIO, "write")
sys.exit(main())
"""


def test_failed_requests_fail_only_their_callers(
    server: ServerProcess, make_daemon: Callable[..., Daemon]
) -> None:
    server.control.put("theirs", b"1" * 100_000)
    daemon = make_daemon()
    daemon.program = [sys.executable, "-c", FAULTY_REQUESTS]
    daemon.mount()
    for _ in range(2):  # one LIST fails, then one GET
        with pytest.raises(OSError, match="Input/output error") as failure:
            (daemon.path / "theirs").read_bytes()
        assert failure.value.errno == errno.EIO
    assert (daemon.path / "theirs").read_bytes() == b"1" * 100_000
    for call in (lambda: (daemon.path / "folder").mkdir(), lambda: (daemon.path / "ours").write_bytes(b"2")):
        with pytest.raises(OSError, match="Input/output error"):
            call()
        call()
    assert daemon.sync() == 0
    shown = shows(server)
    assert (shown["ours"], shown["folder/"]) == (b"2", b"")
    failed = daemon.status()["failed_tasks"]
    assert {name: task["failures"] for name, task in failed.items()} == {
        "probe": 1, "cache-get": 2, "publish": 1, "publish-change": 1, "fuse-mkdir": 1, "fuse-write": 1
    }  # fmt: skip
    assert "unexpected error in the daemon: RuntimeError('get_into')" in daemon.log()
    assert "failed unexpectedly task=fuse-mkdir folder failures=1" in daemon.log()
    assert "failed unexpectedly task=fuse-write ours failures=1" in daemon.log()
    assert "the daemon's task fuse-mkdir failed 1 time" in daemon.command("status", daemon.path).stdout
    assert "the daemon's task probe failed 1 time" in daemon.command("status", daemon.path).stdout
