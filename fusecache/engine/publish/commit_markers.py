"""Files whose names say that all the rest is there (`order_last`): kept back while the bucket refuses some of the rest.

Invariants:
1. Such a file is not published while what was to be there since its version before, below its directory, is refused.
2. It is offered again as soon as that is settled: published, replaced by what is published, or removed.
3. While it is kept back, nothing that the bucket's older version may name is removed for what came after it.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import TypeGuard

from fusecache.engine.namespace.nodes import Generation, Item, Operation
from fusecache.engine.namespace.tree import Tree
from fusecache.engine.recovery.lost_changes import folder_of
from fusecache.engine.write.file_io import Contents
from fusecache.engine.writeback.queue import Owed
from fusecache.index.journal import Change
from fusecache.model.errors import Refused
from fusecache.model.records import OperationKind, Reason
from fusecache.model.states import FileState

# Of so many of them the version before is known.
_REMEMBERED = 4096
_BRINGS = frozenset({OperationKind.RENAME, OperationKind.SYMLINK})
_OVER = frozenset({FileState.STORED, FileState.DROPPED, FileState.ORPHAN})


class Tellers:
    """Decides what is kept back, and until when. What is returned is to be journaled with what asked for it."""

    def __init__(
        self, tree: Tree, owed: Owed, contents: Contents, rejected: Callable[[], list[Item]]
    ) -> None:
        """rejected: what the bucket refused for good, by now."""
        self._tree = tree
        self._owed = owed
        self._contents = contents
        self._rejected = rejected
        # The place of the last version of each.
        self._told: dict[str, int] = {}
        # Those that are kept back, by what they wait for.
        self._waiting: dict[Item, dict[Generation, None]] = {}
        # What was queued before this start has places up to that; what was refused by then.
        self._start = 0
        self._known_at_start: set[Item] = set()
        contents.on_settled, contents.on_returned = self.settle, self._offer_returned

    def relate(self, items: list[Item]) -> None:
        """Find what each of those waits for that the daemon before kept back. items: what was refused."""
        for each in items:
            if _is_kept_back(each):
                self._wait(each, next((other for other in items if _is_told_by(other, each)), None))

    def note_start(self, highest: int) -> list[Change]:
        """Offer again what the daemon before kept back if all that it tells of is settled. highest: place in the queue.

        What was refused before now was told, and does not keep back what is closed from now on.
        """
        self._start, self._known_at_start = highest, set(self._rejected())
        changes: list[Change] = []
        for each in self._rejected():
            if _is_kept_back(each) and each.missing is None:
                changes += self._offer(each)
        return changes

    def check(self, generation: Generation) -> None:
        """Raise Refused for one that says that something is there which the bucket refused.

        Of what is below its directory that counts which was to be there since the version before it.
        """
        key = generation.record.key
        if generation.is_forced or generation.in_flight or not self._owed.tells(key):
            return
        is_first = key not in self._told and generation.sequence > self._start
        known = self._known_at_start if is_first else set[Item]()
        generation.told_before = self._told.pop(key, 0)
        self._told[key] = generation.sequence
        if len(self._told) > _REMEMBERED:
            del self._told[next(iter(self._told))]
        refused = (each for each in self._rejected() if each not in known)
        self._wait(generation, next((each for each in refused if _is_told_by(each, generation)), None))
        if generation.missing is not None:
            missing = generation.missing.changed_keys()[-1]
            generation.record = replace(generation.record, reason=Reason.INCOMPLETE)
            raise Refused(
                f"{self._tree.relative(key)}: {self._tree.relative(missing)} was to be there before it, and the "
                f"bucket refused that ({generation.missing.error}); it follows when that is there, or removed"
            )

    def settle(self, item: Item) -> list[Change]:
        """What was refused is so no longer: offer again what was kept back for it, now or once its heir is there."""
        changes: list[Change] = []
        heir = item.successor if isinstance(item, Generation) else None
        for each in self._waiting.pop(item, ()):
            if each.missing is not item:
                continue
            if heir is not None and heir is not each and heir.state not in _OVER:
                self._wait(each, heir)
            else:
                self._told[each.record.key] = each.told_before
                changes += self._offer(each)
        return changes

    def _wait(self, generation: Generation, missing: Item | None) -> None:
        generation.missing = missing
        if missing is not None:
            self._waiting.setdefault(missing, {})[generation] = None

    def keeper_of(self, removal: Operation) -> Generation | None:
        """Return what is kept back, and below whose directory a removal is, which came after it.

        The bucket shows an older version of that, which may name what is to be removed.
        """
        refused = self._rejected()
        if not refused or self._owed.for_key(removal.record.key)[-1] is not removal:
            return None
        return next((each for each in refused if self._is_before(each, removal)), None)

    def _is_before(self, refused: Item, removal: Operation) -> TypeGuard[Generation]:
        if (
            not isinstance(refused, Generation)
            or refused.record.reason is Reason.NONE
            or refused.node is None
        ):
            return False
        place = refused.record.refused_at or refused.sequence
        is_below = removal.record.key.startswith(folder_of(refused.record.key))
        return is_below and place < removal.sequence and self._tree.is_linked(refused.node)

    def _offer_returned(self, generation: Generation) -> list[Change]:
        """It has its name again, as what was written there since failed."""
        return self._offer(generation) if _is_kept_back(generation) and generation.missing is None else []

    def _offer(self, generation: Generation) -> list[Change]:
        generation.missing, node = None, generation.node
        if node is None or not self._tree.is_linked(node) or node.generation is not generation:
            return []
        if generation.state is not FileState.REJECTED:
            return []
        return self._contents.offer_again(node, generation)


def _is_kept_back(item: Item) -> TypeGuard[Generation]:
    return isinstance(item, Generation) and item.record.reason is Reason.INCOMPLETE


def _is_told_by(refused: Item, teller: Generation) -> bool:
    """Return whether a file says that something is there which the bucket refused."""
    if isinstance(refused, Operation):
        if refused.record.kind not in _BRINGS:
            return False
        place = refused.sequence
    else:
        place = refused.record.refused_at or refused.sequence
    there, key = refused.changed_keys()[-1], teller.record.key
    return there != key and there.startswith(folder_of(key)) and teller.told_before < place < teller.sequence
