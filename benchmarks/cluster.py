"""Nodes that fill from each other: `make bench-cluster`, as root. One JSON line a case, and its bar.

Four nodes in network namespaces share a bucket that sends 100 MB/s in all. On a machine with few cores the nodes share
these, so ratios say more than seconds.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.cases_loader import load, upload_often
from benchmarks.namespaces import Cluster, Node
from tests.mount.serving import SECRET, key_file

MIB = 1 << 20
NODES = 4
# How often `serve` is read for each round of the others: a read takes 0.3 s, and single ones differ by half.
SERVE_ROUNDS = 8
# Of a shard of 16 MiB, and of a batch of all nodes.
SHARD_SAMPLES, BATCH = 2045, 256
BUCKET_BYTES_PER_SECOND = 100e6
FLAGS = ("--memory", "256MiB", "--log-level", "info")


def read_all(nodes: list[Node], names: list[list[str]]) -> tuple[list[float], int]:
    """Read files on each node, all nodes at once; return each node's seconds, and how many readers failed."""
    began = time.monotonic()
    readers = [
        node.run("cat", *(str(node.path / name) for name in mine))
        for node, mine in zip(nodes, names, strict=True)
    ]
    seconds = [0.0] * len(readers)
    left = set(range(len(readers)))
    while left:
        for index in list(left):
            if readers[index].poll() is not None:
                seconds[index] = time.monotonic() - began
                left.remove(index)
        time.sleep(0.01)
    return seconds, sum(each.returncode != 0 for each in readers)


def timed(cluster: Cluster, names: list[str], *, peers: bool, on_way: Callable[[], None] | None = None,
          only: int | None = None) -> dict[str, Any]:  # fmt: skip
    """Mount, read the same files on all nodes, unmount. on_way: called while they read."""
    cluster.mount(*FLAGS, "--cache-size", "4GiB", peers=peers)
    cluster.sent()
    nodes = cluster.nodes[:only]
    if on_way is not None:
        on_way()
    seconds, failed = read_all(nodes, [names] * len(nodes))
    sent = cluster.sent()
    peers_seen = [node.status()["peers"] for node in nodes]
    cluster.unmount()
    return {"seconds": max(seconds), "failed": failed, "sent": sent, "peers": peers_seen}


def same(cluster: Cluster, size: int, rounds: int) -> list[dict[str, Any]]:
    """All nodes load the same object at once, without peers and with them."""
    cluster.server.control.add_synthetic("model", size, 1)
    rows = []
    for _ in range(rounds):
        alone = timed(cluster, ["model"], peers=False)
        together = timed(cluster, ["model"], peers=True)
        rows.append((together["sent"] / size, together["seconds"] / alone["seconds"], together, alone))
    return [
        bar("same: bytes from the bucket / size", statistics.median(row[0] for row in rows), 1.05),
        bar("same: time / without peers", statistics.median(row[1] for row in rows), 0.35),
        {"same": [(row[2]["seconds"], row[3]["seconds"]) for row in rows]},
    ]


def killed(cluster: Cluster, size: int, rounds: int) -> list[dict[str, Any]]:
    """One node dies while all read: the others' errors, and their time."""
    names = [f"part{number}" for number in range(8)]
    for number, name in enumerate(names):
        cluster.server.control.add_synthetic(name, size // 8, 10 + number)
    ratios, failed = [], 0
    for _ in range(rounds):
        calm = timed(cluster, names, peers=True, only=NODES - 1)
        after = calm["seconds"] / 2

        def cut(after: float = after) -> None:
            node = cluster.nodes[-1]
            words = [sys.executable, "-c", "import os,sys,time; time.sleep(float(sys.argv[1]));"
                     "[os.kill(int(each), 9) for each in sys.argv[2:]]", str(after)]  # fmt: skip
            subprocess.Popen([*words, *(str(each.pid) for each in node._processes)])

        disturbed = timed(cluster, names, peers=True, only=NODES - 1, on_way=cut)
        ratios.append(disturbed["seconds"] / calm["seconds"])
        failed += disturbed["failed"]
    return [
        bar("killed: readers' errors", failed, 0),
        bar("killed: time / undisturbed", statistics.median(ratios), 1.3),
    ]


def slow(cluster: Cluster, size: int, rounds: int) -> list[dict[str, Any]]:
    """One peer sends 1 MB/s: the time of the others, beside a cluster without it."""
    cluster.server.control.add_synthetic("model", size, 1)
    ratios = []
    for _ in range(rounds):
        cluster.mount(*FLAGS, "--cache-size", "4GiB", only=NODES - 1)
        without, _ = read_all(cluster.nodes[: NODES - 1], [["model"]] * (NODES - 1))
        cluster.unmount()
        disturbed = timed(
            cluster,
            ["model"],
            peers=True,
            only=NODES - 1,
            on_way=lambda: cluster.nodes[-1].slow_down("8mbit"),
        )
        subprocess.run(
            ["tc", "-n", cluster.nodes[-1].name, "qdisc", "del", "dev", "eth0", "root"], check=True
        )
        ratios.append(disturbed["seconds"] / max(without))
    return [bar("slow peer: time / without that peer", statistics.median(ratios), 1.2), {"slow": ratios}]


def epochs(cluster: Cluster, size: int, _: int) -> list[dict[str, Any]]:
    """Three epochs of a loader on each node, in its elastic order, over caches that hold 3/8 of twice the size each.

    Once, however many rounds: the bar counts bytes, which a busy machine changes little, and not seconds.
    """
    folder = cluster.key_file.parent / "shard"
    load(
        "write",
        library="fusecache",
        kind="tokens",
        path=str(folder),
        samples=SHARD_SAMPLES,
        shard_bytes=64 * MIB,
    )
    shard_bytes = sum(path.stat().st_size for path in folder.glob("*.mds"))
    count = max(NODES, 2 * size // shard_bytes)
    total = count * shard_bytes
    upload_often(cluster.server.control, cluster.server, cluster.server.bucket, "data", folder, count)
    cluster.mount(*FLAGS, "--cache-size", str(max(total * 3 // 8, 256 * MIB)))
    cluster.sent()
    readers = []
    for number, node in enumerate(cluster.nodes):
        task = {"path": str(node.path / "data"), "batch": BATCH, "epochs": 3, "node": number, "nodes": NODES}
        words = [sys.executable, "-m", "benchmarks.loading", json.dumps({"task": "share", **task})]
        readers.append(node.run(*words, stdout=subprocess.PIPE))
    times = [json.loads(reader.communicate()[0])["times"] for reader in readers]
    log = cluster.server.control.log("GetObject")
    cluster.unmount()
    borders = [min(times)[0], *(max(each) for each in list(zip(*times, strict=True))[1:])]
    spans = list(pairwise(borders))
    sent = [sum(row.bytes_out for row in log if begin <= row.time < end) for begin, end in spans]
    return [
        bar(
            "epochs: bytes from the bucket / size, all three", sum(row.bytes_out for row in log) / total, 1.15
        ),
        {
            "epochs": [round(each / total, 3) for each in sent],
            "seconds": [end - begin for begin, end in spans],
        },
    ]


def serving(cluster: Cluster, size: int, rounds: int) -> list[dict[str, Any]]:
    """One client reads a warm object: its rate beside a bare loop of sendfile, and the daemon's processor time.

    Both on the node itself: a bridge between namespaces costs a fifth of the rate.
    """
    cluster.server.control.add_synthetic("model", size, 1)
    cluster.mount(*FLAGS, "--cache-size", "4GiB", peers=False, only=1)
    node, folder = cluster.nodes[0], cluster.key_file.parent / "serve"
    folder.mkdir()
    key_file(folder)
    node._run(
        ["serve", str(node.path), "--listen", f"{node.address}:9000", "--key-file", str(folder / "key")]
    )
    node._wait(lambda: ":9000" in node._log.read_text())
    read_all([node], [["model"]])
    subprocess.run(
        [Path(sys.executable).parent / "fusecache", "warm", "--wait", node.path / "model"], check=True
    )
    (file,) = (path for path in (node.cache / "cache" / "files").glob("*/*") if path.stat().st_size >= size)
    ours, bare, cpu = [], [], []

    def read_ours() -> None:
        before = node.cpu_seconds()
        ours.append(_rate(node, "get", f"http://{node.address}:9000", cluster.server.bucket, SECRET, size))
        cpu.append((node.cpu_seconds() - before) * (1 << 30) / size)

    def read_bare() -> None:
        bare.append(_rate(node, "bare", file, size))

    # Each way goes first in half of the rounds: the second read of a round is faster or slower for that alone.
    for number in range(SERVE_ROUNDS * rounds):
        for read in (read_ours, read_bare) if number % 2 else (read_bare, read_ours):
            read()
    cluster.unmount()
    return [
        bar(
            "serve: rate / bare sendfile",
            statistics.median(ours) / statistics.median(bare),
            0.8,
            at_least=True,
        ),
        bar("serve: daemon CPU s a GiB", statistics.median(cpu), 0.1),
        {"serve": ours, "bare": bare},
    ]


def _rate(node: Node, *words: Any) -> float:
    client = [sys.executable, "-m", "benchmarks.serve_client", *map(str, words)]
    return float(node.run(*client, stdout=subprocess.PIPE).communicate(timeout=120)[0])


def bar(case: str, value: float, limit: float, *, at_least: bool = False) -> dict[str, Any]:
    """Return a row: the figure, and whether it meets its bar."""
    met = value >= limit if at_least else value <= limit
    return {"case": case, "value": round(value, 3), "bar": limit, "met": met}


CASES = {"same": same, "killed": killed, "slow": slow, "epochs": epochs, "serving": serving}


def main() -> int:
    """Run the cases; return 1 if a bar is missed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default=",".join(CASES), help="cases, separated by commas")
    parser.add_argument("--mib", type=int, default=1024, help="size of the object, or of the data set")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    missed = 0
    for case in options.only.split(","):
        with (
            tempfile.TemporaryDirectory(prefix="cluster-", dir=os.environ.get("TMPDIR")) as folder,
            Cluster(Path(folder), NODES) as cluster,
        ):
            cluster.server.control.set(total_bandwidth=BUCKET_BYTES_PER_SECOND)
            for row in CASES[case](cluster, options.mib * MIB, options.rounds):
                sys.stdout.write(json.dumps(row) + "\n")
                sys.stdout.flush()
                missed += row.get("met") is False
    return int(missed > 0)


if __name__ == "__main__":
    sys.exit(main())
