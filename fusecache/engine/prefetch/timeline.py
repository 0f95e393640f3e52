"""The merged plans of all jobs: when bytes of a file are read next, and what each job needs next.

A plan is stored as its columns, plus one that groups its extents by file: some 50 bytes an extent, and 70 a path
besides its characters. Nothing here awaits or decides. Times are in seconds of the loop's clock.

Invariants:
1. A wrong hint changes what is fetched and cached, never what a reader gets.
2. Memory is bounded by MOST_EXTENTS over all jobs, MOST_PLANS and MOST_JOBS.
3. The time that a read costs is bounded: of each plan at most some hundred extents are checked.
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

# At most some 150 bytes each, 200 MB in all: enough for an epoch of 10**6 shards.
MOST_EXTENTS = 1_000_000
# Memory that one extent of weight pays for: a path of some 90 characters.
_PATH_BYTES = 150
MOST_JOBS = 64
# Over all jobs, as each read checks all plans. The loader has some 6 at a time.
MOST_PLANS = 256
# Most rows of one file checked to find its next read, and most rows passed at once behind a job. A file has more only
# where it holds many small extents.
_ROWS_LOOKED_AT = 256
# Exact bytes are fetched 2 steps ahead of the step being read. Beyond that, whole files come first: they may hold the
# same bytes.
_NEAR_STEPS = 2
# The kernel reads at most 256 KiB around a sample. A larger read is one of the file as a whole, as by a page warmer …
_AROUND_BYTES = 256 * 1024
# … except its last piece, which may hold a sample of any step. No job reads more than 20 steps ahead of its cursor. The
# loader sends the cursor 16 steps late, as the workers of a DataLoader read ahead.
_STEPS_AHEAD = 20
# The planned steps of the last 8 reads estimate the step of a job …
_READS = 8
# … that has sent no cursor for 5 s.
_QUIET_SECONDS = 5.0


@dataclass(eq=False, slots=True)
class PlanIndex:
    """One plan, indexed by path.

    rows: its extents grouped by path, in the order of the plan within a path; those of path p are
    rows[begins[p]:begins[p + 1]]. longest: the most steps from an extent's first read to its last. last: the step of
    the plan's last read. weight: its memory, in extents.
    Of exact plans only: by_start, as rows, but in the order of the first byte within a path; longest_bytes, of an
    extent.
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
        """Move the front past extents whose last read is before a step, at most _ROWS_LOOKED_AT of them."""
        plan, front = self.plan, self.front
        stop = min(len(plan), front + _ROWS_LOOKED_AT)
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

    def extents_of(self, path: str, step: int) -> Iterator[tuple[int, int, int, int]]:
        """Yield (first, last, start, stop) of a path's extents read from a step on, the first first, not always all."""
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
        """Yield the first steps of extents that hold any of bytes [start, stop) and are read from a step on.

        Not all of them if there are very many.
        """
        if not self.by_start:
            for first, _, begin, end in self.extents_of(path, step):
                if begin < stop and start < end:
                    yield first
            return
        # An exact plan has hundreds of small extents of a file, and each read of one calls this.
        plan, rows = self.plan, self.by_start
        low, high = self._positions_of(path)
        begin = bisect_left(rows, start, low, high, key=plan.start.__getitem__)
        for place in range(begin, min(high, begin + _ROWS_LOOKED_AT)):
            row = rows[place]
            if plan.start[row] >= stop:
                break
            if plan.first[row] + plan.span[row] >= step:
                yield plan.first[row]
        # Extents that begin before these bytes: the nearest first, as most extents have a similar length.
        for place in range(begin - 1, max(low, begin - _ROWS_LOOKED_AT) - 1, -1):
            row = rows[place]
            if plan.start[row] + self.longest_bytes <= start:
                break
            if plan.start[row] + plan.length[row] > start and plan.first[row] + plan.span[row] >= step:
                yield plan.first[row]


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
    window = PlanIndex(plan, rows, begins, longest, last, weight)
    if plan.is_exact:
        for number in range(len(plan.paths)):
            of_path = rows[begins[number] : begins[number + 1]]
            window.by_start.extend(sorted(of_path, key=plan.start.__getitem__))
        window.longest_bytes = max(plan.length, default=0)
    return window


@dataclass(frozen=True, slots=True)
class PlannedRead:
    """An extent that a job will read: its plan, and its row there."""

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
        """Its size in bytes; `hints.TO_THE_END`: up to the end of the file."""
        return self.plan.plan.length[self.row]

    @property
    def begins_its_plan(self) -> bool:
        """Whether it belongs to the first step of its plan."""
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
    """One job. step: all steps before it are done. ahead: (first step, bytes) of prefetched extents after that step.

    last_message_at: when its last message came. For a job that has never sent a cursor, also when bytes of its plans
    were last read. last_cursor_at: when its last cursor came.
    bytes_per_second: the rate at which it consumes prefetched bytes. late: fetches that ended after their step began.
    skipped: files that do not exist or cannot be fetched; is_told: whether that was logged.
    ended_at: when its process ended.
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
        """Whether its process has ended. It gets no prefetch until a process sends a message under its name again."""
        return self.ended_at < math.inf

    @property
    def extents(self) -> int:
        """How many extents its plans have."""
        return sum(len(window.plan) for window in self.plans)

    @property
    def weight(self) -> int:
        """The memory of its plans, in extents."""
        return sum(window.weight for window in self.plans)

    def seconds_until(self, step: int) -> float:
        """Return in how many seconds a step begins, by the job's step rate; 0 for the present step."""
        return max(0, step - self.step) * self.pace.seconds

    def front(self, *, is_exact: bool) -> PlannedRead | None:
        """Return its next planned read that was not checked yet, of exact plans or of others; None if there is none.

        In a long plan behind the job's step, this may be an extent whose last step is over: skip it and call again.
        """
        for window in self.plans:
            plan = window.plan
            if plan.is_exact is not is_exact:
                continue
            # Skip extents behind the step: their readers have read them, or wait for them as demand.
            window.pass_by(self.step)
            if window.front < len(plan):
                use = PlannedRead(window, window.front)
                if not is_exact or window.is_near(use.first) or use.last < self.step:
                    return use
        return None

    def on_fetched(self, use: PlannedRead, nbytes: int) -> None:
        """A prefetch of `nbytes` for a planned read was started."""
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
        """The job is at a step; it may have gone back."""
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
    """The plans and steps of all jobs."""

    def __init__(self) -> None:
        self.jobs: dict[str, Job] = {}
        self.forgotten = 0

    # ---- messages of jobs

    def add(self, name: str, plan: PlanIndex, now: float) -> Job:
        """Add a job's plan. Raises NotPermitted while there are too many extents, plans or jobs."""
        job = self.jobs.get(name)
        kept = [each for each in job.plans if each.plan.window < plan.plan.window] if job else []
        others = [each for other in self.jobs.values() if other is not job for each in other.plans]
        windows = [*others, *kept, plan]
        total = sum(each.weight for each in windows)
        if total > MOST_EXTENTS:
            raise NotPermitted(
                f"{name}: {total} extents, or paths of their size, are too many: all jobs together may have "
                f"{MOST_EXTENTS}; remove the hint files of jobs that ended"
            )
        if len(windows) > MOST_PLANS:
            raise NotPermitted(
                f"{name}: all jobs together may have {MOST_PLANS} plans; remove the hint files of jobs that ended"
            )
        if job is None:
            if len(self.jobs) >= MOST_JOBS:
                raise NotPermitted(
                    f"{name}: all jobs together may be {MOST_JOBS}; remove the hint files of jobs that ended"
                )
            job = self.jobs[name] = Job(name, now, pace=StepRate(step=plan.plan.step, since=now))
            job.step = plan.plan.step
        job.last_message_at, job.ended_at = now, math.inf
        job.plans = [*kept, plan]
        job.is_told = False
        job.move(plan.plan.step, now)
        return job

    def move(self, name: str, step: int, now: float) -> bool:
        """Receive a job's cursor; False if it has no plan."""
        job = self.jobs.get(name)
        if job is None:
            return False
        job.last_message_at = job.last_cursor_at = now
        job.ended_at = math.inf
        job.reads.clear()
        job.move(step, now)
        return True

    def end(self, name: str, now: float) -> None:
        """A job's process has ended. Its plans still protect cached bytes from eviction: the job may be restarted."""
        job = self.jobs.get(name)
        if job is not None and not job.has_ended:
            job.ended_at = now

    def running(self) -> list[Job]:
        """Return the jobs that have not ended."""
        return [job for job in self.jobs.values() if not job.has_ended]

    def forget(self, name: str) -> bool:
        """Drop a job's plans; False if it has none."""
        return self.jobs.pop(name, None) is not None

    def forget_silent(self, now: float) -> list[str]:
        """Drop jobs without a sign of life for SILENT_SECONDS; return their names."""
        silent = [name for name, job in self.jobs.items() if now - job.last_message_at >= SILENT_SECONDS]
        for name in silent:
            del self.jobs[name]
        self.forgotten += len(silent)
        return silent

    # ---- queries

    def next_use(self, path: str, start: int, stop: int) -> float | None:
        """Return in how many seconds bytes [start, stop) of a file are read next, None if no plan has them."""
        uses = [
            job.seconds_until(first)
            for job in self.jobs.values()
            for window in job.plans
            for first in window.steps_of(path, job.step, start, stop)
        ]
        return min(uses, default=None)

    def exact_use(self, path: str, start: int, stop: int) -> tuple[Job, int] | None:
        """Return a job whose exact plan has any of these bytes, and the step of their read; None if there is none."""
        for job in self.running():
            for window in job.plans:
                if window.plan.is_exact:
                    step = min(window.steps_of(path, job.step, start, stop), default=None)
                    if step is not None:
                        return job, step
        return None

    def names(self, path: str) -> bool:
        """Return whether a running job has a file in its plans."""
        return any(
            next(window.extents_of(path, job.step), None) is not None
            for job in self.running()
            for window in job.plans
        )

    def long_use(self, path: str) -> tuple[Job, int] | None:
        """Return a job that reads a file now and in later steps, and the step before its own; None if none does."""
        for job in self.running():
            for window in job.plans:
                first, last, *_ = next(window.extents_of(path, job.step), (math.inf, 0))
                if first <= job.step + 1 < last:
                    return job, job.step - 1
        return None

    def on_read(self, path: str, offset: int, nbytes: int, now: float, *, has_waited: bool) -> bool:
        """Bytes of a file were read: a job that planned them and sends no cursor is alive, and may have moved.

        has_waited: for the bucket. Return whether a job has moved, or reads exact bytes of a further step.
        """
        has_moved = False
        for job in self.running():
            step = None
            for window in job.plans:
                # Of several extents in the same pages, the read is taken for the soonest.
                soonest = min(window.steps_of(path, job.step, offset, offset + nbytes), default=None)
                if soonest is None:
                    continue
                step = soonest if step is None else min(step, soonest)
                if window.plan.is_exact and window.on_read(soonest, nbytes, job.step):
                    has_moved = True
            if step is None:
                continue
            # Not for a job that has sent cursors: other readers of its files would keep it alive after a kill.
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
