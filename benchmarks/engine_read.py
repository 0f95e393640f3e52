"""How fast the read path delivers one object, without FUSE: cold from the test server, then warm from the
disk.

Prints one JSON line. The figure to compare with is `raw`: boto3 into reused buffers with 32 threads, nothing
kept.
"""

import argparse
import concurrent.futures
import json
import platform
import queue
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import trio

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # so that the script runs from anywhere

from fusecache.engine.cache.block_cache import BlockCache, CacheOptions  # noqa: E402 (the path comes first)
from fusecache.engine.runtime.offload import Offload  # noqa: E402
from fusecache.engine.runtime.supervisor import Supervisor  # noqa: E402
from fusecache.model.objects import MIB, Extent, ObjectId  # noqa: E402
from fusecache.remote.endpoints import Credentials, Endpoint  # noqa: E402
from fusecache.remote.s3.store import S3Store  # noqa: E402
from tests.s3server import ServerProcess  # noqa: E402

KEY = "object"
RANGE_BYTES = 8 * MIB
THREADS = 32


def cpu_seconds() -> float:
    """Return the CPU time of this process so far."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def measured(seconds: float, cpu: float, total: int) -> dict[str, Any]:
    """Return one row of the result."""
    return {"MB/s": round(total / seconds / 1e6), "seconds": round(seconds, 2), "cpu_seconds": round(cpu, 2)}


def read_raw(store: S3Store, object_id: ObjectId, total: int) -> dict[str, Any]:
    """Fetch everything into reused buffers."""
    buffers: queue.SimpleQueue[memoryview] = queue.SimpleQueue()
    for _ in range(THREADS):
        memory = bytearray(RANGE_BYTES)
        buffers.put(memoryview(memory))

    def fetch(start: int) -> None:
        buffer = buffers.get()
        store.get_into(object_id, Extent(start, min(total, start + RANGE_BYTES)), buffer, lambda count: None)
        buffers.put(buffer)

    with concurrent.futures.ThreadPoolExecutor(THREADS) as pool:
        began, cpu = time.monotonic(), cpu_seconds()
        list(pool.map(fetch, range(0, total, RANGE_BYTES)))
        return measured(time.monotonic() - began, cpu_seconds() - cpu, total)


async def read_sequentially(cache: BlockCache, object_id: ObjectId, total: int, step: int) -> dict[str, Any]:
    """Read the object from start to end as one reader does."""
    handle = cache.open(object_id, total)
    began, cpu, offset = time.monotonic(), cpu_seconds(), 0
    while data := await cache.read(handle, offset, step):
        offset += len(data)
        await trio.lowlevel.checkpoint()
    cache.close(handle)
    if offset != total:
        raise RuntimeError(f"{offset} of {total} bytes came")
    return measured(time.monotonic() - began, cpu_seconds() - cpu, total)


async def read_through_cache(
    store: S3Store, object_id: ObjectId, total: int, options: CacheOptions
) -> dict[str, Any]:
    """Read the object cold, then, with empty buffers, from the disk."""
    result: dict[str, Any] = {}
    for name in ("cold", "warm_from_disk"):
        supervisor = Supervisor()
        offload = Offload(supervisor, network_threads=64, upload_threads=1)
        cache = BlockCache(store, offload, options, supervisor)
        async with trio.open_nursery() as nursery:
            await nursery.start(cache.run)
            await trio.sleep(0.5)  # the server and the disk settle
            result[name] = await read_sequentially(cache, object_id, total, MIB)
            facts = cache.statistics()
            result[name] |= {"requests": facts.requests, "uncached": facts.uncached}
            result[name]["latency_p99_ms"] = round(facts.latency.p99_seconds * 1000, 2)
            result[name]["wait_seconds"] = {k: round(v, 2) for k, v in facts.wait_seconds.items()}
            await trio.sleep(1)  # the last buffers are written out
            nursery.cancel_scope.cancel()
    return result


def main() -> None:
    """Measure, and print one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--bytes", type=int, default=1 << 30)
    parser.add_argument("--buffer-bytes", type=int, default=512 * MIB)
    parser.add_argument("--latency", type=float, default=0.0, help="seconds before each answer")
    parser.add_argument("--bandwidth", type=float, default=None, help="bytes a second and connection")
    parser.add_argument("--directory", type=Path, default=None, help="where the cache is made")
    options = parser.parse_args()
    with ServerProcess() as server, tempfile.TemporaryDirectory(dir=options.directory) as folder:
        server.control.add_synthetic(KEY, options.bytes, 1)
        server.control.set(latency=options.latency, bandwidth=options.bandwidth)
        endpoint = Endpoint(server.endpoint_url, "auto")
        store = S3Store(
            server.bucket, endpoint, credentials=Credentials(server.access_key, server.secret_key)
        )
        object_id = store.head(KEY).object_id
        cache_options = CacheOptions(
            Path(folder), 4 * options.bytes, buffer_bytes=options.buffer_bytes, free_space_floor_bytes=0
        )
        result = {
            "benchmark": "engine_read",
            "revision": subprocess.run(
                ["git", "describe", "--always", "--dirty"],
                cwd=ROOT,
                capture_output=True,
                text=True,
                check=False,
            ).stdout.strip(),
            "machine": f"{platform.machine()} Linux {platform.release()}",
            "bytes": options.bytes,
            "latency_seconds": options.latency,
            "bandwidth_a_connection": options.bandwidth,
            "raw": read_raw(store, object_id, options.bytes),
        }
        result |= trio.run(read_through_cache, store, object_id, options.bytes, cache_options)
    print(json.dumps(result))  # noqa: T201 (its only output)


if __name__ == "__main__":
    main()
