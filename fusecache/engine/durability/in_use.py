"""Which objects of the bucket this mount still needs: open files, and names with changes that are not published yet."""

from collections.abc import Iterator, Sequence

import trio

from fusecache.engine.namespace.nodes import Kind, Node
from fusecache.engine.namespace.tree import Tree
from fusecache.engine.writeback.queue import WritebackQueue

OPEN, PENDING = "is open on this node", "has a change that is not uploaded yet"
# Nodes or changes looked at between two checkpoints: a few milliseconds.
_BATCH = 5000


class KeysInUse:
    """Answers for keys, and for all keys below a prefix."""

    def __init__(self, tree: Tree, queue: WritebackQueue) -> None:
        self._tree = tree
        self._queue = queue

    async def find(self, keys: Sequence[str]) -> dict[str, str]:
        """Return which of these keys the mount needs, and why. An empty key, or one with '/' at its end, stands for all
        keys below it.
        """
        found = {key: f"it {why}" for key in keys if (why := self._reason(key))}
        folders = tuple(key for key in keys if not key or key.endswith("/"))
        if not folders:
            return found
        for index, needed in enumerate(self._all()):
            if needed is not None and needed[0].startswith(folders):
                found |= {each: " ".join(needed) for each in folders if needed[0].startswith(each)}
            if index % _BATCH == 0:
                await trio.lowlevel.checkpoint()
        return found

    def _reason(self, key: str) -> str:
        if self._queue.for_key(key):
            return PENDING
        node = self._tree.find(key)
        return "" if node is None else _reason_of(node)

    def _all(self) -> Iterator[tuple[str, str] | None]:
        """Yield each needed key and why; None for each node that is not."""
        for item in self._queue.unordered():
            yield from ((key, PENDING) for key in item.changed_keys())
        for node in list(self._tree.nodes.values()):
            why = _reason_of(node)
            yield (self._tree.key(node), why) if why and self._tree.is_linked(node) else None


def _reason_of(node: Node) -> str:
    if node.kind is not Kind.FILE:
        return ""  # a directory counts the changes of all files below it
    return OPEN if node.handles else PENDING if node.local_refs else ""
