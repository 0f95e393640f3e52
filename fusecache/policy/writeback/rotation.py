"""Finds the queued writes that queued deletes depend on (checkpoint rotation). Pure.

A training run that keeps its last N checkpoints deletes an old one as soon as a newer one is closed. If the run is
faster than the uplink, it deletes the newer one too, before that is in the bucket. Dropping the newer one from the
queue would be wrong twice. The delete of the old one would have nothing left to wait for, and the bucket would hold
neither. And if every checkpoint was dropped like this, none would ever arrive. So:

1. The write that the oldest such delete waits for is published, although it was removed on the mount.
2. The other deletes move behind everything that was written by then.
3. If nothing newer was written since, nothing is protected: all of it goes.

The daemon does not know which files belong together, or how deep they lie. A delete waits for every older write of
the mount, so all of these count.
"""

from bisect import bisect_left, bisect_right, insort

from fusecache.model.names import parent_path
from fusecache.policy.writeback.publish_order import SequenceBarrier

_NEVER = float("inf")


class Rotation:
    """The sequences of queued file writes, and of queued deletes of published objects, of the whole mount."""

    def __init__(self) -> None:
        # `lowest` of the first is the oldest write. The others hold negated sequences: their `lowest` is the newest.
        self._oldest_first = SequenceBarrier()
        self._writes = SequenceBarrier()
        # The same for the writes right in each directory, not below it.
        self._writes_in: dict[str, SequenceBarrier] = {}
        self._removals: list[int] = []

    def add_write(self, sequence: int, key: str) -> None:
        """Record that a write of `key` was queued."""
        self._writes.add(-sequence)
        self._oldest_first.add(sequence)
        self._writes_in.setdefault(parent_path(key), SequenceBarrier()).add(-sequence)

    def add_removal(self, sequence: int) -> None:
        """Record that a delete was queued."""
        insort(self._removals, sequence)

    def remove(self, sequence: int, key: str) -> None:
        """Record that a change left the queue. A change that is neither a write nor a delete is ignored."""
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
        """Return whether the oldest waiting delete waits for a write, and something was written after that delete.

        Deletes that are older than every write do not wait for any: they go now, or are deferred on purpose.
        """
        index = bisect_right(self._removals, self._oldest_first.lowest)
        oldest = self._removals[index] if index < len(self._removals) else None
        return oldest is not None and sequence < oldest < -self._writes.lowest

    def deletes_after(self, sequence: int) -> list[int]:
        """Return the deletes that wait for a write, the oldest first."""
        return self._removals[bisect_right(self._removals, sequence) :]

    def deletes_blocked_by(self, sequence: int) -> list[int]:
        """Return the deletes that wait for a write; none if they already wait for every write since then."""
        removals = self.deletes_after(sequence)
        return removals if removals and removals[0] < -self._writes.lowest else []

    def is_written_since(self, sequence: int, key: str) -> bool:
        """Return whether a file right in the directory of `key` was written after `sequence`."""
        writes = self._writes_in.get(parent_path(key))
        return writes is not None and sequence < -writes.lowest

    def written_between(self, first: int, last: float, key: str) -> list[int]:
        """Return the writes right in the directory of `key` after `first` and before `last`, in no particular order."""
        writes = self._writes_in.get(parent_path(key))
        return [] if writes is None else [-each for each in writes.below(-first) if -each < last]
