"""Places in the tree for keys of the journal, and the open files that have none."""

from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from fusecache.engine.namespace.nodes import Kind, Node, in_use
from fusecache.engine.namespace.tree import Tree
from fusecache.model.objects import ObjectId
from fusecache.model.predecessor import KeptNode, Predecessor
from fusecache.model.records import PosixAttributes

if TYPE_CHECKING:
    from collections.abc import Iterator


@dataclass(slots=True)
class NamelessFiles:
    """Files that programs have open although their names are gone. Queued changes may still concern their objects.

    by_object: by the version that the bucket has of each.
    """

    by_object: dict[ObjectId, Node] = field(default_factory=dict)
    _generations: dict[Node, int] = field(default_factory=dict)

    @classmethod
    @contextmanager
    def of(cls, left: Predecessor | None, tree: Tree) -> "Iterator[NamelessFiles]":
        """Make their nodes, as the daemon before left them, and keep them while the tree is rebuilt."""
        found = cls()
        with ExitStack() as stack:
            for kept in [] if left is None else left.files:
                if not kept.parent and kept.object is not None:
                    node = make_nameless(kept, tree)
                    found.by_object[kept.object.object_id] = node
                    found._generations[node] = kept.generation
                    stack.enter_context(in_use(node))
            yield found

    def __contains__(self, node: Node | None) -> bool:
        return node in self._generations

    def has_other_content(self, node: Node | None, generation: int) -> bool:
        """Return whether a node is one of them, and content that came to its name later is not its own."""
        return node in self._generations and generation > self._generations[node]


def make_nameless(kept: KeptNode, tree: Tree) -> Node:
    """Make the node of a file that lost its name."""
    return tree.make_nameless(kept.number, kept.name, kept.attributes, kept.object)


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
