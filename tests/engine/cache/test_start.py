"""A start looks at nothing that grows with the cache; what a kill left behind is looked for in the background."""

import os
from pathlib import Path

import pytest

from fusecache.disk.cache_files import CacheFiles
from fusecache.index.cache_index import BlockRow, CacheIndex, ObjectChange
from fusecache.model.objects import MIB, ObjectId
from fusecache.policy.cache.granules import PAGE_BYTES
from tests.support.block_caches import fill_all, new_bucket, read_all, running_cache, some_bytes, until

pytestmark = pytest.mark.real_time

OBJECTS = 5000
SIZE = 1000


def _fill(directory: Path) -> None:
    """Make an index of many objects, as an earlier run left it."""
    index = CacheIndex(directory / "index", boot_id="boot-1")
    first = index.lease_numbers(OBJECTS)
    row = BlockRow(1, 1, PAGE_BYTES, bytes(128))
    index.apply(
        [
            ObjectChange(ObjectId(f"o{number}", "etag"), first + number, SIZE, {0: row})
            for number in range(OBJECTS)
        ],
        clock=1,
    )
    index.close()


def _mark_killed(directory: Path) -> None:
    state = directory / "index" / "state.json"
    state.write_text(state.read_text().replace('"clean": true', '"clean": false'))


async def test_a_start_lists_no_folder_and_reads_a_handful_of_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _fill(tmp_path)
    listed: list[object] = []
    looked_at: list[object] = []
    real_scandir, real_find = os.scandir, CacheIndex.find
    monkeypatch.setattr(os, "scandir", lambda *a: (listed.append(a), real_scandir(*a))[1])
    monkeypatch.setattr(
        CacheIndex, "find", lambda index, which: (looked_at.append(which), real_find(index, which))[1]
    )
    bucket = new_bucket()
    object_id = bucket.put("new", bytes(SIZE))
    async with running_cache(bucket.watched, tmp_path) as cache:
        assert cache.statistics().used_bytes == OBJECTS * PAGE_BYTES
        assert await cache.read(cache.open(object_id, SIZE), 0, SIZE) == bytes(SIZE)
    assert looked_at == [object_id]
    below = [arguments for arguments in listed if str(tmp_path / "files") in str(arguments)]
    assert below == []


async def test_after_a_kill_files_without_rows_go_one_folder_after_the_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _fill(tmp_path)
    _mark_killed(tmp_path)
    files = CacheFiles(tmp_path / "files")
    names = [tmp_path / "files" / f"{number % 256:02x}" / f"{number:x}" for number in (1, 2, OBJECTS + 1)]
    index = CacheIndex(tmp_path / "index", boot_id="boot-1")
    index.lease_numbers(10)  # the killed run had begun to write files of these numbers
    index.close(clean=False)
    for name in names:
        name.parent.mkdir(exist_ok=True)
        name.write_bytes(b"x")
    folders, lists = files.folders(), list[int]()
    real = CacheFiles.numbers_in
    monkeypatch.setattr(
        CacheFiles, "numbers_in", lambda files, folder: (lists.append(folder), real(files, folder))[1]
    )
    bucket = new_bucket()
    async with running_cache(bucket.watched, tmp_path):
        await until(lambda: not names[2].exists() and lists == folders)
        assert names[0].exists()
        assert names[1].exists()
    assert files.numbers_in((OBJECTS + 1) % 256) == []


async def test_a_lower_limit_than_the_last_run_s_is_kept_without_anybody_reading_or_writing(
    tmp_path: Path,
) -> None:
    bucket = new_bucket()
    data = some_bytes(2 * MIB)
    objects = [bucket.put(f"o{number}", data) for number in range(24)]
    async with running_cache(bucket.watched, tmp_path) as cache:
        for object_id in objects:
            await fill_all(cache, object_id, len(data))
    async with running_cache(bucket.watched, tmp_path, limit_bytes=16 * MIB) as cache:
        await until(lambda: cache.statistics().used_bytes <= 16 * MIB)
        left = cache.statistics().used_bytes
        assert left > 8 * MIB
        on_disk = sum(
            path.stat().st_blocks * 512 for path in (tmp_path / "files").rglob("*") if path.is_file()
        )
        assert on_disk <= 16 * MIB
        asked = len(bucket.watched.extents)
        for object_id in objects:
            assert await read_all(cache, object_id, len(data)) == data
        assert len(bucket.watched.extents) > asked
    async with running_cache(bucket.watched, tmp_path, limit_bytes=16 * MIB) as cache:
        # Within the limit a start evicts nothing.
        assert cache.statistics().evicted_bytes == 0
