"""Queues fetches of granules and gives them buffers: GETs from the bucket, direct I/O loads from the cache file.

Fetches wait in queues ordered by cause. `pump` starts as many as connections and buffers allow. Each runs as a task of
the cache's own nursery, so a cancelled reader breaks nothing for the others. Readers wait on their chunk and wake as
soon as *their* granules are in memory. `FetchTasks` runs one GET: the attempt, the wake-ups, its retry or end; a GET
that stalls is aborted. Used on the trio loop, except `_get`, which runs in a thread.

Invariants:
1. At most one fetch is in flight for a granule (`Chunk.pending`), and one thread at a time fills it: a fetch is queued
   again only after its thread has ended.
2. A fetch takes a buffer before it starts. It holds the buffer (`busy`) until its bytes are on disk or dropped.
3. A reader gets only the errors of fetches that a reader waits for.
"""

import logging
import random
import time
from collections.abc import Awaitable, Callable
from functools import partial

import trio

from fusecache.engine.cache.buffer_pool import BufferPool
from fusecache.engine.cache.chunks import (
    Buffer,
    Chunk,
    ChunkWaiter,
    Fetch,
    FetchListener,
    FetchSource,
    FetchState,
    RangeTicket,
)
from fusecache.engine.cache.disk_tier import MAX_QUEUE_SECONDS, DiskTier, DiskWriteQueue
from fusecache.engine.cache.peer_fetch import PeerFetches
from fusecache.engine.cache.statistics import Counters
from fusecache.engine.runtime.offload import Offload
from fusecache.engine.runtime.supervisor import TaskNursery
from fusecache.model.errors import (
    AccessDenied,
    FusecacheError,
    InternalError,
    ObjectChanged,
    ObjectMissing,
    RemoteError,
    Unavailable,
)
from fusecache.model.objects import GRANULE_BYTES, Extent, ObjectId
from fusecache.policy.backoff import RequestLimit, backoff_seconds
from fusecache.policy.cache.fetch_order import Cause, FetchQueue
from fusecache.policy.cache.granules import CHUNK_BYTES, GRANULES_PER_CHUNK, pieces, runs
from fusecache.policy.cache.stall_timeout import EARLY_RETRIES, WaitHistory
from fusecache.remote.store import Interruption, Peers, ReadStore

log = logging.getLogger(__name__)

# New tokens take a while until all servers accept them, but wrong credentials should fail soon.
ACCESS_DENIED_RETRIES = 3
# One wrong 404, 412 or 416 must not fail a reader's file. The version counts as gone when 2 more GETs say so too.
DENIALS_CHECKED = 2
# A stall is noticed at most this late, plus the loop's own delay. A check of 64 fetches takes some 20 microseconds.
LOOK_SECONDS = 0.1


class FetchTasks:
    """Runs the GETs of fetches. running: how many GETs and loads are in flight, shared with the fetcher."""

    def __init__(
        self,
        store: ReadStore,
        offload: Offload,
        counters: Counters,
        limit: RequestLimit,
        running: dict[FetchSource, int],
        scheduler: "Fetcher",
    ) -> None:
        self._store = store
        self._offload = offload
        self._counters = counters
        self._limit = limit
        self._running = running
        self._scheduler = scheduler
        self._stalls = StallWatch(counters, lambda watch: scheduler.tasks.keep({"stall-watch": watch}))
        self._random = random.Random()
        # When the last GET ended, by the loop's clock.
        self.last_get_at = float("-inf")

    async def run(self, fetch: Fetch) -> None:
        """Run one GET, queue a retry of the rest while it is worth it, then store on disk what came."""
        chunk, buffer, first = fetch.chunk, fetch.buffer, fetch.first
        assert buffer is not None
        store = self._scheduler.store_on_disk
        try:
            stop = await self._attempt(fetch, buffer)
        except Exception:
            if fetch.buffer is buffer:
                fetch.buffer = None
            await store(chunk, buffer, first, first, must_store=False)  # gives the buffer back
            raise
        # By now the fetch may have its next attempt. Bytes that cannot be stored are served from memory.
        await self._scheduler.tasks.supervisor.guard(
            "cache-write", partial(store, chunk, buffer, first, stop, must_store=fetch.kept is not None)
        )
        if fetch.kept is not None and fetch.state is FetchState.DONE:
            fetch.kept.set()

    async def _attempt(self, fetch: Fetch, buffer: Buffer) -> int:
        """Run one GET, and end the fetch or queue a retry of the rest. Return up to which granule it delivered."""
        error: RemoteError | None = None
        try:
            self._stalls.begin(fetch)
            offset, length = fetch.first * GRANULE_BYTES, fetch.size
            base = fetch.chunk.index * CHUNK_BYTES + offset
            fetch.begin_attempt()
            self._counters.requests += 1
            fetch.register_wake_up()
            view = buffer.view(offset, offset + length)
            began = trio.current_time()
            await self._offload.network(self._get, fetch, Extent(base, base + length), view)
            fetch.received = length
            self._scheduler.on_body(length, trio.current_time() - began)
        except RemoteError as exc:
            error = exc
        finally:
            self._running[FetchSource.NETWORK] -= 1
            self.last_get_at = trio.current_time()
            self._stalls.end(fetch)
        self._counters.bytes_by_cause[fetch.cause.name.lower()] += fetch.received
        if fetch.received == length:
            buffer.valid |= fetch.mask
            self._limit.on_success(trio.current_time())
            self._scheduler.end(fetch)
            return fetch.stop
        assert error is not None
        fetch.absorb()
        has_lost_connection = not error.asks_to_slow_down and (fetch.is_aborted or fetch.received > 0)
        stop = fetch.first = fetch.first + fetch.received // GRANULE_BYTES
        fetch.received = 0
        fetch.buffer = None
        if has_lost_connection and fetch.early_retries < EARLY_RETRIES and self._has_time(fetch):
            self._retry_early(fetch)
        else:
            self._retry_or_end(fetch, error)
        return stop

    def pay(self, nbytes: int, now: float) -> None:
        """A GET starts: the next one waits until the download rate allows it, and is started then."""
        seconds = self._limit.pace.charge(now, nbytes)
        if seconds > 0:
            self._scheduler.tasks.start_soon("fetch-pace", self._pump_after, seconds)

    def slow_down(self, error: RemoteError, now: float) -> None:
        """Lower the limit of requests in flight. Pause all if the bucket sent Retry-After."""
        self._limit.on_throttled(now, error.retry_after_seconds)
        if self._limit.silent_until > now:
            pump_then = partial(self._pump_after, self._limit.silent_until - now)
            self._scheduler.tasks.keep({"fetch-silence": pump_then})

    def _get(self, fetch: Fetch, extent: Extent, buffer: memoryview) -> None:
        """Run in a thread: the GET. It calls the loop only when a reader waits for bytes that came."""

        last = time.perf_counter()
        fetch.is_underway = True

        def progress(received: int) -> None:
            nonlocal last
            fetch.received = received  # before the check of wake_at: see `Fetch.register_wake_up`
            now = time.perf_counter()
            if fetch.first_byte_seconds is None:
                fetch.first_byte_seconds = now - last
            elif now - last > fetch.longest_gap_seconds:
                fetch.longest_gap_seconds = now - last
            last = now
            if fetch.wake_at <= received < extent.size:  # at its end, the call wakes the loop
                fetch.wake_at = 1 << 62
                self._offload.call_soon(self._on_progress, fetch)

        object_id = fetch.chunk.owner.object_id
        self._store.get_into(object_id, extent, buffer, progress, fetch.interruption)

    def _on_progress(self, fetch: Fetch) -> None:
        """The thread has received bytes that a reader waits for."""
        if fetch.state is FetchState.RUNNING:
            fetch.chunk.wake_readers()
            fetch.register_wake_up()

    def _has_time(self, fetch: Fetch) -> bool:
        """Return whether no reader has waited for the fetch as long as readers wait."""
        return not fetch.is_overdue(trio.current_time())

    def _retry_early(self, fetch: Fetch) -> None:
        """Queue the rest without a pause: the connection failed, not the bucket."""
        self._counters.errors += 1
        fetch.early_retries += 1
        fetch.chunk.wake_readers()
        self._scheduler.requeue(fetch)

    def _retry_or_end(self, fetch: Fetch, error: RemoteError) -> None:
        """Queue the rest again after a pause if the error may pass and its reader has time; else end the fetch."""
        now = trio.current_time()
        self._counters.errors += 1
        if error.asks_to_slow_down:
            self.slow_down(error, now)
        retriable = isinstance(error, Unavailable) or (
            isinstance(error, AccessDenied) and fetch.attempts <= ACCESS_DENIED_RETRIES
        )
        if isinstance(error, (ObjectChanged, ObjectMissing)):
            fetch.denials += 1
            retriable = fetch.denials <= DENIALS_CHECKED
        left = 0.0 if fetch.give_up_at is None else fetch.give_up_at - now
        if not retriable or left <= 0:
            log.debug("fetch failed key=%s error=%s", fetch.chunk.owner.object_id.key, error)
            self._scheduler.end(fetch, error)
            return
        fetch.state = FetchState.PAUSED
        fetch.chunk.wake_readers()
        pause = min(left, backoff_seconds(fetch.attempts, self._random.random()))
        if fetch.denials:
            pause = 0.0  # the bucket answered, so it is up: a retry costs one round trip
        self._scheduler.tasks.start_soon(
            "fetch-pause",
            self._requeue_after,
            fetch,
            pause,
            on_failed=partial(self._scheduler.on_failed, fetch),
        )
        self._scheduler.pump()

    async def _requeue_after(self, fetch: Fetch, pause_seconds: float) -> None:
        await trio.sleep(pause_seconds)
        self._scheduler.requeue(fetch)

    async def _pump_after(self, seconds: float) -> None:
        await trio.sleep(seconds)
        self._scheduler.pump()


class StallWatch:
    """Watches the GETs in flight, and aborts those without bytes, so that they are retried on another connection."""

    def __init__(self, counters: Counters, spawn: Callable[[Callable[[], Awaitable[None]]], None]) -> None:
        """spawn: starts the watching task, a service that ends when no GET is in flight."""
        self._counters = counters
        self._spawn = spawn
        self._first_byte = WaitHistory()
        self._gap = WaitHistory()
        # fetch -> (bytes received, since when no more came). The time is moved forward by the delays of the loop.
        self._seen: dict[Fetch, tuple[int, float]] = {}
        self._is_watching = False

    def begin(self, fetch: Fetch) -> None:
        """Watch a GET that is about to get a thread."""
        self._seen[fetch] = (0, float("inf"))
        if not self._is_watching:
            self._is_watching = True
            self._spawn(self._watch)

    def end(self, fetch: Fetch) -> None:
        """Stop watching a GET and record its waits."""
        del self._seen[fetch]
        if fetch.first_byte_seconds is not None:
            self._first_byte.record(fetch.first_byte_seconds)
            self._gap.record(fetch.longest_gap_seconds)

    async def _watch(self) -> None:
        now = trio.current_time()
        while self._seen:
            due = now + LOOK_SECONDS
            await trio.sleep_until(due)
            now = trio.current_time()
            self._look(now, now - due)
        self._is_watching = False  # and not after a failure: this starts again

    def _look(self, now: float, late_seconds: float) -> None:
        for fetch, (received, seen) in self._seen.items():
            if not fetch.is_underway or fetch.is_aborted:
                continue
            # While the loop was blocked, the machine and its threads may have been too: this is not silence.
            since = seen + late_seconds
            if since == float("inf") or fetch.received > received:
                self._seen[fetch] = (fetch.received, now)
                continue
            self._seen[fetch] = (received, since)
            if fetch.early_retries < EARLY_RETRIES or fetch.is_overdue(now):
                waits = self._gap if received else self._first_byte
                if now - since > waits.deadline_seconds:
                    waits.record(now - since)
                    self._abort(fetch)

    def _abort(self, fetch: Fetch) -> None:
        self._counters.stalls += 1
        fetch.is_aborted = True
        assert fetch.interruption is not None
        fetch.interruption.interrupt()


# 8 loads in flight saturate a local disk by direct I/O.
DISK_LOADS = 8
# Besides, 16 loads of one or two granules in readers' own tasks: they do not queue and take no thread.
SMALL_LOADS = 16
# A reader that is still reading pauses less than this between two GETs; after a longer gap it counts as ended.
IDLE_GAP_SECONDS = 1.0
# How often a reader looks whether its fetch is back in a queue, once its patience is over.
_LOOK_AGAIN_SECONDS = 1.0


class Fetcher:
    """Owns the queues, the limits and the tasks of all fetches and loads."""

    def __init__(
        self,
        store: ReadStore,
        offload: Offload,
        buffer_pool: BufferPool,
        disk: DiskTier,
        counters: Counters,
        tasks: TaskNursery,
        limit: RequestLimit,
        peers: Peers | None = None,
    ) -> None:
        self.tasks = tasks
        self._store = store
        self._offload = offload
        self._buffer_pool = buffer_pool
        self._counters = counters
        self.limit = limit
        self._write_queue = DiskWriteQueue(buffer_pool.large_count)
        self._is_polling = False
        self._running = dict.fromkeys(FetchSource, 0)
        self._gets = FetchTasks(store, offload, counters, self.limit, self._running, self)
        self._peers: PeerFetches | None = None
        if peers is not None:
            self._peers = PeerFetches(peers, offload, buffer_pool, self)
        self._small_loads = 0
        # One queue per source and buffer size: a lack of large buffers must not stop small reads.
        self._queues: dict[tuple[FetchSource, bool], FetchQueue[Fetch]] = {
            (source, small): FetchQueue() for source in FetchSource for small in (False, True)
        }
        # Fetches whose chunk has a buffer for them need no other. Queued behind one that needs a buffer, they could
        # deadlock: the reader that waits for them may hold that buffer.
        self._buffered: dict[FetchSource, FetchQueue[Fetch]] = {
            source: FetchQueue() for source in FetchSource
        }
        # When the last fetch of a queue, or of a source, started.
        self._moved_at: dict[FetchQueue[Fetch] | FetchSource, float] = {}
        self._tickets: FetchQueue[RangeTicket] = FetchQueue()
        fetches = (*self._queues.values(), *self._buffered.values())
        self._queued = (*(each.queued for each in fetches), self._tickets.queued)
        self.disk = disk

    def request(
        self,
        chunk: Chunk,
        mask: int,
        cause: Cause,
        *,
        depth: int = 0,
        handle: FetchListener | None = None,
        most_bytes: int = CHUNK_BYTES,
        for_peer: bool = False,
    ) -> None:
        """Queue fetches for granules that are neither in memory nor pending. Never waits; call `pump` after it.

        most_bytes: of one GET. Several parallel GETs fetch a chunk sooner than one does.
        for_peer: another node waits for them: ask the bucket, and no third node any more.
        """
        now = trio.current_time()
        if for_peer and self._peers is not None:
            self._peers.require_bucket(chunk, mask)
        for fetch in chunk.fetches:
            if fetch.mask & mask:
                self._promote(fetch, cause, now)
        missing = mask & ~chunk.in_memory() & ~chunk.pending()
        absent, node = missing & ~chunk.present, None
        if absent and self._peers is not None and not for_peer:
            node = self._peers.node_for(chunk)
        for source, part in (
            (FetchSource.DISK, missing & chunk.present),
            (FetchSource.NETWORK if node is None else FetchSource.PEER, absent),
        ):
            step = GRANULES_PER_CHUNK if source is FetchSource.DISK else most_bytes // GRANULE_BYTES
            for first, stop in pieces(part, step):
                fetch = Fetch(chunk, first, stop, source, cause, depth, handle, now, node=node)
                if cause is Cause.DEMAND:
                    fetch.give_up_at = now + self.limit.patience_seconds
                chunk.fetches.append(fetch)
                self._push(fetch)

    def is_fetching(self) -> bool:
        """Return whether GETs are in flight, or were within IDLE_GAP_SECONDS."""
        return (
            self._running[FetchSource.NETWORK] > 0
            or trio.current_time() < self._gets.last_get_at + IDLE_GAP_SECONDS
        )

    def cancel_readahead(self, handle: FetchListener, chunks: list[Chunk]) -> None:
        """Cancel queued fetches that only this handle's read-ahead wanted."""
        for chunk in chunks:
            for fetch in list(chunk.fetches):
                if (
                    fetch.handle is handle
                    and fetch.cause is Cause.READAHEAD
                    and fetch.state is FetchState.QUEUED
                ):
                    if fetch.queue is not None:
                        fetch.queue.remove(fetch)
                    self.end(fetch)

    async def wait_for(self, chunk: Chunk, need: int) -> None:
        """Wait until the granules are in memory, or until no fetch will deliver them. Raises the fetch's error.

        Raises Unavailable if a fetch of them is queued until its patience is over, and its queue stands still.

        The caller keeps `chunk.readers` above zero and checks again: perhaps only some granules have come.
        """
        waiter = ChunkWaiter(need)
        chunk.waiters.append(waiter)
        try:
            for fetch in chunk.fetches:
                if fetch.mask & need and fetch.state is FetchState.RUNNING:
                    fetch.register_wake_up()
            if need & ~chunk.in_memory():
                await self._wait_while_queues_move(chunk, waiter)
        finally:
            chunk.waiters.remove(waiter)
        if waiter.error is not None:
            # Each reader gets its own instance: a shared one would collect all their tracebacks.
            raise type(waiter.error)(*waiter.error.args) from waiter.error

    async def _wait_while_queues_move(self, chunk: Chunk, waiter: ChunkWaiter) -> None:
        began = trio.current_time()
        patience = self.limit.patience_seconds
        deadline = began + patience
        while not waiter.event.is_set():
            with trio.move_on_at(deadline):
                await waiter.event.wait()
                return
            now = deadline = trio.current_time()
            for fetch in [each for each in chunk.fetches if each.mask & waiter.need]:
                if fetch.queue is None or fetch not in fetch.queue:
                    continue
                # Queues share the slots, so a queue without one waits its turn while others move.
                line = fetch.queue if self._has_place(fetch) else fetch.source
                stands_since = max(began, self._moved_at.get(line, began))
                if now >= stands_since + patience:
                    self._give_up(fetch, waiter)
                    return
                deadline = max(deadline, stands_since + patience)
            deadline = max(deadline, now + _LOOK_AGAIN_SECONDS)

    def _give_up(self, fetch: Fetch, waiter: ChunkWaiter) -> None:
        """A reader stops waiting for a queued fetch. It leaves the queue unless others need it."""
        chunk = fetch.chunk
        what = "buffer of the read path (is the cache disk slow?)"
        if not self._has_place(fetch):
            what = f"slot for {fetch.source.value}"
        waiter.error = Unavailable(
            f"{chunk.owner.object_id.key}: no free {what} for {self.limit.patience_seconds:.0f} s; retry the read, "
            f"and see `fusecache status`"
        )
        if fetch.kept is None and not any(
            each.need & fetch.mask for each in chunk.waiters if each is not waiter
        ):
            assert fetch.queue is not None
            fetch.queue.remove(fetch)
            self.end(fetch)

    def pump(self) -> None:
        """Start fetches while connections and buffers allow."""
        if not any(self._queued):
            return  # the usual case: every end of a fetch or of a reply calls this
        for source in FetchSource:
            buffered = self._buffered[source]
            queues = (buffered, self._queues[source, True], self._queues[source, False])
            while self._has_slot(source):
                if source is FetchSource.NETWORK and self._give_ticket([queue.peek() for queue in queues]):
                    continue
                # The oldest of equals first: a stream of small reads must not starve a large one.
                heads = [
                    (head.cause, head.depth, head.queued_at, rank, queue, head)
                    for rank, queue in enumerate(queues)
                    if (head := queue.peek()) is not None and self._has_place(head)
                ]
                for *_, queue, head in sorted(heads, key=lambda row: row[:4]):
                    if self._assign_buffer(head):
                        queue.pop()
                        self._start(head)
                        break
                    if queue is buffered:  # the buffer was recycled since it was queued
                        self._push(queue.pop())
                        break
                    if head.cause is not Cause.HINT:
                        self._drop_one_unwritten(head)
                    if head.cause is Cause.READAHEAD and head.handle is not None:
                        head.handle.on_refused()
                else:
                    break

    async def load_at_once(self, chunk: Chunk, first: int, stop: int, handle: FetchListener | None) -> None:
        """Load a few granules from disk in the reader's own task if it can start now; else do nothing.

        None of them may be in memory or pending. Damaged granules do not come. The caller keeps `chunk.readers` above
        zero.
        """
        if self._small_loads >= SMALL_LOADS:
            return
        now = trio.current_time()
        fetch = Fetch(
            chunk, first, stop, FetchSource.DISK, Cause.DEMAND, 0, handle, now, now, FetchState.RUNNING, now
        )
        if not self._assign_buffer(fetch):
            return
        chunk.fetches.append(fetch)
        buffer = fetch.buffer
        assert buffer is not None
        self._merge_small_buffers(chunk, buffer)  # no reply views it: this task has not read yet
        self._small_loads += 1
        try:
            found = await self.disk.load(chunk, buffer, first, stop)
            buffer.valid |= found  # |=: another fetch may have filled other granules during the load
        finally:
            self._small_loads -= 1
            self._buffer_pool.release_use(buffer, trio.current_time())
            self.end(fetch)

    async def get_exactly(
        self, object_id: ObjectId, extent: Extent, buffer: memoryview, ticket: RangeTicket
    ) -> None:
        """Fill `buffer[:extent.size]` by one GET without retries, queued by its ticket. Raises RemoteError."""
        self._tickets.push(ticket, ticket.cause, ticket.depth)
        self.pump()
        try:
            await ticket.is_due.wait()
            await self._offload.network(
                self._store.get_into, object_id, extent, buffer, lambda received: None, Interruption()
            )
            self._counters.bytes_by_cause[ticket.cause.name.lower()] += extent.size
            self.limit.on_success(trio.current_time())
        except RemoteError as exc:
            self._counters.errors += 1
            if exc.asks_to_slow_down:
                self._gets.slow_down(exc, trio.current_time())
            raise
        finally:
            if ticket.is_due.is_set():
                self._running[FetchSource.NETWORK] -= 1
                self._gets.last_get_at = trio.current_time()
            else:
                self._tickets.remove(ticket)
            self.pump()

    def expedite(self, ticket: RangeTicket) -> None:
        """A reader waits for this GET now: move it forward."""
        if ticket in self._tickets:
            ticket.cause, ticket.depth = Cause.DEMAND, 0
            self._tickets.push(ticket, Cause.DEMAND)
            self.pump()

    def _give_ticket(self, others: list[Fetch | None]) -> bool:
        """Start the first ticket's GET if it comes before all queued fetches; return whether it started."""
        ticket = self._tickets.peek()
        if ticket is None or any(
            (head.cause, head.depth) < (ticket.cause, ticket.depth) for head in others if head is not None
        ):
            return False
        self._tickets.pop()
        self._running[FetchSource.NETWORK] += 1
        self._counters.requests += 1
        self._gets.pay(ticket.nbytes, trio.current_time())
        ticket.is_due.set()
        return True

    def _has_slot(self, source: FetchSource) -> bool:
        if source is FetchSource.DISK:
            return self._running[source] < DISK_LOADS
        if source is FetchSource.PEER:
            return self._peers is not None and any(
                self._peers.has_place(is_small=each) for each in (True, False)
            )
        return trio.current_time() >= self.limit.free_at and self._running[source] < self.limit.limit

    def _has_place(self, fetch: Fetch) -> bool:
        if fetch.source is FetchSource.PEER and self._peers is not None:
            return self._peers.has_place(is_small=fetch.is_small)
        return self._has_slot(fetch.source)

    def _push(self, fetch: Fetch) -> None:
        chunk = fetch.chunk
        if chunk.buffer_for(fetch.first, fetch.stop) is not None:
            fetch.queue = self._buffered[fetch.source]
        else:
            fetch.queue = self._queues[fetch.source, fetch.is_small]
        fetch.queue.push(fetch, fetch.cause, fetch.depth)

    def _move_to_buffered(self, chunk: Chunk, but: Fetch) -> None:
        """The chunk has a buffer now: its other queued fetches need not wait for one."""
        for fetch in chunk.fetches:
            queue = fetch.queue
            if fetch is not but and queue is not None and fetch in queue:
                queue.remove(fetch)
                self._push(fetch)

    def _promote(self, fetch: Fetch, cause: Cause, now: float) -> None:
        """Move a fetch forward if the cause is more urgent than its own."""
        if cause is Cause.DEMAND and fetch.give_up_at is None:
            fetch.give_up_at = now + self.limit.patience_seconds
        if cause >= fetch.cause:
            return
        fetch.cause, fetch.depth = cause, 0
        if fetch.queue is not None and fetch in fetch.queue:
            fetch.queue.push(fetch, cause)

    def _assign_buffer(self, fetch: Fetch) -> bool:
        """Give the fetch a buffer: one of its chunk, or an empty one. False if there is none now."""
        fetch.buffer = self._buffer_for(fetch)
        if fetch.buffer is None:
            return False
        self._buffer_pool.acquire_use(fetch.buffer)
        return True

    def _buffer_for(self, fetch: Fetch) -> Buffer | None:
        chunk, now = fetch.chunk, trio.current_time()
        buffer = chunk.buffer_for(fetch.first, fetch.stop)
        if buffer is not None:
            return buffer
        chunk.readers += 1  # recycling must not take this chunk's own buffers
        try:
            if fetch.is_small:
                buffer = self._buffer_pool.acquire(small=True, cause=fetch.cause, now=now)
                if buffer is not None:
                    self._buffer_pool.give(buffer, chunk, fetch.first)
                    self._move_to_buffered(chunk, fetch)
                    return buffer
                if fetch.source is FetchSource.PEER:
                    return None  # what other nodes ask for needs the large ones
            buffer = self._buffer_pool.acquire(small=False, cause=fetch.cause, now=now)
            if buffer is None:
                return None
            self._buffer_pool.give(buffer, chunk, 0)
            self._move_to_buffered(chunk, fetch)
        finally:
            chunk.readers -= 1
        return buffer

    async def _run(self, run: Callable[[Fetch], Awaitable[None]], fetch: Fetch) -> None:
        """Run a fetch as a task: the first that writes to its buffer.

        The task that started it may still view the buffer, in a reply with the bytes that it held before.
        """
        assert fetch.buffer is not None
        if self._merge_small_buffers(fetch.chunk, fetch.buffer):
            self.pump()  # fetches may wait for a small buffer
        await run(fetch)

    def _merge_small_buffers(self, chunk: Chunk, large: Buffer) -> bool:
        """Copy the chunk's small buffers into its large one, so that one buffer answers a read.

        Return whether it had some. Does nothing if `large` is a small one, too.
        """
        merged = [buffer for buffer in chunk.buffers if buffer.small and not buffer.busy and not large.small]
        for buffer in merged:
            for first, stop in runs(buffer.valid):
                start, end = first * GRANULE_BYTES, min(stop * GRANULE_BYTES, chunk.size)
                large.view(start, end)[:] = buffer.view(start, end)
            large.valid |= buffer.valid
            self._buffer_pool.release(buffer)
        return bool(merged)

    def _start(self, fetch: Fetch) -> None:
        fetch.state = FetchState.RUNNING
        if fetch.source is FetchSource.PEER and self._peers is not None:
            self._peers.running[fetch.is_small] += 1
        else:
            self._running[fetch.source] += 1
        now = trio.current_time()
        if is_get := fetch.source is FetchSource.NETWORK:
            self._gets.pay(fetch.size, now)
        fetch.started_at = now if fetch.started_at is None else fetch.started_at
        self._moved_at[fetch.source] = now
        if fetch.queue is not None:
            self._moved_at[fetch.queue] = now
        if fetch.cause is Cause.HINT and fetch.give_up_at is None:
            fetch.give_up_at = now + self.limit.patience_seconds  # as a reader's fetch: a hint named it
        run, name = (self._gets.run, "cache-get") if is_get else (self._load, "cache-load")
        if fetch.source is FetchSource.PEER and self._peers is not None:
            run, name = self._peers.run, "cache-peer"
        about = fetch.chunk.owner.object_id.key
        self.tasks.start_soon(
            name, self._run, run, fetch, about=about, on_failed=partial(self.on_failed, fetch)
        )

    def on_body(self, nbytes: int, seconds: float) -> None:
        """The bucket has sent a body in so much time."""
        if self._peers is not None:
            self._peers.peers.on_bucket_body(nbytes, seconds)

    def requeue(self, fetch: Fetch) -> None:
        """Queue a fetch for its next attempt, and start fetches while connections and buffers allow."""
        fetch.state = FetchState.QUEUED
        fetch.queued_at = trio.current_time()
        self._push(fetch)
        self.pump()

    async def store_on_disk(
        self, chunk: Chunk, buffer: Buffer, first: int, stop: int, *, must_store: bool
    ) -> None:
        """Write granules to disk unless it is too slow for that; then release the buffer."""
        try:
            if first < stop:
                async with self._write_queue.slot(buffer, must_store=must_store) as may_write:
                    if may_write:
                        await self.disk.store(chunk, buffer, first, stop)
                    else:
                        self.disk.count_dropped()
        finally:
            self._buffer_pool.release_use(buffer, trio.current_time())
        self.pump()

    def _drop_one_unwritten(self, fetch: Fetch) -> None:
        """A fetch found no buffer: drop one buffer from the disk write queue.

        Whether a queued write may be dropped depends on its age and on its readers. Neither sends an event, so poll.
        """
        self._write_queue.drop_oldest(small=fetch.is_small, cause=fetch.cause)
        if not self._is_polling and (fetch.cause is Cause.DEMAND or self._write_queue):
            self._is_polling = True
            self.tasks.keep({"slow-disk": self._poll_write_queue})

    async def _poll_write_queue(self) -> None:
        await trio.sleep(MAX_QUEUE_SECONDS)
        self._is_polling = False
        self.pump()

    def on_failed(self, fetch: Fetch, error: InternalError) -> None:
        """A task of a fetch failed unexpectedly: its readers get the error. It holds no buffer any more."""
        if fetch.state in (FetchState.RUNNING, FetchState.PAUSED):
            self.end(fetch, error)
        if fetch.kept is not None and fetch.state is FetchState.DONE:
            fetch.kept.set()

    def end(self, fetch: Fetch, error: FusecacheError | None = None) -> None:
        """End a fetch: nothing more will arrive by it. Wake its readers, with the error if a reader waited for it."""
        fetch.state = FetchState.DONE
        fetch.error = error
        chunk = fetch.chunk
        chunk.fetches.remove(fetch)
        if error is not None and fetch.give_up_at is not None:
            for waiter in chunk.waiters:
                if waiter.need & fetch.mask:
                    waiter.error = error
                    waiter.event.set()
        chunk.wake_readers()
        self.pump()

    async def _load(self, fetch: Fetch) -> None:
        """Load granules from the cache file. Damaged ones stay missing and are fetched from the bucket."""
        buffer = fetch.buffer
        assert buffer is not None
        try:
            found = await self.disk.load(fetch.chunk, buffer, fetch.first, fetch.stop)
            buffer.valid |= found  # |=: another fetch may have filled other granules during the load
        finally:
            self._running[FetchSource.DISK] -= 1
            self._buffer_pool.release_use(buffer, trio.current_time())
        self.end(fetch)
