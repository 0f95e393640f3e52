"""Changes in flight, and the slots that limit them and their requests.

Not the choice of the next change: `schedule.py` and `publisher.py` make it.
"""

from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import trio

from fusecache.engine.namespace.nodes import QueuedChange
from fusecache.policy.backoff import RequestLimit

# Changes in flight at once. A request to a distant bucket takes 100 ms, of which the node works 1 or 2 ms: 64 keep it
# busy. Heavy changes mostly wait for their parts. Changes that failed before get at most half of each limit.
LIGHT_AT_ONCE = 64
HEAVY_AT_ONCE = 64
# Of these, PutObject requests that carry many bytes. Parts have their own limit, in `multipart_uploader.py`.
SENDING_AT_ONCE = 16


class ChangesInFlight:
    """The changes that the publisher has begun to publish. A light change sends few bytes."""

    def __init__(self, limit: RequestLimit) -> None:
        """limit: of all requests to the bucket; the slots never exceed it."""
        self._limit = limit
        # Whether each change is light, and whether it failed before.
        self._changes: dict[QueuedChange, tuple[bool, bool]] = {}
        self._failed_before: Counter[bool] = Counter()
        self._requests = 0
        self._slots = trio.CapacityLimiter(LIGHT_AT_ONCE)
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
        return count < _most(light=light)

    def has_slot_after_failure(self, *, light: bool) -> bool:
        """Return whether that change may be one that failed before."""
        return self._failed_before[light] < _most(light=light) // 2

    @asynccontextmanager
    async def request(self, *, sends_bytes: bool) -> AsyncIterator[None]:
        """Hold the slot of one request. sends_bytes: it carries many."""
        slots, most = (self._body_slots, SENDING_AT_ONCE) if sends_bytes else (self._slots, LIGHT_AT_ONCE)
        slots.total_tokens = min(most, self._limit.limit)
        async with slots:
            self._requests += 1
            try:
                yield
            finally:
                self._requests -= 1


def _most(*, light: bool) -> int:
    return LIGHT_AT_ONCE if light else HEAVY_AT_ONCE
