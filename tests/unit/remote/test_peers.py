"""Nodes that do not answer: how long they rest, and what it costs to pass them over."""

import socket
import tracemalloc
from collections.abc import Iterator

import pytest

from fusecache.disk.cache_files import granule_checksums
from fusecache.model.errors import Unavailable
from fusecache.model.objects import GRANULE_BYTES, Extent, ObjectId
from fusecache.remote.http.peers import PeerNodes
from fusecache.remote.store import Interruption

OBJECT = ObjectId("model", "etag")
OTHERS = tuple(f"10.0.{number // 250}.{number % 250 + 1}:9470" for number in range(512))


@pytest.fixture
def dead() -> Iterator[str]:
    """An address that refuses connections: nothing listens there, and nothing else can."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        yield f"127.0.0.1:{bound.getsockname()[1]}"


def nodes_with(dead: str) -> PeerNodes:
    """Return nodes, of which one is dead and this one is the first."""
    peers = PeerNodes("bucket", "secret", granule_checksums)
    peers.set_nodes((*OTHERS, dead), OTHERS[0])
    return peers


def ask(peers: PeerNodes, node: str) -> None:
    """Ask a node that is dead."""
    extent, buffer = Extent(0, GRANULE_BYTES), memoryview(bytearray(GRANULE_BYTES))
    with pytest.raises(Unavailable):
        peers.get_into(node, OBJECT, GRANULE_BYTES, extent, buffer, lambda received: None, Interruption())


def test_node_that_is_dead_for_weeks_still_costs_no_reader_an_error(dead: str) -> None:
    """A number of failures that is an exponent of 2 fits no float from 1 024 on: at 10 minutes each, after 7 days."""
    peers = nodes_with(dead)
    for _ in range(1100):
        ask(peers, dead)
    assert dead in peers.statistics()["resting"]


def test_passing_over_a_node_that_rests_keeps_no_list_of_nodes_for_each_group(dead: str) -> None:
    """The owners of 65 536 groups are remembered: with a list of 1 024 nodes each, they would take 500 MB."""
    peers = nodes_with(dead)
    ask(peers, dead)
    groups = 1000
    tracemalloc.start()
    try:
        for group in range(groups):
            assert peers.owner(OBJECT, group) != dead
        kept, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert kept < groups * len(OTHERS) * 8 / 2
