"""The mounts of `tests/mount`, workers for trainers, and nodes that die."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.mount.conftest import (
    ExpectedLog,
    bucket,
    expect_log,
    mount,
    mounts,
    quiet_daemons,
    service,
    whole_bucket,
)
from tests.s3server.rules import Rules
from tests.support.marks import is_below
from tests.support.mounts import Mount
from tests.support.s3_buckets import Bucket
from tests.trainers.kills import Kills
from tests.trainers.workers import START_SECONDS


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Everything in this folder needs FUSE, and looks at the requests of the project's own server."""
    here = Path(__file__).parent
    for item in items:
        if is_below(item, here):
            item.add_marker(pytest.mark.fuse)
            item.add_marker(pytest.mark.s3server_only)
            if item.get_closest_marker("timeout") is None:
                item.add_marker(pytest.mark.timeout(2 * START_SECONDS))  # it may start two workers


@pytest.fixture(autouse=True)
def nothing_left_behind() -> None:
    """Do not compare: worker processes and clients belong to a module, and connect when a test first uses them."""


@pytest.fixture
def kills(
    tmp_path: Path, bucket: Bucket, mount: Callable[..., Mount], expect_log: ExpectedLog
) -> Iterator[Kills]:
    """A node that is killed at each of its requests; says so in the log once it is used.

    tmp_path comes first: pytest removes it at its end, and the mounts' logs in it are read before that.
    """
    # A request that a dead node left behind must take effect, although the key was written less than a second ago.
    bucket.control.set_rules(write_interval_seconds=0)
    made = Kills(bucket, mount, tmp_path)
    yield made
    bucket.control.set_rules(write_interval_seconds=Rules().write_interval_seconds)
    if made.frozen:
        expect_log("recovered files=")
