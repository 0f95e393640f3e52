"""The write-back queue: the changes that the bucket does not have yet, in publish order.

Not the journal, which is its durable shadow, and not the schedule (`engine/publish/schedule.py`), which knows times.

A *deferred item* is in the queue, but is not published for now: its name is temporary, or it is a delete that waits for
`delete_delay` or for readers (`is_deferred`).

Invariants:
1. Items are ordered by sequence, and no two have the same. For one key this is also the order of its changes.
2. Only the first item of a key knows what the bucket shows under it (its base ETag). If that item is dropped,
   the next one inherits the base. If it is published, the next one's base is the new ETag.
3. While an item is queued, neither its sequence nor its keys change.
"""

import math
from bisect import insort
from collections.abc import Iterator
from dataclasses import replace

import trio

from fusecache.engine.namespace.events import Events
from fusecache.engine.namespace.nodes import FileVersion, Operation, QueuedChange, is_rename
from fusecache.model.names import parent_path, parent_prefix
from fusecache.model.objects import ObjectId, ObjectInfo
from fusecache.model.records import FileState, OperationKind, Reason
from fusecache.policy.name_patterns import matches_any
from fusecache.policy.writeback.publish_order import OrderedChange, PublishOrder, Role, SequenceBarrier
from fusecache.policy.writeback.rotation import Rotation

_ROLES = {
    OperationKind.DELETE: Role.REMOVAL,
    OperationKind.MKDIR: Role.NEW,
    OperationKind.RMDIR: Role.MARKER_DELETE,
    OperationKind.SYMLINK: Role.ORDERED,
    OperationKind.RENAME: Role.ORDERED,
}


class WritebackQueue:
    """The queue of unpublished items. Only `items` and `unordered` cost more the more items there are."""

    def __init__(
        self,
        events: Events,
        prefix: str = "",
        order_last: tuple[str, ...] = (),
    ) -> None:
        """prefix: of all keys. order_last: name patterns of commit markers."""
        self.order = PublishOrder(prefix)
        self.rotation = Rotation()
        self._events = events
        self._order_last = order_last
        self._changed = trio.Event()
        self._items: dict[int, QueuedChange] = {}
        # The items in order; None after a change, until `items` sorts them again.
        self._sorted: list[QueuedChange] | None = []
        self._by_key: dict[str, list[QueuedChange]] = {}
        # By directory: keys of commit markers with several queued items.
        self._rewritten: dict[str, dict[str, None]] = {}
        # By the key to which newer content of their name moved: queued deletes.
        self._deletes_by_target: dict[str, list[Operation]] = {}
        # It holds negated sequences: the `lowest` is that of the newest item.
        self._newest = SequenceBarrier()
        # The items that are file versions.
        self.contents: set[FileVersion] = set()
        # Commit markers that are not published, as the bucket rejected, or a power cut took, what they may name.
        self._held: set[FileVersion] = set()

    def __len__(self) -> int:
        return len(self._items)

    def __contains__(self, item: QueuedChange) -> bool:
        return self._items.get(item.sequence) is item

    def get(self, sequence: int) -> QueuedChange | None:
        """Return the item with a sequence, or None."""
        return self._items.get(sequence)

    def is_deferred(self, item: QueuedChange) -> bool:
        """Return whether an item is not published for now; it need not be queued yet."""
        return self._events.is_deferred(item)

    def is_temporary(self, item: QueuedChange) -> bool:
        """Return whether a file is not published for now because of its temporary name."""
        return isinstance(item, FileVersion) and self.is_deferred(item)

    def unordered(self) -> list[QueuedChange]:
        """Return a copy of all items, in no particular order: cheaper than `items` for callers that only count."""
        return list(self._items.values())

    def items(self) -> list[QueuedChange]:
        """Return a copy of all items, in order: the queue may change while the caller iterates."""
        if self._sorted is None:
            self._sorted = sorted(self._items.values(), key=_sequence)
        return list(self._sorted)

    def add(self, item: QueuedChange) -> None:
        """Queue an item under its sequence and keys."""
        change = self._change_of(item)
        self.order.add(change, deferred=self.is_deferred(item))
        self._items[item.sequence] = item
        if isinstance(item, FileVersion):
            self.contents.add(item)
        self._newest.add(-item.sequence)
        for key in item.changed_keys():
            same_key = self._by_key.setdefault(key, [])
            insort(same_key, item, key=_sequence)
            if len(same_key) == 2 and self.is_commit_marker(key):
                self._rewritten.setdefault(parent_path(key), {})[key] = None
        if isinstance(item, Operation) and change.moved_to:
            self._deletes_by_target.setdefault(change.moved_to, []).append(item)
        if change.role is Role.REMOVAL:
            self.rotation.add_removal(item.sequence)
        elif change.role in {Role.NEW, Role.ORDERED} and not change.keys[-1].endswith("/"):
            self.rotation.add_write(item.sequence, change.keys[-1])
        self._events.on_queued(item)
        self._sorted = None
        self.announce()

    def remove(self, item: QueuedChange, *, published: bool = False) -> None:
        """Take an item out of the queue. Unless it was published, the next item of each key inherits its base.

        After a publication the publisher calls `rebase` with the new ETag instead.
        """
        del self._items[item.sequence]
        if isinstance(item, FileVersion):
            self.contents.discard(item)
        self._newest.discard(-item.sequence)
        self.order.remove(item.sequence)
        for key in item.changed_keys():
            same_key = self._by_key[key]
            was_first = same_key[0] is item
            same_key.remove(item)
            if len(same_key) == 1 and self.is_commit_marker(key):
                rewritten = self._rewritten[parent_path(key)]
                del rewritten[key]
                if not rewritten:
                    del self._rewritten[parent_path(key)]
            if not same_key:
                del self._by_key[key]
            elif was_first and not published:
                self.rebase(key, base_of(item, key))
                self._events.on_rebased(same_key[0])
        self._forget_target(item)
        self.rotation.remove(item.sequence, item.changed_keys()[-1])
        self._events.on_unqueued(item)
        self._sorted = None
        self.announce()

    async def wait_changed(self) -> None:
        """Return when an item is queued or leaves the queue, or a waiter has to look for another reason."""
        await self._changed.wait()

    def announce(self) -> None:
        """Wake all tasks in `wait_changed`."""
        if self._changed.statistics().tasks_waiting:
            self._changed.set()
            self._changed = trio.Event()

    def discard(self, item: QueuedChange) -> None:
        """Take an item out of the queue, if it is queued."""
        if item in self:
            self.remove(item)

    def for_key(self, key: str) -> list[QueuedChange]:
        """Return the items that change `key`, in order."""
        return list(self._by_key.get(key, ()))

    def rewritten_in(self, folder: str) -> list[str]:
        """Return the keys of commit markers right in a directory that have several queued changes."""
        return list(self._rewritten.get(folder, ()))

    def deletes_waiting_for(self, key: str) -> list[Operation]:
        """Return the queued deletes of names whose newer, unpublished content moved to `key`."""
        return list(self._deletes_by_target.get(key, ()))

    def objects_before(self, key: str, etag: str | None, sequence: float = math.inf) -> Iterator[ObjectId]:
        """Yield the objects whose bytes a key has before the change of that sequence, if no write comes in between.

        That is the version that the bucket shows there, and the one that a queued rename brings. etag: of the first.
        """
        if etag:
            yield ObjectId(key, etag)
        for item in reversed(self.for_key(key)):
            if item.sequence < sequence and is_rename(item) and item.record.target == key:
                source = item.record
                yield from self.objects_before(source.key, source.source_etag, item.sequence)
                return

    def hold(self, marker: FileVersion) -> None:
        """A commit marker is rejected for now, as content that it may name is missing."""
        self._held.add(marker)

    def held_markers(self) -> list[FileVersion]:
        """Return the commit markers that are still held."""
        return [each for each in self._held_or_newer() if each.state is FileState.REJECTED]

    def markers_blocking(self, removal: Operation) -> list[FileVersion]:
        """Return held commit markers above a removed object: the bucket's older versions of these may name it."""
        blocking: list[FileVersion] = []
        for each in self._held_or_newer() if self._held else ():
            if each.node is None or each.node.parent is None:
                continue
            if each in self and (
                # Such changes do not go before the delete.
                self.is_commit_marker(removal.record.key) or self.for_key(removal.record.key + "/")
            ):
                continue
            if removal.record.key.startswith(parent_prefix(each.record.key)):
                blocking.append(each)
        return blocking

    def _held_or_newer(self) -> list[FileVersion]:
        """Return each marker that was held until it, or newer content in its place, is published or removed."""
        newest: set[FileVersion] = set()
        for each in self._held:
            marker = each
            while marker.state is FileState.DROPPED and marker.successor is not None:
                marker = marker.successor
            is_held = marker.state is FileState.REJECTED and marker.record.reason is not Reason.NONE
            if is_held or marker in self or marker.state in {FileState.OPEN, FileState.FLUSHED}:
                newest.add(marker)
        self._held = newest
        return list(newest)

    def settle_deletes(self, key: str) -> list[Operation]:
        """Return the deletes whose newer content was just published under `key`; they lose their target.

        What happens to later content of `key` does not concern them.
        """
        waits_from = min((item.sequence for item in self.for_key(key)), default=float("inf"))
        settled = [removal for removal in self.deletes_waiting_for(key) if removal.sequence < waits_from]
        for removal in settled:
            self.settle(removal)
        return settled

    def settle(self, removal: Operation) -> None:
        """A delete waits for no other name any more."""
        self._forget_target(removal)
        removal.record = replace(removal.record, target="")

    def ends_with(self, item: QueuedChange) -> bool:
        """Return whether the item is the last of the queue."""
        return item in self and self._newest.lowest == -item.sequence

    def exists_after(self, key: str, base_etag: str | None) -> bool:
        """Return whether the bucket will show `key` once all is published. base_etag: what it shows there now."""
        queued = self._by_key.get(key)
        if not queued:
            return base_etag is not None
        return leaves_object(queued[-1], key)

    def base_for(self, key: str, base_etag: str | None, sequence: int = 0) -> str | None:
        """Return the base of a new item of `key`: `base_etag` if it is the first of the key, else None (not known yet).

        sequence: an older sequence that the item takes over (0: none). If that comes before all other items of the key,
        the item gets the base of the first of them.
        """
        queued = self._by_key.get(key)
        if queued:
            return base_of(queued[0], key) if 0 < sequence < queued[0].sequence else None
        return base_etag

    def rebase(self, key: str, etag: str | None, shown: ObjectInfo | None = None) -> QueuedChange | None:
        """Give the first item of `key` its base: what the bucket shows. Return it, to be journaled, or None.

        shown: the version with that ETag, if it is known.
        """
        queued = self._by_key.get(key)
        if not queued:
            return None
        item = queued[0]
        if isinstance(item, FileVersion):
            item.record = replace(item.record, base_etag=etag)
        elif item.record.kind is OperationKind.RENAME and key == item.record.key:
            if etag != item.record.source_etag:
                size, modified = (0, 0.0) if shown is None else (shown.size, shown.modified)
                item.record = replace(item.record, source_etag=etag or "", size=size, modified=modified)
        else:
            item.record = replace(item.record, base_etag=etag)
        return item

    def is_commit_marker(self, key: str) -> bool:
        """Return whether the file name of a key matches `order_last`: it says that other files are there."""
        return matches_any(key.rpartition("/")[2], self._order_last)

    def _forget_target(self, item: QueuedChange) -> None:
        if isinstance(item, Operation) and (moved_to := _moved_to(item)):
            self._deletes_by_target[moved_to].remove(item)
            if not self._deletes_by_target[moved_to]:
                del self._deletes_by_target[moved_to]

    def _change_of(self, item: QueuedChange) -> OrderedChange:
        """Return what the publish order needs to know of an item that is about to be queued."""
        keys = item.changed_keys()
        is_marker = self.is_commit_marker(keys[-1])
        if isinstance(item, Operation):
            record, role = item.record, _ROLES[item.record.kind]
            is_one_of_many = record.with_directory and not is_marker
            replaces = record.base_etag is not None or keys[-1] in self._by_key
            if is_one_of_many and record.size and not replaces:
                # A new file under its new name. Symlinks and empty files, which may stand for others, come after these.
                return OrderedChange(item.sequence, keys, Role.NEW)
            return OrderedChange(
                item.sequence, keys, role, is_marker, _moved_to(item), side_by_side=is_one_of_many
            )
        replaces = item.record.base_etag is not None or keys[0] in self._by_key
        role = Role.ORDERED if replaces or is_marker else Role.NEW
        return OrderedChange(item.sequence, keys, role, is_marker)


def _moved_to(item: Operation) -> str:
    return item.record.target if item.record.kind is OperationKind.DELETE else ""


def leaves_object(item: QueuedChange, key: str) -> bool:
    """Return whether the bucket shows an object under `key` once the item is published."""
    if isinstance(item, FileVersion):
        return True
    kind = item.record.kind
    if kind is OperationKind.RENAME:
        return key == item.record.target
    return kind in {OperationKind.MKDIR, OperationKind.SYMLINK}


def base_of(item: QueuedChange, key: str) -> str | None:
    """Return the base ETag of an item for `key`: what the bucket shows there before the item, if known."""
    if isinstance(item, Operation) and item.record.kind is OperationKind.RENAME and key == item.record.key:
        return item.record.source_etag or None
    return item.record.base_etag


def _sequence(item: QueuedChange) -> int:
    return item.sequence
