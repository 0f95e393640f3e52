"""Prefetches the next bytes of sequential readers within their share of the buffers, and the starts of objects.

Used on the trio loop only. The decisions are in `policy.cache.readahead`.
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field

from fusecache.engine.cache.block_table import BlockTable
from fusecache.engine.cache.buffer_pool import BufferPool
from fusecache.engine.cache.chunks import CachedObject, Chunk, FetchListener
from fusecache.engine.cache.fetcher import Fetcher
from fusecache.engine.runtime.supervisor import TaskNursery
from fusecache.model.objects import GRANULE_BYTES, MIB, Extent, ObjectId
from fusecache.policy.cache.fetch_order import Cause
from fusecache.policy.cache.granules import CHUNK_BYTES, mask_of_bytes, split_by_chunk
from fusecache.policy.cache.readahead import (
    Phase,
    ReadPattern,
    ahead,
    choose_stream,
    fair_bound_bytes,
    observe,
    reader_of_all,
    request_bytes,
    shrink,
    side_stream,
)

# A stream that was not read for 5 s loses its share of the buffers to the others.
STREAM_IDLE_SECONDS = 5.0
# Streams tracked per open file, for threads that share it or fault on one mapping of it.
STREAMS_PER_HANDLE = 8
# Two windows of the kernel (fs/kernel.py), which reads ahead in a mapping, too.
_KERNEL_AHEAD_BYTES = 2 * MIB
# A program that reads so many tensors in a row, beyond the one that it jumped to, reads in the order of the file.
_TENSORS_IN_ORDER = 2


@dataclass(eq=False, slots=True)
class ReadStream(FetchListener):
    """One stream of reads of an object: its pattern, and the position up to which it was prefetched.

    jumped_to: the last byte of the read that came to its tensor; 0 if it began at the start of the file. tensors: how
    many more it came to since, without a read elsewhere.
    """

    entry: CachedObject
    pattern: ReadPattern = field(default_factory=ReadPattern)
    ahead_until: int = 0
    read_at: float = 0.0
    jumped_to: int = 0
    tensors: int = 0

    def come_to(self, stop: int, *, has_jumped: bool) -> None:
        """A read ends at `stop`: note its tensor if it is a new one. has_jumped: the last read was elsewhere."""
        if has_jumped:  # the kernel's own read-ahead was in the next tensor before, or behind the header
            self.jumped_to, self.tensors = self.jumped_to or stop - 1, 0
        if self.jumped_to and self.tensors < _TENSORS_IN_ORDER and not self._bound(stop):
            self.jumped_to = stop - 1
            self.tensors += 1

    def bounded(self, wanted: int, stop: int) -> int:
        """Return up to where to fetch for a read that ends at `stop`: no further than its tensor.

        What comes after that is fetched once the program has read on, and not only the kernel's own read-ahead.
        """
        bound = self._bound(stop)
        return max(stop, min(wanted, -(-bound // GRANULE_BYTES) * GRANULE_BYTES)) if bound else wanted

    def _bound(self, stop: int) -> int:
        """Return where the tensor ends that it came to; 0 if that does not matter, or a read ends far beyond."""
        end = _tensor_end(self.entry, self.jumped_to)
        return end if stop <= end + _KERNEL_AHEAD_BYTES else 0

    def on_refused(self) -> None:
        """Shrink the window: the read-ahead found no buffer."""
        self.pattern = shrink(self.pattern)


@dataclass(frozen=True, slots=True)
class PrefetchRange:
    """Bytes [0, stop) to prefetch of an object version of `size` bytes; at most one chunk."""

    object_id: ObjectId
    size: int
    stop: int


class Readahead:
    """Owns the streams with active read-ahead."""

    def __init__(
        self, table: BlockTable, buffer_pool: BufferPool, fetcher: Fetcher, tasks: TaskNursery
    ) -> None:
        self._tasks = tasks
        self._table = table
        self._buffer_pool = buffer_pool
        self._fetcher = fetcher
        self._active: set[ReadStream] = set()

    def observe(
        self, streams: list[ReadStream], entry: CachedObject, start: int, stop: int, now: float
    ) -> ReadStream:
        """Return the stream of an open file that a read of [start, stop) belongs to, with the read recorded.

        streams: those of the file, the last used first; changed in place.
        """
        index = choose_stream([stream.pattern for stream in streams], start)
        is_far = index is not None and abs(start - streams[index].pattern.position) > _KERNEL_AHEAD_BYTES
        if is_far and entry.tensor_ends:
            index = None  # to another tensor
        if index is not None:
            stream = streams.pop(index)
            stream.pattern = observe(stream.pattern, start, stop)
            if is_far:  # to another tensor, if it turns out to be a model
                stream.jumped_to, stream.tensors = stop - 1, 0
            elif entry.tensor_ends:
                stream.come_to(stop, has_jumped=index > 0)
        else:
            # A jump. The other streams may not continue: cancel their queued read-ahead; it can be requested again.
            for other in streams:
                self._stop(other)
            # Around a page fault, the kernel reads half of a window before it: that is of the tensor before.
            stream = ReadStream(entry, jumped_to=stop - 1 if start else 0)
            _end_before(entry, start, stop)
            if streams:
                stream.pattern = side_stream(stop, streams[0].pattern.near_bytes)
            else:
                stream.pattern = observe(stream.pattern, start, stop)
            del streams[STREAMS_PER_HANDLE - 1 :]
        if entry.is_loading and stream.pattern.phase is Phase.RANDOM:
            stream.pattern = reader_of_all(stop)
        streams.insert(0, stream)
        stream.read_at = now
        if stream.pattern.phase is Phase.RANDOM and stream.ahead_until:
            self._stop(stream)
        return stream

    def close(self, streams: Sequence[ReadStream]) -> None:
        """Stop the read-ahead of a closed file."""
        for stream in streams:
            self._stop(stream)

    def forget_idle(self, now: float) -> None:
        """Give the buffer shares of idle streams to the others."""
        self._active = {stream for stream in self._active if now - stream.read_at < STREAM_IDLE_SECONDS}

    def run(self, stream: ReadStream) -> None:
        """Prefetch the next bytes of a stream if it is sequential."""
        if stream.pattern.phase is not Phase.SEQUENTIAL:
            return
        self._active.add(stream)
        bound = fair_bound_bytes(self._buffer_pool.large_count, len(self._active))
        extent = ahead(stream.pattern, stream.entry.size, bound)
        stop = 0 if extent is None else stream.bounded(extent.stop, stream.pattern.position)
        if extent is None or stop <= max(extent.start, stream.ahead_until):
            return
        start = max(extent.start, stream.ahead_until)
        stream.ahead_until = stop
        here = stream.pattern.position // CHUNK_BYTES
        unloaded = []
        for index, first, last in split_by_chunk(Extent(start, stop)):
            chunk = self._table.new_chunk(stream.entry, index)
            if chunk.loaded:
                self._request(stream, chunk, mask_of_bytes(first, last), index - here)
            else:
                unloaded.append((chunk, mask_of_bytes(first, last), index - here))
        if unloaded and self._tasks.is_open:
            self._tasks.start_soon("read-ahead", self._run_unloaded, stream, unloaded)
        self._fetcher.pump()

    def prefetch(self, objects: Sequence[PrefetchRange]) -> None:
        """Prefetch the starts of objects, in the given order. Never waits, never fails."""
        if self._tasks.is_open:
            self._tasks.start_soon("prefetch-files", self._prefetch, objects)

    # ---- private

    async def _prefetch(self, objects: Sequence[PrefetchRange]) -> None:
        held = []
        for wanted in objects:
            known = self._table.objects.get(wanted.object_id)
            if known is None or known.size == wanted.size:
                entry = self._table.object_entry(wanted.object_id, wanted.size)
                entry.handles += 1  # keeps it in memory while its rows are loaded
                held.append((entry, mask_of_bytes(0, wanted.stop)))
        try:
            await self._table.load_objects([entry for entry, _ in held])
            for depth, (entry, mask) in enumerate(held):
                chunk = await self._table.loaded_chunk(entry, 0)
                self._fetcher.request(chunk, mask, Cause.READAHEAD, depth=depth)
            self._fetcher.pump()
        finally:
            for entry, _ in held:
                entry.handles -= 1
                for chunk in list(entry.chunks.values()):
                    self._table.drop_if_idle(chunk)
                self._table.drop_object_if_idle(entry)

    async def _run_unloaded(self, stream: ReadStream, pieces: list[tuple[Chunk, int, int]]) -> None:
        """Load the rows of chunks, then prefetch them."""
        for chunk, mask, depth in pieces:
            if stream not in self._active:
                return  # closed, idle or random by now
            while not chunk.loaded:  # another reader that was loading them may be interrupted
                await self._table.load_rows(chunk.owner, [chunk])
            if stream not in self._active or chunk.owner.chunks.get(chunk.index) is not chunk:
                return
            self._request(stream, chunk, mask, depth)
            self._fetcher.pump()

    def _request(self, stream: ReadStream, chunk: Chunk, mask: int, depth: int) -> None:
        most = request_bytes(stream.pattern)
        self._fetcher.request(chunk, mask, Cause.READAHEAD, depth=depth, handle=stream, most_bytes=most)

    def _stop(self, stream: ReadStream) -> None:
        """Cancel the fetches that only this stream's read-ahead has queued."""
        if stream.ahead_until:
            self._fetcher.cancel_readahead(stream, list(stream.entry.chunks.values()))
            stream.ahead_until = 0
        self._active.discard(stream)


def _tensor_end(entry: CachedObject, place: int) -> int:
    """Return where the tensor ends that has a byte; 0 if that does not matter, as at the start of a file."""
    ends = entry.tensor_ends
    return ends[bisect_right(ends, place)] if ends and place and place < ends[-1] else 0


def _end_before(entry: CachedObject, start: int, stop: int) -> None:
    """A jump reads the end of a tensor: what the kernel has of it need not be fetched with the tensor."""
    ends = entry.tensor_ends
    index = bisect_right(ends, start)
    if index < len(ends) and ends[index] < stop:
        ends[index] = start
