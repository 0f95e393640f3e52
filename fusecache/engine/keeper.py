"""Keeps granules on the local disk: writes, loads, whole files that come and go.

Used on the loop; calls that may block go through `offload`.

Invariants:
1. Want of room and errors of the disk never fail a read: the bytes are served and not kept.
2. While a thread reads or writes a chunk's part of the file, the chunk is not evicted (`disk_operations`).
"""

import logging
from pathlib import Path

from fusecache.disk.cache_files import FOLDERS, CacheFiles
from fusecache.engine.cache_statistics import Counters
from fusecache.engine.cache_table import CacheTable
from fusecache.engine.offload import Offload
from fusecache.engine.residents import CachedObject, Chunk, Frame
from fusecache.engine.room import Room
from fusecache.index.cache_index import BlockRow, CacheIndex, ObjectChange
from fusecache.model.errors import LocalDiskError, NoSpace
from fusecache.model.nouns import BLOCK_BYTES, GRANULE_BYTES, GRANULES_PER_BLOCK, ObjectId
from fusecache.policy.granules import (
    BLOCKS_PER_CHUNK,
    CHUNK_BYTES,
    PAGE_BYTES,
    disk_bytes,
    full_mask,
    mask_between,
    runs,
)

log = logging.getLogger(__name__)

_CHECKSUM_BYTES = 8
_ROWS_PER_COMMIT = 16384


class Keeper:
    """Moves bytes between frames and cache files."""

    def __init__(
        self,
        offload: Offload,
        files: CacheFiles,
        index: CacheIndex,
        table: CacheTable,
        room: Room,
        counters: Counters,
    ) -> None:
        self._offload = offload
        self._files = files
        self._index = index
        self._table = table
        self._room = room
        self._ledger = room.ledger
        self._counters = counters

    async def load(self, chunk: Chunk, frame: Frame, first: int, stop: int) -> int:
        """Fill granules of a frame from the cache file; return the mask of those that are good."""
        entry = chunk.owner
        wanted = mask_between(first, stop)
        if entry.number is None or wanted & ~chunk.present:
            return 0  # evicted since it was asked for
        start, end = first * GRANULE_BYTES, min(stop * GRANULE_BYTES, chunk.size)
        # Each time: it costs a twentieth of the read (0.4 of 8 ms for 8 MiB, 2 cores), and disks and people
        # change files under a running daemon too.
        checksums = chunk.checksums_of(first, stop)
        number = entry.number
        chunk.disk_operations += 1
        entry.disk_operations += 1
        try:
            offset = chunk.index * CHUNK_BYTES + start
            bad = await self._offload.disk(
                self._files.load, number, offset, frame.view_from(first), end - start, checksums
            )
        except LocalDiskError as exc:
            self._table.count_disk_error(exc)
            bad = list(range(stop - first))
        finally:
            chunk.disk_operations -= 1
            entry.disk_operations -= 1
        self._table.traffic_bytes += end - start
        damaged = 0
        for granule in bad:
            damaged |= 1 << (first + granule)
        if damaged and entry.number == number:  # else it was forgotten meanwhile
            self._table.count_damaged(entry.object_id.key, damaged.bit_count())
            self._ledger.release_cache(disk_bytes(damaged & chunk.present, chunk.size))
            chunk.drop_present(damaged)
        return wanted & ~damaged

    async def keep(self, chunk: Chunk, frame: Frame, first: int, stop: int) -> None:
        """Write granules of a frame to the cache file if there is room."""
        entry = chunk.owner
        mask = mask_between(first, stop) & frame.valid & ~chunk.present
        nbytes = disk_bytes(mask, chunk.size)
        self._table.traffic_bytes += nbytes
        if not nbytes or not self._table.takes_blocks:
            return
        chunk.disk_operations += 1  # no eviction of this chunk, no forgetting it, from here on
        entry.disk_operations += 1
        try:
            if not await self._room.reserve_cache(nbytes, incoming_use=0.0 if entry.warming else None):
                return
            await self._write(chunk, frame, mask, nbytes)
        except NoSpace:
            self._room.note_full()
            self._counters.uncached += 1
            self._table.tell_once("room", "no room in the cache: reads go on, uncached")
        except LocalDiskError as exc:
            self._counters.uncached += 1
            self._table.count_disk_error(exc)
        finally:
            chunk.disk_operations -= 1
            entry.disk_operations -= 1

    async def _write(self, chunk: Chunk, frame: Frame, mask: int, reserved_bytes: int) -> None:
        """Write reserved granules. Gives back what was reserved and not written."""
        entry = chunk.owner
        done = 0
        try:
            if entry.number is None:
                number = await self._table.new_number()
                if entry.number is None:  # somebody else may have come first
                    entry.number = number
                    self._table.by_number[number] = entry
            number = entry.number
            for first, stop in runs(mask & ~self._room.punching_mask(chunk)):
                start, end = first * GRANULE_BYTES, min(stop * GRANULE_BYTES, chunk.size)
                checksums = await self._offload.disk(
                    self._files.store,
                    number,
                    chunk.index * CHUNK_BYTES + start,
                    frame.view_from(first),
                    end - start,
                    self._room.floor_bytes,
                )
                self._room.count_written(end - start)
                if entry.number != number:  # forgotten meanwhile: nobody will look at this file again
                    await self._offload.disk(self._files.delete, number)
                    return
                chunk.set_checksums(first, checksums)
                written = mask_between(first, stop)
                new_bytes = disk_bytes(written & ~chunk.present, chunk.size)
                chunk.add_present(written)
                chunk.stamp = self._table.clock
                self._ledger.commit_cache(new_bytes)
                done += new_bytes
        finally:
            self._ledger.cancel_cache(reserved_bytes - done)

    async def adopt(self, entry: CachedObject, path: Path, checksums: bytes) -> None:
        """Make a staging file the cache file of `entry`; its reservation moves with it."""
        entry.handles += 1  # it stays in memory
        await self._table.to_its_end(self._adopt_held, entry, path, checksums, name="cache-adopt")

    async def _adopt_held(self, entry: CachedObject, path: Path, checksums: bytes) -> None:
        try:
            await self._adopt(entry, path, checksums)
        finally:
            entry.handles -= 1
            for chunk in list(entry.chunks.values()):
                self._table.drop_if_idle(chunk)
            self._table.drop_object_if_idle(entry)

    async def _adopt(self, entry: CachedObject, path: Path, checksums: bytes) -> None:
        await self._table.load_object_now(entry)
        size = entry.size
        padding = -size % PAGE_BYTES
        entry.disk_operations += 1
        try:
            number = await self._take_over(entry, path, padding)
        except LocalDiskError as exc:
            log.debug("staging file not adopted key=%s reason=%s", entry.object_id.key, exc)
            await self._offload.disk(_unlink, path)
            self._ledger.release_staging(size)
            return
        finally:
            entry.disk_operations -= 1
        self._ledger.adopt(size)
        self._ledger.commit_cache(padding)
        if entry.number is None:
            entry.number = number
            self._table.by_number[number] = entry
            entry.disk_operations += 1
            try:
                await self._write_adopted_rows(entry, number, checksums)
                return
            except LocalDiskError as exc:
                self._table.count_disk_error(exc)
                del self._table.by_number[number]
                entry.number, entry.blocks = None, 0
                for chunk in entry.chunks.values():
                    chunk.present = chunk.dirty = 0
            finally:
                entry.disk_operations -= 1
        # A read of it was cached while the file was renamed, or the index does not take it.
        self._ledger.release_cache(size + padding)
        await self._offload.disk(self._files.delete, number)

    async def _take_over(self, entry: CachedObject, path: Path, padding_bytes: int) -> int:
        """Rename a staging file to a cache file, its last page reserved as a whole; return its number.

        Raises LocalDiskError.
        """
        if entry.number is not None or not entry.size or not self._table.takes_blocks:
            raise LocalDiskError("the object has a cache file already, or is empty, or the index fails")
        number = await self._table.new_number()
        if not self._ledger.reserve_cache(padding_bytes):
            raise LocalDiskError("no room for the rest of its last page")
        try:
            await self._offload.disk(self._files.adopt, path, number)
        except LocalDiskError:
            self._ledger.cancel_cache(padding_bytes)
            raise
        return number

    async def _write_adopted_rows(self, entry: CachedObject, number: int, checksums: bytes) -> None:
        """Write the rows of a whole file, a bounded number of them in one transaction."""
        step = _ROWS_PER_COMMIT * BLOCK_BYTES
        async with self._table.rows_lock:
            for start in range(0, entry.size, step):
                rows = _whole_rows(
                    entry.size, checksums, start, min(entry.size, start + step), self._table.clock
                )
                change = ObjectChange(entry.object_id, number, entry.size, rows)
                await self._offload.rows(self._index.apply, [change], self._table.clock)
                entry.blocks += len(rows)
            for chunk in list(entry.chunks.values()):
                # Made before the file came: what it knows is counted twice now. Look again.
                self._ledger.release_cache(disk_bytes(chunk.present, chunk.size))
                chunk.present = chunk.dirty = 0
                first = chunk.index * BLOCKS_PER_CHUNK
                chunk_rows = await self._offload.rows(
                    self._index.block_rows, number, first, first + BLOCKS_PER_CHUNK
                )
                self._table.fill_from_rows(chunk, chunk_rows)
                chunk.loaded = True

    async def forget(self, object_id: ObjectId) -> None:
        """Drop all blocks of an object version; where the index does not take it, they stay, and do no harm."""
        try:
            await self._table.to_its_end(self._forget, object_id, name="cache-forget")
        except LocalDiskError as exc:
            self._table.count_disk_error(exc)

    async def _forget(self, object_id: ObjectId) -> None:
        async with self._table.rows_lock:
            entry = self._table.objects.get(object_id)
            chunks = entry.chunks.values() if entry is not None else ()  # as they are at each look
            while any(chunk.dirty for chunk in chunks):
                await self._table.write_rows()
            before = sum(disk_bytes(chunk.present, chunk.size) for chunk in chunks)
            gone = await self._offload.rows(self._index.remove_object, object_id)
            number, changed = None, 0
            if entry is not None and entry.number is not None:
                # What was written, or found damaged, while the rows went is in none of them.
                changed = sum(disk_bytes(chunk.present, chunk.size) for chunk in chunks) - before
                number, entry.number, entry.blocks = entry.number, None, 0
                # Writes that are under way see by the number that their file is not wanted.
                self._table.by_number.pop(number, None)
                for chunk in chunks:
                    chunk.present = chunk.dirty = 0
                    chunk.loaded = True
            self._ledger.release_cache(gone.size + changed)
        for doomed in {number, *gone.emptied} - {None}:
            assert doomed is not None
            await self._offload.disk(self._files.delete, doomed)

    async def delete_orphans(self) -> None:
        """Delete files of earlier runs that no row knows: written just before a kill. In the background, in pieces."""
        try:
            for folder in range(FOLDERS):
                found = await self._offload.disk(self._files.numbers_in, folder)
                earlier = [number for number in found if number < self._table.first_number]
                async with self._table.rows_lock:
                    doomed = await self._offload.rows(self._index.without_rows, earlier)
                for number in doomed:
                    await self._offload.disk(self._files.delete, number)
        except LocalDiskError as exc:
            self._table.count_disk_error(exc)


def _whole_rows(size: int, checksums: bytes, start: int, stop: int, stamp: int) -> dict[int, BlockRow | None]:
    """Return the rows of blocks that begin in [start, stop) of a file that is there as a whole."""
    rows: dict[int, BlockRow | None] = {}
    row_bytes = GRANULES_PER_BLOCK * _CHECKSUM_BYTES
    for block in range(start // BLOCK_BYTES, -(-stop // BLOCK_BYTES)):
        length = min(BLOCK_BYTES, size - block * BLOCK_BYTES)
        pages = -(-length // PAGE_BYTES) * PAGE_BYTES
        sums = checksums[block * row_bytes : (block + 1) * row_bytes].ljust(row_bytes, b"\0")
        rows[block] = BlockRow(full_mask(length), stamp & 0xFFFFFFFF, pages, sums)
    return rows


def _unlink(path: Path) -> None:
    """Run in a thread."""
    try:
        path.unlink(missing_ok=True)
    except OSError as exc:
        raise LocalDiskError(f"{path} cannot be removed: {exc}") from exc
