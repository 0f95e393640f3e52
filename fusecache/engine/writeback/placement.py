"""Where content comes in the publish order: behind what is queued of its key, or in the place of that.

Decided without awaiting; what is returned is to be journaled in one transaction with what asked for it.

Also which removals wait for content that the bucket refused: the old object stays until something is published under
the name that its newer content was moved to. Their rows stay, and this node does not show the old name.
"""

import logging
from collections.abc import Callable, Iterable
from dataclasses import replace

import trio

from fusecache.engine.namespace.nodes import FileVersion, Node, Operation, QueuedChange, is_removal
from fusecache.engine.namespace.tree import Tree
from fusecache.engine.runtime.journal_writer import JournalWriter
from fusecache.engine.writeback.queue import WritebackQueue
from fusecache.index.journal import Change, DropOperation, PutOperation
from fusecache.model.objects import MIB

log = logging.getLogger(__name__)
# Files up to this size are taken for ones that speak of others.
_SMALL_BYTES = MIB
# So many versions of a file that speaks of others are queued at most, during an outage say.
_POINTER_VERSIONS = 1000
# A queued file whose rewriting has put its upload off for so long is published as it is.
_REWRITE_SECONDS = 10.0


class QueuePlacement:
    """Gives promised content its place in the queue. drop: ends content that is not needed any more."""

    def __init__(
        self,
        tree: Tree,
        queue: WritebackQueue,
        journal: JournalWriter,
        drop: Callable[[FileVersion], list[Change]],
        take_out: Callable[[FileVersion], list[Change]],
    ) -> None:
        self._tree = tree
        self._queue = queue
        self._journal = journal
        self._drop = drop
        self._dequeue = take_out

    def assign(self, node: Node, version: FileVersion, key: str) -> tuple[int, str | None]:
        """Return sequence and base for new content of `key`, behind what is queued of it."""
        sequence = self._journal.next_number()
        queued = self._queue.for_key(key)
        last = queued[-1] if queued else None
        version.has_dependent_write = last is not None and self._queue.ends_with(last)
        return sequence, self._queue.base_for(key, node.published_etag(key))

    def supersede(self, version: FileVersion) -> list[Change]:
        """Give sealed content the place of the queued version that it makes needless; return what is to be journaled.

        Or have it take the place of a removed object. Not before: a promise that is taken back must leave the closed
        version before it, or its removal, in the queue.
        """
        key = version.record.key
        if ended := self.cancel_deferred_delete(key):
            return ended
        queued = [item for item in self._queue.for_key(key) if item.sequence < version.sequence]
        last = queued[-1] if queued else None
        if (
            isinstance(last, FileVersion)
            and last.is_superseded_marker
            and not last.in_flight
            and not last.awaited
        ):
            last.successor = version
            return self._dequeue(last)
        if (
            is_removal(last)
            and not last.in_flight
            and not self._is_commit_marker(last, before=version.sequence)
        ):
            self._queue.remove(last)  # what it knew of the bucket passes on
            self._tree.clear_tombstone(key, gone=False)
            return [DropOperation(last.sequence)]
        if not isinstance(last, FileVersion) or last.node is not version.node or last.in_flight:
            return []
        # A small file may speak of what was written since: the newer content comes after that, and the oldest stays
        # where it is, for those that rely on it. Of one that is known to speak of others (`latest`) each version
        # stays: what came between, a removed checkpoint say, relies on the one before it.
        versions = sum(isinstance(item, FileVersion) and item.node is last.node for item in queued)
        most = _POINTER_VERSIONS if self._queue.is_commit_marker(key) else 2
        if version.size <= _SMALL_BYTES and not version.has_dependent_write and versions < most:
            return []
        # A file rewritten again and again must not keep everything behind it waiting for ever: its oldest version goes.
        is_overdue = (
            trio.current_time() - last.waiting_since > _REWRITE_SECONDS or last.record.upload_id != ""
        )
        if is_overdue and versions == 1:
            return []
        # Who waits for this very content in the bucket must not be told of later content that may never come.
        if last.awaited:
            return []
        # The newer content takes the oldest unpublished place of its key: whatever was written after the old one may
        # rely on it.
        sequence, version.waiting_since = last.sequence, last.waiting_since
        self._queue.remove(version)
        last.successor = version
        changes: list[Change] = [*self._drop(last)]
        base = self._queue.base_for(key, last.record.base_etag, sequence)
        version.record = replace(version.record, sequence=sequence, base_etag=base)
        self._queue.add(version)
        return changes

    def collapse_delete(
        self, key: str, changes: list[Change], moved: Iterable[QueuedChange] = ()
    ) -> str | None:
        """New content takes the place of a queued DELETE of its key; return what the bucket shows there, or None.

        moved: the items that bring it.
        """
        base = self._queue.base_for(key, None)
        if ended := self.cancel_deferred_delete(key):
            changes += ended
            return base
        queued = self._queue.for_key(key)
        last = queued[-1] if queued else None
        but = frozenset(item.sequence for item in moved)
        if is_removal(last) and not last.in_flight and not self._is_commit_marker(last, but=but):
            self._queue.remove(last)
            self._tree.clear_tombstone(key, gone=False)
            changes.append(DropOperation(last.sequence))
            return last.record.base_etag
        return None

    def _is_commit_marker(
        self, removal: Operation, *, before: float = float("inf"), but: frozenset[int] = frozenset()
    ) -> bool:
        """Say whether a removal is to be seen in the bucket: its name said that what was written since is there."""
        key = removal.record.key
        if not self._queue.is_commit_marker(key):
            return False
        between = self._queue.rotation.written_between(removal.sequence, before, key)
        written = [self._queue.get(sequence) for sequence in between if sequence not in but]
        return any(item is not None and not self._queue.is_deferred(item) for item in written)

    # ---- removals that wait for what the bucket refused

    def deferred_deletes(self, key: str, key_now: str) -> list[Change]:
        """The bucket refused what was moved to `key`, and is at `key_now` by now: keep what it has of older content."""
        changes: list[Change] = []
        for removal in self._queue.deletes_waiting_for(key):
            if removal.in_flight:
                continue
            old = removal.record.key
            log.warning("the bucket keeps key=%s, as its newer content was refused under key=%s", old, key)
            self._queue.remove(removal)
            if self._queue.for_key(old):
                # Somebody writes that name again: what it knew of the bucket passed on.
                self._tree.clear_tombstone(old, gone=False)
                changes.append(DropOperation(removal.sequence))
                continue
            removal.record = replace(removal.record, target=key_now)
            self._queue.defer(removal)
            changes.append(PutOperation(removal.record))
        return changes

    def defer(self, removal: Operation, key: str) -> list[Change]:
        """Have a queued removal, the last change of its name, wait until something is published under `key`."""
        self._queue.remove(removal)
        removal.record = replace(removal.record, target=key)
        self._queue.defer(removal)
        return [PutOperation(removal.record)]

    def retarget(self, key_before: str, key_now: str) -> list[Change]:
        """What was refused has another name: what waits for it waits for that."""
        changes: list[Change] = []
        for removal in self._queue.defer_behind(key_before):
            self._queue.undefer(removal.record.key)
            removal.record = replace(removal.record, target=key_now)
            self._queue.defer(removal)
            changes.append(PutOperation(removal.record))
        return changes

    def queue_deletes(self, key: str) -> list[Change]:
        """Something was published under `key`, or it was removed: queue what waited for that."""
        changes: list[Change] = []
        for removal in self._queue.defer_behind(key):
            if self._queue.for_key(removal.record.key):
                continue  # that name is being written again
            self._queue.undefer(removal.record.key)
            changes.append(DropOperation(removal.sequence))
            removal.record = replace(removal.record, sequence=self._journal.next_number(), target="")
            self._queue.add(removal)
            changes.append(PutOperation(removal.record))
        return changes

    def forget_deletes(self, key: str) -> list[Change]:
        """What was refused under `key` is let go: what the bucket has under the old names shows again."""
        keys = [removal.record.key for removal in self._queue.defer_behind(key)]
        return [change for old in keys for change in self.cancel_deferred_delete(old)]

    def cancel_deferred_delete(self, key: str) -> list[Change]:
        """New content of `key` is queued: its removal, if one is put off, is not wanted any more."""
        removal = self._queue.undefer(key)
        if removal is None:
            return []
        self._tree.clear_tombstone(key, gone=False)
        return [DropOperation(removal.sequence)]
