"""What the journal's queue knew of the bucket, passed on past what a start finds lost.

Invariant: nothing is moved, removed, or said to be there in the bucket for the sake of content that is not to be had.
"""

from collections.abc import Callable
from dataclasses import replace

from fusecache.model.names import parent_prefix
from fusecache.model.records import FileRecord, OperationKind, OperationRecord


class LostChanges:
    """Is told of each queued change in order; says how each is to be queued now."""

    def __init__(self, lost: set[str], tells: Callable[[str], bool], written: dict[str, int]) -> None:
        """lost: keys of content that is gone. tells: whether a key's name says that all the rest is there.

        written: the last place of content in each directory.
        """
        self._written = written
        self._lost = lost
        self._is_commit_marker = tells
        # What the bucket shows under names whose first changes are lost.
        self._bases: dict[str, str | None] = {}
        # Of these, where that is not what the tree moves from there, but what it had replaced.
        self._replaced: set[str] = set()
        # Names with changes that are queued: the first of those knows, or is told.
        self._queued: set[str] = set()
        # Of the content that this start found lost, and nothing newer stands for: its place, and its row.
        self._missing: dict[str, FileRecord] = {}
        # The place of the last version of each file that tells.
        self._last_sequence: dict[str, int] = {}
        # What would have been removed from the bucket, and stays.
        self._stays: list[str] = []

    def begin(self, record: FileRecord) -> FileRecord:
        """Return content with what it has to know; `keep` or `lose` comes next."""
        if record.key not in self._bases:
            return record
        return replace(record, base_etag=self._bases.pop(record.key))

    def queued(self, record: FileRecord) -> None:
        """The content is queued."""
        self._queued.add(record.key)
        self._missing.pop(record.key, None)

    def lose(self, record: FileRecord, *, is_new: bool = True) -> None:
        """The content is lost, or goes with what is. is_new: whether nobody knew before this start."""
        self._lost.add(record.key)
        if is_new:
            self._missing[record.key] = record
        self._inherit_base(record.key, record.base_etag)

    def missing_for(self, record: FileRecord) -> FileRecord | None:
        """Return lost content which a file says to be there: of those that were to be there since it last said so."""
        if not self._is_commit_marker(record.key):
            return None
        before = self._last_sequence.get(record.key, 0)
        self._last_sequence[record.key] = record.sequence
        folder = parent_prefix(record.key)
        return next(
            (
                each
                for each in self._missing.values()
                if each.sequence > before and each.key != record.key and each.key.startswith(folder)
            ),
            None,
        )

    def operation(self, operation: OperationRecord) -> OperationRecord | None:
        """Return a change of names with what it has to know, counted as queued; None: it goes with what is lost."""
        if self._is_for_what_is_lost(operation):
            self._stays.append(operation.key)
            self._inherit_base(operation.key, operation.base_etag)
            return None
        if operation.kind is OperationKind.RENAME:
            return self._rename(operation)
        self._queued.add(operation.key)
        if operation.key not in self._bases:
            return operation
        return replace(operation, base_etag=self._bases.pop(operation.key))

    def _is_for_what_is_lost(self, operation: OperationRecord) -> bool:
        """Say whether a removal was asked for as something newer was there that is not to be had.

        What was moved elsewhere shows under its old name again. A removal waits for every older write of the mount:
        without one of them nobody can tell that something whole is left. But what said that all the rest is there goes
        where that is written anew.
        """
        if operation.kind is OperationKind.DELETE:
            is_anew = (
                self._is_commit_marker(operation.key)
                and self._written.get(parent_prefix(operation.key), 0) > operation.sequence
            )
            return operation.target in self._lost or (bool(self._missing) and not is_anew)
        return operation.kind is OperationKind.RMDIR and any(
            key.startswith(operation.key) for key in self._stays
        )

    def _rename(self, operation: OperationRecord) -> OperationRecord | None:
        key, target = operation.key, operation.target
        if key in self._bases:
            source = self._bases[key]
            if source is None or key in self._replaced:
                # Nothing of what was to be moved lies there; what lies at the target stays.
                self._inherit_base(target, self._bases.get(target, operation.base_etag))
                self._replaced.add(target)
                return None
            del self._bases[key]
            operation = replace(operation, source_etag=source)
        if target in self._bases:
            operation = replace(operation, base_etag=self._bases.pop(target))
        self._queued |= {key, target}
        return operation

    def _inherit_base(self, key: str, base: str | None) -> None:
        if key not in self._queued:
            self._bases[key] = base
