"""Maintenance of the disk cache by name: fill chunks, evict objects, scrub cached blocks.

Used on the trio loop. Calls that may block go through `offload`, in pieces whose size does not grow with the cache.

Invariants:
1. Blocks fetched by a warm-up are not evicted for other cache blocks while that warm-up runs (`WarmedFiles`).
2. Only clean blocks are evicted: bytes that the bucket lacks are in staging files, not here.
"""

import mmap
from collections.abc import AsyncGenerator, Callable
from contextlib import AbstractContextManager, aclosing
from dataclasses import dataclass
from functools import partial

import trio

from fusecache.disk.cache_files import CHECKSUM_BYTES, CacheFiles
from fusecache.engine.cache.block_table import STAMP_STEP, BlockTable
from fusecache.engine.cache.buffer_pool import BufferPool
from fusecache.engine.cache.chunks import Buffer, CachedObject, Chunk, FetchSource
from fusecache.engine.cache.evictor import DiskSpace, WarmedFiles
from fusecache.engine.cache.fetcher import Fetcher
from fusecache.engine.runtime.offload import Offload
from fusecache.index.cache_index import CachedBlock, CacheIndex, ScanCursor
from fusecache.model.errors import LocalDiskError, NoSpace
from fusecache.model.objects import BLOCK_BYTES, GRANULE_BYTES, GRANULES_PER_BLOCK, MIB, ObjectId
from fusecache.policy.cache.fetch_order import Cause
from fusecache.policy.cache.granules import CHUNK_BYTES, full_mask, mask_between, runs

# One scan of the index takes a few ms in a thread. Row lookups of readers wait for it, and the loop shares the GIL.
_OBJECTS_PER_SCAN = 2048
_BLOCKS_PER_SCAN = 256
# One piece of a scrub: some 10 ms of a disk, then a pause of the same length.
_BYTES_PER_PIECE = 8 * MIB
_FILL_ATTEMPTS = 3
_DROP_ATTEMPTS = 3
# Buffers become available for hints with time, which sends no event: pump again every 0.5 s.
_PUMP_SECONDS = 0.5
_OBJECTS_BETWEEN_CHECKPOINTS = 256
# An open waits no longer for the checksums of a file. At 1 GB/s it is enough for most shards.
MAX_VERIFY_SECONDS = 1.0
# A program that asks for a file can read it in the other way at once.
_HAND_OUT_SECONDS = 0.3
# More at once would take the disk from readers.
_VERIFY_AT_ONCE = 2
# The end of a mapping sends no event.
_IN_USE_SECONDS = 1.0
# The same for files that programs were given: a look at 1 000 files takes some 10 ms.
HANDED_OUT_SECONDS = 2.0
# Of the disk limit, what programs may hold. Staging files take 70 % at most, and other files must find space.
_HELD_SHARE = 0.25

IsWanted = Callable[[str], bool]


@dataclass(frozen=True, slots=True)
class EvictResult:
    """freed_bytes: evicted from the disk; left_bytes: not evicted, because in use or not allowed to."""

    freed_bytes: int
    left_bytes: int


@dataclass(frozen=True, slots=True)
class ScrubResult:
    """The result of one piece of a scrub: what was read, and the objects and bytes of its damaged blocks."""

    blocks: int
    bytes: int
    damaged: tuple[ObjectId, ...]
    damaged_bytes: int


@dataclass(frozen=True, eq=False, slots=True)
class WholeFile:
    """A held cache file with all bytes of an object and no others. fd: open for reading; the caller closes it."""

    entry: CachedObject
    number: int
    fd: int


@dataclass(eq=False, repr=False)
class CacheMaintenance:
    """Fills, evicts and scrubs cached blocks; holds whole files that programs read by themselves."""

    _offload: Offload
    _files: CacheFiles
    _index: CacheIndex
    _table: BlockTable
    _disk_space: DiskSpace
    _fetcher: Fetcher
    _buffer_pool: BufferPool
    _warmed: WarmedFiles

    def __post_init__(self) -> None:
        # Most chunks in flight at once: three quarters of the buffers are left to readers.
        self.large_at_once = max(1, self._buffer_pool.large_count // 4)
        # Opens of files that the kernel reads by itself, until their close; counted by the caller. A mapping may
        # outlive that: see `_release`.
        self.passed_through_opens = 0
        self._verifying: dict[int, trio.Event] = {}
        self._verifiers = trio.CapacityLimiter(_VERIFY_AT_ONCE)
        self._found: dict[int, int] = {}
        self._to_release: list[int] = []
        # Bytes of the held files, by number, and of all of them.
        self._held_sizes: dict[int, int] = {}
        self._held_bytes = 0
        # The files that programs were given, by number.
        self._handed_out: dict[int, WholeFile] = {}

    # ---- fill

    def protect_warmed(self) -> AbstractContextManager[set[int]]:
        """Yield a set for file numbers. No other cache block evicts the blocks of these files."""
        return self._warmed.protect()

    def free_space_bytes(self) -> int:
        """Return how many bytes the cache could hold if all its blocks were evicted."""
        return self._disk_space.clean_limit_bytes()

    async def fill(
        self,
        entry: CachedObject,
        index: int,
        *,
        mask: int | None = None,
        cause: Cause = Cause.HINT,
        depth: int = 0,
        attempts: int = _FILL_ATTEMPTS,
        most_bytes: int = CHUNK_BYTES,
        for_peer: bool = False,
    ) -> None:
        """Fetch a chunk, or the granules of `mask`, to disk.

        cause: HINT, after the fetches that readers wait for; DEMAND, among them. most_bytes: of one GET. for_peer: as
        for `Fetcher.request`.
        The caller keeps the object in memory. Raises the fetch's error; NoSpace if it was fetched and not stored.
        """
        chunk = await self._table.loaded_chunk(entry, index)
        chunk.readers += 1
        try:
            full = full_mask(chunk.size) if mask is None else mask
            for _ in range(attempts):
                if not full & ~chunk.present:
                    return
                await self._store_buffers(chunk, full & ~chunk.present)
                self._fetcher.request(
                    chunk,
                    full & ~chunk.present,
                    cause,
                    depth=depth,
                    most_bytes=most_bytes,
                    for_peer=for_peer,
                )
                await self._fetch(chunk, full & ~chunk.present)
            # Granules that other callers fetched during this are not stored by them if the disk is slow.
            await self._store_buffers(chunk, full & ~chunk.present)
            if full & ~chunk.present:
                raise NoSpace(
                    "fetched, but not cached: the cache has no space or its disk fails; see `fusecache status`"
                )
        finally:
            chunk.readers -= 1
            for buffer in chunk.buffers:
                # Recycled first: a later reader finds these bytes on disk.
                self._buffer_pool.mark_consumed(buffer)
            self._table.drop_if_idle(chunk)

    async def _store_buffers(self, chunk: Chunk, missing: int) -> None:
        """Store missing granules that are in memory."""
        pending = chunk.pending()
        for buffer in list(chunk.buffers):
            if buffer.chunk is not chunk:  # it was given away while another one was stored
                continue
            self._buffer_pool.acquire_use(buffer)
            try:
                for first, stop in runs(buffer.valid & missing & ~pending):
                    await self._fetcher.disk.store(chunk, buffer, first, stop)
            finally:
                self._buffer_pool.release_use(buffer, trio.current_time())

    def on_in_kernel(self, entry: CachedObject, index: int) -> None:
        """The kernel has all of a chunk: free its buffers. A fetch would take one that the kernel has yet to read."""
        self._release_buffers(entry, index)
        self._fetcher.pump()

    def _release_buffers(self, entry: CachedObject, index: int) -> None:
        """Release the buffers of a chunk, except those in use or about to be read."""
        chunk = entry.chunks.get(index)
        if chunk is None or chunk.readers:
            return
        for buffer in list(chunk.buffers):
            if not buffer.busy:
                self._buffer_pool.release(buffer)

    async def missing(self, entry: CachedObject, index: int, mask: int) -> int:
        """Return granules of a chunk that are neither on disk nor in flight. The caller keeps the object in memory."""
        chunk = await self._table.loaded_chunk(entry, index)
        found = mask & full_mask(chunk.size) & ~chunk.present & ~chunk.pending()
        self._table.drop_if_idle(chunk)
        return found

    async def evict_for(self, nbytes: int, incoming_use: float) -> bool:
        """Evict blocks read later than `nbytes` that will come soon; False if those would not be stored."""
        return self._table.accepts_blocks and await self._disk_space.evict_for(nbytes, incoming_use)

    def free_bytes(self) -> int:
        """Return how many bytes may be fetched without an eviction."""
        return self._disk_space.free_bytes() if self._table.accepts_blocks else 0

    async def _fetch(self, chunk: Chunk, missing: int) -> None:
        """Wait until the fetches of these granules have ended, and their bytes are on disk. Raises their error."""
        self._fetcher.pump()
        fetches = [
            fetch for fetch in chunk.fetches if fetch.source is not FetchSource.DISK and fetch.mask & missing
        ]
        # Attach all events before the first wait: the second fetch may end during the wait for the first.
        events = [trio.Event() if fetch.kept is None else fetch.kept for fetch in fetches]
        for fetch, kept in zip(fetches, events, strict=True):
            fetch.kept = kept
        for fetch, kept in zip(fetches, events, strict=True):
            while not kept.is_set():
                with trio.move_on_after(_PUMP_SECONDS):
                    await kept.wait()
                self._fetcher.pump()
            if fetch.error is not None:
                # Each caller gets its own instance: a shared one would collect all their tracebacks.
                raise type(fetch.error)(*fetch.error.args) from fetch.error

    # ---- evict

    async def evict(self, is_wanted: IsWanted, *, may_drop: Callable[[ObjectId], bool]) -> EvictResult:
        """Evict the blocks of all objects whose key is wanted, except objects that `may_drop` refuses."""
        freed = left = 0
        for _ in range(_DROP_ATTEMPTS):
            left = 0
            async with aclosing(self._scan(is_wanted)) as scanned:
                async for blocks in scanned:
                    pairs = [(each.number, each.block) for each in blocks if may_drop(each.object_id)]
                    gone = await self._disk_space.evictor.drop(pairs)
                    freed += gone
                    left += sum(each.row.size for each in blocks) - gone
            if not left:
                break
        await self._empty_buffers(is_wanted)
        return EvictResult(freed, left)

    async def cached(self, is_wanted: IsWanted) -> set[ObjectId]:
        """Return the object versions of wanted keys that have a cached block."""
        return {each.object_id async for blocks in self._scan(is_wanted) for each in blocks}

    async def _empty_buffers(self, is_wanted: IsWanted) -> None:
        """Release the buffers of wanted objects, except those in use or about to be read."""
        for position, entry in enumerate(list(self._table.objects.values())):
            if position % _OBJECTS_BETWEEN_CHECKPOINTS == 0:
                await trio.lowlevel.checkpoint()
            if not is_wanted(entry.object_id.key):
                continue
            for index in list(entry.chunks):
                self._release_buffers(entry, index)

    # ---- scrub

    async def scrub(self, is_wanted: IsWanted) -> AsyncGenerator[ScrubResult, None]:
        """Read all blocks of wanted objects and drop damaged ones. Pauses after each piece as long as it took."""
        buffer = memoryview(mmap.mmap(-1, BLOCK_BYTES))  # aligned, as direct I/O wants it
        async for blocks in self._scan(is_wanted):
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
        """Read a block again, as it may have been evicted during the first read. Return whether it is damaged."""
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
        # Of a held file the block stays: a program that asks for the file next must not get it.
        self._table.count_damaged(block.object_id.key, row.mask.bit_count())
        self._table.intact.pop(block.number, None)
        for _ in range(_DROP_ATTEMPTS):
            if await self._disk_space.evictor.drop([(block.number, block.block)]):
                break
            await trio.sleep(_PUMP_SECONDS)
        return True

    def _bad_blocks(self, blocks: list[CachedBlock], buffer: memoryview) -> list[CachedBlock]:
        """Run in a thread: return the blocks with a granule that is missing or does not match its checksum."""
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

    # ---- files that programs read by themselves

    def open_probe(self) -> int:
        """Return a descriptor of a file where `hold_whole` has its own, as `CacheFiles.open_probe` does. Blocks."""
        return self._files.open_probe()

    async def hold_whole(
        self, object_id: ObjectId, size: int, *, wait_seconds: float = MAX_VERIFY_SECONDS
    ) -> "WholeFile | None":
        """Return the file of an object that is on disk as a whole, and intact. It is held until `release_whole`.

        At its first call in a run, the file is read. None, and nothing is held, if that takes longer than
        `wait_seconds`: it goes on, for the next call. None too if held files would take more than a quarter of the disk
        limit.
        """
        table = self._table
        entry = table.object_entry(object_id, size)
        entry.handles += 1
        whole: WholeFile | None = None
        try:
            await table.load_object_now(entry)
            number = entry.number
            if number is None or entry.blocks != -(-size // BLOCK_BYTES):
                return None
            async with table.rows_lock:  # an eviction chooses and removes blocks under it
                if entry.number != number or not self._may_hold(number, size):
                    return None
                self._hold(number, size)
            try:
                if await self._is_intact(entry, number, wait_seconds):
                    fd = await self._offload.disk(self._files.open_whole, number, size)
                    whole = None if fd is None else WholeFile(entry, number, fd)
            finally:
                if whole is None:
                    self._end_hold(number)
        except LocalDiskError as exc:
            table.count_disk_error(exc)
        finally:
            if whole is None:
                self._table.close_object(entry)
        return whole

    def release_whole(self, whole: "WholeFile") -> None:
        """Release a file, once no open file or mapping of any program refers to it."""
        self._table.tasks.start_soon("cache-release", self._release, whole.number, whole.entry)

    async def hand_out(self, object_id: ObjectId, size: int) -> int | None:
        """Return a descriptor of a file as `hold_whole` does, which the caller gives to a program, and closes.

        The file is held until no program has it open or mapped.
        """
        whole = await self.hold_whole(object_id, size, wait_seconds=_HAND_OUT_SECONDS)
        if whole is None:
            return None
        if whole.number in self._handed_out:
            self.release_whole(whole)
        else:
            self._handed_out[whole.number] = whole
            if len(self._handed_out) == 1:
                self._table.tasks.start_soon("cache-handed-out", self._watch_handed_out)
        return whole.fd

    @property
    def handed_out_files(self) -> int:
        """How many files programs were given, and still have, as far as is known."""
        return len(self._handed_out)

    async def _watch_handed_out(self) -> None:
        while self._handed_out:
            await trio.sleep(HANDED_OUT_SECONDS)
            for number in await self._offload.disk(self._unused, list(self._handed_out)):
                self.release_whole(self._handed_out.pop(number))

    def _unused(self, numbers: list[int]) -> list[int]:
        return [number for number in numbers if not self._is_in_use(number)]

    def _is_in_use(self, number: int) -> bool:
        try:
            return self._files.is_in_use(number)
        except OSError:  # as without a free descriptor: unknown
            return True

    def hold_found(self) -> None:
        """Hold the files that programs still read through an earlier mount. Blocks. Raises LocalDiskError."""
        self._found = self._files.in_use_before()
        for number, size in self._found.items():
            self._hold(number, size)
        self._to_release = list(self._found)

    def release_found(self) -> None:
        """Release these files, as `release_whole` does."""
        while self._to_release:
            self._table.tasks.start_soon("cache-release", self._release, self._to_release.pop())

    async def _release(self, number: int, entry: CachedObject | None = None) -> None:
        # Of a mapping, the kernel tells nothing: a file can be closed, and stay mapped. With another hold, that one's
        # release will look.
        table = self._table
        while table.held[number] == 1 and await self._offload.disk(self._is_in_use, number):  # noqa: ASYNC110
            await trio.sleep(_IN_USE_SECONDS)
        self._unhold(number)
        if entry is not None:
            table.close_object(entry)

    def _end_hold(self, number: int) -> None:
        """End a hold for which no program got the file. One that got it before may have it."""
        if number in self._found or self._files.was_opened(number):
            self._table.tasks.start_soon("cache-release", self._release, number)
        else:
            self._unhold(number)

    def _may_hold(self, number: int, size: int) -> bool:
        most = self._disk_space.usable_bytes() * _HELD_SHARE
        return number in self._held_sizes or self._held_bytes + size <= most

    def _hold(self, number: int, size: int) -> None:
        self._table.held[number] += 1
        if number not in self._held_sizes:
            self._held_sizes[number] = size
            self._held_bytes += size

    def _unhold(self, number: int) -> None:
        self._table.held[number] -= 1
        if not self._table.held[number]:
            del self._table.held[number]
            self._held_bytes -= self._held_sizes.pop(number, 0)

    async def _is_intact(self, entry: CachedObject, number: int, wait_seconds: float) -> bool:
        """Return whether a held file is whole and intact; False too if that is not known in time."""
        used_at = self._table.intact.get(number)
        if used_at is not None and self._table.clock - used_at < STAMP_STEP:
            return True
        done = self._verifying.get(number)
        if done is None:
            done = self._verifying[number] = trio.Event()
            entry.handles += 1
            self._table.held[number] += 1
            self._table.tasks.start_soon("cache-verify", self._verify, entry, number, done)
        with trio.move_on_after(wait_seconds):
            await done.wait()
        return number in self._table.intact

    async def _verify(self, entry: CachedObject, number: int, done: trio.Event) -> None:
        """Mark all of a file as used. Read it too, unless it is known to be intact."""
        chunks = range(-(-entry.size // CHUNK_BYTES))
        damages = self._table.damages
        try:
            for index in chunks:
                chunk = await self._table.loaded_chunk(entry, index)
                if chunk.present != full_mask(chunk.size):
                    return
                self._table.on_use(chunk)
            if number not in self._table.intact:
                async with self._verifiers:
                    buffer = Buffer(memoryview(mmap.mmap(-1, BLOCK_BYTES)), small=False)
                    for index in chunks:
                        chunk = await self._table.loaded_chunk(entry, index)
                        if not await self._is_chunk_intact(chunk, buffer):
                            return
                if damages != self._table.damages:
                    return  # perhaps of this file, behind the place that was being read
            self._table.intact[number] = self._table.clock
        finally:
            del self._verifying[number]
            self._end_hold(number)
            self._table.close_object(entry)
            done.set()

    async def _is_chunk_intact(self, chunk: Chunk, buffer: Buffer) -> bool:
        granules = -(-chunk.size // GRANULE_BYTES)
        for first in range(0, granules, GRANULES_PER_BLOCK):
            buffer.first, stop = first, min(granules, first + GRANULES_PER_BLOCK)
            if await self._fetcher.disk.load(chunk, buffer, first, stop) != mask_between(first, stop):
                return False
        return True

    # ---- private

    async def _scan(self, is_wanted: IsWanted) -> AsyncGenerator[list[CachedBlock], None]:
        """Yield the indexed blocks of wanted objects, in portions of bounded size."""
        await self._table.flush_rows()
        position: ScanCursor | None = ScanCursor()
        scan = partial(self._index.walk, most_objects=_OBJECTS_PER_SCAN, most_blocks=_BLOCKS_PER_SCAN)
        while position is not None:
            async with self._table.rows_lock:
                blocks, position = await self._offload.rows(scan, position, is_wanted)
            if blocks:
                yield blocks


def _piece_of(blocks: list[CachedBlock]) -> tuple[int, int]:
    """Return how many of the blocks make one piece, at least one, and their bytes."""
    nbytes = 0
    for count, block in enumerate(blocks):
        if count and nbytes + block.row.size > _BYTES_PER_PIECE:
            return count, nbytes
        nbytes += block.row.size
    return len(blocks), nbytes
