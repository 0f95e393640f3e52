"""One server for all, a daemon for each; nothing is left behind."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.s3server import ServerProcess
from tests.support.daemons import Daemon
from tests.support.marks import mark_all


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Everything in this folder needs FUSE."""
    mark_all(items, __file__, pytest.mark.fuse, pytest.mark.s3server_only)


@pytest.fixture(scope="session")
def whole_server() -> Iterator[ServerProcess]:
    with ServerProcess() as server:
        yield server
        assert server.control.offences() == []


@pytest.fixture
def server(whole_server: ServerProcess) -> Iterator[ServerProcess]:
    """An empty bucket."""
    whole_server.control.reset()
    yield whole_server
    whole_server.control.close()


@pytest.fixture
def make_daemon(server: ServerProcess, tmp_path: Path) -> Iterator[Callable[..., Daemon]]:
    """Make daemons, not mounted yet: `make_daemon(*flags)`."""
    made: list[Daemon] = []

    def make(*flags: str) -> Daemon:
        made.append(Daemon(server, tmp_path / str(len(made)), *flags))
        return made[-1]

    yield make
    server.control.clear_faults()
    for daemon in made:
        daemon.clean_up()


@pytest.fixture
def daemon(make_daemon: Callable[..., Daemon]) -> Daemon:
    """A daemon that is mounted."""
    made = make_daemon()
    made.mount()
    return made
