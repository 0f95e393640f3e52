"""The merged hints of all jobs: when the bytes of a file are read next, and what comes next in each job.

A plan is kept as its columns, with one more that groups its extents by file: some 50 bytes an extent, and 70 a path
besides its characters.
Nothing here awaits, and nothing here decides; times are those of the loop's clock, in seconds.

Invariants:
1. What is wrong in a hint changes what is fetched and kept, never what is read.
2. Memory is bounded: by MOST_EXTENTS over all jobs, MOST_WINDOWS, and MOST_JOBS.
3. So is the time that a read costs: of each window some hundred extents are looked at, whatever it says.
"""

import math
import sys
from array import array
from bisect import bisect_left
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from fusecache.model.errors import NotPermitted
from fusecache.model.hints import Plan
from fusecache.policy.cache.prefetch_horizon import SILENT_SECONDS, StepRate, observe_step, step_of_reads

# Some 150 bytes each at most: 200 MB, and an epoch of 10**6 shards.
MOST_EXTENTS = 1_000_000
# So much may the paths of a plan have for each extent: those of some 90 letters.
_PATH_BYTES = 150
MOST_JOBS = 64
# Over all jobs: each read asks them all. The loader has some 6 at a time.
MOST_PLANS = 256
# Rows of one file that are looked at to find its next use, or in one go to get past what lies behind a job; there are
# more of a file only where many small extents lie in it.
_ROWS_LOOKED_AT = 256
# Exact bytes are fetched so many steps ahead of what is being read: beyond that whole files come first, which may hold
# them.
_NEAR_STEPS = 2
# The kernel reads so much around a sample at most; who reads more reads the file, as does who brings it into pages …
_AROUND_BYTES = 256 * 1024
# … but for its last piece, which may hold a sample of any step: nobody reads so many steps ahead of where a job says
# that it is. The loader says so 16 steps late, as the workers of a DataLoader read ahead.
_STEPS_AHEAD = 20
# The steps of so many last reads say where a job is that does not say so itself …
_READS = 8
# … for this long.
_QUIET_SECONDS = 5.0


@dataclass(eq=False, slots=True)
class PlanIndex:
    """One plan, indexed. rows: its extents grouped by path, those of a path in the order of the plan; those of path p
    are rows[begins[p]:begins[p + 1]]. longest: the most steps from an extent's first use to its last; last: the step of
    the last use of all; weight: the extents whose memory it takes. Of exact plans: by_start, as rows, but those of a
    path in the order of their first bytes; longest_bytes, of an extent. front: the first extent, in the order of the
    plan, that nobody has fetched or found here yet. read_to: the latest step of which something was read. first_bytes,
    later_bytes: fetched for the plan's first step, and for others.
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
        """Let the front go past extents whose last use is before a step, so many of them as cost next to nothing."""
        plan, front = self.plan, self.front
        stop = min(len(plan), front + _ROWS_LOOKED_AT)
        while front < stop and plan.first[front] + plan.span[front] < step:
            front += 1
        self.front = front

    def is_near(self, step: int) -> bool:
        """Say whether a step is about to be read: one of the first, or of those behind what is being read."""
        return step <= max(self.read_to, self.plan.first[0]) + _NEAR_STEPS

    def on_read(self, soonest: int, nbytes: int, step: int) -> bool:
        """Bytes of a sample of step `soonest` were read, the job being at `step` at least; return whether it moves."""
        most = max(self.plan.first[0], step) + _STEPS_AHEAD
        if nbytes > self.longest_bytes + _AROUND_BYTES or not self.read_to < soonest <= most:
            return False
        self.read_to = soonest
        return True

    def _positions_of(self, path: str) -> tuple[int, int]:
        """Return where the extents of a path lie in `rows`, and in `by_start`: nowhere if it has none."""
        number = bisect_left(self.plan.paths, path)
        if number == len(self.plan.paths) or self.plan.paths[number] != path:
            return 0, 0
        return self.begins[number], self.begins[number + 1]

    def extents_of(self, path: str, step: int) -> Iterator[tuple[int, int, int, int]]:
        """Yield (first, last, start, stop) of what is read of a path from a step on, the first first, and not all."""
        plan = self.plan
        first, rows = plan.first, self.rows
        low, high = self._positions_of(path)
        if high - low > 8:
            low = bisect_left(rows, step - self.longest, low, high, key=first.__getitem__)
        for row in rows[low : min(high, low + _ROWS_LOOKED_AT)]:
            last = first[row] + plan.span[row]
            if last >= step:
                yield first[row], last, plan.start[row], plan.start[row] + plan.length[row]

    def steps_of(self, path: str, step: int, start: int, stop: int) -> Iterator[int]:
        """Yield the first steps of extents, read from a step on, that hold any of the bytes [start, stop); not all
        if there are very many.
        """
        if not self.by_start:
            for first, _, begin, end in self.extents_of(path, step):
                if begin < stop and start < end:
                    yield first
            return
        # An exact plan names hundreds of small extents of a file, and each read of one comes here.
        plan, rows = self.plan, self.by_start
        low, high = self._positions_of(path)
        begin = bisect_left(rows, start, low, high, key=plan.start.__getitem__)
        for place in range(begin, min(high, begin + _ROWS_LOOKED_AT)):
            row = rows[place]
            if plan.start[row] >= stop:
                break
            if plan.first[row] + plan.span[row] >= step:
                yield plan.first[row]
        # Those that begin before these bytes: the nearest first, as most are as short as the others.
        for place in range(begin - 1, max(low, begin - _ROWS_LOOKED_AT) - 1, -1):
            row = rows[place]
            if plan.start[row] + self.longest_bytes <= start:
                break
            if plan.start[row] + plan.length[row] > start and plan.first[row] + plan.span[row] >= step:
                yield plan.first[row]


def index_plan(plan: Plan) -> PlanIndex:
    """Return a plan as a window of the timeline. Takes 0.1 s for 10**5 extents: for a thread."""
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
    window = PlanIndex(plan, rows, begins, longest, last, weight)
    if plan.is_exact:
        for number in range(len(plan.paths)):
            of_path = rows[begins[number] : begins[number + 1]]
            window.by_start.extend(sorted(of_path, key=plan.start.__getitem__))
        window.longest_bytes = max(plan.length, default=0)
    return window


@dataclass(frozen=True, slots=True)
class PlannedRead:
    """An extent that a job reads: its window, and the number there."""

    plan: PlanIndex
    row: int

    @property
    def path(self) -> str:
        """The file, below the mountpoint."""
        return self.plan.plan.paths[self.plan.plan.path[self.row]]

    @property
    def start(self) -> int:
        """Its first byte."""
        return self.plan.plan.start[self.row]

    @property
    def length(self) -> int:
        """Its bytes, hint.TO_THE_END for all that the file has."""
        return self.plan.plan.length[self.row]

    @property
    def begins_its_plan(self) -> bool:
        """Whether it is of the first step of its plan."""
        return self.first == self.plan.plan.first[0]

    @property
    def first(self) -> int:
        """The step of its first read."""
        return self.plan.plan.first[self.row]

    @property
    def last(self) -> int:
        """The step of its last read."""
        return self.first + self.plan.plan.span[self.row]


@dataclass(eq=False, slots=True)
class Job:
    """One job. step: all before it are done. ahead: (first step, bytes) of what hints fetched, until that step.

    heard: when it last said something, or, of one that has never said where it is, when what it named was last read;
    said_at: when it last said where it is.
    bytes_per_second: what it consumes of what was fetched. late: fetches that ended after their step had begun.
    skipped: files that are not there, or cannot be fetched; is_told: whether that was logged.
    """

    name: str
    last_message_at: float
    plans: list[PlanIndex] = field(default_factory=list)
    step: int = 0
    last_cursor_at: float = -math.inf
    pace: StepRate = field(default_factory=StepRate)
    reads: deque[int] = field(default_factory=lambda: deque(maxlen=_READS))
    ahead: deque[tuple[int, int]] = field(default_factory=deque)
    ahead_bytes: int = 0
    consumed_bytes: int = 0
    bytes_per_second: float = 0.0
    fetched_bytes: int = 0
    hit_bytes: int = 0
    missed_bytes: int = 0
    late: int = 0
    skipped: int = 0
    is_told: bool = False
    ended_at: float = math.inf

    @property
    def has_ended(self) -> bool:
        """Whether the process that spoke for it is gone: it takes no share, until one of its name speaks again."""
        return self.ended_at < math.inf

    @property
    def extents(self) -> int:
        """How many extents it has named."""
        return sum(len(window.plan) for window in self.plans)

    @property
    def weight(self) -> int:
        """The extents whose memory its windows take."""
        return sum(window.weight for window in self.plans)

    def seconds_until(self, step: int) -> float:
        """Return how many seconds from now a step comes, by the job's pace; 0 for the present one."""
        return max(0, step - self.step) * self.pace.seconds

    def front(self, *, is_exact: bool) -> PlannedRead | None:
        """Return what it needs next of what nobody has looked at, of exact plans or of others; None: nothing.

        Of a long plan that lies behind it, that may be an extent whose last step is over: pass it, and ask again.
        """
        for window in self.plans:
            plan = window.plan
            if plan.is_exact is not is_exact:
                continue
            # Passed by: who reads it has read it, or waits for it himself.
            window.pass_by(self.step)
            if window.front < len(plan):
                use = PlannedRead(window, window.front)
                if not is_exact or window.is_near(use.first) or use.last < self.step:
                    return use
        return None

    def on_fetched(self, use: PlannedRead, nbytes: int) -> None:
        """So many bytes lie ahead of it by a hint, or are about to."""
        self.fetched_bytes += nbytes
        if use.begins_its_plan:
            use.plan.first_bytes += nbytes
        else:
            use.plan.later_bytes += nbytes
        if use.plan.plan.is_exact:
            return
        if use.first > self.step:
            self.ahead.append((use.first, nbytes))
            self.ahead_bytes += nbytes
        else:
            self.consumed_bytes += nbytes

    def move(self, step: int, now: float) -> None:
        """It has come to a step."""
        if step < self.step:
            for window in self.plans:
                window.front, window.read_to = 0, -1
            self.ahead.clear()
            self.ahead_bytes = 0
        while self.ahead and self.ahead[0][0] <= step:
            nbytes = self.ahead.popleft()[1]
            self.ahead_bytes -= nbytes
            self.consumed_bytes += nbytes
        self.step = step
        before, self.pace = self.pace, observe_step(self.pace, step, now)
        if self.pace.since > before.since:
            self.bytes_per_second = self.consumed_bytes / (self.pace.since - before.since)
            self.consumed_bytes = 0
        self.plans = [window for window in self.plans if window.last >= step]


class Timeline:
    """All jobs that have said what they will read."""

    def __init__(self) -> None:
        self.jobs: dict[str, Job] = {}
        self.forgotten = 0

    # ---- what jobs say

    def add(self, name: str, plan: PlanIndex, now: float) -> Job:
        """Take a job's plan. Raises NotPermitted for too many extents, windows, or jobs: until others end."""
        job = self.jobs.get(name)
        kept = [each for each in job.plans if each.plan.window < plan.plan.window] if job else []
        others = [each for other in self.jobs.values() if other is not job for each in other.plans]
        windows = [*others, *kept, plan]
        total = sum(each.weight for each in windows)
        if total > MOST_EXTENTS:
            raise NotPermitted(
                f"{total} extents, or paths of as many, are too many: all jobs together may name {MOST_EXTENTS}"
            )
        if len(windows) > MOST_PLANS:
            raise NotPermitted(f"all jobs together have {MOST_PLANS} windows at most")
        if job is None:
            if len(self.jobs) >= MOST_JOBS:
                raise NotPermitted(
                    f"all jobs together are {MOST_JOBS} at most: remove the hints of those that ended"
                )
            job = self.jobs[name] = Job(name, now, pace=StepRate(step=plan.plan.step, since=now))
            job.step = plan.plan.step
        job.last_message_at, job.ended_at = now, math.inf
        job.plans = [*kept, plan]
        job.is_told = False
        job.move(plan.plan.step, now)
        return job

    def move(self, name: str, step: int, now: float) -> bool:
        """Take a job's cursor; False if it has no plan."""
        job = self.jobs.get(name)
        if job is None:
            return False
        job.last_message_at = job.last_cursor_at = now
        job.ended_at = math.inf
        job.reads.clear()
        job.move(step, now)
        return True

    def end(self, name: str, now: float) -> None:
        """A job's process is gone. What it named is the last to go, still: it may be started again."""
        job = self.jobs.get(name)
        if job is not None and not job.has_ended:
            job.ended_at = now

    def running(self) -> list[Job]:
        """Return the jobs that have not ended."""
        return [job for job in self.jobs.values() if not job.has_ended]

    def forget(self, name: str) -> bool:
        """Drop what a job has said; False if it said nothing."""
        return self.jobs.pop(name, None) is not None

    def forget_silent(self, now: float) -> list[str]:
        """Drop the jobs of which nothing was heard for long; return their names."""
        silent = [name for name, job in self.jobs.items() if now - job.last_message_at >= SILENT_SECONDS]
        for name in silent:
            del self.jobs[name]
        self.forgotten += len(silent)
        return silent

    # ---- what is asked of it

    def next_use(self, path: str, start: int, stop: int) -> float | None:
        """Return in how many seconds bytes [start, stop) of a file are read next, None if nobody said so."""
        uses = [
            job.seconds_until(first)
            for job in self.jobs.values()
            for window in job.plans
            for first in window.steps_of(path, job.step, start, stop)
        ]
        return min(uses, default=None)

    def exact_use(self, path: str, start: int, stop: int) -> tuple[Job, int] | None:
        """Return the job, and its next step, for which any of these bytes were named exactly; None if they were not."""
        for job in self.running():
            for window in job.plans:
                if window.plan.is_exact:
                    step = min(window.steps_of(path, job.step, start, stop), default=None)
                    if step is not None:
                        return job, step
        return None

    def names(self, path: str) -> bool:
        """Say whether some job has said that it will read a file."""
        return any(
            next(window.extents_of(path, job.step), None) is not None
            for job in self.running()
            for window in job.plans
        )

    def long_use(self, path: str) -> tuple[Job, int] | None:
        """Return a job that reads a file now and for some steps to come, and the step before; None if none does."""
        for job in self.running():
            for window in job.plans:
                first, last, *_ = next(window.extents_of(path, job.step), (math.inf, 0))
                if first <= job.step + 1 < last:
                    return job, job.step - 1
        return None

    def on_read(self, path: str, offset: int, nbytes: int, now: float, *, has_waited: bool) -> bool:
        """Somebody reads bytes of a file: a job that named them, and does not say where it is, is alive and moves.

        has_waited: for the bucket. Return whether a job has moved, or reads the exact bytes of a further step.
        """
        has_moved = False
        for job in self.running():
            step = None
            for window in job.plans:
                # Of several, whose bytes lie in the same pages, the soonest is meant.
                soonest = min(window.steps_of(path, job.step, offset, offset + nbytes), default=None)
                if soonest is None:
                    continue
                step = soonest if step is None else min(step, soonest)
                if window.plan.is_exact and window.on_read(soonest, nbytes, job.step):
                    has_moved = True
            if step is None:
                continue
            # Others, who read the same files, would keep it when it was killed.
            if job.last_cursor_at == -math.inf:
                job.last_message_at = now
            if has_waited:
                job.missed_bytes += nbytes
            else:
                job.hit_bytes += nbytes
            if now - job.last_cursor_at < _QUIET_SECONDS:
                continue
            job.reads.append(max(step, job.step))
            if len(job.reads) == _READS and (at := step_of_reads(job.reads)) > job.step:
                job.move(at, now)
                has_moved = True
        return has_moved
