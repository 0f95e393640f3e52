"""Queues operations: journal number, base ETag, place in the queue, and the row for the journal.

It does not decide which operations a change of names needs: its callers do.

Invariant: nothing here awaits. Rows are appended to `changes`, which the caller journals in one transaction.
"""

import uuid
from dataclasses import replace

from fusecache.engine.namespace.nodes import FileVersion, Node, Operation, attributes_of
from fusecache.engine.namespace.tree import Tree
from fusecache.engine.runtime.journal_writer import JournalWriter
from fusecache.engine.write.disposal import VersionDisposal
from fusecache.engine.writeback.queue import WritebackQueue, base_of
from fusecache.index.journal import Change, DropOperation, PutFile, PutOperation
from fusecache.model.objects import ObjectInfo
from fusecache.model.records import OperationKind, OperationRecord


class OperationQueue:
    """Adds operations to the write-back queue, and moves queued changes to its end."""

    def __init__(
        self, tree: Tree, disposal: VersionDisposal, queue: WritebackQueue, journal: JournalWriter
    ) -> None:
        self._tree = tree
        self._disposal = disposal
        self._queue = queue
        self._journal = journal

    def add(  # noqa: PLR0913  # what a record has
        self,
        node: Node | None,
        kind: OperationKind,
        key: str,
        changes: list[Change],
        *,
        target: str = "",
        base_etag: str | None = None,
        source: ObjectInfo | None = None,
        readers: Node | None = None,
        with_directory: bool = False,
    ) -> None:
        """Queue an operation, and append its row to `changes`. It holds its node in the tree."""
        changed_key = target if kind is OperationKind.RENAME else key
        record = OperationRecord(
            sequence=self._journal.next_number(),
            kind=kind,
            key=key,
            target=target,
            base_etag=self._queue.base_for(changed_key, base_etag),
            source_etag=source.etag if source is not None else "",
            size=source.size if source is not None else 0,
            modified=source.modified if source is not None else 0.0,
            uuid=str(uuid.uuid4()),
            attributes=attributes_of(node) if node is not None else None,
            link=node.target if kind is OperationKind.RENAME and node is not None else "",
            with_directory=with_directory,
        )
        if kind is OperationKind.DELETE:
            readers = readers or self._tree.nameless_reader(*self._queue.objects_before(key, base_etag))
        self._queue.add(Operation(record, node, readers=readers))
        if node is not None:
            self._tree.hold_local(node)
        changes.append(PutOperation(record))

    def requeue(
        self, item: FileVersion | Operation, base: str | None, changes: list[Change], **names: str
    ) -> None:
        """Move an item to the end of the queue, with another `key` or `target`."""
        self._queue.remove(item)
        sequence, key = self._journal.next_number(), names.get("key", item.record.key)
        fields = {"sequence": sequence, "base_etag": self._queue.base_for(key, base), **names}
        if isinstance(item, FileVersion):
            self._disposal.discard_upload(item)  # of its old key
            item.record = replace(item.record, **fields)  # type: ignore[arg-type]  # names of its fields
            changes.append(PutFile(item.record))
        else:
            changes.append(DropOperation(item.sequence))
            item.record = replace(item.record, **fields)  # type: ignore[arg-type]
            changes.append(PutOperation(item.record))
        self._queue.add(item)

    def requeue_last(self, removal: Operation, changes: list[Change]) -> None:
        """Move a removal to the end of the queue as it is."""
        self.requeue(removal, removal.record.base_etag, changes)

    def shown(self, node: Node, key: str = "") -> str | None:
        """Return the ETag that the bucket shows under the node's key, or under `key`, which it had; None: nothing.

        The first queued item of the key knows it. The node knows it only if nothing is queued: it may be a new node,
        made after an older one was removed.
        """
        key = key or self._tree.key(node)
        queued = self._queue.for_key(key)
        return base_of(queued[0], key) if queued else node.published_etag(key)
