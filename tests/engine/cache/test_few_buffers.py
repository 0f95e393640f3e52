"""Many readers, few buffers: no reader waits for ever."""

import random
from pathlib import Path

import trio

from fusecache.engine.cache.block_cache import BlockCache
from fusecache.model.objects import KIB, MIB
from tests.support.block_caches import new_bucket, running_cache, some_bytes

READERS = 16
LARGE = 20 * MIB + 12_345
SMALL = 150_001
# What the kernel makes of larger reads.
PIECE = 128 * KIB


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
