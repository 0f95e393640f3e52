"""Takes over the inodes that the kernel knows from a daemon that was killed, while its mount stayed.

Only of files that are open, and of directories, which may be working directories. The kernel looks every other name up
again, as its old inode number answers ESTALE: numbers are not used twice (`Tree.numbers_used`).

What the predecessor left is as its journal has it, and the tree was just rebuilt from that journal. So a file that had
a name then is the one that the tree shows there. A file that had none is no file of the tree.

Invariants:
1. Nothing here is published that was not closed. Content that was being written stays open, or is quarantined.
2. A file is found by its inode and its content by its generation. A name only says where it is linked.
"""

import logging
from collections.abc import Iterator
from dataclasses import replace

from fusecache.engine.namespace.nodes import FileVersion, Kind, Node
from fusecache.engine.namespace.tree import Tree
from fusecache.engine.recovery.journal_replay import ReplayResult, make_nameless
from fusecache.engine.writeback.queue import WritebackQueue
from fusecache.model.predecessor import KeptNode, Predecessor
from fusecache.model.records import FileState

log = logging.getLogger(__name__)

# Older than any TTL, but known: it is served while the bucket does not answer.
_LONG_AGO_SECONDS = 10.0**7


class NodeAdoption:
    """Gives the nodes of a tree that was just rebuilt the numbers that the kernel knows, and makes the missing ones."""

    def __init__(self, left: Predecessor, found: ReplayResult, tree: Tree, queue: WritebackQueue) -> None:
        self._left = left
        self._found = found
        self._tree = tree
        self._queue = queue
        self._directories = {each.number: each for each in left.directories}
        self._queued: dict[int, FileVersion] = {
            each.record.generation: each for each in (*found.versions, *found.rejected, *found.local)
        }

    def run(self) -> Iterator[FileVersion]:
        """Adopt directories, then files. Yields the versions that are open for writing."""
        # Two have one name if another client replaced the object of the older one: then the newer one has the name.
        for each in sorted(self._left.directories, key=_newest_first):
            self._directory(each.number)
        for each in sorted(self._left.files, key=_newest_first):
            opened, closed = self._found.open.get(each.generation), self._queued.get(each.generation)
            if each.generation in self._found.stored:
                self._store(self._node(each), self._found.stored[each.generation])
                continue
            if each.generation and opened is None and closed is None:
                log.error(
                    "the content of an open file is quarantined, its programs get EIO name=%s", each.name
                )
                continue
            node = self._node(each)
            if opened is not None:
                self._open(node, each, opened)
                yield opened
            elif closed is not None and closed.state is FileState.FLUSHED:
                yield closed

    def _directory(self, number: int) -> Node | None:
        """Return the directory with a number, made with its parents if it is not in the tree; None if it is gone."""
        node = self._tree.nodes.get(number)
        if node is not None:
            return node if node.kind is Kind.DIRECTORY else None
        kept = self._directories.pop(number, None)
        parent = None if kept is None else self._directory(kept.parent)
        if kept is None or parent is None:
            return None
        node = self._linked(kept, parent, Kind.DIRECTORY)
        if node is not None:
            node.lookups = 1
        return node

    def _linked(self, kept: KeptNode, parent: Node, kind: Kind) -> Node | None:
        """Return the node of a name, with the number that the kernel knows; None if that name is another's by now."""
        there = parent.children.get(kept.name)
        if there is None:
            node = self._tree.make(parent, kept.name, kind, attributes=kept.attributes, number=kept.number)
            node.verified = self._tree.now() - _LONG_AGO_SECONDS
            return node
        if there.kind is not kind or there.number <= self._tree.numbers_used:
            return None
        self._tree.renumber(there, kept.number)
        return there

    def _node(self, kept: KeptNode) -> Node:
        """Return the node of an open file: with its name, or without one."""
        parent = self._directory(kept.parent) if kept.parent else None
        node = None if parent is None else self._linked(kept, parent, Kind.FILE)
        if node is None:
            node = self._nameless(kept)
        # Not `set_object`: its row says so already, and must not be written before its content is known.
        node.object = kept.object
        return node

    def _nameless(self, kept: KeptNode) -> Node:
        """Return the node of an open file that lost its name, with its content if that is still to be published."""
        node = self._tree.nodes.get(kept.number) or make_nameless(kept, self._tree)
        version = self._queued.get(kept.generation)
        before = None if version is None else version.node
        if version is None or before is node:
            return node
        # Replay places content by its name. If that is newer content's by now, only this version is the file's.
        is_shared = before is not None and (before.version is not version or self._tree.is_linked(before))
        moved = [version] if is_shared else [item for item in self._queue.items() if item.node is before]
        for item in {version, *moved}:
            item.node = node
            self._tree.hold_local(node)
            if before is not None:
                self._tree.release_local(before)
        if before is not None and before.version is version:
            before.version = None
        node.version = version
        return node

    def _store(self, node: Node, version: FileVersion) -> None:
        """The cache takes the bytes of this published version over. Until then another successor must know of them."""
        version.node, version.reserved, node.staged = node, version.size, version.record.generation

    def _open(self, node: Node, kept: KeptNode, version: FileVersion) -> None:
        """Make a version that was being written the node's content again."""
        attributes = kept.attributes
        node.mode, node.uid, node.gid = attributes.mode, attributes.uid, attributes.gid
        node.mtime_ns = attributes.mtime_ns
        key = self._tree.key(node) if self._tree.is_linked(node) else ""
        version.record = replace(version.record, key=key, attributes=attributes)
        version.node = node
        version.reserved = version.size
        version.close_state.changes = 1
        if node.version is not None and node.version.state is FileState.REJECTED:
            version.replaces = node.version
        node.version = version
        self._tree.hold_local(node)


def _newest_first(kept: KeptNode) -> int:
    return -kept.number
