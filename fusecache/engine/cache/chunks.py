"""What the cache knows in memory: objects, their chunks, the buffers ("frames") that hold bytes of them.

Used on the loop only, never from a thread; nothing here awaits.

Invariants:
1. A frame with `busy > 0` has a thread reading or writing it; one of a pinned chunk has a reader about to
look at it: neither is recycled.
2. A bit of `Chunk.present` is set only after its bytes are in the cache file, and cleared before they go.
3. A granule is pending in at most one request.
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
SMALL_GRANULES = 2
# How long a reader waits for a bucket that does not answer.
DEMAND_SECONDS = 60.0


class FetchSource(enum.Enum):
    """Where the bytes of a request come from."""

    NETWORK = "a ranged GET"
    DISK = "the cache file"


class FetchState(enum.Enum):
    """The life of a request: QUEUED -> RUNNING -> (PAUSED -> QUEUED …) DONE; QUEUED -> DONE: given up."""

    QUEUED = "in its queue"
    PAUSED = "failed; waits before it is queued again"
    RUNNING = "a thread fills its frame"
    DONE = "nothing more will arrive"


@dataclass(eq=False, slots=True)
class ChunkWaiter:
    """A reader that waits for granules of one chunk, or for the news that they will not come."""

    need: int
    event: trio.Event = field(default_factory=trio.Event)
    error: Exception | None = None


@dataclass(eq=False, slots=True)
class CachedObject:
    """One object version in memory. blocks: how many of its blocks have a granule on disk; warming: how many
    warm-ups bring it in right now."""

    object_id: ObjectId
    size: int
    loading: trio.Event | None = None
    loaded: bool = False
    number: int | None = None
    blocks: int = 0
    handles: int = 0
    warming: int = 0
    disk_operations: int = 0
    chunks: dict[int, "Chunk"] = field(default_factory=dict)


@dataclass(eq=False, slots=True)
class Chunk:
    """8 MiB of an object. All masks are granules of the chunk, but `dirty`, which is blocks.

    present: on disk; dirty: blocks whose row the index does not have yet, but those that are being written
    (`is_being_indexed`), which it may still refuse.
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
        """Return the granules that some frame holds, counting what running requests have received so far."""
        mask = 0
        for request in self.fetches:
            request.absorb()
        for buffer in self.buffers:
            mask |= buffer.valid
        return mask

    def pending(self) -> int:
        """Return the granules that requests will still bring."""
        mask = 0
        for request in self.fetches:
            mask |= request.mask
        return mask

    def buffer_with(self, mask: int) -> "Buffer | None":
        """Return a frame that holds all these granules."""
        for buffer in self.buffers:
            if not mask & ~buffer.valid:
                return buffer
        return None

    def buffer_of(self, granule: int) -> "Buffer | None":
        """Return a frame that holds this granule."""
        return self.buffer_with(1 << granule)

    def buffer_for(self, first: int, stop: int) -> "Buffer | None":
        """Return a frame with room for granules first..stop-1, whatever it holds of them."""
        for buffer in self.buffers:
            if not buffer.small or buffer.first <= first < stop <= buffer.first + SMALL_GRANULES:
                return buffer
        return None

    def add_present(self, mask: int) -> None:
        """The granules' bytes are on disk."""
        for block in range(BLOCKS_PER_CHUNK):
            shift = block * GRANULES_PER_BLOCK
            if mask >> shift & BLOCK_MASK:
                if not self.present >> shift & BLOCK_MASK:
                    self.owner.blocks += 1
                self.dirty |= 1 << block
        self.present |= mask

    def drop_present(self, mask: int) -> None:
        """The granules' bytes are no longer to be used."""
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
        """Remember the checksums of granules from `first` on."""
        start = first * _CHECKSUM_BYTES
        self.checksums[start : start + len(checksums)] = checksums

    def is_idle(self) -> bool:
        """Say whether nothing refers to the chunk, so that it can leave memory without loss."""
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


@dataclass(eq=False, slots=True)
class Fetch:
    """One fetch or load of neighbouring granules first..stop-1 of a chunk into one frame.

    received: bytes from `first` on that are valid, written by the thread. wake_at: the thread calls the
    loop when `received` reaches it. After a failure `first` moves past what came. Times in seconds of the
    loop's clock; started_at: of its first attempt; demanded_at: since when a reader waits for it.
    Of the newest attempt: is_underway, a thread works on it; first_byte_seconds, until the first piece of the body;
    longest_gap_seconds, between two pieces; interruption ends it; is_given_up, it went silent and is being ended.
    early_retries: attempts that were begun without a pause; denials: how often the bucket said that this version is
    gone. error: why it ended without all bytes; kept: if somebody made it, set once they are on disk or given up.
    """

    chunk: Chunk
    first: int
    stop: int
    source: FetchSource
    cause: Cause
    depth: int
    handle: object
    queued_at: float
    started_at: float | None = None
    state: FetchState = FetchState.QUEUED
    demanded_at: float | None = None
    buffer: "Buffer | None" = None
    received: int = 0
    first_byte_seconds: float | None = None
    longest_gap_seconds: float = 0.0
    interruption: Interruption | None = None
    is_underway: bool = False
    is_given_up: bool = False
    early_retries: int = 0
    wake_at: int = 1 << 62
    attempts: int = 0
    queue: "FetchQueue[Fetch] | None" = None
    denials: int = 0
    error: Exception | None = None
    kept: trio.Event | None = None

    @property
    def mask(self) -> int:
        """The granules that it still brings."""
        return mask_between(self.first, self.stop)

    @property
    def size(self) -> int:
        """The bytes that it still brings."""
        return min(self.stop * GRANULE_BYTES, self.chunk.size) - self.first * GRANULE_BYTES

    def begin_attempt(self) -> None:
        """Forget what was noted of an earlier attempt."""
        self.attempts += 1
        self.received = 0
        self.first_byte_seconds = None
        self.longest_gap_seconds = 0.0
        self.interruption = Interruption()
        self.is_underway = self.is_given_up = False

    def is_overdue(self, now: float) -> bool:
        """Return whether a reader has waited for it as long as readers wait."""
        return self.demanded_at is not None and now >= self.demanded_at + DEMAND_SECONDS

    def absorb(self) -> None:
        """Count the whole granules that have arrived as valid."""
        if self.buffer is not None and self.received:
            self.buffer.valid |= received_mask(self.first, self.stop, self.received)


@dataclass(eq=False, slots=True)
class Buffer:
    """A buffer with bytes of one chunk, from granule `first` on. valid: the chunk's granules it holds."""

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
        """Return the buffer from a granule on, to its end: page-aligned, with room for padding."""
        return self.memory[(granule - self.first) * GRANULE_BYTES :]
