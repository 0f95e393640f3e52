"""The read path: a bounded pool of buffers before a local block cache before the bucket.

What callers see; the work is done by `Fetcher` (requests into buffers), `Keeper` (what is on disk) and the
pure functions of `policy.readahead`.

Invariants:
1. Replies are views of pool buffers; one buffer is not reused before its reader's next checkpoint.
2. Memory is bounded: by the pool, by the chunks of open objects, by rows that are at most a second old.
3. A reader that is cancelled breaks no fetch.
"""

import logging
from dataclasses import dataclass, field
from pathlib import Path

import trio

from fusecache.disk.buffers import BufferPool
from fusecache.disk.cache_files import CacheFiles, delete_tree
from fusecache.engine.cache_statistics import CacheStatistics, Counters
from fusecache.engine.cache_table import CacheTable
from fusecache.engine.fetcher import Fetcher, SupportsGet
from fusecache.engine.frames import Frames
from fusecache.engine.keeper import Keeper
from fusecache.engine.offload import Offload
from fusecache.engine.residents import CachedObject, Chunk, Frame
from fusecache.engine.room import Room
from fusecache.index.cache_index import CacheIndex, read_boot_id
from fusecache.model.nouns import GIB, GRANULE_BYTES, MIB, Extent, ObjectId
from fusecache.policy.fetch_order import Cause
from fusecache.policy.granules import CHUNK_BYTES, mask_of_bytes, split_by_chunk
from fusecache.policy.ledger import Ledger
from fusecache.policy.readahead import (
    Pattern,
    Phase,
    ahead,
    demand_stop,
    fair_bound_bytes,
    grow,
    observe,
)

log = logging.getLogger(__name__)

INDEX_SECONDS = 1.0
# Some 2 KiB each, and 8 MiB of an object: 64 GiB of objects stay known without a look into the index.
CHUNKS_IN_MEMORY = 8192
# A handle that has not read for this long leaves its share of the buffers to the others.
STREAM_IDLE_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class CacheOptions:
    """Where the cache is and how much it may take. Sizes in bytes.

    buffer_bytes: memory of the daemon's read path, at least 24 MiB; more buffers, more requests in flight.
    connections: most GETs in flight; 16 to 32 saturate a node's link to a distant bucket at 80 MB/s each.
    free_space_floor_bytes: left free on the file system whatever the limit says.
    """

    directory: Path
    limit_bytes: int
    buffer_bytes: int = 512 * MIB
    connections: int = 32
    free_space_floor_bytes: int = GIB
    boot_id: str = field(default_factory=read_boot_id)

    def __post_init__(self) -> None:
        if self.limit_bytes <= 0 or self.connections < 1 or self.free_space_floor_bytes < 0:
            raise ValueError(f"sizes and connections must be positive: {self}")


@dataclass(eq=False, slots=True)
class ReadHandle:
    """One open file: an object version and what this reader's reads look like so far."""

    entry: CachedObject
    pattern: Pattern = field(default_factory=Pattern)
    ahead_until: int = 0
    read_at: float = 0.0

    @property
    def object_id(self) -> ObjectId:
        """The version that it reads."""
        return self.entry.object_id

    @property
    def size(self) -> int:
        """The object's size in bytes."""
        return self.entry.size


class BlockCache:
    """Reads of immutable objects, and the account of the node's disk. Runs on the trio loop."""

    def __init__(self, store: SupportsGet, offload: Offload, options: CacheOptions) -> None:
        """Open the cache directory (blocking, O(1) in its size). Raises StateError, LocalDiskError."""
        directory = options.directory
        directory.mkdir(parents=True, exist_ok=True)
        files_directory = directory / "files"
        self._options = options
        self._offload = offload
        self._counters = Counters()
        self._index = CacheIndex(directory / "index", boot_id=options.boot_id, described=[files_directory])
        self._files = CacheFiles(files_directory)
        ledger = Ledger(options.limit_bytes)
        ledger.restore_cache(self._index.used_bytes())
        self._table = CacheTable(offload, self._index, self._counters, limit_bytes=options.limit_bytes)
        self._room = Room(
            offload,
            self._files,
            self._index,
            self._table,
            ledger,
            self._counters,
            floor_bytes=options.free_space_floor_bytes,
        )
        self._keeper = Keeper(offload, self._files, self._index, self._table, self._room, self._counters)
        self._frames = Frames(BufferPool(options.buffer_bytes), self._table.drop_if_idle)
        self._fetcher = Fetcher(store, offload, self._frames, self._counters, connections=options.connections)
        self._fetcher.disk = self._keeper
        self._streams: set[ReadHandle] = set()
        self._nursery: trio.Nursery | None = None

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Own the cache's tasks until cancelled; then write the index's rows and its clean mark."""
        try:
            async with trio.open_nursery() as nursery:
                self._nursery = self._fetcher.nursery = self._table.nursery = nursery
                nursery.start_soon(self._write_index, name="cache-index")
                nursery.start_soon(self._clean_up_after_last_run, name="cache-clean-up")
                task_status.started()
                await trio.sleep_forever()
        finally:
            self._nursery = None
            self._table.close()

    def open(self, object_id: ObjectId, size: int) -> ReadHandle:
        """Return a new handle on an object version of `size` bytes. Does no I/O."""
        entry = self._entry(object_id, size)
        entry.handles += 1
        return ReadHandle(entry)

    def close(self, handle: ReadHandle) -> None:
        """End a handle: its read-ahead stops, its object leaves memory when its buffers do."""
        entry = handle.entry
        self._streams.discard(handle)
        entry.handles -= 1
        chunks = list(entry.chunks.values())
        if handle.ahead_until:
            self._fetcher.cancel_readahead(handle, chunks)
        if not entry.handles:
            for chunk in chunks:
                self._table.drop_if_idle(chunk)
            self._table.drop_object_if_idle(entry)

    async def read(self, handle: ReadHandle, offset: int, length: int) -> memoryview | bytes:
        """Return bytes [offset, offset + length), clamped to the object's size; empty at its end.

        A returned memoryview is valid until the caller's next checkpoint.
        Raises ObjectChanged, ObjectMissing, AccessDenied, or Unavailable after a minute of trying.
        """
        stop = min(offset + length, handle.entry.size)
        if offset >= stop:
            return b""
        began = trio.current_time()
        self._observe(handle, offset, stop, began)
        data: memoryview | bytes | None = self._read_nowait(handle, offset, stop, began)
        if data is not None:
            self._counters.hits += 1
            self._read_ahead(handle)
        else:
            data = await self._read_slowly(handle, offset, stop)
        self._counters.bytes_read += len(data)
        self._counters.count_latency(trio.current_time() - began)
        return data

    # ---- the disk's account, for the write path

    async def reserve_staging(self, nbytes: int) -> None:
        """Reserve room for staging files, evicting clean blocks if needed. Raises NoSpace."""
        await self._room.reserve_staging(nbytes)

    def reserve_staging_nowait(self, nbytes: int) -> bool:
        """Reserve room for staging files if there is enough right now."""
        return self._room.reserve_staging_nowait(nbytes)

    def restore_staging(self, nbytes: int) -> None:
        """Account for staging files found at start, which exist whether or not they fit."""
        self._room.ledger.restore_staging(nbytes)

    def release_staging(self, nbytes: int) -> None:
        """Give reserved room back."""
        self._room.ledger.release_staging(nbytes)

    async def adopt(self, object_id: ObjectId, size: int, path: Path, granule_checksums: bytes) -> None:
        """Make a staging file whose bytes the bucket has a cache file; its reservation of `size` moves with
        it.

        granule_checksums: xxh3_64, 8 bytes little-endian, of each 64 KiB. A file that cannot be kept is
        removed.
        """
        granules = -(-size // GRANULE_BYTES)
        if len(granule_checksums) != granules * 8:
            raise ValueError(f"{granules} granules need {granules * 8} bytes, not {len(granule_checksums)}")
        await self._keeper.adopt(self._entry(object_id, size), path, granule_checksums)

    async def forget(self, object_id: ObjectId) -> None:
        """Drop all blocks of an object version."""
        await self._keeper.forget(object_id)

    def statistics(self) -> CacheStatistics:
        """Return the counters of this moment."""
        counters, ledger = self._counters, self._room.ledger
        return CacheStatistics(
            hits=counters.hits,
            misses=counters.misses,
            requests=counters.requests,
            bytes_by_cause={
                cause.name.lower(): counters.bytes_by_cause[cause.name.lower()] for cause in Cause
            },
            bytes_read=counters.bytes_read,
            wait_seconds=dict(counters.wait_seconds),
            evicted_blocks=counters.evicted_blocks,
            evicted_bytes=counters.evicted_bytes,
            used_bytes=ledger.cache_bytes,
            reserved_bytes=ledger.reserved_bytes,
            staging_bytes=ledger.staging_bytes,
            limit_bytes=ledger.limit_bytes,
            buffers=self._frames.large_count + self._frames.small_count,
            buffers_in_use=self._frames.in_use,
            errors=counters.errors,
            disk_errors=counters.disk_errors,
            checksum_failures=counters.checksum_failures,
            uncached=counters.uncached,
            not_admitted=counters.not_admitted,
            latency_p50_seconds=counters.latency_seconds(0.5),
            latency_p99_seconds=counters.latency_seconds(0.99),
        )

    # ---- one read

    def _entry(self, object_id: ObjectId, size: int) -> CachedObject:
        entry = self._table.objects.get(object_id)
        if entry is None:
            entry = self._table.objects[object_id] = CachedObject(object_id, size)
        elif entry.size != size:
            raise ValueError(f"{object_id} has {entry.size} bytes, not {size}")
        return entry

    def _observe(self, handle: ReadHandle, start: int, stop: int, now: float) -> None:
        """Let the read change the handle's pattern."""
        handle.pattern = observe(handle.pattern, start, stop)
        handle.read_at = now
        if handle.pattern.phase is Phase.RANDOM and handle.ahead_until:
            self._fetcher.cancel_readahead(handle, list(handle.entry.chunks.values()))
            handle.ahead_until = 0
            self._streams.discard(handle)

    def _read_nowait(self, handle: ReadHandle, start: int, stop: int, now: float) -> memoryview | None:
        """Answer out of one frame, if one holds it all."""
        index = start // CHUNK_BYTES
        base = index * CHUNK_BYTES
        chunk = handle.entry.chunks.get(index)
        if chunk is None or stop > base + CHUNK_BYTES:
            return None
        if chunk.requests:
            chunk.in_memory()
        frame = chunk.frame_with(mask_of_bytes(start - base, stop - base))
        if frame is None:
            return None
        self._note_read(handle, chunk, frame, stop - base, now)
        return frame.view(start - base, stop - base)

    def _note_read(self, handle: ReadHandle, chunk: Chunk, frame: Frame, stop: int, now: float) -> None:
        self._table.note_use(chunk)
        self._frames.touch(frame, now)
        if stop == chunk.size and handle.pattern.phase is Phase.SEQUENTIAL:
            self._frames.consume(frame)

    async def _read_slowly(self, handle: ReadHandle, start: int, stop: int) -> memoryview | bytes:
        """Ask for what is missing, read ahead, wait."""
        handle.pattern = grow(handle.pattern)
        pieces = split_by_chunk(Extent(start, stop))
        from_network = False
        for index, first, last in pieces:
            chunk = await self._chunk(handle.entry, index)
            from_network |= bool(mask_of_bytes(first, last) & ~chunk.in_memory() & ~chunk.present)
        # All is asked for before any of it is waited for.
        fetch_stop = demand_stop(handle.pattern, start, stop, handle.entry.size)
        for index, first, last in split_by_chunk(Extent(start, fetch_stop)):
            chunk = await self._chunk(handle.entry, index)
            self._fetcher.request(chunk, mask_of_bytes(first, last), Cause.DEMAND, handle=handle)
        self._read_ahead(handle)
        self._fetcher.pump()
        self._counters.misses += from_network
        self._counters.hits += not from_network
        if len(pieces) == 1:
            index, first, last = pieces[0]
            return await self._piece(handle, index, first, last)
        # One chunk pinned at a time: readers that held one and waited for another could block each other
        # for ever.
        parts = bytearray()
        for index, first, last in pieces:
            parts += await self._piece(handle, index, first, last)
        return memoryview(parts)

    async def _piece(self, handle: ReadHandle, index: int, start: int, stop: int) -> memoryview:
        """Return bytes [start, stop) of one chunk, waiting as long as it takes."""
        need = mask_of_bytes(start, stop)
        chunk = await self._chunk(handle.entry, index)
        chunk.pins += 1
        try:
            while need & ~chunk.in_memory():
                self._fetcher.request(chunk, need, Cause.DEMAND, handle=handle)
                self._fetcher.pump()
                await self._fetcher.wait_for(chunk, need)
            frame = chunk.frame_with(need)
            now = trio.current_time()
            if frame is not None:
                self._note_read(handle, chunk, frame, stop, now)
                return frame.view(start, stop)
            return memoryview(_joined(chunk, start, stop))
        finally:
            chunk.pins -= 1

    async def _chunk(self, entry: CachedObject, index: int) -> Chunk:
        """Return a chunk with its rows loaded."""
        while True:
            await self._table.load_object_now(entry)
            chunk = self._table.new_chunk(entry, index)
            if chunk.loaded:
                return chunk
            await self._table.load_chunk(chunk)

    def _read_ahead(self, handle: ReadHandle) -> None:
        """Ask for what a sequential reader will want next, within its window and its share of buffers."""
        if handle.pattern.phase is not Phase.SEQUENTIAL:
            return
        self._streams.add(handle)
        bound = fair_bound_bytes(self._frames.large_count, len(self._streams))
        extent = ahead(handle.pattern, handle.entry.size, bound)
        if extent is None or extent.stop <= handle.ahead_until:
            return
        start = max(extent.start, handle.ahead_until)
        handle.ahead_until = extent.stop
        here = handle.pattern.position // CHUNK_BYTES
        pieces = split_by_chunk(Extent(start, extent.stop))
        unloaded = []
        for index, first, last in pieces:
            chunk = self._table.new_chunk(handle.entry, index)
            if chunk.loaded:
                self._fetcher.request(
                    chunk, mask_of_bytes(first, last), Cause.READAHEAD, depth=index - here, handle=handle
                )
            else:
                unloaded.append((chunk, mask_of_bytes(first, last), index - here))
        if unloaded and self._nursery is not None:
            self._nursery.start_soon(self._read_ahead_unloaded, handle, unloaded, name="read-ahead-rows")
        self._fetcher.pump()

    async def _read_ahead_unloaded(self, handle: ReadHandle, pieces: list[tuple[Chunk, int, int]]) -> None:
        """Load the rows of chunks, then read them ahead."""
        for chunk, mask, depth in pieces:
            if handle not in self._streams:
                return  # closed, or random by now
            await self._table.load_chunk(chunk)
            if handle not in self._streams or chunk.owner.chunks.get(chunk.index) is not chunk:
                return
            self._fetcher.request(chunk, mask, Cause.READAHEAD, depth=depth, handle=handle)
            self._fetcher.pump()

    # ---- tasks

    async def _write_index(self) -> None:
        """Write rows and look at the disk once a second."""
        while True:
            await trio.sleep(INDEX_SECONDS)
            await self._table.flush_rows()
            await self._room.measure_free_space()
            self._table.trim_chunks(CHUNKS_IN_MEMORY)
            now = trio.current_time()
            self._streams = {handle for handle in self._streams if now - handle.read_at < STREAM_IDLE_SECONDS}

    async def _clean_up_after_last_run(self) -> None:
        """Delete what was discarded at start, and files that no row knows (a kill between file and row)."""
        for folder in self._index.opening.discarded:
            await self._offload.disk(delete_tree, folder)
        if self._index.opening.unclean:
            await self._keeper.delete_orphans()


def _joined(chunk: Chunk, start: int, stop: int) -> bytearray:
    """Copy bytes [start, stop) of a chunk out of several frames."""
    data = bytearray()
    while start < stop:
        end = min(stop, (start // GRANULE_BYTES + 1) * GRANULE_BYTES)
        frame = chunk.frame_of(start // GRANULE_BYTES)
        assert frame is not None, "the caller has seen that every granule is in memory"
        data += frame.view(start, end)
        start = end
    return data
