"""Decides which queued changes may be published now, and what each of the others waits for. Pure.

Not a schedule: times (settle delay, retry pauses, `delete_delay`) are in `engine/publish/schedule.py`.

A change waits only for changes with smaller sequence numbers, so no two changes wait for each other. The oldest change
is always free, apart from changes that are deferred or wait, directly or through others, for a deferred one. The cost
of an event grows with the depth of a path and the logarithm of the queue's length.

A change lies in the directories of its keys; a rename has two. A write is a NEW or ORDERED change. A commit marker is a
file whose name says that the rest is there (`order_last`: `_SUCCESS`, `.metadata`, `latest`). "Younger" means a larger
sequence number. The rules:

1. Changes of one name are published in order; `d` and `d/` are one name.
2. An ORDERED change waits for everything older in the subtrees of its directories. Everything younger there waits for
   it. Changes that are `side_by_side` do not wait for each other.
3. A REMOVAL waits for every older write of the whole mount. Other names do not wait for it. There is one exception:
   what is younger in the subtree of its directory waits for the REMOVAL of a commit marker.
4. A MARKER_DELETE (of a directory marker) waits like an ORDERED change. It also waits for older REMOVALs and
   MARKER_DELETEs below its own directory, deferred ones too, as that would still show with them unpublished. It does
   not wait for these if a younger change is queued for its name. Other names do not wait for a MARKER_DELETE.
5. A deferred change is not published, and holds back only other changes of its name. There are two exceptions besides
   rule 4. A REMOVAL waits for older deferred writes in its directory, and in the one of its `moved_to`. And a deferred
   REMOVAL of a commit marker holds back younger files that are written, or moved, right into its directory.
"""

from dataclasses import dataclass
from enum import Enum
from heapq import heapify, heappop, heappush
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Container

_NEVER = float("inf")


class Role(Enum):
    """How a change is ordered relative to the others."""

    NEW = "new"  # a new file or a directory marker: in any order among others that are NEW
    ORDERED = "ordered"  # replaces or moves older content, or names it: a commit marker, a symlink
    REMOVAL = "removal"  # deletes a published object
    MARKER_DELETE = "marker-delete"  # deletes a directory marker


_WRITES = frozenset({Role.NEW, Role.ORDERED})
_DELETES = frozenset({Role.REMOVAL, Role.MARKER_DELETE})


@dataclass(frozen=True, slots=True)
class OrderedChange:
    """One queued change. keys: the keys that it changes.

    is_commit_marker: whether its name is one of `order_last`. moved_to: of a REMOVAL, the key to which newer content
    of its name was renamed before that was published; "" if there is none. side_by_side: it is one of many that the
    rename of a directory makes.
    """

    sequence: int
    keys: tuple[str, ...]
    role: Role
    is_commit_marker: bool = False
    moved_to: str = ""
    side_by_side: bool = False


class SequenceBarrier:
    """A set of sequence numbers, and waiters, each until no member is smaller than its own number."""

    __slots__ = ("_heap", "_members", "_waiting")

    def __init__(self) -> None:
        self._members: set[int] = set()
        # Members, and some former members that are not removed from the heap yet.
        self._heap: list[int] = []
        self._waiting: list[int] = []

    @property
    def lowest(self) -> float:
        """The smallest member; infinite if there is none."""
        heap, members = self._heap, self._members
        while heap and heap[0] not in members:
            heappop(heap)
        return heap[0] if heap else _NEVER

    def add(self, sequence: int) -> None:
        """Enter a member."""
        if sequence not in self._members:
            self._members.add(sequence)
            heappush(self._heap, sequence)

    def discard(self, sequence: int) -> None:
        """Take a member out, if it is one."""
        self._members.discard(sequence)
        if len(self._heap) > 2 * len(self._members) + 32:
            self._heap = list(self._members)
            heapify(self._heap)

    def holds(self, sequence: int) -> bool:
        """Return whether a member is smaller than `sequence`."""
        return self.lowest < sequence

    def below(self, sequence: int) -> list[int]:
        """Return the smaller members, in no particular order."""
        return [each for each in self._members if each < sequence]

    def wait(self, sequence: int, present: "Container[int]", most: int) -> None:
        """Register a waiter; `on_freed` returns it once no smaller member is left.

        present: the sequences that may still wait, at most `most`. A list that grows much longer is cut to these.
        """
        heappush(self._waiting, sequence)
        if len(self._waiting) > 2 * most + 32:
            self._waiting = sorted({each for each in self._waiting if each in present})

    def on_freed(self) -> list[int]:
        """Remove and return the waiters for which no smaller member is left."""
        found: list[int] = []
        lowest = self.lowest
        while self._waiting and self._waiting[0] <= lowest:
            found.append(heappop(self._waiting))
        return found


def _with(barrier: SequenceBarrier | None, sequence: int) -> SequenceBarrier:
    """Return a barrier, made now if there is none, with one more member."""
    barrier = barrier or SequenceBarrier()
    barrier.add(sequence)
    return barrier


class _Folder:
    """What is queued at and below one directory.

    ancestors: the directories from the root to this one, itself included. entries: how many changes lie right here,
    plus how many child directories have any.

    Each barrier holds back younger changes:
    holders: writes at and below; for all that lies right here and is not NEW.
    ordered: ORDERED changes and REMOVALs of commit markers right here; for everything at and below.
    holders_together, ordered_together: the same of changes that are `side_by_side`; for all others.
    deferred: deferred writes right here; for REMOVALs (rule 5).
    deferred_markers: deferred REMOVALs of commit markers right here; for files right here (rule 5).
    deletes: REMOVALs and MARKER_DELETEs at and below, deferred ones too; for this directory's MARKER_DELETE (rule 4).
    """

    __slots__ = (
        "ancestors",
        "deferred",
        "deferred_markers",
        "deletes",
        "entries",
        "holders",
        "holders_together",
        "ordered",
        "ordered_together",
        "parent",
        "path",
    )

    def __init__(self, path: str, parent: "_Folder | None") -> None:
        self.path = path
        self.parent = parent
        self.ancestors: tuple[_Folder, ...] = ((*parent.ancestors,) if parent is not None else ()) + (self,)
        self.entries = 0
        self.holders = SequenceBarrier()
        self.holders_together: SequenceBarrier | None = None
        self.ordered: SequenceBarrier | None = None
        self.ordered_together: SequenceBarrier | None = None
        self.deferred: SequenceBarrier | None = None
        self.deferred_markers: SequenceBarrier | None = None
        self.deletes: SequenceBarrier | None = None


@dataclass(eq=False, slots=True)
class _Entry:
    change: OrderedChange
    names: tuple[str, ...]
    folders: tuple[_Folder, ...]  # of its keys
    is_deferred: bool = False
    is_handed_out: bool = False


class PublishOrder:
    """The queued changes of one bucket. prefix: of all its keys, empty or ending in '/'."""

    def __init__(self, prefix: str = "") -> None:
        self._prefix = prefix
        self._entries: dict[int, _Entry] = {}
        self._names: dict[str, list[int]] = {}
        self._root = _Folder("", None)
        self._folders: dict[str, _Folder] = {"": self._root}
        self._writes = SequenceBarrier()
        # Changes that may be free; `next_free` checks them.
        self._candidates: list[int] = []

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, sequence: int) -> bool:
        return sequence in self._entries

    # ---- what happens

    def add(self, change: OrderedChange, *, deferred: bool = False) -> None:
        """Queue a change; deferred: until `undefer`. Raises ValueError if its sequence is queued already."""
        if change.sequence in self._entries:
            raise ValueError(f"sequence {change.sequence} is queued twice: {change}")
        folders = tuple(
            {path: self._enter_folder(path) for path in map(self._folder_path, change.keys)}.values()
        )
        names = tuple({key.rstrip("/"): None for key in change.keys})
        entry = _Entry(change, names, folders, is_deferred=deferred)
        self._entries[change.sequence] = entry
        for name in names:
            queued = self._names.setdefault(name, [])
            queued.append(change.sequence)
            if len(queued) > 1:
                if queued[-2] > change.sequence:
                    queued.sort()
                # A MARKER_DELETE waits for less once a younger change has its name (rule 4).
                heappush(self._candidates, queued[0])
        if change.role in _DELETES:
            for above in self._ancestors(entry):
                above.deletes = _with(above.deletes, change.sequence)
        if deferred:
            self._defer(entry)
        else:
            self._join(entry)
        heappush(self._candidates, change.sequence)

    def remove(self, sequence: int) -> None:
        """Remove a change that was published, or is no longer wanted."""
        entry = self._entries.pop(sequence)
        self._leave(entry)
        for name in entry.names:
            queued = self._names[name]
            queued.remove(sequence)
            if queued:
                heappush(self._candidates, queued[0])
            else:
                del self._names[name]
        if entry.is_deferred:
            self._undefer(entry)
        for folder in entry.folders:
            self._leave_folder(folder)

    def undefer(self, sequence: int) -> None:
        """End the deferral of a change: from now on it is ordered as any other."""
        entry = self._entries[sequence]
        if entry.is_deferred:
            entry.is_deferred = False
            self._undefer(entry)
            self._join(entry)
            heappush(self._candidates, sequence)

    # ---- what may be done

    def next_free(self) -> int | None:
        """Return a change that may be published now, or None. Each is given out once, unless it is given back."""
        while self._candidates:
            sequence = heappop(self._candidates)
            entry = self._entries.get(sequence)
            if entry is None or entry.is_handed_out or entry.is_deferred:
                continue
            barrier = self._barrier_before(entry)
            if barrier is not None:
                barrier.wait(sequence, self._entries, len(self._entries))
            elif self._is_first(entry):
                entry.is_handed_out = True
                return sequence
        return None

    def is_free(self, sequence: int) -> bool:
        """Return whether a change may be published at this moment."""
        entry = self._entries.get(sequence)
        return (
            entry is not None
            and not entry.is_deferred
            and self._is_first(entry)
            and self._barrier_before(entry) is None
        )

    def give_back(self, sequence: int) -> None:
        """Take back a change that was given out and not published: it is given out again when it is free."""
        entry = self._entries.get(sequence)
        if entry is not None:
            entry.is_handed_out = False
            heappush(self._candidates, sequence)

    def is_deferred(self, sequence: int) -> bool:
        """Return whether a queued change is deferred."""
        return self._entries[sequence].is_deferred

    def markers_before(self, sequence: int) -> list[int]:
        """Return the deferred REMOVALs of commit markers for which a write waits, or will wait (rule 5)."""
        barrier = self._deferred_markers_before(self._entries[sequence])
        return [] if barrier is None else barrier.below(sequence)

    def left_below(self, sequence: int) -> list[int]:
        """Return the REMOVALs and MARKER_DELETEs below for which a MARKER_DELETE waits (rule 4); [] for other roles."""
        entry = self._entries.get(sequence)
        barrier = (
            self._barrier_before_marker_delete(entry)
            if entry is not None and entry.change.role is Role.MARKER_DELETE
            else None
        )
        return [] if barrier is None else barrier.below(sequence)

    # ---- the rules

    def _is_first(self, entry: _Entry) -> bool:
        return all(self._names[name][0] == entry.change.sequence for name in entry.names)

    def _barrier_before(self, entry: _Entry) -> SequenceBarrier | None:
        """Return the barrier that holds an entry back, or None. Other changes of its names are not looked at."""
        sequence, role = entry.change.sequence, entry.change.role
        alone = not entry.change.side_by_side
        for folder in entry.folders:
            barriers: list[SequenceBarrier | None] = []
            if role is not Role.NEW:
                barriers = [folder.holders, folder.holders_together if alone else None]
            for above in folder.ancestors:
                barriers += [above.ordered, above.ordered_together if alone else None]
            for barrier in barriers:
                if barrier is not None and barrier.holds(sequence):
                    return barrier
        markers = self._deferred_markers_before(entry)
        if markers is not None and markers.holds(sequence):
            return markers
        if role is Role.REMOVAL:
            return self._barrier_before_removal(entry)
        return self._barrier_before_marker_delete(entry) if role is Role.MARKER_DELETE else None

    def _deferred_markers_before(self, entry: _Entry) -> SequenceBarrier | None:
        is_file = entry.change.role in _WRITES and not entry.change.keys[-1].endswith("/")
        return entry.folders[-1].deferred_markers if is_file else None

    def _barrier_before_removal(self, entry: _Entry) -> SequenceBarrier | None:
        sequence, moved_to = entry.change.sequence, entry.change.moved_to
        folders = [entry.folders[0]]  # a deferred file, under a temporary name, may be about to replace it
        if moved_to:
            folders += filter(None, [self._folders.get(self._folder_path(moved_to))])
        for folder in folders:
            if folder.deferred is not None and folder.deferred.holds(sequence):
                return folder.deferred
        return self._writes if self._writes.holds(sequence) else None

    def _barrier_before_marker_delete(self, entry: _Entry) -> SequenceBarrier | None:
        name = entry.names[0]
        if self._names[name][-1] != entry.change.sequence:
            return None
        own = self._folders.get(name.removeprefix(self._prefix))
        deletes = own.deletes if own is not None else None
        return deletes if deletes is not None and deletes.holds(entry.change.sequence) else None

    def _join(self, entry: _Entry) -> None:
        """Enter a change into the barriers by which it holds others back."""
        change, sequence = entry.change, entry.change.sequence
        if change.role in _DELETES:
            if change.is_commit_marker:
                entry.folders[0].ordered = _with(entry.folders[0].ordered, sequence)
            return
        self._writes.add(sequence)
        for above in self._ancestors(entry):
            if change.side_by_side:
                above.holders_together = _with(above.holders_together, sequence)
            else:
                above.holders.add(sequence)
        if change.role is Role.ORDERED:
            for folder in entry.folders:
                if change.side_by_side:
                    folder.ordered_together = _with(folder.ordered_together, sequence)
                else:
                    folder.ordered = _with(folder.ordered, sequence)

    def _leave(self, entry: _Entry) -> None:
        """Undo `_join`, and have what the change held back checked again."""
        sequence = entry.change.sequence
        self._release(self._writes, sequence)
        for above in self._ancestors(entry):
            self._release(above.holders, sequence)
            self._release(above.holders_together, sequence)
            self._release(above.deletes, sequence)
        for folder in entry.folders:
            self._release(folder.ordered, sequence)
            self._release(folder.ordered_together, sequence)

    # ---- inside

    def _release(self, barrier: SequenceBarrier | None, sequence: int) -> None:
        if barrier is not None:
            barrier.discard(sequence)
            for freed in barrier.on_freed():
                heappush(self._candidates, freed)

    def _ancestors(self, entry: _Entry) -> "tuple[_Folder, ...]":
        if len(entry.folders) == 1:
            return entry.folders[0].ancestors
        return tuple(dict.fromkeys(above for folder in entry.folders for above in folder.ancestors))

    def _defer(self, entry: _Entry) -> None:
        change, folder = entry.change, entry.folders[0]
        if change.role in _WRITES:
            folder.deferred = _with(folder.deferred, change.sequence)
        elif change.role is Role.REMOVAL and change.is_commit_marker:
            folder.deferred_markers = _with(folder.deferred_markers, change.sequence)

    def _undefer(self, entry: _Entry) -> None:
        self._release(entry.folders[0].deferred, entry.change.sequence)
        self._release(entry.folders[0].deferred_markers, entry.change.sequence)

    def _folder_path(self, key: str) -> str:
        return key.removeprefix(self._prefix).rstrip("/").rpartition("/")[0]

    def _enter_folder(self, path: str) -> _Folder:
        folder = self._folders.get(path)
        if folder is None:
            parent = self._enter_folder(path.rpartition("/")[0])
            folder = self._folders[path] = _Folder(path, parent)
        folder.entries += 1
        return folder

    def _leave_folder(self, folder: _Folder) -> None:
        folder.entries -= 1
        if folder.entries == 0 and folder.parent is not None:
            del self._folders[folder.path]
            self._leave_folder(folder.parent)
