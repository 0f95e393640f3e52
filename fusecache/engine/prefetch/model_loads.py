"""Fetches all of a model's weights once a program begins to read them, by many connections.

A program that maps weights reads them in the order in which the model asks for them: small requests of the kernel far
apart, one round trip each. So the rest comes behind the reads of programs, in the order of the files, as a warm-up
does. The kernel gets it as its pages: then a page fault is no request. The index beside a shard names the others.

Used on the trio loop.

Invariants:
1. Never more is fetched than `allowed_bytes` of what was read, and nothing while no program has a file of it open.
2. Blocks of weights that are being loaded are not evicted for other blocks: each is read once more.
"""

import logging
import math
from dataclasses import dataclass, field
from functools import partial

import trio

from fusecache.engine.cache.block_cache import BlockCache, ReadHandle
from fusecache.engine.cache.chunks import FetchedTo
from fusecache.engine.cache.evictor import SOON
from fusecache.engine.namespace.events import Events
from fusecache.engine.namespace.lookup import Lookup
from fusecache.engine.namespace.nodes import Node
from fusecache.engine.prefetch.hint_service import HintService
from fusecache.engine.runtime.supervisor import TaskNursery
from fusecache.model.errors import FusecacheError, NoSpace
from fusecache.model.format_text import size_text
from fusecache.model.objects import Extent, ObjectId
from fusecache.policy.cache.granules import CHUNK_BYTES, full_mask, mask_of_bytes, split_by_chunk
from fusecache.policy.cache.readahead import Phase
from fusecache.policy.cache.weights import (
    START_BYTES,
    allowed_bytes,
    index_names,
    is_index_size,
    is_load,
    load_begins_at,
    shards_in_order,
)

log = logging.getLogger(__name__)

# Programs open one shard after the other. A load ends so long after the last one was closed.
_CLOSED_SECONDS = 3.0
# It ends too if no read came for so long: of what the kernel was given, the daemon sees no read. The next one begins it
# again.
_SILENT_SECONDS = 60.0
# Disk space becomes free, and files are closed, without an event.
_POLL_SECONDS = 0.5
# A hint of a job is more certain: it comes first. In tenths of a second.
_DEPTH = 10
# Half of the buffers, with two requests each, use the connections that a program needs to wait for no byte.
_GET_BYTES = CHUNK_BYTES // 2


@dataclass(eq=False, slots=True)
class _Weights:
    """One file of a model, held open while its load lasts.

    begun: how many chunks, from the first, were fetched, or are cached. given: how many were given to the kernel
    besides. read_masks: by chunk, the granules that programs read through the daemon.
    """

    node: Node
    handle: ReadHandle
    begun: int = 0
    given: int = 0
    read_masks: dict[int, int] = field(default_factory=dict)

    @property
    def chunks(self) -> int:
        """How many chunks it has."""
        return -(-self.handle.size // CHUNK_BYTES)

    @property
    def next_chunk(self) -> int:
        """The index of the chunk that is due next. Only of files that are open, the kernel takes pages."""
        return self.given if self.node.handles else self.begun

    def chunk_bytes(self, index: int) -> int:
        """Return the size of a chunk."""
        return min(CHUNK_BYTES, self.handle.size - index * CHUNK_BYTES)


@dataclass(eq=False, slots=True)
class _Load:
    """The load of one model.

    asked_bytes: of the chunks that were begun. seen_at: when a program last had a file open. fits_memory: the kernel
    may keep all of it.
    """

    files: dict[ObjectId, _Weights] = field(default_factory=dict)
    read_bytes: int = 0
    asked_bytes: int = 0
    read_at: float = -math.inf
    seen_at: float = -math.inf
    fits_memory: bool = False
    has_failed: bool = False
    read: trio.Event = field(default_factory=trio.Event)

    @property
    def size(self) -> int:
        """The bytes of all files."""
        return sum(file.handle.size for file in self.files.values())

    def is_open(self) -> bool:
        """Return whether a program has one of the files open."""
        return any(file.node.handles for file in self.files.values())

    def next_file(self) -> _Weights | None:
        """Return the file whose next chunk is fetched next: one that a program has open, else another."""
        files = self.files.values()
        opened = (file for file in files if file.node.handles and file.given < file.chunks)
        return next(opened, None) or next((file for file in files if file.begun < file.chunks), None)


class ModelLoads:
    """Observes the reads of weights, and fetches the rest."""

    def __init__(
        self,
        lookup: Lookup,
        cache: BlockCache,
        hints: HintService,
        tasks: TaskNursery,
        events: Events,
        *,
        patterns: tuple[str, ...],
        most_page_bytes: int,
    ) -> None:
        """patterns: of the names of weights. most_page_bytes: of a model that is given to the kernel."""
        self._lookup = lookup
        self._cache = cache
        self._hints = hints
        self._tasks = tasks
        self._events = events
        self._patterns = patterns
        self._most_page_bytes = most_page_bytes
        self._loads: dict[ObjectId, _Load] = {}
        # Of all loads, in turns: two of them share the connections.
        self._slots = trio.CapacityLimiter(2 * cache.maintenance.large_at_once)
        self._is_said = False

    def on_file_read(
        self, node: Node, handle: ReadHandle, offset: int, nbytes: int, data: bytes | memoryview = b""
    ) -> None:
        """A program reads bytes of a published file. data: those at its start, once they are there."""
        entry = handle.entry
        if offset >= entry.size:
            return
        if entry.load_begins_at is None or data:
            start = bytes(data[:START_BYTES])
            entry.load_begins_at = load_begins_at(node.name, entry.size, start, self._patterns)
        load = self._loads.get(entry.object_id)
        if load is None:
            # Reads in sequence of what does not fit into memory need no help: read-ahead is as fast.
            is_helped = entry.size <= self._most_page_bytes or _jumps(handle)
            if not is_helped or not is_load(entry.load_begins_at, entry.size, offset):
                return
            if self._hints.names(entry.object_id):
                return
            load = _Load()
            self._add(load, node, entry.object_id, entry.size)
            self._tasks.start_soon("model-load", self._run, load, node, about=node.name)
        file = load.files[entry.object_id]
        file.node = node
        for index, first, stop in split_by_chunk(Extent(offset, min(offset + nbytes, entry.size))):
            file.read_masks[index] = file.read_masks.get(index, 0) | mask_of_bytes(first, stop)
        load.read_bytes += nbytes
        load.read_at = trio.current_time()
        load.read.set()

    def _add(self, load: _Load, node: Node, object_id: ObjectId, size: int) -> None:
        handle = self._cache.open(object_id, size)
        load.files[object_id] = _Weights(node, handle)
        load.fits_memory = load.size <= self._most_page_bytes
        self._loads[object_id] = load
        handle.entry.fetched_to = FetchedTo.DISK
        if sum(each.size for each in set(self._loads.values())) > self._cache.maintenance.free_space_bytes():
            self._on_no_space(load)

    async def _run(self, load: _Load, node: Node) -> None:
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._find_shards, load, node, name="model-index")
                await self._fetch(load, nursery)
        finally:
            for object_id, file in load.files.items():
                entry = file.handle.entry
                entry.fetched_to = FetchedTo.NOWHERE
                if file.given == file.chunks:
                    entry.load_begins_at = math.inf  # until the kernel asks for its first page again
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
                    return shards_in_order(await self._content(remote.object_id, remote.size, remote.size))
            except (FusecacheError, ValueError) as exc:
                log.debug("no index beside a shard name=%s error=%s", index, exc)
        return []

    async def _content(self, object_id: ObjectId, size: int, nbytes: int) -> bytes:
        """Return the first bytes of an object. size: its own."""
        handle = self._cache.open(object_id, size)
        try:
            content = bytearray()
            while len(content) < nbytes:
                content += await self._cache.read(
                    handle, len(content), min(nbytes - len(content), CHUNK_BYTES)
                )
            return bytes(content)
        finally:
            self._cache.close(handle)

    # ---- chunks

    async def _fetch(self, load: _Load, nursery: trio.Nursery) -> None:
        """Fetch what is missing, chunk by chunk, as slots become free, until programs stop to read."""
        while True:
            slot = object()
            await self._slots.acquire_on_behalf_of(
                slot
            )  # then choose: a program may have opened a file by now
            file = load.next_file()
            is_due = file is not None and not load.has_failed and await self._may_fetch(load, file)
            if file is None or not is_due or file.next_chunk == file.chunks:  # it was opened or closed by now
                self._slots.release_on_behalf_of(slot)
                if not await self._is_going_on(load, is_done=file is None):
                    return
                continue
            index = file.next_chunk
            file.begun = max(file.begun, index + 1)
            if file.node.handles:
                file.given = index + 1
            load.asked_bytes += file.chunk_bytes(index)
            nursery.start_soon(self._fill, load, file, index, slot, name="model-chunk")

    async def _may_fetch(self, load: _Load, file: _Weights) -> bool:
        """Return whether the next chunk of a file may be fetched now: by what was read, and there is disk space."""
        nbytes = file.chunk_bytes(file.next_chunk)
        if load.asked_bytes + nbytes > allowed_bytes(load.read_bytes) or not load.is_open():
            return False
        entry, maintenance = file.handle.entry, self._cache.maintenance
        if entry.fetched_to is not FetchedTo.DISK:
            return entry.fetched_to is FetchedTo.PAGES and file.node.handles > 0
        if not await maintenance.missing(entry, file.next_chunk, full_mask(nbytes)):
            return True
        coming = self._slots.borrowed_tokens * CHUNK_BYTES
        if coming <= maintenance.free_bytes() or await maintenance.evict_for(coming, SOON):
            return True
        self._on_no_space(load)
        return False

    async def _is_going_on(self, load: _Load, *, is_done: bool) -> bool:
        """Wait for the next read, or a moment; return whether more reads may come. is_done: all is fetched."""
        load.read = trio.Event()
        with trio.move_on_after(_POLL_SECONDS):
            await load.read.wait()
        now = trio.current_time()
        if load.is_open():
            load.seen_at = now
        patience = _CLOSED_SECONDS if is_done else _SILENT_SECONDS
        return now < load.read_at + patience and now < max(load.seen_at, load.read_at) + _CLOSED_SECONDS

    async def _fill(self, load: _Load, file: _Weights, index: int, slot: object) -> None:
        """Fetch a chunk. If a program has the file open, give the kernel what no program has read of it."""
        maintenance, entry = self._cache.maintenance, file.handle.entry
        try:
            if entry.fetched_to is FetchedTo.DISK:
                await maintenance.fill(entry, index, depth=_DEPTH, attempts=1, most_bytes=_GET_BYTES)
            if load.fits_memory and file.node.handles:
                unread = full_mask(file.chunk_bytes(index)) & ~file.read_masks.get(index, 0)
                give = partial(self._events.on_fetched, file.node, entry.object_id)
                await maintenance.use(entry, index, unread, give)
        except NoSpace:
            self._on_no_space(load)
        except FusecacheError as exc:  # readers get it too, if they ask for these bytes
            load.has_failed = True
            log.debug("weights are not fetched further key=%s error=%s", file.handle.object_id.key, exc)
        finally:
            self._slots.release_on_behalf_of(slot)

    def _on_no_space(self, load: _Load) -> None:
        """What does not fit into the cache goes into the kernel's pages, or only to programs that ask for it."""
        for file in load.files.values():
            file.handle.entry.fetched_to = FetchedTo.PAGES if load.fits_memory else FetchedTo.READERS
        if not self._is_said:
            self._is_said = True
            log.info(
                "a model does not fit into the cache, it is streamed: file=%s size=%s cache=%s",
                next(iter(load.files)).key,
                size_text(load.size),
                size_text(self._cache.maintenance.free_space_bytes()),
            )


def _jumps(handle: ReadHandle) -> bool:
    """Return whether the reads of an open file jump."""
    patterns = [stream.pattern for stream in handle.streams]
    return len(patterns) > 1 or any(each.skips or each.phase is Phase.RANDOM for each in patterns)
