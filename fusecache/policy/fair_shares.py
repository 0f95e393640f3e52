"""Divides a capacity among the buckets of a mount, so that one that is away cannot take what the others need. Pure.

Half of the capacity is guaranteed to the buckets, in equal parts. The rest goes to the first taker: of two buckets, one
that is busy alone gets three quarters. A single bucket has all.
"""

from collections.abc import Iterable

_GUARANTEED_PERCENT = 50


class FairShares:
    """Counts what is taken of a capacity. total: by all. guaranteed: the part of each bucket."""

    def __init__(self, buckets: Iterable[str], capacity: int) -> None:
        """buckets: the names that share the capacity. What another name takes counts in the total only."""
        self._held = dict.fromkeys(buckets, 0)
        self._capacity = capacity
        self.total = 0
        count = len(self._held)
        self.guaranteed = max(1, capacity * _GUARANTEED_PERCENT // 100 // count) if count > 1 else 0

    def take(self, bucket: str, amount: int) -> None:
        """Count what a bucket takes; negative if it gives something back."""
        self.total += amount
        if bucket in self._held:
            self._held[bucket] += amount

    def unused(self, bucket: str) -> int:
        """Return how much of its guaranteed part a bucket does not hold."""
        return max(0, self.guaranteed - self._held.get(bucket, self.guaranteed))

    def kept_from(self, bucket: str) -> int:
        """Return how much a bucket may not take now, because it is guaranteed to others."""
        if not self.guaranteed or bucket not in self._held:
            return 0
        return sum(self.unused(other) for other in self._held if other != bucket)

    def left(self, bucket: str) -> int:
        """Return how much more a bucket may take now; at least the rest of its guaranteed part."""
        return max(self.unused(bucket), self._capacity - self.total - self.kept_from(bucket))
