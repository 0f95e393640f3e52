"""Places in the tree for keys of the journal, and the open files that have none."""

from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

from fusecache.engine.namespace.nodes import Kind, Node, in_use
from fusecache.engine.namespace.tree import Tree
from fusecache.model.predecessor import KeptNode, Predecessor
from fusecache.model.records import PosixAttributes

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextmanager
def nameless_files(left: Predecessor | None, tree: Tree) -> "Iterator[None]":
    """Make the nodes of open files that have lost their names, and keep them while the tree is rebuilt around them."""
    kept = [] if left is None else [each for each in left.files if not each.parent]
    with ExitStack() as stack:
        for each in kept:
            stack.enter_context(in_use(make_nameless(each, tree)))
        yield


def make_nameless(kept: KeptNode, tree: Tree) -> Node:
    """Make the node of a file that lost its name."""
    return tree.make_nameless(
        kept.number, kept.name, kept.attributes, kept.object, is_local=kept.generation != 0
    )


def folder_of(tree: Tree, key: str) -> Node:
    """Return the directory that holds `key`; missing directories are made."""
    directory = tree.root
    for part in tree.relative(key).rstrip("/").split("/")[:-1]:
        child = directory.children.get(part)
        if child is None:
            child = tree.make(directory, part, Kind.DIRECTORY)
        directory = child
    return directory


def node_at(tree: Tree, key: str, kind: Kind, attributes: PosixAttributes | None) -> Node:
    """Return the node with a key and a kind, made if it is not there."""
    folder = folder_of(tree, key)
    name = key.rstrip("/").rpartition("/")[2]
    node = folder.children.get(name)
    if node is not None and node.kind is not kind:
        tree.detach(node)
        node, folder = None, folder_of(tree, key)  # the directory's node may have gone with its last child
    if node is None:
        node = tree.make(folder, name, kind, attributes=attributes)
    return node
