"""How long what the bucket showed is believed."""

import trio

from fusecache.engine.namespace.nodes import Node
from fusecache.engine.namespace.tree import Tree
from fusecache.policy.name_patterns import is_immutable


class AttributeTtl:
    """Says what is recent enough to be shown without asking.

    seconds: how long what may change is believed. immutable: patterns of paths that never do.
    """

    def __init__(self, tree: Tree, seconds: float) -> None:
        self._tree = tree
        self._seconds = seconds
        self.immutable: tuple[str, ...] = ()

    def seconds(self, node: Node) -> float:
        """How long what is known of the node may be believed."""
        if self.immutable and is_immutable(self._tree.path(node), self.immutable):
            return float("inf")
        return self._seconds

    def seconds_below(self, directory: Node, name: str) -> float:
        """How long what is known of a child may be believed."""
        if self.immutable:
            path = f"{self._tree.path(directory)}/{name}".removeprefix("./")
            if is_immutable(path, self.immutable):
                return float("inf")
        return self._seconds

    def is_node_fresh(self, child: Node) -> bool:
        """Return whether what is known of a node is recent enough, or better than what the bucket shows."""
        return child.local_refs > 0 or is_within(self.seconds(child), child.verified)

    def is_listing_fresh(self, directory: Node) -> bool:
        """Return whether the last listing of a directory may be believed."""
        return is_within(self.seconds(directory), directory.listing.finished)


def is_within(seconds: float, moment: float) -> bool:
    """Return whether a moment of the loop's time is at most `seconds` (inf: any) ago; -inf was never."""
    return moment > float("-inf") and trio.current_time() - moment <= seconds
