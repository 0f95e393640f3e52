"""Warm-ups, evictions by name and checks, over a bucket in memory."""

import os
import random
import threading
from pathlib import Path

import pytest
import trio
import trio.testing
from trio.testing import MockClock

from fusecache.engine.cache.block_cache import BlockCache
from fusecache.engine.cache.chunks import CachedObject, Chunk, Fetch, FetchSource
from fusecache.engine.cache.maintenance import ScrubResult, WholeFile
from fusecache.engine.cache.statistics import Counters
from fusecache.model.errors import NoSpace, Unavailable
from fusecache.model.objects import GRANULE_BYTES, MIB, Extent, ObjectId
from fusecache.policy.cache.fetch_order import Cause
from fusecache.policy.cache.granules import CHUNK_BYTES, PAGE_BYTES
from tests.support.block_caches import (
    Bucket,
    at_rest,
    bucket_of_one,
    fill_all,
    new_bucket,
    read_all,
    running_cache,
    some_bytes,
    stop_ticks,
    until,
)

pytestmark = pytest.mark.real_time


class Unlucky(random.Random):
    """Admits no newcomer to a cache that is full of young blocks."""

    def random(self) -> float:
        return 0.99


def wanted(prefix: str):
    return lambda key: key.startswith(prefix)


def on_disk(size: int) -> int:
    """Return what a whole object takes on the disk."""
    return -(-size // PAGE_BYTES) * PAGE_BYTES


async def warm_up(cache: BlockCache, object_id: ObjectId, size: int, warmed: set[int]) -> None:
    """Fill an object of one piece, and protect it from then on."""
    handle = cache.open(object_id, size)
    handle.entry.warming += 1
    await cache.maintenance.fill(handle.entry, 0)
    assert handle.entry.number is not None
    warmed.add(handle.entry.number)
    handle.entry.warming -= 1
    cache.close(handle)


async def check_all(cache: BlockCache, prefix: str = "") -> list[ScrubResult]:
    return [piece async for piece in cache.maintenance.scrub(wanted(prefix))]


def damage(path: Path, offset: int) -> None:
    with open(path, "r+b") as file:
        file.seek(offset)
        file.write(b"damage")


def cache_files(directory: Path) -> list[Path]:
    return [path for path in (directory / "files").rglob("*") if path.is_file()]


# ---- bringing in


async def test_what_was_filled_is_on_the_disk_whole_and_read_without_a_request_also_after_a_restart(
    tmp_path: Path,
) -> None:
    bucket, object_id, data = bucket_of_one(20 * MIB + 77)
    async with running_cache(bucket.watched, tmp_path) as cache:
        await fill_all(cache, object_id, len(data))
        assert cache.statistics().used_bytes == on_disk(len(data))
        assert cache.statistics().bytes_by_cause == {"demand": 0, "hint": len(data), "readahead": 0}
        assert await read_all(cache, object_id, len(data)) == data
    asked = len(bucket.watched.extents)
    async with running_cache(bucket.watched, tmp_path) as cache:
        assert await read_all(cache, object_id, len(data)) == data
    assert len(bucket.watched.extents) == asked == 3


async def test_filling_fetches_only_what_is_missing(tmp_path: Path) -> None:
    bucket, object_id, data = bucket_of_one(8 * MIB)
    async with running_cache(bucket.watched, tmp_path) as cache:
        handle = cache.open(object_id, len(data))
        await cache.read(handle, 3 * MIB, GRANULE_BYTES)
        await until(lambda: cache.statistics().used_bytes == GRANULE_BYTES)
        cache.close(handle)
        await fill_all(cache, object_id, len(data))
        await fill_all(cache, object_id, len(data))
    assert sum(extent.size for extent in bucket.watched.extents) == len(data)


async def test_what_was_read_without_being_kept_is_kept_without_another_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bytes that were not admitted to the disk are in memory still."""
    stop_ticks(monkeypatch)
    data, other = some_bytes(MIB), some_bytes(4 * MIB, seed=2)
    bucket = new_bucket()
    object_id, other_id = bucket.put("a", data), bucket.put("other", other)
    async with running_cache(bucket.watched, tmp_path, limit_bytes=4 * MIB) as cache:
        await fill_all(cache, other_id, len(other))
        await cache._table.flush_rows()
        cache._disk_space.evictor._random = Unlucky()
        handle = cache.open(object_id, len(data))
        await cache.read(handle, 0, MIB)
        await until(lambda: cache.statistics().not_admitted == 1)
        asked = len(bucket.watched.extents)
        await fill_all(cache, object_id, len(data))
        assert len(bucket.watched.extents) == asked
        cache.close(handle)
        assert cache.statistics().evicted_bytes >= MIB


async def test_a_warm_up_evicts_what_is_not_warmed_and_nothing_else(tmp_path: Path) -> None:
    bucket = new_bucket()
    old = [bucket.put(f"old{index}", some_bytes(MIB, seed=index)) for index in range(60)]
    new = [(bucket.put(f"new{index}", some_bytes(MIB, seed=-1 - index))) for index in range(62)]
    async with running_cache(bucket.watched, tmp_path, limit_bytes=64 * MIB) as cache:
        for object_id in old:
            await read_all(cache, object_id, MIB)
        with cache.maintenance.protect_warmed() as warmed:
            for object_id in new:
                await warm_up(cache, object_id, MIB, warmed)
        assert cache.statistics().used_bytes <= 64 * MIB
        asked = len(bucket.watched.extents)
        for index, object_id in enumerate(new):
            assert await read_all(cache, object_id, MIB) == some_bytes(MIB, seed=-1 - index)
        assert len(bucket.watched.extents) == asked


async def test_reading_does_not_evict_what_is_being_warmed(tmp_path: Path) -> None:
    bucket = new_bucket()
    warm = [bucket.put(f"warm{index}", some_bytes(MIB, seed=index)) for index in range(40)]
    others = [bucket.put(f"other{index}", some_bytes(MIB, seed=-1 - index)) for index in range(80)]
    async with running_cache(bucket.watched, tmp_path, limit_bytes=64 * MIB) as cache:
        with cache.maintenance.protect_warmed() as warmed:
            for object_id in warm:
                await warm_up(cache, object_id, MIB, warmed)
            for object_id in others:
                await read_all(cache, object_id, MIB)
            # Still within it: what was read last is kept, and makes room, a moment later.
            asked = len(bucket.watched.extents)
            for object_id in warm:
                await read_all(cache, object_id, MIB)
            assert len(bucket.watched.extents) == asked


async def test_what_finds_no_room_is_an_error_and_evicts_no_other_warm_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stop_ticks(monkeypatch)
    bucket = new_bucket()
    ids = [bucket.put(f"{index}", some_bytes(MIB, seed=index)) for index in range(5)]
    async with running_cache(bucket.watched, tmp_path, limit_bytes=4 * MIB) as cache:
        with cache.maintenance.protect_warmed() as warmed:
            for object_id in ids[:4]:
                await warm_up(cache, object_id, MIB, warmed)
            with pytest.raises(NoSpace, match="fetched, but not cached"):
                await fill_all(cache, ids[4], MIB)
        asked = len(bucket.watched.extents)
        for object_id in ids[:4]:
            await read_all(cache, object_id, MIB)
        assert len(bucket.watched.extents) == asked


async def test_an_error_of_the_bucket_reaches_who_fills_after_some_attempts(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    bucket = new_bucket()
    object_id = bucket.put("a", some_bytes(MIB))

    class Broken:
        calls = 0

        def get_into(self, *_: object) -> None:
            self.calls += 1
            raise Unavailable("no answer")

    broken = Broken()
    async with running_cache(broken, tmp_path, threads=False) as cache:
        with pytest.raises(Unavailable, match="no answer"):
            await fill_all(cache, object_id, MIB)
    assert broken.calls > 3


async def test_a_reader_does_not_wait_for_what_is_being_warmed(tmp_path: Path) -> None:
    bucket = new_bucket()
    ids = [bucket.put(f"{index}", some_bytes(CHUNK_BYTES, seed=index)) for index in range(8)]
    read = bucket.put("read", some_bytes(MIB, seed=99))
    held = threading.Event()

    def hold_large(extent: Extent, received: int) -> None:
        if extent.size == CHUNK_BYTES:
            assert held.wait(120)

    bucket.watched.on_progress = hold_large
    async with running_cache(bucket.watched, tmp_path) as cache, trio.open_nursery() as nursery:
        for object_id in ids:
            nursery.start_soon(fill_all, cache, object_id, CHUNK_BYTES)
        await until(lambda: bool(bucket.watched.extents))
        try:
            with trio.fail_after(60):
                assert await read_all(cache, read, MIB) == some_bytes(MIB, seed=99)
        finally:
            held.set()


# ---- dropping


async def test_dropping_frees_the_disk_of_what_is_wanted_and_of_nothing_else(tmp_path: Path) -> None:
    bucket = new_bucket()
    objects = {key: bucket.put(key, some_bytes(MIB, seed=3)) for key in ("a/1", "a/2", "b/1")}
    async with running_cache(bucket.watched, tmp_path) as cache:
        for object_id in objects.values():
            await read_all(cache, object_id, MIB)
        await until(lambda: cache.statistics().used_bytes == 3 * MIB)
        dropped = await cache.maintenance.evict(wanted("a/"), may_drop=lambda _: True)
        assert (dropped.freed_bytes, dropped.left_bytes) == (2 * MIB, 0)
        assert cache.statistics().used_bytes == MIB
        assert len(cache_files(tmp_path)) == 1
        asked = len(bucket.watched.extents)
        await read_all(cache, objects["b/1"], MIB)
        assert len(bucket.watched.extents) == asked
        assert await read_all(cache, objects["a/1"], MIB) == some_bytes(MIB, seed=3)
        assert len(bucket.watched.extents) > asked


async def test_an_open_handle_goes_on_after_its_blocks_were_dropped(tmp_path: Path) -> None:
    bucket, object_id, data = bucket_of_one(3 * MIB)
    async with running_cache(bucket.watched, tmp_path) as cache:
        handle = cache.open(object_id, len(data))
        assert await cache.read(handle, 0, MIB) == data[:MIB]
        await cache.maintenance.evict(wanted(""), may_drop=lambda _: True)
        assert await cache.read(handle, 0, MIB) == data[:MIB]
        assert await cache.read(handle, 2 * MIB, MIB) == data[2 * MIB :]
        cache.close(handle)


async def test_what_may_not_be_dropped_stays_and_is_counted(tmp_path: Path) -> None:
    bucket = new_bucket()
    kept, gone = bucket.put("kept", some_bytes(MIB)), bucket.put("gone", some_bytes(MIB))
    async with running_cache(bucket.watched, tmp_path) as cache:
        for object_id in (kept, gone):
            await read_all(cache, object_id, MIB)
        await until(lambda: cache.statistics().used_bytes == 2 * MIB)
        dropped = await cache.maintenance.evict(wanted(""), may_drop=lambda each: each != kept)
        assert (dropped.freed_bytes, dropped.left_bytes) == (MIB, MIB)


async def test_readers_writers_and_drops_at_once_end_with_the_account_right(tmp_path: Path) -> None:
    bucket = new_bucket()
    objects = [(bucket.put(f"{index}", some_bytes(MIB + 5, seed=index)), index) for index in range(12)]
    async with running_cache(bucket.watched, tmp_path, limit_bytes=8 * MIB) as cache:

        async def reader(chance: random.Random) -> None:
            for _ in range(25):
                object_id, seed = chance.choice(objects)
                assert await read_all(cache, object_id, MIB + 5, step=300_000) == some_bytes(
                    MIB + 5, seed=seed
                )

        async def dropper() -> None:
            for index in range(25):
                await cache.maintenance.evict(wanted(str(index % 12)), may_drop=lambda _: True)

        async with trio.open_nursery() as nursery:
            for seed in range(3):
                nursery.start_soon(reader, random.Random(seed))
            nursery.start_soon(dropper)
            nursery.start_soon(check_all, cache)
        with trio.fail_after(60):
            # What was read last may still be on its way to the disk, and then to its row.
            while (
                not at_rest(cache)
                or cache.statistics().reserved_bytes
                or cache._index.used_bytes() != cache.statistics().used_bytes
            ):
                await cache._table.flush_rows()
                await trio.sleep(0.01)
        assert cache.statistics().checksum_failures == 0
        dropped = await cache.maintenance.evict(wanted(""), may_drop=lambda _: True)
        assert dropped.left_bytes == 0
        assert cache.statistics().used_bytes == 0
        assert cache_files(tmp_path) == []


# ---- checking


async def filled(cache: BlockCache, bucket: Bucket, keys: str, size: int) -> None:
    for key in keys:
        await fill_all(cache, bucket.put(key, some_bytes(size, seed=ord(key))), size)


async def test_a_sound_cache_has_nothing_to_complain_about(tmp_path: Path) -> None:
    bucket = new_bucket()
    async with running_cache(bucket.watched, tmp_path) as cache:
        await filled(cache, bucket, "abc", 2 * MIB + 3)
        pieces = await check_all(cache)
        assert sum(piece.blocks for piece in pieces) == 9
        assert sum(piece.bytes for piece in pieces) == 3 * on_disk(2 * MIB + 3)
        assert not any(piece.damaged for piece in pieces)


async def test_a_damaged_block_is_named_dropped_and_fetched_again(tmp_path: Path, caplog: object) -> None:
    size = 2 * MIB + 3
    bucket = new_bucket()
    async with running_cache(bucket.watched, tmp_path) as cache:
        await filled(cache, bucket, "abc", size)
        path = sorted(cache_files(tmp_path))[1]
        damage(path, MIB + 100)
        pieces = await check_all(cache)
        (damaged,) = [object_id for piece in pieces for object_id in piece.damaged]
        assert sum(piece.damaged_bytes for piece in pieces) == MIB
        assert cache.statistics().used_bytes == 3 * on_disk(size) - MIB
        assert cache.statistics().checksum_failures == 16
        assert await read_all(cache, damaged, size) == some_bytes(size, seed=ord(damaged.key))
        assert not any(piece.damaged for piece in await check_all(cache))


async def test_a_missing_file_of_the_cache_is_damage(tmp_path: Path, caplog: object) -> None:
    bucket = new_bucket()
    async with running_cache(bucket.watched, tmp_path) as cache:
        await filled(cache, bucket, "ab", MIB)
        cache_files(tmp_path)[0].unlink()
        pieces = await check_all(cache)
        assert sum(len(piece.damaged) for piece in pieces) == 1
        assert cache.statistics().used_bytes == MIB


# ---- what readers waited for


async def test_nobody_waited_for_what_was_read_ahead_or_warmed(tmp_path: Path) -> None:
    bucket, object_id, data = bucket_of_one(MIB)

    token = trio.lowlevel.current_trio_token()

    def slowly(extent: Extent, received: int) -> None:
        trio.from_thread.run(trio.sleep, 0.02, trio_token=token)

    bucket.watched.on_progress = slowly
    async with running_cache(bucket.watched, tmp_path) as cache:
        await fill_all(cache, object_id, len(data))
        waited = cache.statistics().wait_seconds
        assert waited["network"] == waited["queue"] == 0
        other = bucket.put("b", data)
        await read_all(cache, other, len(data))
        assert cache.statistics().wait_seconds["network"] > 0.02


def request(source: FetchSource, started_at: float | None) -> Fetch:
    chunk = Chunk(CachedObject(ObjectId("a", "etag"), MIB), 0)
    return Fetch(chunk, 0, 1, source, Cause.DEMAND, 0, None, queued_at=0.0, started_at=started_at)


@pytest.mark.parametrize(
    ("requests", "waits"),
    [
        ([], {"queue": 0, "network": 0, "disk": 0}),
        # Under way before the reader came: it waited for the network alone.
        ([request(FetchSource.NETWORK, 3.0)], {"queue": 0, "network": 4, "disk": 0}),
        ([request(FetchSource.NETWORK, 11.0)], {"queue": 1, "network": 3, "disk": 0}),
        ([request(FetchSource.DISK, 13.0)], {"queue": 3, "network": 0, "disk": 1}),
        # Never started: the reader gave up, or another request brought the bytes.
        ([request(FetchSource.NETWORK, None)], {"queue": 4, "network": 0, "disk": 0}),
        # The last to start is the one that it waited for.
        (
            [request(FetchSource.DISK, 10.5), request(FetchSource.NETWORK, 12.0)],
            {"queue": 2, "network": 2, "disk": 0},
        ),
    ],
)
def test_a_reader_s_wait_is_the_queue_s_until_its_request_started_and_then_its_source_s(
    requests: list[Fetch], waits: dict[str, float]
) -> None:
    counters = Counters()
    counters.count_wait(requests, began=10.0, now=14.0)
    assert counters.wait_seconds == waits


async def test_two_warm_ups_of_one_file_share_its_requests(tmp_path: Path) -> None:
    bucket = new_bucket()
    data = some_bytes(3 * MIB)
    file = bucket.put("file", data)
    go_on = threading.Event()
    bucket.watched.on_progress = lambda extent, received: go_on.wait(120) and None
    async with running_cache(bucket.watched, tmp_path / "cache") as cache, trio.open_nursery() as nursery:
        nursery.start_soon(fill_all, cache, file, len(data))
        await until(lambda: len(bucket.watched.extents) == 1)
        nursery.start_soon(fill_all, cache, file, len(data))
        await trio.testing.wait_all_tasks_blocked()
        nursery.start_soon(fill_all, cache, file, len(data))
        await trio.testing.wait_all_tasks_blocked()
        go_on.set()
    assert bucket.watched.extents == [Extent(0, len(data))]


# ---- whole files, for programs that read them by themselves


async def held(cache: BlockCache, object_id: ObjectId, size: int) -> WholeFile | None:
    """Hold a file once it is verified, as a slow disk allows; skips where that cannot be."""
    try:
        os.close(cache.maintenance.open_probe())
    except OSError as exc:
        pytest.skip(f"no passthrough here: {exc.strerror}")
    whole = await cache.maintenance.hold_whole(object_id, size)
    await until(lambda: not cache.maintenance._verifying)
    return whole or await cache.maintenance.hold_whole(object_id, size)


async def test_a_whole_file_is_verified_once_and_held_until_no_program_reads_it(tmp_path: Path) -> None:
    bucket, object_id, data = bucket_of_one(9 * MIB + 77)
    async with running_cache(bucket.watched, tmp_path) as cache:
        await fill_all(cache, object_id, len(data))
        before = cache._table.traffic_bytes
        first = await held(cache, object_id, len(data))
        assert first is not None
        assert cache._table.traffic_bytes - before == len(data)
        second = await held(cache, object_id, len(data))
        assert second is not None
        assert cache._table.traffic_bytes - before == len(data)
        assert os.pread(first.fd, 2 * len(data), 0) == data
        os.close(second.fd)
        cache.maintenance.release_whole(second)
        evicted = await cache.maintenance.evict(wanted("a"), may_drop=lambda object_id: True)
        assert (evicted.freed_bytes, evicted.left_bytes) == (0, on_disk(len(data)))
        cache.maintenance.release_whole(first)
        await trio.sleep(0.1)
        assert cache._table.held == {first.number: 1}  # its descriptor is open
        os.close(first.fd)
        await until(lambda: not cache._table.held)
        evicted = await cache.maintenance.evict(wanted("a"), may_drop=lambda object_id: True)
        assert (evicted.freed_bytes, evicted.left_bytes) == (on_disk(len(data)), 0)
        assert not any(entry.handles for entry in cache._table.objects.values())
        assert not cache._table.intact


async def test_a_file_that_is_not_whole_or_damaged_is_not_held(tmp_path: Path) -> None:
    data = some_bytes(9 * MIB + 77)
    bucket = new_bucket()
    part, bad = bucket.put("part", data), bucket.put("bad", data)
    async with running_cache(bucket.watched, tmp_path) as cache:
        handle = cache.open(part, len(data))
        for start in range(0, len(data), MIB):  # of each block something
            await cache.maintenance.fill(
                handle.entry, start // CHUNK_BYTES, mask=1 << (start // MIB % 8 * 16)
            )
        assert handle.entry.blocks == 10
        assert await held(cache, part, len(data)) is None
        cache.close(handle)
        await fill_all(cache, bad, len(data))
        (path,) = [path for path in cache_files(tmp_path) if path.stat().st_blocks * 512 > 9 * MIB]
        damage(path, 5 * MIB)
        assert await held(cache, bad, len(data)) is None
        assert await read_all(cache, bad, len(data)) == data
        await fill_all(cache, bad, len(data))
        whole = await held(cache, bad, len(data))
        assert whole is not None
        assert os.pread(whole.fd, 2 * len(data), 0) == data
        os.close(whole.fd)
        cache.maintenance.release_whole(whole)
        await until(lambda: not cache._table.held)
        assert not any(entry.handles for entry in cache._table.objects.values())


async def test_a_held_file_is_not_written(tmp_path: Path) -> None:
    """Damage that a check of a reader finds is fetched again, but not stored: the padding would show."""
    bucket, object_id, data = bucket_of_one(2 * MIB + 77)
    async with running_cache(bucket.watched, tmp_path) as cache:
        await fill_all(cache, object_id, len(data))
        whole = await held(cache, object_id, len(data))
        assert whole is not None
        (path,) = [path for path in cache_files(tmp_path) if path.stat().st_size == len(data)]
        damage(path, 2 * MIB)
        await cache.maintenance._empty_buffers(wanted("a"))
        assert await read_all(cache, object_id, len(data)) == data
        await until(lambda: at_rest(cache))
        assert path.stat().st_size == len(data)
        assert cache._table.damages == 1
        assert whole.number not in cache._table.intact
        os.close(whole.fd)
        cache.maintenance.release_whole(whole)
        await until(lambda: not cache._table.held)
