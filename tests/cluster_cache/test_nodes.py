"""Whatever happens to a node: the others read the right bytes without an error, and the bucket sends few of them twice.

All figures are bytes. What the nodes need in seconds, `make bench-cluster` measures.
"""

import secrets
import shutil
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

import fusecache
from benchmarks.namespaces import PORT, Cluster, Node
from tests.s3server import ServerProcess, synthetic_bytes
from tests.support.mounts import wait_until

MIB = 1 << 20
# 16 groups: each of the four nodes owns some.
SIZE = 128 * MIB - 777
DATA = synthetic_bytes(1, 0, SIZE)
FLAGS = ("--memory", "128MiB", "--cache-size", "1GiB")


@pytest.fixture
def nodes(cluster: Cluster) -> list[Node]:
    """The nodes, none of them started. The bucket has one object, `model`."""
    cluster.server.control.add_synthetic("model", SIZE, 1)
    return cluster.nodes


def everyone(nodes: list[Node]) -> str:
    """Return the list of peers."""
    return ",".join(f"{node.address}:{PORT}" for node in nodes)


def start(cluster: Cluster, nodes: list[Node]) -> None:
    """Start some of the nodes. The list of peers that each gets names all nodes of the cluster."""
    for node in nodes:
        node.start(cluster.server, cluster.key_file, everyone(cluster.nodes), FLAGS)


def read(nodes: list[Node], on_way: Callable[[], None] = lambda: None) -> list[bytes]:
    """Read the object on some nodes at once. on_way: called while they read."""
    with ThreadPoolExecutor(len(nodes)) as pool:
        found: list[Future[bytes]] = [pool.submit(Path(node.path / "model").read_bytes) for node in nodes]
        on_way()
        return [each.result() for each in found]


def asked(node: Node, other: Node) -> int:
    """Return how many pieces a node has asked another one for."""
    requests: dict[str, int] = node.status()["peers"]["requests"]
    return requests[f"{other.address}:{PORT}"]


def received(node: Node) -> int:
    """Return how many bytes a node has from all others."""
    return sum(node.status()["peers"]["received_bytes"].values())


def test_nodes_that_read_the_same_object_get_it_from_the_bucket_once(
    cluster: Cluster, nodes: list[Node]
) -> None:
    start(cluster, nodes)
    assert read(nodes) == [DATA] * 4
    assert SIZE <= cluster.sent() <= 1.05 * SIZE
    assert all(received(node) > SIZE / 2 for node in nodes)


def test_node_that_is_killed_costs_at_most_its_share_again(cluster: Cluster, nodes: list[Node]) -> None:
    start(cluster, nodes)

    def kill() -> None:
        wait_until(lambda: bool(cluster.server.control.log("GetObject")), "the first bytes")
        nodes[3].kill()

    assert read(nodes[:3], kill) == [DATA] * 3
    assert SIZE <= cluster.sent() <= 1.5 * SIZE


def test_node_that_was_dead_from_the_start_costs_nothing(cluster: Cluster, nodes: list[Node]) -> None:
    start(cluster, nodes[:3])
    assert read(nodes[:3]) == [DATA] * 3
    assert any(asked(node, nodes[3]) for node in nodes[:3])
    assert SIZE <= cluster.sent() <= 1.05 * SIZE


def test_node_whose_answers_are_lost(cluster: Cluster, nodes: list[Node]) -> None:
    """The requests of the first node reach it, its answers do not come back. The other two hear it."""
    start(cluster, nodes)
    nodes[3].cut_off(nodes[0].address)
    assert read(nodes[:3]) == [DATA] * 3
    assert asked(nodes[0], nodes[3])
    assert SIZE <= cluster.sent() <= 1.5 * SIZE


def test_node_without_the_bucket(cluster: Cluster, nodes: list[Node]) -> None:
    """It answers the others, and cannot fetch what it owns. What they own, it still gets from them."""
    start(cluster, nodes)
    nodes[3].cut_off(cluster.server.host)
    assert read(nodes[:3]) == [DATA] * 3
    assert any(asked(node, nodes[3]) for node in nodes[:3])
    assert SIZE <= cluster.sent() <= 1.05 * SIZE


def test_slow_node(cluster: Cluster, nodes: list[Node]) -> None:
    start(cluster, nodes)
    nodes[3].slow_down("8mbit")
    assert read(nodes[:3]) == [DATA] * 3
    assert any(node.status()["peers"]["failures"][f"{nodes[3].address}:{PORT}"] for node in nodes[:3])
    # It fetches what it is asked for, and the others do so again.
    assert SIZE <= cluster.sent() <= 1.6 * SIZE


def test_node_that_starts_late_reads_what_the_others_have(cluster: Cluster, nodes: list[Node]) -> None:
    start(cluster, nodes[:3])
    assert read(nodes[:3]) == [DATA] * 3
    cluster.sent()
    start(cluster, nodes[3:])
    assert read(nodes[3:]) == [DATA]
    # What it owns itself, it does not ask the others for.
    assert cluster.sent() + received(nodes[3]) == SIZE
    assert received(nodes[3]) > SIZE / 2


def test_node_with_another_key_is_refused(cluster: Cluster, nodes: list[Node], tmp_path: Path) -> None:
    start(cluster, nodes[:3])
    other = tmp_path / "other.key"
    other.write_text(secrets.token_hex(32))
    other.chmod(0o600)
    nodes[3].start(cluster.server, other, everyone(nodes), FLAGS)
    assert read(nodes) == [DATA] * 4
    assert received(nodes[3]) == 0
    assert 2 * SIZE <= cluster.sent() <= 2.05 * SIZE
    assert all("SignatureDoesNotMatch" in why for why in nodes[3].status()["peers"]["resting"].values())


def test_node_with_another_bucket_of_the_same_name_is_refused(cluster: Cluster, nodes: list[Node]) -> None:
    """Both buckets have an object of the same name, size and ETag: only the endpoint tells them apart."""
    start(cluster, nodes[:3])
    elsewhere = ServerProcess()
    elsewhere.host = cluster.server.host
    with elsewhere:
        elsewhere.control.add_synthetic("model", SIZE, 1)
        nodes[3].start(elsewhere, cluster.key_file, everyone(nodes), FLAGS)
        assert read(nodes) == [DATA] * 4
        assert received(nodes[3]) == 0
        sent = sum(row.bytes_out for row in elsewhere.control.log("GetObject"))
        nodes[3].close()
    assert SIZE <= sent <= 1.05 * SIZE
    assert SIZE <= cluster.sent() <= 1.05 * SIZE


def test_node_of_another_version_reads_by_itself(cluster: Cluster, nodes: list[Node], tmp_path: Path) -> None:
    """Its requests and answers have other headers."""
    package = Path(fusecache.__file__).parent
    shutil.copytree(package, tmp_path / "other" / "fusecache", ignore=shutil.ignore_patterns("__pycache__"))
    headers = tmp_path / "other" / "fusecache" / "remote" / "protocol" / "headers.py"
    text = headers.read_text()
    assert "x-fusecache-size" in text
    headers.write_text(text.replace("x-fusecache-", "x-fusecache-2-"))
    start(cluster, nodes[:3])
    nodes[3].environment["PYTHONPATH"] = str(tmp_path / "other")
    start(cluster, nodes[3:])
    assert read(nodes) == [DATA] * 4
    assert received(nodes[3]) == 0
    assert any(asked(node, nodes[3]) for node in nodes[:3])
    assert 2 * SIZE <= cluster.sent() <= 2.05 * SIZE
