"""What is fetched before anybody has it open: the reader who comes finds it, or waits for the same GET."""

import threading
from pathlib import Path

import pytest
import trio
import trio.testing

from fusecache.engine.cache.readahead import PrefetchRange
from fusecache.model.errors import ObjectMissing
from fusecache.model.objects import KIB, MIB, Extent, ObjectId
from tests.support.block_caches import new_bucket, read_all, running_cache, some_bytes, until

pytestmark = pytest.mark.real_time


async def test_what_was_prefetched_is_read_without_another_get(tmp_path: Path) -> None:
    bucket = new_bucket()
    contents = [some_bytes(100 * KIB + number, number) for number in range(20)]
    objects = [bucket.put(f"file{number}", data) for number, data in enumerate(contents)]
    async with running_cache(bucket.watched, tmp_path / "cache", buffer_bytes=128 * MIB) as cache:
        cache.prefetch(
            [PrefetchRange(each, len(data), len(data)) for each, data in zip(objects, contents, strict=True)]
        )
        await until(lambda: cache.statistics().bytes_by_cause["readahead"] == sum(map(len, contents)))
        for each, data in zip(objects, contents, strict=True):
            assert await read_all(cache, each, len(data)) == data
        assert len(bucket.watched.extents) == len(objects)
        assert cache.statistics().bytes_by_cause["demand"] == 0


async def test_a_reader_that_comes_meanwhile_waits_for_the_same_get(tmp_path: Path) -> None:
    bucket = new_bucket()
    data = some_bytes(100 * KIB)
    file = bucket.put("file", data)
    go_on = threading.Event()
    bucket.watched.on_progress = lambda extent, received: go_on.wait(10) and None
    async with running_cache(bucket.watched, tmp_path / "cache") as cache, trio.open_nursery() as nursery:
        cache.prefetch([PrefetchRange(file, len(data), len(data))])
        await until(lambda: len(bucket.watched.extents) == 1)
        read = trio.Event()

        async def reader() -> None:
            assert await read_all(cache, file, len(data)) == data
            read.set()

        nursery.start_soon(reader)
        await until(lambda: cache.statistics().misses == 1)
        go_on.set()
        await read.wait()
        assert bucket.watched.extents == [Extent(0, len(data))]


async def test_what_is_on_disk_is_prefetched_from_there(tmp_path: Path) -> None:
    bucket = new_bucket()
    data = some_bytes(300 * KIB)
    file = bucket.put("file", data)
    async with running_cache(bucket.watched, tmp_path / "cache") as cache:
        await read_all(cache, file, len(data))
        await until(lambda: cache.statistics().used_bytes >= len(data))
    asked = len(bucket.watched.extents)
    async with running_cache(bucket.watched, tmp_path / "cache") as cache:
        cache.prefetch([PrefetchRange(file, len(data), len(data))])
        await until(lambda: cache.statistics().buffers_in_use > 0)
        assert await read_all(cache, file, len(data)) == data
    assert len(bucket.watched.extents) == asked


async def test_an_object_that_is_gone_fails_its_reader_only(tmp_path: Path) -> None:
    bucket = new_bucket()
    data = some_bytes(10 * KIB)
    file = bucket.put("file", data)
    gone = ObjectId("gone", "etag")
    async with running_cache(bucket.watched, tmp_path / "cache") as cache:
        cache.prefetch([PrefetchRange(gone, 5, 5), PrefetchRange(file, len(data), len(data))])
        await until(lambda: cache.statistics().bytes_by_cause["readahead"] == len(data))
        assert await read_all(cache, file, len(data)) == data
        with pytest.raises(ObjectMissing):
            await read_all(cache, gone, 5)


async def test_a_guess_at_another_size_than_an_open_file_has_is_ignored(tmp_path: Path) -> None:
    bucket = new_bucket()
    data = some_bytes(10 * KIB)
    file = bucket.put("file", data)
    async with running_cache(bucket.watched, tmp_path / "cache") as cache:
        handle = cache.open(file, len(data))
        cache.prefetch([PrefetchRange(file, len(data) + 1, len(data) + 1)])
        assert await cache.read(handle, 0, len(data)) == data
        cache.close(handle)
    assert bucket.watched.extents == [Extent(0, len(data))]


async def test_readahead_goes_on_if_another_reader_is_interrupted_while_it_looks_up_the_same_chunk(
    tmp_path: Path,
) -> None:
    size, step = 32 * MIB, 128 * KIB
    bucket = new_bucket()
    object_id = bucket.put("a", some_bytes(size))
    async with running_cache(bucket.watched, tmp_path, buffer_bytes=128 * MIB) as cache:
        handle = cache.open(object_id, size)
        await cache.maintenance.fill(handle.entry, 0)
        for index in (1, 2, 3):  # so that their rows must be looked up
            await cache.maintenance.fill(handle.entry, index, mask=1 << 127)
        cache.close(handle)
    async with running_cache(bucket.watched, tmp_path, buffer_bytes=128 * MIB) as cache:
        reader, other = cache.open(object_id, size), cache.open(object_id, size)
        await cache.read(reader, 0, step)
        before = len(bucket.watched.extents)
        async with trio.open_nursery() as nursery:
            interrupted = trio.CancelScope()

            async def read_other() -> None:
                with interrupted:
                    await cache.read(other, 12 * MIB, 4096)

            async with cache._table.rows_lock:
                nursery.start_soon(read_other)
                await trio.testing.wait_all_tasks_blocked(0.02)
                for place in range(step, 24 * step, step):
                    await cache.read(reader, place, step)
                await trio.testing.wait_all_tasks_blocked(0.02)
                interrupted.cancel()
        assert interrupted.cancelled_caught
        await until(lambda: any(each.start >= 8 * MIB for each in bucket.watched.extents[before:]))
        cache.close(reader)
        cache.close(other)
