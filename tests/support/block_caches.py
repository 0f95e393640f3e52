"""A block cache over a bucket in memory, for tests."""

import random
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from threading import Lock

import pytest
import trio

from fusecache.engine.cache.block_cache import BlockCache, CacheOptions
from fusecache.engine.runtime.offload import Offload
from fusecache.engine.runtime.supervisor import Supervisor
from fusecache.model.objects import MIB, Extent, ObjectId
from fusecache.policy.cache.granules import CHUNK_BYTES, PAGE_BYTES
from fusecache.remote.store import Interruption
from tests.support.inline_offload import InlineOffload
from tests.support.memory_store import MemoryStore

BUFFER_BYTES = 40 * MIB


def some_bytes(size: int, seed: int = 1) -> bytes:
    """Return bytes in which no two places look alike."""
    return random.Random(seed).randbytes(size)


def pages_of(size: int) -> int:
    """Return what an object of `size` bytes takes on the disk: whole pages."""
    return -(-size // PAGE_BYTES) * PAGE_BYTES


class WatchedStore:
    """Passes GETs on, notes their extents, and lets a test hold them at a byte.

    Safe for many threads.
    """

    def __init__(self, inner: MemoryStore) -> None:
        self.inner = inner
        self.extents: list[Extent] = []
        self.on_progress: Callable[[Extent, int], None] = lambda extent, received: None
        self._lock = Lock()

    def get_into(
        self,
        object_id: ObjectId,
        extent: Extent,
        buffer: memoryview,
        progress: Callable[[int], None],
        interruption: Interruption | None = None,
    ) -> None:
        with self._lock:
            self.extents.append(extent)

        def watched(received: int) -> None:
            progress(received)
            self.on_progress(extent, received)

        self.inner.get_into(object_id, extent, buffer, watched, interruption)

    def granules_fetched(self) -> int:
        """Return how many 64 KiB granules all GETs asked for, repeats included."""
        return sum(-(-extent.size // 65536) for extent in self.extents)


@dataclass(frozen=True, slots=True)
class Bucket:
    """A store in memory with one way in for tests."""

    memory: MemoryStore
    watched: WatchedStore

    def put(self, key: str, data: bytes) -> ObjectId:
        """Store an object as another client would."""
        return ObjectId(key, self.memory.put_bytes(key, data))


def new_bucket() -> Bucket:
    """Return an empty bucket."""
    memory = MemoryStore()
    return Bucket(memory, WatchedStore(memory))


def bucket_of_one(size: int, seed: int = 1) -> tuple[Bucket, ObjectId, bytes]:
    """Return a bucket with one object, which is named, and its bytes."""
    bucket, data = new_bucket(), some_bytes(size, seed)
    return bucket, bucket.put("a", data), data


@asynccontextmanager
async def running_cache(  # what differs between caches
    store: object,
    directory: Path,
    *,
    limit_bytes: int = 1 << 30,
    buffer_bytes: int = BUFFER_BYTES,
    floor_bytes: int = 0,
    boot_id: str = "boot-1",
    threads: bool = True,
    supervisor: Supervisor | None = None,
) -> AsyncIterator[BlockCache]:
    """Run a cache until the block ends; then it is stopped in order."""
    supervisor = supervisor or Supervisor()
    offload: Offload = (
        Offload(supervisor, network_threads=32, upload_threads=4) if threads else InlineOffload()
    )
    options = CacheOptions(
        directory,
        limit_bytes,
        buffer_bytes=buffer_bytes,
        free_space_floor_bytes=floor_bytes,
        boot_id=boot_id,
    )
    cache = BlockCache(store, offload, options, supervisor)  # type: ignore[arg-type]  # any store with get_into
    async with trio.open_nursery() as nursery:
        await nursery.start(cache.run)
        try:
            yield cache
        finally:
            nursery.cancel_scope.cancel()


async def read_all(cache: BlockCache, object_id: ObjectId, size: int, step: int = MIB) -> bytes:
    """Read an object from its start to its end."""
    handle = cache.open(object_id, size)
    data = bytearray()
    while piece := await cache.read(handle, len(data), step):
        data += piece
    cache.close(handle)
    return bytes(data)


async def fill_all(cache: BlockCache, object_id: ObjectId, size: int) -> None:
    """Warm an object as a warm-up does: all of it is on the disk then, however slow that is just now.

    What is merely read is not kept where the disk pauses for a quarter of a second and buffers are short.
    """
    handle = cache.open(object_id, size)
    handle.entry.warming += 1
    try:
        for index in range(-(-size // CHUNK_BYTES)):
            await cache.maintenance.fill(handle.entry, index)
    finally:
        handle.entry.warming -= 1
        cache.close(handle)


def at_rest(cache: BlockCache) -> bool:
    """Say whether nothing is fetched, read from the disk or written to it, nor waits for that."""
    return not any(
        chunk.fetches or chunk.disk_operations or any(buffer.busy for buffer in chunk.buffers)
        for entry in cache._table.objects.values()
        for chunk in entry.chunks.values()
    )


def stop_ticks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have caches not write rows and measure the disk once a second: no test must be as quick as that.

    Before the first tick the index is empty, and nothing is set aside for it. An eviction changes both, too.
    """
    monkeypatch.setattr("fusecache.engine.cache.block_cache.INDEX_SECONDS", 3600.0)


async def until(condition: Callable[[], bool], timeout_seconds: float = 60) -> None:
    """Wait until something that other tasks bring about is true. Raises trio.TooSlowError."""
    with trio.fail_after(timeout_seconds):
        while not condition():  # noqa: ASYNC110  # what it looks at sets no event
            await trio.sleep(0.001)
