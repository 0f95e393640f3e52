"""What a huge data set costs one node, at a hundredth of its size: `python -m benchmarks.scale`, or `make bench-scale`.

An index of 100 000 shards, read through a mount by one of 1 024 nodes with 8 ranks each; and 10 000 directories that
`find` walks. Prints memory, CPU seconds and requests as JSON, beside what `loader simulate` foretells of the index.
Which of them grow with the size: docs/how-to/scale.md.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.loader_index import write_index
from benchmarks.processes import BenchmarkError
from loader.tools.simulate import index_costs
from tests.s3server import ServerProcess
from tests.support.mounts import Mount
from tests.support.s3_buckets import Bucket, Service

NODES, RANKS_PER_NODE = 1024, 8

# Prints the memory after each step, less that of an interpreter with the packages.
READ = """
import json, sys, time
from loader import ElasticBatchSampler, MDSDataset, World

def used():
    lines = open("/proc/self/status").read().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon")) / 1024

path, nodes, ranks = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
before, start, cpu = used(), time.monotonic(), time.process_time()
dataset = MDSDataset(path)
opened = {"seconds": time.monotonic() - start, "cpu_seconds": time.process_time() - cpu, "mib": used() - before}
start = time.monotonic()
sampler = ElasticBatchSampler(dataset, global_batch_size=nodes * ranks, order="native", seed=1,
                              world=World(0, nodes * ranks, ranks))
next(iter(sampler))
first = {"seconds": time.monotonic() - start, "mib": used() - before}
print(json.dumps({"samples": len(dataset), "index": opened, "first_batch": first}))
"""


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shards", type=int, default=100_000)
    parser.add_argument("--directories", type=int, default=10_000)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, ServerProcess() as server:
        service = Service(
            server.endpoint_url, server.access_key, server.secret_key, server.bucket, server.control
        )
        bucket = Bucket(service, service.client(), "")
        index = Path(folder) / "index.json"
        nbytes = write_index(Path(folder), options.shards, packed=False)
        bucket.put("data/index.json", index.read_bytes())
        server.control.add_many("tree/{:07d}/sample.bin", options.directories, size=1000)
        mount = Mount(bucket, Path(folder) / "mount", Path(folder) / "cache")
        mount.path.mkdir()
        mount.start("--read-only")
        try:
            result = {
                "shards": options.shards,
                "index_bytes": nbytes,
                "foretold": asdict(index_costs(nbytes, options.shards)),
                "read": _requests(server, _read_index, mount),
                "directories": options.directories,
                "find": _requests(server, _find, mount, options.directories),
            }
        finally:
            mount.remove()
    print(json.dumps(result, indent=2))  # noqa: T201 -- the result


def _requests(server: ServerProcess, measure: Any, *arguments: Any) -> dict[str, Any]:
    """Return what a measurement says, with the requests that the bucket saw meanwhile."""
    before = server.control.counts()
    figures = measure(*arguments)
    after = server.control.counts()
    return {**figures, "requests": {name: after[name] - before.get(name, 0) for name in after}}


def _read_index(mount: Mount) -> dict[str, Any]:
    words = [sys.executable, "-c", READ, str(mount.path / "data"), str(NODES), str(RANKS_PER_NODE)]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        raise BenchmarkError(done.stderr)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def _find(mount: Mount, directories: int) -> dict[str, Any]:
    before = _daemon_mib(mount.pid)
    done = subprocess.run(
        ["find", mount.path / "tree", "-type", "f"], capture_output=True, text=True, check=True
    )
    if done.stdout.count("\n") != directories:
        raise BenchmarkError(f"find saw {done.stdout.count(chr(10))} files of {directories}")
    return {"daemon_mib": _daemon_mib(mount.pid) - before}


def _daemon_mib(pid: int) -> float:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon")) / 1024


if __name__ == "__main__":
    main()
