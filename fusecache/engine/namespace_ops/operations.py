"""Carries out create, mkdir, symlink, unlink, rmdir and rename, on the tree, the queue and the journal.

Not the requests to the bucket: the publisher sends them later, in the order of the queue.

Invariants:
1. A call first waits for what it must know. Then it decides, and changes tree and queue, without awaiting. Then it
   commits.
2. One change of the tree is one transaction of the journal. Every item in it has a sequence in the publish order.
3. No call waits for the bucket to take anything. Besides lookups, two calls ask it for names: rmdir (is the directory
   empty?) and the rename of a directory (what is in it?).

Refuses new names below directories that never change, which the option `immutable` names.

A program that makes files beside its data set would otherwise publish them into it: StreamingDataset decompresses zstd
shards next to them, for example.
"""

import logging
import posixpath
import time

from fusecache.engine.namespace.events import Events
from fusecache.engine.namespace.lookup import Lookup
from fusecache.engine.namespace.nodes import (
    FileVersion,
    Kind,
    Node,
    QueuedChange,
    dropped_row,
    in_use,
    is_rename,
    is_symlink,
)
from fusecache.engine.namespace.tree import ROOT_USER, Tree, User
from fusecache.engine.namespace_ops.operation_queue import OperationQueue
from fusecache.engine.namespace_ops.rename import Rename
from fusecache.engine.namespace_ops.rename_directory import (
    DirectoryMarkers,
    DirectoryRename,
    check_replaceable,
)
from fusecache.engine.runtime.journal_writer import JournalWriter
from fusecache.engine.runtime.metadata_client import MetadataClient
from fusecache.engine.write.parts import WriteParts
from fusecache.engine.writeback.queue import WritebackQueue
from fusecache.engine.writeback.rotation import CheckpointRotation
from fusecache.index.journal import Change, DropOperation
from fusecache.index.listings import ListedEntry
from fusecache.model.errors import (
    AlreadyExists,
    IsADirectory,
    NotADirectory,
    NotFound,
    ObjectChanged,
    ReadOnly,
)
from fusecache.model.names import is_special, parent_prefix
from fusecache.model.records import FileState, OperationKind

log = logging.getLogger(__name__)


class ImmutableDirectories:
    """The patterns of `immutable` that end in '/'. Others are of files, which must be made before they never change."""

    def __init__(self, tree: Tree, patterns: tuple[str, ...]) -> None:
        self._tree = tree
        self._directories = tuple(pattern for pattern in patterns if pattern.endswith("/"))
        self._logged: set[str] = set()

    def check_new(self, parent: Node, name: str) -> None:
        """Raise ReadOnly (EROFS) if a new name would lie in an immutable directory; the log says so once for each."""
        if not self._directories:
            return
        path = self._tree.relative(self._tree.key(parent)) + name
        for directory in self._directories:
            if path.startswith(directory):
                text = f"{path}: not created, as {directory} is immutable"
                if directory not in self._logged:
                    self._logged.add(directory)
                    log.warning(
                        "%s; write elsewhere (StreamingDataset: local=, on a local disk), or mount without this "
                        "--immutable to change the data set. The next refusals below it are not logged.",
                        text,
                    )
                raise ReadOnly(text)


class NamespaceOps:
    """The namespace operations of the mount."""

    def __init__(
        self,
        tree: Tree,
        lookup: Lookup,
        write: WriteParts,
        queue: WritebackQueue,
        journal: JournalWriter,
        client: MetadataClient,
        events: Events,
        immutable: ImmutableDirectories,
    ) -> None:
        self._tree = tree
        self._lookup = lookup
        self._file_io = write.file_io
        self._disposal = write.disposal
        self._placement = write.placement
        self._local_only = write.local_only
        self._queue = queue
        self._journal = journal
        self._events = events
        self._immutable = immutable
        self._operations = operations = OperationQueue(tree, write.disposal, queue, journal)
        self._rotation = rotation = CheckpointRotation(
            tree, queue, write.placement, write.states.dirty_versions, self._dequeue, operations.requeue_last
        )
        self._markers = markers = DirectoryMarkers(tree, lookup, queue, operations)
        self._rename = Rename(tree, write, queue, journal, operations, rotation, events)
        self._directory_rename = DirectoryRename(
            tree, lookup, write.local_only, queue, journal, client, markers, self._rename
        )

    # ---- making

    async def create(self, parent: Node, name: str, mode: int, maker: User = ROOT_USER) -> Node:
        """Make an empty file; it is durable only once it was closed. Raises AlreadyExists, NoSpace, ReadOnly."""
        await self._file_io.check_space(
            parent, lambda: self._tree.relative(self._tree.child_key(parent, name))
        )
        await self._check_free(parent, name)
        node = self._tree.make(parent, name, Kind.FILE)
        node.mode = mode
        self._tree.give_to_maker(node, maker)
        _touch(parent)
        self._file_io.create(node)
        return node

    async def mkdir(self, parent: Node, name: str, mode: int, maker: User = ROOT_USER) -> Node:
        """Make a directory. The bucket gets a directory marker, so that other nodes see it while it is empty."""
        self._journal.check_writable()
        await self._check_free(parent, name)
        key = self._tree.child_key(parent, name, directory=True)
        default = self._tree.default_attributes(Kind.DIRECTORY, time.time())
        node = self._tree.make(parent, name, Kind.DIRECTORY, attributes=default)
        node.mode = mode
        self._tree.give_to_maker(node, maker)
        _touch(parent)
        self._lookup.on_created(node)
        changes: list[Change] = []
        self._markers.make(node, key, changes)
        self._markers.collapse_rmdir(key, changes)
        await self._journal.commit(*changes)
        return node

    async def symlink(self, parent: Node, name: str, target: str) -> Node:
        """Make a symlink: in the bucket a zero-byte object with the target in its metadata."""
        self._journal.check_writable()
        await self._check_free(parent, name)
        key = self._tree.child_key(parent, name)
        node = self._tree.make(parent, name, Kind.SYMLINK, target=target)
        _touch(parent)
        changes: list[Change] = []
        base = self._placement.collapse_delete(key, changes)
        self._operations.add(node, OperationKind.SYMLINK, key, changes, target=target, base_etag=base)
        await self._journal.commit(*changes)
        return node

    # ---- removing

    async def unlink(self, parent: Node, name: str) -> None:
        """Remove a file or symlink; open handles keep working. Raises NotFound, IsADirectory."""
        self._journal.check_writable()
        await self._lookup.look_into(parent)
        node = await self._lookup.lookup(parent, name)
        if node.kind is Kind.DIRECTORY:
            raise IsADirectory(f"{self._tree.path(node)}: is a directory")
        changes: list[Change] = []
        self._remove(node, changes)
        _touch(parent)
        self._lookup.on_gone(parent, name)
        self._markers.keep(parent, changes)
        await self._journal.commit(*changes)

    async def rmdir(self, parent: Node, name: str) -> None:
        """Remove an empty directory and its directory marker, and the object that the directory hides, if there is one.

        Raises NotFound, NotADirectory, NotEmpty.
        """
        self._journal.check_writable()
        await self._lookup.look_into(parent)
        node = await self._lookup.lookup(parent, name)
        if node.kind is not Kind.DIRECTORY:
            raise NotADirectory(f"{self._tree.path(node)}: is not a directory")
        hidden = await self._lookup.behind_directory(parent, name)
        await self._lookup.reader.check_empty(node)
        changes: list[Change] = []
        if hidden is not None:
            self._remove_hidden(self._tree.child_key(parent, name), hidden, changes)
            self._lookup.on_gone(parent, name)
        self._markers.remove(node, self._tree.key(node), changes)
        self._tree.detach(node)
        _touch(parent)
        self._lookup.on_gone(parent, name + "/")
        self._markers.keep(parent, changes)
        await self._journal.commit(*changes)

    # ---- moving

    async def rename(
        self, old_parent: Node, old_name: str, new_parent: Node, new_name: str, *, replace: bool
    ) -> None:
        """Rename a file, symlink or directory, atomically on this node.

        replace: whether an existing target is replaced. Raises NotFound, AlreadyExists, NotEmpty, IsADirectory,
        NotADirectory, AcrossDevices, ReadOnly, and ObjectChanged if the kernel knows an older file of that name.
        """
        self._journal.check_writable()
        node, target = await self._look_up_both(old_parent, old_name, new_parent, new_name)
        if target is node:
            return
        if target is None:
            self._immutable.check_new(new_parent, new_name)
        check_replaceable(self._tree, target, replace=replace)
        if node.kind is Kind.DIRECTORY:
            await self._directory_rename.rename_directory(node, target, new_parent, new_name, replace=replace)
            _touch(old_parent, new_parent)
            return
        if target is not None and target.kind is Kind.DIRECTORY:
            raise IsADirectory(f"{self._tree.path(target)}: is a directory")
        changes: list[Change] = []
        if node.kind is Kind.FILE and not is_special(node.mode):
            new_key = self._tree.child_key(new_parent, new_name)
            self._local_only.check_stays_published(self._tree.key(node), new_key)
        elif is_special(node.mode) and target is not None:
            # Its object would stay in the bucket, as nothing is published in its place.
            with in_use(new_parent):
                self._remove(target, changes)
            target = None
        self._rename.move_file(node, target, new_parent, new_name, changes)
        _touch(old_parent, new_parent)
        self._lookup.on_gone(old_parent, old_name)
        self._markers.keep(old_parent, changes)
        await self._journal.commit(*changes)

    # ---- inside

    async def _look_up_both(
        self, old_parent: Node, old_name: str, new_parent: Node, new_name: str
    ) -> tuple[Node, Node | None]:
        """Return what a rename moves, and what it replaces. Raises NotFound, and ObjectChanged as `rename` does."""
        known = old_parent.children.get(old_name)
        await self._lookup.look_into(old_parent)
        try:
            target: Node | None = await self._lookup.lookup(new_parent, new_name)
        except NotFound:
            target = None
        with in_use(target):
            node = await self._lookup.lookup(old_parent, old_name)
        if known is not None and known.lookups and known is not node:
            # The kernel would take the old file along. It looks the name up, and tries again.
            raise ObjectChanged(f"{old_name}: was replaced in the bucket")
        # Another client may have made, replaced or removed the target during the lookup of the old name.
        return node, new_parent.children.get(new_name)

    async def _check_free(self, parent: Node, name: str) -> None:
        try:
            there = await self._lookup.lookup(parent, name)
        except NotFound:
            self._tree.child_key(parent, name)
            self._immutable.check_new(parent, name)
            return
        raise AlreadyExists(f"{self._tree.path(there)}: exists")

    def _remove(self, node: Node, changes: list[Change]) -> None:
        self._events.on_key_removed(self._tree.key(node))
        self._remove_content(node, changes)
        self._tree.detach(node)

    def _remove_hidden(self, key: str, hidden: ListedEntry, changes: list[Change]) -> None:
        """Remove what a directory hid: else `rm -r` would find a file in its place, and fail."""
        log.warning("removed, as the directory of its name is key=%s bytes=%d", key, hidden.size)
        self._events.on_key_removed(key)
        self._operations.add(None, OperationKind.DELETE, key, changes, base_etag=hidden.etag)
        self._tree.add_tombstone(key)

    def _remove_content(self, node: Node, changes: list[Change]) -> None:
        """Withdraw what is queued for the node's key, and queue a DELETE if the bucket shows, or will show, the key."""
        key = self._tree.key(node)
        published = self._operations.shown(node)
        left = self._withdrawable(node, key)
        for item in left:
            changes += self._dequeue(item)
        version = node.version
        # A version that is still queued stays queued: a delete depends on it, or a rename behind it moves it.
        if version is not None and not version.in_flight and version not in self._queue:
            if not node.handles:
                changes += self._disposal.drop(version)
            else:
                self._disposal.discard_upload(version)
                changes += self._disposal.drop_replaced(version)
                if version.is_mutable or version.state is FileState.REJECTED:
                    changes.append(dropped_row(version))
        if self._queue.exists_after(key, published):
            readers = node if node.handles and node.version is None else None
            self._operations.add(
                None, OperationKind.DELETE, key, changes, base_etag=published, readers=readers
            )
            self._tree.add_tombstone(key)
        for item in left:
            if self._queue.is_deferred(item):
                changes += self._rotation.on_vacated(item.sequence, follows=True)
            else:
                changes += self._rotation.on_gone(item.sequence, key)

    def _withdrawable(self, node: Node, key: str) -> list[QueuedChange]:
        """Return the queued items of a removed node that need not be published for the sake of other changes."""
        queued = self._queue.for_key(key)
        # Items before a queued rename from this key are needed by it: the node came back here by another rename.
        leaves = [item.sequence for item in queued if is_rename(item) and item.changed_keys()[0] == key]
        return [
            item
            for item in queued
            if item.node is node
            and not item.in_flight
            and not is_rename(item)
            and item.sequence > max(leaves, default=0)
            and not self._rotation.blocks_a_delete(item)
            and not self._is_pointer(item)
        ]

    def _is_pointer(self, item: QueuedChange) -> bool:
        """Return whether an item is a symlink with the name of a commit marker (`latest`) to something that is here.

        Trainers replace such a link by removing it first. It is published regardless: if it gave way to the newer
        link, which waits for a newer checkpoint, the bucket could have a whole checkpoint that nothing points to.
        """
        key = item.record.key
        if not is_symlink(item) or not self._queue.is_commit_marker(key) or self._queue.is_deferred(item):
            return False
        return self._tree.find(posixpath.normpath(parent_prefix(key) + item.record.target)) is not None

    def _dequeue(self, item: QueuedChange) -> list[Change]:
        """Take a change that is not in flight out of the queue; return the rows."""
        if isinstance(item, FileVersion):
            return self._disposal.dequeue(item)
        self._queue.remove(item)
        if item.node is not None:
            self._tree.release_local(item.node)
        return [DropOperation(item.sequence)]


def _touch(*directories: Node) -> None:
    """Show a directory's names as changed now: Python, for one, looks for new modules only where the time differs."""
    for each in directories:
        each.mtime_ns = time.time_ns()
