"""A disk that is full, fails, changes under the daemon or goes away: reads stay right, and go on uncached."""

import contextlib
import errno
import os
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import trio

from fusecache.disk.cache_files import CacheFiles, granule_checksums
from fusecache.engine.cache import adoption
from fusecache.engine.cache.adoption import StagedObject
from fusecache.engine.cache.block_cache import BlockCache
from fusecache.index.cache_index import CacheIndex
from fusecache.model.errors import LocalDiskError
from fusecache.model.objects import KIB, MIB, ObjectId
from tests.support.block_caches import (
    Bucket,
    at_rest,
    fill_all,
    new_bucket,
    read_all,
    running_cache,
    some_bytes,
    stop_ticks,
    until,
)

pytestmark = pytest.mark.real_time

SIZE = 24 * MIB
DISK_BYTES = 64 * MIB
FLOOR = 16 * MIB


def _store(bucket: Bucket, count: int, size: int = SIZE) -> list[tuple[ObjectId, bytes]]:
    contents = [some_bytes(size, seed=seed) for seed in range(count)]
    return [(bucket.put(f"o{seed}", data), data) for seed, data in enumerate(contents)]


def _free(directory: Path) -> int:
    facts = os.statvfs(directory)
    return facts.f_bavail * facts.f_frsize


def _fill(directory: Path, left_bytes: int) -> Path:
    """Leave only so much free, by a file of another program; again if the index took a page just then."""
    path = directory / "another-program"
    for _ in range(20):
        with path.open("wb") as file:
            try:
                os.posix_fallocate(file.fileno(), 0, _free(directory) - left_bytes)
            except OSError as exc:
                if exc.errno != errno.ENOSPC:
                    raise
            else:
                return path
    pytest.fail("the index takes whatever is left")


def _on_disk(directory: Path) -> int:
    total = 0
    for path in (directory / "files").glob("*/*"):
        with contextlib.suppress(FileNotFoundError):  # evicted concurrently
            total += path.stat().st_blocks * 512
    return total


def _files(directory: Path) -> list[Path]:
    return [path for path in (directory / "files").glob("*/*") if path.is_file()]


def _matches(cache: BlockCache, directory: Path) -> bool:
    """Say whether the disk holds what the account says; a file with many holes has a page more, of extents."""
    used = cache.statistics().used_bytes
    return used <= _on_disk(directory) <= used + len(_files(directory)) * 8 * KIB


async def _all_kept(cache: BlockCache) -> None:
    """Wait until all that was read is on the disk, or will never be."""
    await until(lambda: at_rest(cache) and not cache.statistics().reserved_bytes)


async def _forget_all(cache: BlockCache, directory: Path, *object_ids: ObjectId) -> None:
    """Forget objects until nothing is left, counted or on disk: what the last reads brought may be written late."""
    with trio.fail_after(60):
        while not (at_rest(cache) and cache.statistics().used_bytes == _on_disk(directory) == 0):
            for object_id in object_ids:
                await cache.forget(object_id)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of its own, of DISK_BYTES."""
    if os.geteuid():
        pytest.skip("needs root, to mount a small file system")
    place = tmp_path / "disk"
    place.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "tmpfs", place], check=True)
    try:
        yield place
    finally:
        subprocess.run(["umount", "--lazy", place], check=True)


async def test_the_floor_is_kept_though_the_limit_is_far_away(small_disk: Path) -> None:
    bucket = new_bucket()
    objects = _store(bucket, 4)
    least = DISK_BYTES
    async with running_cache(bucket.watched, small_disk / "cache", floor_bytes=FLOOR) as cache:
        for object_id, data in objects * 2:
            assert await read_all(cache, object_id, len(data)) == data
            least = min(least, _free(small_disk))
        with trio.fail_after(60):  # what finds no room is not kept, until it is measured again
            while cache.statistics().used_bytes <= 16 * MIB:
                await read_all(cache, *_sized(objects[0]))
                least = min(least, _free(small_disk))
    # The index grows after the blocks that it describes; seen: 1.1 MiB.
    assert FLOOR - 2 * MIB <= least < DISK_BYTES


async def test_somebody_else_fills_the_disk_meanwhile(
    small_disk: Path, caplog: pytest.LogCaptureFixture
) -> None:
    bucket = new_bucket()
    objects = _store(bucket, 4)
    async with running_cache(bucket.watched, small_disk / "cache", floor_bytes=FLOOR) as cache:
        assert await read_all(cache, *_sized(objects[0])) == objects[0][1]
        await _all_kept(cache)
        other = _fill(small_disk, FLOOR - 4 * MIB)
        for object_id, data in objects:
            before = _free(small_disk)
            assert await read_all(cache, object_id, len(data)) == data
            await _all_kept(cache)
            # What is kept takes the place of what was; the index may grow by a few pages.
            assert _free(small_disk) >= min(before, FLOOR) - 256 * KIB
        other.unlink()
        await until(lambda: cache.statistics().used_bytes > 0)
        assert await read_all(cache, *_sized(objects[3])) == objects[3][1]
    assert caplog.text.count("no disk space") <= 1


async def test_a_disk_without_a_single_byte_left_serves_reads_and_keeps_running(small_disk: Path) -> None:
    bucket = new_bucket()
    objects = _store(bucket, 3)
    async with running_cache(bucket.watched, small_disk / "cache") as cache:
        assert await read_all(cache, *_sized(objects[0])) == objects[0][1]
        await _all_kept(cache)
        other = _fill(small_disk, 0)
        for object_id, data in objects * 2:
            assert await read_all(cache, object_id, len(data)) == data
        await trio.sleep(1.2)  # the index is written, or not, once a second
        assert await read_all(cache, *_sized(objects[2])) == objects[2][1]
        other.unlink()
    async with running_cache(bucket.watched, small_disk / "cache") as cache:
        for object_id, data in objects:
            assert await read_all(cache, object_id, len(data)) == data


def _sized(item: tuple[ObjectId, bytes]) -> tuple[ObjectId, int]:
    return item[0], len(item[1])


def test_a_write_that_fails_half_way_leaves_nothing_on_the_disk(
    small_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CacheFiles, "free_bytes", lambda files: 1 << 40)  # as it was a moment ago
    files = CacheFiles(small_disk / "files")
    memory = memoryview(bytearray(8 * MIB))
    _fill(small_disk, 3 * MIB)
    before = _free(small_disk)
    with pytest.raises(LocalDiskError):
        files.store(1, 0, memory, 8 * MIB)
    assert before - _free(small_disk) <= 64 * KIB


async def test_bytes_on_the_disk_stay_below_the_limit_also_with_many_tiny_objects(tmp_path: Path) -> None:
    bucket = new_bucket()
    objects = _store(bucket, 600, size=100)
    limit = 2 * MIB
    async with running_cache(bucket.watched, tmp_path, limit_bytes=limit) as cache:
        for object_id, data in objects:
            assert await read_all(cache, object_id, len(data)) == data
            facts = cache.statistics()
            assert facts.used_bytes + facts.reserved_bytes <= limit
        for object_id, data in objects[:300]:  # what a slow disk did not take
            await fill_all(cache, object_id, len(data))
            facts = cache.statistics()
            assert facts.used_bytes + facts.reserved_bytes <= limit
        # The account is right, and it is what was below the limit at each step.
        await until(lambda: cache.statistics().used_bytes == _on_disk(tmp_path) > MIB)


def _flip(path: Path) -> None:
    with path.open("r+b") as file:
        for offset in range(1000, SIZE, 64 * KIB):
            file.seek(offset)
            byte = file.read(1)
            file.seek(offset)
            file.write(bytes([byte[0] ^ 255]))


def _cut(path: Path) -> None:
    os.truncate(path, 5 * MIB)


def _remove(path: Path) -> None:
    path.unlink()


def _swap(path: Path) -> None:
    other = next(file for file in path.parent.parent.glob("*/*") if file.is_file() and file != path)
    aside = path.with_name("aside")
    path.rename(aside)
    other.rename(path)
    aside.rename(other)


def _replace_by_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


@pytest.mark.parametrize("moment", ["between runs", "under the daemon"])
@pytest.mark.parametrize("spoil", [_flip, _cut, _remove, _swap, _replace_by_folder])
async def test_a_spoilt_cache_file_is_a_miss_counted_and_told_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, spoil: Callable[[Path], None], moment: str
) -> None:
    bucket = new_bucket()
    objects = _store(bucket, 2)
    # Buffers for less than what is read in between, so that the disk is asked again.
    async with running_cache(bucket.watched, tmp_path, buffer_bytes=24 * MIB) as cache:
        for object_id, data in objects:
            await fill_all(cache, object_id, len(data))
            assert await read_all(cache, object_id, len(data)) == data
        if moment == "under the daemon":
            spoil(_files(tmp_path)[0])
            for object_id, data in objects * 2:
                assert await read_all(cache, object_id, len(data)) == data
            assert cache.statistics().checksum_failures > 0
    if moment == "between runs":
        spoil(_files(tmp_path)[0])
        async with running_cache(bucket.watched, tmp_path, buffer_bytes=24 * MIB) as cache:
            for object_id, data in objects * 2:
                assert await read_all(cache, object_id, len(data)) == data
            assert cache.statistics().checksum_failures > 0
    assert caplog.text.count("are damaged") == 1


async def test_the_cache_directory_goes_away_under_the_daemon(tmp_path: Path) -> None:
    bucket = new_bucket()
    objects = _store(bucket, 2)
    directory = tmp_path / "cache"
    async with running_cache(bucket.watched, directory, buffer_bytes=24 * MIB) as cache:
        assert await read_all(cache, *_sized(objects[0])) == objects[0][1]
        await _all_kept(cache)
        directory.rename(tmp_path / "away")
        for object_id, data in objects * 2:
            assert await read_all(cache, object_id, len(data)) == data
        await trio.sleep(1.2)  # free space and index are looked at once a second
        assert await read_all(cache, *_sized(objects[1])) == objects[1][1]
        assert cache.statistics().disk_errors > 0


class _Switch:
    """Lets calls fail while it is on."""

    def __init__(self) -> None:
        self.is_on = False

    def wrap(self, call: Callable[..., object], error: Exception) -> Callable[..., object]:
        def wrapped(*args: object, **more: object) -> object:
            if self.is_on:
                raise error
            return call(*args, **more)

        return wrapped


@pytest.mark.parametrize("name", ["preadv", "pwritev"])
async def test_input_output_errors_of_the_disk_do_not_reach_readers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    bucket = new_bucket()
    objects = _store(bucket, 2)
    switch = _Switch()
    monkeypatch.setattr(os, name, switch.wrap(getattr(os, name), OSError(5, "Input/output error")))
    async with running_cache(bucket.watched, tmp_path, buffer_bytes=24 * MIB) as cache:
        assert await read_all(cache, *_sized(objects[0])) == objects[0][1]
        await _all_kept(cache)
        switch.is_on = True
        for object_id, data in [*objects, objects[0]]:
            assert await read_all(cache, object_id, len(data)) == data
        assert cache.statistics().disk_errors > 0
        switch.is_on = False
        for object_id, data in objects:
            assert await read_all(cache, object_id, len(data)) == data
            # In the place of what could not be read: that is not counted any more, and still there.
            await fill_all(cache, object_id, len(data))
        # The file that could not be written goes a moment later.
        await until(lambda: _matches(cache, tmp_path))
    assert caplog.text.count("disk fails") == 1


@pytest.mark.parametrize("name", ["apply", "evict", "sample", "lease_numbers", "remove_object"])
async def test_an_index_that_cannot_be_written_keeps_nothing_new_and_recovers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    bucket = new_bucket()
    objects = _store(bucket, 4)
    switch = _Switch()
    monkeypatch.setattr(
        CacheIndex, name, switch.wrap(getattr(CacheIndex, name), LocalDiskError("the disk is full"))
    )
    limit = 40 * MIB
    async with running_cache(bucket.watched, tmp_path, limit_bytes=limit) as cache:
        assert await read_all(cache, *_sized(objects[0])) == objects[0][1]
        await _all_kept(cache)
        switch.is_on = True
        for object_id, data in objects * 2:
            assert await read_all(cache, object_id, len(data)) == data
        await cache.forget(objects[0][0])
        await trio.sleep(1.2)
        facts = cache.statistics()
        assert facts.used_bytes + facts.reserved_bytes <= limit
        switch.is_on = False
        await trio.sleep(1.2)
        for object_id, data in objects * 2:
            assert await read_all(cache, object_id, len(data)) == data
            facts = cache.statistics()
            assert facts.used_bytes + facts.reserved_bytes <= limit
        for object_id, _ in objects:
            await cache.forget(object_id)
    # What the failures left uncounted goes with the next start.
    async with running_cache(bucket.watched, tmp_path, limit_bytes=limit) as cache:
        await until(lambda: _matches(cache, tmp_path))


async def test_rows_that_the_index_did_not_take_are_not_lost_with_the_buffers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stop_ticks(monkeypatch)
    bucket = new_bucket()
    objects = _store(bucket, 2)
    async with running_cache(bucket.watched, tmp_path, buffer_bytes=24 * MIB) as cache:
        other = cache.open(*_sized(objects[1]))
        for offset in range(0, SIZE, 8 * MIB):  # what the index knows of it is known
            assert await cache.read(other, offset, 1) == objects[1][1][offset : offset + 1]
        await _all_kept(cache)
        fault = _Nth(0)
        fault.may_end.clear()
        monkeypatch.setattr(CacheIndex, "apply", fault.wrap(CacheIndex.apply))
        assert await read_all(cache, *_sized(objects[0])) == objects[0][1]
        await _all_kept(cache)
        await fill_all(cache, *_sized(objects[0]))  # what a slow disk did not take
        async with trio.open_nursery() as nursery:
            nursery.start_soon(cache._table.flush_rows)
            await until(fault.has_begun.is_set)
            for offset in range(0, SIZE, MIB):  # in the buffers of the first
                assert await cache.read(other, offset, MIB) == objects[1][1][offset : offset + MIB]
            await _all_kept(cache)
            fault.may_end.set()
        cache.close(other)
        await _forget_all(cache, tmp_path, *(object_id for object_id, _ in objects))


@pytest.mark.parametrize("name", ["find", "block_rows"])
async def test_an_index_that_cannot_be_read_is_given_up_until_the_next_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    bucket = new_bucket()
    objects = _store(bucket, 2)
    async with running_cache(bucket.watched, tmp_path) as cache:
        for object_id, data in objects:
            assert await read_all(cache, object_id, len(data)) == data
        await _all_kept(cache)
    with monkeypatch.context() as patch:
        error = LocalDiskError("the page is damaged")
        switch = _Switch()
        switch.is_on = True
        patch.setattr(CacheIndex, name, switch.wrap(getattr(CacheIndex, name), error))
        async with running_cache(bucket.watched, tmp_path) as cache:
            for object_id, data in objects * 2:
                assert await read_all(cache, object_id, len(data)) == data
    async with running_cache(bucket.watched, tmp_path) as cache:
        assert cache.statistics().used_bytes == 0
        for object_id, data in objects:
            assert await read_all(cache, object_id, len(data)) == data


# ---- staging files that become cache while the index fails


class _Nth:
    """Lets the call of that number (from 0), and no other, fail."""

    def __init__(self, number: int) -> None:
        self.left = number
        self.has_begun = threading.Event()
        self.may_end = threading.Event()
        self.may_end.set()

    def wrap(self, call: Callable[..., object]) -> Callable[..., object]:
        def wrapped(*args: object, **more: object) -> object:
            self.left -= 1
            if self.left == -1:
                self.has_begun.set()
                assert self.may_end.wait(120)
                raise LocalDiskError("the disk fails")
            return call(*args, **more)

        return wrapped


def _staged(folder: Path, object_id: ObjectId, data: bytes) -> StagedObject:
    path = folder / object_id.key
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(data)
    return StagedObject(object_id, len(data), path, granule_checksums(memoryview(data)))


@pytest.mark.parametrize(("name", "number"), [("find", 1), ("apply", 0), ("apply", 1), ("apply", 2)])
async def test_when_the_index_fails_once_no_staging_file_stays_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, number: int
) -> None:
    # Each file has a transaction of its own; the middle one two.
    monkeypatch.setattr(adoption, "_ROWS_PER_COMMIT", 4)
    bucket = new_bucket()
    contents = [some_bytes(size) for size in (99, 5 * MIB, 70 * KIB)]
    objects = [(bucket.put(f"o{len(data)}", data), data) for data in contents]
    cache_folder = tmp_path / "cache"
    async with running_cache(bucket.watched, cache_folder) as cache:
        files = [_staged(tmp_path / "staged", object_id, data) for object_id, data in objects]
        assert cache.reserve_staging_nowait(sum(file.size for file in files))
        monkeypatch.setattr(CacheIndex, name, _Nth(number).wrap(getattr(CacheIndex, name)))
        await cache.adopt(files)
        facts = cache.statistics()
        assert (facts.staging_bytes, facts.reserved_bytes) == (0, 0)
        assert facts.used_bytes == _on_disk(cache_folder)
        for object_id, data in objects:
            assert await read_all(cache, object_id, len(data)) == data
        await _all_kept(cache)
        await _forget_all(cache, cache_folder, *(object_id for object_id, _ in objects))
    async with running_cache(bucket.watched, cache_folder) as cache:
        assert cache.statistics().used_bytes == 0


@pytest.mark.parametrize("name", ["apply", "block_rows"])
async def test_what_is_read_while_its_staging_file_is_adopted_is_counted_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Also if the index fails concurrently."""
    bucket = new_bucket()
    data = some_bytes(2 * MIB)
    object_id = bucket.put("a", data)
    has_asked, may_answer = threading.Event(), threading.Event()

    def hold(*_: object) -> None:
        has_asked.set()
        assert may_answer.wait(120)

    bucket.watched.on_progress = hold
    cache_folder = tmp_path / "cache"
    async with running_cache(bucket.watched, cache_folder) as cache:
        file = _staged(tmp_path / "staged", object_id, data)
        assert cache.reserve_staging_nowait(file.size)
        fault = _Nth(0)
        monkeypatch.setattr(CacheIndex, name, fault.wrap(getattr(CacheIndex, name)))
        async with trio.open_nursery() as nursery:
            nursery.start_soon(read_all, cache, object_id, len(data))
            await until(has_asked.is_set)
            if name == "apply":
                fault.may_end.clear()
                nursery.start_soon(cache.adopt, [file])
                await until(fault.has_begun.is_set)
                may_answer.set()
                await until(lambda: cache.statistics().used_bytes > len(data))
                await _all_kept(cache)
                fault.may_end.set()
            else:
                await cache.adopt([file])
                may_answer.set()
        assert await read_all(cache, object_id, len(data)) == data
        await until(lambda: _matches(cache, cache_folder))
        await _forget_all(cache, cache_folder, object_id)
    async with running_cache(bucket.watched, cache_folder) as cache:
        assert cache.statistics().used_bytes == 0


def test_what_lmdb_refuses_is_an_error_of_the_disk(tmp_path: Path) -> None:
    index = CacheIndex(tmp_path / "index", boot_id="boot")
    index.close()
    with pytest.raises(LocalDiskError, match="index fails"):
        index.find(ObjectId("a", "b"))


# ---- a stop in the middle


class _Held:
    """Holds calls before their work until they are let go."""

    def __init__(self, call: Callable[..., object]) -> None:
        self._call = call
        self.has_begun = threading.Event()
        self.may_go_on = threading.Event()

    def __call__(self, *args: object, **more: object) -> object:
        self.has_begun.set()
        assert self.may_go_on.wait(120)
        return self._call(*args, **more)


@pytest.mark.parametrize("name", ["store", "remove_object", "adopt"])
async def test_a_stop_in_the_middle_leaves_no_file_that_nobody_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    bucket = new_bucket()
    object_id, data = _store(bucket, 1, 2 * MIB)[0]
    place = CacheIndex if name == "remove_object" else CacheFiles
    held = _Held(getattr(place, name))
    cache_folder = tmp_path / "cache"
    async with trio.open_nursery() as nursery, running_cache(bucket.watched, cache_folder) as cache:
        if name == "adopt":
            file = _staged(tmp_path / "staged", object_id, data)
            assert cache.reserve_staging_nowait(file.size)
        elif name == "remove_object":
            assert await read_all(cache, object_id, len(data)) == data
            await _all_kept(cache)
        monkeypatch.setattr(place, name, lambda *args, **more: held(*args, **more))
        if name == "adopt":
            nursery.start_soon(cache.adopt, [file])
        elif name == "remove_object":
            nursery.start_soon(cache.forget, object_id)
        else:
            nursery.start_soon(read_all, cache, object_id, len(data))
        await until(held.has_begun.is_set)
        if name == "store":
            await cache.forget(object_id)
        # Let go once everything is cancelled: nothing of this block runs before.
        trio.lowlevel.current_trio_token().run_sync_soon(held.may_go_on.set)
        nursery.cancel_scope.cancel()
    async with running_cache(bucket.watched, cache_folder) as cache:
        assert cache.statistics().used_bytes == _on_disk(cache_folder)


async def test_who_stops_waiting_for_room_does_not_empty_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bucket = new_bucket()
    object_id, data = _store(bucket, 1)[0]
    async with running_cache(bucket.watched, tmp_path, limit_bytes=40 * MIB) as cache:
        await fill_all(cache, object_id, len(data))
        held = _Held(CacheIndex.evict)
        monkeypatch.setattr(CacheIndex, "evict", lambda *args: held(*args))
        async with trio.open_nursery() as nursery:
            nursery.start_soon(cache.reserve_staging, 20 * MIB)
            await until(held.has_begun.is_set)
            nursery.cancel_scope.cancel()
        held.may_go_on.set()
    # Its end waited for the eviction's.
    assert _on_disk(tmp_path) > SIZE // 4
