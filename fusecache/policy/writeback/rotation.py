"""What is removed because something newer is there: which queued writes such removals rely on. Pure.

A run that keeps its last checkpoints removes an old one as soon as a newer one is closed. Where that is faster than the
uplink, the newer one is removed, too, before it is in the bucket. If it was just dropped, the removal of the old one
would have nothing to wait for any more, and the bucket would hold neither; and if each was dropped, none would ever
arrive. So what the oldest such removal waits for is published although it was removed, and the other removals come
after all that was written by then. Once nothing newer was written since, all of it is simply to go. Nobody tells which
files belong together, nor how deep they lie: as a removal waits for every older write of the mount, all of them count.
"""

from bisect import bisect_left, bisect_right, insort

from fusecache.model.names import parent_path
from fusecache.policy.writeback.publish_order import SequenceBarrier

_NEVER = float("inf")


class Rotation:
    """The queued writes of files and removals of published ones, of the whole mount."""

    def __init__(self) -> None:
        # Its lowest is the oldest write; of the other one, of negative sequences, the newest.
        self._oldest_first = SequenceBarrier()
        self._writes = SequenceBarrier()
        # The same of what was written right in a directory.
        self._writes_in: dict[str, SequenceBarrier] = {}
        self._removals: list[int] = []

    def add_write(self, sequence: int, key: str) -> None:
        """A write of `key` is queued."""
        self._writes.add(-sequence)
        self._oldest_first.add(sequence)
        self._writes_in.setdefault(parent_path(key), SequenceBarrier()).add(-sequence)

    def add_removal(self, sequence: int) -> None:
        """A removal is queued."""
        insort(self._removals, sequence)

    def remove(self, sequence: int, key: str) -> None:
        """It is queued no longer. Nothing happens to what is neither a write nor a removal."""
        index = bisect_left(self._removals, sequence)
        if self._removals[index : index + 1] == [sequence]:
            del self._removals[index]
            return
        self._writes.discard(-sequence)
        self._oldest_first.discard(sequence)
        folder = parent_path(key)
        writes = self._writes_in.get(folder)
        if writes is not None:
            writes.discard(-sequence)
            if writes.lowest == _NEVER:
                del self._writes_in[folder]

    def blocks_a_delete(self, sequence: int) -> bool:
        """Return whether the oldest removal that waits at all waits for a write, and something was written since.

        Those before it go now, or are put off on purpose.
        """
        index = bisect_right(self._removals, self._oldest_first.lowest)
        oldest = self._removals[index] if index < len(self._removals) else None
        return oldest is not None and sequence < oldest < -self._writes.lowest

    def deletes_blocked_by(self, sequence: int) -> list[int]:
        """Return the removals that wait for a write, unless all of them wait for all that came since."""
        removals = self._removals[bisect_right(self._removals, sequence) :]
        return removals if removals and removals[0] < -self._writes.lowest else []

    def is_oldest_removal(self, sequence: int) -> bool:
        """Return whether a removal is the oldest of all."""
        return self._removals[0] == sequence

    def is_written_since(self, sequence: int, key: str) -> bool:
        """Return whether something right in the directory of `key` was written after a change of it."""
        writes = self._writes_in.get(parent_path(key))
        return writes is not None and sequence < -writes.lowest

    def written_between(self, first: int, last: float, key: str) -> list[int]:
        """Return the writes right in the directory of `key` between two places, in no particular order."""
        writes = self._writes_in.get(parent_path(key))
        return [] if writes is None else [-each for each in writes.below(-first) if -each < last]
