"""The mounts of `tests/mount` and the daemons of `tests/crash`."""

from pathlib import Path

import pytest

from tests.crash.conftest import daemon, make_daemon, server, whole_server
from tests.mount.conftest import (
    bucket,
    closed_connections,
    expect_log,
    kept_by_the_session,
    mount,
    mounts,
    place,
    quiet_daemons,
    service,
    shared,
    whole_bucket,
)
from tests.support.marks import is_below


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """All but the table look at the requests of the project's own server; those with a mount need FUSE."""
    here = Path(__file__).parent
    for item in items:
        if is_below(item, here) and item.path.name != "test_table.py":
            item.add_marker(pytest.mark.s3server_only)
            if {"mount", "place", "make_daemon"} & set(getattr(item, "fixturenames", ())):
                item.add_marker(pytest.mark.fuse)
