"""What keeps changes from the bucket now: the last error of each change that will be retried, and outages.

Not changes that the bucket rejected permanently: `rejections.py` keeps those.
"""

from collections.abc import Iterator

import trio

from fusecache.engine.namespace.nodes import QueuedChange
from fusecache.engine.publish.schedule import Failures, PublishSchedule
from fusecache.model.errors import FusecacheError, Throttled, Unavailable
from fusecache.policy.backoff import Outage
from fusecache.policy.writeback.publish_order import PublishOrder


class FailingChanges:
    """The queued changes whose last request failed in a way that may pass, each with its error.

    outage: the circuit breaker of all publishing requests.
    """

    def __init__(self, order: PublishOrder, schedule: PublishSchedule) -> None:
        self._order = order
        self._schedule = schedule
        self._errors: dict[QueuedChange, FusecacheError] = {}
        self.outage = Outage()

    def __iter__(self) -> Iterator[QueuedChange]:
        return iter(self._errors)

    @property
    def failure(self) -> FusecacheError | None:
        """The error that keeps changes from the bucket, if there is one; first the kind that a person can fix."""
        # Throttling alone is no failure: the publisher slows down and goes on, unless the circuit is open.
        is_on = self.outage.is_on
        errors = [each for each in self._errors.values() if is_on or not isinstance(each, Throttled)]
        mendable = (error for error in errors if not isinstance(error, Unavailable))
        return next(mendable, errors[0] if errors else None)

    @property
    def blocking_error(self) -> FusecacheError | None:
        """The error that seems to block all publishing: no request has succeeded since it was first seen.

        Only a kind that a person can fix.
        """
        last = self.outage.last_success
        errors = (error for item, error in self._errors.items() if last < self._schedule.failing_since(item))
        return next((error for error in errors if not isinstance(error, Unavailable)), None)

    @property
    def seconds(self) -> float:
        """How long the change that has failed for the longest time has done so; 0 if none fails."""
        now = trio.current_time()
        return max((now - self._schedule.failing_since(item) for item in self._errors), default=0.0)

    def add(self, item: QueuedChange, error: FusecacheError) -> Failures:
        """A request for a queued change failed. If others succeed since, it blocks fewer of them."""
        failures = self._schedule.on_failed(item, trio.current_time())
        self._errors[item] = item.error = error
        if self.outage.last_success > failures.first:
            self._order.on_failing(item.sequence)
        return failures

    def clear(self, item: QueuedChange) -> None:
        """The bucket accepted a request for a change."""
        self._errors.pop(item, None)
        item.error = None

    def discard(self, item: QueuedChange) -> None:
        """A change left the queue; its error stays with it."""
        self._errors.pop(item, None)
