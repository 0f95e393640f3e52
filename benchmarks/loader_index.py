"""How long an index of many shards takes to open, and how much memory: one JSON line.

Run: `python -m benchmarks.loader_index [--shards 1000000]`. It writes an index of raw shards and one of packed
shards with hashes, and opens each in a process of its own. CPU seconds repeat within a tenth.
"""

import argparse
import json
import platform
import subprocess
import sys
import tempfile
from pathlib import Path

OPEN = """
import json, resource, sys, time
from loader import MDSDataset
start = time.process_time()
dataset = MDSDataset(sys.argv[1])
opened = time.process_time() - start
fingerprint = dataset.fingerprint
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
print(json.dumps({"open_cpu_seconds": round(opened, 2), "peak_mib": round(peak), "samples": len(dataset)}))
"""


def write_index(directory: Path, shards: int, *, packed: bool) -> int:
    """Write an index as a merge of folders of a thousand shards has it; return its bytes."""
    hashes = {"xxh64": "0123456789abcdef"} if packed else {}
    with open(directory / "index.json", "w") as file:
        file.write('{"shards": [')
        for number in range(shards):
            name = f"{number // 1000}/shard.{number % 1000:05}.mds"
            shard = {
                "column_encodings": ["ndarray:int32:2048"],
                "column_names": ["tokens"],
                "column_sizes": [8192],
                "compression": "zstd:3" if packed else None,
                "format": "mds",
                "hashes": sorted(hashes),
                "raw_data": {"basename": name, "bytes": 67108000 + number % 97, "hashes": hashes},
                "samples": 8190 - number % 7,
                "size_limit": 67108864,
                "version": 2,
                "zip_data": {"basename": f"{name}.zstd", "bytes": 30000000, "hashes": hashes}
                if packed
                else None,
            }
            file.write((", " if number else "") + json.dumps(shard, sort_keys=True))
        file.write('], "version": 2}')
        return file.tell()


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shards", type=int, default=1_000_000)
    options = parser.parse_args()
    revision = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
    result: dict[str, object] = {
        "revision": revision.stdout.strip(),
        "machine": platform.machine(),
        "python": platform.python_version(),
        "shards": options.shards,
    }
    for name, packed in (("raw", False), ("packed_with_hashes", True)):
        with tempfile.TemporaryDirectory() as folder:
            size = write_index(Path(folder), options.shards, packed=packed)
            done = subprocess.run(
                [sys.executable, "-c", OPEN, folder], capture_output=True, text=True, check=True
            )
            result[name] = {"index_bytes": size, **json.loads(done.stdout)}
    print(json.dumps(result))  # noqa: T201 -- the result


if __name__ == "__main__":
    main()
