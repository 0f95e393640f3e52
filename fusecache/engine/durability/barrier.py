"""Waits for a set of queued changes to leave the write-back queue, whatever they are renamed to or replaced by."""

from collections import deque
from collections.abc import Iterable

from fusecache.engine.namespace.nodes import FileVersion, QueuedChange
from fusecache.engine.writeback.queue import WritebackQueue
from fusecache.model.states import FileState


class Barrier:
    """A set of queued changes; it is over when none of them, and no successor, is queued any more.

    A change stays the same under another name and at another place of the queue. For content that newer content of its
    file replaced, or whose close was revoked and repeated, the barrier waits for the successor.
    """

    def __init__(self, queue: WritebackQueue, items: Iterable[QueuedChange]) -> None:
        self._queue = queue
        self._left = deque(items)
        # Content that left the queue without being published.
        self.unpublished: list[FileVersion] = []

    def __len__(self) -> int:
        """Return how many changes were left at the last `is_over`."""
        return len(self._left)

    def is_over(self) -> bool:
        """Return whether nothing is left. The total cost is constant per change, however often this is called."""
        while self._left and self._left[0] not in self._queue:
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
