"""Adapts queued changes to content that replay finds lost: successors inherit its base ETag, dependent changes go.

When replay drops a lost change, the next change of its key inherits the base ETag (the precondition). Deletes, renames
and commit markers that presume the lost content are dropped or held.

Invariant: nothing in the bucket is moved, deleted, or named by a commit marker on account of lost content.
"""

from collections.abc import Callable
from dataclasses import replace

from fusecache.model.names import parent_prefix
from fusecache.model.records import FileRecord, OperationKind, OperationRecord


class LostChanges:
    """Receives each queued change in order, and says how it is to be queued now."""

    def __init__(
        self, lost: set[str], is_commit_marker: Callable[[str], bool], written: dict[str, int]
    ) -> None:
        """lost: keys of content that is gone. is_commit_marker: returns whether a key is that of a commit marker.

        written: the last sequence of content in each directory.
        """
        self._written = written
        self._lost = lost
        self._is_commit_marker = is_commit_marker
        # What the bucket shows under keys whose first changes are lost, until the next change inherits it.
        self._bases: dict[str, str | None] = {}
        # Subset of `_bases`: targets of dropped renames, where the bucket shows what the rename was to replace.
        self._replaced: set[str] = set()
        # Keys with queued changes: the first of these has the base.
        self._queued: set[str] = set()
        # The rows of content that this start found lost, by key, while no newer content of the key is queued.
        self._missing: dict[str, FileRecord] = {}
        # The sequence of the last version of each commit marker.
        self._last_sequence: dict[str, int] = {}
        # Keys whose deletes were dropped, so that the bucket keeps them.
        self._kept_keys: list[str] = []

    def begin(self, record: FileRecord) -> FileRecord:
        """Return the row of a version with the base that it inherits. The caller then calls `queued` or `lose`."""
        if record.key not in self._bases:
            return record
        return replace(record, base_etag=self._bases.pop(record.key))

    def queued(self, record: FileRecord) -> None:
        """Record that the content is queued."""
        self._queued.add(record.key)
        self._missing.pop(record.key, None)

    def lose(self, record: FileRecord, *, is_new: bool = True) -> None:
        """Record that content is lost, or held because other content is.

        is_new: whether this start found it lost; False for a commit marker that is held.
        """
        self._lost.add(record.key)
        if is_new:
            self._missing[record.key] = record
        self._inherit_base(record.key, record.base_etag)

    def missing_for(self, record: FileRecord) -> FileRecord | None:
        """Return lost content that a commit marker may name, or None: below its directory, since its last version."""
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
        """Return an operation with the base that it inherits, counted as queued; None: it is dropped."""
        if self._presumes_lost_content(operation):
            self._kept_keys.append(operation.key)
            self._inherit_base(operation.key, operation.base_etag)
            return None
        if operation.kind is OperationKind.RENAME:
            return self._rename(operation)
        self._queued.add(operation.key)
        if operation.key not in self._bases:
            return operation
        return replace(operation, base_etag=self._bases.pop(operation.key))

    def _presumes_lost_content(self, operation: OperationRecord) -> bool:
        """Return whether an operation is a delete that may presume lost content: it is dropped then.

        - A DELETE whose newer content moved to `target` and is lost: the deleted name shows its old object again.
        - Any DELETE while content is lost. A delete waits for every older write of the mount, and without one of these
          the daemon cannot tell whether anything complete is left. One delete stays: that of a commit marker in whose
          directory content is written later.
        - An RMDIR of a directory below which such an operation was dropped.
        """
        if operation.kind is OperationKind.DELETE:
            is_rewritten = (
                self._is_commit_marker(operation.key)
                and self._written.get(parent_prefix(operation.key), 0) > operation.sequence
            )
            return operation.target in self._lost or (bool(self._missing) and not is_rewritten)
        return operation.kind is OperationKind.RMDIR and any(
            key.startswith(operation.key) for key in self._kept_keys
        )

    def _rename(self, operation: OperationRecord) -> OperationRecord | None:
        key, target = operation.key, operation.target
        if key in self._bases:
            source = self._bases[key]
            if source is None or key in self._replaced:
                # The object that was to be moved is not there. What is at the target stays.
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
