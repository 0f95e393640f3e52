"""Directory markers: the objects with which the bucket shows that a directory exists while it is empty.

A directory's mode and owner, for which the bucket has no place, are kept on this node under the marker's key.

Invariant: nothing here awaits. Rows are appended to `changes`, which the caller journals in one transaction.
"""

from fusecache.engine.namespace.lookup import Lookup
from fusecache.engine.namespace.nodes import Kind, Node, Operation, attributes_of, directory_row
from fusecache.engine.namespace.tree import Tree
from fusecache.engine.namespace_ops.operation_queue import OperationQueue
from fusecache.engine.writeback.queue import WritebackQueue
from fusecache.index.journal import Change, DropAttributes, DropOperation
from fusecache.model.records import OperationKind


class DirectoryMarkers:
    """Queues what makes and removes directory markers."""

    def __init__(self, tree: Tree, lookup: Lookup, queue: WritebackQueue, operations: OperationQueue) -> None:
        self._tree = tree
        self._lookup = lookup
        self._queue = queue
        self._operations = operations

    def make(self, directory: Node, key: str, changes: list[Change]) -> None:
        """Queue a directory's marker at `key`."""
        directory.has_marker = True
        self._operations.add(directory, OperationKind.MKDIR, key, changes)
        default = self._tree.default_attributes(Kind.DIRECTORY, 0.0)
        changes.append(directory_row(key, attributes_of(directory), default))

    def withdraw(self, node: Node, key: str, changes: list[Change]) -> None:
        """Take the queued operations of a directory's marker at `key` out of the queue, unless they are in flight."""
        for item in self._queue.for_key(key):
            if isinstance(item, Operation) and not item.in_flight and item.node is node:
                self._queue.remove(item)
                changes.append(DropOperation(item.sequence))
                self._tree.release_local(node)

    def remove(self, node: Node, key: str, changes: list[Change]) -> None:
        """Queue the deletion of a directory's marker at `key`."""
        self.withdraw(node, key, changes)
        # A directory marker may exist although no LIST showed it. Deleting a missing one succeeds and costs nothing.
        self._operations.add(None, OperationKind.RMDIR, key, changes)
        self._tree.add_tombstone(key)
        changes.append(DropAttributes(key, ""))

    def keep(self, directory: Node, changes: list[Change]) -> None:
        """Give a directory without a directory marker one when its last name goes, so that it goes on to exist."""
        if self._tree.is_top(directory) or directory.has_marker or not self._tree.is_linked(directory):
            return
        if self._lookup.is_empty_as_known(directory):
            self.make(directory, self._tree.key(directory), changes)

    def collapse_rmdir(self, key: str, changes: list[Change]) -> None:
        """A directory was made again at `key`: withdraw queued deletions of its marker."""
        for item in self._queue.for_key(key):
            if isinstance(item, Operation) and item.record.kind is OperationKind.RMDIR and not item.in_flight:
                self._queue.remove(item)
                self._tree.clear_tombstone(key, gone=False)
                changes.append(DropOperation(item.sequence))
