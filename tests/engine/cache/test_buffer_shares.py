"""The buffers of a mount with two buckets: each finds its part, and may use what the other does not."""

import pytest

from fusecache.disk.aligned_buffers import AlignedBuffers
from fusecache.engine.cache.buffer_pool import BufferPool
from fusecache.engine.cache.chunks import Buffer, CachedObject, Chunk
from fusecache.model.objects import MIB, ObjectId
from fusecache.policy.cache.fetch_order import Cause


def take(pool: BufferPool, bucket: str, *, small: bool) -> list[Buffer]:
    """Let fetches of a bucket take all buffers that they may."""
    taken: list[Buffer] = []
    while buffer := pool.acquire(small=small, cause=Cause.DEMAND, now=0, bucket=bucket):
        entry = CachedObject(ObjectId(f"{bucket}/{len(taken)}", "etag"), 8 * MIB)
        pool.give(buffer, Chunk(entry, 0), 0)
        pool.acquire_use(buffer)
        taken.append(buffer)
    return taken


@pytest.mark.parametrize("small", [False, True])
def test_each_bucket_finds_its_part_of_the_buffers(*, small: bool) -> None:
    memory = AlignedBuffers(129 * MIB)
    pool = BufferPool(memory, lambda chunk: None, ("a", "b"))
    count = len(memory.small if small else memory.large)
    part = count // 4
    taken = take(pool, "a", small=small)
    assert len(taken) == count - part
    assert len(take(pool, "b", small=small)) == part
    for buffer in taken:
        pool.release_use(buffer, 0)
    assert len(take(pool, "b", small=small)) == count - 2 * part


def test_every_bucket_finds_one_of_few_buffers() -> None:
    memory = AlignedBuffers(24 * MIB)
    for buckets in (("a", "b"), ("a", "b", "c")):
        pool = BufferPool(memory, lambda chunk: None, buckets)
        assert [len(take(pool, name, small=False)) for name in ("a", "b")] == [1, 1]
        pool = BufferPool(memory, lambda chunk: None, buckets)
        assert len(take(pool, buckets[-1], small=False)) == 1


def test_a_single_bucket_takes_all_buffers() -> None:
    memory = AlignedBuffers(128 * MIB)
    pool = BufferPool(memory, lambda chunk: None)
    assert len(take(pool, "a", small=False)) == len(memory.large)
