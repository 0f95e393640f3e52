"""What the cache knows in memory: objects, their chunks, the buffers ("frames") that hold bytes of them.

Used on the loop only, never from a thread; nothing here awaits.

Invariants:
1. A frame with `busy > 0` has a thread reading or writing it; one of a pinned chunk has a reader about to
look at it: neither is recycled.
2. A bit of `Chunk.present` is set only after its bytes are in the cache file, and cleared before they go.
3. A granule is pending in at most one request.
"""

import enum
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field

import trio

from fusecache.disk.buffers import BufferPool
from fusecache.model.nouns import GRANULE_BYTES, GRANULES_PER_BLOCK, ObjectId
from fusecache.policy.fetch_order import Cause
from fusecache.policy.granules import (
    BLOCK_MASK,
    BLOCKS_PER_CHUNK,
    GRANULES_PER_CHUNK,
    chunk_size,
    mask_between,
    received_mask,
)

_CHECKSUM_BYTES = 8
SMALL_GRANULES = 2
# Bytes read ahead of a reader are not taken away for another's read-ahead until they look abandoned.
ABANDONED_SECONDS = 2.0


class Source(enum.Enum):
    """Where the bytes of a request come from."""

    NETWORK = "a ranged GET"
    DISK = "the cache file"


class RequestState(enum.Enum):
    """The life of a request: QUEUED -> RUNNING -> PAUSED -> QUEUED … -> DONE; QUEUED -> DONE when given up."""

    QUEUED = "in its queue"
    PAUSED = "failed; waits before it is queued again"
    RUNNING = "a thread fills its frame"
    DONE = "nothing more will arrive"


@dataclass(eq=False, slots=True)
class Waiter:
    """A reader that waits for granules of one chunk, or for the news that they will not come."""

    need: int
    event: trio.Event = field(default_factory=trio.Event)
    error: Exception | None = None


@dataclass(eq=False, slots=True)
class CachedObject:
    """One object version in memory. blocks: how many of its blocks have a granule on disk."""

    object_id: ObjectId
    size: int
    loading: trio.Event | None = None
    loaded: bool = False
    number: int | None = None
    blocks: int = 0
    handles: int = 0
    disk_operations: int = 0
    chunks: dict[int, "Chunk"] = field(default_factory=dict)


@dataclass(eq=False, slots=True)
class Chunk:
    """8 MiB of an object. All masks are granules of the chunk, but `dirty`, which is blocks.

    present: on disk; verified: of those, checked or written by this process;
    dirty: blocks whose row the index does not have yet.
    """

    owner: CachedObject
    index: int
    size: int = 0
    loaded: bool = False
    loading: trio.Event | None = None
    present: int = 0
    verified: int = 0
    dirty: int = 0
    stamp: int = 0
    pins: int = 0
    disk_operations: int = 0
    checksums: bytearray = field(default_factory=lambda: bytearray(GRANULES_PER_CHUNK * _CHECKSUM_BYTES))
    frames: list["Frame"] = field(default_factory=list)
    requests: list["Request"] = field(default_factory=list)
    waiters: list[Waiter] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.size = chunk_size(self.owner.size, self.index)

    def in_memory(self) -> int:
        """Return the granules that some frame holds, counting what running requests have received so far."""
        mask = 0
        for request in self.requests:
            request.absorb()
        for frame in self.frames:
            mask |= frame.valid
        return mask

    def pending(self) -> int:
        """Return the granules that requests will still bring."""
        mask = 0
        for request in self.requests:
            mask |= request.mask
        return mask

    def frame_with(self, mask: int) -> "Frame | None":
        """Return a frame that holds all these granules."""
        for frame in self.frames:
            if not mask & ~frame.valid:
                return frame
        return None

    def frame_of(self, granule: int) -> "Frame | None":
        """Return a frame that holds this granule."""
        return self.frame_with(1 << granule)

    def frame_for(self, first: int, stop: int) -> "Frame | None":
        """Return a frame with room for granules first..stop-1, whatever it holds of them."""
        for frame in self.frames:
            if not frame.small or frame.first <= first < stop <= frame.first + SMALL_GRANULES:
                return frame
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
        self.verified &= ~mask

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
            self.frames
            or self.requests
            or self.waiters
            or self.pins
            or self.disk_operations
            or self.dirty
            or self.loading is not None
        )


@dataclass(eq=False, slots=True)
class Request:
    """One fetch or load of neighbouring granules first..stop-1 of a chunk into one frame.

    received: bytes from `first` on that are valid, written by the thread. wake_at: the thread calls the
    loop when `received` reaches it. After a failure `first` moves past what came. Times in seconds of the
    loop's clock; demanded_at: since when a reader waits for it.
    """

    chunk: Chunk
    first: int
    stop: int
    source: Source
    cause: Cause
    depth: int
    handle: object
    queued_at: float
    state: RequestState = RequestState.QUEUED
    demanded_at: float | None = None
    frame: "Frame | None" = None
    received: int = 0
    wake_at: int = 1 << 62
    attempts: int = 0

    @property
    def mask(self) -> int:
        """The granules that it still brings."""
        return mask_between(self.first, self.stop)

    @property
    def size(self) -> int:
        """The bytes that it still brings."""
        return min(self.stop * GRANULE_BYTES, self.chunk.size) - self.first * GRANULE_BYTES

    def absorb(self) -> None:
        """Count the whole granules that have arrived as valid."""
        if self.frame is not None and self.received:
            self.frame.valid |= received_mask(self.first, self.stop, self.received)


@dataclass(eq=False, slots=True)
class Frame:
    """A buffer of the pool with bytes of one chunk, from granule `first` on. valid: granules of the chunk it holds."""

    buffer: memoryview
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
        return self.buffer[start - base : stop - base]

    def view_from(self, granule: int) -> memoryview:
        """Return the buffer from a granule on, to its end: page-aligned, with room for padding."""
        return self.buffer[(granule - self.first) * GRANULE_BYTES :]


class Frames:
    """Hands out frames: free ones first, then clean ones, those already consumed before those not yet read."""

    def __init__(self, pool: BufferPool, on_recycled: Callable[[Chunk], None]) -> None:
        self._free = {
            False: [Frame(buffer, small=False) for buffer in pool.large],
            True: [Frame(buffer, small=True) for buffer in pool.small],
        }
        # Frames that no thread uses, least recently touched first. Keyed by id: a frame is its identity.
        self._consumed: dict[bool, OrderedDict[int, Frame]] = {False: OrderedDict(), True: OrderedDict()}
        self._clean: dict[bool, OrderedDict[int, Frame]] = {False: OrderedDict(), True: OrderedDict()}
        self._on_recycled = on_recycled
        self.large_count = len(pool.large)
        self.small_count = len(pool.small)
        # Read-ahead leaves these to demand.
        self._reserve = max(1, self.large_count // 16)

    @property
    def in_use(self) -> int:
        """Frames that hold something."""
        return self.large_count + self.small_count - len(self._free[True]) - len(self._free[False])

    def acquire(self, *, small: bool, cause: Cause, now: float) -> Frame | None:
        """Return an empty frame, None if there is none that this cause may take."""
        free = self._free[small]
        if free and (cause is Cause.DEMAND or len(free) > self._reserve):
            return free.pop()
        for shelf in (self._consumed[small], self._clean[small]):
            for frame in shelf.values():
                assert frame.chunk is not None
                if frame.chunk.pins:
                    continue
                if (
                    shelf is self._clean[small]
                    and cause is not Cause.DEMAND
                    and now - frame.touched_at < ABANDONED_SECONDS
                ):
                    return None
                self.release(frame)
                return self._free[small].pop()
        return None

    def hold(self, frame: Frame) -> None:
        """A thread is about to use the frame."""
        frame.busy += 1
        self._unshelve(frame)

    def let_go(self, frame: Frame, now: float) -> None:
        """A thread no longer uses the frame."""
        frame.busy -= 1
        if frame.busy:
            return
        if not frame.valid:
            # Nothing came. Were it kept, readers that wait for retries could pin all frames and get none.
            self.release(frame)
        else:
            frame.touched_at = now
            shelf = self._consumed if frame.is_consumed else self._clean
            shelf[frame.small][id(frame)] = frame

    def touch(self, frame: Frame, now: float) -> None:
        """A reader used the frame."""
        frame.touched_at = now
        for shelf in (self._clean[frame.small], self._consumed[frame.small]):
            if id(frame) in shelf:
                shelf.move_to_end(id(frame))

    def consume(self, frame: Frame) -> None:
        """A reader has read the frame to its end: it is the first to be reused."""
        frame.is_consumed = True  # known also if a thread still writes it out
        if self._clean[frame.small].pop(id(frame), None) is not None:
            self._consumed[frame.small][id(frame)] = frame

    def release(self, frame: Frame) -> None:
        """Empty a frame that no thread uses."""
        assert not frame.busy, "a frame in use cannot be released"
        chunk = frame.chunk
        assert chunk is not None
        self._unshelve(frame)
        chunk.frames.remove(frame)
        frame.chunk, frame.first, frame.valid = None, 0, 0
        self._free[frame.small].append(frame)
        self._on_recycled(chunk)

    def give(self, frame: Frame, chunk: Chunk, first: int) -> None:
        """Let an empty frame hold granules of `chunk` from `first` on."""
        frame.chunk, frame.first, frame.valid, frame.is_consumed = chunk, first, 0, False
        chunk.frames.append(frame)

    def _unshelve(self, frame: Frame) -> None:
        self._clean[frame.small].pop(id(frame), None)
        self._consumed[frame.small].pop(id(frame), None)
