"""Which queued changes may be published now, and what each of the others waits for.

Only changes with smaller sequence numbers are ever waited for, so no two wait for each other, and the oldest that is
not set aside, nor waits as an END for what is, is always free. Each event costs the depth of a path and a logarithm,
however long the queue is.

Rules, for a change that lies in the directories of its keys:
1. Changes of one name are published in order; `d` and `d/` are one name.
2. A POINT waits for everything older in its directories' subtrees, and everything younger there waits for it.
3. A REMOVAL is a POINT that waits for every older write of the whole mount as well.
4. An END (of a directory's marker) waits like a POINT, and for the older REMOVALs, even those that are aside or put
   off, and ENDs below its own directory, by which that would still show, unless something else is to have its name;
   nobody else waits for it.
5. A small new file behind many unpublished bytes waits for the large files older than it beside its directory.
6. What is aside is not published, and holds nobody back but its own name; a REMOVAL whose name is one of those that
   say that all the rest is there also what is written, or moved, right into its directory after it.
7. While the oldest write of the mount is stuck, and nothing in its own directory holds it, a REMOVAL is put off: it
   holds back no other than its name, and what is younger in its own directory if its name is one of those that say that
   all the rest is there.
"""

from dataclasses import dataclass
from enum import Enum
from heapq import heapify, heappop, heappush
from typing import TYPE_CHECKING

from fusecache.model.objects import MIB

if TYPE_CHECKING:
    from collections.abc import Container

# A file up to this size may speak of others.
SMALL_BYTES = MIB
# So much must be unpublished beside it before it is taken for one that does.
BEHIND_BYTES = 8 * MIB
_NEVER = float("inf")


class Role(Enum):
    """What a change is to the others."""

    NEW = "new"  # a new file, or a directory's marker: in any order between two points
    ORDERED = "point"  # replaces, moves, or speaks of what was there before
    REMOVAL = "removal"  # of a published object
    MARKER_DELETE = "end"  # of a directory's marker


_WRITES = frozenset({Role.NEW, Role.ORDERED})
_LEAVE = frozenset({Role.REMOVAL, Role.MARKER_DELETE})


@dataclass(frozen=True, slots=True)
class OrderedChange:
    """One queued change. keys: those that it changes. size: bytes of a file's content, else 0.

    tells: whether its name is one that says that all the rest is there. moved_to: of a REMOVAL, the key that newer
    content of its name went to before it was published; empty: there is none.
    """

    sequence: int
    keys: tuple[str, ...]
    role: Role
    size: int = 0
    is_commit_marker: bool = False
    moved_to: str = ""


class SequenceBarrier:
    """A set of sequence numbers, and those who wait until none of it is smaller than theirs."""

    __slots__ = ("_heap", "_members", "_waiting")

    def __init__(self) -> None:
        self._members: set[int] = set()
        # Of members, and of some that are none any more.
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
        """Return whether a smaller member is there."""
        return self.lowest < sequence

    def below(self, sequence: int) -> list[int]:
        """Return the smaller members, in no particular order."""
        return [each for each in self._members if each < sequence]

    def wait(self, sequence: int, present: "Container[int]", most: int) -> None:
        """Have `freed` tell when nothing smaller is there any more. present: of whom no more than `most` can wait."""
        heappush(self._waiting, sequence)
        if len(self._waiting) > 2 * most + 32:
            self._waiting = sorted({each for each in self._waiting if each in present})

    def on_freed(self) -> list[int]:
        """Return those who wait no longer."""
        found: list[int] = []
        lowest = self.lowest
        while self._waiting and self._waiting[0] <= lowest:
            found.append(heappop(self._waiting))
        return found


class _Folder:
    """What is queued at and below one directory. line: the directories from the root to this one.

    holders: of POINTs and ENDs here. points: with this directory, for all below. large: files that small ones wait for.
    aside: writes of names right here that are set aside, kept: removals of such that tell. ends: ENDs and REMOVALs here
    and below. entries: right here, and directories below with any.
    """

    __slots__ = (
        "ancestors",
        "deferred",
        "ends",
        "entries",
        "held",
        "holders",
        "large",
        "ordered",
        "parent",
        "path",
        "unpublished_bytes",
    )

    def __init__(self, path: str, parent: "_Folder | None") -> None:
        self.path = path
        self.parent = parent
        self.ancestors: tuple[_Folder, ...] = ((*parent.ancestors,) if parent is not None else ()) + (self,)
        self.entries = 0
        self.unpublished_bytes = 0
        self.holders = SequenceBarrier()
        self.ordered: SequenceBarrier | None = None
        self.large: SequenceBarrier | None = None
        self.deferred: SequenceBarrier | None = None
        self.held: SequenceBarrier | None = None
        self.ends: SequenceBarrier | None = None


@dataclass(eq=False, slots=True)
class _Entry:
    change: OrderedChange
    names: tuple[str, ...]
    folders: tuple[_Folder, ...]  # of its keys
    behind: _Folder | None = None
    is_deferred: bool = False
    is_delayed: bool = False
    is_handed_out: bool = False

    @property
    def names_directory(self) -> bool:
        """Whether it is of a directory's marker."""
        return self.change.keys[-1].endswith("/")


class PublishOrder:
    """The waiting changes of one mount. prefix: of all its keys, empty or ending in '/'."""

    def __init__(self, prefix: str = "") -> None:
        self._prefix = prefix
        self._entries: dict[int, _Entry] = {}
        self._names: dict[str, list[int]] = {}
        self._root = _Folder("", None)
        self._folders: dict[str, _Folder] = {"": self._root}
        self._writes = SequenceBarrier()
        self._failing: set[int] = set()
        # Removals that wait for older writes, and hold others back.
        self._holding: list[int] = []
        # May be free: to be looked at.
        self._candidates: list[int] = []

    def __len__(self) -> int:
        return len(self._entries)

    # ---- what happens

    def add(self, change: OrderedChange, *, aside: bool = False) -> None:
        """A change is queued. Raises ValueError if one of that sequence is."""
        if change.sequence in self._entries:
            raise ValueError(f"sequence {change.sequence} is queued twice: {change}")
        folders = tuple(
            {path: self._enter_folder(path) for path in map(self._folder_path, change.keys)}.values()
        )
        names = tuple({key.rstrip("/"): None for key in change.keys})
        entry = _Entry(change, names, folders, is_deferred=aside)
        self._entries[change.sequence] = entry
        for name in names:
            queued = self._names.setdefault(name, [])
            queued.append(change.sequence)
            if len(queued) > 1:
                if queued[-2] > change.sequence:
                    queued.sort()
                heappush(self._candidates, queued[0])  # an END may wait for less now
        if change.role in _LEAVE:
            for above in self._ancestors(entry):
                above.ends = above.ends or SequenceBarrier()
                above.ends.add(change.sequence)
        if aside:
            self._defer(entry)
        else:
            self._join(entry)
        heappush(self._candidates, change.sequence)

    def remove(self, sequence: int) -> None:
        """It is published, or no longer wanted."""
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
        for above in self._ancestors(entry):
            if above.ends is not None:
                self._release(above.ends, sequence)
        for folder in entry.folders:
            self._leave_folder(folder)

    def undefer(self, sequence: int) -> None:
        """What was aside is a change as any other now."""
        entry = self._entries[sequence]
        if entry.is_deferred:
            entry.is_deferred = False
            self._undefer(entry)
            self._join(entry)
            heappush(self._candidates, sequence)

    def on_failing(self, sequence: int) -> None:
        """It fails while others succeed: removals elsewhere wait for it, but hold nobody back meanwhile."""
        entry = self._entries.get(sequence)
        if entry is not None and entry.change.role in _WRITES:
            self._failing.add(sequence)
            self._look_at_oldest()

    def on_success(self, sequence: int) -> None:
        """What was stuck goes on."""
        self._failing.discard(sequence)

    # ---- what may be done

    def next_free(self) -> int | None:
        """Return a change that may be published now, each once; None: there is no other."""
        while self._candidates:
            sequence = heappop(self._candidates)
            entry = self._entries.get(sequence)
            if entry is None or entry.is_handed_out or entry.is_deferred:
                continue
            gate = self._gate_before(entry)
            if gate is not None:
                self._wait(entry, gate)
            elif self._is_first(entry):
                entry.is_handed_out = True
                return sequence
        return None

    def is_free(self, sequence: int) -> bool:
        """Return whether a change may still be published now."""
        entry = self._entries.get(sequence)
        return (
            entry is not None
            and not entry.is_deferred
            and self._is_first(entry)
            and self._gate_before(entry) is None
        )

    def give_back(self, sequence: int) -> None:
        """It was given, but is not published: it will be given again when it is free."""
        entry = self._entries.get(sequence)
        if entry is not None:
            entry.is_handed_out = False
            heappush(self._candidates, sequence)

    def waits_for(self, sequence: int) -> int | None:
        """Return the oldest change that stands before one; None: it is free, or aside."""
        entry = self._entries[sequence]
        if entry.is_deferred:
            return None
        if not self._is_first(entry):
            return min(self._names[name][0] for name in entry.names)
        gate = self._gate_before(entry)
        return None if gate is None else int(gate.lowest)

    def left_below(self, sequence: int) -> list[int]:
        """Return the REMOVALs and ENDs below its own directory for which an END waits; of others, none."""
        entry = self._entries.get(sequence)
        gate = (
            self._gate_before_end(entry)
            if entry is not None and entry.change.role is Role.MARKER_DELETE
            else None
        )
        return [] if gate is None else gate.below(sequence)

    # ---- the rules

    def _is_first(self, entry: _Entry) -> bool:
        return all(self._names[name][0] == entry.change.sequence for name in entry.names)

    def _gate_before(self, entry: _Entry) -> SequenceBarrier | None:
        """Return what holds an entry back, its names apart."""
        sequence, role = entry.change.sequence, entry.change.role
        for folder in entry.folders:
            if role is not Role.NEW and folder.holders.holds(sequence):
                return folder.holders
            for above in folder.ancestors:
                if above.ordered is not None and above.ordered.holds(sequence):
                    return above.ordered
        here = entry.folders[-1].held
        if here is not None and here.holds(sequence) and role in _WRITES and not entry.names_directory:
            return here
        if entry.behind is not None and entry.behind.large is not None and entry.behind.large.holds(sequence):
            return entry.behind.large
        if role is Role.REMOVAL:
            return self._gate_before_removal(entry)
        return self._gate_before_end(entry) if role is Role.MARKER_DELETE else None

    def _gate_before_removal(self, entry: _Entry) -> SequenceBarrier | None:
        sequence, moved_to = entry.change.sequence, entry.change.moved_to
        folders = [entry.folders[0]]  # a file under a temporary name may be about to take its place
        if moved_to:
            folders += filter(None, [self._folders.get(self._folder_path(moved_to))])
        for folder in folders:
            if folder.deferred is not None and folder.deferred.holds(sequence):
                return folder.deferred
        return self._writes if self._writes.holds(sequence) else None

    def _gate_before_end(self, entry: _Entry) -> SequenceBarrier | None:
        name = entry.names[0]
        if self._names[name][-1] != entry.change.sequence:
            return None
        own = self._folders.get(name.removeprefix(self._prefix))
        ends = own.ends if own is not None else None
        return ends if ends is not None and ends.holds(entry.change.sequence) else None

    def _wait(self, entry: _Entry, gate: SequenceBarrier) -> None:
        if gate is self._writes and not entry.is_delayed:
            if gate.lowest in self._failing:
                self._delay(entry)
            else:
                self._holding.append(entry.change.sequence)
        gate.wait(entry.change.sequence, self._entries, len(self._entries))

    def _join(self, entry: _Entry) -> None:
        """Let it hold back what the rules say."""
        change, sequence = entry.change, entry.change.sequence
        if change.role in _WRITES:
            self._writes.add(sequence)
        if change.role is Role.MARKER_DELETE:
            return
        for above in self._ancestors(entry):
            above.holders.add(sequence)
            above.unpublished_bytes += change.size
            if change.size > SMALL_BYTES:
                above.large = above.large or SequenceBarrier()
                above.large.add(sequence)
        self._find_behind(entry)
        if change.role is not Role.NEW:
            for folder in entry.folders:
                folder.ordered = folder.ordered or SequenceBarrier()
                folder.ordered.add(sequence)

    def _leave(self, entry: _Entry) -> None:
        """Undo `_join`; what it held back may be free."""
        change, sequence = entry.change, entry.change.sequence
        if change.role in _WRITES:
            self._failing.discard(sequence)
            self._release(self._writes, sequence)
            self._look_at_oldest()
        if change.role is Role.MARKER_DELETE:
            return
        for above in self._ancestors(entry):
            self._release(above.holders, sequence)
            if not entry.is_deferred:
                above.unpublished_bytes -= change.size
            if above.large is not None and change.size > SMALL_BYTES:
                self._release(above.large, sequence)
        for folder in entry.folders:
            if folder.ordered is not None:
                self._release(folder.ordered, sequence)

    def _find_behind(self, entry: _Entry) -> None:
        """A small new file may speak of what is unpublished in its directory, or beside that."""
        change = entry.change
        if change.role is not Role.NEW or change.keys[0].endswith("/") or change.size > SMALL_BYTES:
            return
        folder = entry.folders[0]
        # What is beside a directory of the root is the whole mount: one stuck file must not hold that.
        beside = folder.parent if folder.parent is not None and folder.parent is not self._root else folder
        if beside.unpublished_bytes - change.size >= BEHIND_BYTES:
            entry.behind = beside

    def _delay(self, entry: _Entry) -> None:
        """Only what is stuck elsewhere holds it: let those go on that wait for it."""
        entry.is_delayed = True
        sequence = entry.change.sequence
        own = set(entry.folders) if entry.change.is_commit_marker else set()
        for above in self._ancestors(entry):
            if above not in own:
                self._release(above.holders, sequence)
        for folder in entry.folders:
            if folder not in own and folder.ordered is not None:
                self._release(folder.ordered, sequence)

    def _look_at_oldest(self) -> None:
        """If the oldest write is stuck, removals behind it are to be put off."""
        if self._holding and self._writes.lowest in self._failing:
            for sequence in self._holding:
                heappush(self._candidates, sequence)
            self._holding.clear()

    # ---- inside

    def _release(self, gate: SequenceBarrier, sequence: int) -> None:
        gate.discard(sequence)
        for freed in gate.on_freed():
            heappush(self._candidates, freed)

    def _ancestors(self, entry: _Entry) -> "tuple[_Folder, ...]":
        if len(entry.folders) == 1:
            return entry.folders[0].ancestors
        return tuple(dict.fromkeys(above for folder in entry.folders for above in folder.ancestors))

    def _defer(self, entry: _Entry) -> None:
        change, folder = entry.change, entry.folders[0]
        if change.role in _WRITES:
            folder.deferred = folder.deferred or SequenceBarrier()
            folder.deferred.add(change.sequence)
        elif change.role is Role.REMOVAL and change.is_commit_marker:
            folder.held = folder.held or SequenceBarrier()
            folder.held.add(change.sequence)

    def _undefer(self, entry: _Entry) -> None:
        for gate in (entry.folders[0].deferred, entry.folders[0].held):
            if gate is not None:
                self._release(gate, entry.change.sequence)

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
