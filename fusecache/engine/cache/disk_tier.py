"""Stores granules in cache files, loads them, and forgets objects.

Used on the trio loop; calls that may block go through `offload`. Not here: whole staging files that become cache files
(`adoption`).

Invariants:
1. A lack of disk space or a disk error never fails a read: the bytes are served and not stored.
2. While a thread reads or writes a chunk's part of the file, the chunk is not evicted (`disk_operations`).

The queue of fetched buffers before the cache's disk. A slow disk must not slow down reads.

A fetched buffer is held until it is on disk. If the bucket is faster than the disk, all buffers would wait for the
disk, and readers for buffers. So only a few buffers are written at a time. When a fetch finds no buffer, one waiting
buffer is dropped from the queue: its bytes are not stored, and a later read fetches them again.

Used on the trio loop. Invariant: bytes that a caller wants on disk (`must_store`) are never dropped.
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import trio

from fusecache.disk.cache_files import CacheFiles, bad_granules
from fusecache.disk.direct_reads import LARGEST_BYTES
from fusecache.engine.cache.block_table import BlockTable
from fusecache.engine.cache.chunks import Buffer, Chunk
from fusecache.engine.cache.evictor import DiskSpace
from fusecache.engine.cache.statistics import Counters
from fusecache.engine.runtime.offload import Offload
from fusecache.index.cache_index import CacheIndex
from fusecache.model.errors import LocalDiskError, NoSpace
from fusecache.model.objects import GRANULE_BYTES, ObjectId
from fusecache.policy.cache.fetch_order import Cause
from fusecache.policy.cache.granules import CHUNK_BYTES, PAGE_BYTES, disk_bytes, mask_between, runs

# 8 writes in flight saturate a local disk by direct I/O.
WRITES = 8
# A buffer may be dropped only after it has waited for the disk this long.
MAX_QUEUE_SECONDS = 0.25


class DiskWriteQueue:
    """Lets a few buffers be written at a time. The others wait in order of arrival.

    large_buffers: their number. At most half of them are written at a time.
    """

    def __init__(self, large_buffers: int) -> None:
        self._slots = trio.Semaphore(max(1, min(WRITES, -(-large_buffers // 2))))
        # Waiting buffers that may be dropped, the oldest first.
        self._waiting: dict[Buffer, _Wait] = {}
        self._dropped = 0

    def __bool__(self) -> bool:
        """Return whether a waiting buffer may be dropped, now or later."""
        return bool(self._waiting)

    @asynccontextmanager
    async def slot(self, buffer: Buffer, *, must_store: bool) -> AsyncIterator[bool]:
        """Wait for a slot to write a part of a buffer. Yields False if the buffer was dropped: do not write it.

        must_store: a caller wants these bytes on disk. It never yields False then.
        """
        with trio.CancelScope() as scope:
            if must_store:
                await self._slots.acquire()
            else:
                await self._wait(buffer, scope)
        if scope.cancel_called:
            self._dropped -= 1
        if scope.cancelled_caught:  # else the slot was granted just before the drop
            yield False
            return
        try:
            yield True
        finally:
            self._slots.release()

    async def _wait(self, buffer: Buffer, scope: trio.CancelScope) -> None:
        wait = self._waiting.setdefault(buffer, _Wait(trio.current_time()))
        wait.scopes.append(scope)
        try:
            await self._slots.acquire()
        finally:
            wait.scopes.remove(scope)
            if not wait.scopes:
                del self._waiting[buffer]

    def drop_oldest(self, *, small: bool, cause: Cause) -> None:
        """Drop the oldest buffer that has waited MAX_QUEUE_SECONDS, if a fetch of this cause may take it.

        Its bytes stay in memory until it is taken. Consumed buffers go first; only demand may take unread ones. small:
        the fetch fits a small buffer; if no small one may go, a large one does.
        """
        if self._dropped:
            return  # an earlier drop is about to free a buffer
        waiting_before = trio.current_time() - MAX_QUEUE_SECONDS
        droppable = [
            (buffer.small is not small, not buffer.is_consumed, wait.since, wait)
            for buffer, wait in self._waiting.items()
            if wait.since <= waiting_before
            and (small or not buffer.small)
            and (buffer.is_consumed or cause is Cause.DEMAND)
            and buffer.busy == len(wait.scopes)  # no thread uses it otherwise
            and buffer.chunk is not None
            and not buffer.chunk.readers
        ]
        if droppable:
            *_, wait = min(droppable, key=lambda row: row[:3])
            self._dropped = len(wait.scopes)
            for scope in wait.scopes:
                scope.cancel()


@dataclass(eq=False, slots=True)
class _Wait:
    """The wait of a buffer. since: in seconds of the loop's clock; scopes: cancel the wait of each fetched part."""

    since: float
    scopes: list[trio.CancelScope] = field(default_factory=list)


@dataclass(eq=False, repr=False)
class DiskTier:
    """Moves bytes between buffers and cache files."""

    _offload: Offload
    _files: CacheFiles
    _index: CacheIndex
    _table: BlockTable
    _disk_space: DiskSpace
    _counters: Counters

    def __post_init__(self) -> None:
        self._evictor = self._disk_space.evictor
        self._ledger = self._disk_space.ledger

    async def load(self, chunk: Chunk, buffer: Buffer, first: int, stop: int) -> int:
        """Fill granules of a buffer from the cache file; return the mask of the intact ones."""
        entry = chunk.owner
        wanted = mask_between(first, stop)
        if entry.number is None or wanted & ~chunk.present:
            return 0  # evicted since the load was queued
        start, end = first * GRANULE_BYTES, min(stop * GRANULE_BYTES, chunk.size)
        # Verified at each load, as disk faults or other programs may change the files while the daemon runs. It costs
        # a twentieth of the read (0.4 of 8 ms for 8 MiB, 2 cores).
        checksums = chunk.checksums_of(first, stop)
        number = entry.number
        chunk.disk_operations += 1
        entry.disk_operations += 1
        try:
            offset = chunk.index * CHUNK_BYTES + start
            bad = await self._load(number, offset, buffer.view_from(first), end - start, checksums)
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
        if damaged and entry.number == number:  # else it was forgotten during the load
            self._table.intact.pop(number, None)
            self._table.count_damaged(entry.object_id.key, damaged.bit_count())
            self._ledger.release_cache(disk_bytes(damaged & chunk.present, chunk.size))
            chunk.drop_present(damaged)
        return wanted & ~damaged

    async def _load(
        self, number: int, offset: int, memory: memoryview, size: int, checksums: bytes
    ) -> list[int]:
        """Read as `CacheFiles.load` does. A small read without an error takes no thread."""
        path = self._files.path_for_direct_reads(number) if size <= LARGEST_BYTES else None
        if path is not None:
            padded = -(-size // PAGE_BYTES) * PAGE_BYTES
            got = await self._offload.read_disk(path, offset, memory[:padded])
            # After a short read, a thread reads again for the rest: it may not be the end of the file.
            if got is not None and got >= size:
                return bad_granules(memory, size, got, checksums)
        return await self._offload.disk(self._files.load, number, offset, memory, size, checksums)

    async def store(self, chunk: Chunk, buffer: Buffer, first: int, stop: int) -> None:
        """Write granules of a buffer to the cache file if there is space. Never raises NoSpace or LocalDiskError."""
        entry = chunk.owner
        mask = mask_between(first, stop) & buffer.valid & ~chunk.present
        nbytes = disk_bytes(mask, chunk.size)
        self._table.traffic_bytes += nbytes
        if not nbytes or not self._table.accepts_blocks:
            return
        chunk.disk_operations += 1  # from here on, the chunk is neither evicted nor dropped from memory
        entry.disk_operations += 1
        try:
            if not await self._disk_space.reserve_cache(
                nbytes, incoming_use=self._evictor.incoming_use(chunk, mask)
            ):
                return
            await self._write(chunk, buffer, mask, nbytes)
        except NoSpace:
            self._disk_space.on_disk_full()
            self._disk_space.count_uncached()
        except LocalDiskError as exc:
            self._counters.uncached += 1
            self._table.count_disk_error(exc)
        finally:
            chunk.disk_operations -= 1
            entry.disk_operations -= 1

    def count_dropped(self) -> None:
        """Count fetched granules that were not stored because the disk is too slow. Warns once."""
        self._counters.uncached += 1
        self._table.warn_once(
            "slow", "cache disk is slower than the bucket, some fetched blocks are served but not cached"
        )

    async def _write(self, chunk: Chunk, buffer: Buffer, mask: int, reserved_bytes: int) -> None:
        """Write reserved granules. Releases the reservation of those not written."""
        entry = chunk.owner
        done = 0
        try:
            if entry.number is None:
                number = await self._table.new_number()
                if entry.number is None:  # another fetch may have come first
                    entry.number = number
                    self._table.by_number[number] = entry
            number = entry.number
            for first, stop in runs(mask & ~self._evictor.unwritable_mask(chunk)):
                start, end = first * GRANULE_BYTES, min(stop * GRANULE_BYTES, chunk.size)
                checksums = await self._offload.disk(
                    self._files.store,
                    number,
                    chunk.index * CHUNK_BYTES + start,
                    buffer.view_from(first),
                    end - start,
                    self._disk_space.floor_bytes,
                )
                self._disk_space.count_written(end - start)
                if entry.number != number:  # forgotten during the write: nothing refers to this file any more
                    with trio.CancelScope(shield=True):
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

    async def forget(self, object_id: ObjectId) -> None:
        """Drop all blocks of an object version. If the index fails, they stay and do no harm."""
        try:
            await self._table.run_to_completion(self._forget, object_id, name="cache-forget")
        except LocalDiskError as exc:
            self._table.count_disk_error(exc)

    async def _forget(self, object_id: ObjectId) -> None:
        async with self._table.rows_lock:
            entry = self._table.objects.get(object_id)
            # A live view: checked again after each await.
            chunks = entry.chunks.values() if entry is not None else ()
            while any(chunk.dirty for chunk in chunks):
                await self._table.write_rows()
            before = sum(disk_bytes(chunk.present, chunk.size) for chunk in chunks)
            gone = await self._offload.rows(self._index.remove_object, object_id)
            number, changed = None, 0
            if entry is not None and entry.number is not None:
                # Granules written, or found damaged, while the rows were removed are not in `gone.size`.
                changed = sum(disk_bytes(chunk.present, chunk.size) for chunk in chunks) - before
                number, entry.number, entry.blocks = entry.number, None, 0
                # Writes in progress see by the number that their file is forgotten.
                self._table.by_number.pop(number, None)
                for chunk in chunks:
                    chunk.present = chunk.dirty = 0
                    chunk.loaded = True
            self._ledger.release_cache(gone.size + changed)
        for doomed in {number, *gone.emptied} - {None}:
            assert doomed is not None
            await self._offload.disk(self._files.delete, doomed)

    async def rename(self, old: ObjectId, new: ObjectId) -> None:
        """The bucket has a copy of an object version under another key: its blocks are those of the copy from now on.

        If the index fails, the blocks are forgotten, and the copy is fetched when it is read.
        """
        try:
            await self._table.run_to_completion(self._rename, old, new, name="cache-rename")
        except LocalDiskError as exc:
            self._table.count_disk_error(exc)
            await self.forget(new)

    async def _rename(self, old: ObjectId, new: ObjectId) -> None:
        async with self._table.rows_lock:
            objects = self._table.objects
            if new in objects:
                return  # something reads the copy already
            entry = objects.pop(old, None)
            if entry is not None:
                entry.object_id, objects[new] = new, entry
            await self._offload.rows(self._index.rename_object, old, new)

    async def delete_unindexed_files(self) -> None:
        """Delete files of earlier runs without a row, which were written just before a kill. One folder at a time."""
        try:
            for folder in await self._offload.disk(self._files.folders):
                found = await self._offload.disk(self._files.numbers_in, folder)
                earlier = [number for number in found if number < self._table.first_number]
                async with self._table.rows_lock:
                    doomed = await self._offload.rows(self._index.without_rows, earlier)
                for number in doomed:
                    await self._offload.disk(self._files.delete, number)
        except LocalDiskError as exc:
            self._table.count_disk_error(exc)
