"""Counts what the bucket does not have yet: changes, bytes, ages, uploads in flight, and failing changes."""

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Self

import trio

from fusecache.engine.namespace.nodes import FileVersion, QueuedChange

# Names listed in an answer; the rest is only counted.
NAMED = 50


@dataclass(frozen=True, slots=True)
class Pending:
    """What the bucket does not have yet.

    files: queued changes. Of these, contents are files with their bytes, and deferred are removals that wait on
    purpose, for deferred_seconds at most; the others change names. left_bytes: bytes not sent yet. oldest_seconds: age
    of the oldest change, deferred ones not counted. uploading: at most NAMED uploads; failing: at most NAMED changes
    that an error blocks. requested_files, requested_bytes: in requests without an answer yet; requested_seconds: age
    of the oldest such request.
    """

    files: int = 0
    contents: int = 0
    bytes: int = 0
    left_bytes: int = 0
    oldest_seconds: float = 0.0
    deferred: int = 0
    deferred_seconds: float = 0.0
    uploading: tuple[FileVersion, ...] = ()
    failing: tuple[QueuedChange, ...] = ()
    requested_files: int = 0
    requested_bytes: int = 0
    requested_seconds: float = 0.0


class PendingCounter:
    """Adds up queued changes in one pass, fast enough for very long queues."""

    def __init__(self, deferred_seconds: Callable[[QueuedChange], float]) -> None:
        """deferred_seconds: for how long a change stays deferred, 0 if it is not."""
        self._deferred_seconds = deferred_seconds
        self._files = self._contents = self._bytes = self._sent = self._deferred = 0
        self._requested_files = self._requested_bytes = 0
        self._oldest = self._requested_seconds = self._longest_deferred = 0.0
        self._now, self._wall = trio.current_time(), time.time()
        self._uploading: list[FileVersion] = []
        self._failing: list[QueuedChange] = []

    def add(self, items: Iterable[QueuedChange]) -> Self:
        """Add more changes."""
        for item in items:
            self._files += 1
            if isinstance(item, FileVersion):
                self._contents += 1
                self._bytes += item.size
                self._sent += item.moved_bytes
                age = _age(item, self._now, self._wall)
                if item.in_flight or item.record.upload_id:
                    self._add_uploading(item)
            elif (seconds := self._deferred_seconds(item)) > 0:
                self._deferred += 1
                self._longest_deferred = max(self._longest_deferred, seconds)
                continue
            else:
                age = self._now - item.queued_at
            self._oldest = max(self._oldest, age)
            if item.error is not None and len(self._failing) < NAMED:
                self._failing.append(item)
        return self

    def _add_uploading(self, item: FileVersion) -> None:
        if len(self._uploading) < NAMED:
            self._uploading.append(item)
        self._requested_bytes += item.bytes_under_way
        requests = item.upload.requests
        if requests:
            self._requested_files += 1
            self._requested_seconds = max(
                self._requested_seconds, self._now - min(each.since for each in requests)
            )

    def pending(self) -> Pending:
        """Return the sums."""
        return Pending(
            files=self._files,
            contents=self._contents,
            bytes=self._bytes,
            left_bytes=self._bytes - self._sent,
            oldest_seconds=self._oldest,
            deferred=self._deferred,
            deferred_seconds=self._longest_deferred,
            uploading=tuple(self._uploading),
            failing=tuple(self._failing),
            requested_files=self._requested_files,
            requested_bytes=self._requested_bytes,
            requested_seconds=self._requested_seconds,
        )


def _age(item: FileVersion, now: float, wall: float) -> float:
    """Return the seconds since content was closed, under this daemon or an earlier one."""
    since = min(item.flushed_at, item.sealed_at)
    if item.flushed_at == float("inf") and item.record.moment:
        return max(wall - item.record.moment, now - since)
    return now - since
