"""Renames files and symlinks: unpublished content only changes its key, published content is copied in the bucket.

Not the copy itself: a queued RENAME operation has the publisher copy the object and delete the old one.

Invariant: nothing here awaits. Rows are appended to `changes`, which the caller journals in one transaction.
"""

from dataclasses import dataclass, replace

from fusecache.engine.namespace.events import Events
from fusecache.engine.namespace.nodes import (
    FileVersion,
    Kind,
    Node,
    Operation,
    QueuedChange,
    dropped_row,
    in_use,
    is_rename,
)
from fusecache.engine.namespace.tree import Tree
from fusecache.engine.namespace_ops.operation_queue import OperationQueue
from fusecache.engine.runtime.journal_writer import JournalWriter
from fusecache.engine.write.disposal import kept_reason
from fusecache.engine.write.parts import WriteParts
from fusecache.engine.writeback.placement import is_closed_at
from fusecache.engine.writeback.queue import WritebackQueue
from fusecache.engine.writeback.rotation import CheckpointRotation
from fusecache.index.journal import Change, PutFile
from fusecache.model.objects import ObjectInfo
from fusecache.model.records import FileState, OperationKind, Reason


@dataclass(eq=False, repr=False)
class Rename:
    """Renames content in the tree, the queue and the journal."""

    _tree: Tree
    _write: WriteParts
    _queue: WritebackQueue
    _journal: JournalWriter
    _operations: OperationQueue
    _rotation: CheckpointRotation
    _events: Events

    def __post_init__(self) -> None:
        self._states = self._write.states
        self._disposal = self._write.disposal
        self._placement = self._write.placement
        self._local_only = self._write.local_only

    def move_file(
        self, node: Node, target: Node | None, new_parent: Node, new_name: str, changes: list[Change]
    ) -> None:
        """Move a file or symlink in the tree and the queue. target: what the new name showed, which is replaced."""
        key_before = self._tree.key(node)
        base: str | None = None
        if target is not None:
            self._events.on_key_removed(self._tree.key(target))
            base = self._operations.shown(target)
            if target.version is not None and target.version.state is FileState.REJECTED:
                target.version.successor = node.version
                reason = kept_reason(target.version)
                if node.version is not None and reason is not Reason.NONE:
                    node.version.record = replace(node.version.record, reason=reason)
            if target.version is not None:
                changes += self._drop_content(target, target.version)
            with in_use(new_parent):  # else the parent's node goes with its only child
                self._tree.detach(target)
        sequences = self.sequences_of([(node, key_before)])
        self._tree.move(node, new_parent, new_name)
        key_now = self._tree.key(node)
        fixed = self.newest_fixed_delete(sequences, frozenset({key_now}))
        self.move_content(node, key_before, key_now, base, changes, newest_fixed=fixed)
        self.on_position_vacated(sequences, changes)

    def _is_queued(self, node: Node) -> bool:
        return any(item.node is node for item in self._queue.for_key(self._tree.key(node)))

    def move_content(
        self,
        node: Node,
        key_before: str,
        key_now: str,
        base: str | None,
        changes: list[Change],
        *,
        newest_fixed: int,
        with_directory: bool = False,
    ) -> None:
        """Follow the node to its new key: unpublished content changes its key, published content gets a RENAME.

        newest_fixed: `newest_fixed_delete`, as it was before the rename. with_directory: its directory is renamed.
        """
        self._events.on_key_moved(key_before, key_now)
        self._move_queued(
            node, key_before, key_now, base, changes, newest_fixed, with_directory=with_directory
        )
        version = node.version
        if version is not None and version in self._local_only:
            changes += self._states.end_local_only(node, version)

    def _move_queued(
        self,
        node: Node,
        key_before: str,
        key_now: str,
        base: str | None,
        changes: list[Change],
        newest_fixed: int,
        *,
        with_directory: bool,
    ) -> None:
        queued = [item for item in self._queue.for_key(key_before) if item.node is node]
        version, published = node.version, node.published_etag(key_before)
        shown = self._operations.shown(node, key_before)
        dependents = self._dependent_deletes(queued, key_before, newest_fixed)
        stays = published is not None and self._queue.exists_after(key_before, published)
        if dependents is None or (not queued and (version is None or stays)):
            # Also while the file is being written: what the writer adds is not closed yet, and until then what was
            # closed must be in the bucket under one of the two names.
            self._add_rename(node, key_before, key_now, base, changes, with_directory=with_directory)
            if version is not None and version not in self._queue:
                changes += self._rekey(version, key_now, None)
            return
        last = queued[-1] if queued else None
        for replaced in [item for item in queued[:-1] if isinstance(item, FileVersion)]:
            # The new name never held what was replaced before the rename.
            queued.remove(replaced)
            replaced.successor = last if isinstance(last, FileVersion) else None
            changes += self._disposal.drop(replaced)
        if queued:
            collapsed = self._placement.collapse_delete(key_now, changes, queued)
            base = collapsed if collapsed is not None else base
        for item in queued:
            self._operations.requeue(item, base, changes, key=key_now)
        for removal in dependents:
            if removal in self._queue:  # else the content was renamed back to the deleted name
                self._operations.requeue(removal, removal.record.base_etag, changes, target=key_now)
        if version is not None and version not in queued:
            changes += self._rekey(version, key_now, base)
        if self._queue.exists_after(key_before, shown):
            target = key_now if queued else ""
            self._operations.add(
                None, OperationKind.DELETE, key_before, changes, target=target, base_etag=shown
            )
            self._tree.add_tombstone(key_before)
        # The base under the new name, for content that is closed later.
        self._tree.set_object(node, None if base is None else ObjectInfo(key_now, base, 0, 0.0))

    def sequences_of(self, nodes: list[tuple[Node, str]]) -> list[tuple[int, str]]:
        """Return the sequences of the nodes' queued items, with their keys, in order; not of directory markers."""
        return sorted(
            (item.sequence, key)
            for node, key in nodes
            if node.kind is not Kind.DIRECTORY
            for item in self._queue.for_key(key)
            if item.node is node
        )

    def newest_fixed_delete(self, sequences: list[tuple[int, str]], names: frozenset[str]) -> int:
        """Return the newest delete for which these sequences must not be vacated; 0: there is none.

        names: the new names of the items.
        """
        if not sequences:
            return 0
        return self._rotation.newest_fixed_delete(sequences[0][0], follows=True, names=names)

    def _drop_content(self, target: Node, version: FileVersion) -> list[Change]:
        """A file is replaced: drop its content, unless that stays queued for the order of changes."""
        is_queued = self._is_queued(target)
        # Mutable without a handle: its last release waits for the journal, and will find no name to seal it under.
        if target.handles == 0 and (version.is_mutable or not is_queued):
            return [*self._disposal.drop(version)]
        if is_queued:
            return []
        changes = [*self._disposal.drop_replaced(version)]
        if version.is_mutable or version.state is FileState.REJECTED:
            changes.append(dropped_row(version))  # it ends with its last handle
        return changes

    def on_position_vacated(self, sequences: list[tuple[int, str]], changes: list[Change]) -> None:
        """Have deletes that waited for these sequences wait for what came since, as renames have vacated them."""
        for sequence, key in sequences:
            item = self._queue.get(sequence)
            if item is None or key not in item.changed_keys():
                changes += self._rotation.on_vacated(sequence, follows=True)
                break

    def _dependent_deletes(
        self, queued: list[QueuedChange], key: str, newest_fixed: int
    ) -> list[Operation] | None:
        """Return the deletes that must follow what is queued for `key` to its new sequence; None: it must not be moved.

        If it must not be moved, a RENAME is queued instead. That is so in three cases:
        - It is in flight, or a rename is queued for the key.
        - A delete that waits for it cannot move behind its new sequence: the delete is in flight, or other changes were
          queued since, or newer content of its name was closed.
        - Any other delete that waits for it must stay where it is (`CheckpointRotation`).
        """
        if any(item.in_flight or is_rename(item) for item in queued):
            return None
        removals = self._queue.deletes_waiting_for(key) if queued else []
        dependents = [
            each
            for each in removals
            if not each.in_flight
            and self._queue.ends_with(each)
            and not is_closed_at(self._tree, each.record.key)
        ]
        is_fixed = removals != dependents or any(item.sequence < newest_fixed for item in queued)
        return None if is_fixed else dependents

    def _rekey(self, version: FileVersion, key: str, base: str | None) -> list[Change]:
        """Give content that is not queued (not closed, or rejected) another key; return the rows. base: of that key."""
        # The sequence of a close belongs to the old name. Under the new name it is as new as the rename.
        sequence = self._journal.next_number() if version.sequence else 0
        self._disposal.discard_upload(version)  # of its old key
        version.record = replace(version.record, key=key, sequence=sequence, base_etag=base)
        rejected = version.replaces
        rows = [] if rejected is None else self._rekey(rejected, key, base)
        return [*rows, PutFile(version.record)]

    def _add_rename(
        self,
        node: Node,
        key_before: str,
        key_now: str,
        base: str | None,
        changes: list[Change],
        *,
        with_directory: bool,
    ) -> None:
        # The rename of a directory comes after such a delete, and does not take its place: else the bucket would show
        # its files among those of the directory that was there.
        collapsed = None if with_directory else self._placement.collapse_delete(key_now, changes)
        self._operations.add(
            node,
            OperationKind.RENAME,
            key_before,
            changes,
            target=key_now,
            base_etag=base if collapsed is None else collapsed,
            source=self._moving_object(node, key_before),
            with_directory=with_directory,
        )
        self._tree.add_tombstone(key_before)

    def _moving_object(self, node: Node, key: str) -> ObjectInfo | None:
        """Return the object that will be at `key` when the node's rename is published; ETag "": not known yet."""
        version = node.object
        etag = version.etag if version is not None and version.key == key else ""
        for item in reversed(self._queue.for_key(key)):
            if isinstance(item, FileVersion) and item.node is node:
                return ObjectInfo(key, etag, item.size, item.record.attributes.mtime_ns / 1e9)
            if is_rename(item) and item.record.target == key:
                return ObjectInfo(key, etag, item.record.size, item.record.modified)
        return None if version is None else ObjectInfo(key, etag, version.size, version.modified)
