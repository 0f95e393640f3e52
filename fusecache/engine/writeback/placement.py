"""Where content comes in the publish order: behind what is queued of its key, or in the place of that.

Decided without awaiting; what is returned is to be journaled in one transaction with what asked for it.

Also which removals wait for content that the bucket refused: the old object stays until something is published under
the name that its newer content was moved to. Their rows stay, and this node does not show the old name.
"""

import logging
from collections.abc import Callable, Iterable
from dataclasses import replace

import trio

from fusecache.engine.namespace.nodes import Generation, Item, Node, Operation, is_removal
from fusecache.engine.namespace.tree import Tree
from fusecache.engine.runtime.journal_writer import JournalWriter
from fusecache.engine.writeback.queue import Owed
from fusecache.index.journal import Change, DropOperation, PutOperation
from fusecache.model.objects import MIB

log = logging.getLogger(__name__)
# Files up to this size are taken for ones that speak of others.
_SMALL_BYTES = MIB
# So many versions of a file that speaks of others are queued at most, during an outage say.
_POINTER_VERSIONS = 1000
# A queued file whose rewriting has put its upload off for so long is published as it is.
_REWRITE_SECONDS = 10.0


class Places:
    """Gives promised content its place in the queue. drop: ends content that is not needed any more."""

    def __init__(
        self,
        tree: Tree,
        owed: Owed,
        journal: JournalWriter,
        drop: Callable[[Generation], list[Change]],
        take_out: Callable[[Generation], list[Change]],
    ) -> None:
        self._tree = tree
        self._owed = owed
        self._journal = journal
        self._drop = drop
        self._take_out = take_out

    def new(self, node: Node, generation: Generation, key: str) -> tuple[int, str | None]:
        """Return sequence and base for new content of `key`, behind what is queued of it."""
        sequence = self._journal.next_number()
        queued = self._owed.for_key(key)
        last = queued[-1] if queued else None
        generation.follows = last is not None and self._owed.ends_with(last)
        return sequence, self._owed.base_for(key, node.published_etag(key))

    def take(self, generation: Generation) -> list[Change]:
        """Give sealed content the place of the queued version that it makes needless; return what is to be journaled.

        Or have it take the place of a removed object. Not before: a promise that is taken back must leave the closed
        version before it, or its removal, in the queue.
        """
        key = generation.record.key
        if ended := self.end_put_off(key):
            return ended
        queued = [item for item in self._owed.for_key(key) if item.sequence < generation.sequence]
        last = queued[-1] if queued else None
        if isinstance(last, Generation) and last.is_hollow and not last.in_flight and not last.awaited:
            last.successor = generation
            return self._take_out(last)
        if is_removal(last) and not last.in_flight and not self._is_told(last, before=generation.sequence):
            self._owed.remove(last)  # what it knew of the bucket passes on
            self._tree.unhide(key, gone=False)
            return [DropOperation(last.sequence)]
        if not isinstance(last, Generation) or last.node is not generation.node or last.in_flight:
            return []
        # A small file may speak of what was written since: the newer content comes after that, and the oldest stays
        # where it is, for those that rely on it. Of one that is known to speak of others (`latest`) each version
        # stays: what came between, a removed checkpoint say, relies on the one before it.
        versions = sum(isinstance(item, Generation) and item.node is last.node for item in queued)
        most = _POINTER_VERSIONS if self._owed.tells(key) else 2
        if generation.size <= _SMALL_BYTES and not generation.follows and versions < most:
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
        sequence, generation.waiting_since = last.sequence, last.waiting_since
        self._owed.remove(generation)
        last.successor = generation
        changes: list[Change] = [*self._drop(last)]
        base = self._owed.base_for(key, last.record.base_etag, sequence)
        generation.record = replace(generation.record, sequence=sequence, base_etag=base)
        self._owed.add(generation)
        return changes

    def collapse_delete(self, key: str, changes: list[Change], moved: Iterable[Item] = ()) -> str | None:
        """New content takes the place of a queued DELETE of its key; return what the bucket shows there, or None.

        moved: the items that bring it.
        """
        base = self._owed.base_for(key, None)
        if ended := self.end_put_off(key):
            changes += ended
            return base
        queued = self._owed.for_key(key)
        last = queued[-1] if queued else None
        but = frozenset(item.sequence for item in moved)
        if is_removal(last) and not last.in_flight and not self._is_told(last, but=but):
            self._owed.remove(last)
            self._tree.unhide(key, gone=False)
            changes.append(DropOperation(last.sequence))
            return last.record.base_etag
        return None

    def _is_told(
        self, removal: Operation, *, before: float = float("inf"), but: frozenset[int] = frozenset()
    ) -> bool:
        """Say whether a removal is to be seen in the bucket: its name said that what was written since is there."""
        key = removal.record.key
        if not self._owed.tells(key):
            return False
        between = self._owed.rotation.written_between(removal.sequence, before, key)
        written = [self._owed.get(sequence) for sequence in between if sequence not in but]
        return any(item is not None and not self._owed.is_aside(item) for item in written)

    # ---- removals that wait for what the bucket refused

    def put_off_removals(self, key: str, key_now: str) -> list[Change]:
        """The bucket refused what was moved to `key`, and is at `key_now` by now: keep what it has of older content."""
        changes: list[Change] = []
        for removal in self._owed.removals_behind(key):
            if removal.in_flight:
                continue
            old = removal.record.key
            log.warning("the bucket keeps key=%s, as its newer content was refused under key=%s", old, key)
            self._owed.remove(removal)
            if self._owed.for_key(old):
                # Somebody writes that name again: what it knew of the bucket passed on.
                self._tree.unhide(old, gone=False)
                changes.append(DropOperation(removal.sequence))
                continue
            removal.record = replace(removal.record, target=key_now)
            self._owed.put_off(removal)
            changes.append(PutOperation(removal.record))
        return changes

    def put_off(self, removal: Operation, key: str) -> list[Change]:
        """Have a queued removal, the last change of its name, wait until something is published under `key`."""
        self._owed.remove(removal)
        removal.record = replace(removal.record, target=key)
        self._owed.put_off(removal)
        return [PutOperation(removal.record)]

    def follow(self, key_before: str, key_now: str) -> list[Change]:
        """What was refused has another name: what waits for it waits for that."""
        changes: list[Change] = []
        for removal in self._owed.put_off_behind(key_before):
            self._owed.take_up(removal.record.key)
            removal.record = replace(removal.record, target=key_now)
            self._owed.put_off(removal)
            changes.append(PutOperation(removal.record))
        return changes

    def queue_removals(self, key: str) -> list[Change]:
        """Something was published under `key`, or it was removed: queue what waited for that."""
        changes: list[Change] = []
        for removal in self._owed.put_off_behind(key):
            if self._owed.for_key(removal.record.key):
                continue  # that name is being written again
            self._owed.take_up(removal.record.key)
            changes.append(DropOperation(removal.sequence))
            removal.record = replace(removal.record, sequence=self._journal.next_number(), target="")
            self._owed.add(removal)
            changes.append(PutOperation(removal.record))
        return changes

    def forget_removals(self, key: str) -> list[Change]:
        """What was refused under `key` is let go: what the bucket has under the old names shows again."""
        keys = [removal.record.key for removal in self._owed.put_off_behind(key)]
        return [change for old in keys for change in self.end_put_off(old)]

    def end_put_off(self, key: str) -> list[Change]:
        """New content of `key` is queued: its removal, if one is put off, is not wanted any more."""
        removal = self._owed.take_up(key)
        if removal is None:
            return []
        self._tree.unhide(key, gone=False)
        return [DropOperation(removal.sequence)]
