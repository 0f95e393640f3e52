"""What readers are promised by the block cache."""

import threading
from pathlib import Path

import pytest
import trio

from fusecache.disk.cache_files import granule_checksums
from fusecache.engine.cache.adoption import StagedObject
from fusecache.index.cache_index import BlockRow, CacheIndex
from fusecache.model.errors import NoSpace, ObjectChanged, ObjectMissing
from fusecache.model.objects import KIB, MIB, Extent, ObjectId
from fusecache.policy.cache.granules import BLOCKS_PER_CHUNK
from tests.support.block_caches import (
    Bucket,
    bucket_of_one,
    fill_all,
    new_bucket,
    pages_of,
    read_all,
    running_cache,
    some_bytes,
    stop_ticks,
    until,
)

pytestmark = pytest.mark.real_time


async def test_reading_through_returns_the_bytes_and_fetches_each_granule_once(tmp_path: Path) -> None:
    bucket, object_id, data = bucket_of_one(37 * MIB + 12345)
    async with running_cache(bucket.watched, tmp_path) as cache:
        assert await read_all(cache, object_id, len(data)) == data
    assert bucket.watched.granules_fetched() == -(-len(data) // (64 * KIB))


async def test_reads_at_and_past_the_end_are_empty(tmp_path: Path) -> None:
    bucket = new_bucket()
    object_id = bucket.put("a", b"12345")
    async with running_cache(bucket.watched, tmp_path) as cache:
        handle = cache.open(object_id, 5)
        assert await cache.read(handle, 3, 100) == b"45"
        assert await cache.read(handle, 5, 100) == b""
        assert await cache.read(handle, 500, 100) == b""


async def test_two_readers_of_one_block_cause_one_get(tmp_path: Path) -> None:
    bucket, object_id, data = bucket_of_one(50 * KIB)
    async with running_cache(bucket.watched, tmp_path) as cache, trio.open_nursery() as nursery:

        async def reader(offset: int) -> None:
            assert (
                await cache.read(cache.open(object_id, len(data)), offset, 10) == data[offset : offset + 10]
            )

        nursery.start_soon(reader, 0)
        nursery.start_soon(reader, 5)
    assert bucket.memory.statistics().gets == 1


async def test_a_random_read_of_8_kib_fetches_its_granules_only(tmp_path: Path) -> None:
    bucket, object_id, data = bucket_of_one(32 * MIB)
    async with running_cache(bucket.watched, tmp_path) as cache:
        handle = cache.open(object_id, len(data))
        for offset in (20 * MIB + 7, 3 * MIB + 60 * KIB, 30 * MIB, 11 * MIB):
            assert await cache.read(handle, offset, 8 * KIB) == data[offset : offset + 8 * KIB]
    assert [extent.size // KIB for extent in bucket.watched.extents] == [64, 128, 64, 64]


async def test_a_waiting_reader_is_woken_when_its_bytes_are_there_not_when_the_get_ends(
    tmp_path: Path,
) -> None:
    bucket, object_id, data = bucket_of_one(8 * MIB)
    held = threading.Event()

    def hold_second_half(extent: Extent, received: int) -> None:
        if extent.start and received > extent.size // 2:
            assert held.wait(120)

    bucket.watched.on_progress = hold_second_half
    async with running_cache(bucket.watched, tmp_path) as cache:
        try:
            with trio.fail_after(60):
                handle = cache.open(object_id, len(data))
                assert await cache.read(handle, 0, 8 * KIB) == data[: 8 * KIB]
                # A second, sequential read makes the window grow: what it wants is the first half of a GET.
                assert await cache.read(handle, MIB, MIB) == data[MIB : 2 * MIB]
                assert Extent(MIB, 3 * MIB) in bucket.watched.extents
        finally:
            held.set()


def holding(data: bytes) -> tuple[Bucket, ObjectId, threading.Event]:
    """Return a bucket with an object, of which nothing comes before the event is set."""
    bucket = new_bucket()
    object_id = bucket.put("a", data)
    held = threading.Event()

    def hold(extent: Extent, received: int) -> None:
        assert held.wait(120)

    bucket.watched.on_progress = hold
    return bucket, object_id, held


async def test_who_waits_and_for_how_long_is_told_while_he_does(tmp_path: Path) -> None:
    data = some_bytes(MIB)
    bucket, object_id, held = holding(data)
    async with running_cache(bucket.watched, tmp_path) as cache, trio.open_nursery() as nursery:
        for _ in range(2):
            nursery.start_soon(cache.read, cache.open(object_id, len(data)), 0, MIB)
        await until(lambda: cache.statistics().waiting_reads == 2)
        waited = cache.statistics().longest_wait_seconds
        await until(lambda: cache.statistics().longest_wait_seconds > waited)
        held.set()
        await until(lambda: cache.statistics().waiting_reads == 0)
        assert cache.statistics().longest_wait_seconds == 0


async def test_a_cancelled_reader_breaks_nothing_for_the_others(tmp_path: Path) -> None:
    data = some_bytes(MIB)
    bucket, object_id, held = holding(data)
    answers: list[bytes] = []
    async with running_cache(bucket.watched, tmp_path) as cache, trio.open_nursery() as nursery:

        async def reader() -> None:
            answers.append(bytes(await cache.read(cache.open(object_id, len(data)), 0, MIB)))

        with trio.CancelScope() as first:
            async with trio.open_nursery() as inner:
                inner.start_soon(reader)
                await until(lambda: bool(bucket.watched.extents))
                nursery.start_soon(reader)
                await trio.lowlevel.checkpoint()
                first.cancel()
        held.set()
    assert answers == [data]
    assert bucket.memory.statistics().gets == 1


async def test_a_restart_finds_the_blocks(tmp_path: Path) -> None:
    bucket, object_id, data = bucket_of_one(20 * MIB + 1)
    async with running_cache(bucket.watched, tmp_path) as cache:
        assert await read_all(cache, object_id, len(data)) == data
        await until(lambda: cache.statistics().used_bytes == pages_of(len(data)))
    before = bucket.memory.statistics().gets
    async with running_cache(bucket.watched, tmp_path) as cache:
        assert cache.statistics().used_bytes == pages_of(len(data))
        assert await read_all(cache, object_id, len(data)) == data
    assert bucket.memory.statistics().gets == before


async def test_the_index_is_asked_only_for_chunks_that_it_may_have(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    find = CacheIndex.block_rows

    def counted(index: CacheIndex, number: int, first: int, stop: int) -> dict[int, BlockRow]:
        asked.append(first // BLOCKS_PER_CHUNK)
        return find(index, number, first, stop)

    monkeypatch.setattr(CacheIndex, "block_rows", counted)
    bucket, object_id, data = bucket_of_one(80 * MIB)
    async with running_cache(bucket.watched, tmp_path, buffer_bytes=32 * MIB) as cache:
        handle = cache.open(object_id, len(data))
        await fill_all(cache, object_id, len(data))
        assert await read_all(cache, object_id, len(data)) == data
        assert asked == []
        before = bucket.memory.statistics().gets
        await cache._table.flush_rows()
        cache._table.trim_chunks(0)
        assert await read_all(cache, object_id, len(data)) == data
        assert sorted(asked) == sorted(set(asked)) != []
        cache.close(handle)
    assert bucket.memory.statistics().gets == before


async def test_after_a_kill_the_next_run_under_the_same_boot_keeps_what_was_flushed(tmp_path: Path) -> None:
    bucket, object_id, data = bucket_of_one(9 * MIB)
    async with running_cache(bucket.watched, tmp_path) as cache:
        await read_all(cache, object_id, len(data))
        await until(lambda: cache.statistics().used_bytes == len(data))
    state = tmp_path / "index" / "state.json"
    state.write_text(state.read_text().replace('"clean": true', '"clean": false'))
    before = bucket.memory.statistics().gets
    async with running_cache(bucket.watched, tmp_path) as cache:
        assert await read_all(cache, object_id, len(data)) == data
    assert bucket.memory.statistics().gets == before


async def test_after_a_power_loss_the_cache_starts_empty(tmp_path: Path) -> None:
    bucket, object_id, data = bucket_of_one(9 * MIB)
    async with running_cache(bucket.watched, tmp_path) as cache:
        await read_all(cache, object_id, len(data))
        await until(lambda: cache.statistics().used_bytes == len(data))
    state = tmp_path / "index" / "state.json"
    state.write_text(state.read_text().replace('"clean": true', '"clean": false'))
    async with running_cache(bucket.watched, tmp_path, boot_id="boot-2") as cache:
        assert cache.statistics().used_bytes == 0
        assert await read_all(cache, object_id, len(data)) == data
        await until(lambda: not list(tmp_path.glob("*.discarded-*")))


async def test_a_damaged_block_is_a_miss_and_is_fetched_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    bucket, object_id, data = bucket_of_one(3 * MIB)
    async with running_cache(bucket.watched, tmp_path) as cache:
        await read_all(cache, object_id, len(data))
        await until(lambda: cache.statistics().used_bytes == len(data))
    (file,) = [path for path in (tmp_path / "files").glob("*/*") if path.is_file()]
    with file.open("r+b") as damaged:
        damaged.seek(MIB + 70 * KIB)
        damaged.write(b"?")
    bucket.watched.extents.clear()
    async with running_cache(bucket.watched, tmp_path) as cache:
        assert await read_all(cache, object_id, len(data)) == data
        assert cache.statistics().checksum_failures == 1
        await until(lambda: cache.statistics().used_bytes == len(data))
    assert bucket.watched.extents == [Extent(MIB + 64 * KIB, MIB + 128 * KIB)]
    assert "damaged" in caplog.text


async def test_a_changed_object_is_an_error_never_a_mixture(tmp_path: Path) -> None:
    bucket = new_bucket()
    old = bucket.put("a", some_bytes(40 * MIB, seed=1))
    async with running_cache(bucket.watched, tmp_path) as cache:
        handle = cache.open(old, 40 * MIB)
        await cache.read(handle, 0, 10)
        bucket.put("a", some_bytes(40 * MIB, seed=2))
        with pytest.raises(ObjectChanged):
            await cache.read(handle, 30 * MIB, 10)
        with pytest.raises(ObjectMissing):
            await cache.read(cache.open(ObjectId("b", "etag"), 5), 0, 5)


async def test_the_limit_is_kept_and_reads_stay_right_while_blocks_are_evicted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stop_ticks(monkeypatch)  # else what is cached already stays, but for what chance admits
    bucket = new_bucket()
    contents = [some_bytes(10 * MIB + seed, seed=seed) for seed in range(6)]
    objects = [bucket.put(f"o{seed}", data) for seed, data in enumerate(contents)]
    limit = 24 * MIB
    async with running_cache(bucket.watched, tmp_path, limit_bytes=limit) as cache:
        rounds = 0
        with trio.fail_after(60):
            while rounds < 2 or not cache.statistics().evicted_bytes:  # a slow disk keeps little of a round
                rounds += 1
                for object_id, data in zip(objects, contents, strict=True):
                    assert await read_all(cache, object_id, len(data)) == data
                    facts = cache.statistics()
                    assert facts.used_bytes + facts.reserved_bytes <= limit
    used = cache.statistics().used_bytes
    # Files may be up to a page longer than what is accounted.
    on_disk = sum(path.stat().st_blocks * 512 for path in (tmp_path / "files").glob("*/*"))
    assert used <= on_disk <= used + 6 * 4096
    async with running_cache(bucket.watched, tmp_path, limit_bytes=limit) as cache:
        assert cache.statistics().used_bytes == used


async def test_when_nothing_can_be_cached_reads_are_served_uncached(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    bucket, object_id, data = bucket_of_one(12 * MIB)
    async with running_cache(bucket.watched, tmp_path, limit_bytes=100) as cache:
        assert await read_all(cache, object_id, len(data)) == data
        await until(lambda: cache.statistics().uncached > 0)
        assert cache.statistics().used_bytes == 0
    assert caplog.text.count("no disk space") == 1


async def test_a_failing_disk_does_not_fail_reads(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    bucket, object_id, data = bucket_of_one(3 * MIB)
    async with running_cache(bucket.watched, tmp_path) as cache:
        (tmp_path / "files").rmdir()
        assert await read_all(cache, object_id, len(data)) == data
        await until(lambda: cache.statistics().disk_errors > 0)
    assert caplog.text.count("disk fails") == 1


async def test_staging_evicts_clean_blocks_but_not_more_than_its_share(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stop_ticks(monkeypatch)
    bucket, object_id, data = bucket_of_one(16 * MIB)
    async with running_cache(bucket.watched, tmp_path, limit_bytes=16 * MIB) as cache:
        await read_all(cache, object_id, len(data))
        await until(lambda: cache.statistics().used_bytes == len(data))
        assert not cache.reserve_staging_nowait(10 * MIB)
        await cache.reserve_staging(10 * MIB)
        facts = cache.statistics()
        assert facts.staging_bytes == 10 * MIB
        assert facts.used_bytes <= 6 * MIB
        with pytest.raises(NoSpace):
            await cache.reserve_staging(2 * MIB)
        cache.release_staging(10 * MIB)


def _staged(path: Path, data: bytes) -> bytes:
    """Write a staging file; return its granules' checksums."""
    path.write_bytes(data)
    return granule_checksums(memoryview(data))


async def test_an_adopted_staging_file_is_warm_also_after_a_restart(tmp_path: Path) -> None:
    bucket, object_id, data = bucket_of_one(10 * MIB + 99)
    staged = tmp_path / "staged"
    async with running_cache(bucket.watched, tmp_path / "cache") as cache:
        handle = cache.open(object_id, len(data))  # open before, as a reader's is
        checksums = _staged(staged, data)
        assert cache.reserve_staging_nowait(len(data))
        await cache.adopt([StagedObject(object_id, len(data), staged, checksums)])
        staged.unlink()
        assert await cache.read(handle, MIB, 10) == data[MIB : MIB + 10]
        assert await read_all(cache, object_id, len(data)) == data
        assert cache.statistics().used_bytes == pages_of(len(data))
        assert cache.statistics().staging_bytes == 0
    async with running_cache(bucket.watched, tmp_path / "cache") as cache:
        assert await read_all(cache, object_id, len(data)) == data
    assert bucket.memory.statistics().gets == 0


async def test_a_file_that_is_cached_already_is_not_adopted_twice(tmp_path: Path) -> None:
    bucket, object_id, data = bucket_of_one(2 * MIB)
    async with running_cache(bucket.watched, tmp_path / "cache") as cache:
        await read_all(cache, object_id, len(data))
        await until(lambda: cache.statistics().used_bytes == len(data))
        checksums = _staged(tmp_path / "staged", data)
        assert cache.reserve_staging_nowait(len(data))
        await cache.adopt([StagedObject(object_id, len(data), tmp_path / "staged", checksums)])
        (tmp_path / "staged").unlink()
        assert (cache.statistics().used_bytes, cache.statistics().staging_bytes) == (len(data), 0)


async def test_of_many_files_each_is_adopted_that_can_be(tmp_path: Path) -> None:
    bucket = new_bucket()
    data = {name: some_bytes(size) for name, size in (("a", 5000), ("b", 70 * KIB), ("c", 10), ("lost", 99))}
    ids = {name: bucket.put(name, content) for name, content in data.items()}
    folder = tmp_path / "staged"
    folder.mkdir()

    def staged(file: str, name: str, size: int) -> StagedObject:
        sums = _staged(folder / file, data[name])
        return StagedObject(ids[name], size, folder / file, sums)

    async with running_cache(bucket.watched, tmp_path / "cache") as cache:
        files = [staged(name, name, len(content)) for name, content in data.items()]
        files.append(staged("a again", "a", len(data["a"])))
        (folder / "lost").unlink()
        assert cache.reserve_staging_nowait(sum(file.size for file in files))
        await cache.adopt(files)
        kept = sum(pages_of(len(data[name])) for name in ("a", "b", "c"))
        assert (cache.statistics().used_bytes, cache.statistics().staging_bytes) == (kept, 0)
        assert cache.statistics().reserved_bytes == 0
    async with running_cache(bucket.watched, tmp_path / "cache") as cache:
        for name in ("a", "b", "c"):
            assert await read_all(cache, ids[name], len(data[name])) == data[name]
    assert bucket.memory.statistics().gets == 0


async def test_a_forgotten_version_leaves_nothing_behind(tmp_path: Path) -> None:
    bucket, object_id, data = bucket_of_one(5 * MIB)
    async with running_cache(bucket.watched, tmp_path) as cache:
        await read_all(cache, object_id, len(data))
        await until(lambda: cache.statistics().used_bytes == len(data))
        await cache.forget(object_id)
        assert cache.statistics().used_bytes == 0
        assert [path for path in (tmp_path / "files").glob("*/*") if path.is_file()] == []


async def test_many_readers_with_few_buffers_all_finish(tmp_path: Path) -> None:
    bucket = new_bucket()
    contents = [some_bytes(9 * MIB, seed=seed) for seed in range(10)]
    objects = [bucket.put(f"o{seed}", data) for seed, data in enumerate(contents)]
    async with running_cache(bucket.watched, tmp_path, buffer_bytes=24 * MIB) as cache:

        async def reader(object_id: ObjectId, data: bytes) -> None:
            assert await read_all(cache, object_id, len(data), step=3 * MIB // 2) == data

        with trio.fail_after(60):
            async with trio.open_nursery() as nursery:
                for object_id, data in zip(objects, contents, strict=True):
                    nursery.start_soon(reader, object_id, data)


async def test_threads_that_share_an_open_file_are_each_read_ahead(tmp_path: Path) -> None:
    bucket, object_id, data = bucket_of_one(48 * MIB)
    async with running_cache(bucket.watched, tmp_path, threads=False) as cache:
        handle = cache.open(object_id, len(data))
        for step in range(0, 12 * MIB, MIB):
            for start in (0, 16 * MIB, 32 * MIB):
                offset = start + step
                assert await cache.read(handle, offset, MIB) == data[offset : offset + MIB]
        cache.close(handle)
        assert cache.statistics().misses < 12  # one by one there were 36
