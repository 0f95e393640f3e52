"""Gives closed content its sequence in the publish order: behind what is queued of its key, or in place of that.

It also defers deletes that depend on rejected content. When newer content of a name was renamed and the bucket then
rejected it, the old object under the old name stays. Its delete is deferred until something is published under the new
name. The row of the delete stays in the journal, and this node does not show the old name.

Invariant: nothing here awaits. The caller journals the returned rows in one transaction with the cause.
"""

import logging
from collections.abc import Callable, Iterable
from dataclasses import replace

import trio

from fusecache.engine.namespace.nodes import FileVersion, Operation, QueuedChange, is_removal
from fusecache.engine.namespace.tree import Tree
from fusecache.engine.runtime.journal_writer import JournalWriter
from fusecache.engine.writeback.queue import WritebackQueue
from fusecache.index.journal import Change, DropOperation, PutOperation
from fusecache.model.objects import MIB

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
        journal: JournalWriter,
        drop: Callable[[FileVersion], list[Change]],
    ) -> None:
        self._tree = tree
        self._queue = queue
        self._journal = journal
        self._drop = drop

    def queue_sealed(self, version: FileVersion) -> list[Change]:
        """Queue sealed content, behind what is queued of its key or in place of that; return the rows of the others."""
        key = version.record.key
        queued = [item for item in self._queue.for_key(key) if item.sequence < version.sequence]
        last = queued[-1] if queued else None
        is_newest = last is not None and self._queue.ends_with(last)
        self._queue.add(version)
        if ended := self.cancel_deferred_delete(key):
            return ended
        if (
            is_removal(last)
            and not last.in_flight
            and not self._must_publish_delete(last, before=version.sequence)
        ):
            self._queue.remove(last)  # the version inherits its base
            self._tree.clear_tombstone(key, gone=False)
            return [DropOperation(last.sequence)]
        if not isinstance(last, FileVersion) or last.node is not version.node or last.in_flight:
            return []
        # A remote fsync waits for this very version. It must not wait for a later one, which may never be published.
        if last.awaited or self._keeps_both(last, version, is_first=last is queued[0], is_newest=is_newest):
            return []
        # The newer content takes over the sequence of the old one: whatever was written after that may depend on it.
        sequence, version.waiting_since = last.sequence, last.waiting_since
        self._queue.remove(version)
        last.successor = version
        changes: list[Change] = [*self._drop(last)]
        base = self._queue.base_for(key, last.record.base_etag, sequence)
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
        has_begun = last.record.upload_id or trio.current_time() - last.waiting_since > _REWRITE_SECONDS
        return bool(is_first and has_begun)

    def collapse_delete(
        self, key: str, changes: list[Change], moved: Iterable[QueuedChange] = ()
    ) -> str | None:
        """Let new content of `key` supersede a queued or deferred delete of it; return the base of that, or None.

        Appends to `changes`. moved: the items that bring the new content.
        """
        base = self._queue.base_for(key, None)
        if ended := self.cancel_deferred_delete(key):
            changes += ended
            return base
        queued = self._queue.for_key(key)
        last = queued[-1] if queued else None
        but = frozenset(item.sequence for item in moved)
        if is_removal(last) and not last.in_flight and not self._must_publish_delete(last, but=but):
            self._queue.remove(last)
            self._tree.clear_tombstone(key, gone=False)
            changes.append(DropOperation(last.sequence))
            return last.record.base_etag
        return None

    def _must_publish_delete(
        self, removal: Operation, *, before: float = float("inf"), but: frozenset[int] = frozenset()
    ) -> bool:
        """Return whether a delete must be published: it is of a commit marker, and files beside it were queued since.

        Files deeper than its directory do not count, nor do deferred ones, those at or after `before`, those in `but`.
        """
        key = removal.record.key
        if not self._queue.is_commit_marker(key):
            return False
        between = self._queue.rotation.written_between(removal.sequence, before, key)
        written = [self._queue.get(sequence) for sequence in between if sequence not in but]
        return any(item is not None and not self._queue.is_deferred(item) for item in written)

    # ---- deferred deletes: they wait until something is published where rejected content is now

    def defer_deletes(self, key: str, key_now: str) -> list[Change]:
        """Defer the deletes that wait for rejected content, so that the bucket keeps the older content.

        key: the name of that content when its request was sent; key_now: the name that it has by now.
        """
        changes: list[Change] = []
        for removal in self._queue.deletes_waiting_for(key):
            if removal.in_flight:
                continue
            old = removal.record.key
            log.warning("delete deferred, as the newer content was rejected key=%s rejected_key=%s", old, key)
            self._queue.remove(removal)
            if self._queue.for_key(old):
                # That name is being written again, and the next item inherited the base: no delete is needed.
                self._tree.clear_tombstone(old, gone=False)
                changes.append(DropOperation(removal.sequence))
                continue
            removal.record = replace(removal.record, target=key_now)
            self._queue.defer(removal)
            changes.append(PutOperation(removal.record))
        return changes

    def defer(self, removal: Operation, key: str) -> list[Change]:
        """Defer a queued delete, the last change of its name, until something is published under `key`."""
        self._queue.remove(removal)
        removal.record = replace(removal.record, target=key)
        self._queue.defer(removal)
        return [PutOperation(removal.record)]

    def retarget(self, key_before: str, key_now: str) -> list[Change]:
        """Let deferred deletes wait for the new name of rejected content that was renamed."""
        changes: list[Change] = []
        for removal in self._queue.deletes_deferred_for(key_before):
            self._queue.undefer(removal.record.key)
            removal.record = replace(removal.record, target=key_now)
            self._queue.defer(removal)
            changes.append(PutOperation(removal.record))
        return changes

    def queue_deletes(self, key: str) -> list[Change]:
        """Queue the deletes that wait for `key`, as something was published under it, or it was removed."""
        changes: list[Change] = []
        for removal in self._queue.deletes_deferred_for(key):
            if self._queue.for_key(removal.record.key):
                continue  # that name is being written again
            self._queue.undefer(removal.record.key)
            changes.append(DropOperation(removal.sequence))
            removal.record = replace(removal.record, sequence=self._journal.next_number(), target="")
            self._queue.add(removal)
            changes.append(PutOperation(removal.record))
        return changes

    def forget_deletes(self, key: str) -> list[Change]:
        """Cancel the deletes that wait for rejected content of `key`, which is discarded: the old names show again."""
        keys = [removal.record.key for removal in self._queue.deletes_deferred_for(key)]
        return [change for old in keys for change in self.cancel_deferred_delete(old)]

    def cancel_deferred_delete(self, key: str) -> list[Change]:
        """Cancel the deferred delete of `key`, if there is one: new content of `key` supersedes it."""
        removal = self._queue.undefer(key)
        if removal is None:
            return []
        self._tree.clear_tombstone(key, gone=False)
        return [DropOperation(removal.sequence)]
