"""Fetches all of a model's weights once a program loads them, by many connections.

A program that maps weights reads them in the order in which the model asks for them: small requests of the kernel far
apart, one round trip each. So the rest comes behind the reads of programs, in the order of the files, as a warm-up
does. The index beside a shard names the other shards.

Used on the trio loop.

Invariants:
1. A load fetches at most `allowed_bytes` ahead of programs, and nothing while none has a file of it open.
2. Blocks of weights that are being loaded are not evicted for other blocks: each is read once more.
"""

import logging
import math
from collections.abc import Iterable
from dataclasses import dataclass, field

import trio

from fusecache.engine.cache.block_cache import BlockCache, ReadHandle
from fusecache.engine.cache.chunks import CachedObject
from fusecache.engine.cache.evictor import SOON
from fusecache.engine.namespace.lookup import Lookup
from fusecache.engine.namespace.nodes import Node
from fusecache.engine.prefetch.hint_service import HintService
from fusecache.engine.prefetch.kernel_pages import KernelPages, PageReader
from fusecache.engine.runtime.offload import Offload
from fusecache.engine.runtime.supervisor import TaskNursery
from fusecache.model.errors import FusecacheError, NoSpace
from fusecache.model.format_text import size_text
from fusecache.model.objects import Extent, ObjectId
from fusecache.policy.cache.granules import CHUNK_BYTES, full_mask
from fusecache.policy.cache.readahead import NEAR_BYTES, Phase
from fusecache.policy.cache.weights import (
    START_BYTES,
    allowed_bytes,
    header_bytes,
    index_names,
    is_index_size,
    is_load,
    load_begins_at,
    shards_in_order,
    tensor_ends,
)

log = logging.getLogger(__name__)

# Programs open one shard after the other. A load ends so long after the last one was closed.
_CLOSED_SECONDS = 3.0
# It ends too if no read came for so long: of what the kernel has in memory, the daemon sees no read.
_SILENT_SECONDS = 60.0
# Disk space becomes free, and files are closed, without an event.
_POLL_SECONDS = 0.5
# The fetch waits for a kernel that reads a chunk in this time.
_PAGES_SECONDS = 0.25
# Most chunks of one job of the page reader: each job takes an open, a close, and two switches between processes.
_PAGES_CHUNKS = 4
# A hint of a job is more certain: it comes first. In tenths of a second.
_DEPTH = 10
# Half of the buffers, with two requests each, use the connections that a program needs to wait for no byte.
_GET_BYTES = CHUNK_BYTES // 2


@dataclass(eq=False, slots=True)
class _Weights:
    """One file of a model, held open while its load lasts.

    begun: how many chunks, from the first, were asked for. done: which are in the cache, and the kernel was not told to
    read. paged: which it was told to read.
    """

    node: Node
    handle: ReadHandle
    begun: int = 0
    done: set[int] = field(default_factory=set)
    paged: set[int] = field(default_factory=set)

    @property
    def chunks(self) -> int:
        """How many chunks it has."""
        return -(-self.handle.size // CHUNK_BYTES)

    @property
    def next_bytes(self) -> int:
        """The size of the next chunk."""
        return self.chunk_bytes(self.begun)

    def chunk_bytes(self, index: int) -> int:
        """Return the size of a chunk."""
        return self.extent(index).size

    def extent(self, index: int) -> Extent:
        """Return where a chunk lies."""
        start = index * CHUNK_BYTES
        return Extent(start, min(start + CHUNK_BYTES, self.handle.size))


@dataclass(eq=False, slots=True)
class _Load:
    """The load of one model.

    asked_bytes: of the chunks that were begun. seen_at: when a program last had a file open. is_streamed: the disk has
    no space for it. read: set by the next read. filled: set by the next chunk that is there. pages: while it runs.
    paging_until: until when the fetch waits for the kernel; infinity while that waits for chunks. is_paged: the kernel
    was told to read all that it will be told.
    """

    files: dict[ObjectId, _Weights] = field(default_factory=dict)
    read_bytes: int = 0
    asked_bytes: int = 0
    read_at: float = -math.inf
    seen_at: float = -math.inf
    is_streamed: bool = False
    has_failed: bool = False
    read: trio.Event = field(default_factory=trio.Event)
    filled: trio.Event = field(default_factory=trio.Event)
    pages: PageReader | None = None
    paging_until: float = -math.inf
    is_paged: bool = False

    @property
    def size(self) -> int:
        """The bytes of all files."""
        return sum(file.handle.size for file in self.files.values())

    def is_open(self) -> bool:
        """Return whether a program has one of the files open."""
        return any(self.has_open(file) for file in self.files.values())

    def has_open(self, file: _Weights) -> bool:
        """Return whether a program has a file open. A page reader that is slow may not have opened it."""
        own = self.pages is not None and self.pages.reading is file.node and self.is_paged_quickly()
        return file.node.handles > own

    def is_paged_quickly(self) -> bool:
        """Return whether the kernel reads what comes, and soon."""
        return trio.current_time() <= self.paging_until

    def next_file(self) -> _Weights | None:
        """Return the file whose next chunk is fetched next."""
        return self._first(file for file in self.files.values() if file.begun < file.chunks)

    @property
    def unpaged(self) -> int:
        """How many chunks were asked for that the kernel was not told to read."""
        return sum(file.begun - len(file.paged) for file in self.files.values())

    @property
    def has_pages_left(self) -> bool:
        """Whether there are chunks that the kernel was not told to read."""
        return any(len(file.paged) < file.chunks for file in self.files.values())

    def next_pages(self) -> _Weights | None:
        """Return a file of which the kernel can read a chunk; None until one is there."""
        return self._first(file for file in self.files.values() if file.done)

    async def wait_filled(self) -> None:
        """Wait for the next chunk that is there, or a moment."""
        with trio.move_on_after(_POLL_SECONDS):
            await self.filled.wait()
        self.filled = trio.Event()

    def _first(self, files: Iterable[_Weights]) -> _Weights | None:
        """Return a file that a program has open, else the first."""
        found = list(files)
        return next((file for file in found if self.has_open(file)), found[0] if found else None)


class ModelLoads:
    """Observes the reads of weights, and fetches the rest."""

    def __init__(
        self,
        lookup: Lookup,
        cache: BlockCache,
        offload: Offload,
        hints: HintService,
        tasks: TaskNursery,
        pages: KernelPages,
        *,
        patterns: tuple[str, ...],
    ) -> None:
        """patterns: of the names of weights."""
        self._lookup = lookup
        self._cache = cache
        self._offload = offload
        self._hints = hints
        self._tasks = tasks
        self.pages = pages
        self._patterns = patterns
        self._loads: dict[ObjectId, _Load] = {}
        # Of all loads, in turns: two of them share the connections.
        self._slots = trio.CapacityLimiter(2 * cache.maintenance.large_at_once)
        # Further ahead of the kernel, buffers are used again before it has read them: it would wait for the disk.
        self._most_unpaged = 3 * cache.maintenance.large_at_once
        self._is_said = False

    def on_file_read(
        self, node: Node, handle: ReadHandle, offset: int, nbytes: int, data: bytes | memoryview = b""
    ) -> None:
        """A program reads bytes of a published file. data: those at its start, once they are there."""
        entry = handle.entry
        if entry.load_begins_at is None or data:
            start = bytes(data[:START_BYTES])
            entry.load_begins_at = load_begins_at(node.name, entry.size, start, self._patterns)
            streamed = self._loads.get(entry.object_id)
            if data and streamed is not None and streamed.is_streamed:
                self._tasks.start_soon("model-header", self._find_tensors, entry, about=node.name)
        if offset < entry.load_begins_at:  # as every read of other files
            return
        load = self._loads.get(entry.object_id)
        if load is None:
            run_bytes = _run_bytes(handle, offset)
            if not is_load(entry.load_begins_at, entry.size, offset, run_bytes + nbytes):
                return
            # Read-ahead is as fast for one file that is read in sequence.
            if not _jumps(handle) and not index_names(node.name):
                return
            if not self._tasks.is_open or self._hints.names(entry.object_id):
                return
            load = _Load(read_bytes=run_bytes)
            self._add(load, node, entry.object_id, entry.size)
            self._tasks.start_soon("model-load", self._run, load, node, about=node.name)
        file = load.files[entry.object_id]
        file.node = node
        load.read_at = trio.current_time()
        if offset // CHUNK_BYTES not in file.paged:  # else it may be the page reader
            load.read_bytes += nbytes
            load.read.set()

    def _add(self, load: _Load, node: Node, object_id: ObjectId, size: int) -> None:
        handle = self._cache.open(object_id, size)
        load.files[object_id] = _Weights(node, handle)
        self._loads[object_id] = load
        handle.entry.is_loading = not load.is_streamed
        if sum(each.size for each in set(self._loads.values())) > self._cache.maintenance.free_space_bytes():
            self._stream(load)

    async def _run(self, load: _Load, node: Node) -> None:
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._find_shards, load, node, name="model-index")
                nursery.start_soon(self._read_pages, load, name="model-pages")
                await self._fetch(load, nursery)
                nursery.cancel_scope.cancel()
        finally:
            for object_id, file in load.files.items():
                file.handle.entry.is_loading = False
                if file.begun == file.chunks:  # once is enough, until its start is read again
                    file.handle.entry.load_begins_at = math.inf
                del self._loads[object_id]
                self._cache.close(file.handle)

    # ---- other shards

    async def _find_shards(self, load: _Load, node: Node) -> None:
        """Add the files that the index beside a shard names, in the order of its map, those of other loads not."""
        parent = node.parent
        if parent is None:
            return
        for shard in await self._indexed(parent, node.name):
            try:
                other = await self._lookup.lookup(parent, shard)
                remote = other.object
                if remote is not None and remote.size and remote.object_id not in self._loads:
                    self._add(load, other, remote.object_id, remote.size)
            except (FusecacheError, ValueError) as exc:
                log.debug("skipped a shard that the index names name=%s error=%s", shard, exc)
        load.read.set()

    async def _indexed(self, parent: Node, name: str) -> list[str]:
        for index in index_names(name):
            try:
                remote = (await self._lookup.lookup(parent, index)).object
                if remote is not None and is_index_size(remote.size):
                    content = await self._content(remote.object_id, remote.size, remote.size)
                    return await self._offload.compute(shards_in_order, content)
            except (FusecacheError, ValueError) as exc:
                log.debug("no index beside a shard name=%s error=%s", index, exc)
        return []

    async def _content(self, object_id: ObjectId, size: int, stop: int) -> bytes:
        """Return the first `stop` bytes of an object."""
        handle = self._cache.open(object_id, size)
        try:
            content = bytearray()
            while len(content) < stop:
                content += await self._cache.read(handle, len(content), min(stop - len(content), CHUNK_BYTES))
            return bytes(content)
        finally:
            self._cache.close(handle)

    # ---- chunks

    async def _fetch(self, load: _Load, nursery: trio.Nursery) -> None:
        """Fetch what is missing, chunk by chunk, as slots become free, until programs stop to read."""
        while True:
            slot = object()
            await self._slots.acquire_on_behalf_of(slot)  # then choose: a file may have been opened by now
            file, is_due = load.next_file(), False
            try:
                is_due = file is not None and await self._may_fetch(load, file)
            finally:
                if not is_due:
                    self._slots.release_on_behalf_of(slot)
            if file is None or not is_due:
                if not await self._is_going_on(load, is_done=file is None):
                    return
                continue
            load.asked_bytes += file.next_bytes
            file.begun += 1
            nursery.start_soon(self._fill, load, file, file.begun - 1, slot, name="model-chunk")

    async def _may_fetch(self, load: _Load, file: _Weights) -> bool:
        """Return whether the next chunk of a file may be fetched now: by what was read, and there is disk space."""
        if load.is_streamed or load.has_failed or not load.is_open():
            return False
        if load.asked_bytes + file.next_bytes > allowed_bytes(load.read_bytes):
            return False
        if self._must_wait_for_kernel(load):
            return False
        maintenance = self._cache.maintenance
        if not await maintenance.missing(file.handle.entry, file.begun, full_mask(file.next_bytes)):
            return True
        coming = self._slots.borrowed_tokens * CHUNK_BYTES
        if coming <= maintenance.free_bytes() or await maintenance.evict_for(coming, SOON):
            return True
        self._stream(load)
        return False

    def _must_wait_for_kernel(self, load: _Load) -> bool:
        """Return whether the kernel is to read what is in memory first."""
        if not load.is_paged_quickly():
            return False
        fetching = sum(each.next_file() is not None for each in set(self._loads.values()))
        return load.unpaged * fetching >= self._most_unpaged

    async def _is_going_on(self, load: _Load, *, is_done: bool) -> bool:
        """Wait for the next read, or a moment; return whether more reads may come. is_done: all is fetched."""
        with trio.move_on_after(_POLL_SECONDS):
            await load.read.wait()
        load.read = trio.Event()
        now = trio.current_time()
        # While the page reader opens a file, the program's own open does not show.
        if load.is_open() or (load.pages is not None and load.pages.reading is not None):
            load.seen_at = now
        if load.has_failed or (is_done and load.is_paged and now >= load.read_at + _CLOSED_SECONDS):
            return False
        return (
            now < load.read_at + _SILENT_SECONDS and now < max(load.seen_at, load.read_at) + _CLOSED_SECONDS
        )

    async def _fill(self, load: _Load, file: _Weights, index: int, slot: object) -> None:
        entry = file.handle.entry
        try:
            await self._cache.maintenance.fill(entry, index, depth=_DEPTH, attempts=1, most_bytes=_GET_BYTES)
            file.done.add(index)
            load.filled.set()
        except NoSpace:
            self._stream(load)
        except FusecacheError as exc:  # readers get it too, if they ask for these bytes
            load.has_failed = True
            log.debug("weights are not fetched further key=%s error=%s", file.handle.object_id.key, exc)
        finally:
            self._slots.release_on_behalf_of(slot)

    async def _read_pages(self, load: _Load) -> None:
        """Have the kernel read what was fetched. Reads of these pages come no more to the daemon.

        A program that is faster than the bucket still asks for others, so that its load goes on.
        """
        try:
            async with self.pages.reader() as load.pages:
                given_up_at = load.paging_until = math.inf
                while load.pages is not None and load.has_pages_left and not load.is_streamed:
                    file = load.next_pages()
                    now = trio.current_time()
                    if file is None or not load.is_open():
                        await load.wait_filled()
                        continue
                    chunks = sorted(file.done)[:_PAGES_CHUNKS]
                    if not load.pages.has_memory(sum(file.chunk_bytes(each) for each in chunks)):
                        load.paging_until = -math.inf
                        given_up_at = min(given_up_at, now + _SILENT_SECONDS)
                        if now >= given_up_at:  # a program may read on for ever, what does not stay in memory
                            return
                        await load.wait_filled()
                        continue
                    given_up_at = math.inf
                    file.done.difference_update(chunks)
                    file.paged.update(chunks)
                    soon = now + _PAGES_SECONDS * len(chunks)
                    load.paging_until = min(load.paging_until, soon)
                    if not await load.pages.read(file.node, [file.extent(each) for each in chunks]):
                        return
                    for each in chunks:
                        self._cache.maintenance.on_in_kernel(file.handle.entry, each)
                    load.read_at = trio.current_time()  # a program that finds its pages reads on unseen
                    if load.read_at <= soon:
                        load.paging_until = math.inf
                    load.read.set()
        finally:
            load.pages = None
            load.paging_until = -math.inf
            load.is_paged = True

    def _stream(self, load: _Load) -> None:
        """What does not fit into the cache goes only to programs that ask for it."""
        load.is_streamed = True
        for file in load.files.values():
            file.handle.entry.is_loading = False
            self._tasks.start_soon(
                "model-header", self._find_tensors, file.handle.entry, about=file.node.name
            )
        if not self._is_said:
            self._is_said = True
            log.info(
                "a model does not fit into the cache, it is streamed: file=%s size=%s cache=%s",
                next(iter(load.files)).key,
                size_text(load.size),
                size_text(self._cache.maintenance.free_space_bytes()),
            )

    async def _find_tensors(self, entry: CachedObject) -> None:
        """Find where tensors end: what is read ahead beyond would be dropped before a program asks for it."""
        stop = header_bytes(entry.load_begins_at or math.inf)
        if stop and not entry.tensor_ends:
            try:
                content = await self._content(entry.object_id, entry.size, stop)
                entry.tensor_ends = await self._offload.compute(tensor_ends, content)
            except (FusecacheError, ValueError) as exc:
                log.debug("a header is not read key=%s error=%s", entry.object_id.key, exc)


def _run_bytes(handle: ReadHandle, offset: int) -> int:
    """Return how many bytes were read in a row, up to `offset`, beyond the read that jumped there."""
    patterns = [stream.pattern for stream in handle.streams]
    return max(
        (each.consumed_bytes for each in patterns if abs(offset - each.position) <= NEAR_BYTES), default=0
    )


def _jumps(handle: ReadHandle) -> bool:
    """Return whether the reads of an open file jump."""
    patterns = [stream.pattern for stream in handle.streams]
    return len(patterns) > 1 or any(each.skips or each.phase is Phase.RANDOM for each in patterns)
