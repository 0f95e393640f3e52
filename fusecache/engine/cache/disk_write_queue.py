"""The queue of fetched buffers before the cache's disk. A slow disk must not slow down reads.

A fetched buffer is held until it is on disk. If the bucket is faster than the disk, all buffers would wait for the
disk, and readers for buffers. So only a few buffers are written at a time. When a fetch finds no buffer, one waiting
buffer is dropped from the queue: its bytes are not stored, and a later read fetches them again.

Used on the trio loop. Invariant: bytes that a caller wants on disk (`must_store`) are never dropped.
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import trio

from fusecache.engine.cache.chunks import Buffer
from fusecache.policy.cache.fetch_order import Cause

# 8 writes in flight saturate a local disk by direct I/O.
WRITES = 8
# A buffer may be dropped only after it has waited for the disk this long.
MAX_QUEUE_SECONDS = 0.25


class DiskWriteQueue:
    """Lets a few buffers be written at a time. The others wait in order of arrival.

    large_buffers: their number. At most half of them are written at a time.
    """

    def __init__(self, large_buffers: int) -> None:
        self._slots = trio.Semaphore(max(1, min(WRITES, -(-large_buffers // 2))))
        # Waiting buffers that may be dropped, the oldest first.
        self._waiting: dict[Buffer, _Wait] = {}
        self._dropped = 0

    def __bool__(self) -> bool:
        """Return whether a waiting buffer may be dropped, now or later."""
        return bool(self._waiting)

    @asynccontextmanager
    async def slot(self, buffer: Buffer, *, must_store: bool) -> AsyncIterator[bool]:
        """Wait for a slot to write a part of a buffer. Yields False if the buffer was dropped: do not write it.

        must_store: a caller wants these bytes on disk. It never yields False then.
        """
        with trio.CancelScope() as scope:
            if must_store:
                await self._slots.acquire()
            else:
                await self._wait(buffer, scope)
        if scope.cancel_called:
            self._dropped -= 1
        if scope.cancelled_caught:  # else the slot was granted just before the drop
            yield False
            return
        try:
            yield True
        finally:
            self._slots.release()

    async def _wait(self, buffer: Buffer, scope: trio.CancelScope) -> None:
        wait = self._waiting.setdefault(buffer, _Wait(trio.current_time()))
        wait.scopes.append(scope)
        try:
            await self._slots.acquire()
        finally:
            wait.scopes.remove(scope)
            if not wait.scopes:
                del self._waiting[buffer]

    def drop_oldest(self, *, small: bool, cause: Cause) -> None:
        """Drop the oldest buffer that has waited MAX_QUEUE_SECONDS, if a fetch of this cause may take it.

        Its bytes stay in memory until it is taken. Consumed buffers go first; only demand may take unread ones. small:
        the fetch fits a small buffer; if no small one may go, a large one does.
        """
        if self._dropped:
            return  # an earlier drop is about to free a buffer
        waiting_before = trio.current_time() - MAX_QUEUE_SECONDS
        droppable = [
            (buffer.small is not small, not buffer.is_consumed, wait.since, wait)
            for buffer, wait in self._waiting.items()
            if wait.since <= waiting_before
            and (small or not buffer.small)
            and (buffer.is_consumed or cause is Cause.DEMAND)
            and buffer.busy == len(wait.scopes)  # no thread uses it otherwise
            and buffer.chunk is not None
            and not buffer.chunk.readers
        ]
        if droppable:
            *_, wait = min(droppable, key=lambda row: row[:3])
            self._dropped = len(wait.scopes)
            for scope in wait.scopes:
                scope.cancel()


@dataclass(eq=False, slots=True)
class _Wait:
    """The wait of a buffer. since: in seconds of the loop's clock; scopes: cancel the wait of each fetched part."""

    since: float
    scopes: list[trio.CancelScope] = field(default_factory=list)
