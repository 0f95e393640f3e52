"""The fetchers of all buckets of a mount as one: each chunk's requests go to the fetcher of its bucket.

Each bucket has queues, a request limit and threads of its own. The buffers are shared: a bucket whose requests hang
holds at most its share of them (`BufferPool`).
"""

from collections.abc import Iterable
from functools import partial

from fusecache.engine.cache.buffer_pool import BufferPool
from fusecache.engine.cache.chunks import Chunk, FetchListener, RangeTicket
from fusecache.engine.cache.disk_tier import DiskTier, DiskWriteQueue
from fusecache.engine.cache.fetcher import Fetcher
from fusecache.engine.cache.statistics import Counters
from fusecache.engine.runtime.by_bucket import ByBucket
from fusecache.engine.runtime.offload import Offload
from fusecache.engine.runtime.supervisor import TaskNursery
from fusecache.model.objects import Extent, ObjectId
from fusecache.policy.backoff import Pace, RequestLimit
from fusecache.policy.cache.fetch_order import Cause
from fusecache.policy.cache.granules import CHUNK_BYTES
from fusecache.remote.store import ReadStore


class Fetchers:
    """One fetcher for each bucket; `of` returns that of a key."""

    def __init__(  # noqa: PLR0913  # it makes the parts that read the bucket and the disk
        self,
        store: ReadStore,
        offload: Offload,
        buffer_pool: BufferPool,
        disk: DiskTier,
        counters: Counters,
        tasks: TaskNursery,
        *,
        connections: int,
        download_rate: float | None,
        patience_seconds: float,
        buckets: Iterable[str],
    ) -> None:
        """connections: most GETs in flight to one bucket. buckets: the names of their folders.

        download_rate: limit of the bytes a second that all buckets are asked for; None: no limit.
        patience_seconds: how long a reader waits for a bucket that does not answer.
        """
        self.disk = disk
        pace = Pace(download_rate)
        write_queue = DiskWriteQueue(buffer_pool.large_count)

        def make(name: str) -> Fetcher:
            return Fetcher(
                store,
                offload.with_own_threads() if name else offload,
                buffer_pool,
                write_queue,
                disk,
                counters,
                tasks,
                limit=RequestLimit(connections, pace, patience_seconds),
                bucket=name,
                on_freed=partial(self._pump_others, name),
            )

        self._fetchers = ByBucket(buckets, make)
        self.of = self._fetchers.of

    def request(
        self,
        chunk: Chunk,
        mask: int,
        cause: Cause,
        *,
        depth: int = 0,
        handle: FetchListener | None = None,
        most_bytes: int = CHUNK_BYTES,
    ) -> None:
        """Queue fetches, as `Fetcher.request` does."""
        self._of(chunk).request(chunk, mask, cause, depth=depth, handle=handle, most_bytes=most_bytes)

    def limit_of(self, key: str) -> RequestLimit:
        """Return how many requests in flight a bucket accepts, learned from reads; other clients may share it."""
        return self.of(key).limit

    def pump(self) -> None:
        """Start fetches while connections and buffers allow."""
        for each in self._fetchers:
            each.pump()

    def is_fetching(self) -> bool:
        """Return whether GETs are in flight, or were within IDLE_GAP_SECONDS."""
        return any(each.is_fetching() for each in self._fetchers)

    def cancel_readahead(self, handle: FetchListener, chunks: list[Chunk]) -> None:
        """Cancel queued fetches that only this handle's read-ahead of one object wanted."""
        if chunks:
            self._of(chunks[0]).cancel_readahead(handle, chunks)

    async def wait_for(self, chunk: Chunk, need: int) -> None:
        """Wait for granules, as `Fetcher.wait_for` does."""
        await self._of(chunk).wait_for(chunk, need)

    async def load_at_once(self, chunk: Chunk, first: int, stop: int, handle: FetchListener | None) -> None:
        """Load a few granules from disk, as `Fetcher.load_at_once` does."""
        await self._of(chunk).load_at_once(chunk, first, stop, handle)

    async def get_exactly(
        self, object_id: ObjectId, extent: Extent, buffer: memoryview, ticket: RangeTicket
    ) -> None:
        """Fill `buffer[:extent.size]`, as `Fetcher.get_exactly` does."""
        await self.of(object_id.key).get_exactly(object_id, extent, buffer, ticket)

    def expedite(self, ticket: RangeTicket) -> None:
        """A reader waits for this GET now: move it forward."""
        for each in self._fetchers:
            each.expedite(ticket)

    def _of(self, chunk: Chunk) -> Fetcher:
        return self.of(chunk.owner.object_id.key)

    def _pump_others(self, name: str) -> None:
        """A bucket's fetch gave a buffer back: another bucket's may need it."""
        for other, fetcher in self._fetchers.items():
            if other != name:
                fetcher.pump()
