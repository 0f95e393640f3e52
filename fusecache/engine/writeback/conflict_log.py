"""Remembers conflicts: names that another client changed before this node published its own change of them.

Not the detection, which is in `engine/publish/results.py`. A conflict stays here until a user has dealt with it.

Invariants:
1. Every conflict here has a row in the journal, so a restart forgets none.
2. A conflict ends when our copy is removed or renamed. If its name is published from here again, it is settled: with a
   copy it stays listed, without one it ends.
"""

import time
from collections.abc import Iterable, Iterator
from dataclasses import replace

from fusecache.engine.runtime.journal_writer import JournalWriter
from fusecache.index.journal import DropConflict, PutConflict
from fusecache.model.records import ConflictRecord


class ConflictLog:
    """The conflicts of this node, by number, by key, and by the key of our copy."""

    def __init__(self, journal: JournalWriter) -> None:
        self._journal = journal
        self._records: dict[int, ConflictRecord] = {}
        self._by_key: dict[str, set[int]] = {}

    def __len__(self) -> int:
        return len(self._records)

    def restore(self, records: Iterable[ConflictRecord]) -> None:
        """Load the journal's conflicts at start."""
        for record in records:
            self._enter(record)

    def all(self) -> list[ConflictRecord]:
        """Return all conflicts that were not dealt with, oldest first."""
        return [self._records[number] for number in sorted(self._records)]

    def open(self) -> Iterator[ConflictRecord]:
        """Yield the conflicts whose name does not show what this node wrote last."""
        return (record for record in self._records.values() if not record.settled)

    def get(self, number: int) -> ConflictRecord | None:
        """Return the conflict of a number, or None."""
        return self._records.get(number)

    def record(self, key: str, kept_as: str, size: int, error: str, number: int) -> None:
        """Record that another client changed `key` first. kept_as: the key of our version of `size` bytes, "" if none.

        number: the one in the copy's name, 0 if it has none.
        """
        if not number or number in self._records:  # the copy's own name may get into a conflict, too
            number = self._journal.next_number()
        record = ConflictRecord(number, key, kept_as, size, time.time(), error)
        self._journal.submit(PutConflict(record))
        self._enter(record)

    def published(self, key: str) -> None:
        """Record that the bucket shows under `key` what this node wrote last."""
        for record in self._of(key):
            if record.key != key or record.settled:
                continue
            if record.kept_as:
                self._replace(record, replace(record, settled=True))
            else:
                self.drop(record.number)

    def removed(self, key: str) -> None:
        """Record that a program here removed `key`: if it was a copy, its conflict is dealt with."""
        for record in self._of(key):
            if record.kept_as == key:
                self.drop(record.number)

    def moved(self, before: str, now: str) -> None:
        """Record that a program here renamed `before`.

        A copy with another file name is dealt with. With the same file name, in another directory, it is not: then the
        conflict follows the copy, or the name that is in conflict.
        """
        for record in self._of(before):
            same_name = before.rpartition("/")[2] == now.rpartition("/")[2]
            if record.kept_as == before and not same_name:
                self.drop(record.number)
            elif record.kept_as == before:
                self._replace(record, replace(record, kept_as=now))
            elif same_name:
                self._replace(record, replace(record, key=now))

    def drop(self, number: int) -> None:
        """End a conflict: it was dealt with."""
        self._leave(self._records[number])
        self._journal.submit(DropConflict(number))

    # ---- inside

    def _of(self, key: str) -> list[ConflictRecord]:
        return [self._records[number] for number in sorted(self._by_key.get(key, ()))]

    def _replace(self, old: ConflictRecord, new: ConflictRecord) -> None:
        self._leave(old)
        self._enter(new)
        self._journal.submit(PutConflict(new))

    def _enter(self, record: ConflictRecord) -> None:
        self._records[record.number] = record
        for key in {record.key, record.kept_as} - {""}:
            self._by_key.setdefault(key, set()).add(record.number)

    def _leave(self, record: ConflictRecord) -> None:
        del self._records[record.number]
        for key in {record.key, record.kept_as} - {""}:
            numbers = self._by_key[key]
            numbers.discard(record.number)
            if not numbers:
                del self._by_key[key]
