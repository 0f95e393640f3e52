"""How many requests a store has made, by kind: what a bucket's bill and its rate limits count."""

import threading
from collections import Counter
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StoreStatistics:
    """Calls made to the bucket so far, whether they succeeded or not; bytes are those of bodies that did.

    bytes_sent: also those that the network has taken of bodies under way; what fails is taken off again.
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

    @property
    def class_a(self) -> int:
        """Requests that R2 bills as class A ($4.50 a million)."""
        return self.lists + self.puts + self.creates + self.parts + self.completes + self.copies

    @property
    def class_b(self) -> int:
        """Requests that R2 bills as class B ($0.36 a million)."""
        return self.heads + self.gets

    def __add__(self, other: "StoreStatistics") -> "StoreStatistics":
        """Return the sums, field by field."""
        return StoreStatistics(
            **{name: getattr(self, name) + getattr(other, name) for name in StoreStatistics.__slots__}
        )


class RequestCounter:
    """The thread-safe account behind `StoreStatistics`."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()

    def add(self, field: str, amount: int = 1) -> None:
        """Add to one field of `StoreStatistics`."""
        with self._lock:
            self._counts[field] += amount

    def statistics(self) -> StoreStatistics:
        """Return the account as it is now."""
        with self._lock:
            return StoreStatistics(**self._counts)
