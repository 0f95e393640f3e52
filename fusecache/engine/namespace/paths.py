"""Finds nodes by path, as queries and commands name them; the kernel names a parent and one name instead.

Symlinks of the mount: which of them the kernel gets to follow.

A writer of the bucket chooses the targets. A link out of the mount would let him choose which files of this machine a
program on the mount reads and writes. Such a link is shown, and its readlink fails with EACCES. The kernel then fails
open, stat and chdir through it with EACCES, also for root. A plain file in its place would be worse: a copy would be
empty without an error, and an append would replace the link in the bucket.
"""

from dataclasses import dataclass

from fusecache.engine.namespace.lookup import Lookup
from fusecache.engine.namespace.nodes import Kind, Node
from fusecache.engine.namespace.tree import Tree
from fusecache.engine.runtime.metadata_client import SILENT_SECONDS, MetadataClient
from fusecache.model.errors import (
    AccessDenied,
    CredentialsMissing,
    LinkNotFollowed,
    NotFound,
    NotPermitted,
    Unavailable,
)
from fusecache.model.names import unusable_name
from fusecache.policy.name_patterns import SymlinkRule, is_followed

_REMEDY = "only --symlinks all follows it"


class Symlinks:
    """Answers readlink. A link is checked where it is now: a rename may change where it leads."""

    def __init__(self, tree: Tree, rule: SymlinkRule) -> None:
        self._tree = tree
        self._rule = rule

    @property
    def follows_all(self) -> bool:
        """Whether every link is followed."""
        return self._rule is SymlinkRule.ALL

    def read(self, node: Node) -> str:
        """Return the target that the kernel follows. Raises LinkNotFollowed."""
        # A removed link has no directory to go up from.
        is_shown = self._tree.is_linked(node)
        depth = self._depth(self._tree.key(node)) if is_shown else 0
        if not is_followed(self._rule, node.target, depth=depth):
            raise LinkNotFollowed(
                f"{self._tree.path(node)}: the symlink to {node.target!r} is not followed: {_REMEDY}"
            )
        return node.target

    def check_new(self, parent: Node, name: str, target: str) -> None:
        """Raise NotPermitted if a new link would not be followed."""
        key = self._tree.child_key(parent, name)
        if not self.follows(key, target):
            raise NotPermitted(
                f"{self._tree.relative(key)}: a symlink to {target!r} would not be followed: make it relative, to a "
                f"file of the mount (ln -sr); {_REMEDY}"
            )

    def follows(self, key: str, target: str) -> bool:
        """Return whether the link under a key is followed."""
        return is_followed(self._rule, target, depth=self._depth(key))

    def _depth(self, key: str) -> int:
        return self._tree.relative(key).count("/")


# If the bucket was unresponsive at the last request, a query waits only this long for a sign that it is back.
_UNRESPONSIVE_WAIT_SECONDS = 2.0


@dataclass(eq=False, repr=False)
class Paths:
    """Resolves paths below the mountpoint, one lookup for each name."""

    _tree: Tree
    _lookup: Lookup
    _client: MetadataClient

    async def lookup_path(self, path: str) -> Node:
        """Return the node at a path for a query, which does not wait for an unresponsive bucket.

        Raises NotFound. If only the bucket could tell, raises Unavailable after SILENT_SECONDS, or the error with which
        it rejects the keys.
        """
        timeout = _UNRESPONSIVE_WAIT_SECONDS if self._client.is_unresponsive else SILENT_SECONDS
        try:
            return await self.resolve(path, timeout_seconds=timeout)
        except (Unavailable, AccessDenied, CredentialsMissing) as exc:
            raise type(exc)(f"{path}: not known locally, and {exc}") from exc

    async def resolve(self, path: str, *, timeout_seconds: float = float("inf")) -> Node:
        """Return the node at a path below the mountpoint ("" is its root).

        Raises NotFound, or Unavailable if the bucket does not answer, or not within the timeout for each name.
        """
        node = self._tree.root
        held: list[Node] = []
        try:
            for part in filter(None, path.split("/")):
                if node.kind is not Kind.DIRECTORY:
                    raise NotFound(f"{path}: no such file or directory")
                # A child that is replaced would take a parent without handles out of memory with it.
                node.handles += 1
                held.append(node)
                if unusable_name(part) is not None:
                    raise NotFound(f"{path!r}: no such file or directory")
                with self._client.deadline(timeout_seconds):
                    node = await self._lookup.lookup(node, part)
        except NotFound as exc:
            raise NotFound(f"{path}: no such file or directory") from exc
        finally:
            for each in held:
                each.handles -= 1
        return node
