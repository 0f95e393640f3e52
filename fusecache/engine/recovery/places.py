"""Places in the tree for keys of the journal."""

from fusecache.engine.namespace.nodes import Kind, Node
from fusecache.engine.namespace.tree import Tree
from fusecache.model.records import PosixAttributes


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
