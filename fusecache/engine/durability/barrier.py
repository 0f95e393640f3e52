"""What somebody waits for: changes that the bucket is owed, under whatever name, whatever stands for them since."""

from collections import deque
from collections.abc import Iterable

from fusecache.engine.namespace.nodes import FileVersion, QueuedChange
from fusecache.engine.writeback.queue import WritebackQueue
from fusecache.model.states import FileState


class Barrier:
    """Is over when nothing of what it was given is owed any more.

    An item is the same under another name and in another place of the queue. Content that newer content of its file
    stood in for is waited for as that; so is content whose writer took the promise back and made it again.
    """

    def __init__(self, queue: WritebackQueue, items: Iterable[QueuedChange]) -> None:
        self._queue = queue
        self._left = deque(items)
        # Content that is not owed any more, and was not published either.
        self.unpublished: list[FileVersion] = []

    def __len__(self) -> int:
        """Return how much is left, or was when it was last looked at."""
        return len(self._left)

    def is_over(self) -> bool:
        """Look again; all in all this costs the same for each item, however often it is called."""
        while self._left and self._left[0] not in self._queue:
            item = self._left.popleft()
            if isinstance(item, FileVersion) and item.state is not FileState.STORED:
                self.unpublished.append(item)
        if not self._left:
            heirs = list(dict.fromkeys(map(latest_version, self.unpublished)))
            self._left.extend(each for each in heirs if each in self._queue)
            self.unpublished = [each for each in heirs if each not in self._queue]
        return not self._left


def latest_version(version: FileVersion) -> FileVersion:
    """Return the content that stands for this one since it was dropped: itself, if it was not."""
    while version.successor is not None:
        version = version.successor
    return version
