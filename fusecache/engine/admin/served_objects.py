"""The mount's objects for another process that serves them: `fusecache serve`. Keys are the bucket's, with the prefix.

It shows what the bucket has: a file that waits for upload is no object yet.
"""

from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass

from fusecache.engine.cache.block_cache import BlockCache
from fusecache.engine.cache.pieces import Piece
from fusecache.engine.namespace.nodes import Kind
from fusecache.engine.namespace.paths import Paths
from fusecache.engine.namespace.tree import Tree
from fusecache.engine.runtime.metadata_client import MetadataClient
from fusecache.model.errors import NotFound, ObjectMissing, Unavailable
from fusecache.model.names import unusable_name
from fusecache.model.objects import Extent, ObjectId, ObjectInfo
from fusecache.remote.store import ListPage


@dataclass(eq=False, repr=False)
class ServedObjects:
    """Finds and lists objects, and holds pieces of them."""

    _tree: Tree
    _client: MetadataClient
    _paths: Paths
    _cache: BlockCache

    async def find(self, key: str) -> ObjectInfo:
        """Return the version of a key that the mount shows. Raises ObjectMissing; Unavailable if it is not uploaded."""
        # Without its empty names, a key that is no path would be another one.
        if not key.startswith(self._tree.key_of_path("")) or not self._is_path(key):
            raise ObjectMissing(f"{key}: no such object")
        try:
            node = await self._paths.lookup_path(self._tree.relative(key))
        except NotFound as exc:
            raise ObjectMissing(f"{key}: no such object") from exc
        if node.kind is Kind.DIRECTORY:  # the mount hides an object beside a directory of its name
            return await self._client.call(self._client.store.head, key)
        found = node.object
        if node.version is not None or found is None or found.key != key:
            raise Unavailable(
                f"{key}: the bucket does not have this file yet: read it through the mount, or try again"
            )
        return found

    async def list_page(
        self, prefix: str, *, delimiter: str, token: str | None, start_after: str, limit: int
    ) -> ListPage:
        """Return a page of the bucket's own listing, below the mount's prefix. Raises RemoteError.

        Keys that are no paths are left out, as `find` refuses them: a page may have fewer rows than `limit`.
        """
        own = self._tree.key_of_path("")
        if not prefix.startswith(own) and not own.startswith(prefix):
            return ListPage((), (), None)
        if len(prefix) < len(own) and delimiter and (rest := own[len(prefix) :]).count(delimiter):
            return ListPage((), (prefix + rest[: rest.index(delimiter) + len(delimiter)],), None)
        page = await self._client.call(
            self._client.store.list_page,
            max(prefix, own, key=len),
            delimiter=delimiter,
            token=token,
            start_after=start_after,
            limit=limit,
        )
        return ListPage(
            tuple(each for each in page.objects if self._is_path(each.key)),
            tuple(each for each in page.prefixes if self._is_path(each.removesuffix("/"))),
            page.next_token,
        )

    def _is_path(self, key: str) -> bool:
        """Return whether the mount can have a file with this key."""
        return not any(unusable_name(part) for part in self._tree.relative(key).split("/"))

    def hold(
        self, object_id: ObjectId, size: int, extent: Extent, *, is_doubted: bool, for_peer: bool
    ) -> AbstractAsyncContextManager[Piece]:
        """Hold a piece, as `HeldPieces.hold` does. Raises ObjectMissing for a key outside of the mount's prefix."""
        if not object_id.key.startswith(self._tree.key_of_path("")):
            raise ObjectMissing(f"{object_id.key}: no such object")
        return self._cache.pieces.hold(object_id, size, extent, is_doubted=is_doubted, for_peer=for_peer)
