"""One plan of a job, indexed by path: which extents of a file are read, and at which steps.

A plan is stored as its columns, plus one that groups its extents by file: some 50 bytes an extent, and 70 a path
besides its characters. Nothing here awaits, and nothing here knows jobs or time.

Invariant: the time that a read costs is bounded. Of each plan at most some hundred extents are checked.
"""

import sys
from array import array
from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass, field

from fusecache.model.hints import Plan

# Memory that one extent of weight pays for: a path of some 90 characters.
_PATH_BYTES = 150
# Most rows of one file checked to find its next read, and most rows passed at once behind a job. A file has more only
# where it holds many small extents.
_MAX_ROWS_CHECKED = 256
# Exact bytes are fetched 2 steps ahead of the step being read. Beyond that, whole files come first: they may hold the
# same bytes.
_NEAR_STEPS = 2
# The kernel reads at most 256 KiB around a sample. A larger read is one of the file as a whole, as by a page warmer …
_AROUND_BYTES = 256 * 1024
# … except its last piece, which may hold a sample of any step. No job reads more than 20 steps ahead of its cursor. The
# loader sends the cursor 16 steps late, as the workers of a DataLoader read ahead.
_STEPS_AHEAD = 20


@dataclass(eq=False, slots=True)
class PlanIndex:
    """One plan, indexed by path.

    rows: its extents grouped by path, in the order of the plan within a path; those of path p are
    rows[begins[p]:begins[p + 1]]. longest: the most steps from an extent's first read to its last. last: the step of
    the plan's last read. weight: its memory, in extents.
    Of exact plans, and where a file has more rows than are checked: by_start, as rows, but in the order of the first
    byte within a path; longest_bytes, of an extent.
    front: the first extent, in the order of the plan, that was neither fetched nor found cached yet. read_to: the
    latest step of which bytes were read. first_bytes, later_bytes: fetched for the plan's first step, for its others.
    """

    plan: Plan
    rows: "array[int]"
    begins: "array[int]"
    longest: int
    last: int
    weight: int
    by_start: "array[int]" = field(default_factory=lambda: array("l"))
    longest_bytes: int = 0
    front: int = 0
    read_to: int = -1
    first_bytes: int = 0
    later_bytes: int = 0

    def pass_by(self, step: int) -> None:
        """Move the front past extents whose last read is before a step, at most _MAX_ROWS_CHECKED of them."""
        plan, front = self.plan, self.front
        stop = min(len(plan), front + _MAX_ROWS_CHECKED)
        while front < stop and plan.first[front] + plan.span[front] < step:
            front += 1
        self.front = front

    def is_near(self, step: int) -> bool:
        """Return whether a step is read soon: one of the first, or of the next after the latest step read."""
        return step <= max(self.read_to, self.plan.first[0]) + _NEAR_STEPS

    def on_read(self, soonest: int, nbytes: int, step: int) -> bool:
        """Bytes of step `soonest` were read while the job is at `step` or later. Return whether `read_to` moves."""
        most = max(self.plan.first[0], step) + _STEPS_AHEAD
        if nbytes > self.longest_bytes + _AROUND_BYTES or not self.read_to < soonest <= most:
            return False
        self.read_to = soonest
        return True

    def _positions_of(self, path: str) -> tuple[int, int]:
        """Return the bounds of a path's extents in `rows` and in `by_start`; (0, 0) if it has none."""
        number = bisect_left(self.plan.paths, path)
        if number == len(self.plan.paths) or self.plan.paths[number] != path:
            return 0, 0
        return self.begins[number], self.begins[number + 1]

    def extents_of(self, path: str, step: float) -> Iterator[tuple[int, int, int, int]]:
        """Yield (first, last, start, stop) of a path's extents read from a step on, the first first, not always all."""
        plan = self.plan
        first, rows = plan.first, self.rows
        low, high = self._positions_of(path)
        if high - low > 8:
            low = bisect_left(rows, step - self.longest, low, high, key=first.__getitem__)
        for row in rows[low : min(high, low + _MAX_ROWS_CHECKED)]:
            last = first[row] + plan.span[row]
            if last >= step:
                yield first[row], last, plan.start[row], plan.start[row] + plan.length[row]

    def steps_of(self, path: str, step: float, start: int, stop: int) -> Iterator[int]:
        """Yield the first steps of extents that hold any of bytes [start, stop) and are read from a step on.

        Not all of them if there are very many.
        """
        if not self.by_start:
            yield from self._soonest_of(path, step, start, stop)
            return
        # Such a plan has hundreds of small extents of a file, and each read of one calls this.
        plan, rows = self.plan, self.by_start
        low, high = self._positions_of(path)
        begin = bisect_left(rows, start, low, high, key=plan.start.__getitem__)
        for position in range(begin, min(high, begin + _MAX_ROWS_CHECKED)):
            row = rows[position]
            if plan.start[row] >= stop:
                break
            if plan.first[row] + plan.span[row] >= step:
                yield plan.first[row]
        else:  # more begin there than are checked: look among the soonest, too
            if begin + _MAX_ROWS_CHECKED < high:
                yield from self._soonest_of(path, step, start, stop)
        # Extents that begin before these bytes: the nearest first, as most extents have a similar length.
        for position in range(begin - 1, max(low, begin - _MAX_ROWS_CHECKED) - 1, -1):
            row = rows[position]
            if plan.start[row] + self.longest_bytes <= start:
                break
            if plan.start[row] + plan.length[row] > start and plan.first[row] + plan.span[row] >= step:
                yield plan.first[row]

    def _soonest_of(self, path: str, step: float, start: int, stop: int) -> Iterator[int]:
        """Yield the first steps of those extents among the path's soonest that hold any of bytes [start, stop)."""
        for first, _, begin, end in self.extents_of(path, step):
            if begin < stop and start < end:
                yield first


def index_plan(plan: Plan) -> PlanIndex:
    """Index a plan. Takes 0.1 s for 10**5 extents: call it in a thread."""
    counts = [0] * (len(plan.paths) + 1)
    for number in plan.path:
        counts[number + 1] += 1
    total = 0
    for number, count in enumerate(counts):
        total += count
        counts[number] = total
    begins = array("l", counts)
    rows = array("l", bytes(array("l").itemsize * len(plan)))
    for row, number in enumerate(plan.path):
        rows[counts[number]] = row
        counts[number] += 1
    longest = max(plan.span, default=0)
    last = max(map(int.__add__, plan.first, plan.span), default=0)
    weight = max(1, len(plan), len(plan.paths), sum(map(sys.getsizeof, plan.paths)) // _PATH_BYTES)
    index = PlanIndex(plan, rows, begins, longest, last, weight)
    if plan.is_exact or max(map(int.__sub__, begins[1:], begins), default=0) > _MAX_ROWS_CHECKED:
        for number in range(len(plan.paths)):
            of_path = rows[begins[number] : begins[number + 1]]
            index.by_start.extend(sorted(of_path, key=plan.start.__getitem__))
        index.longest_bytes = max(plan.length, default=0)
    return index


@dataclass(frozen=True, slots=True)
class PlannedRead:
    """An extent that a job will read: its plan, and its row there."""

    index: PlanIndex
    row: int

    @property
    def path(self) -> str:
        """The file, below the mountpoint."""
        return self.index.plan.paths[self.index.plan.path[self.row]]

    @property
    def start(self) -> int:
        """Its first byte."""
        return self.index.plan.start[self.row]

    @property
    def length(self) -> int:
        """Its size in bytes; `hints.TO_THE_END`: up to the end of the file."""
        return self.index.plan.length[self.row]

    @property
    def begins_its_plan(self) -> bool:
        """Whether it belongs to the first step of its plan."""
        return self.first == self.index.plan.first[0]

    @property
    def first(self) -> int:
        """The step of its first read."""
        return self.index.plan.first[self.row]

    @property
    def last(self) -> int:
        """The step of its last read."""
        return self.first + self.index.plan.span[self.row]
