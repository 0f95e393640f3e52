"""The cache's state in memory: objects, their chunks, and the buffers and fetches of each chunk.

Used on the trio loop only; nothing here awaits. Threads write only some fields of a `Fetch`, as its docstring says.

Invariants:
1. A buffer with `busy > 0` is used by a thread. A buffer of a chunk with `readers > 0` is about to be read. Neither is
   recycled.
2. A bit of `Chunk.present` is set only after its bytes are in the cache file, and cleared before they are removed.
3. A granule is pending in at most one fetch.
"""

import enum
from dataclasses import dataclass, field

import trio

from fusecache.model.objects import GRANULE_BYTES, GRANULES_PER_BLOCK, ObjectId
from fusecache.policy.cache.fetch_order import Cause, FetchQueue
from fusecache.policy.cache.granules import (
    BLOCK_MASK,
    BLOCKS_PER_CHUNK,
    GRANULES_PER_CHUNK,
    chunk_size,
    mask_between,
    received_mask,
)
from fusecache.remote.store import Interruption

_CHECKSUM_BYTES = 8
# A small buffer (128 KiB) holds 2 granules, as a read of 64 KiB may touch two.
SMALL_GRANULES = 2


class FetchSource(enum.Enum):
    """The source of a fetch's bytes."""

    NETWORK = "a ranged GET"
    PEER = "another node"
    DISK = "the cache file"


class FetchState(enum.Enum):
    """The life of a fetch: QUEUED -> RUNNING -> (PAUSED -> QUEUED …) DONE; QUEUED -> DONE: cancelled."""

    QUEUED = "in its queue"
    PAUSED = "failed; waits for its retry"
    RUNNING = "a thread fills its buffer"
    DONE = "nothing more will arrive"


@dataclass(eq=False, slots=True)
class ChunkWaiter:
    """A reader that waits for granules of one chunk, or for their fetch to fail."""

    need: int
    event: trio.Event = field(default_factory=trio.Event)
    error: Exception | None = None


@dataclass(eq=False, slots=True)
class CachedObject:
    """One object version in memory. blocks: how many of its blocks have a granule on disk; rows: which chunks may have
    rows in the index, as a mask, -1 if any may; warming: how many warm-ups are fetching it; number: of its cache file.
    load_begins_at: where the weights of a model begin in it, infinity if it has none, None if that is not known;
    is_loading: all of it is being fetched, as a program loads these; sending: how many pieces of it other processes
    send, or wait for. tensor_ends: of a model that does not fit into the cache, ascending."""

    object_id: ObjectId
    size: int
    loading: trio.Event | None = None
    loaded: bool = False
    number: int | None = None
    blocks: int = 0
    rows: int = -1
    handles: int = 0
    warming: int = 0
    load_begins_at: float | None = None
    is_loading: bool = False
    sending: int = 0
    tensor_ends: list[int] = field(default_factory=list)
    disk_operations: int = 0
    chunks: dict[int, "Chunk"] = field(default_factory=dict)


@dataclass(eq=False, slots=True)
class Chunk:
    """8 MiB of an object. All masks are of granules of the chunk, except `dirty`, which is of blocks.

    present: on disk. dirty: blocks whose row the index lacks. While the rows of dirty blocks are being written, they
    are not in `dirty`, and `is_being_indexed` is set: the index may still fail to take them.
    """

    owner: CachedObject
    index: int
    size: int = 0
    loaded: bool = False
    loading: trio.Event | None = None
    present: int = 0
    dirty: int = 0
    is_being_indexed: bool = False
    stamp: int = 0
    readers: int = 0
    disk_operations: int = 0
    checksums: bytearray = field(default_factory=lambda: bytearray(GRANULES_PER_CHUNK * _CHECKSUM_BYTES))
    buffers: list["Buffer"] = field(default_factory=list)
    fetches: list["Fetch"] = field(default_factory=list)
    waiters: list[ChunkWaiter] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.size = chunk_size(self.owner.size, self.index)

    def in_memory(self) -> int:
        """Return the granules in buffers, including granules that running fetches have received so far."""
        mask = 0
        for fetch in self.fetches:
            fetch.absorb()
        for buffer in self.buffers:
            mask |= buffer.valid
        return mask

    def pending(self) -> int:
        """Return the granules that fetches will still deliver."""
        mask = 0
        for fetch in self.fetches:
            mask |= fetch.mask
        return mask

    def buffer_with(self, mask: int) -> "Buffer | None":
        """Return a buffer that holds all these granules, None if there is none."""
        for buffer in self.buffers:
            if not mask & ~buffer.valid:
                return buffer
        return None

    def buffer_of(self, granule: int) -> "Buffer | None":
        """Return a buffer that holds this granule, None if there is none."""
        return self.buffer_with(1 << granule)

    def buffer_for(self, first: int, stop: int) -> "Buffer | None":
        """Return a buffer of this chunk with space for granules first..stop-1, None if there is none."""
        for buffer in self.buffers:
            if not buffer.small or buffer.first <= first < stop <= buffer.first + SMALL_GRANULES:
                return buffer
        return None

    def copy_bytes(self, start: int, stop: int) -> bytearray:
        """Copy bytes [start, stop) from several buffers. Every granule of them must be in memory."""
        data = bytearray()
        while start < stop:
            end = min(stop, (start // GRANULE_BYTES + 1) * GRANULE_BYTES)
            buffer = self.buffer_of(start // GRANULE_BYTES)
            assert buffer is not None, "the caller has checked that every granule is in memory"
            data += buffer.view(start, end)
            start = end
        return data

    def add_present(self, mask: int) -> None:
        """The bytes of these granules are on disk now."""
        self.owner.rows |= 1 << self.index
        for block in range(BLOCKS_PER_CHUNK):
            shift = block * GRANULES_PER_BLOCK
            if mask >> shift & BLOCK_MASK:
                if not self.present >> shift & BLOCK_MASK:
                    self.owner.blocks += 1
                self.dirty |= 1 << block
        self.present |= mask

    def drop_present(self, mask: int) -> None:
        """The bytes of these granules on disk must not be used any more."""
        mask &= self.present
        for block in range(BLOCKS_PER_CHUNK):
            shift = block * GRANULES_PER_BLOCK
            if mask >> shift & BLOCK_MASK:
                self.dirty |= 1 << block
                if not (self.present & ~mask) >> shift & BLOCK_MASK:
                    self.owner.blocks -= 1
        self.present &= ~mask

    def checksums_of(self, first: int, stop: int) -> bytes:
        """Return the checksums of granules first..stop-1."""
        return bytes(self.checksums[first * _CHECKSUM_BYTES : stop * _CHECKSUM_BYTES])

    def set_checksums(self, first: int, checksums: bytes) -> None:
        """Store the checksums of granules from `first` on."""
        start = first * _CHECKSUM_BYTES
        self.checksums[start : start + len(checksums)] = checksums

    def wake_readers(self) -> None:
        """Wake readers that have all their granules, or miss one that no fetch will deliver."""
        if not self.waiters:
            return
        valid = self.in_memory()
        pending = self.pending()
        for waiter in self.waiters:
            missing = waiter.need & ~valid
            if not missing or missing & ~pending:
                waiter.event.set()

    def is_idle(self) -> bool:
        """Return whether nothing refers to the chunk, so that it can leave memory without loss."""
        return not (
            self.buffers
            or self.fetches
            or self.waiters
            or self.readers
            or self.disk_operations
            or self.dirty
            or self.is_being_indexed
            or self.loading is not None
        )


class FetchListener:
    """The caller that fetches are for. Does nothing unless overridden."""

    __slots__ = ()

    def on_refused(self) -> None:
        """A queued read-ahead of this caller finds no buffer now."""


@dataclass(eq=False, slots=True)
class Fetch:
    """One GET or disk load of neighbouring granules first..stop-1 of a chunk into one buffer, with its retries.

    received: valid bytes from `first` on, written by the thread. wake_at: the thread calls the loop when `received`
    reaches it. After a failure, `first` moves past the granules that arrived.
    Times in seconds of the loop's clock. started_at: of the first attempt; give_up_at: until when a reader waits.
    Of the newest attempt: is_underway, a thread works on it; first_byte_seconds, until the first piece of the body;
    longest_gap_seconds, between two pieces; interruption, aborts it; is_aborted, it was silent and is being aborted.
    early_retries: retries without a pause. denials: how often the bucket answered that this version is gone.
    error: why it ended without all bytes. kept: an event, present if a caller needs the bytes on disk; set once they
    are there or the fetch gave up. node: the one that a PEER asks. is_for_peer: another node waits for it, so none is
    asked.
    """

    chunk: Chunk
    first: int
    stop: int
    source: FetchSource
    cause: Cause
    depth: int
    handle: FetchListener | None
    queued_at: float
    started_at: float | None = None
    state: FetchState = FetchState.QUEUED
    give_up_at: float | None = None
    buffer: "Buffer | None" = None
    received: int = 0
    first_byte_seconds: float | None = None
    longest_gap_seconds: float = 0.0
    interruption: Interruption | None = None
    is_underway: bool = False
    is_aborted: bool = False
    early_retries: int = 0
    wake_at: int = 1 << 62
    attempts: int = 0
    queue: "FetchQueue[Fetch] | None" = None
    denials: int = 0
    error: Exception | None = None
    kept: trio.Event | None = None
    node: str | None = None
    is_for_peer: bool = False

    @property
    def mask(self) -> int:
        """The granules that it will still deliver."""
        return mask_between(self.first, self.stop)

    @property
    def size(self) -> int:
        """How many bytes it will still deliver."""
        return min(self.stop * GRANULE_BYTES, self.chunk.size) - self.first * GRANULE_BYTES

    @property
    def is_small(self) -> bool:
        """Whether what is left fits a small buffer."""
        return self.stop - self.first <= SMALL_GRANULES

    def begin_attempt(self) -> None:
        """Start a new attempt: reset the fields of the earlier one."""
        self.attempts += 1
        self.received = 0
        self.first_byte_seconds = None
        self.longest_gap_seconds = 0.0
        self.interruption = Interruption()
        self.is_underway = self.is_aborted = False

    def is_overdue(self, now: float) -> bool:
        """Return whether a reader has waited for it as long as readers wait."""
        return self.give_up_at is not None and now >= self.give_up_at

    def absorb(self) -> None:
        """Mark the complete granules that have arrived as valid."""
        if self.buffer is not None and self.received:
            self.buffer.valid |= received_mask(self.first, self.stop, self.received)

    def register_wake_up(self) -> None:
        """Let the thread call the loop when the last granule of the next waiter is complete.

        The loop sets `wake_at` before it reads `received`. The thread sets `received` before it reads `wake_at`. So at
        least one of them sees the other's value.
        """
        chunk = self.chunk
        lowest = 1 << 62
        valid = chunk.in_memory()
        for waiter in chunk.waiters:
            missing = waiter.need & ~valid & self.mask
            if missing:
                lowest = min(lowest, (missing.bit_length() - self.first) * GRANULE_BYTES)
        self.wake_at = lowest
        if self.received >= lowest:
            chunk.wake_readers()


@dataclass(eq=False, slots=True)
class Buffer:
    """A pool slot with bytes of one chunk, from granule `first` on. valid: granules that it holds; busy: its users."""

    memory: memoryview
    small: bool
    chunk: Chunk | None = None
    first: int = 0
    valid: int = 0
    busy: int = 0
    is_consumed: bool = False
    touched_at: float = 0.0

    def view(self, start: int, stop: int) -> memoryview:
        """Return bytes [start, stop) of the chunk."""
        base = self.first * GRANULE_BYTES
        return self.memory[start - base : stop - base]

    def view_from(self, granule: int) -> memoryview:
        """Return the buffer from a granule on, to its end: page-aligned, with space for padding."""
        return self.memory[(granule - self.first) * GRANULE_BYTES :]


class RangeTicket:
    """A GET of `nbytes` that fills no pool buffer, queued by cause and depth among the fetches that do."""

    def __init__(self, depth: int, nbytes: int) -> None:
        self.cause = Cause.HINT
        self.depth = depth
        self.nbytes = nbytes
        self.is_due = trio.Event()
