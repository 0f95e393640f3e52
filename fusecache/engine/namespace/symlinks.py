"""Symlinks of the mount: which of them the kernel gets to follow.

A writer of the bucket chooses the targets. A link out of the mount would let him choose which files of this machine a
program on the mount reads and writes. Such a link is shown, and its readlink fails with EACCES. The kernel then fails
open, stat and chdir through it with EACCES, also for root. A plain file in its place would be worse: a copy would be
empty without an error, and an append would replace the link in the bucket.
"""

from fusecache.engine.namespace.nodes import Node
from fusecache.engine.namespace.tree import Tree
from fusecache.model.errors import LinkNotFollowed, NotPermitted
from fusecache.policy.symlink_targets import SymlinkRule, is_followed

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
