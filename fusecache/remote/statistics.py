"""Requests of a store by kind: counts, as the bucket's bill and its rate limits count them, and times."""

import threading
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

from fusecache.model.facts import REQUEST_VERBS
from fusecache.model.latency import LatencyHistogram


@dataclass(frozen=True, slots=True)
class StoreStatistics:
    """Requests made so far, successful or not. bytes_written: of requests that succeeded.

    bytes_read: body bytes received, also of GETs that failed later. bytes_sent: body bytes that the kernel has taken,
    including uploads in flight; a failed upload is subtracted again.
    """

    lists: int = 0
    heads: int = 0
    gets: int = 0
    puts: int = 0
    creates: int = 0
    parts: int = 0
    completes: int = 0
    aborts: int = 0
    copies: int = 0
    deletes: int = 0
    errors: int = 0
    bytes_read: int = 0
    bytes_written: int = 0
    bytes_sent: int = 0

    def by_kind(self) -> dict[str, int]:
        """Return how many requests there were of each kind."""
        return {kind: getattr(self, kind) for kind in REQUEST_VERBS}

    @property
    def class_a(self) -> int:
        """Requests that stores bill as class A."""
        return self.lists + self.puts + self.creates + self.parts + self.completes + self.copies

    @property
    def class_b(self) -> int:
        """Requests that stores bill as class B."""
        return self.heads + self.gets

    def __add__(self, other: "StoreStatistics") -> "StoreStatistics":
        """Return the sums, field by field."""
        return StoreStatistics(
            **{name: getattr(self, name) + getattr(other, name) for name in StoreStatistics.__slots__}
        )


class RequestCounter:
    """The thread-safe counters behind `StoreStatistics`."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()

    def add(self, field: str, amount: int = 1) -> None:
        """Add to one field of `StoreStatistics`."""
        with self._lock:
            self._counts[field] += amount

    def statistics(self) -> StoreStatistics:
        """Return a snapshot of the counters."""
        with self._lock:
            return StoreStatistics(**self._counts)


class RequestTimes:
    """How long requests take, by kind, failed ones included. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._histograms: defaultdict[str, LatencyHistogram] = defaultdict(LatencyHistogram)

    @contextmanager
    def measure(self, kind: str) -> Iterator[None]:
        """Count the time that the body takes."""
        began = time.perf_counter()
        try:
            yield
        finally:
            with self._lock:
                self._histograms[kind].count(time.perf_counter() - began)

    def as_dict(self) -> dict[str, dict[str, Any]]:
        """Return the fields of `Latency` of each kind seen so far."""
        with self._lock:
            return {kind: asdict(each.latency()) for kind, each in self._histograms.items()}
