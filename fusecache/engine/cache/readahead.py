"""Looks at what readers read and asks for what they will want next, within their shares of the buffers.

Used on the loop only; decides by `policy.readahead`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from fusecache.engine.cache.block_table import BlockTable
from fusecache.engine.cache.buffer_pool import BufferPool
from fusecache.engine.cache.chunks import CachedObject, Chunk
from fusecache.engine.cache.fetcher import Fetcher
from fusecache.model.objects import Extent
from fusecache.policy.cache.fetch_order import Cause
from fusecache.policy.cache.granules import CHUNK_BYTES, mask_of_bytes, split_by_chunk
from fusecache.policy.cache.readahead import (
    Phase,
    ReadPattern,
    ahead,
    choose_stream,
    fair_bound_bytes,
    observe,
    request_bytes,
    shrink,
    side_stream,
)

if TYPE_CHECKING:
    import trio

# A stream that has not read for this long leaves its share of the buffers to the others.
STREAM_IDLE_SECONDS = 5.0
# Threads that share one open file, or fault on one mapping, are told apart up to this number.
STREAMS_PER_HANDLE = 8


@dataclass(eq=False, slots=True)
class ReadStream:
    """One way through an object: what its reads look like, and until where they are read ahead."""

    entry: CachedObject
    pattern: ReadPattern = field(default_factory=ReadPattern)
    ahead_until: int = 0
    read_at: float = 0.0


class Readahead:
    """Owns the streams that are read ahead. The nursery is given before the first read."""

    def __init__(self, table: BlockTable, buffer_pool: BufferPool, fetcher: Fetcher) -> None:
        self._table = table
        self._buffer_pool = buffer_pool
        self._fetcher = fetcher
        self._active: set[ReadStream] = set()
        self.nursery: trio.Nursery | None = None
        fetcher.on_refused = self._shrink

    def observe(
        self, streams: list[ReadStream], entry: CachedObject, start: int, stop: int, now: float
    ) -> ReadStream:
        """Return the stream of an open file that a read of [start, stop) belongs to; it knows of the read now.

        streams: the file's, the last used first; changed in place.
        """
        index = choose_stream([stream.pattern for stream in streams], start)
        if index is not None:
            stream = streams.pop(index)
            stream.pattern = observe(stream.pattern, start, stop)
        else:
            # A jump. Whether the other streams go on is open: what they have queued can be asked for again.
            for other in streams:
                self._stop(other)
            stream = ReadStream(entry)
            if streams:
                stream.pattern = side_stream(stop, streams[0].pattern.near_bytes)
            else:
                stream.pattern = observe(stream.pattern, start, stop)
            del streams[STREAMS_PER_HANDLE - 1 :]
        streams.insert(0, stream)
        stream.read_at = now
        if stream.pattern.phase is Phase.RANDOM and stream.ahead_until:
            self._stop(stream)
        return stream

    def close(self, streams: Sequence[ReadStream]) -> None:
        """Their file is closed."""
        for stream in streams:
            self._stop(stream)

    def forget_idle(self, now: float) -> None:
        """Give the shares of streams that rest to the others."""
        self._active = {stream for stream in self._active if now - stream.read_at < STREAM_IDLE_SECONDS}

    def run(self, stream: ReadStream) -> None:
        """Ask for what a sequential reader will want next."""
        if stream.pattern.phase is not Phase.SEQUENTIAL:
            return
        self._active.add(stream)
        bound = fair_bound_bytes(self._buffer_pool.large_count, len(self._active))
        extent = ahead(stream.pattern, stream.entry.size, bound)
        if extent is None or extent.stop <= stream.ahead_until:
            return
        start = max(extent.start, stream.ahead_until)
        stream.ahead_until = extent.stop
        here = stream.pattern.position // CHUNK_BYTES
        unloaded = []
        for index, first, last in split_by_chunk(Extent(start, extent.stop)):
            chunk = self._table.new_chunk(stream.entry, index)
            if chunk.loaded:
                self._request(stream, chunk, mask_of_bytes(first, last), index - here)
            else:
                unloaded.append((chunk, mask_of_bytes(first, last), index - here))
        if unloaded and self.nursery is not None:
            self.nursery.start_soon(self._run_unloaded, stream, unloaded, name="read-ahead-rows")
        self._fetcher.pump()

    # ---- private

    async def _run_unloaded(self, stream: ReadStream, pieces: list[tuple[Chunk, int, int]]) -> None:
        """Load the rows of chunks, then read them ahead."""
        for chunk, mask, depth in pieces:
            if stream not in self._active:
                return  # closed, or random by now
            await self._table.load_chunk(chunk)
            if stream not in self._active or chunk.owner.chunks.get(chunk.index) is not chunk:
                return
            self._request(stream, chunk, mask, depth)
            self._fetcher.pump()

    def _request(self, stream: ReadStream, chunk: Chunk, mask: int, depth: int) -> None:
        most = request_bytes(stream.pattern)
        self._fetcher.request(chunk, mask, Cause.READAHEAD, depth=depth, handle=stream, most_bytes=most)

    def _stop(self, stream: ReadStream) -> None:
        """Take back what only this stream's read-ahead has queued."""
        if stream.ahead_until:
            self._fetcher.cancel_readahead(stream, list(stream.entry.chunks.values()))
            stream.ahead_until = 0
        self._active.discard(stream)

    def _shrink(self, handle: object) -> None:
        """There was no buffer for a stream's read-ahead."""
        if isinstance(handle, ReadStream):
            handle.pattern = shrink(handle.pattern)
