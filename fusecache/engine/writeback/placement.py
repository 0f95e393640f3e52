"""Gives closed content its sequence in the publish order: behind what is queued of its key, or in place of that.

Invariant: nothing here awaits. The caller journals the returned rows in one transaction with the cause.
"""

import logging
from collections.abc import Callable, Container, Iterable
from dataclasses import replace

import trio

from fusecache.engine.namespace.nodes import FileVersion, Node, Operation, QueuedChange, is_removal
from fusecache.engine.namespace.tree import Tree
from fusecache.engine.writeback.queue import WritebackQueue
from fusecache.index.journal import Change, DropOperation
from fusecache.model.objects import MIB
from fusecache.model.records import FileState

log = logging.getLogger(__name__)
# A commit marker up to this size names other files. A larger one is a checkpoint by itself: `last.ckpt`.
_MARKER_BYTES = MIB
# A queued file that keeps being rewritten is published as it is once its upload has waited this long.
_REWRITE_SECONDS = 10.0


class QueuePlacement:
    """Places closed content in the queue. drop: ends a version."""

    def __init__(
        self,
        tree: Tree,
        queue: WritebackQueue,
        drop: Callable[[FileVersion], list[Change]],
    ) -> None:
        self._tree = tree
        self._queue = queue
        self._drop = drop

    def queue_sealed(self, version: FileVersion) -> list[Change]:
        """Queue sealed content, behind what is queued of its key or in place of that; return the rows of the others."""
        key = version.record.key
        queued = [item for item in self._queue.for_key(key) if item.sequence < version.sequence]
        last = queued[-1] if queued else None
        is_newest = last is not None and self._queue.ends_with(last)
        self._queue.add(version)
        if is_removal(last) and self.is_superseded(last, before=version.sequence):
            self._queue.remove(last)  # the version inherits its base
            return self._forget(last)
        if not isinstance(last, FileVersion) or last.node is not version.node or last.in_flight:
            return []
        if self._keeps_both(last, version, is_first=last is queued[0], is_newest=is_newest):
            return []
        return self.take_place(last, version)

    def take_place(self, old: FileVersion, version: FileVersion) -> list[Change]:
        """Drop content for which newer queued content of its file stands; that takes over the old sequence.

        Whatever was written after that may depend on it.
        """
        sequence, version.waiting_since = old.sequence, old.waiting_since
        self._queue.remove(version)
        old.successor = version
        changes = self._drop(old)
        base = self._queue.base_for(version.record.key, old.record.base_etag, sequence)
        version.record = replace(version.record, sequence=sequence, base_etag=base)
        self._queue.add(version)
        return changes

    def _keeps_both(
        self, last: FileVersion, version: FileVersion, *, is_first: bool, is_newest: bool
    ) -> bool:
        """Return whether a queued version stays although newer content of the file waits.

        is_first: of its name. is_newest: nothing was queued since.
        """
        if self._queue.is_commit_marker(last.record.key) and version.size <= _MARKER_BYTES:
            # Each version names what was written before it, and a change in between, such as the delete of a
            # checkpoint, depends on the version before it. If nothing was queued in between, there is nothing new.
            return not is_newest
        # A file that is rewritten again and again must not hold back the changes behind it for ever.
        return is_first and trio.current_time() - last.waiting_since > _REWRITE_SECONDS

    def collapse_delete(
        self, key: str, changes: list[Change], moved: Iterable[QueuedChange] = ()
    ) -> str | None:
        """Let new content of `key` supersede a queued or deferred delete of it; return the base of that, or None.

        Appends to `changes`. moved: the items that bring the new content.
        """
        queued = self._queue.for_key(key)
        last = queued[-1] if queued else None
        if is_removal(last) and self.is_superseded(last, frozenset(item.sequence for item in moved)):
            self._queue.remove(last)
            changes += self._forget(last)
            return last.record.base_etag
        return None

    def is_superseded(
        self, removal: Operation, but: Container[int] = (), *, before: float = float("inf")
    ) -> bool:
        """Return whether new content of its name supersedes a delete, so that this need not be published.

        It must be published if its request may have been sent, or if it is of a commit marker, and files beside it were
        queued since. Files deeper than its directory do not count, nor do deferred ones, those at or after `before`,
        and those in `but`.
        """
        key = removal.record.key
        if removal.in_flight:
            return False
        if not self._queue.is_commit_marker(key) or self._queue.markers_blocking(removal):
            return True
        between = self._queue.rotation.written_between(removal.sequence, before, key)
        written = [self._queue.get(sequence) for sequence in between if sequence not in but]
        return all(item is None or self._queue.is_deferred(item) for item in written)

    def withdraw(self, removal: Operation) -> list[Change]:
        """Give a queued delete up: its object shows again."""
        self._queue.remove(removal)
        return self._forget(removal)

    def _forget(self, removal: Operation) -> list[Change]:
        self._tree.clear_tombstone(removal.record.key, gone=False)
        return [DropOperation(removal.sequence)]


def is_closed_at(tree: Tree, key: str) -> bool:
    """Return whether a name shows content that was closed, and joins the queue at its release.

    It has its place in the order already: nothing older of its name may move behind it.
    """
    node = tree.find(key)
    return node is not None and node.version is not None and node.version.state is FileState.FLUSHED


def rejected_before(node: Node | None) -> FileVersion | None:
    """Return the rejected content that a node shows, or that the content being written there will replace."""
    content = node.version if node is not None else None
    if content is None or content.state is FileState.REJECTED:
        return content
    replaced = content.replaces
    return replaced if replaced is not None and replaced.state is FileState.REJECTED else None
