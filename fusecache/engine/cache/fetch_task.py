"""Runs one GET of a fetch: the attempt, the wake-ups of its readers, and its retry or end. Aborts GETs that stall.

Used on the trio loop, except `_get`, which runs in a thread. Not here: queues and buffers (`fetcher`).

Invariant: one thread at a time fills a granule. A fetch is queued again only after its thread has ended.
"""

import logging
import random
import time
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Protocol

import trio

from fusecache.engine.cache.chunks import Buffer, Chunk, Fetch, FetchSource, FetchState
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
from fusecache.policy.cache.granules import CHUNK_BYTES
from fusecache.policy.cache.stall_timeout import EARLY_RETRIES, WaitHistory
from fusecache.remote.store import Interruption

log = logging.getLogger(__name__)

# New tokens take a while until all servers accept them, but wrong credentials should fail soon.
ACCESS_DENIED_RETRIES = 3
# One wrong 404, 412 or 416 must not fail a reader's file. The version counts as gone when 2 more GETs say so too.
DENIALS_CHECKED = 2
# A stall is noticed at most this late, plus the loop's own delay. A check of 64 fetches takes some 20 microseconds.
LOOK_SECONDS = 0.1


class RangeReader(Protocol):
    """The part of a store that the read path uses."""

    def get_into(
        self,
        object_id: ObjectId,
        extent: Extent,
        buffer: memoryview,
        progress: Callable[[int], None],
        interruption: Interruption | None = None,
    ) -> None:
        """Fill `buffer[:extent.size]`; see `fusecache.remote.store.Store`."""
        ...


class FetchScheduler(Protocol):
    """The part of the fetcher that a GET uses."""

    tasks: TaskNursery

    def requeue(self, fetch: Fetch) -> None:
        """Queue a fetch for its next attempt, and start fetches while connections and buffers allow."""
        ...

    def end(self, fetch: Fetch, error: FusecacheError | None = None) -> None:
        """End a fetch: nothing more will arrive by it. Wakes its readers."""
        ...

    def on_failed(self, fetch: Fetch, error: InternalError) -> None:
        """A task of a fetch failed unexpectedly: end the fetch."""
        ...

    async def store_on_disk(
        self, chunk: Chunk, buffer: Buffer, first: int, stop: int, *, must_store: bool
    ) -> None:
        """Write granules to disk unless it is too slow for that; then release the buffer."""
        ...

    def pump(self) -> None:
        """Start fetches while connections and buffers allow."""
        ...


class FetchTasks:
    """Runs the GETs of fetches. running: how many GETs and loads are in flight, shared with the fetcher."""

    def __init__(
        self,
        store: RangeReader,
        offload: Offload,
        counters: Counters,
        limit: RequestLimit,
        running: dict[FetchSource, int],
        scheduler: FetchScheduler,
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
            await self._offload.network(self._get, fetch, Extent(base, base + length), view)
            fetch.received = length
        except RemoteError as exc:
            error = exc
        finally:
            self._running[FetchSource.NETWORK] -= 1
            self.last_get_at = trio.current_time()
            self._stalls.end(fetch)
        if fetch.first_byte_seconds is not None:
            self._counters.first_byte.count(fetch.first_byte_seconds)
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
            if received >= fetch.wake_at:
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
