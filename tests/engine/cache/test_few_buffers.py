"""Many readers, few buffers: no reader waits for ever."""

import random
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import trio

from fusecache.engine.cache.block_cache import BlockCache
from fusecache.model.errors import Unavailable
from fusecache.model.objects import KIB, MIB
from fusecache.policy.cache.fetch_order import Cause
from fusecache.policy.cache.granules import CHUNK_BYTES
from tests.support.block_caches import new_bucket, running_cache, some_bytes
from tests.support.inline_offload import InlineOffload

READERS = 16
LARGE = 20 * MIB + 12_345
SMALL = 150_001
# What the kernel makes of larger reads.
PIECE = 128 * KIB


@pytest.mark.real_time
async def test_random_readers_with_fewer_buffers_than_readers_all_finish(tmp_path: Path) -> None:
    """A fetch may wait for the buffer that another reader holds; that reader's own fetch must not wait behind it."""
    bucket = new_bucket()
    contents = [some_bytes(LARGE if seed < 8 else SMALL, seed=seed) for seed in range(40)]
    objects = [bucket.put(f"o{seed}", data) for seed, data in enumerate(contents)]

    async def read_some(cache: BlockCache, seed: int) -> None:
        chance = random.Random(seed)
        for _ in range(15):
            number = chance.randrange(8) if chance.random() < 0.5 else chance.randrange(8, len(objects))
            data = contents[number]
            handle = cache.open(objects[number], len(data))
            for _ in range(8):
                offset = chance.randrange(len(data))
                stop = min(offset + chance.choice((4 * KIB, 128 * KIB, MIB, 2 * MIB)), len(data))
                while offset < stop:
                    found = bytes(await cache.read(handle, offset, min(PIECE, stop - offset)))
                    assert found == data[offset : offset + len(found)]
                    offset += len(found)
            cache.close(handle)

    async with running_cache(bucket.watched, tmp_path, limit_bytes=40 * MIB, buffer_bytes=64 * MIB) as cache:
        with trio.fail_after(280):
            async with trio.open_nursery() as nursery:
                for seed in range(READERS):
                    nursery.start_soon(read_some, cache, seed)


async def test_read_without_buffer_ends_after_a_minute(tmp_path: Path) -> None:
    """A disk that hangs may hold all buffers. A prefetch stays in the queue, because no reader depends on it."""
    bucket = new_bucket()
    data = some_bytes(2 * CHUNK_BYTES)
    object_id = bucket.put("a", data)
    async with running_cache(bucket.watched, tmp_path, threads=False) as cache:
        handle, pool = cache.open(object_id, len(data)), cache._buffer_pool
        held = []
        for small in (True, False):
            while buffer := pool.acquire(small=small, cause=Cause.DEMAND, now=0.0):
                held.append(buffer)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(cache.maintenance.fill, handle.entry, 1)  # a warm-up of the second chunk
            for offset in (0, 100, CHUNK_BYTES, CHUNK_BYTES + MIB):
                began = trio.current_time()
                with trio.fail_after(70), pytest.raises(Unavailable, match=r"a: no free buffer .*for 60 s"):
                    await cache.read(handle, offset, 10)
                assert trio.current_time() - began >= 60
            assert not bucket.watched.extents
            for buffer in held:
                pool._free[buffer.small].append(buffer)
            with trio.fail_after(10):
                for offset in (0, CHUNK_BYTES):
                    assert await cache.read(handle, offset, 10) == data[offset : offset + 10]
        cache.close(handle)


async def test_reads_wait_while_others_progress(tmp_path: Path) -> None:
    """A slow bucket with many readers: each gets its turn, however long that takes."""
    async with one_slow_slot(tmp_path) as read:
        began = trio.current_time()
        with trio.fail_after(300):
            async with trio.open_nursery() as nursery:
                for index in range(4):
                    nursery.start_soon(read, index * CHUNK_BYTES)
        assert trio.current_time() - began > 60


async def test_oldest_read_goes_first_whatever_its_size(tmp_path: Path) -> None:
    """A read at the start of a file fetches more than a random one, from a queue of its own."""
    served = []
    async with one_slow_slot(tmp_path) as read:

        async def note(offset: int) -> None:
            await read(offset)
            served.append(offset)

        offsets = [CHUNK_BYTES, 0, 2 * CHUNK_BYTES, 3 * CHUNK_BYTES, 3 * CHUNK_BYTES + 6 * MIB]
        async with trio.open_nursery() as nursery:
            for offset in offsets:
                nursery.start_soon(note, offset)
                await trio.sleep(1)
    assert served == offsets


@asynccontextmanager
async def one_slow_slot(directory: Path) -> AsyncIterator[Callable[[int], Awaitable[None]]]:
    """Give a function that reads at an offset; one GET of 30 s is in flight at a time."""
    bucket = new_bucket()
    data = some_bytes(4 * CHUNK_BYTES)
    object_id = bucket.put("a", data)
    async with running_cache(bucket.watched, directory, threads=False) as cache:
        fetcher = cache._fetcher
        fetcher._offload = fetcher._gets._offload = SlowGets()
        for _ in range(10):
            cache.request_limit.on_throttled(trio.current_time())
            await trio.sleep(2)
        fetcher.limit.on_success = lambda now: None  # type: ignore[method-assign]  # no second slot
        assert fetcher.limit.limit == 1

        async def read(offset: int) -> None:
            handle = cache.open(object_id, len(data))
            assert await cache.read(handle, offset, 10) == data[offset : offset + 10]
            cache.close(handle)

        yield read


class SlowGets(InlineOffload):
    """A GET takes 30 s."""

    async def network(self, call: Callable[..., Any], *args: object) -> Any:
        await trio.sleep(30)
        return call(*args)
