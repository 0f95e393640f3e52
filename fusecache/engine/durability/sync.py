"""Waits until the bucket has a set of queued changes: `sync`, and the barrier that remote fsync uses as well.

It sends nothing and speeds nothing up: the publisher works through the queue anyway.

Publishes everything pending before the mount ends; gives up when nothing progresses, as only a person can help then.

It removes nothing: what is left stays in the journal for the next mount.
"""

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import trio

from fusecache.engine.durability.status import Pending, QueueStatus
from fusecache.engine.namespace.nodes import FileVersion, QueuedChange
from fusecache.engine.namespace.tree import Tree
from fusecache.engine.publish.publisher import Publisher
from fusecache.engine.runtime.supervisor import Supervisor, unwrap_single_error
from fusecache.engine.writeback.queue import WritebackQueue
from fusecache.model.format_text import changes_text, count_text, seconds_text
from fusecache.model.records import ConflictRecord, FileState

# How long `sync` waits for the release of a closed file. The kernel sends it within milliseconds, unless another
# process holds the file.
_RELEASE_SECONDS = 1.0


class Barrier:
    """A set of queued changes; it is over when none of them, and no successor, is queued and not deferred.

    A change stays the same under another name and at another place of the queue. For content that newer content of its
    file replaced, the barrier waits for the successor.
    """

    def __init__(self, queue: WritebackQueue, publisher: Publisher, items: Iterable[QueuedChange]) -> None:
        self._queue = queue
        self._publisher = publisher
        self._left = deque(items)
        # Content that left the queue without being published.
        self.unpublished: list[FileVersion] = []

    def __len__(self) -> int:
        """Return how many changes were left at the last `is_over`."""
        return len(self._left)

    def is_over(self) -> bool:
        """Return whether nothing is left. The total cost is constant per change, however often this is called."""
        while self._left and (self._left[0] not in self._queue or self._publisher.is_deferred(self._left[0])):
            item = self._left.popleft()
            if isinstance(item, FileVersion) and item.state is not FileState.STORED:
                self.unpublished.append(item)
        if not self._left:
            successors = list(dict.fromkeys(map(latest_version, self.unpublished)))
            self._left.extend(each for each in successors if each in self._queue)
            self.unpublished = [each for each in successors if each not in self._queue]
        return not self._left


def latest_version(version: FileVersion) -> FileVersion:
    """Return the newest successor of a version; the version itself if nothing replaced it."""
    while version.successor is not None:
        version = version.successor
    return version


@dataclass(frozen=True, slots=True)
class Durability:
    """How `sync` ended: `durable`, `timeout`, `error` or `conflict`, and why."""

    result: str
    message: str = ""


class Sync:
    """Carries out `sync`: waits for what is at or below a path, and reports what it does not cover."""

    def __init__(self, tree: Tree, queue: WritebackQueue, publisher: Publisher, status: QueueStatus) -> None:
        self._tree = tree
        self._queue = queue
        self._publisher = publisher
        self._status = status

    async def wait_durable(self, path: str, timeout_seconds: float | None) -> Durability:
        """Return when the bucket has everything that was closed at or below a path before the call.

        That includes files renamed since. Deferred removals, and files still open, are named but not waited for.
        """
        key = self._tree.key_of_path(path)
        await self._wait_released(path)
        self._publisher.rejections.commit_markers.release()
        items = [item for item in await self._status.items_at(path) if not self._publisher.is_deferred(item)]
        # Rejected changes, too: a held commit marker is queued again when what it waits for is rejected no longer.
        barrier = Barrier(self._queue, self._publisher, [*items, *self._status.rejected_at(key)])
        with trio.move_on_after(float("inf") if timeout_seconds is None else timeout_seconds) as scope:
            while not barrier.is_over():
                await self._publisher.wait_progress()
        if scope.cancelled_caught:
            return Durability("timeout", await self._reason_for_waiting(path))
        all_rejected = set(self._publisher.rejections.rejected)
        rejected = [
            *self._status.rejected_at(key),
            *(item for item in barrier.unpublished if item in all_rejected),
        ]
        if rejected:
            return Durability("error", f"{self._status.path_of(rejected[0])}: {rejected[0].error}")
        # Also conflicts from before the call: the name does not show what was written here, and no person resolved it.
        conflicts = self._status.conflicts_at(key)
        if conflicts:
            conflicts.sort(key=lambda record: record.key)
            return Durability("conflict", self._conflicts_message(conflicts))
        return Durability("durable", await self._not_covered(path))

    async def _wait_released(self, path: str) -> None:
        """Wait for the releases of closes that returned: only these queue the content, also of pages written since."""
        with trio.move_on_after(_RELEASE_SECONDS):
            async with trio.open_nursery() as nursery:
                for handle in self._status.writers_at(path):
                    version = handle.node.version
                    # The daemon before may have seen the close.
                    if handle.is_flushed or (version is not None and version.state is FileState.FLUSHED):
                        nursery.start_soon(handle.released.wait, name="release")

    async def _not_covered(self, path: str) -> str:
        """Return a text on what `sync` does not cover: files still open, and deferred removals; "" if none."""
        still_open = [self._tree.path(node) for node in self._status.written_at(path)]
        deferred = [item for item in await self._status.items_at(path) if self._publisher.is_deferred(item)]
        removed = [self._status.path_of(item) for item in deferred]
        parts = []
        if still_open:
            parts.append(f"not covered, still open for writing: {', '.join(still_open[:3])}")
        if removed:
            parts.append(
                "not removed yet, because of delete_delay or a process on this node that has it open: "
                f"{', '.join(removed[:3])}"
            )
        return "; ".join(parts)

    async def _reason_for_waiting(self, path: str) -> str:
        if self._publisher.failure is not None:
            return str(self._publisher.failure)
        items = await self._status.items_at(path)
        temporary = next(filter(self._queue.is_temporary, items), None)
        if temporary is not None:
            return (
                f"{self._status.path_of(temporary)} has a temporary name: it is uploaded 60 s after its close"
            )
        return "uploads are still under way"

    def _conflicts_message(self, records: list[ConflictRecord]) -> str:
        text, more = self._conflict_message(records[0]), len(records) - 1
        if not more:
            return text
        names = ", ".join(self._tree.relative(each.key) for each in records[1:4]) + (
            ", …" if more > 3 else ""
        )
        return f"{text}; and {count_text(more, 'other')} ({names}): `fusecache recover` lists them"

    def _conflict_message(self, record: ConflictRecord) -> str:
        name = self._tree.relative(record.key)
        if not record.kept_as:
            return (
                f"{name}: another client changed it first; our change was dropped: repeat it, "
                f"or clear this entry with `fusecache recover --delete {record.number} --yes`"
            )
        kept = self._tree.relative(record.kept_as)
        if record.key.endswith("/"):
            return (
                f"{name}: one client made a file of this name, another a directory; the file is kept as {kept}: "
                "look at it, then remove or rename it"
            )
        return (
            f"{name}: another client changed it first; our version is kept as {kept}: "
            "compare them, then remove or rename the copy"
        )


STALLED = "stalled"
_CHECK_SECONDS = 1.0


@dataclass(eq=False, repr=False)
class Drain:
    """Waits for the write-back queue to become empty while it progresses.

    directory: the cache directory, for the message. stall_seconds: how long nothing may progress.
    """

    _queue: WritebackQueue
    _publisher: Publisher
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
                while ended is None or (until_empty and self._is_anything_due()):
                    ended = await self._sync.wait_durable("", timeout_seconds)
                nursery.cancel_scope.cancel()
                return ended
        return Durability(STALLED, self._stall_text())

    def _is_anything_due(self) -> bool:
        return any(not self._publisher.is_deferred(item) for item in self._queue.unordered())

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
