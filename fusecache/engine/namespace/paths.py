"""Finds nodes by path, as queries and commands name them; the kernel names a parent and one name instead."""

from fusecache.engine.namespace.lookup import Lookup
from fusecache.engine.namespace.nodes import Kind, Node
from fusecache.engine.namespace.tree import Tree
from fusecache.engine.runtime.by_bucket import ByBucket
from fusecache.engine.runtime.metadata_client import SILENT_SECONDS, MetadataClient
from fusecache.model.errors import AccessDenied, CredentialsMissing, NotFound, Unavailable
from fusecache.model.names import unusable_name

# If the bucket was unresponsive at the last request, a query waits only this long for a sign that it is back.
_UNRESPONSIVE_WAIT_SECONDS = 2.0


class Paths:
    """Resolves paths below the mountpoint, one lookup for each name."""

    def __init__(self, tree: Tree, lookup: Lookup, clients: ByBucket[MetadataClient]) -> None:
        self._tree = tree
        self._lookup = lookup
        self._clients = clients

    async def lookup_path(self, path: str) -> Node:
        """Return the node at a path for a query, which does not wait for an unresponsive bucket.

        Raises NotFound. If only the bucket could tell, raises Unavailable after SILENT_SECONDS, or the error with which
        it rejects the keys.
        """
        timeout = _UNRESPONSIVE_WAIT_SECONDS if self._clients.of(path).is_unresponsive else SILENT_SECONDS
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
                with self._clients.of(path).deadline(timeout_seconds):
                    node = await self._lookup.lookup(node, part)
        except NotFound as exc:
            raise NotFound(f"{path}: no such file or directory") from exc
        finally:
            for each in held:
                each.handles -= 1
        return node
