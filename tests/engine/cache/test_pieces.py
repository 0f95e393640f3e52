"""Pieces of cache files that another process sends: fetched once, held from eviction, checked."""

import os
from pathlib import Path

import pytest
import trio
import trio.testing

from fusecache.disk.cache_files import granule_checksums
from fusecache.engine.cache.block_cache import BlockCache
from fusecache.engine.cache.pieces import Piece
from fusecache.model.errors import ObjectChanged
from fusecache.model.objects import GRANULE_BYTES, MIB, Extent, ObjectId
from tests.support.block_caches import (
    Bucket,
    fill_all,
    new_bucket,
    read_all,
    running_cache,
    some_bytes,
    until,
)

pytestmark = pytest.mark.real_time

SIZE = 9 * MIB + 12_345


def bytes_of(piece: Piece) -> bytes:
    """Read a piece as another process does, and close its descriptor."""
    try:
        return os.pread(piece.fd, piece.extent.size, piece.extent.start)
    finally:
        os.close(piece.fd)


async def taken(cache: BlockCache, object_id: ObjectId, size: int, extent: Extent) -> tuple[bytes, Piece]:
    """Hold a piece for a moment; return its bytes."""
    async with cache.pieces.hold(object_id, size, extent) as piece:
        return bytes_of(piece), piece


def damage(directory: Path, offset: int) -> None:
    """Change bytes of the only cache file."""
    (file,) = (path for path in directory.glob("files/*/*") if path.is_file())
    with open(file, "r+b") as damaged:
        damaged.seek(offset)
        damaged.write(b"other bytes")


def put(bucket: Bucket, size: int = SIZE, key: str = "data/x") -> tuple[ObjectId, bytes]:
    """Store an object."""
    data = some_bytes(size)
    return bucket.put(key, data), data


async def test_piece_that_the_cache_lacks_is_fetched_and_comes_with_its_checksums(tmp_path: Path) -> None:
    bucket = new_bucket()
    object_id, data = put(bucket)
    async with running_cache(bucket.watched, tmp_path) as cache:
        found, piece = await taken(cache, object_id, SIZE, Extent(8 * MIB + 7, SIZE))
    assert found == data[8 * MIB :]
    assert piece.extent == Extent(8 * MIB, SIZE)
    assert piece.checksums == granule_checksums(memoryview(data)[8 * MIB :])


async def test_piece_over_several_chunks_is_one_file(tmp_path: Path) -> None:
    bucket = new_bucket()
    object_id, data = put(bucket)
    async with running_cache(bucket.watched, tmp_path) as cache:
        found, _ = await taken(cache, object_id, SIZE, Extent(0, SIZE))
    assert found == data


async def test_pieces_join_the_fetch_in_flight(tmp_path: Path) -> None:
    bucket = new_bucket()
    object_id, data = put(bucket)
    async with running_cache(bucket.watched, tmp_path) as cache, trio.open_nursery() as nursery:
        found: list[bytes] = []

        async def take() -> None:
            found.append((await taken(cache, object_id, SIZE, Extent(0, 8 * MIB)))[0])

        for _ in range(4):
            nursery.start_soon(take)
    assert found == [data[: 8 * MIB]] * 4
    assert bucket.watched.granules_fetched() == 8 * MIB // GRANULE_BYTES


async def test_held_piece_is_not_evicted_and_a_released_one_is(tmp_path: Path) -> None:
    bucket = new_bucket()
    object_id, data = put(bucket, 8 * MIB)
    async with running_cache(bucket.watched, tmp_path) as cache:
        async with cache.pieces.hold(object_id, 8 * MIB, Extent(0, 8 * MIB)) as piece:
            kept = await cache.maintenance.evict(lambda key: True, may_drop=lambda _: True)
            assert bytes_of(piece) == data
        gone = await cache.maintenance.evict(lambda key: True, may_drop=lambda _: True)
    assert (kept.freed_bytes, gone.freed_bytes) == (0, 8 * MIB)


async def test_other_parts_of_a_file_are_stored_while_a_piece_is_held(tmp_path: Path) -> None:
    """`hold_whole` keeps a file as it is; a piece does not keep the rest of its file from the disk."""
    bucket = new_bucket()
    object_id, data = put(bucket)
    async with running_cache(bucket.watched, tmp_path) as cache:
        async with cache.pieces.hold(object_id, SIZE, Extent(0, MIB)) as piece:
            os.close(piece.fd)
            await fill_all(cache, object_id, SIZE)
        before = len(bucket.watched.extents)
        assert await read_all(cache, object_id, SIZE) == data
        assert len(bucket.watched.extents) == before


async def test_pieces_of_more_data_than_the_cache_has_are_all_stored_in_turn(tmp_path: Path) -> None:
    """A piece is wanted now: the cache's policy does not keep an old block in its place."""
    bucket = new_bucket()
    async with running_cache(bucket.watched, tmp_path, limit_bytes=64 * MIB) as cache:
        for number in range(12):
            object_id, data = put(bucket, 8 * MIB, f"data/{number}")
            found, _ = await taken(cache, object_id, 8 * MIB, Extent(0, 8 * MIB))
            assert found == data
    assert len(bucket.watched.extents) == 12


async def test_damaged_granule_is_fetched_again_if_its_sender_doubts_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    bucket = new_bucket()
    object_id, data = put(bucket, 8 * MIB)
    async with running_cache(bucket.watched, tmp_path) as cache:
        await taken(cache, object_id, 8 * MIB, Extent(0, 8 * MIB))
        damage(tmp_path, 3 * GRANULE_BYTES)
        async with cache.pieces.hold(object_id, 8 * MIB, Extent(0, 8 * MIB), is_doubted=True) as piece:
            assert bytes_of(piece) == data
    assert "damaged" in caplog.text


async def test_more_than_a_share_of_the_cache_waits_for_a_place(tmp_path: Path) -> None:
    bucket = new_bucket()
    object_id, data = put(bucket, 16 * MIB)
    async with (
        running_cache(bucket.watched, tmp_path, limit_bytes=64 * MIB) as cache,
        trio.open_nursery() as nursery,
    ):
        found: list[bytes] = []

        async def take() -> None:
            found.append((await taken(cache, object_id, 16 * MIB, Extent(8 * MIB, 16 * MIB)))[0])

        async with cache.pieces.hold(object_id, 16 * MIB, Extent(0, 16 * MIB)) as piece:
            os.close(piece.fd)
            assert piece.extent.size == 8 * MIB
            nursery.start_soon(take)
            await trio.testing.wait_all_tasks_blocked(0.05)
            assert not found
            # Other nodes have a share of their own.
            async with cache.pieces.hold(object_id, 16 * MIB, Extent(0, MIB), for_peer=True) as other:
                os.close(other.fd)
    assert found == [data[8 * MIB :]]
    assert cache.pieces.held_bytes == {True: 0, False: 0}


async def test_version_that_is_gone_is_an_error_and_holds_nothing(tmp_path: Path) -> None:
    bucket = new_bucket()
    object_id, _ = put(bucket, MIB)
    bucket.put(object_id.key, some_bytes(MIB, seed=2))
    async with running_cache(bucket.watched, tmp_path) as cache:
        with pytest.raises(ObjectChanged):
            await taken(cache, object_id, MIB, Extent(0, MIB))
        assert cache.pieces.held_bytes == {True: 0, False: 0}
        await until(lambda: not cache._table.objects)
