"""Predicts which files of a directory are read next, from the files read so far. Pure values and functions.

A *directory scan* is one reader, or several that share one list of names, reading the files of a directory in its
order. A file's position is its index in that order, counted from the first file of the scan. Several threads overtake
each other. So a scan is recognised by how densely it has covered the last positions, not by strict succession.

Invariants:
1. No position is requested twice. No position that was passed or opened is requested.
2. The bytes requested and not (yet) read are never more than the bytes of the files that the scan has read.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from fusecache.policy.cache.readahead import FIRST_WINDOW_BYTES, WHOLE_BYTES

# A file may be opened up to 16 names behind the front: more than the workers of one loader.
SPAN = 16
# An open belongs to a scan that is not recognised yet if it is one of the 8 names after the last one.
REACH = 8
FIRST_WINDOW = 2
# 32 in flight keep all connections of the read path busy. At 40 ms each they are 800 files/s, more than the daemon
# serves.
MAX_WINDOW = 32
_SPAN_MASK = (1 << SPAN) - 1


@dataclass(frozen=True, slots=True)
class ScanPattern:
    """The state of one directory scan. Masks count back from the front: bit i is position front - 1 - i.

    front: one past the farthest position that was opened. requested: one past the last requested one, at least
    front. recent: which of the last SPAN positions were opened; late: which of them were requested and passed over.
    window: how many files to be ahead of the front. read_bytes: of opened files; ahead_bytes: requested, not opened.
    """

    front: int = 0
    requested: int = 0
    recent: int = 0
    late: int = 0
    window: int = FIRST_WINDOW
    read_bytes: int = 0
    ahead_bytes: int = 0

    @property
    def is_in_order(self) -> bool:
        """Whether its opens are dense enough to be a scan: 3 of 3 positions, 4 of 5, 5 of 7, … 10 of 16.

        In a random order of n files, three in a row occur once in n epochs.
        """
        count = self.recent.bit_count()
        return count >= 3 and self.recent.bit_length() <= 2 * count - 3


def bytes_to_ask(size: int) -> int:
    """Return how many bytes of a file of `size` bytes to prefetch before it is opened."""
    return size if size <= WHOLE_BYTES else FIRST_WINDOW_BYTES


def is_near(scan: ScanPattern, position: int) -> bool:
    """Return whether an open at the position may belong to the scan."""
    return scan.front - SPAN <= position


def observe(scan: ScanPattern, position: int, size: int) -> ScanPattern:
    """Return the scan after the file of `size` bytes at a near position was opened.

    The window grows by one for each requested file that is opened, so it doubles while a whole window is read. It is
    halved for each requested file that is still unread SPAN positions later.
    """
    nbytes = bytes_to_ask(size)
    if position < scan.front:
        bit = 1 << (scan.front - 1 - position)
        if scan.recent & bit:
            return scan  # opened again
        was_requested = bool(scan.late & bit)
        scan = replace(scan, recent=scan.recent | bit, late=scan.late & ~bit)
    else:
        was_requested = position < scan.requested
        scan = _advanced(scan, position)
    scan = replace(scan, read_bytes=scan.read_bytes + nbytes)
    if not was_requested:
        return scan
    # If a larger file replaced it since the request, the count must not go below zero.
    ahead_bytes = max(0, scan.ahead_bytes - nbytes)
    return replace(scan, window=min(MAX_WINDOW, scan.window + 1), ahead_bytes=ahead_bytes)


def _advanced(scan: ScanPattern, position: int) -> ScanPattern:
    """Return the scan with its front one past `position`."""
    steps = position + 1 - scan.front
    passed_unrequested = max(0, position - max(scan.requested, scan.front))
    passed_requested = steps - 1 - passed_unrequested
    late = scan.late << steps | ((1 << passed_requested) - 1) << (1 + passed_unrequested)
    lost = (late & ~_SPAN_MASK).bit_count()
    return replace(
        scan,
        front=position + 1,
        requested=max(scan.requested, position + 1),
        recent=(scan.recent << steps | 1) & _SPAN_MASK,
        late=late & _SPAN_MASK,
        window=max(1, scan.window >> lost),
    )


def next_window(scan: ScanPattern, sizes: Sequence[int]) -> tuple[ScanPattern, int]:
    """Return the scan after its next request, and how many of the next files to request.

    sizes: of the files from position `scan.requested` on, as many as are known. Requests come in portions of at least a
    quarter of the window, so that not every open pays for the bookkeeping of a request.
    """
    if not scan.is_in_order:
        return scan, 0
    free_slots = scan.window - (scan.requested - scan.front)
    if free_slots < max(1, scan.window // 4):
        return scan, 0
    count, ahead_bytes = 0, scan.ahead_bytes
    for size in sizes[:free_slots]:
        if ahead_bytes + bytes_to_ask(size) > scan.read_bytes:
            break
        ahead_bytes += bytes_to_ask(size)
        count += 1
    return replace(scan, requested=scan.requested + count, ahead_bytes=ahead_bytes), count
