"""What people ask of the disk cache by name: bring chunks in, drop objects, check what lies there.

Used on the loop; calls that may block go through `offload`, in pieces that are bounded whatever the cache holds.

Invariants:
1. What a warm-up brought in is not evicted while any warm-up runs (`next_use` of the room).
2. Only clean blocks are dropped: what the bucket does not have yet lies in staging files, not here.
"""

import mmap
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import trio

from fusecache.disk.cache_files import CHECKSUM_BYTES, CacheFiles
from fusecache.engine.cache.block_table import BlockTable
from fusecache.engine.cache.buffer_pool import BufferPool
from fusecache.engine.cache.chunks import CachedObject, Chunk, FetchSource
from fusecache.engine.cache.disk_space import DiskSpace
from fusecache.engine.cache.fetcher import Fetcher
from fusecache.engine.runtime.offload import Offload
from fusecache.index.cache_index import CachedBlock, CacheIndex, ScanCursor
from fusecache.model.errors import LocalDiskError, NoSpace
from fusecache.model.objects import BLOCK_BYTES, GRANULE_BYTES, MIB, ObjectId
from fusecache.policy.cache.eviction import EvictionCandidate
from fusecache.policy.cache.fetch_order import Cause
from fusecache.policy.cache.granules import full_mask, runs

# One look into the index: a few ms in a thread, during which rows of readers wait, and the loop shares the GIL.
_OBJECTS_A_LOOK = 2048
_BLOCKS_A_LOOK = 256
# One piece of a check: some 10 ms of a disk, then as long a rest.
_BYTES_A_CHECK = 8 * MIB
_FILL_ATTEMPTS = 3
_DROP_ATTEMPTS = 3
# Whether frames are free for hints depends on time too, so that nobody may say when: ask again.
_PUMP_SECONDS = 0.5
_OBJECTS_BETWEEN_CHECKPOINTS = 256

IsWanted = Callable[[str], bool]


@dataclass(frozen=True, slots=True)
class EvictResult:
    """Bytes dropped from the disk, and those that stayed, as they were in use at that moment."""

    freed_bytes: int
    left_bytes: int


@dataclass(frozen=True, slots=True)
class ScrubResult:
    """One piece of a check: what was read, and the objects and bytes of granules that were damaged."""

    blocks: int
    bytes: int
    damaged: tuple[ObjectId, ...]
    damaged_bytes: int


class CacheMaintenance:
    """Fills, drops and checks cached blocks."""

    def __init__(
        self,
        offload: Offload,
        files: CacheFiles,
        index: CacheIndex,
        table: BlockTable,
        disk_space: DiskSpace,
        fetcher: Fetcher,
        buffer_pool: BufferPool,
    ) -> None:
        self._offload = offload
        self._files = files
        self._index = index
        self._table = table
        self._disk_space = disk_space
        self._fetcher = fetcher
        self._buffer_pool = buffer_pool
        self._warmed: list[set[int]] = []
        disk_space.next_use = self._next_use
        # Chunks that may be on their way at once: three quarters of the buffers stay to readers.
        self.large_at_once = max(1, buffer_pool.large_count // 4)

    # ---- bringing in

    @contextmanager
    def protect_warmed(self) -> Iterator[set[int]]:
        """Give a set of file numbers whose blocks nothing evicts that has no nearer use."""
        warmed: set[int] = set()
        self._warmed.append(warmed)
        try:
            yield warmed
        finally:
            self._warmed = [other for other in self._warmed if other is not warmed]

    def _next_use(self, entry: CachedObject | None, candidate: EvictionCandidate) -> float | None:
        if entry is not None and entry.warming:
            return 0.0
        return 0.0 if any(candidate.file_number in warmed for warmed in self._warmed) else None

    def free_space_bytes(self) -> int:
        """Return how many bytes the cache could hold if all that it holds were evicted."""
        return self._disk_space.clean_limit_bytes()

    async def fill(
        self,
        entry: CachedObject,
        index: int,
        *,
        mask: int | None = None,
        depth: int = 0,
        attempts: int = _FILL_ATTEMPTS,
    ) -> None:
        """Bring a chunk onto the disk, behind what readers wait for: as a whole, or the granules of `mask`.

        The caller keeps the object in memory. Raises the fetch's error; NoSpace if it came and was not kept.
        """
        chunk = await self._table.loaded_chunk(entry, index)
        chunk.readers += 1
        try:
            full = full_mask(chunk.size) if mask is None else mask
            for _ in range(attempts):
                if not full & ~chunk.present:
                    return
                await self._store_buffers(chunk, full & ~chunk.present)
                await self._fetch(chunk, full & ~chunk.present, depth)
            # What others fetched meanwhile is not kept for their sake if the disk is slow.
            await self._store_buffers(chunk, full & ~chunk.present)
            if full & ~chunk.present:
                raise NoSpace("it was fetched, but not kept: no room in the cache, or its disk fails")
        finally:
            chunk.readers -= 1
            for buffer in chunk.buffers:
                self._buffer_pool.mark_consumed(
                    buffer
                )  # the first to be reused: who reads it later has it on the disk
            self._table.drop_if_idle(chunk)

    async def _store_buffers(self, chunk: Chunk, missing: int) -> None:
        """Write what was read without being kept."""
        pending = chunk.pending()
        for buffer in list(chunk.buffers):
            for first, stop in runs(buffer.valid & missing & ~pending):
                self._buffer_pool.acquire_use(buffer)
                try:
                    await self._fetcher.disk.store(chunk, buffer, first, stop)
                finally:
                    self._buffer_pool.release_use(buffer, trio.current_time())

    async def missing(self, entry: CachedObject, index: int, mask: int) -> int:
        """Return which granules of a chunk are not on disk, and not on their way. The caller keeps the object."""
        chunk = await self._table.loaded_chunk(entry, index)
        found = mask & full_mask(chunk.size) & ~chunk.present & ~chunk.pending()
        self._table.drop_if_idle(chunk)
        return found

    async def evict_for(self, nbytes: int, incoming_use: float) -> bool:
        """Evict what is read later than so many bytes that will come soon; False if they would not be kept."""
        return self._table.accepts_blocks and await self._disk_space.evict_for(nbytes, incoming_use)

    def free_bytes(self) -> int:
        """Return how much may be brought in without anything going for it."""
        return self._disk_space.free_bytes() if self._table.accepts_blocks else 0

    def listen_to_hints(self, hinted_use: Callable[[ObjectId, int, int], float | None] | None) -> None:
        """Keep what is read soonest: `hinted_use` says in how many seconds that is; None: nobody says."""
        self._disk_space.listen_to_hints(hinted_use)

    async def _fetch(self, chunk: Chunk, missing: int, depth: int) -> None:
        self._fetcher.request(chunk, missing, Cause.HINT, depth=depth)
        self._fetcher.pump()
        requests = [
            request
            for request in chunk.fetches
            if request.source is FetchSource.NETWORK and request.mask & missing
        ]
        # All events before the first wait: the second request may end while we wait for the first.
        events = [trio.Event() if request.kept is None else request.kept for request in requests]
        for request, kept in zip(requests, events, strict=True):
            request.kept = kept
        for request, kept in zip(requests, events, strict=True):
            while not kept.is_set():
                with trio.move_on_after(_PUMP_SECONDS):
                    await kept.wait()
                self._fetcher.pump()
            if request.error is not None:
                # Its own instance for each who hears of it: a shared one would collect all their tracebacks.
                raise type(request.error)(*request.error.args) from request.error

    # ---- dropping

    async def evict(self, is_wanted: IsWanted, *, may_drop: Callable[[ObjectId], bool]) -> EvictResult:
        """Drop the blocks of all objects whose key is wanted, but of those that may not be dropped."""
        freed = left = 0
        for _ in range(_DROP_ATTEMPTS):
            left = 0
            async for blocks in self._walk(is_wanted):
                pairs = [(each.number, each.block) for each in blocks if may_drop(each.object_id)]
                gone = await self._disk_space.drop(pairs)
                freed += gone
                left += sum(each.row.size for each in blocks) - gone
            if not left:
                break
        await self._empty_buffers(is_wanted)
        return EvictResult(freed, left)

    async def cached(self, is_wanted: IsWanted) -> set[ObjectId]:
        """Return the versions of wanted keys of which something is on the disk."""
        return {each.object_id async for blocks in self._walk(is_wanted) for each in blocks}

    async def _empty_buffers(self, is_wanted: IsWanted) -> None:
        """Let go what is in memory of dropped objects, but what somebody is about to read."""
        for place, entry in enumerate(list(self._table.objects.values())):
            if place % _OBJECTS_BETWEEN_CHECKPOINTS == 0:
                await trio.lowlevel.checkpoint()
            if not is_wanted(entry.object_id.key):
                continue
            for chunk in list(entry.chunks.values()):
                for buffer in list(chunk.buffers):
                    if not buffer.busy and not chunk.readers and buffer.chunk is chunk:
                        self._buffer_pool.release(buffer)

    # ---- checking

    async def scrub(self, is_wanted: IsWanted) -> AsyncGenerator[ScrubResult, None]:
        """Read all blocks of wanted objects, drop those that are damaged, and rest as long as reading took."""
        buffer = memoryview(mmap.mmap(-1, BLOCK_BYTES))  # aligned, as direct I/O wants it
        async for blocks in self._walk(is_wanted):
            while blocks:
                began = trio.current_time()
                count, nbytes = _piece_of(blocks)
                piece, blocks = blocks[:count], blocks[count:]
                damaged = []
                for block in await self._offload.disk(self._bad_blocks, piece, buffer):
                    if await self._drop_if_still_bad(block, buffer):
                        damaged.append(block)
                yield ScrubResult(
                    count,
                    nbytes,
                    tuple(dict.fromkeys(block.object_id for block in damaged)),
                    sum(block.row.size for block in damaged),
                )
                await trio.sleep(trio.current_time() - began)

    async def _drop_if_still_bad(self, block: CachedBlock, buffer: memoryview) -> bool:
        """Look again, as the block may have been evicted while it was read; return whether it is damaged."""
        async with self._table.rows_lock:
            rows = await self._offload.rows(
                self._index.block_rows, block.number, block.block, block.block + 1
            )
        row = rows.get(block.block)
        if row is None:
            return False
        again = CachedBlock(block.object_id, block.object_size, block.number, block.block, row)
        if not await self._offload.disk(self._bad_blocks, [again], buffer):
            return False
        for _ in range(_DROP_ATTEMPTS):
            if await self._disk_space.drop([(block.number, block.block)]):
                break
            await trio.sleep(_PUMP_SECONDS)
        self._table.count_damaged(block.object_id.key, row.mask.bit_count())
        return True

    def _bad_blocks(self, blocks: list[CachedBlock], buffer: memoryview) -> list[CachedBlock]:
        """Run in a thread: return the blocks of which a granule is not what its checksum says, or not there."""
        return [block for block in blocks if not self._is_good(block, buffer)]

    def _is_good(self, block: CachedBlock, buffer: memoryview) -> bool:
        base = block.block * BLOCK_BYTES
        length = min(BLOCK_BYTES, block.object_size - base)
        for first, stop in runs(block.row.mask):
            start, end = first * GRANULE_BYTES, min(stop * GRANULE_BYTES, length)
            checksums = block.row.checksums[first * CHECKSUM_BYTES : stop * CHECKSUM_BYTES]
            try:
                if self._files.load(block.number, base + start, buffer, end - start, checksums):
                    return False
            except LocalDiskError:
                return False
        return True

    # ---- private

    async def _walk(self, is_wanted: IsWanted) -> AsyncIterator[list[CachedBlock]]:
        """Yield what the index knows of wanted objects, in bounded portions."""
        await self._table.flush_rows()
        place: ScanCursor | None = ScanCursor()
        look = partial(self._index.walk, most_objects=_OBJECTS_A_LOOK, most_blocks=_BLOCKS_A_LOOK)
        while place is not None:
            async with self._table.rows_lock:
                blocks, place = await self._offload.rows(look, place, is_wanted)
            if blocks:
                yield blocks


def _piece_of(blocks: list[CachedBlock]) -> tuple[int, int]:
    """Return how many of the blocks are read in one go, at least one, and their bytes."""
    nbytes = 0
    for count, block in enumerate(blocks):
        if count and nbytes + block.row.size > _BYTES_A_CHECK:
            return count, nbytes
        nbytes += block.row.size
    return len(blocks), nbytes
