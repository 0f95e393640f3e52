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

__all__ = [
    "bucket",
    "closed_connections",
    "expect_log",
    "kept_by_the_session",
    "mount",
    "mounts",
    "place",
    "quiet_daemons",
    "service",
    "shared",
    "whole_bucket",
]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Those with a mount need FUSE, and look at what the project's own server holds."""
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents and {"mount", "place"} & set(getattr(item, "fixturenames", ())):
            item.add_marker(pytest.mark.fuse)
            item.add_marker(pytest.mark.s3server_only)


@pytest.fixture
def silence() -> Iterator[None]:
    """Log nothing."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)
