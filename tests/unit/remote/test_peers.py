"""Nodes that do not answer: how long they rest, and what it costs to pass them over."""

import base64
import socket
import threading
import tracemalloc
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from fusecache.disk.cache_files import granule_checksums
from fusecache.model.errors import Unavailable
from fusecache.model.objects import GRANULE_BYTES, MIB, Extent, ObjectId
from fusecache.remote.http.peers import PeerNodes
from fusecache.remote.store import Interruption
from tests.mount.bad_peer import node_that

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


SIZE = 4 * MIB
BODY = b"x" * SIZE
CHECKSUMS = base64.b64encode(granule_checksums(memoryview(BODY))).decode()
HEAD = (
    f'HTTP/1.1 206 Partial Content\r\netag: "etag"\r\ncontent-length: {SIZE}\r\n'
    f"content-range: bytes 0-{SIZE - 1}/{SIZE}\r\nx-fusecache-checksums: {CHECKSUMS}\r\n\r\n"
)


def test_a_slow_body_ends_those_that_stand_still_and_none_that_is_fast_or_waited_for() -> None:
    """Many bodies share the link of a slow node: each would be found slow by itself, one after the other."""
    is_over = threading.Event()

    def answers(connection: socket.socket, head: bytes) -> None:
        key = head.split()[1].decode().removeprefix("/bucket/")
        if key == "fetched":  # from the bucket, by the node
            while not is_over.wait(0.3):
                connection.sendall(b"HTTP/1.1 102 Processing\r\n\r\n")
            connection.sendall(HEAD.encode() + BODY)
            return
        sent = SIZE - GRANULE_BYTES if key == "quick" else 1
        connection.sendall(HEAD.encode() + BODY[:sent])
        while not is_over.wait(0.1):
            if key == "slow":
                connection.sendall(b"x")
        connection.sendall(BODY[sent:])

    with node_that(answers) as node, ThreadPoolExecutor() as threads:
        peers = nodes_with(node)
        for _ in range(40):
            peers.on_bucket_body(MIB, 8)  # a slow bucket: the quick body stays quick for half a minute

        def get(key: str) -> tuple["Future[None]", threading.Event]:
            """Ask for a key; the event says that its body has begun."""
            has_begun, target, extent = threading.Event(), memoryview(bytearray(SIZE)), Extent(0, SIZE)
            object_id, ended = ObjectId(key, "etag"), Interruption()
            words = (node, object_id, SIZE, extent, target, lambda _: has_begun.set(), ended)
            return threads.submit(peers.get_into, *words), has_begun

        fetched, _ = get("fetched")
        quick, quick_has_begun = get("quick")
        stands, stands_has_begun = get("stands")
        try:
            assert quick_has_begun.wait(10)
            assert stands_has_begun.wait(10)
            slow, _ = get("slow")
            with pytest.raises(Unavailable, match="slow: "):
                slow.result(30)
            with pytest.raises(Unavailable):
                stands.result(30)
        finally:
            is_over.set()
        quick.result(30)
        fetched.result(30)
        # It was ended, else it would have failed by itself.
        assert peers.statistics()["failures"][node] == 1
