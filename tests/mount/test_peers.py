"""Nodes that fill from each other: on one machine, each with its own cache and `fusecache serve`."""

import hashlib
import itertools
import json
import os
import re
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from fusecache.config.options import load_options
from fusecache.daemon.checkup import peer_findings
from fusecache.policy.peer_choice import choose_owner
from tests.mount.bad_peer import FULL, GONE, MODES, bad_peer
from tests.mount.serving import key_file, served
from tests.support.block_caches import some_bytes
from tests.support.mounts import FUSECACHE, Mount, run, wait_until
from tests.support.s3_buckets import Bucket

pytestmark = pytest.mark.s3server_only
MIB = 1 << 20
NOT_IN_LIST = "this node is not among them"
DATA = some_bytes(32 * MIB + 777)


class Cluster:
    """Mounts that name each other as peers."""

    def __init__(self, mount: Callable[..., Mount], free_port: Callable[[], int], folder: Path) -> None:
        self._mount = mount
        self._folder = folder
        self._served = ExitStack()
        self.port = free_port
        self.ports: list[int] = []
        self.nodes: list[Mount] = []

    def address(self, index: int) -> str:
        """Return a node's address."""
        return f"127.0.0.1:{self.ports[index]}"

    def start(self, count: int, *, peers: str = "", key: str = "the-key-of-all-nodes-of-the-tests") -> None:
        """Start nodes. peers: another list than that of all these."""
        first = len(self.nodes)
        self.ports += [self.port() for _ in range(count)]
        everyone = ",".join(map(self.address, range(len(self.ports))))
        for index in range(first, first + count):
            folder = self._folder / f"node{index}"
            folder.mkdir()
            file = key_file(folder, key)
            self.nodes.append(
                self._mount(
                    "--peers",
                    peers or everyone,
                    "--peers-key-file",
                    str(file),
                    "--peer-address",
                    self.address(index),
                )
            )
            self._served.enter_context(
                served(self.nodes[index], self.address(index), "--peers-key-file", file)
            )

    def stop_serving(self) -> None:
        """End the processes that serve."""
        self._served.close()

    def status(self, index: int) -> dict[str, Any]:
        """Return what a node knows of its peers."""
        found: dict[str, Any] = json.loads(run(FUSECACHE, "status", "--json", self.nodes[index].path).stdout)[
            "peers"
        ]
        return found

    def read_at_once(self, name: str) -> list[bytes]:
        """Read a file on all nodes at once."""
        with ThreadPoolExecutor(len(self.nodes)) as pool:
            return list(pool.map(lambda node: (node.path / name).read_bytes(), self.nodes))


@pytest.fixture
def cluster(mount: Callable[..., Mount], free_port: Callable[[], int], tmp_path: Path) -> Iterator[Cluster]:
    """Nodes, to be started."""
    made = Cluster(mount, free_port, tmp_path)
    yield made
    made.stop_serving()


def bytes_from(bucket: Bucket) -> int:
    """Return how many bytes the bucket has sent."""
    return sum(entry.bytes_out for entry in bucket.control.log() if entry.operation == "GetObject")


def test_what_all_nodes_read_leaves_the_bucket_once(cluster: Cluster, bucket: Bucket) -> None:
    bucket.put("model", DATA)
    cluster.start(3)
    assert cluster.read_at_once("model") == [DATA] * 3
    assert len(DATA) <= bytes_from(bucket) < 1.05 * len(DATA)
    for index in range(3):
        peers = cluster.status(index)
        assert peers["own_address"] == cluster.address(index)
        assert sum(peers["received_bytes"].values()) > 0
        assert not any(peers["failures"].values())


def test_doctor_asks_each_node(cluster: Cluster, tmp_path: Path, free_port: Callable[[], int]) -> None:
    """It asks the daemon behind `fusecache serve`, and names the one thing that is wrong."""
    cluster.start(1)
    node, missing, bucket = cluster.address(0), f"127.0.0.1:{free_port()}", cluster.nodes[0].bucket
    right, wrong = tmp_path / "node0" / "key", key_file(tmp_path, "x" * 40)

    def said(key: Path, peer: str, source: str = bucket.source) -> str:
        flags = {
            "source": source,
            "mountpoint": str(tmp_path),
            "endpoint_url": bucket.service.endpoint_url,
            "peers": [peer],
            "peers_key_file": str(key),
        }
        (found,) = peer_findings(load_options(flags, {}))
        assert found.subject == f"peer {peer}"
        return f"{found.level} {found.text}"

    assert re.search(r"^ok .*lists in .*no rate", said(right, node))
    bucket.put("shard", DATA)
    assert re.search(rf"^ok .*sends 8.0 MiB of {bucket.prefix}shard at [0-9.]+ [KMG]iB/s", said(right, node))
    assert re.search(r"^warning .*refused.*run `fusecache serve` there", said(right, missing))
    other_key = said(wrong, node)
    assert re.search(r"^warning .*this node's --peers-key-file holds another key: copy one file", other_key)
    assert not re.search("source|endpoint|credentials|clock|run `", other_key), other_key
    other_source = said(right, node, f"{bucket.source}x")
    assert re.search(r"^warning .*this node mounts another source", other_source)
    assert "key-file" not in other_source
    words = ("--endpoint-url", bucket.service.endpoint_url, "--peers", node, "--peers-key-file", right)
    place = ("doctor", bucket.source, "--cache-dir", tmp_path / "cache")
    answers = run(FUSECACHE, *place, *words, check=False, env=bucket.service.environment()).stdout
    assert re.search(rf"ok +peer {node}: lists in ", answers), answers
    cluster.nodes[0].unmount()
    assert re.search(r"^warning .*its daemon does not answer.*mount it again$", said(right, node))


def test_one_source_has_one_key_however_it_is_written(cluster: Cluster, bucket: Bucket) -> None:
    bucket.put("shard", DATA)
    cluster.start(1)
    cluster.ports.append(cluster.port())
    place = (
        "--peers",
        f"{cluster.address(0)},{cluster.address(1)}",
        "--peers-key-file",
        str(cluster._folder / "node0" / "key"),
        "--peer-address",
        cluster.address(1),
    )
    other = replace(bucket, prefix=bucket.prefix.rstrip("/"))
    assert other.source != bucket.source
    cluster.nodes.append(cluster._mount(*place, of=other))
    assert cluster.read_at_once("shard") == [DATA] * 2
    peers = cluster.status(1)
    assert not any(peers["failures"].values()), peers
    assert sum(peers["received_bytes"].values()) > 0


def test_list_that_cannot_be_read_and_peers_that_do_not_answer_are_problems(
    cluster: Cluster, bucket: Bucket, expect_log: Callable[[str], None], tmp_path: Path
) -> None:
    expect_log("is not HOST:PORT")
    expect_log(NOT_IN_LIST)
    bucket.put("shard", DATA)
    nodes = tmp_path / "nodes"
    nodes.write_text("gpu1\n")
    cluster.start(1, peers=f"file:{nodes}")
    mounted = cluster.nodes[0]

    def shown() -> str:
        return run(FUSECACHE, "status", mounted.path).stdout

    assert (
        f"peers=file:{nodes}: {nodes}: 'gpu1' is not HOST:PORT: every read goes to the bucket; correct it"
        in shown()
    )
    health = run(FUSECACHE, "health", mounted.path, check=False)
    assert "the list of peers cannot be read" in health.stdout
    silent = f"127.0.0.1:{cluster.port()}"
    new = tmp_path / "new"
    new.write_text(f"{silent}\n")
    os.replace(new, nodes)
    wait_until(lambda: cluster.status(0)["nodes"] == 1, "the new list", 30)
    assert "peers cannot" not in shown()
    assert (mounted.path / "shard").read_bytes() == DATA
    assert re.search(rf"none of 1 peer answers, {silent} for one: .*refused", shown())
    assert run(FUSECACHE, "health", mounted.path).stdout.startswith("OK")  # it reads from the bucket


def test_bytes_are_counted_by_where_they_were_and_who_asked(cluster: Cluster, bucket: Bucket) -> None:
    cluster.start(2)
    first, second = cluster.nodes
    nodes, etag = (cluster.address(0), cluster.address(1)), hashlib.md5(DATA).hexdigest()
    # The first node owns the first piece.
    name = next(
        each
        for each in map(str, itertools.count())
        if choose_owner(nodes, bucket.prefix + each, etag, 0) == nodes[0]
    )
    bucket.put(name, DATA)
    assert (first.path / name).read_bytes() == DATA
    assert (second.path / name).read_bytes() == DATA
    node, status = nodes[0], second.status()
    received = status["peers"]["received_bytes"][node]
    assert received > 0
    assert first.status()["served_bytes"] == {"peers": received, "programs": 0}
    read = status["cache"]["bytes_from"]
    # Read-ahead has more from the peer than reads waited for.
    assert 0 < read["peer"] <= received
    assert sum(read.values()) == len(DATA)
    samples = {
        (sample.name, sample.labels.get("peer"), sample.labels.get("source")): sample.value
        for family in text_string_to_metric_families(run(FUSECACHE, "metrics", second.path).stdout)
        for sample in family.samples
    }
    pieces = status["peers"]["received_pieces"][node]
    assert samples["fusecache_peer_received_bytes_total", node, None] == received
    assert samples["fusecache_peer_received_pieces_total", node, None] == pieces > 0
    assert samples["fusecache_cache_read_bytes_total", None, "peer"] == read["peer"]


def test_peer_that_is_full_rests_and_costs_no_byte(
    cluster: Cluster, bucket: Bucket, expect_log: Callable[[str], None]
) -> None:
    """As `fusecache serve` answers with all connections taken, before it has read the request."""
    expect_log(NOT_IN_LIST)
    bucket.put("shard", DATA)
    port = cluster.port()
    with bad_peer(port, FULL) as asked:
        cluster.start(1, peers=f"127.0.0.1:{port}")
        assert cluster.read_at_once("shard") == [DATA]
        assert asked
    peers = cluster.status(0)
    assert peers["refusals"][f"127.0.0.1:{port}"] == len(asked)
    assert peers["failures"] == {f"127.0.0.1:{port}": 0}
    # It rests for half a second after a refusal, so not each of the pieces was asked for.
    assert peers["requests"][f"127.0.0.1:{port}"] == len(asked)


def test_bytes_that_a_node_has_do_not_leave_the_bucket_again(cluster: Cluster, bucket: Bucket) -> None:
    bucket.put("shard", DATA)
    cluster.start(2)
    assert (cluster.nodes[0].path / "shard").read_bytes() == DATA
    sent = bytes_from(bucket)
    assert (cluster.nodes[1].path / "shard").read_bytes() == DATA
    assert bytes_from(bucket) == sent


def test_new_version_is_read_on_all_nodes(cluster: Cluster, bucket: Bucket) -> None:
    bucket.put("shard", DATA)
    cluster.start(2)
    assert cluster.read_at_once("shard") == [DATA] * 2
    changed = DATA[::-1]
    bucket.put("shard", changed)
    for node in cluster.nodes:
        wait_until(lambda node=node: (node.path / "shard").read_bytes() == changed, "the new version")


def test_node_that_ends_costs_no_reader_an_error(cluster: Cluster, bucket: Bucket) -> None:
    for number in range(4):
        bucket.put(f"shard{number}", DATA)
    cluster.start(3)
    assert cluster.read_at_once("shard0") == [DATA] * 3
    with ThreadPoolExecutor(1) as pool:
        rest = pool.submit(lambda: [cluster.read_at_once(f"shard{number}") for number in (1, 2, 3)])
        cluster.stop_serving()
        assert rest.result() == [[DATA] * 3] * 3


@pytest.mark.parametrize("mode", MODES)
def test_bad_peer_costs_time_and_no_byte(
    cluster: Cluster, bucket: Bucket, mode: str, expect_log: Callable[[str], None]
) -> None:
    expect_log(NOT_IN_LIST)
    bucket.put("shard", DATA)
    port = cluster.port()
    with bad_peer(port, mode) as asked:
        cluster.start(1, peers=f"127.0.0.1:{port}")
        assert cluster.read_at_once("shard") == [DATA]
        assert asked
        peers = cluster.status(0)
        assert peers["failures"][f"127.0.0.1:{port}"] > 0
        assert list(peers["resting"]) == [f"127.0.0.1:{port}"]
        assert not any(peers["received_bytes"].values())
        read = cluster.nodes[0].status()["cache"]["bytes_from"]
        assert (read["peer"], read["bucket"] > 0) == (0, True)
        # It rests: what is read next does not wait for it.
        count = len(asked)
        run(FUSECACHE, "evict", cluster.nodes[0].path)
        assert cluster.read_at_once("shard") == [DATA]
        assert len(asked) == count


def test_version_that_the_bucket_lost_is_not_the_peers_failure(
    cluster: Cluster, bucket: Bucket, expect_log: Callable[[str], None]
) -> None:
    """Else each object that is written again would make its owner rest, longer each time."""
    expect_log(NOT_IN_LIST)
    bucket.put("shard", DATA)
    port = cluster.port()
    with bad_peer(port, GONE):
        cluster.start(1, peers=f"127.0.0.1:{port}")
        assert cluster.read_at_once("shard") == [DATA]
        peers = cluster.status(0)
    assert peers["failures"] == {f"127.0.0.1:{port}": 0}
    assert peers["refusals"][f"127.0.0.1:{port}"] > 0


def test_nodes_with_other_keys_read_from_the_bucket(
    cluster: Cluster, bucket: Bucket, expect_log: Callable[[str], None]
) -> None:
    expect_log(NOT_IN_LIST)
    bucket.put("shard", DATA)
    cluster.start(1)
    stranger = cluster.address(0)
    cluster.start(1, peers=stranger, key="another-key-of-another-cluster")
    assert cluster.read_at_once("shard") == [DATA] * 2
    (reason,) = cluster.status(1)["resting"].values()
    assert "SignatureDoesNotMatch" in reason
    assert "this node's --peers-key-file holds another key" in reason
    assert "credentials" not in reason


def test_two_nodes_that_each_believe_the_other_keeps_all_do_not_wait_for_each_other(
    cluster: Cluster, bucket: Bucket, expect_log: Callable[[str], None]
) -> None:
    """A circle: each asks the other for every piece, which must be answered from the bucket."""
    expect_log(NOT_IN_LIST)
    bucket.put("shard", DATA)
    cluster.ports = [cluster.port(), cluster.port()]
    first, second = map(cluster.address, (0, 1))
    folders = []
    for index, other in enumerate((second, first)):
        folder = cluster._folder / f"circle{index}"
        folder.mkdir()
        folders.append(key_file(folder))
        cluster.nodes.append(
            cluster._mount("--peers", other, "--peers-key-file", str(folders[-1]), "--peer-address", "none:1")
        )
    for index, file in enumerate(folders):
        cluster._served.enter_context(
            served(cluster.nodes[index], cluster.address(index), "--peers-key-file", file)
        )
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(cluster.read_at_once, "shard").result(timeout=20) == [DATA] * 2


def test_list_in_a_file_is_read_again(cluster: Cluster, bucket: Bucket, tmp_path: Path) -> None:
    bucket.put("shard", DATA)
    nodes = tmp_path / "nodes"
    nodes.write_text("")
    cluster.start(2, peers=f"file:{nodes}")
    assert cluster.status(0)["nodes"] == 0
    new = tmp_path / "new"
    new.write_text("".join(f"{cluster.address(index)}\n" for index in range(2)))
    os.replace(new, nodes)
    wait_until(lambda: all(cluster.status(index)["nodes"] == 2 for index in range(2)), "the new list", 30)
    assert cluster.read_at_once("shard") == [DATA] * 2
    assert bytes_from(bucket) < 1.05 * len(DATA)
