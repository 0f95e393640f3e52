"""A bug in a background task of the daemon: the mount stays, the log and the status tell."""

import sys
from collections.abc import Callable

from tests.crash.test_kill import shows
from tests.s3server import ServerProcess
from tests.support.daemons import Daemon, wait_until

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
