"""The mounts of `tests/mount`; the many lives that begin and end on the engine log nothing."""

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

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
from tests.support.marks import mark_all


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Those with a mount need FUSE, and look at what the project's own server holds."""
    marks = (pytest.mark.fuse, pytest.mark.s3server_only)
    mark_all(items, __file__, *marks, using=("mount", "place"))


@pytest.fixture
def silence() -> Iterator[None]:
    """Log nothing."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)
