"""The buffers of a mount with two buckets: each finds its part, and may use what the other does not."""

from pathlib import Path
from typing import Any

import pytest
import trio
from trio.testing import MockClock

from fusecache.disk.direct_reads import AlignedBuffers
from fusecache.engine.cache.buffer_pool import BufferPool
from fusecache.engine.cache.chunks import Buffer, CachedObject, Chunk
from fusecache.engine.cache.maintenance import CacheMaintenance
from fusecache.model.errors import NoSpace, Unavailable
from fusecache.model.objects import KIB, MIB, ObjectId
from fusecache.policy.cache.fetch_order import Cause
from tests.support.block_caches import new_bucket, read_all, running_cache, some_bytes
from tests.support.faulty_store import Fault, FaultyStore


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


async def test_readers_of_buckets_that_end_answers_midway_leave_a_buffer_to_the_next(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    """Each of their readers waits for the rest of a chunk, whose beginning lies in a buffer."""
    bucket, data = new_bucket(), some_bytes(8 * MIB)
    keys = [f"{name}/{number}" for name in ("a", "b") for number in range(4)]
    objects = {key: bucket.put(key, data) for key in [*keys, "c/0"]}
    store = FaultyStore(
        bucket.memory,
        *(Fault(Unavailable("half"), "get_into", key, deliver_bytes=128 * KIB) for key in keys),
        *(Fault(Unavailable("away"), "get_into", f"{name}/*", times=None) for name in ("a", "b")),
    )
    failed: list[str] = []

    async def read(key: str) -> None:
        with pytest.raises(Unavailable):
            await read_all(cache, objects[key], len(data))
        failed.append(key)

    async with (
        running_cache(
            store, tmp_path, buffer_bytes=32 * MIB, threads=False, buckets=("a", "b", "c")
        ) as cache,
        trio.open_nursery() as nursery,
    ):
        for key in keys:
            nursery.start_soon(read, key)
        await trio.sleep(20)
        assert not failed
        with trio.fail_after(5):
            assert await read_all(cache, objects["c/0"], len(data)) == data
    assert sorted(failed) == keys


async def test_a_buffer_that_is_taken_back_while_its_chunk_is_stored_is_not_stored_as_that_chunk() -> None:
    """The chunk lies in two buffers. While the first is written, another bucket takes the second for its own bytes."""
    pool = BufferPool(AlignedBuffers(32 * MIB), lambda chunk: None, ("a", "b", "c"))
    chunk = Chunk(CachedObject(ObjectId("a/0", "etag"), 8 * MIB), 0, loaded=True)
    chunk.readers = 1
    for valid in (0b01, 0b10):
        buffer = pool.acquire(small=False, cause=Cause.DEMAND, now=0, bucket="a")
        assert buffer is not None
        pool.give(buffer, chunk, 0)
        pool.acquire_use(buffer)
        buffer.valid = valid
        pool.release_use(buffer, 0)
    stored: list[tuple[Chunk, int, int]] = []

    class Disk:
        """Takes its time with the first: another bucket's reader gets the buffers that no thread uses."""

        async def store(self, of: Chunk, buffer: Buffer, first: int, stop: int) -> None:
            stored.append((of, first, stop))
            for other in (Chunk(CachedObject(ObjectId(f"c/{n}", "etag"), 8 * MIB), 0) for n in range(2)):
                if taken := pool.acquire(small=False, cause=Cause.DEMAND, now=0, bucket="c"):
                    pool.give(taken, other, 0)
                    taken.valid = 0b11

    class Parts:
        """What a fill asks of the table and the fetchers."""

        disk = Disk()

        async def loaded_chunk(self, entry: CachedObject, index: int) -> Chunk:
            return chunk

        def drop_if_idle(self, chunk: Chunk) -> None:
            pass

    parts: Any = Parts()
    maintenance = CacheMaintenance(parts, parts, parts, parts, parts, parts, pool, parts)
    with pytest.raises(NoSpace):
        await maintenance.fill(chunk.owner, 0, mask=0b11, attempts=0)
    assert stored == [(chunk, 0, 1)]
    assert len(chunk.buffers) == 1


def test_a_bucket_takes_back_its_part_and_no_more() -> None:
    """Of three buffers, each bucket is guaranteed one."""
    pool = BufferPool(AlignedBuffers(32 * MIB), lambda chunk: None, ("a", "b", "c"))

    def take_one(bucket: str, cause: Cause = Cause.DEMAND) -> Chunk | None:
        """Have a reader wait for the rest of a chunk that one buffer holds in part."""
        buffer = pool.acquire(small=False, cause=cause, now=0, bucket=bucket)
        if buffer is None:
            return None
        chunk = Chunk(CachedObject(ObjectId(f"{bucket}/0", "etag"), 8 * MIB), 0, readers=1)
        pool.give(buffer, chunk, 0)
        pool.acquire_use(buffer)
        buffer.valid = 1
        pool.release_use(buffer, 0)
        return chunk

    chunks = [take_one(name) for name in ("b", "a", "a")]
    assert take_one("a") is take_one("b") is take_one("c", Cause.HINT) is None
    assert take_one("c") is not None  # of a, which has more than its part, and not the oldest
    assert [bool(chunk and chunk.buffers) for chunk in chunks] == [True, False, True]
    assert take_one("a") is take_one("b") is take_one("c") is None
