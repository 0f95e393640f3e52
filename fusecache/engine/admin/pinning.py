"""Keeps cached objects that match the option `pin` from eviction until they are replaced or removed.

Changes of this node arrive as events. Changes of other clients are found by a LIST every _CHECK_SECONDS.
"""

import logging
from collections import deque
from dataclasses import dataclass
from itertools import groupby

import trio

from fusecache.engine.cache.block_cache import BlockCache
from fusecache.engine.runtime.metadata_client import MetadataClient
from fusecache.engine.runtime.supervisor import TaskNursery
from fusecache.model.errors import FusecacheError
from fusecache.model.names import parent_prefix
from fusecache.model.objects import ObjectId
from fusecache.policy.name_patterns import PinnedKeys

log = logging.getLogger(__name__)

# Versions that wait to be forgotten; more than that are left to the next LIST.
_QUEUE_VERSIONS = 10_000
# Interval of the check for remote changes. It costs one LIST per thousand names of a directory with pinned objects.
_CHECK_SECONDS = 600.0


@dataclass(eq=False, repr=False)
class PinnedObjects:
    """Forgets pinned versions that the bucket no longer shows."""

    _cache: BlockCache
    _client: MetadataClient
    _pinned: PinnedKeys
    _tasks: TaskNursery

    def __post_init__(self) -> None:
        self._send, self._gone = trio.open_memory_channel[ObjectId](_QUEUE_VERSIONS)

    def on_gone(self, key: str, etag: str | None) -> None:
        """This node replaced, moved or removed a version: no process will open it again."""
        if etag is not None and self._pinned and key in self._pinned:
            try:
                self._send.send_nowait(ObjectId(key, etag))
            except trio.WouldBlock:
                log.debug("replaced pinned version stays cached until the next check key=%s", key)

    def start(self) -> None:
        """Start forgetting versions that are gone."""
        if self._pinned:
            self._tasks.keep({"pins": self._forget_gone, "pins-check": self._check_periodically})

    async def _forget_gone(self) -> None:
        async for object_id in self._gone:
            try:
                await self._forget(object_id)
            except FusecacheError as exc:
                log.debug("replaced pinned version stays cached until the next check error=%s", exc)

    async def _forget(self, object_id: ObjectId) -> None:
        if not self._cache.is_open(object_id):
            await self._cache.forget(object_id)

    async def _check_periodically(self) -> None:
        while True:
            await trio.sleep(_CHECK_SECONDS)
            try:
                await self._check()
            except FusecacheError as exc:
                log.debug("check of pinned objects failed, will retry error=%s", exc)

    async def _check(self) -> None:
        """Forget pinned versions that other clients replaced or removed. Raises what LIST raises."""
        found = await self._cache.maintenance.cached(self._pinned.__contains__)
        cached = sorted(found, key=lambda object_id: object_id.key)
        for folder, members in groupby(cached, key=lambda object_id: parent_prefix(object_id.key)):
            versions = list(members)
            shown = await self._shown(folder, [version.key for version in versions])
            for version in versions:
                if shown.get(version.key) != version.etag:
                    await self._forget(version)

    async def _shown(self, folder: str, keys: list[str]) -> dict[str, str]:
        """Return the ETags of those of `keys` (sorted) that the bucket shows; it may include others of their folder."""
        shown: dict[str, str] = {}
        client = self._client
        left = deque(keys)
        after = left[0][:-1]
        while left:
            page = await client.call(client.store.list_page, folder, start_after=after)
            shown.update((info.key, info.etag) for info in page.objects)
            if page.next_token is None or not page.objects:
                break
            last = page.objects[-1].key
            while left and left[0] <= last:
                left.popleft()
            after = max(last, left[0][:-1]) if left else ""
        return shown
