"""Slows closes down while staging is nearly full, so that writers go at the bucket's pace before they are refused.

A close may wait, as the kernel holds no lock meanwhile; a write may not. It waits before it promises anything: its file
holds nobody up meanwhile, and its place in the order is that of its end.
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
from fusecache.remote.store import Store

log = logging.getLogger(__name__)

# Each holds a task of the mount, of which there are 4 096, and readers need some.
_WAITERS_MAX = 1024
_NAMED = 50


@dataclass(frozen=True, eq=False, slots=True)
class _Waiter:
    """One close that waits. since: on the loop's clock."""

    handle: FileHandle
    since: float


class Backpressure:
    """Holds closes back while uploads progress and staging is above its high-water mark."""

    def __init__(self, cache: BlockCache, queue: WritebackQueue, store: Store) -> None:
        self._cache = cache
        self._queue = queue
        self._store = store
        self._watch = KillDetector()
        self._is_ending = False
        self._waiting: list[_Waiter] = []

    def end_waiting(self) -> None:
        """The mount is about to end: no close waits any more."""
        self._is_ending = True
        self._cache.announce_staging()

    def facts(self, path_of: Callable[[Node], str]) -> dict[str, Any]:
        """Return who waits, the longest first, as plain values, and above how many staged bytes closes wait."""
        now = trio.current_time()
        return {
            "files": len(self._waiting),
            "named": [
                {
                    "path": path_of(waiter.handle.node),
                    "process": waiter.handle.process,
                    "seconds": round(now - waiter.since, 1),
                }
                for waiter in self._waiting[:_NAMED]
            ],
            "high_water_bytes": self._cache.high_water_bytes,
        }

    async def wait_for_space(self, handle: FileHandle) -> None:
        """Return when there is room below the mark, or nothing that would make some progresses."""
        if not self._is_high() or len(self._waiting) >= _WAITERS_MAX:
            return
        patience = ProgressTimeout(trio.current_time())
        waiter = _Waiter(handle, trio.current_time())
        self._waiting.append(waiter)
        try:
            while self._is_high():
                now = trio.current_time()
                patience.on_progress(self._store.statistics().bytes_written, now)
                if patience.is_over(now):
                    log.warning("closing without room: nothing was uploaded for %.0f s", STANDSTILL_SECONDS)
                    return
                if handle.process and self._watch.is_dying(handle.process, now):
                    return
                with trio.move_on_after(KILL_LOOK_SECONDS):
                    await self._cache.staging_released()
        finally:
            self._waiting.remove(waiter)

    def _is_high(self) -> bool:
        # With nothing on its way to the bucket, waiting makes no room.
        return self._cache.is_staging_high and self._queue.contents > 0 and not self._is_ending
