"""The table of objects and chunks in memory, and their rows in the index on disk.

Used on the trio loop; calls that may block go through `offload`. Not here: bytes (`disk_tier`), disk space
(`evictor`).

Invariants:
1. Rows are read and written under one lock. Memory changes before the lock is released, so memory and index agree.
2. A chunk with rows that the index lacks (`dirty`) stays in memory.
3. An operation that changes memory, index, ledger and files together runs to its end, even if its caller is cancelled
   (`run_to_completion`).
"""

import contextlib
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import trio

from fusecache.engine.cache.chunks import CachedObject, Chunk
from fusecache.engine.cache.statistics import Counters
from fusecache.engine.runtime.offload import Offload
from fusecache.engine.runtime.supervisor import TaskNursery
from fusecache.index.cache_index import BlockRow, CacheIndex, ObjectChange, ObjectRow
from fusecache.model.errors import FusecacheError, LocalDiskError
from fusecache.model.objects import GRANULES_PER_BLOCK, ObjectId
from fusecache.policy.cache.eviction import STAMPS_PER_LIMIT
from fusecache.policy.cache.granules import BLOCK_MASK, BLOCKS_PER_CHUNK, blocks_of, disk_bytes, full_mask

log = logging.getLogger(__name__)

T = TypeVar("T")

_NUMBERS_PER_LEASE = 4096
# The stamp of a block is updated only after 1/8 of a cache of traffic, which saves row writes.
STAMP_STEP = STAMPS_PER_LIMIT // 8


@dataclass(eq=False, repr=False)
class BlockTable:
    """Objects and chunks in memory, loaded from the index and written back in batches."""

    _offload: Offload
    _index: CacheIndex
    _counters: Counters
    tasks: TaskNursery
    limit_bytes: int = field(kw_only=True)

    def __post_init__(self) -> None:
        self._clock_start = self._index.clock()
        self._warned: set[str] = set()
        self._is_unreadable = False
        self._is_unwritable = False
        # File numbers from here on belong to this run of the daemon.
        self.first_number = self._index.lease_numbers(_NUMBERS_PER_LEASE)
        self._numbers = iter(range(self.first_number, self.first_number + _NUMBERS_PER_LEASE))
        self.rows_lock = trio.Lock()
        self.traffic_bytes = 0
        # The objects in memory, by identity and by file number.
        self.objects: dict[ObjectId, CachedObject] = {}
        self.by_number: dict[int, CachedObject] = {}
        # By file number: how often a file is held, so that it is neither evicted nor written, as programs read it by
        # themselves; and when a file was last used, if this run of the daemon has verified all its checksums.
        self.held: Counter[int] = Counter()
        self.intact: dict[int, int] = {}

    @property
    def clock(self) -> int:
        """The traffic clock: it ticks STAMPS_PER_LIMIT times while one cache of bytes passes."""
        return self._clock_start + self.traffic_bytes * STAMPS_PER_LIMIT // self.limit_bytes

    async def run_to_completion(self, call: Callable[..., Awaitable[T]], *args: object, name: str) -> T:
        """Run a call as a task of the cache. Once begun, it runs to its end, even if the caller is cancelled.

        The shutdown of the cache waits for it too: if it stopped half-way, memory, index, ledger and files would
        differ. Raises what `call` raises.
        """
        results: list[T] = []
        errors: list[FusecacheError] = []
        done = trio.Event()

        async def run() -> None:
            try:
                with trio.CancelScope(shield=True):
                    results.append(await call(*args))
            except FusecacheError as exc:
                errors.append(exc)
            finally:
                done.set()

        self.tasks.start_soon(name, run, on_failed=errors.append)
        await done.wait()
        if errors:
            raise errors[0]
        return results[0]

    def object_entry(self, object_id: ObjectId, size: int) -> CachedObject:
        """Return the entry of an object version, created if needed. Raises ValueError if its size differs."""
        entry = self.objects.get(object_id)
        if entry is None:
            entry = self.objects[object_id] = CachedObject(object_id, size)
        elif entry.size != size:
            raise ValueError(f"{object_id} has {entry.size} bytes, not {size}")
        return entry

    async def load_object(self, entry: CachedObject) -> None:
        """Look up the object's row in the index. Several readers may call at once."""
        if entry.loading is not None:
            await entry.loading.wait()
        else:
            await self.load_objects([entry])

    async def load_objects(self, entries: Sequence[CachedObject]) -> None:
        """Look up several objects by one call in a thread. Skips objects that another task looks up already."""
        loading = [(entry, trio.Event()) for entry in entries if not entry.loaded and entry.loading is None]
        for entry, event in loading:
            entry.loading = event
        try:
            async with self.rows_lock:
                rows = await self._rows_of([entry.object_id for entry, _ in loading])
                for (entry, _), row in zip(loading, rows, strict=True):
                    if row is not None and row.size == entry.size and entry.number is None:
                        entry.number, entry.blocks = row.number, row.blocks
                        self.by_number[row.number] = entry
                    if row is None and entry.number is None:
                        entry.rows = 0
                    entry.loaded = True
        finally:
            for entry, event in loading:
                event.set()
                entry.loading = None

    async def load_object_now(self, entry: CachedObject) -> None:
        """Load an object unless it is loaded."""
        while not entry.loaded:
            await self.load_object(entry)

    def new_chunk(self, entry: CachedObject, index: int) -> Chunk:
        """Return an object's chunk, created if needed. Its rows may not be loaded yet."""
        chunk = entry.chunks.get(index)
        if chunk is None:
            chunk = entry.chunks[index] = Chunk(entry, index)
            chunk.stamp = self.clock
            chunk.loaded = entry.loaded and not (entry.blocks and entry.rows >> index & 1)
        return chunk

    async def loaded_chunk(self, entry: CachedObject, index: int) -> Chunk:
        """Return an object's chunk with its rows loaded."""
        (chunk,) = await self.loaded_chunks(entry, index, index + 1)
        return chunk

    async def loaded_chunks(self, entry: CachedObject, first: int, stop: int) -> list[Chunk]:
        """Return an object's chunks [first, stop) with their rows loaded."""
        while True:
            await self.load_object_now(entry)
            chunks = [self.new_chunk(entry, index) for index in range(first, stop)]
            if all(chunk.loaded for chunk in chunks):
                return chunks
            await self.load_rows(entry, chunks)

    async def load_rows(self, entry: CachedObject, chunks: Sequence[Chunk]) -> None:
        """Look up which granules of chunks are on disk, by one call in a thread. Several readers may call at once."""
        await self.load_object_now(entry)
        others = [chunk.loading for chunk in chunks if chunk.loading is not None]
        missing = [chunk for chunk in chunks if not chunk.loaded and chunk.loading is None]
        if missing:
            await self._look_up(entry, missing)
        for each in others:
            await each.wait()

    async def _look_up(self, entry: CachedObject, chunks: list[Chunk]) -> None:
        """Load the rows of chunks, which are in their order. Others who want them wait."""
        event = trio.Event()
        for chunk in chunks:
            chunk.loading = event
        try:
            async with self.rows_lock:
                rows: dict[int, BlockRow] = {}
                if entry.number is not None and entry.blocks:
                    first, stop = chunks[0].index, chunks[-1].index + 1
                    rows = await self._block_rows(
                        entry.number, first * BLOCKS_PER_CHUNK, stop * BLOCKS_PER_CHUNK
                    )
                for chunk in chunks:
                    self.fill_from_rows(chunk, rows)
                    chunk.loaded = True
        finally:
            event.set()
            for chunk in chunks:
                chunk.loading = None

    def fill_from_rows(self, chunk: Chunk, rows: Mapping[int, BlockRow]) -> None:
        """Enter a chunk's rows. rows: by block; may have those of other chunks."""
        for block in range(BLOCKS_PER_CHUNK):
            row = rows.get(chunk.index * BLOCKS_PER_CHUNK + block)
            if row is not None:
                chunk.present |= row.mask << (block * GRANULES_PER_BLOCK)
                chunk.set_checksums(block * GRANULES_PER_BLOCK, row.checksums)
                chunk.stamp = row.stamp
        chunk.present &= full_mask(chunk.size)

    def close_object(self, entry: CachedObject) -> None:
        """End one use of an object, `CachedObject.handles`; it leaves memory with the last one, if nothing needs it."""
        entry.handles -= 1
        if not entry.handles:
            for chunk in list(entry.chunks.values()):
                self.drop_if_idle(chunk)
            self.drop_object_if_idle(entry)

    def drop_if_idle(self, chunk: Chunk) -> None:
        """Drop a chunk, and then its object, from memory if nothing needs them there."""
        entry = chunk.owner
        if chunk.is_idle() and entry.chunks.get(chunk.index) is chunk and not entry.handles:
            del entry.chunks[chunk.index]
        self.drop_object_if_idle(entry)

    def drop_object_if_idle(self, entry: CachedObject) -> None:
        """Drop an object from memory if it is not open and no chunk of it is needed."""
        if entry.handles or entry.chunks or entry.disk_operations or entry.loading is not None:
            return
        if self.objects.get(entry.object_id) is entry:
            del self.objects[entry.object_id]
        if entry.number is not None and self.by_number.get(entry.number) is entry:
            del self.by_number[entry.number]

    def trim_chunks(self, most: int) -> None:
        """Drop idle chunks of open objects from memory while there are more than `most`; they can load again."""
        chunks = [chunk for entry in self.objects.values() for chunk in entry.chunks.values()]
        for chunk in chunks[: max(0, len(chunks) - most)]:
            if chunk.is_idle():
                del chunk.owner.chunks[chunk.index]

    def on_use(self, chunk: Chunk) -> None:
        """A reader used the chunk: update its stamp, at most once per STAMP_STEP."""
        clock = self.clock
        if clock - chunk.stamp >= STAMP_STEP:
            chunk.stamp = clock
            for block in blocks_of(chunk.present):
                chunk.dirty |= 1 << block

    async def _rows_of(self, object_ids: Sequence[ObjectId]) -> list[ObjectRow | None]:
        try:
            return await self._offload.rows(self._find_all, object_ids)
        except LocalDiskError as exc:
            await self._abandon_index(exc)
            return [None] * len(object_ids)

    def _find_all(self, object_ids: Sequence[ObjectId]) -> list[ObjectRow | None]:
        """Run in a thread."""
        return [self._index.find(object_id) for object_id in object_ids]

    async def _block_rows(self, number: int, first: int, stop: int) -> dict[int, BlockRow]:
        try:
            return await self._offload.rows(self._index.block_rows, number, first, stop)
        except LocalDiskError as exc:
            await self._abandon_index(exc)
            return {}

    async def newest_objects(self) -> dict[str, ObjectRow]:
        """Return the newest cached version of each key; none if the index cannot be read."""
        try:
            return await self._offload.rows(self._index.newest_objects)
        except LocalDiskError as exc:
            await self._abandon_index(exc)
            return {}

    async def _abandon_index(self, exc: LocalDiskError) -> None:
        """The index cannot be read: cached blocks are unknown until the next start, which creates a new index."""
        self.count_disk_error(exc)
        if not self._is_unreadable:
            self._is_unreadable = True
            with contextlib.suppress(LocalDiskError):
                await self._offload.rows(self._index.distrust)

    @property
    def accepts_blocks(self) -> bool:
        """Whether the index takes rows of new blocks. If not, no new block is stored on disk."""
        return not (self._is_unreadable or self._is_unwritable)

    async def flush_rows(self) -> None:
        """Write the rows of dirty blocks. If the disk fails, they stay dirty and are retried later."""
        async with self.rows_lock:
            try:
                await self.write_rows()
            except LocalDiskError as exc:
                self.count_disk_error(exc)

    async def write_rows(self) -> None:
        """Write the rows of dirty blocks; the caller holds the lock. Raises LocalDiskError."""
        dirty = [
            (chunk, chunk.dirty)
            for entry in self.objects.values()
            for chunk in entry.chunks.values()
            if chunk.dirty
        ]
        if not dirty:
            self._is_unwritable = False  # nothing is pending: the next row will show whether it works
            return
        changes = _changes_of(chunk for chunk, _ in dirty)
        for chunk, _ in dirty:
            chunk.dirty = 0
            chunk.is_being_indexed = True  # keeps it in memory: the index may fail to take its rows
        try:
            await self._offload.rows(self._index.apply, changes, self.clock)
        except BaseException as exc:  # also if cancelled before it began: the rows are still pending
            for chunk, blocks in dirty:
                chunk.dirty |= blocks
            self._is_unwritable = isinstance(exc, LocalDiskError)
            raise
        finally:
            for chunk, _ in dirty:
                chunk.is_being_indexed = False
        self._is_unwritable = False
        for chunk, _ in dirty:
            self.drop_if_idle(chunk)

    async def new_number(self) -> int:
        """Return a file number that was never used. Raises LocalDiskError."""
        number = next(self._numbers, None)
        while number is None:
            async with self.rows_lock:
                number = next(self._numbers, None)
                if number is None:
                    first = await self._offload.rows(self._index.lease_numbers, _NUMBERS_PER_LEASE)
                    self._numbers = iter(range(first, first + _NUMBERS_PER_LEASE))
                    number = next(self._numbers)
        return number

    def close(self) -> None:
        """Write the remaining rows and the mark of a clean stop. Blocks the loop, where nothing else runs any more."""
        chunks = [chunk for entry in self.objects.values() for chunk in entry.chunks.values() if chunk.dirty]
        try:
            self._index.apply(_changes_of(chunks), self.clock)
            self._index.close(clean=True)
        except LocalDiskError as exc:
            log.warning("cache index not closed, rows of the last second are lost error=%s", exc)
            self._index.close(clean=False)

    def count_disk_error(self, exc: LocalDiskError) -> None:
        self._counters.disk_errors += 1
        self.warn_once(
            "disk", f"cache disk fails, reads continue uncached; check the disk of --cache-dir error={exc}"
        )

    @property
    def damages(self) -> int:
        """How many cached granules did not match their checksums."""
        return self._counters.checksum_failures

    def count_damaged(self, key: str, granules: int) -> None:
        """Count cached granules that do not match their checksums."""
        self._counters.checksum_failures += granules
        self.warn_once(
            "damaged",
            f"cached granules are damaged, fetching them again; if this repeats, check the disk key={key}",
        )

    def warn_once(self, topic: str, text: str) -> None:
        """Warn once per topic: a failing disk would log a thousand lines a second."""
        if topic not in self._warned:
            self._warned.add(topic)
            log.warning("%s", text)


def _changes_of(chunks: Iterable[Chunk]) -> list[ObjectChange]:
    """Return the rows of all dirty blocks, by object."""
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
        disk_bytes(mask << shift, chunk.size),
        chunk.checksums_of(shift, shift + GRANULES_PER_BLOCK),
    )
