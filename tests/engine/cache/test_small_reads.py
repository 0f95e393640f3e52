"""Small reads at random places of what lies on the disk: the shortest way, with all promises of the long one."""

import errno
import os
import random
from pathlib import Path
from typing import Any

import pytest
import trio

from fusecache.disk.cache_files import CacheFiles
from fusecache.disk.direct_reads import DirectReads
from fusecache.engine.cache.block_cache import BlockCache, ReadHandle
from fusecache.engine.runtime.supervisor import Supervisor
from fusecache.model.objects import GRANULE_BYTES, KIB, MIB, ObjectId
from tests.support.block_caches import Bucket, new_bucket, read_all, running_cache, some_bytes, until
from tests.support.direct_reads import skip_without_direct_reads
from tests.support.mistakes import MistakeIn

pytestmark = pytest.mark.real_time

SIZE = 10 * MIB + 300
DATA = some_bytes(SIZE, seed=5)
READ = 8 * KIB


@pytest.fixture
def needs_direct_reads(tmp_path: Path) -> None:
    (tmp_path / "probe").write_bytes(bytes(4 * KIB))
    skip_without_direct_reads(tmp_path / "probe")


async def _cached(directory: Path) -> tuple[Bucket, ObjectId]:
    """Return an object all of which lies on the disk, and nothing in memory; the requests for it are forgotten."""
    bucket = new_bucket()
    object_id = bucket.put("o", DATA)
    async with running_cache(bucket.watched, directory) as cache:
        await read_all(cache, object_id, SIZE)
        await until(lambda: cache.statistics().used_bytes >= SIZE)
    bucket.watched.extents.clear()
    return bucket, object_id


async def _check(cache: BlockCache, handle: ReadHandle, start: int) -> None:
    stop = min(SIZE, start + READ)
    assert bytes(await cache.read(handle, start, READ)) == DATA[start:stop], f"bytes at {start}"


def _the_file(directory: Path) -> Path:
    (file,) = (path for path in (directory / "files").glob("*/*") if path.is_file())
    return file


@pytest.mark.usefixtures("needs_direct_reads")
async def test_they_need_no_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bucket, object_id = await _cached(tmp_path)
    load = CacheFiles.load
    in_threads: list[int] = []

    def counting(*arguments: Any) -> list[int]:
        in_threads[-1] += 1
        return load(*arguments)

    monkeypatch.setattr(CacheFiles, "load", counting)
    # Now and then the kernel would have to wait for something, which is left to a thread; but not each time.
    for _ in range(5):
        in_threads.append(0)
        async with running_cache(bucket.watched, tmp_path) as cache:
            handle = cache.open(object_id, SIZE)
            for start in (SIZE - 300, 5 * MIB, GRANULE_BYTES - READ // 2, 9 * MIB, SIZE - 20 * KIB):
                await _check(cache, handle, start)
            cache.close(handle)
            assert cache.statistics().hits == 5
    assert 0 in in_threads
    assert not bucket.watched.extents


async def test_a_crowd_of_readers_with_few_buffers_gets_its_bytes(tmp_path: Path) -> None:
    bucket, object_id = await _cached(tmp_path)
    async with running_cache(bucket.watched, tmp_path) as cache:

        async def reader(seed: int) -> None:
            places = random.Random(seed)
            handle = cache.open(object_id, SIZE)
            for _ in range(40):
                await _check(cache, handle, places.randrange(SIZE))
            cache.close(handle)

        async with trio.open_nursery() as readers:
            for seed in range(40):
                readers.start_soon(reader, seed)
        assert cache.statistics().disk_errors == 0
    assert not bucket.watched.extents


@pytest.mark.parametrize("harm", ["changed", "cut", "gone"])
async def test_what_is_damaged_is_fetched_again_and_not_served(
    tmp_path: Path, harm: str, caplog: pytest.LogCaptureFixture
) -> None:
    bucket, object_id = await _cached(tmp_path)
    async with running_cache(bucket.watched, tmp_path) as cache:
        handle = cache.open(object_id, SIZE)
        await _check(cache, handle, 9 * MIB)
        await _check(cache, handle, MIB)
        file = _the_file(tmp_path)
        if harm == "changed":
            with file.open("r+b") as open_file:
                open_file.seek(3 * MIB + GRANULE_BYTES - 1)
                open_file.write(bytes([DATA[3 * MIB + GRANULE_BYTES - 1] ^ 1]))
                os.fsync(open_file.fileno())
        elif harm == "cut":
            os.truncate(file, 3 * MIB + 100)
        else:
            file.unlink()
        await _check(cache, handle, 3 * MIB)
        assert cache.statistics().checksum_failures == 1
        assert [extent.start for extent in bucket.watched.extents] == [3 * MIB]
        cache.close(handle)
    assert "damaged" in caplog.text


async def test_a_reader_who_goes_away_leaves_the_others_theirs(tmp_path: Path) -> None:
    bucket, object_id = await _cached(tmp_path)
    async with running_cache(bucket.watched, tmp_path) as cache:
        handle = cache.open(object_id, SIZE)
        await _check(cache, handle, 9 * MIB)
        await _check(cache, handle, MIB)
        for start in range(2 * MIB, 7 * MIB, GRANULE_BYTES):
            async with trio.open_nursery() as nursery:
                with trio.CancelScope() as gone:
                    async with trio.open_nursery() as first:
                        first.start_soon(_check, cache, handle, start)
                        await trio.lowlevel.checkpoint()
                        nursery.start_soon(_check, cache, handle, start)
                        gone.cancel()
        assert cache.statistics().disk_errors == 0
        cache.close(handle)
    assert not bucket.watched.extents


async def test_where_the_kernel_refuses_threads_read_and_it_is_asked_no_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bucket, object_id = await _cached(tmp_path)
    asked: list[object] = []

    def refuse(*arguments: object) -> bool:
        asked.append(arguments)
        raise PermissionError(errno.EPERM, "not in this container")

    monkeypatch.setattr(DirectReads, "begin", refuse)
    async with running_cache(bucket.watched, tmp_path) as cache:
        handle = cache.open(object_id, SIZE)
        for start in (9 * MIB, MIB, 5 * MIB):
            await _check(cache, handle, start)
        cache.close(handle)
    assert len(asked) <= 1  # none where there is no direct I/O at all
    assert not bucket.watched.extents


@pytest.mark.usefixtures("needs_direct_reads")
async def test_a_failed_wake_up_delays_readers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The task that wakes readers starts again, and finds the reads that ended in the meantime."""
    bucket, object_id = await _cached(tmp_path)
    supervisor, mistake = Supervisor(), MistakeIn(monkeypatch, DirectReads, "ended", times=1, skip=1)
    async with running_cache(bucket.watched, tmp_path, supervisor=supervisor) as cache:
        handle = cache.open(object_id, SIZE)
        with trio.fail_after(60):
            for start in random.Random(1).sample(range(SIZE), 60):
                await _check(cache, handle, start)
        cache.close(handle)
    assert mistake.times == 0
    assert supervisor.statistics()["direct-reads"]["failures"] == 1
    assert not bucket.watched.extents
