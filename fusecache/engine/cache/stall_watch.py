"""Detects GETs that receive no bytes, and aborts them, so that the fetcher retries on another connection.

Runs on the trio loop and reads the fields that threads write in `Fetch`: `is_underway`, `received`, the waits.
"""

from collections.abc import Awaitable, Callable

import trio

from fusecache.engine.cache.chunks import Fetch
from fusecache.engine.cache.statistics import Counters
from fusecache.policy.cache.stall_timeout import EARLY_RETRIES, WaitHistory

# A stall is noticed at most this late, plus the loop's own delay. A check of 64 fetches takes some 20 microseconds.
LOOK_SECONDS = 0.1


class StallWatch:
    """Watches the GETs in flight."""

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
