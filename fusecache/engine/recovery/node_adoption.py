"""Takes over the inodes that the kernel knows from a daemon that was killed, while its mount stayed.

Only of files that are open, and of directories, which may be working directories. The kernel looks every other name up
again, as its old inode number answers ESTALE: numbers are not used twice (`Tree.numbers_used`).

Invariant: nothing here is published that was not closed. Content that was being written stays open, or is quarantined.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace

from fusecache.engine.namespace.nodes import FileVersion, Kind, Node, in_use
from fusecache.engine.namespace.tree import Tree
from fusecache.engine.recovery.journal_replay import ReplayResult
from fusecache.engine.recovery.places import node_at
from fusecache.model.errors import LocalDiskError
from fusecache.model.objects import ObjectId, ObjectInfo
from fusecache.model.predecessor import KeptNode, Predecessor
from fusecache.model.states import FileState

# Older than any TTL, but known: it is served while the bucket does not answer.
_LONG_AGO_SECONDS = 10.0**7


class NodeAdoption:
    """Gives the nodes of a tree that was just rebuilt the numbers that the kernel knows, and makes the missing ones."""

    def __init__(self, left: Predecessor, found: ReplayResult, tree: Tree) -> None:
        self._left = left
        # Numbers of files that are being written, and have a name.
        self._adopted: set[int] = set()
        self._found = found
        self._tree = tree
        self._directories = {each.number: each for each in left.directories}
        self._versions: dict[int, FileVersion] = {
            each.record.generation: each for each in (*found.versions, *found.rejected, *found.local)
        }

    def run(self) -> Iterator[FileVersion]:
        """Adopt directories, then files. Yields the versions that are open for writing."""
        now = self._tree.now()
        for each in reversed(self._left.directories):  # of two with one name, the newer one is known by it
            self._directory(each.number, now)
        for each in self._left.files:
            version = self._file(each, now)
            if version is not None:
                yield version

    def _directory(self, number: int, now: float) -> Node | None:
        """Return the directory with a number, made with its parents if it is not in the tree; None if it is gone."""
        node = self._tree.nodes.get(number)
        if node is not None:
            return node if node.kind is Kind.DIRECTORY else None
        kept = self._directories.get(number)
        parent = self._directory(kept.parent, now) if kept is not None and kept.parent != number else None
        if kept is None or parent is None:
            return None
        node = self._named(kept, parent, Kind.DIRECTORY, now)
        if node is not None:
            node.lookups = 1
        return node

    def _named(self, kept: KeptNode, parent: Node, kind: Kind, now: float) -> Node | None:
        """Return the node of a name, with the number that the kernel knows; None if the name may be another's."""
        there = parent.children.get(kept.name)
        if there is not None:
            if there.kind is not kind or there.number in self._directories:
                return None
            self._tree.renumber(there, kept.number)
            return there
        key = self._tree.child_key(parent, kept.name, directory=kind is Kind.DIRECTORY)
        if (kept.parent, kept.name) in self._left.busy or self._tree.is_hidden(key, now):
            return None
        node = self._tree.make(
            parent, kept.name, kind, attributes=kept.attributes, version=kept.object, number=kept.number
        )
        node.verified = now - _LONG_AGO_SECONDS
        return node

    def _file(self, kept: KeptNode, now: float) -> FileVersion | None:
        opened = self._found.open.get(kept.generation)
        known = self._versions.get(kept.generation)
        if known is not None and known.node is not None:
            # Closed, and still open.
            self._tree.renumber(known.node, kept.number)
            return known if known.state is FileState.FLUSHED else None
        if opened is not None:
            self._open(self._place(kept, opened, now), kept, opened)
            return opened
        parent = self._directory(kept.parent, now) if kept.parent else None
        node: Node | None = None
        if parent is not None:
            there = parent.children.get(kept.name)
            # With local content: it was published, or is about to be, and is this file's.
            is_same = there is None or there.version is not None or _shows(there, kept.object)
            node = self._named(kept, parent, Kind.FILE, now) if is_same else None
        if node is None:
            node = self._nameless(kept)
        if kept.generation and kept.is_written:
            node.write_error = LocalDiskError(
                f"{kept.name}: the daemon was restarted, and what was written to this open file is quarantined; "
                "see `fusecache recover`"
            )
        return None

    def _place(self, kept: KeptNode, opened: FileVersion, now: float) -> Node:
        """Return the node of a file that is being written. It has a name as long as it was not removed.

        The name is that of its journal row, which a rename that was carried out has changed. A file that was just made
        may have none yet.
        """
        if not kept.parent:
            return self._nameless(kept)
        if opened.record.key:
            node = node_at(self._tree, opened.record.key, Kind.FILE, kept.attributes)
        else:
            parent = self._directory(kept.parent, now)
            if parent is None:
                return self._nameless(kept)
            node = node_at(self._tree, self._tree.child_key(parent, kept.name), Kind.FILE, kept.attributes)
        if node.number in self._adopted:
            return self._nameless(kept)
        self._adopted.add(kept.number)
        self._tree.renumber(node, kept.number)
        return node

    def _nameless(self, kept: KeptNode) -> Node:
        return self._tree.nodes.get(kept.number) or make_nameless(kept, self._tree)

    def _open(self, node: Node, kept: KeptNode, version: FileVersion) -> None:
        """Make a version that was being written the node's content again."""
        attributes = kept.attributes
        node.mode, node.uid, node.gid = attributes.mode, attributes.uid, attributes.gid
        node.mtime_ns = attributes.mtime_ns
        key = self._tree.key(node) if self._tree.is_linked(node) else ""
        version.record = replace(version.record, key=key, attributes=attributes)
        version.upload.key = key
        version.node = node
        version.reserved = version.size
        version.close_state.changes = 1
        node.version = version
        self._tree.hold_local(node)


def make_nameless(kept: KeptNode, tree: Tree) -> Node:
    """Make the node of a file that lost its name."""
    return tree.make_nameless(kept.number, kept.name, kept.attributes, kept.object)


@contextmanager
def removed_objects_in_use(left: Predecessor | None, tree: Tree) -> Iterator[dict[ObjectId, Node]]:
    """Yield the objects that programs have open although they were removed: their DELETE waits for these nodes."""
    kept = [] if left is None else [each for each in left.files if not each.parent]
    found = {each.object.object_id: make_nameless(each, tree) for each in kept if each.object is not None}
    with ExitStack() as stack:
        for node in found.values():
            stack.enter_context(in_use(node))
        yield found


def _shows(node: Node, version: ObjectInfo | None) -> bool:
    """Return whether a node is that version in the bucket, without local content."""
    shown = node.object
    return (
        node.version is None
        and shown is not None
        and version is not None
        and shown.object_id == version.object_id
    )
