"""Which requests of the kernel are taken, and whose handlers may begin. It decides, and does nothing.

All requests of a mount come through one queue of the kernel, in the order in which programs made them. A request that
waits in that queue costs nothing, but everything behind it waits too, so requests stay there only when memory ends:

- **Do not read**: as many requests wait as the daemon may hold, or their bytes are as many. The kernel keeps the rest.
- **Park**: as many handlers wait for one process as one process may have. Its next request that only reads is taken,
  and begins when one of these ends. Requests of other processes begin at once.
- **Begin**: all others. The daemon cannot tell before which of them need the bucket.
"""

from collections import OrderedDict
from typing import Generic, TypeVar

T = TypeVar("T")


class Admission(Generic[T]):
    """Counts the requests that wait. A process is a number; 0 is any that is not known, and has no limit of its own.

    may_take: whether the next request may be read. full: processes whose next request is parked.
    """

    def __init__(self, *, requests: int, request_bytes: int, largest: int, of_a_process: int) -> None:
        """Limits: of requests that wait, of their bytes, and of handlers that wait for one process.

        largest: bytes of the largest request. The next one may be as large.
        """
        self.may_take = True
        self.full: set[int] = set()
        self._requests_max, self._bytes_max, self._process_max = requests, request_bytes, of_a_process
        self._largest = largest
        self._requests = self._bytes = 0
        self._waiting: dict[int, int] = {}
        self._parked: dict[int, OrderedDict[int, T]] = {}

    def hold(self, size: int) -> None:
        """A request waits or is parked. size: its bytes, as far as they count."""
        self._requests += 1
        self._count(size)

    def let_go(self, size: int) -> None:
        """Such a request was answered."""
        self._requests -= 1
        self._count(-size)

    def _count(self, size: int) -> None:
        self._bytes += size
        # One request is always taken: else none could ever be.
        self.may_take = not self._requests or (
            self._requests < self._requests_max and self._bytes + self._largest <= self._bytes_max
        )

    def begin(self, process: int) -> None:
        """A handler waits for a process."""
        if process:
            count = self._waiting[process] = self._waiting.get(process, 0) + 1
            if count >= self._process_max:
                self.full.add(process)

    def park(self, process: int, unique: int, request: T) -> None:
        """A request of a process that is full was taken; `end` returns it when it may begin."""
        self._parked.setdefault(process, OrderedDict())[unique] = request

    def drop(self, process: int, unique: int) -> None:
        """A request that may be parked was answered without its handler."""
        if process in self._parked:
            self._parked[process].pop(unique, None)

    def end(self, process: int) -> T | None:
        """A handler that waited for a process has ended. Return its first parked request, which begins in its place."""
        if not process:
            return None
        parked = self._parked.get(process)
        if parked:
            return parked.popitem(last=False)[1]
        self._parked.pop(process, None)
        self.full.discard(process)
        self._waiting[process] -= 1
        if not self._waiting[process]:
            del self._waiting[process]
        return None

    def all_parked(self) -> list[T]:
        """Return the requests that are parked, and park none of them any more."""
        found = [request for parked in self._parked.values() for request in parked.values()]
        self._parked.clear()
        return found
