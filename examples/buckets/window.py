"""Peers that train together over a bucket, as Templar's do: `python -m examples.buckets.window`.

Four peers on two nodes, each node with a mount of its own, play three windows. In each window

1. each peer reads the batches that its seed chooses, and writes a compressed gradient to `gradients/window-N/`;
2. each peer gathers the gradients of all peers, up to a deadline; a late peer is left out and named;
3. the aggregator, peer 0, writes the mean to `aggregate/`; all peers read it, and compare it with their own.

Old windows are removed at the end. The bucket is that of FUSECACHE_TEST_*, or on the tests' S3 server on this machine.
Exit status 0: all checks held.
"""

import argparse
import contextlib
import io
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import zstandard
from numpy.typing import NDArray

from examples.demo.bucket import DemoBucket, credentials
from examples.demo.nodes import Node, unmount_below
from examples.demo.processes import StepError, adopt_orphans, end_everything
from loader import FilesMissingError, LoaderError, TemplarDataset, wait_for

COMMAND = (sys.executable, "-m", "examples.buckets.window")
PEERS, NODES, WINDOWS = 4, 2, 3
# The window in which the last peer is late.
LATE_WINDOW = 1
# A gradient is there about 2 s after its peer wrote it: settle_seconds, the upload, and a listing.
DEADLINE_SECONDS, LATE_DEADLINE_SECONDS = 40.0, 8.0
PEER_SECONDS = 100.0
BATCH, LENGTH, PAGES, VOCABULARY = 4, 64, 2, 256

Gradient = NDArray[np.float32]


# ---- a peer


def play_peer(peer: int, mount: Path) -> None:
    """Play all windows as one peer. Raises StepError if a check fails."""
    dataset = TemplarDataset(mount / "dataset", text_column="tokens", page_rows=20)
    for window in range(WINDOWS):
        gradients = folder_of(mount, window)
        own = gradient_of(dataset, peer, window)
        if window == LATE_WINDOW and peer == PEERS - 1:
            wait_for(aggregate_of(mount, window), timeout=PEER_SECONDS)  # late: the others go on without it
            save(gradients / f"peer-{peer}.npz.zst", own, [peer])
            say(f"window {window} peer {peer}: late")
        else:
            save(gradients / f"peer-{peer}.npz.zst", own, [peer])
            names = [gradients / f"peer-{other}.npz.zst" for other in range(PEERS)]
            # A short one where the others wait in any case.
            deadline = LATE_DEADLINE_SECONDS if window == LATE_WINDOW else DEADLINE_SECONDS
            try:
                paths = wait_for(names, timeout=deadline)
            except FilesMissingError as late:
                paths = list(late.found)
                say(
                    f"window {window} peer {peer}: left out {' '.join(Path(path).name for path in late.missing)}"
                )
            mean, members = gathered(paths)
            if peer == 0:
                # One peer makes the next directory. If all made it at a time, the store would refuse most requests.
                folder_of(mount, window + 1).mkdir()
                save(aggregate_of(mount, window), mean, members)
        wait_for(aggregate_of(mount, window), timeout=PEER_SECONDS)
        check_aggregate(dataset, mount, peer, window)


def gradient_of(dataset: TemplarDataset, peer: int, window: int) -> Gradient:
    """Return what stands for a gradient: the frequency of each token in the batches that the seed chooses."""
    counts = np.zeros(VOCABULARY, np.float32)
    for batch in dataset.batches(f"{peer}:{window}", PAGES, BATCH, LENGTH, end_token=0):
        counts += np.bincount(batch.ravel(), minlength=VOCABULARY)
    return counts / counts.sum()


def gathered(paths: Sequence[str]) -> tuple[Gradient, list[int]]:
    """Return the mean of the gradients in files, and the peers that they are of."""
    found = [load(path) for path in paths]
    return np.mean([gradient for gradient, _ in found], axis=0), [peer for _, of in found for peer in of]


def check_aggregate(dataset: TemplarDataset, mount: Path, peer: int, window: int) -> None:
    """Compare the aggregate with the mean of its members, computed again from their seeds."""
    mean, members = load(aggregate_of(mount, window))
    own = np.mean([gradient_of(dataset, member, window) for member in members], axis=0)
    is_whole = PEERS - 1 not in members if window == LATE_WINDOW else len(members) == PEERS
    if not is_whole or not np.array_equal(mean, own):
        raise StepError(f"peer {peer}, window {window}: the aggregate is not that of the peers {members}")
    say(f"window {window} peer {peer}: aggregate of peers {members} is equal")


def folder_of(mount: Path, window: int) -> Path:
    """Return the directory of a window's gradients."""
    return mount / f"gradients/window-{window}"


def aggregate_of(mount: Path, window: int) -> Path:
    """Return the path of a window's aggregate."""
    return mount / f"aggregate/window-{window}.npz.zst"


def save(path: Path, gradient: Gradient, members: list[int]) -> None:
    """Write a file that appears as a whole: peers of this node see it too, while it is written."""
    content = io.BytesIO()
    np.savez(content, gradient=gradient, members=np.array(members))
    unfinished = path.with_name(path.name + ".tmp")
    unfinished.write_bytes(zstandard.compress(content.getvalue()))
    unfinished.rename(path)


def load(path: str | Path) -> tuple[Gradient, list[int]]:
    """Return a gradient, and the peers that it is of."""
    with np.load(io.BytesIO(zstandard.decompress(Path(path).read_bytes()))) as found:
        return found["gradient"], found["members"].tolist()


def say(words: str) -> None:
    """Print a line, whole: all peers write to one terminal."""
    os.write(sys.stdout.fileno(), f"{words}\n".encode())


# ---- the nodes


def play(bucket: DemoBucket, scratch: Path) -> None:
    """Mount the bucket on each node, play its peers, remove the old windows. Raises StepError if a check fails."""
    with contextlib.ExitStack() as stack:
        nodes = [
            stack.enter_context(Node(f"node-{number}", bucket, scratch / f"node-{number}"))
            for number in range(NODES)
        ]
        write_dataset(nodes[0].mountpoint / "dataset")
        (nodes[0].mountpoint / "aggregate").mkdir()
        folder_of(nodes[0].mountpoint, 0).mkdir(parents=True)
        nodes[0].sync("")
        peers = [
            subprocess.Popen(
                [*COMMAND, "--peer", str(peer), str(nodes[peer % NODES].mountpoint)], start_new_session=True
            )
            for peer in range(PEERS)
        ]
        began = time.monotonic()
        for peer, process in enumerate(peers):
            if process.wait(max(1.0, began + PEER_SECONDS - time.monotonic())) != 0:
                raise StepError(f"peer {peer} ended with status {process.returncode}")
        clean(nodes[0])
        for node in nodes:
            node.unmount()
    left = sorted(
        key for key in bucket.objects() if key.startswith(("gradients/", "aggregate/")) and key[-1] != "/"
    )
    last = WINDOWS - 1
    expected = [f"aggregate/window-{last}.npz.zst"]
    expected += [f"gradients/window-{last}/peer-{peer}.npz.zst" for peer in range(PEERS)]
    if left != expected:
        raise StepError(f"the bucket has {left}, not {expected}")
    say(f"the bucket has the last window only: {len(left)} objects")


def write_dataset(root: Path) -> None:
    """Write a Templar-style dataset of token lists."""
    root.mkdir()
    random = np.random.default_rng(0)
    rows = [random.integers(1, VOCABULARY, random.integers(20, 60)).astype(np.uint16) for _ in range(400)]
    pq.write_table(pa.table({"tokens": rows}), root / "000.parquet", row_group_size=100)
    shards = [{"path": "000.parquet", "num_rows": len(rows)}]
    (root / "_shard_sizes.json").write_text(json.dumps({"web": {"shards": shards, "total_rows": len(rows)}}))
    (root / "_metadata.yaml").write_text("configs: [{config_name: web}]")


def clean(node: Node) -> None:
    """Remove all windows but the last, on the mount of one node."""
    for window in range(WINDOWS - 1):
        gradients = folder_of(node.mountpoint, window)
        for path in [*gradients.iterdir(), aggregate_of(node.mountpoint, window)]:
            path.unlink()
        gradients.rmdir()


def play_all() -> None:
    """Play the example; leave nothing behind."""
    from examples.buckets.store import open_store

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    adopt_orphans()
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="window-", dir=os.environ.get("TMPDIR", "/var/tmp")) as folder:
        try:
            with (
                open_store(Path(folder) / "objects") as store,
                credentials(store.access_key, store.secret_key, "auto"),
                contextlib.closing(
                    DemoBucket(store.bucket, f"window-{os.getpid()}/", store.endpoint_url)
                ) as bucket,
            ):
                play(bucket, Path(folder))
        finally:
            end_everything()
            # Before anything is removed: through a mount, that would reach the bucket.
            unmount_below(Path(folder))
    say(f"all checks held, in {time.monotonic() - began:.0f} s")


def main() -> int:
    """Play the example, or one peer of it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--peer", nargs=2, metavar=("NUMBER", "MOUNT"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    try:
        if options.peer:
            play_peer(int(options.peer[0]), Path(options.peer[1]))
        else:
            play_all()
    except (StepError, LoaderError, OSError, subprocess.TimeoutExpired) as problem:
        say(f"FAILED: {problem}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
