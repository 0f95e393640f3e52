"""The plans of one pass over a list of files: rows, how they are split into messages, and which the daemon has."""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from fusecache.model.hints import LONGEST_MESSAGE_BYTES, encode_plan
from loader.hints.plan_messages import EXTENT_BYTES, HEADER_BYTES

# A plan has at most so many files, or parts of files: a message of some MiB.
PLAN_EXTENTS = 1 << 14


class FileRow(NamedTuple):
    """Bytes of a file that one item stands for. path: below the root of its mount."""

    path: str
    start: int
    length: int
    step: int


@dataclass(eq=False, slots=True)
class MountPlans:
    """The plans of the present pass for one mount, in the order of their steps.

    sent: the daemon has them. unsent: it does not have them. window: the number of the next one to be sent.
    spoken_at: when the daemon last got a message, by the monotonic clock.
    """

    sent: deque[list[FileRow]] = field(default_factory=deque)
    unsent: deque[list[FileRow]] = field(default_factory=deque)
    window: int = 0
    spoken_at: float = 0.0

    def send_again(self) -> None:
        """The daemon has none of them: it was started again, or has forgotten the job."""
        self.unsent.extendleft(reversed(self.sent))
        self.sent.clear()
        self.window = 0

    def drop_before(self, step: int) -> None:
        """Drop plans all of whose items come before a step."""
        for plans in (self.sent, self.unsent):
            while plans and plans[0][-1].step < step:
                plans.popleft()


class RecentSteps:
    """The steps of the last parts of a pass, as many parts as have a number of samples together."""

    def __init__(self, samples: int) -> None:
        self._enough, self._samples = samples, 0
        self._parts: deque[tuple[int, int]] = deque()  # the first step of each, and its samples

    @property
    def first(self) -> int:
        """Return the first of them; 0 before the first part."""
        return self._parts[0][0] if self._parts else 0

    def add(self, step: int, samples: int) -> None:
        """Add a part that begins with a step."""
        if not samples:
            return
        self._parts.append((step, samples))
        self._samples += samples
        while self._samples - self._parts[0][1] >= self._enough:
            self._samples -= self._parts.popleft()[1]

    def clear(self) -> None:
        """Begin a pass."""
        self._parts.clear()
        self._samples = 0


def split_rows(rows: list[FileRow]) -> Iterator[list[FileRow]]:
    """Split rows into plans, each with at most PLAN_EXTENTS of them, and short enough for a message."""
    room, paths, first = 0, set[str](), 0
    for number, row in enumerate(rows):
        nbytes = EXTENT_BYTES + (0 if row.path in paths else len(row.path.encode()) + 1)
        if number and (room < nbytes or number - first == PLAN_EXTENTS):
            yield rows[first:number]
            first = number
        if number == first:
            room, paths = LONGEST_MESSAGE_BYTES - HEADER_BYTES, set()
            nbytes = EXTENT_BYTES + len(row.path.encode()) + 1
        room -= nbytes
        paths.add(row.path)
    yield rows[first:]


def plan_message(rows: list[FileRow], window: int, step: int) -> bytes:
    """Encode a plan. Raises HintError."""
    paths = sorted({row.path for row in rows})
    number = {path: place for place, path in enumerate(paths)}
    return encode_plan(
        window=window,
        step=step,
        paths=paths,
        path=[number[row.path] for row in rows],
        start=[row.start for row in rows],
        length=[row.length for row in rows],
        first=[row.step for row in rows],
        span=[0] * len(rows),
    )
