"""Old files are removed because newer ones are there: what becomes of that when the newer ones go from the queue.

Decided without awaiting; what is returned is to be journaled in one transaction with what asked for it. Which removals
rely on what: `policy/writeback/rotation.py`.
"""

from collections.abc import Callable, Iterator
from itertools import pairwise

from fusecache.engine.namespace.nodes import Generation, Item, Operation
from fusecache.engine.writeback.queue import Owed
from fusecache.index.journal import Change
from fusecache.model.records import OperationKind
from fusecache.model.states import FileState

# So often the oldest removal is put off: it comes at last, whatever goes on beside it.
_DELAYS_MOST = 16


class Rotating:
    """Keeps the order true when content goes, or moves, before it was published.

    take_out: has content published no more. requeue: gives an operation the last place of the queue.
    """

    def __init__(
        self,
        owed: Owed,
        take_out: Callable[[Generation], list[Change]],
        requeue: Callable[[Operation, list[Change]], None],
    ) -> None:
        self._owed = owed
        self._take_out = take_out
        self._requeue = requeue

    def is_relied_on(self, item: Item) -> bool:
        """Return whether an item that is removed is to be published all the same: the bucket is to get on."""
        is_whole = item.state is FileState.SEALED if isinstance(item, Generation) else _is_symlink(item)
        if not is_whole or not self._owed.rotation.is_relied_on(item.sequence):
            return False
        return not self._owed.is_aside(item)

    def note_gone(self, sequence: int, key: str) -> list[Change]:
        """What was queued for a key is dropped: have nobody believe that it was published."""
        changes: list[Change] = []
        folder = key.rpartition("/")[0]
        while True:
            for told in self._owed.rewritten_in(folder):
                changes += self._drop_hollow(told, sequence)
            if not folder:
                break
            folder = folder.rpartition("/")[0]
        return [*changes, *self.note_left(sequence)]

    def note_left(self, sequence: int) -> list[Change]:
        """What was queued has its place no longer: removals that waited for it wait for what came since."""
        changes: list[Change] = []
        ends: dict[Operation, None] = {}
        for number in self._owed.rotation.relying_on(sequence):
            removal = self._owed.get(number)
            if isinstance(removal, Operation) and self._may_wait(removal):
                removal.delays += self._owed.rotation.is_oldest_removal(number)
                ends |= dict.fromkeys(self._ends_behind(removal))
                self._requeue(removal, changes)
        for end in sorted(ends, key=lambda each: each.sequence):
            self._requeue(end, changes)  # or the directory shows again, as long as anything is in it
        return changes

    def _drop_hollow(self, key: str, sequence: int) -> list[Change]:
        """Versions of a file that were written since may speak of what left: the newest shows instead of them."""
        changes: list[Change] = []
        queued = self._owed.for_key(key)
        for item, next_one in pairwise(queued):
            if item.sequence < sequence or not isinstance(item, Generation) or item.in_flight or item.awaited:
                continue
            if not isinstance(next_one, Generation) or item.state is not FileState.SEALED:
                continue
            if next_one.state is FileState.SEALED:
                item.successor = next_one
                changes += self._take_out(item)
            else:
                item.is_hollow = True
        return changes

    def _may_wait(self, removal: Operation) -> bool:
        """Say whether a removal may come later than it was asked for: nothing is mixed up by that."""
        key = removal.record.key
        if removal.in_flight or removal.delays >= _DELAYS_MOST:
            return False
        if self._owed.for_key(key)[-1] is not removal or self._owed.for_key(key + "/"):
            return False  # something else has, or gets, that name
        if any(
            end.in_flight or self._owed.for_key(end.record.key[:-1]) for end in self._ends_behind(removal)
        ):
            return False  # or that of a directory that is removed with it
        # What says that all the rest is there must go before the rest is written anew.
        return not (self._owed.tells(key) and self._owed.rotation.is_written_since(removal.sequence, key))

    def _ends_behind(self, removal: Operation) -> Iterator[Operation]:
        """Yield the removals of the directories above that are to come after a removal."""
        folder = removal.record.key
        while folder := folder.rpartition("/")[0]:
            last = next(reversed(self._owed.for_key(folder + "/")), None)
            if not isinstance(last, Operation) or last.record.kind is not OperationKind.RMDIR:
                continue
            if last.sequence > removal.sequence:
                yield last


def _is_symlink(item: Operation) -> bool:
    return item.record.kind is OperationKind.SYMLINK
