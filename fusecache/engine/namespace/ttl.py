"""The TTL of what the bucket showed: how old an answer may be and still count as fresh."""

import trio

from fusecache.engine.namespace.nodes import Node
from fusecache.engine.namespace.tree import Tree
from fusecache.policy.name_patterns import is_immutable


class AttributeTtl:
    """Decides whether something is fresh enough to be used without a request.

    seconds: the TTL of mutable paths. immutable: patterns of paths that never change.
    """

    def __init__(self, tree: Tree, seconds: float) -> None:
        self._tree = tree
        self._seconds = seconds
        self.immutable: tuple[str, ...] = ()

    def seconds(self, node: Node) -> float:
        """The TTL of a node; inf if its path is immutable."""
        if self.immutable and is_immutable(self._tree.path(node), self.immutable):
            return float("inf")
        return self._seconds

    def seconds_below(self, directory: Node, name: str) -> float:
        """The TTL of a child by name; inf if its path is immutable."""
        if self.immutable:
            path = f"{self._tree.path(directory)}/{name}".removeprefix("./")
            if is_immutable(path, self.immutable):
                return float("inf")
        return self._seconds

    def is_node_fresh(self, child: Node) -> bool:
        """Return whether a node is within its TTL, or authoritative because of unpublished changes."""
        return child.local_refs > 0 or is_within(self.seconds(child), child.verified)

    def is_listing_fresh(self, directory: Node) -> bool:
        """Return whether the last complete listing of a directory is within its TTL."""
        return is_within(self.seconds(directory), directory.listing.finished)


def is_within(seconds: float, moment: float) -> bool:
    """Return whether loop time `moment` is at most `seconds` ago (inf: any time); -inf means never."""
    return moment > float("-inf") and trio.current_time() - moment <= seconds
