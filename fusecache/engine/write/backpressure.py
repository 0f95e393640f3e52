"""Back-pressure: delays closes while staging is nearly full, so that writers slow down to the bucket's pace.

Without it writers would run into ENOSPC. Only a close waits: the kernel holds no lock during a close, but it does
during a write.

Invariant: a close waits before it acknowledges anything. While it waits, its file holds no other change back, and its
sequence in the publish order is taken when the wait is over.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import trio

from fusecache.engine.cache.block_cache import BlockCache
from fusecache.engine.namespace.nodes import FileHandle, Node
from fusecache.engine.runtime.procfs import KILL_LOOK_SECONDS, KillDetector
from fusecache.engine.writeback.queue import WritebackQueue
from fusecache.policy.progress_timeout import STANDSTILL_SECONDS, ProgressTimeout
from fusecache.remote.store import Store, statistics_of

log = logging.getLogger(__name__)

# Each waiter is one of the 16 384 requests that a mount takes at once, and readers need some of these.
_WAITERS_MAX = 1024
# How many waiting closes `facts` names.
_NAMED_MAX = 50


@dataclass(frozen=True, eq=False, slots=True)
class _Waiter:
    """One close that waits. key: of its file. since: loop time."""

    handle: FileHandle
    key: str
    since: float


class Backpressure:
    """Delays closes while staging is above its high-water mark and uploads of their bucket make progress."""

    def __init__(self, cache: BlockCache, queue: WritebackQueue, store: Store) -> None:
        self._cache = cache
        self._queue = queue
        self._store = store
        self._watch = KillDetector()
        self._is_ending = False
        self._waiting: list[_Waiter] = []

    def end_waiting(self) -> None:
        """Let every close go on, now and from now on: the mount is about to end."""
        self._is_ending = True
        self._cache.announce_staging()

    def facts(self, path_of: Callable[[Node], str]) -> dict[str, Any]:
        """Return the closes that wait, longest first, and the high-water mark in bytes, as plain values."""
        now = trio.current_time()
        return {
            "files": len(self._waiting),
            "named": [
                {
                    "path": path_of(waiter.handle.node),
                    "process": waiter.handle.process,
                    "seconds": round(now - waiter.since, 1),
                }
                for waiter in self._waiting[:_NAMED_MAX]
            ],
            "high_water_bytes": self._cache.high_water_bytes(self._waiting[0].key if self._waiting else ""),
        }

    async def wait_for_space(self, handle: FileHandle) -> None:
        """Return when staging is below its high-water mark, or waiting is of no use.

        It is of no use in these cases:
        - No file of its bucket is queued for upload, or no upload there made progress for `STANDSTILL_SECONDS`.
        - The mount ends, or the writer is being killed.
        - `_WAITERS_MAX` other closes wait already.
        """
        version = handle.node.version
        key = "" if version is None else version.record.key
        if not self._is_high(key) or len(self._waiting) >= _WAITERS_MAX:
            return
        timeout = ProgressTimeout(trio.current_time())
        waiter = _Waiter(handle, key, trio.current_time())
        self._waiting.append(waiter)
        try:
            while self._is_high(key):
                now = trio.current_time()
                timeout.on_progress(statistics_of(self._store, key).bytes_written, now)
                if timeout.is_over(now):
                    log.warning(
                        "close goes on with staging nearly full no_upload_seconds=%.0f", STANDSTILL_SECONDS
                    )
                    return
                if handle.process and self._watch.is_dying(handle.process, now):
                    return
                with trio.move_on_after(KILL_LOOK_SECONDS):
                    await self._cache.staging_released()
        finally:
            self._waiting.remove(waiter)

    def _is_high(self, key: str) -> bool:
        # With no file queued for the bucket, waiting frees no space.
        is_of_use = bool(self._queue.contents.of(key)) and not self._is_ending
        return is_of_use and self._cache.is_staging_high(key)
