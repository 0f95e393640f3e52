"""A fill stores the bytes of its own object, whatever else happens to the buffers meanwhile."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import trio
import trio.testing

from fusecache.disk.cache_files import CacheFiles
from fusecache.engine.cache.block_cache import BlockCache, CacheOptions
from fusecache.engine.cache.disk_tier import DiskTier
from fusecache.engine.runtime.supervisor import Supervisor
from fusecache.model.objects import KIB, MIB
from fusecache.policy.cache.granules import CHUNK_BYTES
from tests.support.block_caches import bucket_of_one, new_bucket, running_cache, some_bytes
from tests.support.inline_offload import InlineOffload


class SlowDisk(InlineOffload):
    """Writes of cache files wait while there is a gate that is not open."""

    gate: trio.Event | None = None

    async def disk(self, call: Callable[..., Any], *args: Any) -> Any:
        if self.gate is not None and getattr(call, "__func__", None) is CacheFiles.store:
            await self.gate.wait()
        return await super().disk(call, *args)


async def too_slow(*_: object) -> None:
    """What is fetched is not stored, as with a disk that is slower than the bucket."""


async def test_a_buffer_that_another_object_has_got_is_not_stored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bucket, disk, place = new_bucket(), SlowDisk(), 3 * MIB
    mine = some_bytes(CHUNK_BYTES, 1)
    a, b = bucket.put("a", mine), bucket.put("b", some_bytes(CHUNK_BYTES, 2))
    options = CacheOptions(tmp_path, 1 << 30, buffer_bytes=40 * MIB, free_space_floor_bytes=0)
    cache = BlockCache(bucket.watched, disk, options, Supervisor())  # type: ignore[arg-type]
    async with trio.open_nursery() as nursery:
        await nursery.start(cache.run)
        with monkeypatch.context() as patch:
            patch.setattr(DiskTier, "store", too_slow)
            for start in (MIB, place):
                await cache.read(cache.open(a, CHUNK_BYTES), start, 64 * KIB)
            await trio.testing.wait_all_tasks_blocked()
        handle = cache.open(a, CHUNK_BYTES)
        disk.gate = trio.Event()
        nursery.start_soon(cache.maintenance.fill, handle.entry, 0)  # writes the first buffer, and waits
        await trio.testing.wait_all_tasks_blocked()
        # A large read takes over what the second buffer has; then that buffer is the next to be given away.
        await cache.read(handle, 4 * MIB, MIB)
        await cache.read(cache.open(b, CHUNK_BYTES), place, 64 * KIB)
        disk.gate.set()
        await trio.testing.wait_all_tasks_blocked()
        (chunk,) = handle.entry.chunks.values()
        for buffer in list(chunk.buffers):
            cache._buffer_pool.release(buffer)  # so that the next read comes from the disk
        assert await cache.read(cache.open(a, CHUNK_BYTES), place, 64 * KIB) == mine[place : place + 64 * KIB]
        nursery.cancel_scope.cancel()


async def test_buffers_that_the_kernel_has_read_are_free_unless_in_use(tmp_path: Path) -> None:
    bucket, object_id, data = bucket_of_one(2 * CHUNK_BYTES)
    async with running_cache(bucket.watched, tmp_path, threads=False) as cache:
        handle = cache.open(object_id, len(data))
        for index in range(2):
            await cache.maintenance.fill(handle.entry, index)
        (buffer,) = handle.entry.chunks[0].buffers
        cache._buffer_pool.acquire_use(buffer)  # as for a reply that another process sends
        for index in range(2):
            cache.maintenance.on_in_kernel(handle.entry, index)
        assert handle.entry.chunks[0].buffers == [buffer]
        assert cache._buffer_pool.in_use == 1
        cache._buffer_pool.release_use(buffer, trio.current_time())
