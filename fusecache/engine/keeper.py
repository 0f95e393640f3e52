"""Keeps granules on the local disk: the ledger, the cache files and their rows, eviction.

Used on the loop; calls that may block go through `offload`.

Invariants:
1. Room is reserved on the ledger, and made by eviction, before anything is written.
2. Eviction removes a block from memory's table and from the index before its bytes go.
3. Rows are read and written under one lock, and memory is changed before it is let go, so that memory and
index agree. 4. Want of room and errors of the disk never fail a read: the bytes are served and not kept.
"""

import logging
import random
from collections.abc import Awaitable, Callable, Iterable
from pathlib import Path
from typing import TypeVar

import trio

from fusecache.disk.cache_files import CacheFiles
from fusecache.engine.cache_statistics import Counters
from fusecache.engine.offload import Offload
from fusecache.engine.residents import CachedObject, Chunk, Frame
from fusecache.index.cache_index import BlockRow, CacheIndex, Evicted, ObjectChange
from fusecache.model.errors import FusecacheError, LocalDiskError, NoSpace
from fusecache.model.nouns import BLOCK_BYTES, GRANULE_BYTES, GRANULES_PER_BLOCK, MIB, ObjectId
from fusecache.policy.eviction import (
    CANDIDATES_PER_VICTIM,
    STAMPS_PER_LIMIT,
    Candidate,
    choose_victims,
    is_admitted,
)
from fusecache.policy.granules import (
    BLOCK_MASK,
    BLOCKS_PER_CHUNK,
    CHUNK_BYTES,
    blocks_of,
    full_mask,
    mask_between,
    mask_bytes,
    runs,
)
from fusecache.policy.ledger import Ledger

log = logging.getLogger(__name__)

T = TypeVar("T")

_NUMBERS_PER_LEASE = 4096
_CHECKSUM_BYTES = 8
# One eviction frees this much, so that sampling and punching are paid once for many blocks …
_EVICT_BATCH_BYTES = 64 * MIB
# … from this many random places, a few neighbours each: neighbours are one hole to punch.
_SAMPLE_SEEKS = 128
_SAMPLE_RUN = 8
_ROWS_PER_COMMIT = 16384
# A block whose last read was noted less than 1/8 of a cache of traffic ago is not noted again.
_STAMP_STEP = STAMPS_PER_LIMIT // 8


class Keeper:
    """Decides nothing about reads; knows what is on disk and makes room for more."""

    def __init__(
        self,
        offload: Offload,
        files: CacheFiles,
        index: CacheIndex,
        ledger: Ledger,
        counters: Counters,
        *,
        floor_bytes: int,
    ) -> None:
        self._offload = offload
        self._files = files
        self._index = index
        self._counters = counters
        self._floor_bytes = floor_bytes
        self._free_bytes = files.free_bytes()
        # Numbers from here on belong to this run.
        self._first_number = index.lease_numbers(_NUMBERS_PER_LEASE)
        self._numbers = iter(range(self._first_number, self._first_number + _NUMBERS_PER_LEASE))
        self._rows_lock = trio.Lock()
        self._room_lock = trio.Lock()
        self._random = random.Random()
        self._traffic_bytes = 0
        self._clock_start = index.clock()
        self._told: set[str] = set()
        # Blocks whose hole is being punched: a write there now would be lost. At most one eviction's victims.
        self._punching: set[tuple[int, int]] = set()
        self.ledger = ledger
        self.nursery: trio.Nursery
        # The objects in memory, by identity and by file number.
        self.objects: dict[ObjectId, CachedObject] = {}
        self._by_number: dict[int, CachedObject] = {}
        # What the hints say; nothing until somebody sets it.
        self.next_use: Callable[[CachedObject | None, Candidate], float | None] = lambda entry, candidate: (
            None
        )

    @property
    def clock(self) -> int:
        """The traffic clock: it ticks STAMPS_PER_LIMIT times while one cache of bytes passes."""
        return self._clock_start + self._traffic_bytes * STAMPS_PER_LIMIT // self.ledger.limit_bytes

    async def _to_its_end(self, call: Callable[..., Awaitable[T]], *args: object, name: str) -> T:
        """Run something in the cache's own nursery: begun, it ends, even if the caller is cancelled meanwhile.

        Memory, index, ledger and files would differ if it stopped half-way.
        """
        results: list[T] = []
        errors: list[FusecacheError] = []
        done = trio.Event()

        async def run() -> None:
            try:
                results.append(await call(*args))
            except FusecacheError as exc:
                errors.append(exc)
            finally:
                done.set()

        self.nursery.start_soon(run, name=name)
        await done.wait()
        if errors:
            raise errors[0]
        return results[0]

    # ---- objects and chunks come into memory

    async def load_object(self, entry: CachedObject) -> None:
        """Look up what is cached of an object. Several readers may call at once."""
        if entry.loading is not None:
            await entry.loading.wait()
            return
        entry.loading = trio.Event()
        try:
            async with self._rows_lock:
                row = await self._offload.rows(self._index.find, entry.object_id)
                if row is not None and row.size == entry.size and entry.number is None:
                    entry.number, entry.blocks = row.number, row.blocks
                    self._by_number[row.number] = entry
                entry.loaded = True
        finally:
            entry.loading.set()
            entry.loading = None

    def new_chunk(self, entry: CachedObject, index: int) -> Chunk:
        """Return an object's chunk, made if needed; it may still have to be loaded."""
        chunk = entry.chunks.get(index)
        if chunk is None:
            chunk = entry.chunks[index] = Chunk(entry, index)
            chunk.stamp = self.clock
            chunk.loaded = entry.loaded and not entry.blocks
        return chunk

    async def load_chunk(self, chunk: Chunk) -> None:
        """Look up which granules of a chunk are on disk. Several readers may call at once."""
        entry = chunk.owner
        while not chunk.loaded:
            if chunk.loading is not None:
                await chunk.loading.wait()
                continue
            chunk.loading = trio.Event()
            try:
                if not entry.loaded:
                    await self.load_object(entry)
                async with self._rows_lock:
                    if entry.number is not None and entry.blocks:
                        first = chunk.index * BLOCKS_PER_CHUNK
                        rows = await self._offload.rows(
                            self._index.block_rows, entry.number, first, first + BLOCKS_PER_CHUNK
                        )
                        self._fill_from_rows(chunk, rows)
                    chunk.loaded = True
            finally:
                chunk.loading.set()
                chunk.loading = None

    def _fill_from_rows(self, chunk: Chunk, rows: dict[int, BlockRow]) -> None:
        for number, row in rows.items():
            block = number - chunk.index * BLOCKS_PER_CHUNK
            chunk.present |= row.mask << (block * GRANULES_PER_BLOCK)
            chunk.set_checksums(block * GRANULES_PER_BLOCK, row.checksums)
            chunk.stamp = row.stamp
        chunk.present &= full_mask(chunk.size)

    def drop_if_idle(self, chunk: Chunk) -> None:
        """Forget a chunk, and then its object, in memory, if nothing needs them there."""
        entry = chunk.owner
        if chunk.is_idle() and entry.chunks.get(chunk.index) is chunk and not entry.handles:
            del entry.chunks[chunk.index]
        self.drop_object_if_idle(entry)

    def drop_object_if_idle(self, entry: CachedObject) -> None:
        """Forget an object in memory if nobody has it open and no chunk of it is needed."""
        if entry.handles or entry.chunks or entry.disk_operations or entry.loading is not None:
            return
        if self.objects.get(entry.object_id) is entry:
            del self.objects[entry.object_id]
        if entry.number is not None and self._by_number.get(entry.number) is entry:
            del self._by_number[entry.number]

    def trim_chunks(self, most: int) -> None:
        """Forget idle chunks of open objects in memory when there are more than `most`; they load again."""
        chunks = [chunk for entry in self.objects.values() for chunk in entry.chunks.values()]
        for chunk in chunks[: max(0, len(chunks) - most)]:
            if chunk.is_idle():
                del chunk.owner.chunks[chunk.index]

    def note_use(self, chunk: Chunk) -> None:
        """A reader used the chunk: its blocks are young again."""
        clock = self.clock
        if clock - chunk.stamp >= _STAMP_STEP:
            chunk.stamp = clock
            for block in blocks_of(chunk.present):
                chunk.dirty |= 1 << block

    # ---- bytes come from and go to the disk

    async def load(self, chunk: Chunk, frame: Frame, first: int, stop: int) -> int:
        """Fill granules of a frame from the cache file; return the mask of those that are good."""
        entry = chunk.owner
        wanted = mask_between(first, stop)
        if entry.number is None or wanted & ~chunk.present:
            return 0  # evicted since it was asked for
        start, end = first * GRANULE_BYTES, min(stop * GRANULE_BYTES, chunk.size)
        checksums = chunk.checksums_of(first, stop) if wanted & ~chunk.verified else None
        chunk.disk_operations += 1
        entry.disk_operations += 1
        try:
            offset = chunk.index * CHUNK_BYTES + start
            bad = await self._offload.disk(
                self._files.load, entry.number, offset, frame.view_from(first), end - start, checksums
            )
        except LocalDiskError as exc:
            self._count_disk_error(exc)
            bad = list(range(stop - first))
        finally:
            chunk.disk_operations -= 1
            entry.disk_operations -= 1
        self._traffic_bytes += end - start
        damaged = 0
        for granule in bad:
            damaged |= 1 << (first + granule)
        if damaged:
            self._counters.checksum_failures += damaged.bit_count()
            self._tell_once(
                "damaged", f"cached granules are damaged and fetched again, key={entry.object_id.key}"
            )
            self.ledger.release_cache(mask_bytes(damaged & chunk.present, chunk.size))
            chunk.drop_present(damaged)
        chunk.verified |= wanted & ~damaged
        return wanted & ~damaged

    async def keep(self, chunk: Chunk, frame: Frame, first: int, stop: int) -> None:
        """Write granules of a frame to the cache file if there is room."""
        entry = chunk.owner
        mask = mask_between(first, stop) & frame.valid & ~chunk.present
        nbytes = mask_bytes(mask, chunk.size)
        self._traffic_bytes += nbytes
        if not nbytes:
            return
        chunk.disk_operations += 1  # no eviction of this chunk, no forgetting it, from here on
        entry.disk_operations += 1
        try:
            if not await self._reserve(nbytes):
                return
            await self._write(chunk, frame, mask, nbytes)
        except LocalDiskError as exc:
            self._counters.uncached += 1
            self._count_disk_error(exc)
        finally:
            chunk.disk_operations -= 1
            entry.disk_operations -= 1

    async def _write(self, chunk: Chunk, frame: Frame, mask: int, reserved_bytes: int) -> None:
        """Write reserved granules. Gives back what was reserved and not written."""
        entry = chunk.owner
        done = 0
        try:
            if entry.number is None:
                number = await self._new_number()
                if entry.number is None:  # somebody else may have come first
                    entry.number = number
                    self._by_number[number] = entry
            number = entry.number
            for first, stop in runs(mask & ~self._punching_mask(chunk)):
                start, end = first * GRANULE_BYTES, min(stop * GRANULE_BYTES, chunk.size)
                checksums = await self._offload.disk(
                    self._files.store,
                    number,
                    chunk.index * CHUNK_BYTES + start,
                    frame.view_from(first),
                    end - start,
                )
                self._free_bytes -= end - start
                if entry.number != number:  # forgotten meanwhile: nobody will look at this file again
                    await self._offload.disk(self._files.delete, number)
                    return
                chunk.set_checksums(first, checksums)
                written = mask_between(first, stop)
                new_bytes = mask_bytes(written & ~chunk.present, chunk.size)
                chunk.add_present(written)
                chunk.verified |= written
                chunk.stamp = self.clock
                self.ledger.commit_cache(new_bytes)
                done += new_bytes
        finally:
            self.ledger.cancel_cache(reserved_bytes - done)

    # ---- room

    async def _reserve(self, nbytes: int) -> bool:
        """Reserve room for cache blocks, evicting others if needed."""
        if self._free_bytes - nbytes >= self._floor_bytes and self.ledger.reserve_cache(nbytes):
            return True
        if not await self._is_admitted():
            self._counters.not_admitted += 1
            return False
        if await self._make_room(nbytes, lambda: self.ledger.reserve_cache(nbytes)):
            return True
        self._counters.uncached += 1
        self._tell_once("room", "no room in the cache: reads go on, uncached")
        return False

    async def _is_admitted(self) -> bool:
        """Ask policy whether new blocks are worth the eviction of others."""
        async with self._rows_lock:
            sample = await self._offload.rows(self._index.sample, self._random, CANDIDATES_PER_VICTIM, 1)
        candidates = [Candidate(number, block, row.size, row.stamp) for number, block, row in sample]
        return not candidates or is_admitted(
            candidates,
            clock=self.clock,
            next_use=self._next_use,
            incoming_use=None,
            chance=self._random.random(),
        )

    def _next_use(self, candidate: Candidate) -> float | None:
        return self.next_use(self._by_number.get(candidate.file_number), candidate)

    async def reserve_staging(self, nbytes: int) -> None:
        """Reserve room for staging files, evicting clean blocks if needed. Raises NoSpace."""
        if self.reserve_staging_nowait(nbytes):
            return
        ledger = self.ledger
        if not ledger.staging_fits(nbytes):
            raise NoSpace(
                f"files not yet in the bucket would take {ledger.staging_bytes + nbytes} of the "
                f"{ledger.staging_limit_bytes} bytes that they may: wait for uploads, or raise the cache's limit"
            )
        if not await self._make_room(nbytes, lambda: ledger.reserve_staging(nbytes)):
            raise NoSpace(f"the disk has no room for {nbytes} more bytes, and nothing clean is left to evict")

    def reserve_staging_nowait(self, nbytes: int) -> bool:
        """Reserve room for staging files if there is enough right now."""
        return self._free_bytes - nbytes >= self._floor_bytes and self.ledger.reserve_staging(nbytes)

    async def _make_room(self, nbytes: int, reserve: Callable[[], bool]) -> bool:
        """Evict until `reserve` succeeds; False if eviction frees too little, or the caller is gone."""
        wanted = [True]
        try:
            return await self._to_its_end(
                self._evict_until, nbytes, lambda: wanted[0] and reserve(), name="cache-eviction"
            )
        finally:
            wanted[0] = False

    async def _evict_until(self, nbytes: int, reserve: Callable[[], bool]) -> bool:
        async with self._room_lock:
            while True:
                await self.measure_free_space()
                floor_shortage = self._floor_bytes + nbytes - self._free_bytes
                if floor_shortage <= 0 and reserve():
                    return True
                short = max(self.ledger.shortage_bytes(nbytes), floor_shortage, 1)
                batch = min(_EVICT_BATCH_BYTES, self.ledger.limit_bytes // 16)
                if not await self._evict(max(short, batch)):
                    return floor_shortage <= 0 and reserve()

    async def measure_free_space(self) -> None:
        """Ask the file system how much is free; between two calls it is estimated."""
        self._free_bytes = await self._offload.disk(self._files.free_bytes)

    async def _evict(self, need_bytes: int) -> int:
        """Evict about `need_bytes` of clean blocks; return how much it was."""
        async with self._rows_lock:
            await self._write_rows()
            sample = await self._offload.rows(self._index.sample, self._random, _SAMPLE_SEEKS, _SAMPLE_RUN)
            candidates = [
                Candidate(number, block, row.size, row.stamp)
                for number, block, row in sample
                if self._may_evict(number, block)
            ]
            victims = choose_victims(
                candidates,
                need_bytes,
                clock=self.clock,
                next_use=self._next_use,
            )
            if not victims:
                return 0
            for victim in victims:
                self._hide(victim)
            self._punching = {(victim.file_number, victim.block) for victim in victims}
            gone = await self._offload.rows(
                self._index.evict, [(victim.file_number, victim.block) for victim in victims]
            )
            deletable = self._forget_emptied(gone)
        try:
            await self._offload.disk(self._free_files, victims, deletable)
        except trio.Cancelled:
            # Stopping: no row names these bytes any more, so that nobody would free them later.
            self._free_files(victims, deletable)
            raise
        finally:
            self._punching = set()
            self.ledger.release_cache(gone.size)
            self._counters.evicted_blocks += len(victims)
            self._counters.evicted_bytes += gone.size
        return gone.size

    def _may_evict(self, number: int, block: int) -> bool:
        """Say whether a sampled block is not being read, written, or changed."""
        chunk = self._chunk_in_memory(number, block)
        if chunk is None:
            return True
        local = block % BLOCKS_PER_CHUNK
        return not (chunk.disk_operations or chunk.loading is not None or chunk.dirty >> local & 1)

    def _chunk_in_memory(self, number: int, block: int) -> Chunk | None:
        entry = self._by_number.get(number)
        return entry.chunks.get(block // BLOCKS_PER_CHUNK) if entry is not None else None

    def _punching_mask(self, chunk: Chunk) -> int:
        """Return the granules of a chunk whose blocks are being evicted right now."""
        mask = 0
        if self._punching:
            first = chunk.index * BLOCKS_PER_CHUNK
            for block in range(BLOCKS_PER_CHUNK):
                if (chunk.owner.number, first + block) in self._punching:
                    mask |= BLOCK_MASK << (block * GRANULES_PER_BLOCK)
        return mask

    def _hide(self, victim: Candidate) -> None:
        """Take a victim out of memory's table."""
        entry = self._by_number.get(victim.file_number)
        if entry is None:
            return
        chunk = entry.chunks.get(victim.block // BLOCKS_PER_CHUNK)
        if chunk is None or not chunk.loaded:
            entry.blocks -= 1
            return
        local = victim.block % BLOCKS_PER_CHUNK
        mask = BLOCK_MASK << (local * GRANULES_PER_BLOCK)
        dirty = chunk.dirty
        chunk.drop_present(mask)
        chunk.dirty = dirty  # the index is told by the eviction itself

    def _forget_emptied(self, gone: Evicted) -> set[int]:
        """Return the files without a block that nobody is about to write to; their objects lose their number."""
        deletable = set()
        for number in gone.emptied:
            entry = self._by_number.get(number)
            if entry is not None:
                if entry.blocks or entry.disk_operations:
                    continue
                entry.number = None
                del self._by_number[number]
            deletable.add(number)
        return deletable

    def _free_files(self, victims: Iterable[Candidate], deletable: set[int]) -> None:
        """Run in a thread: delete emptied files, punch the others. A failure is told and leaves bytes behind."""
        holes: dict[int, list[tuple[int, int]]] = {}
        for victim in sorted(victims, key=lambda victim: (victim.file_number, victim.block)):
            if victim.file_number in deletable:
                continue
            file_holes = holes.setdefault(victim.file_number, [])
            offset = victim.block * BLOCK_BYTES
            if file_holes and sum(file_holes[-1]) == offset:
                file_holes[-1] = (file_holes[-1][0], file_holes[-1][1] + BLOCK_BYTES)
            else:
                file_holes.append((offset, BLOCK_BYTES))
        try:
            for number in deletable:
                self._files.delete(number)
            for number, extents in holes.items():
                self._files.punch(number, extents)
        except LocalDiskError as exc:
            self._offload.soon(self._count_disk_error, exc)

    # ---- whole files come and go

    async def adopt(self, entry: CachedObject, path: Path, checksums: bytes) -> None:
        """Make a staging file the cache file of `entry`; its reservation moves with it."""
        await self._to_its_end(self._adopt, entry, path, checksums, name="cache-adopt")

    async def _adopt(self, entry: CachedObject, path: Path, checksums: bytes) -> None:
        await self.load_object_now(entry)
        size = entry.size
        number = await self._new_number()
        entry.disk_operations += 1
        try:
            if entry.number is not None or not size:
                raise LocalDiskError("the object has a cache file already, or is empty")
            await self._offload.disk(self._files.adopt, path, number)
        except LocalDiskError as exc:
            log.debug("staging file not adopted key=%s reason=%s", entry.object_id.key, exc)
            await self._offload.disk(_unlink, path)
            self.ledger.release_staging(size)
            return
        finally:
            entry.disk_operations -= 1
        if entry.number is not None:  # a read of it was cached while the file was renamed
            await self._offload.disk(self._files.delete, number)
            self.ledger.release_staging(size)
            return
        entry.number = number
        self._by_number[number] = entry
        self.ledger.adopt(size)
        entry.disk_operations += 1
        try:
            await self._write_adopted_rows(entry, number, checksums)
        finally:
            entry.disk_operations -= 1

    async def _write_adopted_rows(self, entry: CachedObject, number: int, checksums: bytes) -> None:
        """Write the rows of a whole file, a bounded number of them in one transaction."""
        step = _ROWS_PER_COMMIT * BLOCK_BYTES
        async with self._rows_lock:
            for start in range(0, entry.size, step):
                rows = _whole_rows(entry.size, checksums, start, min(entry.size, start + step), self.clock)
                change = ObjectChange(entry.object_id, number, entry.size, rows)
                await self._offload.rows(self._index.apply, [change], self.clock)
                entry.blocks += len(rows)
            for chunk in list(entry.chunks.values()):
                # Made before the file came: what it knows is counted twice now. Look again.
                self.ledger.release_cache(mask_bytes(chunk.present, chunk.size))
                chunk.present = chunk.dirty = 0
                first = chunk.index * BLOCKS_PER_CHUNK
                chunk_rows = await self._offload.rows(
                    self._index.block_rows, number, first, first + BLOCKS_PER_CHUNK
                )
                self._fill_from_rows(chunk, chunk_rows)
                chunk.loaded = True

    async def load_object_now(self, entry: CachedObject) -> None:
        """Load an object unless it is loaded."""
        while not entry.loaded:
            await self.load_object(entry)

    async def forget(self, object_id: ObjectId) -> None:
        """Drop all blocks of an object version."""
        await self._to_its_end(self._forget, object_id, name="cache-forget")

    async def _forget(self, object_id: ObjectId) -> None:
        async with self._rows_lock:
            entry = self.objects.get(object_id)
            number = None
            if entry is not None and entry.number is not None:
                while any(chunk.dirty for chunk in entry.chunks.values()):
                    await self._write_rows()
                # From here on memory knows nothing: writes that are under way see that their file is not
                # wanted.
                number, entry.number, entry.blocks = entry.number, None, 0
                self._by_number.pop(number, None)
                for chunk in entry.chunks.values():
                    chunk.present = chunk.verified = 0
                    chunk.loaded = True
            gone = await self._offload.rows(self._index.remove_object, object_id)
        self.ledger.release_cache(gone.size)
        for doomed in {number, *gone.emptied} - {None}:
            assert doomed is not None
            try:
                await self._offload.disk(self._files.delete, doomed)
            except LocalDiskError as exc:
                self._count_disk_error(exc)

    # ---- rows

    async def flush_rows(self) -> None:
        """Write the rows that memory is ahead of."""
        async with self._rows_lock:
            await self._write_rows()

    async def _write_rows(self) -> None:
        dirty = [
            (chunk, chunk.dirty)
            for entry in self.objects.values()
            for chunk in entry.chunks.values()
            if chunk.dirty
        ]
        if not dirty:
            return
        changes = _changes_of(chunk for chunk, _ in dirty)
        for chunk, _ in dirty:
            chunk.dirty = 0
        try:
            await self._offload.rows(self._index.apply, changes, self.clock)
        except BaseException:  # cancelled before it began: the rows are still to be written
            for chunk, blocks in dirty:
                chunk.dirty |= blocks
            raise
        for chunk, _ in dirty:
            self.drop_if_idle(chunk)

    def close(self) -> None:
        """Write what is left and the mark of a clean stop. Blocks the loop: nothing else runs any more."""
        chunks = [chunk for entry in self.objects.values() for chunk in entry.chunks.values() if chunk.dirty]
        self._index.apply(_changes_of(chunks), self.clock)
        self._index.close(clean=True)

    async def delete_orphans(self) -> None:
        """Delete files of earlier runs that no row knows: written just before a kill, their rows never were."""
        orphans = await self._offload.disk(self._numbers_on_disk)
        for start in range(0, len(orphans), _NUMBERS_PER_LEASE):
            async with self._rows_lock:
                batch = orphans[start : start + _NUMBERS_PER_LEASE]
                doomed = await self._offload.rows(self._without_rows, batch)
            for number in doomed:
                await self._offload.disk(self._files.delete, number)

    def _numbers_on_disk(self) -> list[int]:
        return [number for number in self._files.numbers() if number < self._first_number]

    def _without_rows(self, numbers: list[int]) -> list[int]:
        return [number for number in numbers if not self._index.has_file(number)]

    async def _new_number(self) -> int:
        """Return a file number that was never used."""
        number = next(self._numbers, None)
        while number is None:
            async with self._rows_lock:
                number = next(self._numbers, None)
                if number is None:
                    first = await self._offload.rows(self._index.lease_numbers, _NUMBERS_PER_LEASE)
                    self._numbers = iter(range(first, first + _NUMBERS_PER_LEASE))
                    number = next(self._numbers)
        return number

    def _count_disk_error(self, exc: LocalDiskError) -> None:
        self._counters.disk_errors += 1
        self._tell_once("disk", f"the cache's disk fails: reads go on, uncached: {exc}")

    def _tell_once(self, topic: str, text: str) -> None:
        """Warn once a topic: a failing disk would say so a thousand times a second."""
        if topic not in self._told:
            self._told.add(topic)
            log.warning("cache %s", text)


def _changes_of(chunks: Iterable[Chunk]) -> list[ObjectChange]:
    """Return the rows of all dirty blocks."""
    rows: dict[int, dict[int, BlockRow | None]] = {}
    owners: dict[int, CachedObject] = {}
    for chunk in chunks:
        number = chunk.owner.number
        if number is None:
            continue
        owners[number] = chunk.owner
        for block in range(BLOCKS_PER_CHUNK):
            if chunk.dirty >> block & 1:
                rows.setdefault(number, {})[chunk.index * BLOCKS_PER_CHUNK + block] = _block_row(chunk, block)
    return [
        ObjectChange(owners[number].object_id, number, owners[number].size, changed)
        for number, changed in rows.items()
    ]


def _block_row(chunk: Chunk, block: int) -> BlockRow | None:
    shift = block * GRANULES_PER_BLOCK
    mask = chunk.present >> shift & BLOCK_MASK
    if not mask:
        return None
    return BlockRow(
        mask,
        chunk.stamp & 0xFFFFFFFF,
        mask_bytes(mask << shift, chunk.size),
        chunk.checksums_of(shift, shift + GRANULES_PER_BLOCK),
    )


def _whole_rows(size: int, checksums: bytes, start: int, stop: int, stamp: int) -> dict[int, BlockRow | None]:
    """Return the rows of blocks that begin in [start, stop) of a file that is there as a whole."""
    rows: dict[int, BlockRow | None] = {}
    row_bytes = GRANULES_PER_BLOCK * _CHECKSUM_BYTES
    for block in range(start // BLOCK_BYTES, -(-stop // BLOCK_BYTES)):
        length = min(BLOCK_BYTES, size - block * BLOCK_BYTES)
        sums = checksums[block * row_bytes : (block + 1) * row_bytes].ljust(row_bytes, b"\0")
        rows[block] = BlockRow(full_mask(length), stamp & 0xFFFFFFFF, length, sums)
    return rows


def _unlink(path: Path) -> None:
    """Run in a thread."""
    try:
        path.unlink(missing_ok=True)
    except OSError as exc:
        raise LocalDiskError(f"{path} cannot be removed: {exc}") from exc
