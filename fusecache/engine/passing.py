"""What the journal's queue knew of the bucket, passed on past what a start finds lost.

Invariant: nothing is moved or removed in the bucket for the sake of content that is not to be had.
"""

from dataclasses import replace

from fusecache.model.records import FileRecord, OperationKind, OperationRecord


class Passing:
    """Is told of each queued change in order; says how each is to be queued now. lost: keys of content that is gone."""

    def __init__(self, lost: set[str]) -> None:
        self._lost = lost
        # What the bucket shows under names whose first changes are lost.
        self._bases: dict[str, str | None] = {}
        # Of these, where that is not what the tree moves from there, but what it had replaced.
        self._replaced: set[str] = set()
        # Names with changes that are queued: the first of those knows, or is told.
        self._queued: set[str] = set()

    def content(self, record: FileRecord) -> FileRecord:
        """Return content with what it has to know; `keep` or `lose` comes next."""
        if record.key not in self._bases:
            return record
        return replace(record, base_etag=self._bases.pop(record.key))

    def keep(self, record: FileRecord) -> None:
        """The content is queued."""
        self._queued.add(record.key)

    def lose(self, record: FileRecord) -> None:
        """The content is lost."""
        self._lost.add(record.key)
        self._pass_on(record.key, record.base_etag)

    def operation(self, operation: OperationRecord) -> OperationRecord | None:
        """Return a change of names with what it has to know, counted as queued; None: it goes with what is lost."""
        if operation.kind is OperationKind.DELETE and operation.target in self._lost:
            # What was moved there is not to be had: what the bucket shows under the old name is all that there is.
            self._pass_on(operation.key, operation.base_etag)
            return None
        if operation.kind is OperationKind.RENAME:
            return self._rename(operation)
        self._queued.add(operation.key)
        if operation.key not in self._bases:
            return operation
        return replace(operation, base_etag=self._bases.pop(operation.key))

    def _rename(self, operation: OperationRecord) -> OperationRecord | None:
        key, target = operation.key, operation.target
        if key in self._bases:
            source = self._bases[key]
            if source is None or key in self._replaced:
                # Nothing of what was to be moved lies there; what lies at the target stays.
                self._pass_on(target, self._bases.get(target, operation.base_etag))
                self._replaced.add(target)
                return None
            del self._bases[key]
            operation = replace(operation, source_etag=source)
        if target in self._bases:
            operation = replace(operation, base_etag=self._bases.pop(target))
        self._queued |= {key, target}
        return operation

    def _pass_on(self, key: str, base: str | None) -> None:
        if key not in self._queued:
            self._bases[key] = base
