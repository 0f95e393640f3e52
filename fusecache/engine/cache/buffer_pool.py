"""The pool's buffers as frames: which are free, which are clean, and which is reused next.

Used on the loop only; nothing here awaits, so that a reply made of a frame stays valid until the next checkpoint.
"""

from collections import OrderedDict
from collections.abc import Callable

from fusecache.disk.aligned_buffers import BufferPool
from fusecache.engine.cache.chunks import Chunk, Frame
from fusecache.policy.cache.fetch_order import Cause

# Bytes read ahead of a reader are not taken away for another's read-ahead until they look abandoned.
ABANDONED_SECONDS = 2.0


class Frames:
    """Hands out frames: free ones first, then clean ones, the consumed before the unread."""

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
