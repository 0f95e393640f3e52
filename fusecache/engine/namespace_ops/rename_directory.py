"""Renames a directory: everything below it, as this node knows it and as a LIST of the bucket shows it.

The bucket has no rename of directories. Every file and symlink below is renamed by itself (`rename.py`), and every
directory gets a new directory marker.

Invariant: what changes tree and queue does not await. Whatever another client may have changed during the LIST is
checked again before.

Directory markers: the objects with which the bucket shows that a directory exists while it is empty.

A directory's mode and owner, for which the bucket has no place, are kept on this node under the marker's key.

Invariant: nothing here awaits. Rows are appended to `changes`, which the caller journals in one transaction.
"""

import logging
from dataclasses import dataclass, replace

import trio

from fusecache.engine.namespace.lookup import Lookup
from fusecache.engine.namespace.nodes import Kind, Node, Operation, attributes_of, directory_row
from fusecache.engine.namespace.tree import Tree
from fusecache.engine.namespace_ops.operation_queue import OperationQueue
from fusecache.engine.namespace_ops.rename import Rename
from fusecache.engine.runtime.journal_writer import JournalWriter
from fusecache.engine.runtime.metadata_client import MetadataClient
from fusecache.engine.runtime.procfs import ends_with_caller
from fusecache.engine.runtime.supervisor import unwrap_single_error
from fusecache.engine.write.disposal import LocalOnly
from fusecache.engine.writeback.queue import WritebackQueue
from fusecache.index.journal import Change, DropAttributes, DropOperation
from fusecache.model.errors import (
    AccessDenied,
    AlreadyExists,
    InvalidName,
    NotADirectory,
    NotFound,
    NotPermitted,
    ObjectMissing,
    Refused,
)
from fusecache.model.names import check_key
from fusecache.model.objects import ObjectInfo
from fusecache.model.records import FileState, OperationKind
from fusecache.policy.name_patterns import UnusableKeys
from fusecache.remote.store import primary_of

log = logging.getLogger(__name__)


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

    def remove(self, node: Node, key: str, changes: list[Change]) -> None:
        """Queue the deletion of a directory's marker at `key`. What makes it is not sent any more."""
        for item in self._queue.for_key(key):
            if isinstance(item, Operation) and not item.in_flight and item.node is node:
                self._queue.remove(item)
                changes.append(DropOperation(item.sequence))
                self._tree.release_local(node)
        # A directory marker may exist although no LIST showed it. Deleting a missing one succeeds and costs nothing.
        self._operations.add(None, OperationKind.RMDIR, key, changes)
        self._tree.add_tombstone(key)
        changes.append(DropAttributes(key, ""))

    def keep(self, directory: Node, changes: list[Change]) -> None:
        """Give a directory without a directory marker one when its last name goes, so that it goes on to exist."""
        if directory is self._tree.root or directory.has_marker or not self._tree.is_linked(directory):
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


@dataclass(eq=False, repr=False)
class DirectoryRename:
    """Renames directories, with their directory markers."""

    _tree: Tree
    _lookup: Lookup
    _local_only: LocalOnly
    _queue: WritebackQueue
    _journal: JournalWriter
    _client: MetadataClient
    _markers: DirectoryMarkers
    _rename: Rename

    def __post_init__(self) -> None:
        # An endpoint that answers for the primary may lack some of the files.
        self._store = primary_of(self._client.store)

    async def rename_directory(
        self, node: Node, target: Node | None, new_parent: Node, new_name: str, *, replace: bool
    ) -> None:
        """Rename a directory. target: what the new name shows now; replace: whether it is replaced.

        Raises NotFound, AlreadyExists, InvalidName, NotADirectory, NotEmpty.
        """
        while True:
            old_key, new_key = (
                self._tree.key(node),
                self._tree.child_key(new_parent, new_name, directory=True),
            )
            await self._check_directory_target(node, target, new_key)
            with self._tree.freeze_forgets():
                began = self._tree.now()
                async with ends_with_caller():
                    remote = await self._list_below(old_key, began)
                while (there := new_parent.children.get(new_name)) is not target:
                    target = there  # another client made or removed it in the meantime
                    check_replaceable(self._tree, target, replace=replace)
                    await self._check_directory_target(node, target, new_key)
                if not (self._tree.is_linked(node) and self._tree.is_linked(new_parent)):
                    raise NotFound(
                        f"{node.name}: another client removed it, or its new parent directory, during the rename"
                    )
                now = self._tree.key(node), self._tree.child_key(new_parent, new_name, directory=True)
                if now == (old_key, new_key):  # else a directory above was renamed: list again
                    changes = self._move_directory(node, target, new_parent, new_name, remote, began)
                    break
        await self._journal.commit(*changes)

    def _move_directory(
        self,
        node: Node,
        target: Node | None,
        new_parent: Node,
        new_name: str,
        remote: list[ObjectInfo],
        began: float,
    ) -> list[Change]:
        """Move a directory with all below it, as known here and by `remote`, a LIST that began at loop time `began`."""
        old_key, old_parent, old_name = self._tree.key(node), node.parent, node.name
        new_key = self._tree.child_key(new_parent, new_name, directory=True)
        self._check_paths(remote)
        self._forget_gone(node, {info.key for info in remote}, began)
        for info in remote:
            self._create_nodes_for(node, info, old_key, began)
        for member in self._tree.walk(node):
            key = self._tree.key(member)
            key_now = check_key(new_key + key[len(old_key) :])
            if member.kind is Kind.FILE:
                self._local_only.check_stays_published(key, key_now)
        changes: list[Change] = []
        if target is not None:
            self._markers.remove(target, new_key, changes)
            self._tree.detach(target)
        listed = {info.key: info.modified for info in remote}
        members = sorted(self._tree.walk(node), key=lambda member: self._move_order(member, listed))
        moved = [(member, self._tree.key(member)) for member in members]
        sequences = self._rename.sequences_of(moved)
        names = frozenset(new_key + key[len(old_key) :] for _, key in moved)
        newest_fixed = self._rename.newest_fixed_delete(sequences, names)
        self._tree.move(node, new_parent, new_name)
        directories = []
        for member, key_before in moved:
            key_now = self._tree.key(member)
            if member.kind is Kind.DIRECTORY:
                directories.append((member, key_before))
                member.listing.expire()
                self._markers.make(member, key_now, changes)
            else:
                self._rename.move_content(
                    member, key_before, key_now, None, changes, newest_fixed=newest_fixed, with_directory=True
                )
        # The old directory markers are deleted last, children first: this node hides the old name until its last object
        # is gone.
        for member, key_before in reversed(directories):
            self._markers.remove(member, key_before, changes)
        if old_parent is not None:
            self._lookup.on_gone(old_parent, old_name + "/")
            self._markers.keep(old_parent, changes)
        self._rename.on_position_vacated(sequences, changes)
        return changes

    def _move_order(self, member: Node, listed: dict[str, float]) -> tuple[int, bool, float, str]:
        """Return a sort key for the content of a renamed directory: in the order in which the bucket got it.

        listed: when the bucket got each object. Symlinks, empty files and commit markers may name others: they come
        after the other objects, which are copied side by side. The same holds for queued, and for local-only content.
        """
        key = self._tree.key(member)
        if member.kind is Kind.DIRECTORY:
            return 0, False, 0.0, key  # parents before their children
        names_others = member.kind is Kind.SYMLINK or member.size == 0 or self._queue.is_commit_marker(key)
        sequences = [item.sequence for item in self._queue.for_key(key) if item.node is member]
        content = member.version
        if content is not None and content.state is FileState.FLUSHED:
            sequences.append(content.sequence)  # it joins the queue at its release
        if sequences:
            return 2, names_others, sequences[-1], key  # of several versions the newest is what moves
        if content is not None and content in self._local_only:
            return 3, names_others, content.waiting_since, key
        known = member.object.modified if member.object is not None else 0.0
        return 1, names_others, listed.get(key, known), key

    async def _check_directory_target(self, node: Node, target: Node | None, new_key: str) -> None:
        if new_key.startswith(self._tree.key(node)):
            raise InvalidName(f"{self._tree.path(node)}: cannot be moved into itself")
        if target is None:
            return
        if target.kind is not Kind.DIRECTORY:
            raise NotADirectory(f"{self._tree.path(target)}: is not a directory")
        await self._lookup.reader.check_empty(target)

    async def _list_below(self, prefix: str, began: float) -> list[ObjectInfo]:
        """Return the objects that the bucket shows below a directory, with metadata where that needs a HEAD."""
        # LIST returns the shortest key first: here that of an object with the directory's own name.
        own = (await self._client.call(self._store.list_page, prefix[:-1], limit=1)).objects
        if own and own[0].key == prefix[:-1] and not self._tree.is_hidden(own[0].key, began):
            raise _stays_behind(
                self._tree.relative(own[0].key), "it is also a directory, which shows instead"
            )
        found: list[ObjectInfo] = []
        token: str | None = None
        while True:
            page = await self._client.call(self._store.list_page, prefix, token=token)
            shown = {info.key: info for info in page.objects if not self._tree.is_hidden(info.key, began)}
            with unwrap_single_error():
                async with trio.open_nursery() as nursery:
                    for info in page.objects:
                        is_asked = info.size == 0 or self._lookup.posix_metadata
                        if is_asked and not info.key.endswith("/") and info.key in shown:
                            nursery.start_soon(self._head, info.key, shown)
            found += shown.values()
            token = page.next_token
            if token is None:
                return found

    async def _head(self, key: str, shown: dict[str, ObjectInfo]) -> None:
        """Ask for what only a HEAD tells of an object: an empty one may be a symlink."""
        listed = shown[key]
        try:
            found = await self._client.call(self._store.head, key)
        except ObjectMissing:
            del shown[key]  # removed since
            return
        except (AccessDenied, Refused):
            if not listed.size or self._client.refused_seconds:
                raise
            return
        # A HEAD has the time in whole seconds only: by that, the object could sort before what it was written after.
        is_same = found.etag == listed.etag
        shown[key] = replace(found, modified=listed.modified) if is_same else found

    def _check_paths(self, remote: list[ObjectInfo]) -> None:
        """Raise NotPermitted if no path names one of the objects: it would stay behind."""
        unusable = UnusableKeys()
        for info in remote:
            for key, why in unusable.see(self._tree.relative(info.key), info.size):
                raise _stays_behind(key, why)

    def _forget_gone(self, top: Node, listed: set[str], began: float) -> None:
        """Drop the nodes below `top` whose objects another client removed: there is nothing to rename."""
        for member in list(self._tree.walk(top)):
            is_clean = member.local_refs == 0 and member.verified < began and not member.children
            if member.kind is not Kind.DIRECTORY and is_clean and self._tree.key(member) not in listed:
                self._tree.detach(member)

    def _create_nodes_for(self, top: Node, info: ObjectInfo, prefix: str, listed: float) -> None:
        """Make the nodes for one object below `top`, unless this node has local changes or newer knowledge of it."""
        *folders, name = info.key[len(prefix) :].split("/")
        if self._tree.is_hidden(info.key, listed):
            return
        directory = top
        for part in folders:
            child = self._child(directory, part, listed, is_directory=True)
            directory = child or self._tree.make(directory, part, Kind.DIRECTORY)
        if not name:
            directory.has_marker = True
            return
        child = self._child(directory, name, listed, is_directory=False)
        if (
            child is not None
            and _is_outdated(child, listed)
            and child.object is not None
            and child.object.etag != info.etag
        ):
            self._tree.detach(child)  # another client replaced it since this node last looked
            child = None
        if child is None:
            self._lookup.reconciler.make_file(directory, info)

    def _child(self, directory: Node, name: str, listed: float, *, is_directory: bool) -> Node | None:
        """Return the node of a name, None if another client replaced it. Raises NotPermitted if it has another type."""
        child = directory.children.get(name)
        if child is None or (child.kind is Kind.DIRECTORY) == is_directory:
            return child
        if not _is_outdated(child, listed):
            raise _stays_behind(self._tree.path(child), "it is a file and a directory")
        self._tree.detach(child)
        return None


def _is_outdated(node: Node, listed: float) -> bool:
    """Return whether a LIST that began at loop time `listed` knows better than a node."""
    return node.local_refs == 0 and node.verified < listed and not node.children


def _stays_behind(path: str, why: str) -> NotPermitted:
    text = (
        f"{path}: {why}, so it cannot move with its directory; nothing was moved. Rename or delete this object in the "
        "bucket with another program first"
    )
    log.warning("%s", text)
    return NotPermitted(text)


def check_replaceable(tree: Tree, target: Node | None, *, replace: bool) -> None:
    """Raise AlreadyExists if the new name of a rename exists and must not be replaced."""
    if target is not None and not replace:
        raise AlreadyExists(f"{tree.path(target)}: exists")
