"""What every name of the tree was promised to hold, promise by promise: what a bucket is held against.

A promise is what a call that returned has made durable: a close, a rename, an unlink. While one is under way both
what was and what will be are allowed; a crash decides which.
"""

from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum


@dataclass(frozen=True, slots=True)
class Link:
    """What a symlink shows."""

    target: str


# What a name shows; None: nothing.
Value = bytes | Link | None
Values = frozenset[Value]
NOTHING: Values = frozenset({None})


class Cause(Enum):
    """Which kind of call made a promise."""

    CLOSE = "close"
    TAKEN_BACK = "taken back"  # a writer went on after a close: the close is no promise any more
    UNLINK = "unlink"
    SYMLINK = "symlink"
    RENAME = "rename"
    FOLDER_RENAME = "rename of a directory"
    MKDIR = "mkdir"
    RMDIR = "rmdir"


RENAMES = frozenset({Cause.RENAME, Cause.FOLDER_RENAME})


@dataclass(slots=True)
class Entry:
    """What a name holds from one promise to the next.

    values: what it may be, more than one where nobody can know. other: of a rename, the other name. origin: the promise
    that closed the content first, under whichever name; closed_at: when, in seconds of the loop. late: those of the
    values that it may have come to hold at any time since.
    """

    step: int
    values: Values
    cause: Cause
    other: str = ""
    origin: int = 0
    closed_at: float = 0.0
    late: Values = frozenset()


@dataclass(frozen=True, slots=True)
class Change:
    """What a promise does to one name. closed_at: when its content was closed, in seconds of the loop; None: now."""

    values: Values
    cause: Cause
    other: str = ""
    closed_at: float | None = None


@dataclass(slots=True)
class Promise:
    """A promise under way: the entries that it added, and what each will be once it is kept."""

    step: int
    files: list[tuple[str, Entry, Values]] = field(default_factory=list)
    folders: list[tuple[str, bool]] = field(default_factory=list)


class Past:
    """Every name's entries, oldest first; folders: (promise, is there, why) of each directory."""

    def __init__(self, on_tree: Callable[[int, Iterable[Values]], None] = lambda _step, _tree: None) -> None:
        """on_tree: told of the tree after each promise, as soon as the promise may be kept."""
        self.step = 0
        self._on_tree = on_tree
        self.files: dict[str, list[Entry]] = {}
        self.folders: dict[str, list[tuple[int, bool, Cause]]] = {}
        self.pending: list[Promise] = []

    # ---- making promises

    def begin(self, files: dict[str, Change], folders: dict[str, bool], cause: Cause, now: float) -> Promise:
        """A call is about to be made: from here on both what was and what will be are allowed."""
        self.step += 1
        promise = Promise(self.step)
        before = {path: self._last(path) for path in files}
        for path, change in files.items():
            entry = Entry(
                self.step, before[path].values | change.values, change.cause, change.other, self.step, now
            )
            if change.closed_at is not None:
                entry.closed_at = change.closed_at
            moved = before.get(change.other)
            if change.cause in RENAMES and change.values != NOTHING and moved:
                entry.origin, entry.closed_at = moved.origin, moved.closed_at
            self.files.setdefault(path, [_first()]).append(entry)
            promise.files.append((path, entry, change.values))
        for path, is_there in folders.items():
            self.folders.setdefault(path, [(0, False, cause)]).append((self.step, is_there, cause))
            promise.folders.append((path, is_there))
        self.pending.append(promise)
        self._show_tree(promise)
        return promise

    def keep(self, promise: Promise) -> None:
        """The call returned."""
        for _, entry, after in promise.files:
            entry.values = after
        self.pending.remove(promise)

    def undo(self, promise: Promise) -> None:
        """The node ended during the call, and nothing of it was journaled."""
        for path, entry, _ in promise.files:
            self.files[path].remove(entry)
        for path, _ in promise.folders:
            self.folders[path].pop()
        self.pending.remove(promise)

    def widen(self, path: str, values: Values) -> None:
        """The name may hold these too, as it is, from any time on."""
        last = self.files.setdefault(path, [_first()])[-1]
        last.late |= values - last.values
        last.values |= values
        self._show_tree()

    def settle(self, path: str, value: Value) -> None:
        """It is known now which of the allowed values the name holds."""
        last = self._last(path)
        if last.values == {value}:
            return
        if (
            value in last.late
        ):  # nobody knows since when: what other names were promised meanwhile may be older
            self.step += 1
            last = replace(last, step=self.step, late=frozenset())
            self.files[path].append(last)
        last.values = frozenset({value})

    # ---- looking

    def now(self, path: str) -> Values:
        """Return what a name may hold now."""
        return self._last(path).values

    def at(self, path: str, step: int) -> Values:
        """Return what a name held right after a promise."""
        entries = self.files.get(path)
        return entries[_index(entries, step)].values if entries else NOTHING

    def entry(self, path: str, step: int) -> Entry:
        """Return what a name held right after a promise, and since when."""
        entries = self.files.get(path)
        return entries[_index(entries, step)] if entries else _first()

    def next_entry(self, path: str, step: int) -> Entry | None:
        """Return what a name held next after what it held right after a promise; None: nothing else."""
        entries = self.files.get(path, [])
        return next(iter(entries[_index(entries, step) + 1 :]), None)

    def since(self, path: str, step: int) -> Values:
        """Return all that a name held from right after a promise on."""
        entries = self.files.get(path)
        if not entries:
            return NOTHING
        return frozenset().union(*(entry.values for entry in entries[_index(entries, step) :]))

    def missing(self, path: str, step: int, shown: Mapping[str, Value]) -> str:
        """Return where content that came to a name with a promise should show by now, and does not.

        Under that name, or where it was moved from there; "": it shows, or is not needed any more.
        """
        entries, where = self.files[path], path
        for entry in entries[_index(entries, step) :]:
            if entry.values == NOTHING and entry.cause in RENAMES:
                # The name itself may show older content for a while: its delete comes later.
                where = self.missing(entry.other, entry.step, shown)
                if not where:
                    return ""
            elif shown.get(path) in entry.values:
                return ""
        return where

    def tree(self) -> dict[str, Values]:
        """Return what each name may hold now, names that hold nothing left out."""
        return {
            path: entries[-1].values for path, entries in self.files.items() if entries[-1].values != NOTHING
        }

    def tree_folders(self) -> set[str]:
        """Return the directories that there are now."""
        return {path for path, entries in self.folders.items() if entries[-1][1]}

    def _show_tree(self, promise: Promise | None = None) -> None:
        tree = {path: entries[-1].values for path, entries in self.files.items()}
        if promise is not None:
            tree |= {path: after for path, _, after in promise.files}
        self._on_tree(self.step, tree.values())

    def _last(self, path: str) -> Entry:
        entries = self.files.get(path)
        return entries[-1] if entries else _first()


def _first() -> Entry:
    return Entry(0, NOTHING, Cause.UNLINK)


def _index(entries: list[Entry], step: int) -> int:
    return max(0, bisect_right(entries, step, key=lambda entry: entry.step) - 1)
