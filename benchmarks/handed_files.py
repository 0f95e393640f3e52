"""Samples of a warm mount for writing: by the daemon's own files, through the daemon, and from a local folder.

`python -m benchmarks.handed_files` prints a table, medians over rounds, all ways in turns. A process reads samples of
100 KB in random order, 32 at a time. Before each run all pages of the kernel are dropped, so that each sample comes
from the disk. CPU is that of the reader and of the daemon together. Needs root.
"""

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.processes import cpu_seconds
from loader import MDSWriter
from tests.s3server import ServerProcess
from tests.support.mounts import FUSECACHE, Mount, run
from tests.support.s3_buckets import Bucket, Service

VALUE_BYTES = 100_000
SAMPLES = 5_000
BATCH = 32
BAR = 1.1
# Arguments: the folder, whether to ask the daemon for its files. Prints the CPU and the seconds.
READER = f"""
import json, random, sys, time
from loader import MDSDataset
from loader.base.cached_files import CachedFiles
if sys.argv[2] == "no":
    CachedFiles.open = lambda self, path, *, unless_open=False: None
dataset = MDSDataset(sys.argv[1])
order = list(range({SAMPLES}))
random.Random(1).shuffle(order)
for shard in range(dataset.index.shards):  # open the files
    dataset[int(dataset.index.samples[:shard].sum())]
began, cpu = time.perf_counter(), time.process_time()
for first in range(0, {SAMPLES}, {BATCH}):
    for sample in dataset.__getitems__(order[first:first + {BATCH}]):
        assert len(sample["image"]) == {VALUE_BYTES}
print(json.dumps([time.process_time() - cpu, time.perf_counter() - began]))
"""


def _read(folder: Path, mount: Mount, *, asks: bool) -> tuple[float, float]:
    """Return the CPU of reader and daemon, and the time, of one run: µs a sample."""
    os.sync()
    Path("/proc/sys/vm/drop_caches").write_text("1\n")
    before = cpu_seconds(mount.pid)
    words = [sys.executable, "-c", READER, str(folder), "yes" if asks else "no"]
    done = subprocess.run(words, check=True, capture_output=True, text=True)
    cpu, seconds = json.loads(done.stdout)
    return (cpu + cpu_seconds(mount.pid) - before) / SAMPLES * 1e6, seconds / SAMPLES * 1e6


def main() -> int:
    """Measure and print. Return 1 if the bar is missed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.handed_files", description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    with tempfile.TemporaryDirectory(dir="/var/tmp") as folder, ServerProcess() as server:
        local = Path(folder, "data")
        source = random.Random(1)
        with MDSWriter(local, {"image": "bytes"}, size_limit=2**26) as writer:
            for _ in range(SAMPLES):
                writer.write({"image": source.randbytes(VALUE_BYTES)})
        service = Service(
            server.endpoint_url, server.access_key, server.secret_key, server.bucket, server.control
        )
        bucket = Bucket(service, service.client(), "")
        for path in local.iterdir():
            bucket.put(f"data/{path.name}", path.read_bytes())
        mount = Mount(bucket, Path(folder, "mnt"), Path(folder, "cache"))
        mount.path.mkdir()
        mount.start("--cache-size", "4GiB")
        try:
            run(FUSECACHE, "warm", "--wait", mount.path / "data")
            ways = {
                "local folder": (local, False),
                "the daemon's files": (mount.path / "data", True),
                "through the daemon": (mount.path / "data", False),
            }
            found: dict[str, list[tuple[float, float]]] = {way: [] for way in ways}
            for number in range(rounds + 1):
                for way in list(ways) if number % 2 else reversed(ways):
                    figures = _read(ways[way][0], mount, asks=ways[way][1])
                    if number:  # in the first round the daemon checks the files
                        found[way].append(figures)
        finally:
            mount.remove()
    rows = ["| way | CPU µs a sample | µs a sample | CPU / local folder |", "|---|---|---|---|"]
    ratios = {}
    for way, runs in found.items():
        ratios[way] = statistics.median(a[0] / b[0] for a, b in zip(runs, found["local folder"], strict=True))
        cpu, seconds = (statistics.median(each) for each in zip(*runs, strict=True))
        rows.append(f"| {way} | {cpu:.0f} | {seconds:.0f} | {ratios[way]:.2f} |")
    sys.stdout.write("\n".join(rows) + "\n")
    return int(ratios["the daemon's files"] > BAR)


if __name__ == "__main__":
    sys.exit(main())
