"""The block cache against plain bytes: random reads, evictions, restarts and new versions."""

import contextlib
import random
from pathlib import Path

import pytest
import trio

from fusecache.engine.cache.block_cache import BlockCache, ReadHandle
from fusecache.model.errors import NoSpace
from fusecache.model.objects import MIB, ObjectId
from tests.support.block_caches import Bucket, new_bucket, running_cache, some_bytes, until

STEPS = 220
LIMIT = 20 * MIB
SIZES = (0, 1, 4095, 65536, 65537, 3 * MIB, 8 * MIB, 8 * MIB + 1, 19 * MIB + 777)


class _Model:
    """The bytes that each version holds, and the handles that are open."""

    def __init__(self, seed: int, bucket: Bucket) -> None:
        self.rng = random.Random(seed)
        self.bucket = bucket
        self.versions: dict[ObjectId, bytes] = {}
        self.handles: list[ReadHandle] = []
        for number, size in enumerate(SIZES):
            self.replace(f"o{number}", size)

    def replace(self, key: str, size: int) -> None:
        data = some_bytes(size, seed=self.rng.randrange(1 << 30))
        for old in [object_id for object_id in self.versions if object_id.key == key]:
            del self.versions[old]
        self.versions[self.bucket.put(key, data)] = data

    async def let_go(self, cache: BlockCache, key: str) -> None:
        """Close a key, and wait until nothing asks for it: a GET of a version that is gone is an error."""
        for handle in [handle for handle in self.handles if handle.object_id.key == key]:
            cache.close(handle)
            self.handles.remove(handle)

        def is_asked_for() -> bool:
            entries = [entry for entry in cache._table.objects.values() if entry.object_id.key == key]
            return any(chunk.fetches for entry in entries for chunk in entry.chunks.values())

        await until(lambda: not is_asked_for())

    async def read(self, cache: BlockCache) -> None:
        rng = self.rng
        object_id, data = rng.choice(list(self.versions.items()))
        handle = next((h for h in self.handles if h.object_id == object_id), None)
        if handle is None or rng.random() < 0.3:
            handle = cache.open(object_id, len(data))
            self.handles.append(handle)
        start = rng.choice((0, rng.randrange(len(data) + 1)))
        length = rng.choice((1, 4096, 65536, MIB, 3 * MIB, 20 * MIB))
        for _ in range(rng.choice((1, 1, 2, 5))):
            assert await cache.read(handle, start, length) == data[start : start + length]
            start += length

    def close_some(self, cache: BlockCache) -> None:
        self.rng.shuffle(self.handles)
        while self.handles and self.rng.random() < 0.6:
            cache.close(self.handles.pop())


async def _crowd(cache: BlockCache, nbytes: int) -> None:
    """Evict by asking for room; where all of it is being written just now, there is none."""
    with contextlib.suppress(NoSpace):
        await cache.reserve_staging(nbytes)
        cache.release_staging(nbytes)


@pytest.mark.parametrize("seed", range(4))
async def test_random_steps_give_the_same_bytes_as_the_bucket(seed: int, tmp_path: Path) -> None:
    model = _Model(seed, new_bucket())
    steps = evicted_bytes = 0
    while steps < STEPS:
        async with running_cache(
            model.bucket.watched, tmp_path, limit_bytes=LIMIT, buffer_bytes=32 * MIB
        ) as cache:
            for _ in range(model.rng.randrange(20, 90)):
                steps += 1
                async with trio.open_nursery() as nursery:
                    for _ in range(model.rng.choice((1, 1, 3))):
                        nursery.start_soon(model.read, cache)
                if model.rng.random() < 0.2:
                    model.close_some(cache)
                if model.rng.random() < 0.15:
                    await _crowd(cache, model.rng.randrange(8 * MIB, 14 * MIB))
                if model.rng.random() < 0.05:
                    key = f"o{model.rng.randrange(len(SIZES))}"
                    await model.let_go(cache, key)
                    model.replace(key, model.rng.choice(SIZES))
                if model.rng.random() < 0.05:
                    await cache.forget(model.rng.choice(list(model.versions)))
                facts = cache.statistics()
                assert facts.used_bytes + facts.reserved_bytes + facts.staging_bytes <= LIMIT
                assert facts.checksum_failures == 0
        model.handles.clear()
        evicted_bytes += cache.statistics().evicted_bytes
        assert cache.statistics().errors == 0
    assert evicted_bytes > 0
