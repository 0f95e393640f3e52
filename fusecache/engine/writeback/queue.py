"""What the bucket is owed, and in which order it may be published.

Invariants:
1. Items are ordered by sequence, no two have the same; for one key that is also the order of its changes.
2. Only the first item of a key knows what the bucket shows under it (its base); when it is published or
dropped, the next one learns it.
3. While an item is here neither its sequence nor its keys change.
"""

from bisect import insort
from dataclasses import replace
from typing import TYPE_CHECKING

import trio

from fusecache.engine.namespace.nodes import FileVersion, Operation, QueuedChange
from fusecache.model.names import parent_path
from fusecache.model.records import OperationKind
from fusecache.policy.name_patterns import matches_any
from fusecache.policy.writeback.publish_order import OrderedChange, PublishOrder, Role, SequenceBarrier
from fusecache.policy.writeback.rotation import Rotation

if TYPE_CHECKING:
    from collections.abc import Callable

_ROLES = {
    OperationKind.DELETE: Role.REMOVAL,
    OperationKind.MKDIR: Role.NEW,
    OperationKind.RMDIR: Role.MARKER_DELETE,
    OperationKind.SYMLINK: Role.ORDERED,
    OperationKind.RENAME: Role.ORDERED,
}


class WritebackQueue:
    """The queue of unpublished items. Each call costs the same however many there are, `items` apart.

    on_change is called whenever an item came or went, on_added and on_removed with the item; is_aside says of a new
    item whether it is not to be published for now.
    """

    def __init__(self, prefix: str = "", order_last: tuple[str, ...] = ()) -> None:
        """prefix: of all keys. order_last: names of files that say that all the rest is there."""
        self.order = PublishOrder(prefix)
        self.rotation = Rotation()
        self.on_change: Callable[[], None] = lambda: None
        self.on_added: Callable[[QueuedChange], None] = lambda _item: None
        self.on_removed: Callable[[QueuedChange], None] = lambda _item: None
        self.on_rebased: Callable[[QueuedChange], None] = lambda _item: None
        self.is_deferred: Callable[[QueuedChange], bool] = lambda _item: False
        self._order_last = order_last
        self._changed = trio.Event()
        self._items: dict[int, QueuedChange] = {}
        # In order, until the next change.
        self._sorted: list[QueuedChange] | None = []
        self._by_key: dict[str, list[QueuedChange]] = {}
        # Keys that tell of others, and of which several items are queued, by directory.
        self._rewritten: dict[str, dict[str, None]] = {}
        # Removals of names whose newer content went to a key, by that.
        self._deletes_by_target: dict[str, list[Operation]] = {}
        # Removals that are put off, by the removed key.
        self._deferred: dict[str, Operation] = {}
        # The same, by the key that something is to be published under first.
        self._waiting_for: dict[str, dict[Operation, None]] = {}
        # Of negative sequences: its lowest is that of the newest item.
        self._newest = SequenceBarrier()
        # How many items are files with their bytes.
        self.contents = 0

    def __len__(self) -> int:
        return len(self._items)

    def __contains__(self, item: QueuedChange) -> bool:
        return self._items.get(item.sequence) is item

    def get(self, sequence: int) -> QueuedChange | None:
        """Return the item of a sequence, or None."""
        return self._items.get(sequence)

    def unordered(self) -> list[QueuedChange]:
        """Return all items, in no particular order: a copy, for who only counts them."""
        return list(self._items.values())

    def items(self) -> list[QueuedChange]:
        """Return all items in order (a copy: the queue may change while they are looked at)."""
        if self._sorted is None:
            self._sorted = sorted(self._items.values(), key=_sequence)
        return list(self._sorted)

    def add(self, item: QueuedChange) -> None:
        """Enter an item at the place that its sequence and keys say."""
        change = self._change_of(item)
        self.order.add(change, aside=self.is_deferred(item))
        self._items[item.sequence] = item
        self.contents += isinstance(item, FileVersion)
        self._newest.add(-item.sequence)
        for key in item.changed_keys():
            same_key = self._by_key.setdefault(key, [])
            insort(same_key, item, key=_sequence)
            if len(same_key) == 2 and self.is_commit_marker(key):
                self._rewritten.setdefault(parent_path(key), {})[key] = None
        if isinstance(item, Operation) and change.moved_to:
            self._deletes_by_target.setdefault(change.moved_to, []).append(item)
        if change.role is Role.REMOVAL and not change.moved_to:
            self.rotation.add_removal(item.sequence)
        elif change.role in {Role.NEW, Role.ORDERED} and not change.keys[-1].endswith("/"):
            self.rotation.add_write(item.sequence, change.keys[-1])
        self.on_added(item)
        self._notify()

    def remove(self, item: QueuedChange, *, published: bool = False) -> None:
        """Take an item out. Unless it was published, what it knew of the bucket passes to the next of its keys."""
        del self._items[item.sequence]
        self.contents -= isinstance(item, FileVersion)
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
                self.on_rebased(same_key[0])
        if isinstance(item, Operation) and (moved_to := _moved_to(item)):
            self._deletes_by_target[moved_to].remove(item)
            if not self._deletes_by_target[moved_to]:
                del self._deletes_by_target[moved_to]
        self.rotation.remove(item.sequence, item.changed_keys()[-1])
        self.on_removed(item)
        self._notify()

    async def wait_gone(self, item: QueuedChange) -> None:
        """Return when the item is no longer owed."""
        while item in self:
            await self._changed.wait()

    def discard(self, item: QueuedChange) -> None:
        """Take an item out if it is in."""
        if item in self:
            self.remove(item)

    def for_key(self, key: str) -> list[QueuedChange]:
        """Return the items that change `key`, in order."""
        return list(self._by_key.get(key, ()))

    def rewritten_in(self, folder: str) -> list[str]:
        """Return the keys right in a directory that tell of others, and of which several changes are queued."""
        return list(self._rewritten.get(folder, ()))

    def deletes_waiting_for(self, key: str) -> list[Operation]:
        """Return the queued removals of names whose newer, unpublished content went to `key`."""
        return list(self._deletes_by_target.get(key, ()))

    def ends_with(self, item: QueuedChange) -> bool:
        """Return whether nothing is queued behind the item."""
        return item in self and self._newest.lowest == -item.sequence

    def exists_after(self, key: str, base_etag: str | None) -> bool:
        """Return whether the bucket will show `key` after all that is queued; `base_etag`: what it shows now."""
        queued = self._by_key.get(key)
        if not queued:
            return base_etag is not None and key not in self._deferred
        return leaves_object(queued[-1], key)

    def exists_before(self, item: QueuedChange, key: str, base_etag: str | None) -> bool:
        """Return whether the bucket will show `key` right before a queued item of it is published."""
        same_key = self._by_key[key]
        index = same_key.index(item)
        return leaves_object(same_key[index - 1], key) if index else base_etag is not None

    def base_for(self, key: str, base_etag: str | None, sequence: int = 0) -> str | None:
        """Return the base of a new item of `key`: `base_etag` if it is the first, else not known yet (None).

        sequence: the older place that it gets; before all others it has the base that the first of them was passed.
        """
        queued = self._by_key.get(key)
        if queued:
            return base_of(queued[0], key) if 0 < sequence < queued[0].sequence else None
        removal = self._deferred.get(key)
        return base_etag if removal is None else removal.record.base_etag

    def rebase(self, key: str, etag: str | None) -> QueuedChange | None:
        """Tell the first item of `key` what the bucket shows under it; return it, to be journaled, or None."""
        queued = self._by_key.get(key)
        if not queued:
            return None
        item = queued[0]
        if isinstance(item, FileVersion):
            item.record = replace(item.record, base_etag=etag)
        elif item.record.kind is OperationKind.RENAME and key == item.record.key:
            item.record = replace(item.record, source_etag=etag or "")
        else:
            item.record = replace(item.record, base_etag=etag)
        return item

    # ---- removals that wait for what the bucket refused

    def defer(self, removal: Operation) -> None:
        """Nothing of the removed key is queued: the bucket is not to be asked for this before `take_up`."""
        self._deferred[removal.record.key] = removal
        self._waiting_for.setdefault(removal.record.target, {})[removal] = None

    def defer_behind(self, key: str) -> list[Operation]:
        """Return the removals that are put off until something is published under `key`."""
        return list(self._waiting_for.get(key, ()))

    def undefer(self, key: str) -> Operation | None:
        """Return the removal of `key` that is put off, if there is one; it is no longer."""
        removal = self._deferred.pop(key, None)
        if removal is not None:
            waiting = self._waiting_for[removal.record.target]
            del waiting[removal]
            if not waiting:
                del self._waiting_for[removal.record.target]
        return removal

    def is_commit_marker(self, key: str) -> bool:
        """Return whether the file of a key says that others are there, by its name."""
        return matches_any(key.rpartition("/")[2], self._order_last)

    def _change_of(self, item: QueuedChange) -> OrderedChange:
        """Return what the publish order needs to know of an item that is about to be entered."""
        keys = item.changed_keys()
        tells = self.is_commit_marker(keys[-1])
        if isinstance(item, Operation):
            role, moved_to = _ROLES[item.record.kind], _moved_to(item)
            return OrderedChange(item.sequence, keys, role, is_commit_marker=tells, moved_to=moved_to)
        replaces = item.record.base_etag is not None or keys[0] in self._by_key
        role = Role.ORDERED if replaces or tells else Role.NEW
        return OrderedChange(item.sequence, keys, role, item.size, tells)

    def _notify(self) -> None:
        self._sorted = None
        if self._changed.statistics().tasks_waiting:
            self._changed.set()
            self._changed = trio.Event()
        self.on_change()


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
    """Return what the bucket shows under `key` before the item, as far as the item knows."""
    if isinstance(item, Operation) and item.record.kind is OperationKind.RENAME and key == item.record.key:
        return item.record.source_etag or None
    return item.record.base_etag


def _sequence(item: QueuedChange) -> int:
    return item.sequence
