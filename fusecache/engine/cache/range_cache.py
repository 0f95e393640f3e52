"""Exact bytes that hints name before whole files come: held in memory, for as long as they are about to be read.

The first batches of a shuffled epoch take a few KiB from each of hundreds of shards. Granules would bring four times
as much as is read, shards a thousand times; so these come byte by byte, rounded to the kernel's pages, and are kept in
no cache: the whole shards come behind them.

Used on the loop only.

Invariants:
1. Memory is bounded by SNIPPET_BYTES, which a snippet takes before it is asked for.
2. A reader of a snippet gets its bytes, or is sent on to the cache: no error of one reaches him.
"""

import math
from bisect import bisect_right
from dataclasses import dataclass, field

import trio

from fusecache.engine.cache.fetcher import Fetcher, RangeTicket
from fusecache.model.objects import MIB, Extent, ObjectId
from fusecache.policy.cache.granules import PAGE_BYTES

# 8 batches of 512 samples of 16 KiB.
RANGE_CACHE_BYTES = 64 * MIB
# A larger piece wastes little at the borders of its granules.
RANGE_BYTES_MAX = MIB
# Longer than this a reader waits for no snippet; the cache asks again, and knows what to do with silence.
MAX_WAIT_SECONDS = 5.0


@dataclass(eq=False, slots=True)
class CachedRange:
    """Bytes [start, stop) of an object, on their way or there.

    read_at: when some of them were first given to a reader; given_bytes: how many were, repetitions counted.
    """

    object_id: ObjectId
    start: int
    stop: int
    ticket: RangeTicket
    data: memoryview | None = None
    read_at: float = math.inf
    given_bytes: int = 0
    is_held: bool = True
    ended: trio.Event = field(default_factory=trio.Event)


class RangeCache:
    """The snippets of a cache, found by object and place."""

    def __init__(self, fetcher: Fetcher) -> None:
        self._fetcher = fetcher
        # Those of an object, in the order of their starts.
        self._of: dict[ObjectId, list[CachedRange]] = {}
        # Those that the kernel was given whole, the first first: a job that lags behind its reads has no use for them.
        self._read: dict[CachedRange, None] = {}
        self.held_bytes = 0

    def __bool__(self) -> bool:
        return bool(self._of)

    def fits(self, extent: Extent) -> bool:
        """Say whether there is room for an extent; what was read goes for it."""
        most = RANGE_CACHE_BYTES - _rounded(extent, extent.stop).size
        while self.held_bytes > most and self._read:
            cached_range = next(iter(self._read))
            self.drop(cached_range)
            cached_range.data = None  # it may be remembered until its job has come past its step
        return self.held_bytes <= most

    def find(self, object_id: ObjectId, extent: Extent) -> CachedRange | None:
        """Return the snippet that holds an extent, here or on its way."""
        return self._find(object_id, extent.start, extent.stop)

    def begin(self, object_id: ObjectId, size: int, extent: Extent, depth: int) -> CachedRange:
        """Take room for an extent of an object of `size` bytes, rounded to pages; `fetch` must follow."""
        whole = _rounded(extent, size)
        cached_range = CachedRange(object_id, whole.start, whole.stop, RangeTicket(depth))
        there = self._of.setdefault(object_id, [])
        there.insert(bisect_right(there, cached_range.start, key=lambda other: other.start), cached_range)
        self.held_bytes += whole.size
        return cached_range

    async def fetch(self, cached_range: CachedRange) -> None:
        """Bring the bytes. Raises RemoteError; nothing is held then."""
        extent = Extent(cached_range.start, cached_range.stop)
        data = memoryview(bytearray(extent.size))
        try:
            await self._fetcher.get_exactly(cached_range.object_id, extent, data, cached_range.ticket)
            cached_range.data = data
        except BaseException:
            self.drop(cached_range)
            raise
        finally:
            cached_range.ended.set()

    def drop(self, cached_range: CachedRange) -> None:
        """Let a snippet go, if it is not gone."""
        cached_range.is_held = False
        self._read.pop(cached_range, None)
        there = self._of.get(cached_range.object_id, [])
        if cached_range in there:
            there.remove(cached_range)
            self.held_bytes -= cached_range.stop - cached_range.start
            if not there:
                del self._of[cached_range.object_id]

    async def read(self, object_id: ObjectId, start: int, stop: int) -> memoryview | None:
        """Return bytes [start, stop) if a snippet holds them all, waiting for it if it is on its way; else None."""
        cached_range = self._find(object_id, start, stop)
        if cached_range is None:
            return None
        if cached_range.data is None:
            self._fetcher.expedite(cached_range.ticket)
            with trio.move_on_after(MAX_WAIT_SECONDS):
                await cached_range.ended.wait()
        if cached_range.data is None:
            return None
        cached_range.read_at = min(cached_range.read_at, trio.current_time())
        cached_range.given_bytes += stop - start
        if cached_range.is_held and cached_range.given_bytes >= cached_range.stop - cached_range.start:
            self._read[cached_range] = None
        return cached_range.data[start - cached_range.start : stop - cached_range.start]

    def _find(self, object_id: ObjectId, start: int, stop: int) -> CachedRange | None:
        there = self._of.get(object_id)
        if there is None:
            return None
        place = bisect_right(there, start, key=lambda cached_range: cached_range.start) - 1
        if place < 0 or there[place].stop < stop:
            return None
        return there[place]


def _rounded(extent: Extent, size: int) -> Extent:
    """Return an extent as the kernel will ask for it: in whole pages, up to the file's end."""
    return Extent(
        extent.start // PAGE_BYTES * PAGE_BYTES, min(size, -(-extent.stop // PAGE_BYTES) * PAGE_BYTES)
    )


def is_worth_it(extent: Extent) -> bool:
    """Say whether an extent is small enough for a snippet."""
    return extent.size <= RANGE_BYTES_MAX
