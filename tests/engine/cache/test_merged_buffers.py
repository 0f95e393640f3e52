"""A chunk that gets a large buffer moves into it what its small ones have."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import trio
import trio.testing

from fusecache.engine.cache.block_cache import BlockCache, CacheOptions
from fusecache.engine.runtime.supervisor import Supervisor
from fusecache.model.objects import KIB, MIB
from fusecache.policy.cache.granules import CHUNK_BYTES
from tests.support.block_caches import fill_all, new_bucket, running_cache, some_bytes
from tests.support.inline_offload import InlineOffload

SIZE = 2 * CHUNK_BYTES
DATA = some_bytes(SIZE)


class HeldGets(InlineOffload):
    """Large GETs wait for ever from now on."""

    are_held = False

    async def network(self, call: Callable[..., Any], *args: Any) -> Any:
        if self.are_held and args[1].size > 128 * KIB:
            await trio.sleep_forever()
        return await super().network(call, *args)


async def test_a_read_that_waits_for_a_small_buffer_gets_one_that_becomes_free(tmp_path: Path) -> None:
    bucket, offload = new_bucket(), HeldGets()
    a, b = bucket.put("a", DATA), bucket.put("b", DATA)
    options = CacheOptions(tmp_path, 1 << 30, buffer_bytes=24 * MIB, free_space_floor_bytes=0)
    cache = BlockCache(bucket.watched, offload, options, Supervisor())  # type: ignore[arg-type]
    async with trio.open_nursery() as nursery:
        await nursery.start(cache.run)
        pool = cache._buffer_pool
        for number in range(pool.small_count):  # one chunk has them all
            await cache.read(cache.open(a, SIZE), (number + 1) * 768 * KIB, 64 * KIB)
        await trio.testing.wait_all_tasks_blocked()
        large = pool._free[False].pop()
        pool._free[False].clear()
        offload.are_held = True
        found = []

        async def read_small() -> None:
            found.append(bytes(await cache.read(cache.open(b, SIZE), 3 * MIB, 64 * KIB)))

        nursery.start_soon(cache.read, cache.open(a, SIZE), 4 * MIB, MIB)
        await trio.sleep(0.01)
        nursery.start_soon(read_small)
        await trio.testing.wait_all_tasks_blocked()
        assert not found
        pool._free[False].append(large)
        cache._fetcher.pump()
        await trio.testing.wait_all_tasks_blocked()
        assert found == [DATA[3 * MIB : 3 * MIB + 64 * KIB]]
        nursery.cancel_scope.cancel()


async def test_a_small_load_that_gets_a_large_buffer_does_so_too(tmp_path: Path) -> None:
    bucket = new_bucket()
    a = bucket.put("a", DATA)
    async with running_cache(bucket.watched, tmp_path, threads=False) as cache:
        pool, handle = cache._buffer_pool, cache.open(a, SIZE)
        await fill_all(cache, a, SIZE)
        chunk = handle.entry.chunks[0]
        for each in handle.entry.chunks.values():
            for buffer in list(each.buffers):
                pool.release(buffer)
        await cache.read(cache.open(a, SIZE), MIB, 64 * KIB)
        await trio.testing.wait_all_tasks_blocked()
        assert [buffer.small for buffer in chunk.buffers] == [True]
        pool._free[True].clear()  # others use them
        await cache.read(cache.open(a, SIZE), MIB + 256 * KIB, 64 * KIB)
        assert [buffer.small for buffer in chunk.buffers] == [False]
        assert chunk.in_memory().bit_count() == 2
