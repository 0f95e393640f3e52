"""A disk that is slower than the bucket, or hangs: reads go on at the bucket's speed, and what is kept is right."""

import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from fusecache.disk.cache_files import CacheFiles
from fusecache.disk.direct_reads import AlignedBuffers
from fusecache.engine.cache.buffer_pool import BufferPool
from fusecache.engine.cache.chunks import Buffer, CachedObject, Chunk
from fusecache.engine.cache.disk_tier import MAX_QUEUE_SECONDS, DiskWriteQueue
from fusecache.model.objects import MIB, ObjectId
from fusecache.policy.cache.fetch_order import Cause
from tests.support.block_caches import new_bucket, read_all, running_cache, some_bytes, until

MEMORY = 48 * MIB


@dataclass(frozen=True, slots=True)
class Hanging:
    """Calls of the cache's disk that hang until goes_on is set. begun: one does."""

    begun: threading.Event = field(default_factory=threading.Event)
    goes_on: threading.Event = field(default_factory=threading.Event)


@contextmanager
def hanging_disk(monkeypatch: pytest.MonkeyPatch, name: str) -> Iterator[Hanging]:
    """Have all calls of one kind, "store" or "load", hang until the block ends."""
    hanging = Hanging()
    call = getattr(CacheFiles, name)

    def stuck(*args: object, **more: object) -> object:
        hanging.begun.set()
        assert hanging.goes_on.wait(60)
        return call(*args, **more)

    monkeypatch.setattr(CacheFiles, name, stuck)
    try:
        yield hanging
    finally:
        hanging.goes_on.set()


@pytest.mark.real_time
async def test_reads_go_on_though_the_cache_disk_hangs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    bucket = new_bucket()
    data = some_bytes(3 * MEMORY)
    object_id = bucket.put("a", data)
    with hanging_disk(monkeypatch, "store") as disk:
        async with running_cache(bucket.watched, tmp_path, buffer_bytes=MEMORY) as cache:
            with trio.fail_after(50):
                assert await read_all(cache, object_id, len(data)) == data
            assert cache.statistics().uncached > 0
            disk.goes_on.set()
            for _ in range(2):
                assert await read_all(cache, object_id, len(data)) == data
    assert caplog.text.count("slower than the bucket") == 1


@pytest.mark.real_time
async def test_what_is_asked_for_is_kept_however_slow_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bucket = new_bucket()
    wanted, other = some_bytes(16 * MIB), some_bytes(2 * MEMORY, seed=2)
    wanted_id, other_id = bucket.put("wanted", wanted), bucket.put("other", other)
    with hanging_disk(monkeypatch, "store") as disk:
        async with running_cache(bucket.watched, tmp_path, buffer_bytes=MEMORY) as cache:
            handle = cache.open(wanted_id, len(wanted))
            async with trio.open_nursery() as nursery:
                for index in range(2):
                    nursery.start_soon(cache.maintenance.fill, handle.entry, index)
                with trio.fail_after(50):
                    assert await read_all(cache, other_id, len(other)) == other
                disk.goes_on.set()
            fetched = len(bucket.watched.extents)
            assert await read_all(cache, wanted_id, len(wanted)) == wanted
            assert len(bucket.watched.extents) == fetched
            cache.close(handle)


@pytest.mark.real_time
async def test_who_waits_for_the_disk_is_not_told_to_wait_for_the_bucket(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bucket = new_bucket()
    data = some_bytes(4 * MIB)
    object_id = bucket.put("a", data)
    async with running_cache(bucket.watched, tmp_path) as cache:
        assert await read_all(cache, object_id, len(data)) == data
        await until(lambda: cache.statistics().used_bytes == len(data))
    async with running_cache(bucket.watched, tmp_path) as cache, trio.open_nursery() as nursery:
        with hanging_disk(monkeypatch, "load") as disk:
            nursery.start_soon(read_all, cache, object_id, len(data), len(data))
            await until(disk.begun.is_set)
            assert cache.statistics().waiting_reads == 0
        await until(lambda: cache.statistics().bytes_read == len(data))


@dataclass(frozen=True, slots=True)
class Crowd:
    """Buffers that wait for the only slot, the one read to its end second, and whether each was written.

    asked_for: a caller wants its bytes on disk.
    """

    queue: DiskWriteQueue
    read: Buffer
    unread: Buffer
    asked_for: Buffer
    written: dict[Buffer, bool]

    async def give_up_one(self, cause: Cause, *, small: bool = False) -> dict[Buffer, bool]:
        """Ask for a buffer; return which buffers have ended their wait by now."""
        self.queue.drop_oldest(small=small, cause=cause)
        await wait_all_tasks_blocked()
        return dict(self.written)


@asynccontextmanager
async def crowd() -> AsyncIterator[Crowd]:
    """Yield buffers that wait for a slot, which another buffer holds until the block ends."""
    buffers = BufferPool(AlignedBuffers(MEMORY), lambda chunk: None)
    entry = CachedObject(ObjectId("a", "etag"), 32 * MIB)
    queue = DiskWriteQueue(large_buffers=2)
    written: dict[Buffer, bool] = {}

    async def write(buffer: Buffer, *, must_store: bool) -> None:
        async with queue.slot(buffer, must_store=must_store) as written[buffer]:
            pass

    def new_buffer(index: int) -> Buffer:
        buffer = buffers.acquire(small=False, cause=Cause.DEMAND, now=trio.current_time())
        assert buffer is not None
        buffers.give(buffer, Chunk(entry, index), 0)
        buffers.acquire_use(buffer)
        return buffer

    async with trio.open_nursery() as nursery, queue.slot(new_buffer(0), must_store=True):
        asked_for, unread, read = new_buffer(1), new_buffer(2), new_buffer(3)
        buffers.mark_consumed(read)
        for buffer in (asked_for, unread, read):
            nursery.start_soon(partial(write, buffer, must_store=buffer is asked_for))
            await wait_all_tasks_blocked()
        yield Crowd(queue, read, unread, asked_for, written)
    assert set(written) == {read, unread, asked_for}


async def test_a_moment_s_pause_of_the_disk_costs_nothing() -> None:
    async with crowd() as some:
        await trio.sleep(MAX_QUEUE_SECONDS / 2)
        assert await some.give_up_one(Cause.DEMAND) == {}
    assert all(some.written.values())


async def test_read_ahead_takes_what_was_read_and_nothing_else() -> None:
    async with crowd() as some:
        await trio.sleep(MAX_QUEUE_SECONDS)
        for _ in range(2):
            assert await some.give_up_one(Cause.READAHEAD) == {some.read: False}


async def test_one_is_given_up_at_a_time() -> None:
    async with crowd() as some:
        await trio.sleep(MAX_QUEUE_SECONDS)
        some.queue.drop_oldest(small=False, cause=Cause.DEMAND)
        assert await some.give_up_one(Cause.DEMAND) == {some.read: False}


@pytest.mark.parametrize("small", [False, True])
async def test_a_reader_takes_what_was_read_then_what_was_not_and_never_what_is_asked_for(
    *, small: bool
) -> None:
    async with crowd() as some:
        await trio.sleep(MAX_QUEUE_SECONDS)
        assert await some.give_up_one(Cause.DEMAND, small=small) == {some.read: False}
        assert await some.give_up_one(Cause.DEMAND, small=small) == {some.read: False, some.unread: False}
        assert await some.give_up_one(Cause.DEMAND, small=small) == {some.read: False, some.unread: False}
    assert some.written[some.asked_for]


async def test_what_somebody_reads_just_now_is_left() -> None:
    async with crowd() as some:
        await trio.sleep(MAX_QUEUE_SECONDS)
        assert some.read.chunk is not None
        some.read.chunk.readers += 1
        assert await some.give_up_one(Cause.DEMAND) == {some.unread: False}
        assert await some.give_up_one(Cause.DEMAND) == {some.unread: False}
        some.read.chunk.readers -= 1
        assert await some.give_up_one(Cause.DEMAND) == {some.unread: False, some.read: False}
