"""Starts the preparation of queued files ahead of their publish slots, in scans that the publisher's loop asks for.

It prepares nothing itself (`preparer.py` does), and publishes nothing.
"""

from collections.abc import Iterable
from itertools import islice

from fusecache.engine.namespace.nodes import FileVersion, QueuedChange
from fusecache.engine.publish.preparer import Preparer, is_prepared_or_failed_locally
from fusecache.engine.publish.schedule import LIGHT_BYTES, PublishSchedule
from fusecache.policy.backoff import LONGEST_SECONDS
from fusecache.policy.writeback.multipart import choose_part_bytes

# Files that one scan looks at. It stops after _SCAN_UNSETTLED files that have not settled, as the ones behind them are
# younger. Two scans are at least _SCAN_SECONDS apart.
_SCAN_FILES = 512
_SCAN_UNSETTLED = 16
_SCAN_SECONDS = 0.02
# Interval at which a preparation that failed ahead of its slot is retried.
_RETRY_SECONDS = LONGEST_SECONDS


class PrepareAhead:
    """Keeps the queued files that are not prepared yet, oldest first. Times are the loop's."""

    def __init__(self, preparer: Preparer, schedule: PublishSchedule) -> None:
        self._preparer = preparer
        self._schedule = schedule
        self._unprepared: dict[FileVersion, None] = {}
        self._scanned_at = self._retry_at = float("-inf")

    def add(self, item: QueuedChange, now: float) -> None:
        """A change was queued."""
        # No part of a deferred file is sent ahead: its name may still change.
        if isinstance(item, FileVersion) and not (
            choose_part_bytes(item.size) and self._schedule.is_deferred(item, now)
        ):
            self._unprepared[item] = None

    def discard(self, item: QueuedChange) -> None:
        """A change left the queue."""
        if isinstance(item, FileVersion):
            self._unprepared.pop(item, None)

    def next_scan(self) -> float:
        """Return the earliest time of the next scan."""
        return self._scanned_at + _SCAN_SECONDS

    def scan(self, now: float) -> None:
        """Start preparing files that have settled, and large ones."""
        self._scanned_at = now
        first: list[FileVersion] = []
        unsettled = 0
        for item in islice(self._unprepared, _SCAN_FILES):
            if self._schedule.is_settled(item, now) or item.size > LIGHT_BYTES:
                first.append(item)
            else:
                unsettled += 1
                if unsettled > _SCAN_UNSETTLED:
                    break
        self._preparer.begin([*first], lambda version: self._schedule.is_settled(version, now))
        for version in first:
            if is_prepared_or_failed_locally(version):
                del self._unprepared[version]

    def retry_soon(self, now: float) -> None:
        """The cause of failures may be gone: let the next scan retry them."""
        self._retry_at = now

    def retry(self, failing: Iterable[QueuedChange], now: float) -> None:
        """Retry preparations that failed before the file's publish slot: until then nothing else retries them."""
        if now < self._retry_at:
            return
        self._retry_at = now + _RETRY_SECONDS
        for item in failing:
            if (
                isinstance(item, FileVersion)
                and not is_prepared_or_failed_locally(item)
                and not self._schedule.failures_of(item)
            ):
                self._unprepared[item] = None
