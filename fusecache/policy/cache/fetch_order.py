"""The order in which fetches start: demand, hint, read-ahead; within a cause, the soonest needed first."""

import enum
import heapq
import itertools
from typing import Generic, TypeVar

T = TypeVar("T")


class Cause(enum.IntEnum):
    """Why bytes are fetched. The smallest value starts first."""

    DEMAND = 0
    HINT = 1
    READAHEAD = 2


class FetchQueue(Generic[T]):
    """A priority queue whose items can be moved or removed. Items are compared by identity.

    queued: the newest ticket of each item, by its id; for others only to see whether it is empty.

    Invariant: an item is in the queue at most once, however often it was pushed.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, int, T]] = []
        self.queued: dict[int, int] = {}
        self._numbers = itertools.count()

    def __len__(self) -> int:
        return len(self.queued)

    def __contains__(self, item: T) -> bool:
        return id(item) in self.queued

    def push(self, item: T, cause: Cause, depth: int = 0) -> None:
        """Add an item, or move it. depth: its distance ahead of the reader; the nearest goes first."""
        ticket = next(self._numbers)
        self.queued[id(item)] = ticket
        heapq.heappush(self._heap, (cause, depth, ticket, item))

    def remove(self, item: T) -> None:
        """Remove an item. Does nothing if it is not queued."""
        self.queued.pop(id(item), None)
        self._forget_stale()

    def peek(self) -> T | None:
        """Return the next item without removing it; None if the queue is empty."""
        self._forget_stale()
        return self._heap[0][3] if self._heap else None

    def pop(self) -> T:
        """Remove and return the next item. Raises IndexError if the queue is empty."""
        self._forget_stale()
        item = heapq.heappop(self._heap)[3]
        del self.queued[id(item)]
        return item

    def _forget_stale(self) -> None:
        """Drop heap entries that a later push or a removal replaced."""
        heap, tickets = self._heap, self.queued
        while heap and tickets.get(id(heap[0][3])) != heap[0][2]:
            heapq.heappop(heap)
        # Removed items in the middle of the heap keep their memory. Rebuild the heap when they are the majority.
        if len(heap) > 64 and len(heap) > 2 * len(tickets):
            self._heap = [entry for entry in heap if tickets.get(id(entry[3])) == entry[2]]
            heapq.heapify(self._heap)
