"""Checkpoint rotation: keeps deletes of old files safe when the newer files they wait for leave the queue.

Programs delete an old checkpoint because a newer one was closed. If the newer one is then removed, or moved, before it
was published, the old one must not be deleted first. `policy/writeback/rotation.py` decides which deletes depend on
which writes.

Invariant: nothing here awaits. The caller journals the returned rows in one transaction with the cause.
"""

from collections.abc import Callable, Iterator
from itertools import pairwise

from fusecache.engine.namespace.nodes import FileVersion, Operation, QueuedChange, is_removal, is_symlink
from fusecache.engine.namespace.tree import Tree
from fusecache.engine.writeback.placement import QueuePlacement, is_closed_at
from fusecache.engine.writeback.queue import WritebackQueue
from fusecache.index.journal import Change
from fusecache.model.names import parent_path
from fusecache.model.records import FileState, OperationKind

# So often a delete follows content that is renamed, or removed under a temporary name. Then it stays, and what it waits
# for keeps its sequence: renames cannot delay it for ever, and each time costs as much as all deletes that move.
_FOLLOWS_MAX = 16


class CheckpointRotation:
    """Keeps the publish order valid when content is removed, or moved, before it was published.

    dirty_versions: returns the versions that are not queued yet: some were closed, and join the queue at their release.
    dequeue: takes a change out of the queue. requeue: moves an operation to the end of the queue.
    """

    def __init__(
        self,
        tree: Tree,
        queue: WritebackQueue,
        placement: QueuePlacement,
        dirty_versions: Callable[[], list[FileVersion]],
        dequeue: Callable[[QueuedChange], list[Change]],
        requeue: Callable[[Operation, list[Change]], None],
    ) -> None:
        self._tree = tree
        self._queue = queue
        self._placement = placement
        self._dirty_versions = dirty_versions
        self._dequeue = dequeue
        self._requeue = requeue

    def blocks_a_delete(self, item: QueuedChange) -> bool:
        """Return whether an item that is removed must be published regardless.

        That is so if it is complete and not deferred, and one of these waits for it: the oldest delete, or a delete
        that may not move back to wait for newer content.
        """
        is_whole = item.state is FileState.SEALED if isinstance(item, FileVersion) else is_symlink(item)
        rotation = self._queue.rotation
        if not is_whole or not rotation.deletes_blocked_by(item.sequence):
            return False
        is_deferred = self._queue.is_deferred(item)
        if not is_deferred and rotation.blocks_a_delete(item.sequence):
            return True
        return bool(self.newest_fixed_delete(item.sequence, follows=is_deferred))

    def newest_fixed_delete(
        self, sequence: int, *, follows: bool, names: frozenset[str] = frozenset()
    ) -> int:
        """Return the newest delete that waits for a sequence, and must not move back; 0: all may, or none waits.

        It is asked before anything moves, as what moves is newer than these deletes after that. `on_vacated` then moves
        all deletes that wait for what left its sequence.

        follows: whether it would follow what is renamed, as it does `_FOLLOWS_MAX` times at most. names: the new names,
        those of directories with '/'.
        """
        for number in reversed(self._queue.rotation.deletes_after(sequence)):
            removal = self._queue.get(number)
            if not isinstance(removal, Operation):
                continue
            if removal.in_flight:
                return number  # its request failed, or older content came since
            key = removal.record.key
            if names == {key} and self._is_last(removal) and self._placement.is_superseded(removal):
                continue
            if follows and removal.times_followed >= _FOLLOWS_MAX:
                return number
            if not self._may_move_back(removal, names):
                return number
        return 0

    def on_gone(self, sequence: int, key: str) -> list[Change]:
        """After an item was dropped, drop queued commit markers that may name it, and move deletes that waited for it.

        The commit markers are those in the key's directory and in all directories above that were written since.
        """
        changes: list[Change] = []
        folder = key.rpartition("/")[0]
        while True:
            for marker in self._queue.rewritten_in(folder):
                changes += self._drop_superseded_markers(marker, sequence)
            if not folder:
                break
            folder = folder.rpartition("/")[0]
        return [*changes, *self.on_vacated(sequence, follows=False)]

    def on_vacated(self, sequence: int, *, follows: bool) -> list[Change]:
        """After an item left its sequence, move deletes that waited for it behind what was written since.

        `newest_fixed_delete` has said that all of them may move. follows: as there.
        """
        changes: list[Change] = []
        marker_deletes: dict[Operation, None] = {}
        for number in self._queue.rotation.deletes_blocked_by(sequence):
            removal = self._queue.get(number)
            if isinstance(removal, Operation):
                removal.times_followed = removal.times_followed + 1 if follows else 0
                marker_deletes |= dict.fromkeys(self._marker_deletes_behind(removal))
                self._requeue(removal, changes)
        for each in sorted(marker_deletes, key=lambda item: item.sequence):
            self._requeue(each, changes)  # else the directory would show again while it has objects in it
        return changes

    def _drop_superseded_markers(self, key: str, sequence: int) -> list[Change]:
        """Drop versions of a commit marker that may name the dropped item: only the newest version is published.

        These are versions after `sequence`, apart from the newest one. Symlinks count as versions, and their removal as
        the next one. A removed marker that a delete waited for is dropped too.
        """
        changes: list[Change] = []
        queued = self._queue.for_key(key)
        for item, next_one in pairwise(queued):
            if is_symlink(item) and item.sequence > sequence and not item.in_flight:
                if is_symlink(next_one) or is_removal(next_one):
                    changes += self._dequeue(item)
                continue
            if item.sequence < sequence or not isinstance(item, FileVersion) or item.in_flight:
                continue
            if is_removal(next_one):
                changes += self._dequeue(item)
                continue
            if isinstance(next_one, FileVersion):
                item.successor = next_one
                changes += self._dequeue(item)
        return changes

    def _is_last(self, removal: Operation) -> bool:
        return self._queue.for_key(removal.record.key)[-1] is removal

    def _may_move_back(self, removal: Operation, names: frozenset[str]) -> bool:
        """Return whether a delete may move to the end of the queue, behind what moves to these names."""
        key = removal.record.key
        if not self._is_last(removal) or self._queue.for_key(key + "/"):
            return False  # another queued change has that name, as a file or as a directory
        above = [(each, each.record.key[:-1]) for each in self._marker_deletes_behind(removal)]
        if not names.isdisjoint((key, key + "/", *(name for _, name in above))):
            return False  # or gets it now
        if any(each.in_flight or self._queue.for_key(name) for each, name in above):
            return False  # or the name of a directory above, which is removed with it
        if any(is_closed_at(self._tree, name) for name in (key, *(name for _, name in above))):
            return False  # or will have it soon
        if not self._queue.is_commit_marker(key):
            return True
        # A commit marker must be deleted before the files that it names are written again.
        is_rewritten = self._is_written_since(removal.sequence, key)
        return not is_rewritten and parent_path(key) not in map(parent_path, names)

    def _is_written_since(self, sequence: int, key: str) -> bool:
        """Return whether a file right in the directory of `key` was closed after `sequence`."""
        if self._queue.rotation.is_written_since(sequence, key):
            return True
        return any(
            each.state is FileState.FLUSHED
            and each.sequence > sequence
            and parent_path(each.record.key) == parent_path(key)
            for each in self._dirty_versions()
        )

    def _marker_deletes_behind(self, removal: Operation) -> Iterator[Operation]:
        """Yield the queued deletes of the directory markers above that come after a delete."""
        folder = removal.record.key
        while folder := folder.rpartition("/")[0]:
            last = next(reversed(self._queue.for_key(folder + "/")), None)
            if not isinstance(last, Operation) or last.record.kind is not OperationKind.RMDIR:
                continue
            if last.sequence > removal.sequence:
                yield last
