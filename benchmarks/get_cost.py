"""What one ranged GET costs the client's CPU: boto3's get_object against the store's own way.

Prints one JSON line: milliseconds of CPU a GET of 8 KiB, seconds of CPU a GiB by 8 MiB, plain and over TLS, medians
of several rounds that alternate. The server is another process; its CPU does not count.
"""

import argparse
import concurrent.futures
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # so that the script runs from anywhere

from fusecache.model.objects import GIB, KIB, MIB, Extent, ObjectId  # noqa: E402 (the path comes first)
from fusecache.remote.endpoints import Credentials, Endpoint  # noqa: E402
from fusecache.remote.s3.store import S3Store  # noqa: E402
from tests.s3server import ServerProcess  # noqa: E402
from tests.s3server.client import boto_client  # noqa: E402

KEY = "object"
OBJECT_BYTES = GIB
THREADS = 16
# size of a GET -> how many of them a round makes
CASES = {8 * KIB: 400, 8 * MIB: 64}
Fetch = Callable[[memoryview, Extent], None]


def cpu_seconds() -> float:
    """Return the CPU time of this process so far."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def cost_seconds(fetch: Fetch, size: int, count: int) -> float:
    """Return the CPU time of one GET of `size` bytes, made by THREADS threads."""
    starts = range(0, count * size, size)
    buffers = [memoryview(bytearray(size)) for _ in range(THREADS)]

    def run(number: int) -> None:
        for start in starts[number::THREADS]:
            fetch(buffers[number], Extent(start, start + size))

    with concurrent.futures.ThreadPoolExecutor(THREADS) as pool:
        list(pool.map(run, range(THREADS)))  # connections are made before the clock starts
        before = cpu_seconds()
        list(pool.map(run, range(THREADS)))
        return (cpu_seconds() - before) / count


def ways(server: ServerProcess, etag: str) -> dict[str, Fetch]:
    """Return the ways to fetch, by name."""
    client = boto_client(server, max_pool_connections=THREADS)
    store = S3Store(
        server.bucket,
        Endpoint(server.endpoint_url, "auto"),
        credentials=Credentials(server.access_key, server.secret_key),
    )

    def by_boto3(buffer: memoryview, extent: Extent) -> None:
        answer = client.get_object(
            Bucket=server.bucket,
            Key=KEY,
            Range=f"bytes={extent.start}-{extent.stop - 1}",
            IfMatch=f'"{etag}"',
        )
        filled = 0
        while filled < extent.size:
            filled += answer["Body"].readinto(buffer[filled : filled + 256 * KIB])

    def by_store(buffer: memoryview, extent: Extent) -> None:
        store.get_into(ObjectId(KEY, etag), extent, buffer, lambda count: None)

    return {"boto3": by_boto3, "store": by_store}


def measure(rounds: int, *, tls: bool) -> dict[str, dict[str, float]]:
    """Return the medians of one kind of connection, by way."""
    with ServerProcess(tls=tls) as server:
        if server.ca_path is not None:
            os.environ["AWS_CA_BUNDLE"] = server.ca_path
        etag = server.control.add_synthetic(KEY, OBJECT_BYTES, seed=1)
        fetches = ways(server, etag)
        costs: dict[tuple[str, int], list[float]] = {}
        for _ in range(rounds):
            for name, fetch in fetches.items():
                for size, count in CASES.items():
                    costs.setdefault((name, size), []).append(cost_seconds(fetch, size, count))
    median = {case: statistics.median(values) for case, values in costs.items()}
    return {
        name: {
            "cpu_ms_a_get_of_8_kib": round(median[name, 8 * KIB] * 1e3, 3),
            "cpu_seconds_a_gib": round(median[name, 8 * MIB] * GIB / (8 * MIB), 2),
        }
        for name in fetches
    }


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    rounds: int = parser.parse_args().rounds
    revision = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False
    ).stdout.strip()
    result = {
        "benchmark": "get_cost",
        "revision": revision,
        "machine": f"{platform.machine()} {os.cpu_count()} cores",
        "plain": measure(rounds, tls=False),
        "tls": measure(rounds, tls=True),
    }
    sys.stdout.write(json.dumps(result) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
