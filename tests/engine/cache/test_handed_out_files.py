"""Files of the cache that programs read by themselves: each is held while any program has it, and all have a limit."""

import errno
import os
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
import trio

from fusecache.engine.cache.block_cache import BlockCache
from fusecache.model.objects import MIB, ObjectId
from tests.support.block_caches import Bucket, fill_all, new_bucket, running_cache, some_bytes, until

pytestmark = pytest.mark.real_time


def wanted(prefix: str):
    return lambda key: key.startswith(prefix)


async def handed_out(cache: BlockCache, object_id: ObjectId, size: int) -> int:
    """Return a descriptor of a file once it is verified, as a slow disk allows; skips where that cannot be."""
    try:
        os.close(cache.maintenance.open_probe())
    except OSError as exc:
        pytest.skip(f"no files are given here: {exc.strerror}")
    fd = await cache.maintenance.hand_out(object_id, size)
    await until(lambda: not cache.maintenance._verifying)
    if fd is None:
        fd = await cache.maintenance.hand_out(object_id, size)
    assert fd is not None
    return fd


async def handed_out_file(cache: BlockCache, bucket: Bucket, data: bytes) -> tuple[ObjectId, int]:
    """Return an object that the cache has as a whole, and a program's descriptor of its file."""
    object_id = bucket.put("a", data)
    await fill_all(cache, object_id, len(data))
    return object_id, await handed_out(cache, object_id, len(data))


async def test_a_program_of_an_earlier_run_keeps_its_file_when_another_one_gets_none(tmp_path: Path) -> None:
    """Its check waits behind others, and the request gives up: the last of all holds looks whether a program has it."""
    data = some_bytes(9 * MIB + 77)
    bucket = new_bucket()
    async with running_cache(bucket.watched, tmp_path) as cache:
        object_id, fd = await handed_out_file(cache, bucket, data)
    async with running_cache(bucket.watched, tmp_path) as cache:
        maintenance, table = cache.maintenance, cache._table
        async with maintenance._verifiers, AsyncExitStack() as stack:
            other = object()
            await maintenance._verifiers.acquire_on_behalf_of(other)
            stack.callback(maintenance._verifiers.release_on_behalf_of, other)
            assert await maintenance.hand_out(object_id, len(data)) is None
        await until(lambda: not maintenance._verifying)
        await until(lambda: sum(table.held.values()) == 1)
        evicted = await maintenance.evict(wanted("a"), may_drop=lambda object_id: True)
        assert evicted.freed_bytes == 0
        assert os.pread(fd, 2 * len(data), 0) == data
        os.close(fd)
        await until(lambda: not table.held)


async def test_a_hold_of_an_earlier_run_ends_once(tmp_path: Path) -> None:
    """The task that ends these holds is started again after an error of the program."""
    data = some_bytes(9 * MIB)
    bucket = new_bucket()
    async with running_cache(bucket.watched, tmp_path) as cache:
        _, fd = await handed_out_file(cache, bucket, data)
    async with running_cache(bucket.watched, tmp_path) as cache:
        await until(lambda: sum(cache._table.held.values()) == 1)
        cache.maintenance.release_found()
        cache.maintenance.release_found()
        os.close(fd)
        await until(lambda: not cache._table.held)
        assert cache.maintenance._held_bytes == 0


async def test_files_that_are_asked_for_at_once_are_held_within_the_share(tmp_path: Path) -> None:
    data = some_bytes(9 * MIB)
    bucket = new_bucket()
    ids = [bucket.put(f"file{number}", data) for number in range(5)]
    async with running_cache(bucket.watched, tmp_path, limit_bytes=128 * MIB) as cache:
        for object_id in ids:
            await fill_all(cache, object_id, len(data))
            os.close(await handed_out(cache, object_id, len(data)))
            await until(lambda: not cache._table.held)
        found: list[int | None] = []

        async def ask(object_id: ObjectId) -> None:
            found.append(await cache.maintenance.hand_out(object_id, len(data)))

        async with trio.open_nursery() as nursery:
            for object_id in ids:
                nursery.start_soon(ask, object_id)
        given = [fd for fd in found if fd is not None]
        assert len(given) == 3  # a quarter of 128 MiB has no space for four
        for fd in given:
            os.close(fd)
        await until(lambda: not cache._table.held)
        assert cache.maintenance._held_bytes == 0


async def test_a_look_that_fails_is_repeated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As without a free descriptor: whether a program has a file is unknown then."""
    data = some_bytes(9 * MIB)
    bucket = new_bucket()
    async with running_cache(bucket.watched, tmp_path) as cache:
        _, fd = await handed_out_file(cache, bucket, data)
        looks, is_in_use = [], cache._files.is_in_use

        def failing(number: int) -> bool:
            looks.append(number)
            if len(looks) < 3:
                raise OSError(errno.EMFILE, "too many open files")
            return is_in_use(number)

        monkeypatch.setattr(cache._files, "is_in_use", failing)
        os.close(fd)
        await until(lambda: not cache._table.held)
        assert len(looks) >= 3


async def test_a_file_that_a_scrub_found_damaged_is_not_held_again(tmp_path: Path) -> None:
    """The program that has it reads what the disk has; the next one reads through the mount."""
    data = some_bytes(9 * MIB)
    bucket = new_bucket()
    async with running_cache(bucket.watched, tmp_path) as cache:
        object_id, fd = await handed_out_file(cache, bucket, data)
        (path,) = (path for path in (tmp_path / "files").glob("??/*"))
        disk = os.open(path, os.O_WRONLY)
        os.pwrite(disk, b"damage", 5 * MIB)
        os.close(disk)
        assert [result.damaged async for result in cache.maintenance.scrub(wanted("a")) if result.damaged]
        assert await cache.maintenance.hand_out(object_id, len(data)) is None
        os.close(fd)
        await until(lambda: not cache._table.held)
