"""The pool of buffers: which are free, which hold clean bytes, and which is recycled next.

Used on the trio loop only. Nothing here awaits, so a reply that views a buffer stays valid until the next checkpoint.
`LentBuffers` keeps it valid longer.
"""

from collections import OrderedDict
from collections.abc import Callable
from functools import partial

import trio

from fusecache.disk.direct_reads import LARGE_BYTES, SMALL_BYTES, AlignedBuffers
from fusecache.engine.cache.chunks import Buffer, Chunk
from fusecache.policy.cache.fetch_order import Cause

# A hint or read-ahead takes an unread buffer only if it was not used for 2 s: its reader seems to have left.
ABANDONED_SECONDS = 2.0


class BufferPool:
    """Gives out buffers: free ones first, then clean ones, the consumed before the unread."""

    def __init__(self, pool: AlignedBuffers, on_recycled: Callable[[Chunk], None]) -> None:
        self._large = [Buffer(buffer, small=False) for buffer in pool.large]
        self._small = [Buffer(buffer, small=True) for buffer in pool.small]
        self._free = {False: list(self._large), True: list(self._small)}
        # Where callers wait that want to know of a lack.
        self.lack = trio.lowlevel.ParkingLot()
        # Buffers that no thread uses, the least recently used first. Keyed by id, as a buffer is compared by identity.
        self._consumed: dict[bool, OrderedDict[int, Buffer]] = {False: OrderedDict(), True: OrderedDict()}
        self._clean: dict[bool, OrderedDict[int, Buffer]] = {False: OrderedDict(), True: OrderedDict()}
        self._on_recycled = on_recycled
        self.large_count = len(pool.large)
        self.small_count = len(pool.small)
        # Hints and read-ahead leave these free buffers to demand.
        self._reserve = max(1, self.large_count // 16)

    @property
    def in_use(self) -> int:
        """How many buffers are not free."""
        return self.large_count + self.small_count - len(self._free[True]) - len(self._free[False])

    def acquire(self, *, small: bool, cause: Cause, now: float) -> Buffer | None:
        """Return an empty buffer, None if there is none that this cause may take."""
        free = self._free[small]
        if free and (cause is Cause.DEMAND or len(free) > self._reserve):
            return free.pop()
        for shelf in (self._consumed[small], self._clean[small]):
            for buffer in shelf.values():
                assert buffer.chunk is not None
                if buffer.chunk.readers:
                    continue
                if (
                    shelf is self._clean[small]
                    and cause is not Cause.DEMAND
                    and now - buffer.touched_at < ABANDONED_SECONDS
                ):
                    return None
                self.release(buffer)
                return self._free[small].pop()
        self.lack.unpark_all()
        return None

    def at(self, offset: int) -> Buffer:
        """Return the buffer that has the byte at an offset of the pool's memory."""
        number, rest = divmod(offset, LARGE_BYTES)
        if number < self.large_count:
            return self._large[number]
        return self._small[((number - self.large_count) * LARGE_BYTES + rest) // SMALL_BYTES]

    def acquire_use(self, buffer: Buffer) -> None:
        """A thread is about to use the buffer."""
        buffer.busy += 1
        self._unshelve(buffer)

    def release_use(self, buffer: Buffer, now: float) -> None:
        """A thread no longer uses the buffer."""
        buffer.busy -= 1
        if buffer.busy:
            return
        if not buffer.valid:
            # No bytes came. Otherwise readers that wait for retries could hold all buffers, and none could be filled.
            self.release(buffer)
        else:
            buffer.touched_at = now
            shelf = self._consumed if buffer.is_consumed else self._clean
            shelf[buffer.small][id(buffer)] = buffer

    def touch(self, buffer: Buffer, now: float) -> None:
        """A reader used the buffer."""
        buffer.touched_at = now
        for shelf in (self._clean[buffer.small], self._consumed[buffer.small]):
            if id(buffer) in shelf:
                shelf.move_to_end(id(buffer))

    def mark_consumed(self, buffer: Buffer) -> None:
        """A reader has read the buffer to its end: it is recycled first."""
        buffer.is_consumed = True  # also if a thread still writes it to disk: `release_use` needs it
        if self._clean[buffer.small].pop(id(buffer), None) is not None:
            self._consumed[buffer.small][id(buffer)] = buffer

    def release(self, buffer: Buffer) -> None:
        """Empty a buffer that no thread uses."""
        assert not buffer.busy, "a buffer in use cannot be released"
        chunk = buffer.chunk
        assert chunk is not None
        self._unshelve(buffer)
        chunk.buffers.remove(buffer)
        buffer.chunk, buffer.first, buffer.valid = None, 0, 0
        self._free[buffer.small].append(buffer)
        self._on_recycled(chunk)

    def give(self, buffer: Buffer, chunk: Chunk, first: int) -> None:
        """Assign an empty buffer to granules of `chunk` from `first` on."""
        buffer.chunk, buffer.first, buffer.valid, buffer.is_consumed = chunk, first, 0, False
        chunk.buffers.append(buffer)

    def _unshelve(self, buffer: Buffer) -> None:
        self._clean[buffer.small].pop(id(buffer), None)
        self._consumed[buffer.small].pop(id(buffer), None)


class LentBuffers:
    """Keeps buffers as they are while other processes copy replies out of them: a `ReplyMemory` of the FUSE session.

    fd: of the memory, -1 if it is not shared.
    """

    def __init__(
        self, memory: AlignedBuffers, buffers: BufferPool, on_given_back: Callable[[], None]
    ) -> None:
        self._memory = memory
        self._buffers = buffers
        self._on_given_back = on_given_back
        self.fd = memory.fd
        self.offset_of = memory.offset_of

    def lend(self, payload: memoryview) -> tuple[int, Callable[[], None]] | None:
        """Keep the bytes of a reply as they are; return where they begin, and what gives them back.

        None: they lie elsewhere, or a fetch was just given their buffer: copy them now.
        """
        offset = self._memory.offset_of(payload)
        if offset is None:
            return None
        buffer = self._buffers.at(offset)
        if not buffer.valid:
            return None
        self._buffers.acquire_use(buffer)
        return offset, partial(self._give_back, buffer)

    async def lacking(self) -> None:
        """Return when a fetch finds no buffer."""
        await self._buffers.lack.park()

    def _give_back(self, buffer: Buffer) -> None:
        self._buffers.release_use(buffer, trio.current_time())
        self._on_given_back()
