"""Old files are removed because newer ones are there: what becomes of that when the newer ones go from the queue.

Decided without awaiting; what is returned is to be journaled in one transaction with what asked for it. Which removals
rely on what: `policy/writeback/rotation.py`.
"""

from collections.abc import Callable, Iterator
from itertools import pairwise

from fusecache.engine.namespace.nodes import FileVersion, Operation, QueuedChange
from fusecache.engine.writeback.queue import WritebackQueue
from fusecache.index.journal import Change
from fusecache.model.records import OperationKind
from fusecache.model.states import FileState

# So often the oldest removal is put off: it comes at last, whatever goes on beside it.
_DELAYS_MOST = 16


class CheckpointRotation:
    """Keeps the order true when content goes, or moves, before it was published.

    take_out: has content published no more. requeue: gives an operation the last place of the queue.
    """

    def __init__(
        self,
        queue: WritebackQueue,
        take_out: Callable[[FileVersion], list[Change]],
        requeue: Callable[[Operation, list[Change]], None],
    ) -> None:
        self._queue = queue
        self._dequeue = take_out
        self._requeue = requeue

    def blocks_a_delete(self, item: QueuedChange) -> bool:
        """Return whether an item that is removed is to be published all the same: the bucket is to get on."""
        is_whole = item.state is FileState.SEALED if isinstance(item, FileVersion) else _is_symlink(item)
        if not is_whole or not self._queue.rotation.blocks_a_delete(item.sequence):
            return False
        return not self._queue.is_deferred(item)

    def on_gone(self, sequence: int, key: str) -> list[Change]:
        """What was queued for a key is dropped: have nobody believe that it was published."""
        changes: list[Change] = []
        folder = key.rpartition("/")[0]
        while True:
            for told in self._queue.rewritten_in(folder):
                changes += self._drop_superseded_markers(told, sequence)
            if not folder:
                break
            folder = folder.rpartition("/")[0]
        return [*changes, *self.on_removed(sequence)]

    def on_removed(self, sequence: int) -> list[Change]:
        """What was queued has its place no longer: removals that waited for it wait for what came since."""
        changes: list[Change] = []
        ends: dict[Operation, None] = {}
        for number in self._queue.rotation.deletes_blocked_by(sequence):
            removal = self._queue.get(number)
            if isinstance(removal, Operation) and self._may_wait(removal):
                removal.delays += self._queue.rotation.is_oldest_removal(number)
                ends |= dict.fromkeys(self._ends_behind(removal))
                self._requeue(removal, changes)
        for end in sorted(ends, key=lambda each: each.sequence):
            self._requeue(end, changes)  # or the directory shows again, as long as anything is in it
        return changes

    def _drop_superseded_markers(self, key: str, sequence: int) -> list[Change]:
        """Versions of a file that were written since may speak of what left: the newest shows instead of them."""
        changes: list[Change] = []
        queued = self._queue.for_key(key)
        for item, next_one in pairwise(queued):
            if (
                item.sequence < sequence
                or not isinstance(item, FileVersion)
                or item.in_flight
                or item.awaited
            ):
                continue
            if not isinstance(next_one, FileVersion) or item.state is not FileState.SEALED:
                continue
            if next_one.state is FileState.SEALED:
                item.successor = next_one
                changes += self._dequeue(item)
            else:
                item.is_superseded_marker = True
        return changes

    def _may_wait(self, removal: Operation) -> bool:
        """Say whether a removal may come later than it was asked for: nothing is mixed up by that."""
        key = removal.record.key
        if removal.in_flight or removal.delays >= _DELAYS_MOST:
            return False
        if self._queue.for_key(key)[-1] is not removal or self._queue.for_key(key + "/"):
            return False  # something else has, or gets, that name
        if any(
            end.in_flight or self._queue.for_key(end.record.key[:-1]) for end in self._ends_behind(removal)
        ):
            return False  # or that of a directory that is removed with it
        # What says that all the rest is there must go before the rest is written anew.
        return not (
            self._queue.is_commit_marker(key) and self._queue.rotation.is_written_since(removal.sequence, key)
        )

    def _ends_behind(self, removal: Operation) -> Iterator[Operation]:
        """Yield the removals of the directories above that are to come after a removal."""
        folder = removal.record.key
        while folder := folder.rpartition("/")[0]:
            last = next(reversed(self._queue.for_key(folder + "/")), None)
            if not isinstance(last, Operation) or last.record.kind is not OperationKind.RMDIR:
                continue
            if last.sequence > removal.sequence:
                yield last


def _is_symlink(item: Operation) -> bool:
    return item.record.kind is OperationKind.SYMLINK
