"""Where a write to a local file is done: at once, or in a thread.

The page cache takes 1 MiB in 0.2 ms, where a thread costs as much again, and half the throughput of a mount. But once
too many pages are dirty the kernel holds every writer up (balance_dirty_pages: for 200 ms a call), and with it all
whose requests would be next.
"""

# Far above what the page cache takes, far below what anybody notices.
_SLOW_SECONDS = 0.010
# After a slow write so many go to threads before the next is tried at once; each time twice as many as before.
_FIRST_DETOUR = 16
_LONGEST_DETOUR = 4096
# So many quick ones in a row, and the disk is well again.
_WELL = 256


class InlineWriteGate:
    """Tells by the duration of earlier writes whether the next one may be done at once."""

    def __init__(self) -> None:
        self._offload_count = _FIRST_DETOUR
        self._left = 0
        self._quick = 0

    def is_quick(self) -> bool:
        """Decide on one write. Of one that is done at once, the duration is to be told."""
        if self._left:
            self._left -= 1
            return False
        return True

    def record(self, seconds: float) -> None:
        """A write at once took so long."""
        if seconds > _SLOW_SECONDS:
            self._left = self._offload_count
            self._offload_count = min(_LONGEST_DETOUR, 2 * self._offload_count)
            self._quick = 0
        else:
            self._quick += 1
            if self._quick >= _WELL:
                self._offload_count = _FIRST_DETOUR
