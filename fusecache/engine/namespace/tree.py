"""The tree of nodes in memory: parents and children, local references, tombstones.

It sends no request and decides nothing about the bucket; `lookup.py` does. All calls are synchronous.

Invariants:
1. A node with `local_refs` is reachable from the root, unless it was unlinked. A parent's count includes those of
   its children.
2. A node in `children` has that parent and name. A node without parent is the root or unlinked.
"""

import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import trio

from fusecache.engine.namespace.events import Events
from fusecache.engine.namespace.nodes import FileVersion, Kind, Node, in_use
from fusecache.model.errors import FusecacheError, NotFound
from fusecache.model.names import check_key
from fusecache.model.objects import ObjectId, ObjectInfo
from fusecache.model.predecessor import Predecessor
from fusecache.model.records import PosixAttributes

ROOT = 1
# Lower numbers are the control directory's fixed inodes.
FIRST_FREE = 16
# A daemon that takes over a mount does not use the numbers of those before it. Each has as many.
_NUMBERS_OF_START = 1 << 36
# How long a finished deletion is remembered, for listings that started before it. No listing takes longer.
_TOMBSTONE_SECONDS = 600.0
# With more tombstones than this, the old ones are purged.
_TOMBSTONES_KEPT = 1000


# User id and group id of a process.
User = tuple[int, int]
ROOT_USER: User = (0, 0)


@dataclass(frozen=True, slots=True)
class Ownership:
    """Attributes for objects without metadata: owner, and the umask applied to 0666 and 0777.

    is_told: whether uid and gid in an object's metadata are used. is_fixed: files of all makers have this owner.
    """

    uid: int
    gid: int
    umask: int
    is_told: bool = False
    is_fixed: bool = False


@dataclass(slots=True)
class _Tombstone:
    pending: int = 0
    gone: float = float("-inf")


class Tree:
    """Nodes by inode number and by name."""

    def __init__(
        self,
        prefix: str,
        ownership: Ownership,
        events: Events,
        predecessor: Predecessor | None = None,
        kept_attributes: Callable[[str], PosixAttributes | None] = lambda _: None,
    ) -> None:
        """predecessor: the daemon before, if any; inode numbers of its time are not used again.

        kept_attributes: mode and owner that this node keeps of the directory with a key; None for the defaults.
        """
        self._prefix = prefix
        self.ownership = ownership
        self.kept_attributes = kept_attributes
        self.numbers_used = 0 if predecessor is None else predecessor.start * _NUMBERS_OF_START
        # When the first daemon of the mount began to serve.
        self.began_ns = time.time_ns() if predecessor is None else predecessor.began_ns
        self._next = FIRST_FREE + self.numbers_used
        self._tombstones: dict[str, _Tombstone] = {}
        self.root = Node(
            ROOT,
            Kind.DIRECTORY,
            "",
            None,
            0o777 & ~ownership.umask,
            ownership.uid,
            ownership.gid,
            self.began_ns,
            lookups=1,
        )
        # In the order in which `oldest` cycles through them.
        self.nodes: OrderedDict[int, Node] = OrderedDict({ROOT: self.root})
        # Open files without a name, by the version that the bucket has of them.
        self._nameless: dict[ObjectId, Node] = {}
        # Callers that await an answer while nodes must stay; nodes to release when the last of them is done.
        self._freezes = 0
        self._unneeded: list[Node] = []
        self._events = events

    def now(self) -> float:
        """The loop's time, which listings and tombstones are compared with."""
        return trio.current_time()

    # ---- names and keys

    def key(self, node: Node) -> str:
        """Return the node's key. A directory's key ends with '/'; the root's is the mount's prefix.

        Raises NotFound for a node that was unlinked, or lies in a directory that was.
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
        """Return the key of a path below the mountpoint; for "" it is the mount's prefix."""
        return self._prefix + path

    def relative(self, key: str) -> str:
        """Return a key without the mount's prefix."""
        return key[len(self._prefix) :]

    def find(self, key: str) -> Node | None:
        """Return the node in memory with that key, or None."""
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
        """Return whether the node is reachable from the root."""
        while node.parent is not None:
            node = node.parent
        return node is self.root

    def walk(self, node: Node) -> Iterator[Node]:
        """Yield the nodes in memory at and below `node`, parents first."""
        yield node
        for child in list(node.children.values()):
            yield from self.walk(child)

    # ---- create, move, remove

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
        """Create a child. Without attributes it gets those kept for a directory, or the mount's defaults.

        number: its inode number. 0, or a number in use, means a new one.
        """
        if attributes is None and kind is Kind.DIRECTORY:
            attributes = self.directory_attributes(self.child_key(parent, name, directory=True), time.time())
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
        self._link(node, parent, name)
        return node

    def make_nameless(
        self, number: int, name: str, attributes: PosixAttributes, shown: ObjectInfo | None, *, is_local: bool
    ) -> Node:
        """Make the node of a file that is open, and has lost its name.

        shown: the version that the bucket shows; is_local: this node has newer content.
        """
        node = Node(
            number, Kind.FILE, name, None, attributes.mode, attributes.uid, attributes.gid,
            attributes.mtime_ns, object=shown,
        )  # fmt: skip
        self.nodes[number] = node
        if shown is not None and not is_local:
            self._nameless[shown.object_id] = node
        return node

    def nameless_reader(self, *objects: ObjectId) -> Node | None:
        """Return the node of an open file that lost its name, and whose content is one of these objects; None: none."""
        for node in filter(None, map(self._nameless.get, objects)):
            if node.parent is None and node.handles and node.version is None:
                return node
        return None

    def renumber(self, node: Node, number: int) -> None:
        """Give a node the number by which the kernel knows it, before anything else has heard of its own."""
        del self.nodes[node.number]
        node.number = number
        self.nodes[number] = node

    def default_attributes(self, kind: Kind, modified: float) -> PosixAttributes:
        """Return the attributes of an object without metadata of its own. modified: seconds since 1970."""
        bits = 0o666 if kind is Kind.FILE else 0o777
        owner = self.ownership
        return PosixAttributes(bits & ~owner.umask, owner.uid, owner.gid, int(modified * 1e9))

    def directory_attributes(self, key: str, modified: float) -> PosixAttributes:
        """Return mode and owner of the directory with a key, as this node keeps them, else the defaults.

        modified: its time, of which nothing is kept: seconds since 1970.
        """
        default = self.default_attributes(Kind.DIRECTORY, modified)
        kept = self.kept_attributes(key)
        if kept is None:
            return default
        if self.ownership.is_fixed:
            return replace(default, mode=kept.mode)
        return replace(kept, mtime_ns=default.mtime_ns)

    def give_to_maker(self, node: Node, maker: User) -> None:
        """Let a new file or directory belong to the user who made it, who could not write into it otherwise.

        Root's belong to the mount's owner, who could not read them otherwise.
        """
        if maker[0] and not self.ownership.is_fixed:
            node.uid, node.gid = maker

    def attach(self, node: Node, parent: Node, name: str) -> None:
        """Link a node without a name under a parent."""
        self._link(node, parent, name)
        self._events.on_node_moved(node)

    def _link(self, node: Node, parent: Node, name: str) -> None:
        if node.parent is not None or name in parent.children:
            raise ValueError(f"{name!r}: attached twice")
        node.parent, node.name = parent, name
        parent.children[name] = node
        self._add_local_refs(parent, node.local_refs)

    def detach(self, node: Node) -> None:
        """Unlink a node. It stays in memory while the kernel or a handle refers to it."""
        parent = node.parent
        if parent is None:
            return
        del parent.children[node.name]
        node.parent = None
        self._add_local_refs(parent, -node.local_refs)
        self._note_nameless(node)
        self._events.on_node_moved(node)
        self._release(node)
        self._release(parent)

    def move(self, node: Node, parent: Node, name: str) -> None:
        """Move a node to another parent or name."""
        if parent.children.get(name, node) is not node:
            raise ValueError(f"{name!r}: the place is taken")
        old = node.parent
        if old is not None:
            del old.children[node.name]
            node.parent = None
            self._add_local_refs(old, -node.local_refs)
        self.attach(node, parent, name)

    def set_object(self, node: Node, shown: ObjectInfo | None) -> None:
        """The bucket shows this version under the node's name now, or will after a queued rename; None: nothing."""
        self._forget_nameless(node)
        node.object = shown
        self._note_nameless(node)
        self._events.on_content_changed(node)

    def set_version(self, node: Node, version: FileVersion | None) -> None:
        """The node has this local content now; None: the bucket's version is its content."""
        node.version = version
        self._events.on_content_changed(node)

    def set_cached(self, node: Node, generation: int) -> None:
        """The cache has the bytes of this published content now, or the bucket alone."""
        if node.staged == generation:
            node.staged = 0
            self._events.on_content_changed(node)

    def set_write_error(self, node: Node, error: FusecacheError | None) -> None:
        """Bytes that a program wrote are missing in the node's content: nothing written after them is published.

        None: the last program that wrote it has heard of that.
        """
        node.write_error = error
        self._events.on_content_changed(node)

    def on_failed(self, node: Node) -> None:
        """A write to the node's version failed."""
        self._events.on_content_changed(node)

    def hold_local(self, node: Node) -> None:
        """Make the node authoritative for its name until each call is undone by `release_local`."""
        self._add_local_refs(node, 1)

    def release_local(self, node: Node) -> None:
        """Undo one `hold_local`: the bucket now shows what the node says."""
        self._add_local_refs(node, -1)
        now = trio.current_time()
        step: Node | None = node
        while step is not None:
            step.verified = max(step.verified, now)
            step = step.parent
        self._release(node)

    def forget(self, number: int, lookups: int) -> None:
        """The kernel dropped that many lookup references."""
        node = self.nodes.get(number)
        if node is not None:
            node.lookups = max(0, node.lookups - lookups)
            self._release(node)

    @contextmanager
    def keep(self, node: Node, *, is_ahead: bool = False) -> Iterator[None]:
        """Keep a node in memory during the body. Drop it after that if the kernel forgot it during the body.

        is_ahead: also drop it if the kernel never looked it up.
        """
        is_dropped = is_ahead or node.lookups > 0
        try:
            with in_use(node):
                yield
        finally:
            if is_dropped:
                self.forget(node.number, 0)

    @contextmanager
    def freeze_forgets(self) -> Iterator[None]:
        """Drop no node while the context is open: the caller's knowledge is newer than an answer in flight."""
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
        """Return up to `count` nodes, least recently returned first; none while forgets are frozen."""
        if self._freezes:
            return []
        found = []
        for _ in range(min(count, len(self.nodes))):
            number = next(iter(self.nodes))
            self.nodes.move_to_end(number)
            found.append(self.nodes[number])
        return found

    def drop_recallable(self, node: Node) -> None:
        """Drop a file's node that can be re-instantiated, with its number, from a listing row."""
        parent = node.parent
        if parent is None or node.handles or node.local_refs or node.version is not None or node.children:
            raise ValueError(f"{node.name!r}: is in use")
        del parent.children[node.name]
        del self.nodes[node.number]
        node.parent = None

    # ---- tombstones: keys that are about to be removed, or were just removed

    @property
    def hides_keys(self) -> bool:
        """Whether there is any tombstone."""
        return bool(self._tombstones)

    def add_tombstone(self, key: str) -> None:
        """A queued change will remove `key` from the bucket: listings that still show it are wrong."""
        self._tombstones.setdefault(key, _Tombstone()).pending += 1

    def clear_tombstone(self, key: str, *, gone: bool) -> None:
        """Undo one `add_tombstone`. gone: the bucket no longer shows the key."""
        tombstone = self._tombstones.get(key)
        if tombstone is None:
            return
        tombstone.pending -= 1
        now = trio.current_time()
        if gone:
            tombstone.gone = now
        elif tombstone.pending == 0 and tombstone.gone == float("-inf"):
            del self._tombstones[key]
        if len(self._tombstones) > _TOMBSTONES_KEPT:
            self._purge_tombstones(now)

    def on_shown(self, key: str) -> None:
        """The bucket shows the key again, so listings are right about it unless another change will remove it."""
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

    def _note_nameless(self, node: Node) -> None:
        if node.parent is None and node.handles and node.object is not None and node.version is None:
            self._nameless[node.object.object_id] = node

    def _forget_nameless(self, node: Node) -> None:
        if node.object is not None and self._nameless.get(node.object.object_id) is node:
            del self._nameless[node.object.object_id]

    def _add_local_refs(self, node: Node | None, count: int) -> None:
        while node is not None and count:
            node.local_refs += count
            node = node.parent

    def _release(self, node: Node) -> None:
        """Forget a node without references, and then its ancestors likewise."""
        if self._freezes:
            self._unneeded.append(node)
            return
        step: Node | None = node
        while step is not None and step is not self.root:
            if step.lookups or step.handles or step.local_refs or step.children or step.version is not None:
                return
            parent = step.parent
            self.nodes.pop(step.number, None)
            self._forget_nameless(step)
            self._events.on_node_dropped(step)
            if step.is_listed:
                self._events.on_listing_lost(step)
            if parent is not None:
                del parent.children[step.name]
                step.parent = None
            step = parent
