"""A bucket and nodes in network namespaces."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.namespaces import Cluster
from tests.support.marks import is_below

WITHOUT = pytest.mark.skipif(
    not os.environ.get("FUSECACHE_TEST_NAMESPACES"), reason="needs root and iproute2: make test-cluster-cache"
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Everything in this folder makes network namespaces, of which one test at a time has the addresses."""
    here = Path(__file__).parent
    for item in items:
        if is_below(item, here):
            for mark in (pytest.mark.fuse, pytest.mark.timeout(600), WITHOUT):
                item.add_marker(mark)


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    """Four nodes, to be started."""
    with Cluster(tmp_path, 4) as made:
        yield made
