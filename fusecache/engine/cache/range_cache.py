"""Exact byte ranges of hinted samples, held in memory until they are read. They bridge the time until whole files come.

The first batches of a shuffled epoch read a few KiB from each of hundreds of shards. Fetching granules would transfer
four times the bytes read, fetching shards a thousand times. So these ranges are fetched exactly, rounded to the
kernel's pages. They are never stored on disk, as the whole shards follow.

Used on the trio loop only.

Invariants:
1. Memory is bounded by RANGE_CACHE_BYTES. A range counts before it is requested.
2. A reader of a range gets its bytes, or falls back to the block cache. No error of a range's fetch reaches a reader.
"""

import math
from bisect import bisect_right
from dataclasses import dataclass, field

import trio

from fusecache.engine.cache.chunks import RangeTicket
from fusecache.engine.cache.fetcher import Fetcher
from fusecache.model.objects import MIB, Extent, ObjectId
from fusecache.policy.cache.granules import PAGE_BYTES

# 8 batches of 512 samples of 16 KiB.
RANGE_CACHE_BYTES = 64 * MIB
# A larger extent is fetched as granules: it wastes little at its borders.
RANGE_BYTES_MAX = MIB
# A reader waits at most 5 s for a range. Then the block cache fetches the bytes, with retries and stall detection.
MAX_WAIT_SECONDS = 5.0


@dataclass(eq=False, slots=True)
class CachedRange:
    """Bytes [start, stop) of an object, in flight or in memory. data: None until they have come.

    read_at: when a reader first got some of them; given_bytes: how many bytes readers got, repetitions included.
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
    """The exact ranges of a cache, by object and position."""

    def __init__(self, fetcher: Fetcher) -> None:
        self._fetcher = fetcher
        # The ranges of an object, in the order of their starts.
        self._by_object: dict[ObjectId, list[CachedRange]] = {}
        # Ranges that were read as a whole, the first read first. They are dropped first: the job has
        # them, even if its cursor lags behind.
        self._read: dict[CachedRange, None] = {}
        self.held_bytes = 0

    def __bool__(self) -> bool:
        return bool(self._by_object)

    def fits(self, extent: Extent) -> bool:
        """Return whether an extent fits in memory. Drops ranges that were read to make space."""
        most = RANGE_CACHE_BYTES - _rounded(extent, extent.stop).size
        while self.held_bytes > most and self._read:
            cached_range = next(iter(self._read))
            self.drop(cached_range)
            cached_range.data = None  # the prefetcher refers to it until its job is past its step
        return self.held_bytes <= most

    def find(self, object_id: ObjectId, extent: Extent) -> CachedRange | None:
        """Return a range that holds an extent, in memory or in flight; None if there is none."""
        return self._find(object_id, extent.start, extent.stop)

    def begin(self, object_id: ObjectId, size: int, extent: Extent, depth: int) -> CachedRange:
        """Reserve memory for an extent of an object of `size` bytes, rounded to pages; `fetch` must follow."""
        whole = _rounded(extent, size)
        cached_range = CachedRange(object_id, whole.start, whole.stop, RangeTicket(depth, whole.size))
        ranges = self._by_object.setdefault(object_id, [])
        ranges.insert(bisect_right(ranges, cached_range.start, key=lambda other: other.start), cached_range)
        self.held_bytes += whole.size
        return cached_range

    async def fetch(self, cached_range: CachedRange) -> None:
        """Fetch the bytes. Raises RemoteError and holds no memory then."""
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
        """Release the memory of a range. Does nothing the second time."""
        cached_range.is_held = False
        self._read.pop(cached_range, None)
        ranges = self._by_object.get(cached_range.object_id, [])
        if cached_range in ranges:
            ranges.remove(cached_range)
            self.held_bytes -= cached_range.stop - cached_range.start
            if not ranges:
                del self._by_object[cached_range.object_id]

    async def read(self, object_id: ObjectId, start: int, stop: int) -> memoryview | None:
        """Return bytes [start, stop) if a range holds them all, waiting if it is in flight; else None."""
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
        ranges = self._by_object.get(object_id)
        if ranges is None:
            return None
        position = bisect_right(ranges, start, key=lambda cached_range: cached_range.start) - 1
        if position < 0 or ranges[position].stop < stop:
            return None
        return ranges[position]


def _rounded(extent: Extent, size: int) -> Extent:
    """Return an extent as the kernel will read it: whole pages, up to the end of the file."""
    return Extent(
        extent.start // PAGE_BYTES * PAGE_BYTES, min(size, -(-extent.stop // PAGE_BYTES) * PAGE_BYTES)
    )


def is_worth_it(extent: Extent) -> bool:
    """Return whether an extent is small enough for an exact range."""
    return extent.size <= RANGE_BYTES_MAX
