"""Publishes everything pending before the mount ends; gives up when nothing progresses, as only a person can help then.

It removes nothing: what is left stays in the journal for the next mount.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import trio

from fusecache.engine.durability.pending import Pending
from fusecache.engine.durability.sync import Durability, Sync
from fusecache.engine.publish.publishers import Publishers
from fusecache.engine.runtime.exception_groups import unwrap_single_error
from fusecache.engine.runtime.supervisor import Supervisor
from fusecache.engine.writeback.queue import WritebackQueue
from fusecache.model.format_text import changes_text, seconds_text

STALLED = "stalled"
_CHECK_SECONDS = 1.0


@dataclass(eq=False, repr=False)
class Drain:
    """Waits for the write-back queue to become empty while it progresses.

    directory: the cache directory, for the message. stall_seconds: how long nothing may progress.
    """

    _queue: WritebackQueue
    _publisher: Publishers
    _sync: Sync
    _pending: Callable[[], Pending]
    _directory: Path
    _supervisor: Supervisor
    stall_seconds: float = field(kw_only=True)

    async def run(self, timeout_seconds: float | None, *, until_empty: bool) -> Durability:
        """Publish without settle delay; return how that ended, with the result STALLED if nothing progressed.

        until_empty: also wait for changes that programs make in that time. Raises what keeps the journal from being
        written.
        """
        ended: Durability | None = None
        with self._publisher.draining(), unwrap_single_error():
            async with trio.open_nursery() as nursery:
                watch = partial(self._watch, nursery.cancel_scope)
                nursery.start_soon(self._supervisor.run, "drain-watch", watch, name="drain-watch")
                while ended is None or (until_empty and len(self._queue)):
                    ended = await self._sync.wait_durable("", timeout_seconds)
                nursery.cancel_scope.cancel()
                return ended
        return Durability(STALLED, self._stall_text())

    async def _watch(self, scope: trio.CancelScope) -> None:
        """Cancel the scope once nothing has progressed for a while."""
        since, success, least = trio.current_time(), self._publisher.last_success, self._left()
        while trio.current_time() < since + self.stall_seconds:
            await trio.sleep(min(_CHECK_SECONDS, self.stall_seconds))
            left = self._left()
            if self._publisher.last_success != success:
                success, least, since = self._publisher.last_success, left, trio.current_time()
            # Bytes of a request that is refused at its end, and then sent again, count once.
            elif left[0] < least[0] or left[1] < least[1]:
                least, since = (min(left[0], least[0]), min(left[1], least[1])), trio.current_time()
        scope.cancel()

    def _left(self) -> tuple[int, int]:
        return len(self._queue), self._pending().left_bytes

    def _stall_text(self) -> str:
        pending, failure = self._pending(), self._publisher.failure
        changes = changes_text(pending.files, pending.contents, pending.bytes)
        return (
            f"nothing was uploaded for {seconds_text(self.stall_seconds)}: {failure or 'the bucket does not answer'}; "
            f"{changes} stay in {self._directory}, and the next mount uploads them"
        )
