"""Decides whether a write to a staging file runs on the event loop or in a thread. Pure.

The page cache takes 1 MiB in 0.2 ms. A thread costs as much again, and halves the throughput of a mount. But once too
many pages are dirty, the kernel throttles every writer (balance_dirty_pages: 200 ms a call). On the loop, such a write
also delays every request behind it.
"""

# Far above the 0.2 ms that the page cache takes, far below what a user notices.
_SLOW_SECONDS = 0.010
# After a slow write, this many writes go to threads before the next one runs inline. Each slow write doubles it.
_FIRST_OFFLOAD_COUNT = 16
_OFFLOAD_COUNT_MAX = 4096
# After this many quick inline writes in a row the disk counts as recovered, and the doubling starts again.
_QUICK_WRITES_TO_RECOVER = 256


class InlineWriteGate:
    """Decides by the duration of earlier inline writes whether the next one may run inline."""

    def __init__(self) -> None:
        self._offload_count = _FIRST_OFFLOAD_COUNT
        self._offloads_left = 0
        self._quick_writes = 0

    def is_quick(self) -> bool:
        """Return whether the next write may run inline. The caller then passes its duration to `record`."""
        if self._offloads_left:
            self._offloads_left -= 1
            return False
        return True

    def record(self, seconds: float) -> None:
        """Record the duration of an inline write."""
        if seconds > _SLOW_SECONDS:
            self._offloads_left = self._offload_count
            self._offload_count = min(_OFFLOAD_COUNT_MAX, 2 * self._offload_count)
            self._quick_writes = 0
        else:
            self._quick_writes += 1
            if self._quick_writes >= _QUICK_WRITES_TO_RECOVER:
                self._offload_count = _FIRST_OFFLOAD_COUNT
