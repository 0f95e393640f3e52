"""The merged plans of all jobs: when bytes of a file are read next, and what each job needs next.

Nothing here awaits or decides. Times are in seconds of the loop's clock. Not here: the extents of one plan
(`plan_index`).

Invariants:
1. A wrong hint changes what is fetched and cached, never what a reader gets.
2. Memory is bounded by MOST_EXTENTS over all jobs, MOST_PLANS and MOST_JOBS. Plans behind a job make room for others.
3. The time that a read costs is bounded: by MOST_PLANS, and by the bounds of `plan_index`.
"""

import math
from bisect import bisect_left
from collections import deque
from dataclasses import dataclass, field

from fusecache.engine.prefetch.plan_index import PlanIndex, PlannedRead
from fusecache.model.errors import NotPermitted
from fusecache.policy.cache.prefetch_horizon import (
    NEAR_STEPS,
    SILENT_SECONDS,
    ReadSteps,
    StepRate,
    observe_step,
)

# At most some 150 bytes each, 200 MB in all: enough for an epoch of 10**6 shards.
MOST_EXTENTS = 1_000_000
MOST_JOBS = 64
# Over all jobs, as each read checks all plans. The loader has some 6 at a time.
MOST_PLANS = 256
# A job that sends no cursor may go back. So many plans behind it stay: each costs time on every read.
_PASSED_PLANS = 4
# The step of a job is estimated from its reads if it has sent no cursor for this long.
_QUIET_SECONDS = 5.0
# A job that sends no cursor is astray once this many bytes were prefetched for it, and this many bytes of other files
# were read since the last read of its own: it does not read in the planned order. Some seconds of a distant bucket.
ASTRAY_BYTES = 256 << 20
# The same before the first read of its own. A program may load a checkpoint first: 14 GB are 7 * 10**9 weights of 16
# bits. An order that never happens costs so many bytes, or fewer if its plans have fewer.
UNBEGUN_BYTES = 16 << 30


@dataclass(eq=False, slots=True)
class Job:
    """One job. step: all steps before it are done. ahead: (first step, bytes) of prefetched extents after that step.

    last_message_at: when its last message came. For a job that has never sent a cursor, also when bytes of its plans
    were last read or fetched. last_cursor_at: when its last cursor came.
    bytes_per_second: the rate at which it consumes prefetched bytes. late: fetches that ended after their step began.
    skipped: files that do not exist or cannot be fetched; skipped_path: the first of a plan, logged; "" while none is.
    has_begun: whether any of its files was read since it sent its first plan, or began again with a first plan.
    other_bytes: read of files that it does not name, since then, or since one was read that it names.
    ended_at: when its process ended.
    """

    name: str
    last_message_at: float
    plans: list[PlanIndex] = field(default_factory=list)
    step: int = 0
    last_cursor_at: float = -math.inf
    step_rate: StepRate = field(default_factory=StepRate)
    reads: ReadSteps = field(default_factory=ReadSteps)
    ahead: deque[tuple[int, int]] = field(default_factory=deque)
    ahead_bytes: int = 0
    consumed_bytes: int = 0
    bytes_per_second: float = 0.0
    fetched_bytes: int = 0
    hit_bytes: int = 0
    missed_bytes: int = 0
    late: int = 0
    skipped: int = 0
    skipped_path: str = ""
    has_begun: bool = False
    other_bytes: int = 0
    ended_at: float = math.inf

    @property
    def has_ended(self) -> bool:
        """Whether its process has ended. It gets no prefetch until a process sends a message under its name again."""
        return self.ended_at < math.inf

    @property
    def is_astray(self) -> bool:
        """Whether its order does not happen: all is read but what it names. It gets no prefetch until that is read."""
        return min(self.other_bytes, self.fetched_bytes) >= (
            ASTRAY_BYTES if self.has_begun else UNBEGUN_BYTES
        )

    @property
    def is_by_reads(self) -> bool:
        """Whether it has never said where it is, so that only its reads tell."""
        return self.last_cursor_at == -math.inf

    @property
    def extents(self) -> int:
        """How many extents its plans have."""
        return sum(len(index.plan) for index in self.plans)

    @property
    def weight(self) -> int:
        """The memory of its plans, in extents."""
        return sum(index.weight for index in self.plans)

    def seconds_until(self, step: int) -> float:
        """Return in how many seconds a step begins, by the job's step rate; 0 for the present step."""
        return max(0, step - self.step) * self.step_rate.seconds

    def front(self, *, is_exact: bool) -> PlannedRead | None:
        """Return its next planned read that was not checked yet, of exact plans or of others; None if there is none.

        In a long plan behind the job's step, this may be an extent whose last step is over: skip it and call again.
        """
        for index in self.plans:
            plan = index.plan
            if plan.is_exact is not is_exact or index.last < self.step:
                continue
            # Skip extents behind the step: their readers have read them, or wait for them as demand.
            index.pass_by(self.step)
            if index.front < len(plan):
                planned = PlannedRead(index, index.front)
                if not is_exact or index.is_near(planned.first) or planned.last < self.step:
                    return planned
        return None

    def on_fetched(self, planned: PlannedRead, nbytes: int, now: float) -> None:
        """A prefetch of `nbytes` for a planned read was started."""
        if self.is_by_reads:
            self.last_message_at = now
        self.fetched_bytes += nbytes
        if planned.begins_its_plan:
            planned.index.first_bytes += nbytes
        else:
            planned.index.later_bytes += nbytes
        if planned.index.plan.is_exact:
            return
        if planned.first > self.step:
            self.ahead.append((planned.first, nbytes))
            self.ahead_bytes += nbytes
        else:
            self.consumed_bytes += nbytes

    def move(self, step: int, now: float) -> None:
        """The job is at a step; it may have gone back."""
        if step < self.step:
            for index in self.plans:
                index.front, index.read_to = bisect_left(index.plan.first, step - index.longest), -1
            self.reads.clear()
            self.ahead.clear()
            self.ahead_bytes = 0
        while self.ahead and self.ahead[0][0] <= step:
            nbytes = self.ahead.popleft()[1]
            self.ahead_bytes -= nbytes
            self.consumed_bytes += nbytes
        self.step = step
        before, self.step_rate = self.step_rate, observe_step(self.step_rate, step, now)
        if self.step_rate.since > before.since:
            self.bytes_per_second = self.consumed_bytes / (self.step_rate.since - before.since)
            self.consumed_bytes = 0
        self.drop_passed(_PASSED_PLANS if self.is_by_reads else 0)

    def drop_passed(self, kept: int) -> None:
        """Drop the plans behind the step, but for the last few."""
        passed = [index for index in self.plans if index.last < self.step]
        dropped = passed[: max(0, len(passed) - kept)]
        self.plans = [index for index in self.plans if index not in dropped]

    def is_near(self, step: int) -> bool:
        """Return whether a step comes soon: few steps, or few extents, lie before it."""
        if step <= self.step + NEAR_STEPS:
            return True
        between = 0
        for index in self.plans:
            first = index.plan.first
            between += bisect_left(first, step) - bisect_left(first, self.step)
        return between <= NEAR_STEPS

    def move_by_read(self, ahead: int | None, behind: int | None, now: float) -> bool:
        """Bytes were read that a later step has, or one that is over, or both; return whether the job moves."""
        if ahead is not None and self.is_near(ahead):
            step = self.reads.add_near(self.step, max(ahead, self.step))
        else:
            step = self.reads.add_away(self.step, [each for each in (ahead, behind) if each is not None])
        if step == self.step:
            return False
        self.move(step, now)
        return True


class Timeline:
    """The plans and steps of all jobs."""

    def __init__(self) -> None:
        self.jobs: dict[str, Job] = {}

    # ---- messages of jobs

    def add(self, name: str, plan: PlanIndex, now: float) -> Job:
        """Add a job's plan. Raises NotPermitted while there are too many extents, plans or jobs.

        Jobs whose process has ended make room, the one first that ended first.
        """
        job = self.jobs.get(name)
        kept = [each for each in job.plans if each.plan.window < plan.plan.window] if job else []
        if self._excess(job, [*kept, plan]):
            for each in self.jobs.values():
                each.drop_passed(0)
            kept = [each for each in kept if job and each in job.plans]
        ended = [each for each in self.jobs.values() if each.has_ended and each is not job]
        ended.sort(key=lambda each: each.ended_at, reverse=True)
        while excess := self._excess(job, [*kept, plan]):
            if not ended:
                raise NotPermitted(f"{name}: {excess}; remove the hint files of jobs that need none any more")
            del self.jobs[ended.pop().name]
        if job is None:
            job = self.jobs[name] = Job(name, now, step_rate=StepRate(step=plan.plan.step, since=now))
            job.step = plan.plan.step
        job.last_message_at, job.ended_at = now, math.inf
        if not kept:
            job.has_begun, job.other_bytes = False, 0
        job.plans = [*kept, plan]
        job.skipped_path = ""
        has_said = plan.plan.step > job.step  # else it repeats the step that the daemon assumes
        job.move(plan.plan.step, now)
        if has_said:
            job.drop_passed(0)
        return job

    def _excess(self, job: Job | None, plans: list[PlanIndex]) -> str:
        """Return what would be too much if a job, None for a new one, had these plans; "" if nothing."""
        others = [each for other in self.jobs.values() if other is not job for each in other.plans]
        total = sum(each.weight for each in (*others, *plans))
        if total > MOST_EXTENTS:
            return f"{total} extents, or paths of their size, are too many: all jobs together may have {MOST_EXTENTS}"
        if len(others) + len(plans) > MOST_PLANS:
            return f"all jobs together may have {MOST_PLANS} plans"
        if job is None and len(self.jobs) >= MOST_JOBS:
            return f"all jobs together may be {MOST_JOBS}"
        return ""

    def move(self, name: str, step: int | None, now: float) -> bool:
        """Receive a job's cursor; False if it has no plan. step: None if its reads tell."""
        job = self.jobs.get(name)
        if job is None:
            return False
        job.last_message_at, job.ended_at = now, math.inf
        if step is not None:
            job.last_cursor_at = now
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
        return silent

    # ---- queries

    def next_use(self, path: str, start: int, stop: int) -> float | None:
        """Return in how many seconds bytes [start, stop) of a file are read next, None if no plan has them."""
        uses = [
            job.seconds_until(first)
            for job in self.jobs.values()
            for index in job.plans
            for first in index.steps_of(path, job.step, start, stop)
        ]
        return min(uses, default=None)

    def exact_use(self, path: str, start: int, stop: int) -> tuple[Job, int] | None:
        """Return a job whose exact plan has any of these bytes, and the step of their read; None if there is none."""
        for job in self.running():
            for index in job.plans:
                if index.plan.is_exact:
                    step = min(index.steps_of(path, job.step, start, stop), default=None)
                    if step is not None:
                        return job, step
        return None

    def names(self, path: str) -> bool:
        """Return whether a running job has a file in its plans."""
        return any(
            next(index.extents_of(path, job.step), None) is not None
            for job in self.running()
            for index in job.plans
        )

    def follows(self, path: str) -> bool:
        """Return whether a job that sends no cursor has a file in its plans: its reads tell its step."""
        return any(
            job.is_by_reads and next(index.extents_of(path, -math.inf), None) is not None
            for job in self.running()
            for index in job.plans
        )

    def long_use(self, path: str) -> tuple[Job, int] | None:
        """Return a job that reads a file now and in later steps, and the step before its own; None if none does."""
        for job in self.running():
            for index in job.plans:
                first, last, *_ = next(index.extents_of(path, job.step), (math.inf, 0))
                if first <= job.step + 1 < last:
                    return job, job.step - 1
        return None

    def on_read(self, path: str, offset: int, nbytes: int, now: float, *, has_waited: bool) -> bool:
        """Bytes of a file were read: a job that planned them and sends no cursor is alive, and may have moved.

        has_waited: for the bucket. Return whether a job has moved, or reads exact bytes of a further step.
        """
        has_moved = False
        for job in self.running():
            ahead, is_further = _step_read(job, path, offset, nbytes)
            behind = _step_behind(job, path, offset, nbytes, ahead)
            has_moved |= is_further
            if ahead is None and behind is None:
                if job.is_by_reads:
                    job.other_bytes += nbytes
                continue
            has_moved |= job.is_astray
            job.has_begun, job.other_bytes = True, 0
            # Not for a job that has sent cursors: other readers of its files would keep it alive after a kill.
            if job.is_by_reads:
                job.last_message_at = now
            if has_waited:
                job.missed_bytes += nbytes
            else:
                job.hit_bytes += nbytes
            if now - job.last_cursor_at < _QUIET_SECONDS:
                continue
            has_moved |= job.move_by_read(ahead, behind, now)
        return has_moved


def _step_read(job: Job, path: str, offset: int, nbytes: int) -> tuple[int | None, bool]:
    """Return the soonest step of a job that reads these bytes, and whether they are exact bytes of a further step."""
    step, is_further = None, False
    for index in job.plans:
        # Of several extents in the same pages, the read is taken for the soonest.
        soonest = min(index.steps_of(path, job.step, offset, offset + nbytes), default=None)
        if soonest is None:
            continue
        step = soonest if step is None else min(step, soonest)
        is_further |= index.plan.is_exact and index.on_read(soonest, nbytes, job.step)
    return step, is_further


def _step_behind(job: Job, path: str, offset: int, nbytes: int, ahead: int | None) -> int | None:
    """Return the last step before a job's own that has any of these bytes; None if there is none, or none is needed.

    ahead: the step from its own on that reads them. A job that has sent a cursor does not go back by its reads.
    """
    if not job.is_by_reads or (ahead is not None and job.is_near(ahead)):
        return None
    found = (step for index in job.plans for step in index.steps_of(path, -math.inf, offset, offset + nbytes))
    return max((step for step in found if step < job.step), default=None)
