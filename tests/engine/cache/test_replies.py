"""A reply that views a buffer keeps its bytes until it is sent, whatever its own read starts."""

from pathlib import Path

import trio.testing

from fusecache.model.objects import KIB, MIB
from fusecache.policy.cache.granules import CHUNK_BYTES
from tests.support.block_caches import new_bucket, running_cache, some_bytes

SIZE = 8 * CHUNK_BYTES


async def test_the_read_ahead_of_a_read_takes_no_buffer_that_its_reply_views(tmp_path: Path) -> None:
    """It takes consumed buffers first, and copies into a new buffer what small ones have of the next chunk."""
    bucket = new_bucket()
    data = some_bytes(SIZE)
    object_id = bucket.put("a", data)
    async with running_cache(bucket.watched, tmp_path, threads=False) as cache:
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
        found = await cache.read(reader, CHUNK_BYTES - MIB, MIB)
        assert found == data[CHUNK_BYTES - MIB : CHUNK_BYTES]
