"""The tree of nodes in memory: who is whose child, what is pinned, which keys are about to go.

Decides nothing about the bucket and asks it nothing: `lookup.py` does. All calls are synchronous.

Invariants:
1. A node with pins is reachable from the root, unless it was unlinked; a parent's pins include its
children's. 2. A node in `children` has that parent and name; a node without parent is the root or unlinked.
"""

import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import trio

from fusecache.engine.namespace.nodes import Kind, Node
from fusecache.model.errors import NotFound
from fusecache.model.names import check_key
from fusecache.model.objects import ObjectInfo
from fusecache.model.records import PosixAttributes

ROOT = 1
# Below are the control directory's fixed inodes.
FIRST_FREE = 16
# A finished deletion is remembered so long, against listings that were under way; none takes longer.
_TOMBSTONE_SECONDS = 600.0


@dataclass(frozen=True, slots=True)
class Ownership:
    """Attributes of what the bucket knows none of: owner, and the bits that are masked out of 0666 and 0777.

    is_told: whether the metadata of an object says whose it is.
    """

    uid: int
    gid: int
    umask: int
    is_told: bool = False


@dataclass(slots=True)
class _Tombstone:
    pending: int = 0
    gone: float = float("-inf")


class Tree:
    """Nodes by number and by name."""

    def __init__(self, prefix: str, ownership: Ownership) -> None:
        self._prefix = prefix
        self.ownership = ownership
        self._next = FIRST_FREE
        self._tombstones: dict[str, _Tombstone] = {}
        now = time.time_ns()
        self.root = Node(
            ROOT,
            Kind.DIRECTORY,
            "",
            None,
            0o777 & ~ownership.umask,
            ownership.uid,
            ownership.gid,
            now,
            lookups=1,
        )
        # In the order in which `oldest` goes round.
        self.nodes: OrderedDict[int, Node] = OrderedDict({ROOT: self.root})
        # Who waits, and goes by what is here; what nobody else needs any more meanwhile.
        self._freezes = 0
        self._unneeded: list[Node] = []
        self.on_listing_lost: Callable[[Node], None] = lambda node: None

    def now(self) -> float:
        """The loop's time, against which listings and tombstones are held."""
        return trio.current_time()

    # ---- names and keys

    def key(self, node: Node) -> str:
        """Return the node's key; a directory's ends with '/' (the root's is the mount's prefix).

        Raises NotFound for a node that lost its name, or lies in a directory that did.
        """
        parts: list[str] = []
        step = node
        while step.parent is not None:
            parts.append(step.name)
            step = step.parent
        path = "/".join(reversed(parts))
        if node.kind is Kind.DIRECTORY and path:
            path += "/"
        if step is not self.root:
            raise NotFound(f"{path}: was removed")
        return self._prefix + path

    def child_key(self, parent: Node, name: str, *, directory: bool = False) -> str:
        """Return the key of a name in `parent`. Raises InvalidName if it is too long."""
        return check_key(self.key(parent) + name + ("/" if directory else ""))

    def path(self, node: Node) -> str:
        """Return the node's path below the mountpoint, for messages."""
        if not self.is_linked(node):
            return f"{node.name} (removed)"
        return self.key(node)[len(self._prefix) :].rstrip("/") or "."

    def key_of_path(self, path: str) -> str:
        """Return the key of a file at a path below the mountpoint; of the root, the mount's prefix."""
        return self._prefix + path

    def relative(self, key: str) -> str:
        """Return a key without the mount's prefix."""
        return key[len(self._prefix) :]

    def find(self, key: str) -> Node | None:
        """Return the node in memory whose key it is, or None."""
        if not key.startswith(self._prefix):
            return None
        node = self.root
        for part in filter(None, self.relative(key).split("/")):
            child = node.children.get(part)
            if child is None:
                return None
            node = child
        return node

    def is_linked(self, node: Node) -> bool:
        """Return whether a path leads to the node."""
        while node.parent is not None:
            node = node.parent
        return node is self.root

    def walk(self, node: Node) -> Iterator[Node]:
        """Yield the nodes in memory at and below `node`, parents first."""
        yield node
        for child in list(node.children.values()):
            yield from self.walk(child)

    # ---- making, moving, removing

    def make(
        self,
        parent: Node,
        name: str,
        kind: Kind,
        *,
        attributes: PosixAttributes | None = None,
        version: ObjectInfo | None = None,
        target: str = "",
        number: int = 0,
    ) -> Node:
        """Make a child; without attributes it gets the mount's defaults and the version's time.

        number: of its inode, 0 or one that is taken: a new one.
        """
        if attributes is None:
            attributes = self.default_attributes(
                kind, version.modified if version is not None else time.time()
            )
        if not number or number in self.nodes:
            number = self._next
            self._next += 1
        node = Node(
            number, kind, name, None, attributes.mode, attributes.uid, attributes.gid,
            attributes.mtime_ns, object=version, target=target,
        )  # fmt: skip
        self.nodes[node.number] = node
        self.attach(node, parent, name)
        return node

    def default_attributes(self, kind: Kind, modified: float) -> PosixAttributes:
        """Return the attributes of what the bucket tells nothing more of; modified: seconds since 1970."""
        bits = 0o666 if kind is Kind.FILE else 0o777
        owner = self.ownership
        return PosixAttributes(bits & ~owner.umask, owner.uid, owner.gid, int(modified * 1e9))

    def attach(self, node: Node, parent: Node, name: str) -> None:
        """Give a node without a name its place."""
        if node.parent is not None or name in parent.children:
            raise ValueError(f"{name!r}: attached twice")
        node.parent, node.name = parent, name
        parent.children[name] = node
        self._add_local_refs(parent, node.local_refs)

    def detach(self, node: Node) -> None:
        """Take a node's name away; it lives on while the kernel or a handle knows it."""
        parent = node.parent
        if parent is None:
            return
        del parent.children[node.name]
        node.parent = None
        self._add_local_refs(parent, -node.local_refs)
        self._release(node)
        self._release(parent)

    def move(self, node: Node, parent: Node, name: str) -> None:
        """Give a node another place."""
        if parent.children.get(name, node) is not node:
            raise ValueError(f"{name!r}: the place is taken")
        old = node.parent
        if old is not None:
            del old.children[node.name]
            node.parent = None
            self._add_local_refs(old, -node.local_refs)
        self.attach(node, parent, name)

    def hold_local(self, node: Node) -> None:
        """Make the node the truth about its name until it is unpinned as often."""
        self._add_local_refs(node, 1)

    def release_local(self, node: Node) -> None:
        """Undo one `pin`; the bucket shows now what the node says."""
        self._add_local_refs(node, -1)
        now = trio.current_time()
        step: Node | None = node
        while step is not None:
            step.verified = max(step.verified, now)
            step = step.parent
        self._release(node)

    def forget(self, number: int, lookups: int) -> None:
        """The kernel dropped that many references."""
        node = self.nodes.get(number)
        if node is not None:
            node.lookups = max(0, node.lookups - lookups)
            self._release(node)

    @contextmanager
    def freeze_forgets(self) -> Iterator[None]:
        """Drop no node meanwhile: what is known of it is newer than an answer that is under way."""
        self._freezes += 1
        try:
            yield
        finally:
            self._freezes -= 1
            if not self._freezes:
                unneeded, self._unneeded = self._unneeded, []
                for node in unneeded:
                    self._release(node)

    def oldest(self, count: int) -> list[Node]:
        """Return so many nodes, those first that were not among them for the longest time; none while all are kept."""
        if self._freezes:
            return []
        found = []
        for _ in range(min(count, len(self.nodes))):
            number = next(iter(self.nodes))
            self.nodes.move_to_end(number)
            found.append(self.nodes[number])
        return found

    def drop_recallable(self, node: Node) -> None:
        """Drop a file's node that can be made again, with its number, from a listing's row when it is needed."""
        parent = node.parent
        if parent is None or node.handles or node.local_refs or node.version is not None or node.children:
            raise ValueError(f"{node.name!r}: is in use")
        del parent.children[node.name]
        del self.nodes[node.number]
        node.parent = None

    # ---- keys that are about to go, or just went

    @property
    def hides_keys(self) -> bool:
        """Whether any key is hidden now."""
        return bool(self._tombstones)

    def add_tombstone(self, key: str) -> None:
        """A queued change will take `key` out of the bucket: listings that still show it are wrong."""
        self._tombstones.setdefault(key, _Tombstone()).pending += 1

    def clear_tombstone(self, key: str, *, gone: bool) -> None:
        """Undo one `hide`; gone: the bucket no longer shows the key."""
        tombstone = self._tombstones.get(key)
        if tombstone is None:
            return
        tombstone.pending -= 1
        now = trio.current_time()
        if gone:
            tombstone.gone = now
        elif tombstone.pending == 0 and tombstone.gone == float("-inf"):
            del self._tombstones[key]
        if len(self._tombstones) > 1000:
            self._purge_tombstones(now)

    def on_shown(self, key: str) -> None:
        """The bucket shows the key again: what listings tell of it is right, unless another change takes it out."""
        tombstone = self._tombstones.get(key)
        if tombstone is not None and tombstone.pending == 0:
            del self._tombstones[key]

    def is_hidden(self, key: str, listed: float) -> bool:
        """Return whether a listing begun at loop time `listed` is wrong to show `key`."""
        tombstone = self._tombstones.get(key)
        return tombstone is not None and (tombstone.pending > 0 or tombstone.gone >= listed)

    def _purge_tombstones(self, now: float) -> None:
        for key, tombstone in list(self._tombstones.items()):
            if tombstone.pending == 0 and tombstone.gone < now - _TOMBSTONE_SECONDS:
                del self._tombstones[key]

    def _add_local_refs(self, node: Node | None, count: int) -> None:
        while node is not None and count:
            node.local_refs += count
            node = node.parent

    def _release(self, node: Node) -> None:
        """Forget a node that nobody knows any more, and then its parent likewise."""
        if self._freezes:
            self._unneeded.append(node)
            return
        step: Node | None = node
        while step is not None and step is not self.root:
            if step.lookups or step.handles or step.local_refs or step.children or step.version is not None:
                return
            parent = step.parent
            self.nodes.pop(step.number, None)
            if step.is_listed:
                self.on_listing_lost(step)
            if parent is not None:
                del parent.children[step.name]
                step.parent = None
            step = parent
