"""Looks at the cache and the bucket by path: drops what is cached of it, checks what is cached, finds useless keys."""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

import trio

from fusecache.engine.cache.block_cache import BlockCache
from fusecache.engine.cache.maintenance import EvictResult
from fusecache.engine.namespace.nodes import Kind, Node
from fusecache.engine.namespace.tree import Tree
from fusecache.engine.runtime.metadata_client import MetadataClient
from fusecache.model.errors import NotPermitted
from fusecache.model.names import is_at_or_below
from fusecache.model.objects import ObjectId
from fusecache.policy.unusable_keys import UnusableKeys

# Named in answers; the rest is counted.
NAMED = 50
_NODES_BETWEEN_CHECKPOINTS = 1000


@dataclass(slots=True)
class ScrubProgress:
    """How far a check is, and what it has found."""

    blocks: int = 0
    bytes: int = 0
    damaged_files: int = 0
    damaged_bytes: int = 0
    damaged: list[str] = field(default_factory=list)
    keys: int = 0
    unusable_keys: int = 0
    unusable: list[dict[str, str]] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        """Return it as plain values of bounded size."""
        return {
            "blocks": self.blocks,
            "bytes": self.bytes,
            "damaged_files": self.damaged_files,
            "damaged_bytes": self.damaged_bytes,
            "damaged": list(self.damaged),
            "keys": self.keys,
            "unusable_keys": self.unusable_keys,
            "unusable": list(self.unusable),
        }


class Inspector:
    """Carries out `evict` and `check`. `resolve` finds the node of a path, or raises NotFound."""

    def __init__(
        self,
        tree: Tree,
        metadata_client: MetadataClient,
        cache: BlockCache,
        resolve: Callable[[str], Awaitable[Node]],
    ) -> None:
        self._tree = tree
        self._metadata_client = metadata_client
        self._cache = cache
        self._resolve = resolve
        self._checking = False
        # Has the kernel drop its pages of these inodes; set by who knows the kernel.
        self.drop_pages: Callable[[list[int]], Awaitable[None]] | None = None

    async def evict(self, paths: list[str]) -> EvictResult:
        """Drop what is cached of files and directories. Raises NotFound if a path is neither there nor cached.

        What an open file still needs of a version that the bucket no longer shows stays.
        """
        keys = [self._tree.key_of_path(path) for path in paths]
        dropped = await self._cache.maintenance.evict(
            lambda key: any(is_at_or_below(key, wanted) for wanted in keys), may_drop=self._may_drop
        )
        if not dropped.freed_bytes and not dropped.left_bytes:
            for path in paths:
                await self._resolve(path)
        await self._drop_pages(keys)
        return dropped

    def _may_drop(self, object_id: ObjectId) -> bool:
        if not self._cache.is_open(object_id):
            return True
        node = self._tree.find(object_id.key)
        return node is not None and node.object is not None and node.object.object_id == object_id

    async def _drop_pages(self, keys: list[str]) -> None:
        if self.drop_pages is None:
            return
        inodes: list[int] = []
        for key in keys:
            node = self._tree.find(key)
            for place, each in enumerate(self._tree.walk(node) if node is not None else ()):
                if place % _NODES_BETWEEN_CHECKPOINTS == 0:
                    await trio.lowlevel.checkpoint()
                # Pages of what is written here may be dirty: the kernel would wait for us to take them.
                if each.kind is Kind.FILE and each.lookups and each.version is None and not each.writers:
                    inodes.append(each.number)
                if len(inodes) >= _NODES_BETWEEN_CHECKPOINTS:
                    await self.drop_pages(inodes)
                    inodes = []
        await self.drop_pages(inodes)

    async def check(self, path: str, progress: ScrubProgress) -> None:
        """Verify the cached blocks at or below a path, then look for keys there that no path can name.

        progress: is kept up to date. Raises NotPermitted if a check is under way.
        """
        if self._checking:
            raise NotPermitted("another check is under way: wait for it")
        self._checking = True
        try:
            key = self._tree.key_of_path(path)
            damaged: set[str] = set()
            async with aclosing(
                self._cache.maintenance.scrub(lambda each: is_at_or_below(each, key))
            ) as pieces:
                async for piece in pieces:
                    progress.blocks += piece.blocks
                    progress.bytes += piece.bytes
                    progress.damaged_bytes += piece.damaged_bytes
                    damaged |= {self._tree.relative(object_id.key) for object_id in piece.damaged}
                    progress.damaged_files = len(damaged)
                    progress.damaged = sorted(damaged)[:NAMED]
            if not progress.blocks:
                await self._resolve(path)
            await self._look_for_unusable_keys(key, progress)
        finally:
            self._checking = False

    async def _look_for_unusable_keys(self, key: str, progress: ScrubProgress) -> None:
        unusable = UnusableKeys()
        async for listed in self._keys(key):
            progress.keys += 1
            for relative, why in unusable.see(self._tree.relative(listed)):
                progress.unusable_keys += 1
                if len(progress.unusable) < NAMED:
                    progress.unusable.append({"key": relative, "why": why})

    async def _keys(self, key: str) -> AsyncIterator[str]:
        store, prefix = self._metadata_client.store, key
        if key and not key.endswith("/"):
            # Asked for by itself: its siblings with a longer name may be many.
            for info in (await self._metadata_client.call(store.list_page, key, limit=1)).objects:
                if info.key == key:
                    yield key
            prefix = key + "/"
        token: str | None = None
        while True:
            page = await self._metadata_client.call(store.list_page, prefix, token=token)
            for info in page.objects:
                yield info.key
            token = page.next_token
            if token is None:
                return
