"""1 024 nodes that fill from each other, simulated: `python -m benchmarks.cluster_simulation`. One JSON line a case.

The choice of the owner is the real one. A node's link takes one group after the other in each direction, the bucket's
link too. A model is read by all nodes in the same order, with as many requests in flight as a mount has. Of a data set
each node reads another share in each epoch. `--check` reads an object on 8 real nodes, as root, and compares.
"""

import argparse
import heapq
import json
import math
import random
import sys
import tempfile
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.cluster import BUCKET_BYTES_PER_SECOND, timed
from benchmarks.namespaces import PORT, Cluster
from fusecache.engine.cache.peer_fetch import PEER_GETS
from fusecache.policy.cache.granules import CHUNK_BYTES
from fusecache.policy.peer_choice import choose_owner
from fusecache.remote.http.peers import CONNECT_SECONDS
from fusecache.serve.server import MOST_CONNECTIONS
from tests.s3server.synthetic import synthetic_etag

NODES = 1024
MODEL_BYTES, DATA_BYTES, EPOCHS = 140e9, 100e12, 8
# 25 Gb/s a node, 80 Gb/s to the bucket for all of them.
LINK_BYTES_PER_SECOND, CLUSTER_BYTES_PER_SECOND = 25e9 / 8, 10e9
BUCKET_SECONDS, ROUND_TRIP_SECONDS = 0.04, 0.0002
# A longer line at one node has no connection any more: it refuses.
LONGEST_LINE = MOST_CONNECTIONS
REFUSED_SECONDS = 0.5
ETAG = "0123456789abcdef0123456789abcdef"


@dataclass
class Links:
    """What the links carry. sent: bytes by node."""

    nodes: tuple[str, ...]
    bucket_rate: float
    bucket_free: float = 0.0
    bucket_bytes: int = 0
    sent: dict[str, int] = field(default_factory=dict)

    def from_bucket(self, now: float) -> float:
        """Fetch a group; return when it is there."""
        self.bucket_bytes += CHUNK_BYTES
        self.bucket_free = max(self.bucket_free, now) + CHUNK_BYTES / self.bucket_rate
        return self.bucket_free + BUCKET_SECONDS

    def row(self, case: str, size: float, seconds: float, scale: float = 1.0) -> dict[str, Any]:
        """Return the figures of a case, of which a part was simulated."""
        lan = sum(self.sent.values())
        return {
            "case": case,
            "bucket_bytes_by_size": round(self.bucket_bytes / size, 3),
            "lan_terabytes": round(lan * scale / 1e12, 3),
            "hottest_by_mean": round(max(self.sent.values()) * len(self.nodes) / lan, 2) if lan else 0.0,
            "seconds": round(seconds * scale, 1),
        }


class Load:
    """All nodes read the same groups in the same order. failing: when nodes die."""

    def __init__(
        self,
        nodes: tuple[str, ...],
        chunks: int,
        *,
        etag: str = ETAG,
        bucket_rate: float = CLUSTER_BYTES_PER_SECOND,
        failing: dict[str, float] | None = None,
    ) -> None:
        self.links = Links(nodes, bucket_rate)
        self.seconds = 0.0
        self._nodes, self._chunks, self._etag, self._dies = nodes, chunks, etag, failing or {}
        # The owners of a group: the first, the next if that rests, and so on.
        self._owners: list[list[str]] = [[] for _ in range(chunks)]
        # When a node has a group for others.
        self._ready: dict[tuple[str, int], float] = {}
        self._out_free, self._in_free = dict.fromkeys(nodes, 0.0), dict.fromkeys(nodes, 0.0)
        self._line, self._next = dict.fromkeys(nodes, 0), dict.fromkeys(nodes, 0)
        self._rests: dict[str, dict[str, float]] = {node: {} for node in nodes}
        # (time, number, node that reads, group, node that sent; empty: the request begins, "-": its own bucket did)
        self._events: list[tuple[float, int, str, int, str]] = []
        self._number = 0

    def run(self) -> "Load":
        """Read until all have read all."""
        for node in self._nodes:
            for _ in range(PEER_GETS):
                self._ask_next(0.0, node)
        while self._events:
            now, _, node, chunk, sender = heapq.heappop(self._events)
            if sender in self._line:
                self._line[sender] -= 1
            if self._is_dead(node, now):
                continue
            if not sender:
                self._ask(now, node, chunk)
            else:
                self.seconds = now
                self._ask_next(now, node)
        return self

    def _put(self, at: float, node: str, chunk: int, sender: str = "") -> None:
        self._number += 1
        heapq.heappush(self._events, (at, self._number, node, chunk, sender))

    def _ask_next(self, now: float, node: str) -> None:
        if self._next[node] < self._chunks:
            self._put(now, node, self._next[node])
            self._next[node] += 1

    def _is_dead(self, node: str, now: float) -> bool:
        return self._dies.get(node, now) < now

    def _owner(self, chunk: int, rests: dict[str, float], now: float) -> str:
        for rank in range(len(self._nodes)):
            owners = self._owners[chunk]
            if rank == len(owners):
                left = tuple(node for node in self._nodes if node not in owners)
                owners.append(choose_owner(left, "model", self._etag, chunk))
            if rests.get(owners[rank], now) <= now:
                return owners[rank]
        raise AssertionError("a node does not rest for itself")

    def _has(self, node: str, chunk: int, now: float) -> float:
        if (node, chunk) not in self._ready:
            self._ready[node, chunk] = self.links.from_bucket(now)
        return self._ready[node, chunk]

    def _ask(self, now: float, node: str, chunk: int) -> None:
        rests = self._rests[node]
        owner = self._owner(chunk, rests, now)
        if owner == node:
            self._put(self._has(node, chunk, now), node, chunk, "-")
        elif self._is_dead(owner, now):
            rests[owner] = math.inf
            self._put(now + CONNECT_SECONDS, node, chunk)
        elif self._line[owner] >= LONGEST_LINE:
            rests[owner] = now + REFUSED_SECONDS
            self._put(now + ROUND_TRIP_SECONDS, node, chunk)
        else:
            self._line[owner] += 1
            each = CHUNK_BYTES / LINK_BYTES_PER_SECOND
            begins = max(max(self._has(owner, chunk, now), now) + ROUND_TRIP_SECONDS, self._out_free[owner])
            self._out_free[owner] = begins + each
            self._in_free[node] = max(self._in_free[node], begins) + each
            self.links.sent[owner] = self.links.sent.get(owner, 0) + CHUNK_BYTES
            self._put(self._in_free[node], node, chunk, owner)


def epochs(
    nodes: tuple[str, ...], chunks: int, room: int, *, failing: int = 0, by_plan: bool = False
) -> Iterator[tuple[Links, float]]:
    """Read each group once in each epoch, on any node. room: groups that a cache keeps. failing: nodes of each epoch
    that come back with an empty cache. by_plan: the first reader fetches from the bucket, and hands on to the owner
    only what is left over. Yield the links and the seconds of each epoch.
    """
    source = random.Random(1)
    owners = [choose_owner(nodes, f"shard{chunk // 8}", ETAG, chunk % 8) for chunk in range(chunks)]
    caches: dict[str, OrderedDict[int, None]] = {node: OrderedDict() for node in nodes}
    for _ in range(EPOCHS):
        links = Links(nodes, CLUSTER_BYTES_PER_SECOND, sent=dict.fromkeys(nodes, 0))
        received = dict.fromkeys(nodes, 0)
        lost = set(source.sample(nodes, failing))
        for number, chunk in enumerate(source.sample(range(chunks), chunks)):
            if number == chunks // 2:
                for node in lost:
                    caches[node].clear()
            owner, reader = owners[chunk], nodes[number % len(nodes)]
            cache = caches[owner]
            is_there = chunk in cache
            if not is_there:
                links.from_bucket(0.0)
            cache[chunk] = None
            cache.move_to_end(chunk)
            if len(cache) > room:
                cache.popitem(last=False)
            # By plan a group goes one way as well, from its first reader to its owner: unless the reader keeps it.
            if reader != owner and (is_there or not by_plan):
                links.sent[owner] += CHUNK_BYTES
                received[reader] += CHUNK_BYTES
        lan = max(max(links.sent.values()), max(received.values())) / LINK_BYTES_PER_SECOND
        yield links, max(links.bucket_free, lan)


def simulated(model_part: int, data_part: int) -> Iterator[dict[str, Any]]:
    """Yield a row a case. model_part, data_part: one of so many parts of the model and of the data set is simulated."""
    nodes = tuple(f"10.0.{number // 250}.{number % 250 + 1}:9470" for number in range(NODES))
    source = random.Random(0)
    chunks = int(MODEL_BYTES / CHUNK_BYTES / model_part)
    alone = MODEL_BYTES * NODES / CLUSTER_BYTES_PER_SECOND
    yield {"case": "model, each node by itself", "bucket_bytes_by_size": NODES, "seconds": round(alone, 1)}
    done = Load(nodes, chunks).run()
    yield done.links.row("model", chunks * CHUNK_BYTES, done.seconds, model_part)
    dead = {node: source.random() * done.seconds for node in source.sample(nodes, NODES // 100)}
    done = Load(nodes, chunks, failing=dead).run()
    yield done.links.row("model, 1 % of the nodes die", chunks * CHUNK_BYTES, done.seconds, model_part)
    chunks = int(DATA_BYTES / CHUNK_BYTES / data_part)
    size = chunks * CHUNK_BYTES
    for case, share, failing, by_plan in (
        ("data set, caches of 1.3 times its size", 1.3, 0, False),
        ("the same, 1 % of the nodes lose their cache in each epoch", 1.3, NODES // 100, False),
        ("the same, placed by plan, none lost", 1.3, 0, True),
        ("data set, caches of 0.75 times its size", 0.75, 0, False),
    ):
        rows = list(epochs(nodes, chunks, int(chunks * share / NODES), failing=failing, by_plan=by_plan))
        lan = sum(sum(links.sent.values()) for links, _ in rows)
        yield {
            "case": case,
            "bucket_bytes_by_size": round(sum(links.bucket_bytes for links, _ in rows) / size, 3),
            "lan_terabytes": round(lan * data_part / 1e12),
            "hottest_by_mean": round(max(links.row("", 1, 0)["hottest_by_mean"] for links, _ in rows[1:]), 2),
            "seconds": round(sum(seconds for _, seconds in rows) * data_part),
        }


def checked(size: int, count: int) -> Iterator[dict[str, Any]]:
    """Read an object on some real nodes; yield its figures, and those of the simulation."""
    with tempfile.TemporaryDirectory(prefix="cluster-") as folder, Cluster(Path(folder), count) as cluster:
        cluster.server.control.set(total_bandwidth=BUCKET_BYTES_PER_SECOND)
        cluster.server.control.add_synthetic("model", size, 1)
        real = timed(cluster, ["model"], peers=True)
        nodes = tuple(f"{node.address}:{PORT}" for node in cluster.nodes)
    etag, chunks = synthetic_etag(1, 0, size), size // CHUNK_BYTES
    done = Load(nodes, chunks, etag=etag, bucket_rate=BUCKET_BYTES_PER_SECOND).run()
    links = done.links
    row = links.row(f"{count} nodes, simulated", size, done.seconds)
    yield row | {"sent": {node: links.sent[node] for node in nodes}}
    sent = {node: sum(seen["received_bytes"].get(node, 0) for seen in real["peers"]) for node in nodes}
    links.sent, links.bucket_bytes = sent, real["sent"]
    yield links.row(f"{count} nodes, real", size, real["seconds"]) | {"sent": sent}


def main() -> int:
    """Write the rows."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--model-part", type=int, default=4, help="simulate one of so many parts of the model"
    )
    parser.add_argument("--data-part", type=int, default=200, help="the same, of the data set")
    parser.add_argument("--check", action="store_true", help="compare with 8 real nodes, as root")
    options = parser.parse_args()
    for row in checked(512 << 20, 8) if options.check else simulated(options.model_part, options.data_part):
        sys.stdout.write(json.dumps(row) + "\n")
        sys.stdout.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main())
