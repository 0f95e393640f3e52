"""What the bucket is owed, in the order in which it will be published.

Invariants:
1. Items are ordered by sequence; for one key that is also the order of its changes.
2. Only the first item of a key knows what the bucket shows under it (its base); when it is published or
dropped, the next one learns it.
"""

from bisect import insort
from dataclasses import replace
from typing import TYPE_CHECKING

import trio

from fusecache.engine.nodes import Generation, Item, Operation
from fusecache.model.records import OperationKind

if TYPE_CHECKING:
    from collections.abc import Callable


class Owed:
    """The queue of unpublished items. on_change is called whenever an item came or went."""

    def __init__(self) -> None:
        self.on_change: Callable[[], None] = lambda: None
        self.on_rebased: Callable[[Item], None] = lambda _item: None
        self._changed = trio.Event()
        self._items: list[Item] = []
        self._by_key: dict[str, list[Item]] = {}

    def __len__(self) -> int:
        return len(self._items)

    def __contains__(self, item: Item) -> bool:
        return any(item in self._by_key.get(key, ()) for key in item.changed_keys()[:1])

    def items(self) -> list[Item]:
        """Return all items in order (a copy: the queue may change while they are looked at)."""
        return list(self._items)

    def add(self, item: Item) -> None:
        """Enter an item at the place that its sequence and keys say."""
        insort(self._items, item, key=_sequence)
        for key in item.changed_keys():
            insort(self._by_key.setdefault(key, []), item, key=_sequence)
        self._tell()

    def remove(self, item: Item, *, published: bool = False) -> None:
        """Take an item out. Unless it was published, what it knew of the bucket passes to the next of its keys."""
        self._items.remove(item)
        for key in item.changed_keys():
            same_key = self._by_key[key]
            was_first = same_key[0] is item
            same_key.remove(item)
            if not same_key:
                del self._by_key[key]
            elif was_first and not published:
                self.rebase(key, base_of(item, key))
                self.on_rebased(same_key[0])
        self._tell()

    async def wait_gone(self, item: Item) -> None:
        """Return when the item is no longer owed."""
        while item in self:
            await self._changed.wait()

    def discard(self, item: Item) -> None:
        """Take an item out if it is in."""
        if item in self:
            self.remove(item)

    def for_key(self, key: str) -> list[Item]:
        """Return the items that change `key`, in order."""
        return list(self._by_key.get(key, ()))

    def ends_with(self, item: Item) -> bool:
        """Return whether nothing is queued behind the item."""
        return bool(self._items) and self._items[-1] is item

    def exists_after(self, key: str, base_etag: str | None) -> bool:
        """Return whether the bucket will show `key` after all that is queued; `base_etag`: what it shows now."""
        queued = self._by_key.get(key)
        if not queued:
            return base_etag is not None
        return leaves_object(queued[-1], key)

    def base_for(self, key: str, base_etag: str | None) -> str | None:
        """Return the base of a new item of `key`: `base_etag` if it is the first, else not known yet (None)."""
        return None if self._by_key.get(key) else base_etag

    def rebase(self, key: str, etag: str | None) -> Item | None:
        """Tell the first item of `key` what the bucket shows under it; return it, to be journaled, or None."""
        queued = self._by_key.get(key)
        if not queued:
            return None
        item = queued[0]
        if isinstance(item, Generation):
            item.record = replace(item.record, base_etag=etag)
        elif item.record.kind is OperationKind.RENAME and key == item.record.key:
            item.record = replace(item.record, source_etag=etag or "")
        else:
            item.record = replace(item.record, base_etag=etag)
        return item

    def _tell(self) -> None:
        self._changed.set()
        self._changed = trio.Event()
        self.on_change()


def leaves_object(item: Item, key: str) -> bool:
    """Return whether the bucket shows an object under `key` once the item is published."""
    if isinstance(item, Generation):
        return True
    kind = item.record.kind
    if kind is OperationKind.RENAME:
        return key == item.record.target
    return kind in {OperationKind.MKDIR, OperationKind.SYMLINK}


def base_of(item: Item, key: str) -> str | None:
    """Return what the bucket shows under `key` before the item, as far as the item knows."""
    if isinstance(item, Operation) and item.record.kind is OperationKind.RENAME and key == item.record.key:
        return item.record.source_etag or None
    return item.record.base_etag


def _sequence(item: Item) -> int:
    return item.sequence
