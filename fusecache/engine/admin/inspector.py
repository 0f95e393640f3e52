"""The commands `evict` and `check`: free and scrub cached blocks, find unusable keys and links."""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

import trio

from fusecache.engine.cache.block_cache import BlockCache
from fusecache.engine.cache.maintenance import EvictResult
from fusecache.engine.namespace.events import Events
from fusecache.engine.namespace.lister import PAGE_NAMES, file_row, with_metadata
from fusecache.engine.namespace.nodes import Kind, Node
from fusecache.engine.namespace.paths import Symlinks
from fusecache.engine.namespace.tree import Tree
from fusecache.engine.runtime.metadata_client import MetadataClient
from fusecache.index.listings import ListedEntry
from fusecache.model.errors import NotPermitted
from fusecache.model.names import is_at_or_below
from fusecache.model.objects import ObjectId, ObjectInfo, symlink_target
from fusecache.policy.name_patterns import UnusableKeys

# Names listed in an answer; the rest is only counted.
NAMED = 50
_NODES_BETWEEN_CHECKPOINTS = 1000


@dataclass(slots=True)
class ScrubProgress:
    """Progress and findings of one check."""

    blocks: int = 0
    bytes: int = 0
    damaged_files: int = 0
    damaged_bytes: int = 0
    damaged: list[str] = field(default_factory=list)
    keys: int = 0
    unusable_keys: int = 0
    unusable: list[dict[str, str]] = field(default_factory=list)
    unfollowed_links: int = 0
    unfollowed: list[dict[str, str]] = field(default_factory=list)

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
            "unfollowed_links": self.unfollowed_links,
            "unfollowed": list(self.unfollowed),
        }


@dataclass(eq=False, repr=False)
class Inspector:
    """Carries out `evict` and `check`. `resolve` finds the node of a path, or raises NotFound."""

    _tree: Tree
    _client: MetadataClient
    _cache: BlockCache
    _symlinks: Symlinks
    _resolve: Callable[[str], Awaitable[Node]]
    _events: Events
    _checking: bool = field(init=False, default=False)

    async def evict(self, paths: list[str]) -> EvictResult:
        """Evict the cached blocks of files and directories. Raises NotFound if a path neither exists nor is cached.

        Blocks stay if a file is open and the bucket no longer shows its version: they could not be fetched again.
        """
        keys = [self._tree.key_of_path(path) for path in paths]
        dropped = await self._cache.maintenance.evict(
            lambda key: any(is_at_or_below(key, wanted) for wanted in keys), may_drop=self._may_drop
        )
        if not dropped.freed_bytes and not dropped.left_bytes:
            for path in paths:
                await self._resolve(path)
        await self._announce(keys)
        return dropped

    def _may_drop(self, object_id: ObjectId) -> bool:
        if not self._cache.is_open(object_id):
            return True
        node = self._tree.find(object_id.key)
        return node is not None and node.object is not None and node.object.object_id == object_id

    async def _announce(self, keys: list[str]) -> None:
        inodes: list[int] = []
        for key in keys:
            node = self._tree.find(key)
            for count, each in enumerate(self._tree.walk(node) if node is not None else ()):
                if count % _NODES_BETWEEN_CHECKPOINTS == 0:
                    await trio.lowlevel.checkpoint()
                # Not files that are written here: dropping their dirty pages would wait for our own write handler.
                if each.kind is Kind.FILE and each.lookups and each.version is None and not each.writers:
                    inodes.append(each.number)
                if len(inodes) >= _NODES_BETWEEN_CHECKPOINTS:
                    await self._events.on_evicted(inodes)
                    inodes = []
        await self._events.on_evicted(inodes)

    async def check(self, path: str, progress: ScrubProgress) -> None:
        """Verify the cached blocks at or below a path. Then look for keys that no path names, and links not followed.

        progress: updated while it runs. Raises NotPermitted if another check is running.
        """
        if self._checking:
            raise NotPermitted("another check is running: wait for its end, then try again")
        self._checking = True
        try:
            key = self._tree.key_of_path(path)
            damaged: set[str] = set()
            async with aclosing(
                self._cache.maintenance.scrub(lambda each: is_at_or_below(each, key))
            ) as batches:
                async for batch in batches:
                    progress.blocks += batch.blocks
                    progress.bytes += batch.bytes
                    progress.damaged_bytes += batch.damaged_bytes
                    damaged |= {self._tree.relative(object_id.key) for object_id in batch.damaged}
                    progress.damaged_files = len(damaged)
                    progress.damaged = sorted(damaged)[:NAMED]
            if not progress.blocks:
                await self._resolve(path)
            await self._look_at_keys(key, progress)
        finally:
            self._checking = False

    async def _look_at_keys(self, key: str, progress: ScrubProgress) -> None:
        unusable = UnusableKeys()
        empty: list[ListedEntry] = []
        async for listed in _objects(self._client, key):
            progress.keys += 1
            relative_key = self._tree.relative(listed.key)
            for relative, why in unusable.see(relative_key, listed.size):
                progress.unusable_keys += 1
                if len(progress.unusable) < NAMED:
                    progress.unusable.append({"key": relative, "why": why})
            # Only a HEAD tells a symlink from an empty file.
            if not listed.size and not listed.key.endswith("/") and not self._symlinks.follows_all:
                empty.append(file_row(relative_key, listed))
            if len(empty) >= PAGE_NAMES:
                await self._look_at_links(empty, progress)
                empty = []
        await self._look_at_links(empty, progress)

    async def _look_at_links(self, empty: list[ListedEntry], progress: ScrubProgress) -> None:
        """Report the symlinks among empty objects that are not followed. Rows are named by their path."""
        prefix = self._tree.key_of_path("")
        for row in await with_metadata(self._client, prefix, empty, {}, of_all=False):
            target = symlink_target(row.metadata)
            if target and not self._symlinks.follows(prefix + row.name, target):
                progress.unfollowed_links += 1
                if len(progress.unfollowed) < NAMED:
                    progress.unfollowed.append({"path": row.name, "target": target})


async def _objects(client: MetadataClient, key: str) -> AsyncIterator[ObjectInfo]:
    prefix = key
    if key and not key.endswith("/"):
        # Its own LIST: very many siblings may share the key as a prefix.
        for info in (await client.call(client.store.list_page, key, limit=1)).objects:
            if info.key == key:
                yield info
        prefix = key + "/"
    async with aclosing(client.list_all(prefix)) as listed:
        async for info in listed:
            yield info
