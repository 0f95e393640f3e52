"""The clusters, and the mounts of `tests/mount`."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.clusters.engines import Cluster, ray_cluster, spark_cluster
from tests.mount.conftest import (
    bucket,
    closed_connections,
    expect_log,
    mount,
    mounts,
    quiet_daemons,
    service,
    whole_bucket,
)
from tests.support.marks import mark_all

WITHOUT = pytest.mark.skipif(
    not os.environ.get("FUSECACHE_TEST_CLUSTERS"), reason="needs Ray and Spark: make test-clusters"
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Everything in this folder needs the two engines."""
    mark_all(items, __file__, pytest.mark.fuse, pytest.mark.timeout(900), WITHOUT)


@pytest.fixture(scope="session", params=[ray_cluster, spark_cluster], ids=["ray", "spark"])
def cluster(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A cluster of two workers that runs."""
    with request.param(tmp_path_factory.mktemp("cluster")) as running:
        yield running
