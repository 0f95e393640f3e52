"""Which cached objects stay: those whose names match the option `pin`, until they are replaced or removed."""

import logging
from collections.abc import Callable

import trio

from fusecache.engine.cache import BlockCache
from fusecache.model.nouns import ObjectId
from fusecache.policy.names import covers

log = logging.getLogger(__name__)

# Versions that wait to be dropped: more at once are left to the eviction.
_QUEUE = 10_000


class Pins:
    """Tells the cache what is pinned, and drops pinned versions that the bucket no longer shows."""

    def __init__(self, cache: BlockCache, patterns: tuple[str, ...], relative: Callable[[str], str]) -> None:
        """relative: of a key, the path below the mountpoint."""
        self._cache = cache
        self._patterns = patterns
        self._relative = relative
        self._send, self._gone = trio.open_memory_channel[ObjectId](_QUEUE)
        if patterns:
            cache.pin(self._is_pinned)

    def note_gone(self, key: str, etag: str | None) -> None:
        """This node replaced, moved or removed a version: nobody will open it again."""
        if etag is not None and self._patterns and self._is_pinned(ObjectId(key, etag)):
            try:
                self._send.send_nowait(ObjectId(key, etag))
            except trio.WouldBlock:
                log.debug("a pinned version stays in the cache key=%s", key)

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Drop what is gone until cancelled."""
        task_status.started()
        async for object_id in self._gone:
            if not self._cache.is_open(object_id):
                await self._cache.forget(object_id)

    def _is_pinned(self, object_id: ObjectId) -> bool:
        return covers(self._patterns, self._relative(object_id.key))
