"""When each queued change may be published: order, settle delay, one write a second per key, back-off, deferral.

It sends nothing (`publisher.py` does) and never waits: time is an argument. Times are the loop's, in seconds.

A change moves through these sets: later (deferred, whatever the order) -> waiting in the order -> later (first in the
order, but not yet) -> ready.

What keeps changes from the bucket now: the last error of each change that will be retried, and outages.

Not changes that the bucket rejected permanently: `rejections.py` keeps those.

Changes in flight, and the slots that limit them and their requests.

Not the choice of the next change: `schedule.py` and `publisher.py` make it.
"""

from collections import Counter
from collections.abc import AsyncIterator, Callable, Container, Iterable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from itertools import count
from typing import NamedTuple, TypeVar

import trio

from fusecache.engine.namespace.events import Events
from fusecache.engine.namespace.nodes import FileVersion, Operation, QueuedChange, is_removal, is_rename
from fusecache.engine.publish.bucket_writer import BucketWriter
from fusecache.engine.runtime.offload import Offload
from fusecache.engine.writeback.queue import WritebackQueue
from fusecache.model.errors import FusecacheError, RemoteError, Throttled, Unavailable
from fusecache.model.objects import MIB
from fusecache.model.records import FileState, OperationKind
from fusecache.policy.backoff import Outage, RequestLimit
from fusecache.policy.name_patterns import matches_any

# Cloudflare R2 answers 429 above one write a second to a key.
KEY_INTERVAL_SECONDS = 1.1
# A file that stays closed this long under a temporary name is published under it: no rename is likely.
TEMPORARY_SECONDS = 60.0
# Longest time that a removed object stays in the bucket because processes here have it open.
READERS_SECONDS = 600.0
# Interval at which a removal is checked that waits for open handles, or for a commit marker: no event tells their end.
_HANDLE_POLL_SECONDS = 1.0
# Changes that send more than this have a queue of their own, and never block the others.
LIGHT_BYTES = 4 * MIB
# Keys whose last write is remembered before entries older than KEY_INTERVAL_SECONDS are dropped.
_KEYS_REMEMBERED = 4096
_NEVER = float("inf")
T = TypeVar("T")


class _Ready(NamedTuple):
    """A change that is due. failures: number of its failed attempts."""

    failures: int
    sequence: int
    tie: int
    item: QueuedChange


class PublishSchedule:
    """Hands out queued changes, each when it is due, oldest first."""

    def __init__(
        self,
        queue: WritebackQueue,
        *,
        settle_seconds: float,
        temp_names: tuple[str, ...],
        delete_delay: float,
    ) -> None:
        self._queue = queue
        self._order = queue.order
        self._settle_seconds = settle_seconds
        self._temp_names = temp_names
        self._delete_delay = delete_delay
        # How many callers drain: without settle delay, and nothing is deferred.
        self.draining = 0
        self._ties = count()
        # A heap by time: changes that are deferred until then, or free in the order, but not due before then.
        self._later: list[tuple[float, int, QueuedChange]] = []
        # Due now, by (light, failed before).
        self._ready: dict[tuple[bool, bool], list[_Ready]] = {
            (light, failed): [] for light in (True, False) for failed in (False, True)
        }
        self._last_write: dict[str, float] = {}
        self.failing = FailingChanges()

    # ---- events

    def on_added(self, item: QueuedChange, now: float) -> None:
        """A change was queued."""
        until = self._deferred_until(item, now)
        if until > now:
            self._look_at(item, until)
        else:
            self._end_deferrals_before(item, now)
        if is_rename(item):
            for content in self._queue.for_key(item.record.key)[:-1]:
                self._look_at(content, now)  # not deferred any more, if its name was temporary

    def _end_deferrals_before(self, item: QueuedChange, now: float) -> None:
        """A change is queued, and not deferred: neither are removals of commit markers for which it must wait."""
        for removal in filter(is_removal, map(self._queue.get, self._order.markers_before(item.sequence))):
            if not removal.has_dependent_write:
                removal.has_dependent_write = True
                self._look_at(removal, now)

    def on_removed(self, item: QueuedChange) -> None:
        """A change left the queue."""
        self.failing.discard(item)

    def on_resumed(self, now: float) -> None:
        """What is queued came from the journal: the last daemon may have sent it, or an older version, until now."""
        self._last_write = {key: now for item in self._queue.items() for key in item.changed_keys()}

    def on_written(self, item: QueuedChange, now: float) -> None:
        """The request that publishes a change is sent, or was answered, now."""
        if len(self._last_write) > _KEYS_REMEMBERED:
            recent = now - KEY_INTERVAL_SECONDS
            self._last_write = {key: moment for key, moment in self._last_write.items() if moment > recent}
        self._last_write[item.changed_keys()[-1]] = now

    def recompute(self, now: float) -> None:
        """Compute all times again: pauses ended, or an outage began, or draining began or ended."""
        self._later = [(now, tie, item) for _, tie, item in self._later]
        heapify(self._later)

    def rebuild(self, in_flight: Container[QueuedChange], now: float) -> None:
        """Hand out all changes again that are not in flight: after a failure, some may be in none of the sets."""
        items = [
            item for item in self._queue.items() if item.sequence in self._order and item not in in_flight
        ]
        self._later = [
            (now, next(self._ties), item) for item in items if self._order.is_deferred(item.sequence)
        ]
        for heap in self._ready.values():
            heap.clear()
        for item in items:
            self._order.give_back(item.sequence)

    # ---- what is due

    def next(self, now: float, *, light: bool, failed: bool) -> QueuedChange | None:
        """Return the oldest change that is due, None if there is none. light: one that sends few bytes.

        failed: whether it may be one that failed before; among these the one with the fewest failures comes first.
        Each change is handed out once: a caller that does not publish it returns it with `requeue`.
        """
        kinds = [(light, False), (light, True)] if failed else [(light, False)]
        return self._take(now, kinds, lambda first: first.sequence)

    def next_probe(self, now: float) -> QueuedChange | None:
        """Return, as `next` does, the change with the fewest failures: the best half-open probe of the bucket."""
        return self._take(now, self._ready, lambda first: first[:2])

    def requeue(self, item: QueuedChange, now: float) -> None:
        """A change was handed out but not published, or was queued again: hand it out again later."""
        if item not in self._queue:
            return
        if self._order.is_free(item.sequence):
            self._look_at(item, now + max(0.001, self._delay(item, now)))
        else:
            self._order.give_back(item.sequence)

    def may_go(self, item: QueuedChange, now: float) -> bool:
        """Return whether a change may be published at this moment."""
        return item in self._queue and self._order.is_free(item.sequence) and self._delay(item, now) <= 0

    def next_time(self) -> float:
        """Return when to look again if nothing happens."""
        return self._later[0][0] if self._later else _NEVER

    def is_settled(self, version: FileVersion, now: float) -> bool:
        """Return whether the settle delay after the close is over: no more changes are expected."""
        if version.state not in {FileState.SEALED, FileState.PUBLISHING}:
            return False
        return self.draining > 0 or now >= version.sealed_at + self._settle_seconds

    def is_deferred(self, item: QueuedChange, now: float) -> bool:
        """Return whether a change is not to be published for now, whatever its place in the order."""
        return self._deferred_until(item, now) > now

    def deferred_seconds(self, item: Operation, now: float) -> float:
        """Return for how long at most a removal stays deferred, 0 if it is not; at least so long if it is blocked."""
        if self._is_blocked(item) and any(
            each not in self._queue for each in self._queue.markers_blocking(item)
        ):
            return _HANDLE_POLL_SECONDS  # not if it only waits for what is queued
        if not self.is_deferred(item, now):
            return 0.0
        is_read = item.readers is not None and item.readers.handles > 0
        return item.queued_at + max(self._delete_delay, READERS_SECONDS if is_read else 0.0) - now

    # ---- inside

    def _take(
        self,
        now: float,
        kinds: Iterable[tuple[bool, bool]],
        rank: "Callable[[_Ready], int | tuple[int, ...]]",
    ) -> QueuedChange | None:
        self._advance(now)
        heaps = [self._ready[kind] for kind in kinds]
        while ready := [heap for heap in heaps if heap]:
            item = heappop(min(ready, key=lambda heap: rank(heap[0]))).item
            if item not in self._queue:
                continue
            if self.may_go(item, now):
                return item
            self.requeue(item, now)
            self._advance(now)
        return None

    def _advance(self, now: float) -> None:
        """Move changes on that time, or the order, has freed."""
        while self._later and self._later[0][0] <= now:
            _, _, item = heappop(self._later)
            if item not in self._queue:
                continue
            if not self._order.is_deferred(item.sequence):
                self._enqueue(item, now)
            elif (until := self._deferred_until(item, now)) > now:
                self._look_at(item, until)
            else:
                self._order.undefer(item.sequence)
                self._end_deferrals_before(item, now)
        while (sequence := self._order.next_free()) is not None:
            free = self._queue.get(sequence)
            if free is not None:
                self._enqueue(free, now)

    def _enqueue(self, item: QueuedChange, now: float) -> None:
        delay = self._delay(item, now)
        if delay > 0:
            self._look_at(item, now + delay)
        else:
            failures = self.failing.of(item).count
            entry = _Ready(failures, item.sequence, next(self._ties), item)
            heappush(self._ready[is_light(item), failures > 0], entry)

    def _look_at(self, item: QueuedChange, moment: float) -> None:
        heappush(self._later, (moment, next(self._ties), item))

    def _delay(self, item: QueuedChange, now: float) -> float:
        """Return the seconds until the change may be published; 0: now."""
        settle = 0.0 if self.draining else self._settle_seconds
        # Removals settle too: the file that replaces the name may follow a moment later.
        ready = settle + (item.sealed_at if isinstance(item, FileVersion) else item.queued_at)
        if self._is_blocked(item):
            ready = max(ready, now + _HANDLE_POLL_SECONDS)
        for key in item.changed_keys():
            ready = max(ready, self._last_write.get(key, float("-inf")) + KEY_INTERVAL_SECONDS)
        return max(0.0, max(ready, self.failing.of(item).pause_until) - now)

    def _is_blocked(self, item: QueuedChange) -> bool:
        """Return whether a delete waits for a held commit marker; not if the name was written again since."""
        return (
            is_removal(item)
            and self._queue.for_key(item.record.key)[-1:] == [item]
            and bool(self._queue.markers_blocking(item))
        )

    def _deferred_until(self, item: QueuedChange, now: float) -> float:
        if self.draining:
            return float("-inf")
        if isinstance(item, FileVersion):
            key = item.record.key
            if not matches_any(key.rpartition("/")[2], self._temp_names):
                return float("-inf")
            newer = [each for each in self._queue.for_key(key) if each.sequence > item.sequence]
            is_renamed = any(is_rename(each) and each.record.key == key for each in newer)
            return float("-inf") if is_renamed else item.sealed_at + TEMPORARY_SECONDS
        return (
            self._delete_deferred_until(item, now)
            if item.record.kind is OperationKind.DELETE
            else float("-inf")
        )

    def _delete_deferred_until(self, item: Operation, now: float) -> float:
        """Return until when a removed object stays in the bucket; -inf if it may be gone already."""
        if item.has_dependent_write or item.in_flight:
            return float("-inf")
        until = item.queued_at + self._delete_delay if self._delete_delay else float("-inf")
        if item.readers is not None and item.readers.handles:
            until = max(until, min(now + _HANDLE_POLL_SECONDS, item.queued_at + READERS_SECONDS))
        return until


def is_light(item: QueuedChange) -> bool:
    """Return whether a change sends few bytes."""
    return not isinstance(item, FileVersion) or item.size <= LIGHT_BYTES


@dataclass(slots=True)
class Failures:
    """The failed attempts of a change. first: time of the first one; pause_until: no retry before this time.

    restarts: how often its parts were sent again from the start. error: the last one, None after an attempt succeeded.
    """

    count: int = 0
    restarts: int = 0
    first: float = _NEVER
    pause_until: float = float("-inf")
    error: FusecacheError | None = None


class FailingChanges:
    """The failures of queued changes. outage: the circuit breaker of all publishing requests."""

    def __init__(self) -> None:
        self._failures: dict[QueuedChange, Failures] = {}
        self.outage = Outage()

    def __iter__(self) -> Iterator[QueuedChange]:
        """Yield the changes whose last request failed in a way that may pass."""
        return (item for item, each in self._failures.items() if each.error is not None)

    def of(self, item: QueuedChange) -> Failures:
        """Return the failures of a change, not to be modified."""
        return self._failures.get(item, _NO_FAILURES)

    def _errors(self) -> list[tuple[FusecacheError, float]]:
        return [(each.error, each.first) for each in self._failures.values() if each.error is not None]

    @property
    def failure(self) -> FusecacheError | None:
        """The error that keeps changes from the bucket, if there is one; first the kind that a person can fix."""
        # Throttling alone is no failure: the publisher slows down and goes on, unless the circuit is open.
        is_on = self.outage.is_on
        errors = [error for error, _ in self._errors() if is_on or not isinstance(error, Throttled)]
        mendable = (error for error in errors if not isinstance(error, Unavailable))
        return next(mendable, errors[0] if errors else None)

    @property
    def blocking_error(self) -> FusecacheError | None:
        """The error that seems to block all publishing: no request has succeeded since it was first seen.

        Only a kind that a person can fix.
        """
        errors = (error for error, first in self._errors() if self.outage.last_success < first)
        return next((error for error in errors if not isinstance(error, Unavailable)), None)

    def add(self, item: QueuedChange, error: FusecacheError) -> Failures:
        """A request for a queued change failed; return its failures. The caller counts this one, and sets the pause."""
        failures = self._failures.setdefault(item, Failures())
        failures.first = min(failures.first, trio.current_time())
        failures.error = item.error = error
        return failures

    def clear(self, item: QueuedChange) -> None:
        """The bucket accepted a request for a change: its failures are over."""
        item.error = None
        failures = self._failures.get(item)
        if failures is not None:
            failures.first, failures.count, failures.error = _NEVER, 0, None

    def discard(self, item: QueuedChange) -> None:
        """A change left the queue; its error stays with it."""
        self._failures.pop(item, None)

    def end_pauses(self) -> None:
        """The cause of failures seems to be gone: no change pauses any longer."""
        for failures in self._failures.values():
            failures.pause_until = float("-inf")


_NO_FAILURES = Failures()


# Light changes in flight at once, and heavy ones. A request to a distant bucket takes 100 ms, of which the node works 1
# or 2 ms: 64 keep it busy. Heavy changes mostly wait for their parts. Changes that failed before get at most half.
CHANGES_AT_ONCE = 64
# Of these, PutObject requests that carry many bytes. Parts have their own limit, in `multipart_uploader.py`.
SENDING_AT_ONCE = 16


class PublishRequests:
    """The changes that the publisher has begun to publish, and their requests. A light change sends few bytes."""

    def __init__(self, writer: BucketWriter, offload: Offload, limit: RequestLimit, events: Events) -> None:
        """limit: of all requests to the bucket, reads too: a bucket that throttles gets fewer of all kinds."""
        self.writer = writer
        self._offload = offload
        self._limit = limit
        self._events = events
        # Whether each change is light, and whether it failed before.
        self._changes: dict[QueuedChange, tuple[bool, bool]] = {}
        self._failed_before: Counter[bool] = Counter()
        self._requests = 0
        self._slots = trio.CapacityLimiter(CHANGES_AT_ONCE)
        self._body_slots = trio.CapacityLimiter(SENDING_AT_ONCE)
        # How many changes are light.
        self.light = 0

    def __contains__(self, item: object) -> bool:
        return item in self._changes

    @property
    def is_sending(self) -> bool:
        """Whether a light change is in flight, or a request of any change."""
        return bool(self.light or self._requests)

    def begin(self, item: QueuedChange, *, light: bool, failed: bool) -> None:
        """Count a change until `end`. failed: it failed before."""
        self._changes[item] = light, failed
        self.light += light
        self._failed_before[light] += failed

    def end(self, item: QueuedChange) -> None:
        """The attempt to publish a change is over."""
        light, failed = self._changes.pop(item)
        self.light -= light
        self._failed_before[light] -= failed

    def has_slot(self, *, light: bool) -> bool:
        """Return whether another light, or heavy, change may begin."""
        count = self.light if light else len(self._changes) - self.light
        return count < CHANGES_AT_ONCE

    def has_slot_after_failure(self, *, light: bool) -> bool:
        """Return whether that change may be one that failed before."""
        return self._failed_before[light] < CHANGES_AT_ONCE // 2

    async def wait_allowed(self) -> None:
        """Return once the bucket does not throttle."""
        silent_until = self._limit.silent_until
        if trio.current_time() < silent_until:  # a sleep that ends at once costs a tenth of a millisecond
            await trio.sleep_until(silent_until)

    async def send(self, call: Callable[..., T], *args: object, sends_bytes: bool = False) -> T:
        """Send one request in a thread; tell the shared limit how the bucket takes it."""
        send = self._offload.upload if sends_bytes else self._offload.publish
        try:
            answer = await send(call, *args)
        except RemoteError as exc:
            if exc.asks_to_slow_down:
                self._limit.on_throttled(trio.current_time(), exc.retry_after_seconds)
            raise
        self._limit.on_success(trio.current_time())
        self._events.on_accepted()
        return answer

    @asynccontextmanager
    async def slot(self, *, sends_bytes: bool) -> AsyncIterator[None]:
        """Hold the slot of one request. sends_bytes: it carries many."""
        slots, most = (self._body_slots, SENDING_AT_ONCE) if sends_bytes else (self._slots, CHANGES_AT_ONCE)
        slots.total_tokens = min(most, self._limit.limit)
        async with slots:
            self._requests += 1
            try:
                yield
            finally:
                self._requests -= 1
