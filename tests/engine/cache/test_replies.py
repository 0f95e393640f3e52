"""A reply that views a buffer keeps its bytes until it is sent, whatever its own read starts."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import trio.testing

from fusecache.engine.cache.block_cache import BlockCache
from fusecache.model.objects import KIB, MIB
from fusecache.policy.cache.granules import CHUNK_BYTES
from tests.support.block_caches import new_bucket, running_cache, some_bytes

SIZE = 8 * CHUNK_BYTES
DATA = some_bytes(SIZE)
EXPECTED = DATA[CHUNK_BYTES - MIB : CHUNK_BYTES]


@asynccontextmanager
async def reply_whose_buffer_is_taken(directory: Path) -> AsyncIterator[tuple[BlockCache, memoryview]]:
    """Yield a cache, and the reply to a read whose own read-ahead took the buffer that the reply views."""
    bucket = new_bucket()
    object_id = bucket.put("a", DATA)
    async with running_cache(bucket.watched, directory, threads=False) as cache:
        # Of the next chunk, a small buffer has some KiB at the place at which the reply will be in its own chunk.
        small, start = cache.open(object_id, SIZE), 2 * CHUNK_BYTES - 512 * KIB
        await cache.read(small, start, 64 * KIB)
        reader = cache.open(object_id, SIZE)
        pool = cache._buffer_pool
        await cache.read(reader, 0, MIB)
        pool._free[False].clear()  # others hold all other buffers
        for offset in range(MIB, CHUNK_BYTES - MIB, MIB):
            await cache.read(reader, offset, MIB)
        await trio.testing.wait_all_tasks_blocked()
        reader.streams[0].ahead_until = CHUNK_BYTES
        reply = await cache.read(reader, CHUNK_BYTES - MIB, MIB)
        assert isinstance(reply, memoryview)
        offset_in_pool = cache.lent_buffers.offset_of(reply)
        assert offset_in_pool is not None
        taken_for = pool.at(offset_in_pool).chunk
        assert taken_for is not None
        assert taken_for.index == 1
        yield cache, reply


async def test_the_read_ahead_of_a_read_writes_to_no_buffer_that_its_reply_views(tmp_path: Path) -> None:
    """It copies what small buffers have of the next chunk into the new buffer once the reply is sent."""
    async with reply_whose_buffer_is_taken(tmp_path) as (_, reply):
        assert reply == EXPECTED


async def test_a_mover_copies_no_reply_out_of_a_buffer_that_a_fetch_fills(tmp_path: Path) -> None:
    """The daemon copies it itself, before it does anything else."""
    async with reply_whose_buffer_is_taken(tmp_path) as (cache, reply):
        sent = b"" if cache.lent_buffers.lend(reply) else bytes(reply)
        await trio.testing.wait_all_tasks_blocked()
        assert (sent or bytes(reply)) == EXPECTED
