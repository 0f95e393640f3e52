"""What the files of one directory that were read so far say about the next ones. Pure values and functions.

A *walk* is a reader, or several that share one list of names, going through a directory in its order. Files have
positions: their places in that order, counted from the walk's first file. Several threads overtake each other, so a
walk is told by how densely it has covered the last few positions, not by one strictly following the other.

Invariants:
1. No position is asked for twice, none that was passed or opened is asked for.
2. The bytes asked for and not (yet) read are never more than the bytes of the files that the walk did read.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from fusecache.policy.cache.readahead import FIRST_WINDOW_BYTES, WHOLE_BYTES

# So many names behind the front a file may be opened late: more than the workers of one loader.
SPAN = 16
# An unproven walk is looked for among so many names behind its last.
REACH = 8
FIRST_WINDOW = 2
# 32 in flight keep all connections of the read path busy; at 40 ms they are 800 files/s, more than the daemon serves.
MAX_WINDOW = 32
_SPAN_MASK = (1 << SPAN) - 1


@dataclass(frozen=True, slots=True)
class ScanPattern:
    """One walk. Masks count back from the front: bit i is position front - 1 - i.

    front: one past the farthest position that was opened. asked: one past the last that was asked for, at least
    front. recent: which of the last SPAN positions were opened; late: which of them were asked for and passed over.
    window: files to be ahead of the front. read_bytes: of the files opened; ahead_bytes: asked for and not opened.
    """

    front: int = 0
    asked: int = 0
    recent: int = 0
    late: int = 0
    window: int = FIRST_WINDOW
    read_bytes: int = 0
    ahead_bytes: int = 0

    @property
    def is_in_order(self) -> bool:
        """Whether its opens are dense enough to be a walk: 3 of 3 positions, 4 of 5, 5 of 7, … 10 of 16.

        In a random order of n files three in a row come up once in n epochs.
        """
        count = self.recent.bit_count()
        return count >= 3 and self.recent.bit_length() <= 2 * count - 3


def bytes_to_ask(size: int) -> int:
    """Return how many bytes of a file of `size` are worth asking for before it is opened."""
    return size if size <= WHOLE_BYTES else FIRST_WINDOW_BYTES


def is_near(walk: ScanPattern, position: int) -> bool:
    """Return whether an open at the position may belong to the walk."""
    return walk.front - SPAN <= position


def observe(walk: ScanPattern, position: int, size: int) -> ScanPattern:
    """Return the walk after the file of `size` bytes at a near position was opened.

    A file that was asked for makes the window one larger: it doubles while as many are read as it holds. One that
    was asked for and is still unread SPAN positions later halves it.
    """
    nbytes = bytes_to_ask(size)
    if position < walk.front:
        bit = 1 << (walk.front - 1 - position)
        if walk.recent & bit:
            return walk  # read once more
        was_asked = bool(walk.late & bit)
        walk = replace(walk, recent=walk.recent | bit, late=walk.late & ~bit)
    else:
        was_asked = position < walk.asked
        walk = _advanced(walk, position)
    walk = replace(walk, read_bytes=walk.read_bytes + nbytes)
    if not was_asked:
        return walk
    # Replaced by a larger one since it was asked for, it gives back no more than there is.
    ahead_bytes = max(0, walk.ahead_bytes - nbytes)
    return replace(walk, window=min(MAX_WINDOW, walk.window + 1), ahead_bytes=ahead_bytes)


def _advanced(walk: ScanPattern, position: int) -> ScanPattern:
    """Return the walk with its front just behind `position`."""
    steps = position + 1 - walk.front
    passed_unasked = max(0, position - max(walk.asked, walk.front))
    passed_asked = steps - 1 - passed_unasked
    late = walk.late << steps | ((1 << passed_asked) - 1) << (1 + passed_unasked)
    lost = (late & ~_SPAN_MASK).bit_count()
    return replace(
        walk,
        front=position + 1,
        asked=max(walk.asked, position + 1),
        recent=(walk.recent << steps | 1) & _SPAN_MASK,
        late=late & _SPAN_MASK,
        window=max(1, walk.window >> lost),
    )


def next_window(walk: ScanPattern, sizes: Sequence[int]) -> tuple[ScanPattern, int]:
    """Return how many of the next files to ask for, and the walk that has asked for them.

    sizes: of the files from position `walk.asked` on, as many as are known. Asks in portions of a quarter of the
    window, so that each open does not pay for a request's bookkeeping.
    """
    if not walk.is_in_order:
        return walk, 0
    room = walk.window - (walk.asked - walk.front)
    if room < max(1, walk.window // 4):
        return walk, 0
    count, ahead_bytes = 0, walk.ahead_bytes
    for size in sizes[:room]:
        if ahead_bytes + bytes_to_ask(size) > walk.read_bytes:
            break
        ahead_bytes += bytes_to_ask(size)
        count += 1
    return replace(walk, asked=walk.asked + count, ahead_bytes=ahead_bytes), count
