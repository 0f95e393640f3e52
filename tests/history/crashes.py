"""Ends a node at a chosen moment: before or after one of its journal commits, requests or file operations.

What its disk holds right then is copied for the next life; whatever the dying one still does, changes nothing there.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fusecache.disk.cache_files import CacheFiles
from fusecache.disk.staging import StagingDirectory, StagingFile
from fusecache.index.cache_index import CacheIndex
from fusecache.index.journal import Change, Journal, PutFile, PutOperation
from tests.support.node import photograph

COMMIT, REQUEST, FILE = KINDS = ("commit", "request", "file")
WHENS = ("before", "after")
FILE_OPERATIONS = {
    StagingDirectory: ("create", "quarantine", "delete"),
    StagingFile: ("write", "truncate", "copy_from", "sync", "sync_data", "delete"),
    CacheFiles: ("adopt",),
    CacheIndex: ("apply",),
}


class Crash(BaseException):
    """The node's process is gone. No Exception: the engine must not catch it."""


@dataclass(frozen=True, slots=True)
class Moment:
    """When to end: `before` or `after` the effect of the `number`-th thing of a kind in this life, from 0."""

    kind: str
    number: int
    when: str


class Reaper:
    """Counts what one life of a node does, and ends it.

    labels: of the moments at which lives ended; lives: how many began.
    """

    def __init__(self) -> None:
        self.labels: Counter[str] = Counter()
        self.counts: Counter[str] = Counter()
        self.lives = 0
        # UploadIds that the journal ever had.
        self.journaled: set[str] = set()
        self.is_dead = False
        self.died = ""
        self._moment: Moment | None = None
        self._place = self._next_place = Path()

    def begin(self, moment: Moment | None, place: Path, next_place: Path) -> None:
        """Another life begins in `place`; if it ends early, `next_place` gets a copy of it."""
        self.lives += 1
        self.counts.clear()
        self.is_dead, self.died = False, ""
        self._moment, self._place, self._next_place = moment, place, next_place

    def passing(self, kind: str, label: str, call: Callable[[], Any]) -> Any:
        """Make a call, unless the node ends before it; or end after it. Raises Crash."""
        if self.is_dead:
            raise Crash(self.died)
        number = self.counts[kind]
        self.counts[kind] += 1
        if self._moment == Moment(kind, number, "before"):
            self.die(f"{label} before")
        result = call()
        if self._moment == Moment(kind, number, "after"):
            self.die(f"{label} after")
        return result

    def die(self, label: str) -> None:
        """End now. Raises Crash."""
        photograph(self._place, self._next_place)
        self.is_dead, self.died = True, label
        self.labels[label] += 1
        raise Crash(label)

    def _commit(
        self,
        apply: Callable[[Journal, list[Change], int], None],
        journal: Journal,
        changes: list[Change],
        commit: int,
    ) -> None:
        apply(journal, changes, commit)
        for change in changes:
            if isinstance(change, PutFile):
                self.journaled.add(change.record.upload_id)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Have every journal and staging file of the process go by this reaper."""
        saved: list[tuple[type, str, Any]] = []

        def replace(owner: type, name: str, make: Callable[[Any], Any]) -> None:
            original = owner.__dict__[name]
            saved.append((owner, name, original))
            setattr(owner, name, make(original))

        def commits(original: Any) -> Any:
            def apply(journal: Journal, changes: Any, commit: int = 0) -> None:
                listed = list(changes)
                self.passing(COMMIT, _label(listed), lambda: self._commit(original, journal, listed, commit))

            return apply

        def files(name: str, original: Any) -> Any:
            def operate(*args: Any, **options: Any) -> Any:
                if self.is_dead:
                    return original(*args, **options)
                return self.passing(FILE, name, lambda: original(*args, **options))

            return operate

        replace(Journal, "apply", commits)
        for owner, names in FILE_OPERATIONS.items():
            for name in names:
                replace(owner, name, lambda original, name=name: files(f"file {name}", original))
        try:
            yield
        finally:
            for owner, name, original in saved:
                setattr(owner, name, original)


def _label(changes: list[Change]) -> str:
    words = {
        change.record.state.value
        if isinstance(change, PutFile)
        else change.record.kind.value
        if isinstance(change, PutOperation)
        else type(change).__name__
        for change in changes
    }
    return f"commit {'+'.join(sorted(words))}"
