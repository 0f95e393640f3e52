"""Whose bytes are written to the cache's disk next, and whose are not written: a slow disk must not slow the reads.

A frame that was fetched is held until it is on the disk. Where the bucket gives more than the disk takes, all frames
would end up waiting for the disk, and readers for frames. So a few are written at a time, and of those that wait for
their turn one is given up whenever a reader's fetch finds no frame. It was served, and is fetched again another time.

Used on the loop. Invariant: what somebody asked for to be on the disk is never given up.
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import trio

from fusecache.engine.cache.chunks import Buffer
from fusecache.policy.cache.fetch_order import Cause

# As many saturate a local disk by direct I/O.
WRITES = 8
# A reader's fetch waits so long for the disk to take what waits already.
MAX_QUEUE_SECONDS = 0.25


class DiskWriteQueue:
    """Lets a few frames at a time be written; the others wait in the order in which they came.

    large_buffers: how many there are; those that are being written are at most half of them.
    """

    def __init__(self, large_buffers: int) -> None:
        self._slots = trio.Semaphore(max(1, min(WRITES, -(-large_buffers // 2))))
        # Frames that wait and may be given up, the oldest first.
        self._waiting: dict[Buffer, _Wait] = {}
        self._dropped = 0

    def __bool__(self) -> bool:
        """Say whether frames wait that may be given up."""
        return bool(self._waiting)

    @asynccontextmanager
    async def slot(self, buffer: Buffer, *, is_asked_for: bool) -> AsyncIterator[bool]:
        """Wait for the turn to write a part of a frame; False: the frame is wanted for other bytes, do not write it.

        is_asked_for: somebody wants these bytes to be on the disk. It is never False then.
        """
        with trio.CancelScope() as scope:
            if is_asked_for:
                await self._slots.acquire()
            else:
                await self._wait(buffer, scope)
        if scope.cancel_called:
            self._dropped -= 1
        if scope.cancelled_caught:  # else its turn had come just then
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
        """Have a frame that has waited long not be written, if a fetch of this cause may take it then.

        Its bytes stay until it is taken. Frames that have been read go first; read-ahead takes no others. small: the
        fetch fits a small frame; if no such one can go, a large one does.
        """
        if self._dropped:
            return  # one is about to be free
        long_ago = trio.current_time() - MAX_QUEUE_SECONDS
        tired = [
            (buffer.small is not small, not buffer.is_consumed, wait.since, wait)
            for buffer, wait in self._waiting.items()
            if wait.since <= long_ago
            and (small or not buffer.small)
            and (buffer.is_consumed or cause is Cause.DEMAND)
            and buffer.busy == len(wait.scopes)  # nothing else uses it
            and buffer.chunk is not None
            and not buffer.chunk.readers
        ]
        if tired:
            *_, wait = min(tired, key=lambda row: row[:3])
            self._dropped = len(wait.scopes)
            for scope in wait.scopes:
                scope.cancel()


@dataclass(eq=False, slots=True)
class _Wait:
    """Since when a frame waits, of the loop's clock, and how to end that for each part of it that was fetched."""

    since: float
    scopes: list[trio.CancelScope] = field(default_factory=list)
