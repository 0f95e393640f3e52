"""The read path: a bounded pool of buffers, then the block cache on the local disk, then the bucket.

This module is the interface for callers. `Fetcher` fills buffers, `DiskTier` loads and stores cache files,
`DiskSpace` accounts for the disk, and the pure functions of `policy.cache.readahead` decide what to prefetch.

Invariants:
1. A reply is a view of a pool buffer. Nothing is written to it before the reader's next checkpoint, though a fetch may
   have got it.
2. Memory is bounded: by the pool, by the chunks of open objects, and by changed rows that are at most a second old.
3. A cancelled reader does not break a fetch.
"""

import logging
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import trio

from fusecache.disk.cache_files import CacheFiles, Carry, delete_tree
from fusecache.disk.direct_reads import AlignedBuffers
from fusecache.engine.cache.adoption import Adoption, StagedObject
from fusecache.engine.cache.block_table import BlockTable
from fusecache.engine.cache.buffer_pool import BufferPool, LentBuffers
from fusecache.engine.cache.chunks import SMALL_GRANULES, Buffer, CachedObject, Chunk, Fetch, FetchSource
from fusecache.engine.cache.disk_tier import DiskTier
from fusecache.engine.cache.evictor import DiskSpace, Evictor, ReadHints, WarmedFiles
from fusecache.engine.cache.fetcher import Fetcher
from fusecache.engine.cache.maintenance import CacheMaintenance
from fusecache.engine.cache.pieces import HeldPieces
from fusecache.engine.cache.range_cache import RangeCache
from fusecache.engine.cache.readahead import Readahead, ReadStream
from fusecache.engine.cache.statistics import CacheStatistics, Counters, ReadSource
from fusecache.engine.runtime.offload import Offload
from fusecache.engine.runtime.supervisor import Supervisor, TaskNursery
from fusecache.index.cache_index import CacheIndex, ObjectRow, read_boot_id
from fusecache.model.objects import GIB, GRANULE_BYTES, MIB, Extent, ObjectId
from fusecache.policy.backoff import PATIENCE_SECONDS, Pace, RequestLimit
from fusecache.policy.cache.fetch_order import Cause
from fusecache.policy.cache.granules import CHUNK_BYTES, mask_between, mask_of_bytes, split_by_chunk
from fusecache.policy.cache.readahead import Phase, demand_stop, grow, request_bytes, side_stream
from fusecache.policy.cache.space_ledger import SpaceLedger
from fusecache.policy.name_patterns import PinnedKeys
from fusecache.remote.store import Peers, ReadStore

log = logging.getLogger(__name__)

INDEX_SECONDS = 1.0
# Free space left for the journal, the logs and other programs of the node.
FREE_SPACE_FLOOR_BYTES = GIB
# Some 2 KiB each. They describe 64 GiB of objects, which are read without a lookup in the index.
CHUNKS_IN_MEMORY = 8192


@dataclass(frozen=True, slots=True)
class CacheOptions:
    """Where the cache is and how much it may take. Sizes in bytes.

    buffer_bytes: memory of the daemon's read path, at least 24 MiB. More buffers allow more requests in flight.
    are_buffers_shared: other processes copy replies out of them (`LentBuffers`). carry: may have them store buffers.
    connections: most GETs in flight. 16 to 32 saturate a node's link to a distant bucket at 80 MB/s each. Random reads
    of many threads use more: 64 threads read 1.4 times as much with 64 connections as with 32.
    free_space_floor_bytes: left free on the file system, even if the limit allows more.
    write_reserve_bytes: part of the staging space, kept free for accepted writes that are still in the kernel.
    """

    directory: Path
    limit_bytes: int
    buffer_bytes: int = 512 * MIB
    are_buffers_shared: bool = False
    carry: Carry = lambda *_: None
    connections: int = 64
    download_rate: float | None = None
    patience_seconds: float = PATIENCE_SECONDS
    free_space_floor_bytes: int = FREE_SPACE_FLOOR_BYTES
    write_reserve_bytes: int = 0
    boot_id: str = field(default_factory=read_boot_id)

    def __post_init__(self) -> None:
        if self.limit_bytes <= 0 or self.connections < 1 or self.free_space_floor_bytes < 0:
            raise ValueError(f"cache options: sizes and connections must be positive: {self}")


@dataclass(eq=False, slots=True)
class ReadHandle:
    """One open file: an object version and its streams of reads, the last used first."""

    entry: CachedObject
    streams: list[ReadStream] = field(default_factory=list)

    @property
    def object_id(self) -> ObjectId:
        """The object version that it reads."""
        return self.entry.object_id

    @property
    def size(self) -> int:
        """The object's size in bytes."""
        return self.entry.size


class BlockCache:
    """Reads immutable objects and accounts for the node's disk space. Runs on the trio loop."""

    def __init__(
        self,
        store: ReadStore,
        offload: Offload,
        options: CacheOptions,
        supervisor: Supervisor,
        pins: PinnedKeys | None = None,
        peers: Peers | None = None,
    ) -> None:
        """Open the cache directory (blocking, O(1) in its size). Raises StateError, LocalDiskError."""
        directory = options.directory
        directory.mkdir(parents=True, exist_ok=True)
        files_directory = directory / "files"
        self._options = options
        self._offload = offload
        self._counters = Counters()
        self._pool = _memory_for(options)
        self._index = CacheIndex(directory / "index", boot_id=options.boot_id, described=[files_directory])
        ledger = SpaceLedger(options.limit_bytes, options.write_reserve_bytes)
        try:
            self._files = CacheFiles(files_directory, options.carry)
            ledger.restore_cache(self._index.used_bytes())
        except BaseException:
            self.abandon()
            raise
        self._tasks = tasks = TaskNursery(supervisor)
        self._table = BlockTable(offload, self._index, self._counters, tasks, limit_bytes=options.limit_bytes)
        warmed = WarmedFiles()
        self._disk_space = DiskSpace(
            offload,
            self._files,
            self._index,
            self._table,
            ledger,
            self._counters,
            Evictor(
                offload, self._files, self._index, self._table, ledger, self._counters, warmed, pins, peers
            ),
            floor_bytes=options.free_space_floor_bytes,
        )
        self._disk_tier = DiskTier(
            offload, self._files, self._index, self._table, self._disk_space, self._counters
        )
        self._adoption = Adoption(offload, self._files, self._index, self._table, ledger)
        self._buffer_pool = BufferPool(self._pool, self._table.drop_if_idle)
        # How many requests in flight the bucket accepts, learned from reads; other clients may share it.
        self.request_limit = RequestLimit(
            options.connections, Pace(options.download_rate), options.patience_seconds
        )
        self._fetcher = Fetcher(
            store,
            offload,
            self._buffer_pool,
            self._disk_tier,
            self._counters,
            tasks,
            self.request_limit,
            peers,
        )
        self.is_fetching = self._fetcher.is_fetching
        self.lent_buffers = LentBuffers(self._pool, self._buffer_pool, self._fetcher.pump)
        self.maintenance = CacheMaintenance(
            offload,
            self._files,
            self._index,
            self._table,
            self._disk_space,
            self._fetcher,
            self._buffer_pool,
            warmed,
        )
        self.maintenance.hold_found()
        self.pieces = HeldPieces(
            offload, self._files, self._table, self._disk_space, self._fetcher, self.maintenance
        )
        self.range_cache = RangeCache(self._fetcher)
        # Told of each read while there are hints; set by `use_hints`.
        self.hints: ReadHints | None = None
        self._readahead = Readahead(self._table, self._buffer_pool, self._fetcher, tasks)
        self.prefetch = self._readahead.prefetch
        self._staging_fell = trio.Event()

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Run the cache's tasks until cancelled; then write the index's pending rows and its clean mark."""
        self._pool.touch()
        try:
            async with trio.open_nursery() as nursery:
                await nursery.start(self._tasks.run)
                self._tasks.keep(
                    {
                        "cache-shrink": self._disk_space.shrink,
                        "cache-index": self._write_index,
                        "cache-clean-up": self._clean_up_after_last_run,
                    }
                )
                task_status.started()
        finally:
            self._pool.close()
            self._table.close()

    def abandon(self) -> None:
        """Close a cache that never ran; the next start then finds it as after a crash. Does nothing after `run`."""
        self._index.close(clean=False)

    def open(self, object_id: ObjectId, size: int) -> ReadHandle:
        """Return a new handle on an object version of `size` bytes. Does no I/O."""
        entry = self._table.object_entry(object_id, size)
        entry.handles += 1
        return ReadHandle(entry)

    def close(self, handle: ReadHandle) -> None:
        """Close a handle. Its read-ahead stops. Its object leaves memory when its buffers do."""
        self._readahead.close(handle.streams)
        self._table.close_object(handle.entry)

    def is_open(self, object_id: ObjectId) -> bool:
        """Return whether an object version is open."""
        entry = self._table.objects.get(object_id)
        return entry is not None and entry.handles > 0

    async def read(self, handle: ReadHandle, offset: int, length: int) -> memoryview | bytes:
        """Return bytes [offset, offset + length), clamped to the object's size; empty at its end.

        A returned memoryview is valid until the caller's next checkpoint.
        Raises ObjectChanged, ObjectMissing, AccessDenied, or Unavailable after `patience_seconds` of retries.
        """
        stop = min(offset + length, handle.entry.size)
        if offset >= stop:
            return b""
        began = trio.current_time()
        data: memoryview | bytes | None = None
        source = ReadSource.MEMORY
        if self.range_cache:
            data = await self.range_cache.read(handle.entry.object_id, offset, stop)
            self._counters.hits += data is not None
        if data is None:
            data, source = await self._read_cached(handle, offset, stop)
        self._counters.bytes_from[source] += len(data)
        self._counters.latency.count(trio.current_time() - began)
        if self.hints is not None:
            self.hints.on_read(handle.object_id, offset, len(data), has_waited=source >= ReadSource.PEER)
        return data

    async def _read_cached(
        self, handle: ReadHandle, start: int, stop: int
    ) -> tuple[memoryview | bytes, ReadSource]:
        """Read from buffers, disk or bucket, with read-ahead."""
        now = trio.current_time()
        if not handle.streams and self.hints is not None and self.hints.names(handle.object_id):
            # A job's plan names this file. So do not guess that a read at its start means a read of all, or that
            # neighbouring samples are a sequential read.
            handle.streams.append(ReadStream(handle.entry, side_stream(0, near_bytes=0)))
        stream = self._readahead.observe(handle.streams, handle.entry, start, stop, now)
        data, source = self._read_nowait(stream, start, stop, now), ReadSource.MEMORY
        if data is None and stream.pattern.phase is not Phase.SEQUENTIAL:
            data, source = await self._read_disk(stream, start, stop), ReadSource.DISK
        if data is None:
            data = await self._read_exactly(stream, start, stop)
            if data is None:
                return await self._read_with_fetch(stream, start, stop)
            self._counters.misses += 1
            return data, ReadSource.BUCKET
        self._counters.hits += 1
        self._readahead.run(stream)  # perhaps into the buffer of this reply, but not before it is sent
        return data, source

    async def _read_exactly(self, stream: ReadStream, start: int, stop: int) -> memoryview | None:
        """Read exactly these bytes if hints ask for that and none of them is cached or in flight; else None."""
        entry, hints = stream.entry, self.hints
        if hints is None or not await self._is_not_cached(entry, start, stop):
            return None
        is_random = stream.pattern.phase is Phase.RANDOM
        return await hints.read_exactly(entry.object_id, entry.size, start, stop, is_random=is_random)

    async def is_whole(self, handle: ReadHandle, start: int, stop: int) -> bool:
        """Return whether all of these bytes are cached, or in flight."""
        return not any([wanted & ~known async for wanted, known in self._known(handle.entry, start, stop)])

    async def _is_not_cached(self, entry: CachedObject, start: int, stop: int) -> bool:
        """Return whether none of these bytes is cached or in flight."""
        return not any([wanted & known async for wanted, known in self._known(entry, start, stop)])

    async def _known(self, entry: CachedObject, start: int, stop: int) -> AsyncIterator[tuple[int, int]]:
        """Yield, for each chunk of these bytes, the mask of their granules, and of those cached or in flight."""
        for index, first, last in split_by_chunk(Extent(start, stop)):
            chunk = await self._chunk(entry, index)
            yield mask_of_bytes(first, last), chunk.present | chunk.in_memory() | chunk.pending()

    # ---- disk space, for the write path

    async def reserve_staging(self, nbytes: int) -> None:
        """Reserve space for staging files, evicting clean blocks if needed. Raises NoSpace."""
        await self._disk_space.reserve_staging(nbytes)

    def reserve_staging_nowait(self, nbytes: int) -> bool:
        """Reserve space for staging files if there is enough now; evicts nothing."""
        return self._disk_space.reserve_staging_nowait(nbytes)

    def writable_bytes(self) -> int:
        """Return how many bytes new writes may take, without the reserve for writes that are still in the kernel."""
        return self._disk_space.writable_bytes()

    def usable_bytes(self) -> int:
        """Return how many bytes of the limit the disk has space for: all of them, or fewer."""
        return self._disk_space.usable_bytes()

    def high_water_bytes(self) -> int:
        """Return how many bytes staging files may hold before closes should wait for uploads."""
        return self._disk_space.ledger.high_water_bytes

    def is_staging_high(self) -> bool:
        """Return whether a close should wait for uploads."""
        return self._disk_space.ledger.is_staging_high

    async def staging_released(self) -> None:
        """Wait until staging files release space, and closes need no longer wait."""
        await self._staging_fell.wait()

    def announce_staging(self) -> None:
        """Wake the waiters of `staging_released`."""
        self._staging_fell.set()
        self._staging_fell = trio.Event()

    def restore_staging(self, nbytes: int) -> None:
        """Account for staging files found at start, which exist whether or not they fit."""
        self._disk_space.ledger.restore_staging(nbytes)

    async def free_staging(self, nbytes: int) -> None:
        """A staging file was deleted: its space is free, in the account and on the disk."""
        await self._disk_space.measure_free_space()
        self.release_staging(nbytes)

    def release_staging(self, nbytes: int) -> None:
        """Release reserved staging space."""
        self._disk_space.ledger.release_staging(nbytes)
        if not self.is_staging_high():
            self.announce_staging()

    async def adopt(self, files: Sequence[StagedObject]) -> None:
        """Make cache files of uploaded staging files, which the caller removes. Reservations move with them."""
        objects = self._table.objects
        await self._adoption.adopt(
            [
                (objects.get(file.object_id) or self._table.object_entry(file.object_id, file.size), file)
                for file in files
            ]
        )
        if not self.is_staging_high():
            self.announce_staging()

    async def rename(self, old: ObjectId, new: ObjectId) -> None:
        """Keep what is cached of an object version as that of its copy, as `DiskTier.rename` does."""
        await self._disk_tier.rename(old, new)

    async def forget(self, object_id: ObjectId) -> None:
        """Drop all blocks of an object version."""
        await self._disk_tier.forget(object_id)

    def use_hints(self, hints: ReadHints | None) -> None:
        """Serve reads by these hints, which are new or have moved, and keep the blocks that are read soonest."""
        self.hints = hints
        self._disk_space.use_hints(hints)

    def statistics(self) -> CacheStatistics:
        """Return the counters of this moment."""
        return self._counters.snapshot(self._disk_space.ledger, self._buffer_pool, trio.current_time())

    # ---- one read

    def _read_nowait(self, stream: ReadStream, start: int, stop: int, now: float) -> memoryview | None:
        """Answer from one buffer, if one holds all of it."""
        index = start // CHUNK_BYTES
        base = index * CHUNK_BYTES
        chunk = stream.entry.chunks.get(index)
        if chunk is None or stop > base + CHUNK_BYTES:
            return None
        if chunk.fetches:
            chunk.in_memory()
        buffer = chunk.buffer_with(mask_of_bytes(start - base, stop - base))
        if buffer is None:
            return None
        self._on_read(stream, chunk, buffer, stop - base, now)
        return buffer.view(start - base, stop - base)

    async def _read_disk(self, stream: ReadStream, start: int, stop: int) -> memoryview | None:
        """Answer a small read from disk in the reader's task, if all of it is there and no fetch concerns it."""
        index = start // CHUNK_BYTES
        start, stop = start - index * CHUNK_BYTES, stop - index * CHUNK_BYTES
        first, end = start // GRANULE_BYTES, -(-stop // GRANULE_BYTES)
        chunk = stream.entry.chunks.get(index)
        if chunk is None or end - first > SMALL_GRANULES:
            return None
        need = mask_between(first, end)
        if need & ~chunk.present or need & (chunk.in_memory() | chunk.pending()):
            return None
        began = trio.current_time()
        chunk.readers += 1
        try:
            await self._fetcher.load_at_once(chunk, first, end, stream)
        finally:
            chunk.readers -= 1
        buffer = chunk.buffer_with(need)
        if buffer is None:
            return None
        now = trio.current_time()
        self._counters.wait_seconds["disk"] += now - began
        self._on_read(stream, chunk, buffer, stop, now)
        return buffer.view(start, stop)

    def _on_read(self, stream: ReadStream, chunk: Chunk, buffer: Buffer, stop: int, now: float) -> None:
        self._table.on_use(chunk)
        self._buffer_pool.touch(buffer, now)
        if stop == chunk.size and stream.pattern.phase is Phase.SEQUENTIAL:
            self._buffer_pool.mark_consumed(buffer)

    async def _read_with_fetch(
        self, stream: ReadStream, start: int, stop: int
    ) -> tuple[memoryview | bytes, ReadSource]:
        """Request missing granules, read ahead, and wait."""
        stream.pattern = grow(stream.pattern)
        pieces = split_by_chunk(Extent(start, stop))
        source = ReadSource.MEMORY
        absent: dict[Chunk, int] = {}
        for index, first, last in pieces:
            chunk = await self._chunk(stream.entry, index)
            if missing := mask_of_bytes(first, last) & ~chunk.in_memory():
                source = max(source, ReadSource.BUCKET if missing & ~chunk.present else ReadSource.DISK)
                absent[chunk] = missing & ~chunk.present
        # Request all pieces before waiting for the first.
        fetch_stop = stream.bounded(demand_stop(stream.pattern, start, stop, stream.entry.size), stop)
        for index, first, last in split_by_chunk(Extent(start, fetch_stop)):
            chunk = await self._chunk(stream.entry, index)
            self._fetcher.request(
                chunk,
                mask_of_bytes(first, last),
                Cause.DEMAND,
                handle=stream,
                most_bytes=request_bytes(stream.pattern),
            )
        self._readahead.run(stream)
        self._fetcher.pump()
        self._counters.misses += source is ReadSource.BUCKET
        self._counters.hits += source is not ReadSource.BUCKET
        fetches = [each for chunk, mask in absent.items() for each in chunk.fetches if each.mask & mask]
        if len(pieces) == 1:
            data = await self._read_chunk_range(stream, *pieces[0])
            return data, _from_peer(source, fetches)
        # Hold one chunk at a time: readers that hold one and wait for another could block each other for ever.
        parts = bytearray()
        for index, first, last in pieces:
            parts += await self._read_chunk_range(stream, index, first, last)
        return memoryview(parts), _from_peer(source, fetches)

    async def _read_chunk_range(self, stream: ReadStream, index: int, start: int, stop: int) -> memoryview:
        """Return bytes [start, stop) of one chunk, waiting until they are in memory. Raises the fetch's error."""
        need = mask_of_bytes(start, stop)
        chunk = await self._chunk(stream.entry, index)
        chunk.readers += 1
        try:
            while need & ~chunk.in_memory():
                self._fetcher.request(chunk, need, Cause.DEMAND, handle=stream)
                self._fetcher.pump()
                await self._wait_for(chunk, need)
            buffer = chunk.buffer_with(need)
            if buffer is not None:
                self._on_read(stream, chunk, buffer, stop, trio.current_time())
                return buffer.view(start, stop)
            return memoryview(chunk.copy_bytes(start, stop))
        finally:
            chunk.readers -= 1

    async def _wait_for(self, chunk: Chunk, need: int) -> None:
        """Wait for granules. Count the seconds in the queue and the seconds of the source apart."""
        began = trio.current_time()
        fetches = [fetch for fetch in chunk.fetches if fetch.mask & need]
        asks_bucket = any(fetch.source is not FetchSource.DISK for fetch in fetches)
        wait = self._counters.begin_wait(began) if asks_bucket else None
        try:
            await self._fetcher.wait_for(chunk, need)
        finally:
            if wait is not None:
                del self._counters.waiting[wait]
            self._counters.count_wait(fetches, began, trio.current_time())

    async def _chunk(self, entry: CachedObject, index: int) -> Chunk:
        """Return a chunk with its rows loaded, and count the reader's wait for them."""
        chunk = entry.chunks.get(index)
        if chunk is not None and chunk.loaded:
            return chunk
        began = trio.current_time()
        try:
            return await self._table.loaded_chunk(entry, index)
        finally:
            self._counters.wait_seconds["disk"] += trio.current_time() - began

    async def cached_objects(self) -> dict[str, ObjectRow]:
        """Return the newest cached version of each key; none if the index cannot be read."""
        return await self._table.newest_objects()

    # ---- tasks

    async def _write_index(self) -> None:
        """Once a second: write changed rows, measure free space, forget idle chunks and streams."""
        while True:
            await trio.sleep(INDEX_SECONDS)
            await self._table.flush_rows()
            await self._disk_space.measure_free_space()
            self._table.trim_chunks(CHUNKS_IN_MEMORY)
            self._readahead.forget_idle(trio.current_time())

    async def _clean_up_after_last_run(self) -> None:
        """Delete folders discarded at start, and files without a row (after a kill between file and row)."""
        self.maintenance.release_found()
        for folder in self._index.opening.discarded:
            await self._offload.disk(delete_tree, folder)
        if self._index.opening.unclean:
            await self._disk_tier.delete_unindexed_files()


def _from_peer(source: ReadSource, fetches: Sequence[Fetch]) -> ReadSource:
    """Return PEER instead of BUCKET if other nodes delivered all that a read waited for: its fetches have ended."""
    is_all = bool(fetches) and all(each.source is FetchSource.PEER for each in fetches)
    return ReadSource.PEER if source is ReadSource.BUCKET and is_all else source


def _memory_for(options: CacheOptions) -> AlignedBuffers:
    if options.are_buffers_shared:
        try:
            return AlignedBuffers(options.buffer_bytes, is_shared=True)
        except (AttributeError, OSError) as exc:  # AttributeError: a C library without it
            log.warning("the daemon works without movers, as it gets no shared memory error=%s", exc)
    return AlignedBuffers(options.buffer_bytes)
