"""Fetches from other nodes: which granules are asked there, and what happens if a node does not deliver.

Invariants:
1. What is fetched for another node is never asked of a third one unless that sends already: each could wait for the
   other.
2. A fetch from a node takes no place of those for the bucket, and all of them at most half of the buffers of a size:
   nodes that wait for each other can still fetch for each other.
3. What a node does not deliver, the same fetch asks for elsewhere at once: of the next owner, then of the bucket. So
   nodes that lose the same node do not all ask the bucket.
"""

from functools import partial
from typing import Protocol

from fusecache.engine.cache.buffer_pool import BufferPool
from fusecache.engine.cache.chunks import Buffer, Chunk, Fetch, FetchSource, FetchState
from fusecache.engine.runtime.offload import Offload
from fusecache.engine.runtime.supervisor import TaskNursery
from fusecache.model.errors import ObjectChanged, ObjectMissing, RemoteError
from fusecache.model.objects import GRANULE_BYTES, Extent
from fusecache.policy.cache.granules import CHUNK_BYTES
from fusecache.remote.store import Peers

# A node answers as fast as the link allows; more would wait in its queue instead of in this one's.
PEER_GETS = 16
# Nodes that one fetch asks before the bucket.
_NODES_ASKED = 2


class FetchScheduler(Protocol):
    """What queues fetches, and takes their results: `Fetcher`."""

    tasks: TaskNursery

    def requeue(self, fetch: Fetch) -> None:
        """Queue a fetch for its next attempt."""
        ...

    def end(self, fetch: Fetch) -> None:
        """End a fetch, all of which has come."""
        ...

    async def store_on_disk(
        self, chunk: Chunk, buffer: Buffer, first: int, stop: int, *, must_store: bool
    ) -> None:
        """Write granules to disk unless it is too slow for that; then release the buffer."""
        ...


class PeerFetches:
    """The fetches from other nodes."""

    def __init__(
        self,
        peers: Peers,
        offload: Offload,
        buffers: BufferPool,
        scheduler: FetchScheduler,
    ) -> None:
        self.peers = peers
        self._offload = offload
        self._scheduler = scheduler
        # By whether they are small: those must not wait for large ones, as they do not at the bucket.
        self.running = {True: 0, False: 0}
        self._most = {
            True: max(1, min(PEER_GETS, buffers.small_count // 2)),
            False: max(1, min(PEER_GETS, buffers.large_count // 2)),
        }

    def has_place(self, *, is_small: bool) -> bool:
        """Return whether one more fetch may start."""
        return self.running[is_small] < self._most[is_small]

    def node_for(self, chunk: Chunk) -> str | None:
        """Return the node to ask for granules of a chunk; None: the bucket."""
        return self.peers.owner(chunk.owner.object_id, chunk.index)

    def require_bucket(self, chunk: Chunk, mask: int) -> None:
        """Another node waits: have fetches of these granules ask the bucket unless they receive already."""
        for fetch in [each for each in chunk.fetches if each.mask & mask and each.source is FetchSource.PEER]:
            fetch.is_for_peer = True
            if fetch.state is FetchState.QUEUED:
                assert fetch.queue is not None
                fetch.queue.remove(fetch)
                self._ask(fetch, None)
            elif fetch.interruption is not None and not fetch.received:
                fetch.interruption.interrupt()

    async def run(self, fetch: Fetch) -> None:
        """Ask a node; then store on disk what came, and ask elsewhere for the rest."""
        chunk, buffer, first = fetch.chunk, fetch.buffer, fetch.first
        assert buffer is not None
        stop, is_small = fetch.stop, fetch.is_small
        try:
            fetch.begin_attempt()
            if fetch.is_for_peer and fetch.interruption is not None:
                fetch.interruption.interrupt()
            fetch.register_wake_up()
            offset, length = first * GRANULE_BYTES, fetch.size
            base = chunk.index * CHUNK_BYTES + offset
            view = buffer.view(offset, offset + length)
            try:
                await self._offload.network(self._get, fetch, Extent(base, base + length), view)
            except RemoteError as exc:
                fetch.absorb()
                stop = fetch.first = first + fetch.received // GRANULE_BYTES
                fetch.received = 0
                fetch.buffer = None
                chunk.wake_readers()
                self._ask(fetch, self._next_node(fetch, exc))
            else:
                fetch.received = length
                buffer.valid |= fetch.mask
                self._scheduler.end(fetch)
        except Exception:
            if fetch.buffer is buffer:
                fetch.buffer = None
            await self._scheduler.store_on_disk(chunk, buffer, first, first, must_store=False)
            raise
        finally:
            self.running[is_small] -= 1
        store = partial(
            self._scheduler.store_on_disk, chunk, buffer, first, stop, must_store=fetch.kept is not None
        )
        await self._scheduler.tasks.supervisor.guard("cache-write", store)
        if fetch.kept is not None and fetch.state is FetchState.DONE:
            fetch.kept.set()

    def _next_node(self, fetch: Fetch, error: RemoteError) -> str | None:
        """Return which node to ask after one that did not deliver. None: the bucket."""
        # What the bucket has lost, no other node has.
        is_gone = isinstance(error, (ObjectChanged, ObjectMissing))
        if fetch.is_for_peer or is_gone or fetch.attempts >= _NODES_ASKED:
            return None
        return self.node_for(fetch.chunk)

    def _ask(self, fetch: Fetch, node: str | None) -> None:
        fetch.source, fetch.node = FetchSource.NETWORK if node is None else FetchSource.PEER, node
        if node is None:
            fetch.attempts = 0  # the bucket's retries and pauses count its own
        self._scheduler.requeue(fetch)

    def _get(self, fetch: Fetch, extent: Extent, buffer: memoryview) -> None:
        """Run in a thread: the GET. It calls the loop only when a reader waits for bytes that came."""

        def progress(received: int) -> None:
            fetch.received = received
            if received >= fetch.wake_at:
                fetch.wake_at = 1 << 62
                self._offload.call_soon(self._on_progress, fetch)

        entry = fetch.chunk.owner
        assert fetch.node is not None
        assert fetch.interruption is not None
        self.peers.get_into(
            fetch.node, entry.object_id, entry.size, extent, buffer, progress, fetch.interruption
        )

    def _on_progress(self, fetch: Fetch) -> None:
        if fetch.state is FetchState.RUNNING:
            fetch.chunk.wake_readers()
            fetch.register_wake_up()
