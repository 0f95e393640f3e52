"""How far ahead hinted bytes are prefetched, and for which job next. Pure: time and disk space are arguments.

A byte that is prefetched long before its use takes the place of a byte that could stay for the next epoch. So the
prefetch horizon is short where disk space is scarce. Where nothing must be evicted, the horizon is all free space.
"""

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from fusecache.model.objects import GIB

# 1/40 of the disk space may hold prefetched bytes for which other bytes were evicted. With a cache of half the data
# this costs 2.5 % more bytes an epoch than fetching everything at the last moment.
LEAD_SHARE = 40
# More would not bridge a longer outage: 4 GiB are half a minute of a fast link.
LEAD_BYTES_MAX = 4 * GIB
# A job that consumes faster than LEAD_SHARE allows for gets 1 s of its bytes: a shard comes in parallel pieces of some
# tenths of a second each. With 4 s, a cache of 256 MiB that holds half of the data fetched a tenth too much …
LEAD_SECONDS = 1.0
# … and at most 1/4 of the disk space.
LEAD_SHARE_MOST = 4
# The assumed step rate of a job whose rate is unknown. Most jobs are slower.
DEFAULT_SECONDS_PER_STEP = 0.1
# A job that sends no message, and reads nothing of its plans, for 10 minutes counts as ended.
SILENT_SECONDS = 600.0
# A step rate is measured over at least 0.2 s. Each further measurement enters the average with this weight.
RATE_SECONDS = 0.2
RATE_WEIGHT = 0.3
# A step that takes longer than 10 usual ones is a pause (a checkpoint, an evaluation) and does not measure the rate.
PAUSE_FACTOR = 10.0
# A read is near a job's step up to 8 steps, or extents, after it. The job is at the smallest step of 8 such reads: they
# are those of 8 workers.
NEAR_STEPS = 8
NEAR_READS = 8
# A program that copies one file reads one step. One that goes through the files in the order of their names may read
# two or three steps of another order. 4 steps in rising order are the job's own.
RUN_STEPS = 4
RUN_WIDTH = 8
# Reads of 24 steps ahead, none of them near and without a run: the job skips files, or reads them in another order.
LOST_STEPS = 24
# Enough for a run of each of 8 workers. Among more, a random order would often have a run.
AWAY_STEPS = 32


@dataclass(frozen=True, slots=True)
class JobFront:
    """The next missing piece of a job. seconds: until the job needs it; nbytes: its size; ahead_bytes: what the job's
    hints fetched and the job has not read yet."""

    seconds: float
    nbytes: int
    ahead_bytes: int


def lead_bytes(room_bytes: int, bytes_per_second: float, jobs: int) -> int:
    """Return how many prefetched bytes each of `jobs` jobs may have ahead by evicting other bytes.

    bytes_per_second: the rate at which a job consumes fetched bytes.
    """
    share = room_bytes // LEAD_SHARE
    wanted = int(bytes_per_second * LEAD_SECONDS)
    return min(max(share, min(wanted, room_bytes // LEAD_SHARE_MOST)), LEAD_BYTES_MAX) // max(1, jobs)


def may_replace(front: JobFront, lead: int) -> bool:
    """Return whether cached bytes may be evicted for a front: it fits the lead, or nothing is ahead of the job."""
    return front.ahead_bytes == 0 or front.ahead_bytes + front.nbytes <= lead


def choose_front(fronts: Sequence[JobFront], *, lead: int, free_bytes: int) -> int | None:
    """Return the index of the front to fetch now, None if none may be fetched.

    The soonest needed goes first, among the fronts that find space: free space, or evicted space within the lead. So a
    job that is far ahead does not delay another job.
    """
    allowed = [
        (front.seconds, index)
        for index, front in enumerate(fronts)
        if front.nbytes <= free_bytes or may_replace(front, lead)
    ]
    return min(allowed)[1] if allowed else None


@dataclass(frozen=True, slots=True)
class StepRate:
    """How fast a job steps. seconds_a_step: 0.0 while unknown; step, since: where and when the measurement began."""

    seconds_a_step: float = 0.0
    step: int = 0
    since: float = 0.0

    @property
    def seconds(self) -> float:
        """Seconds a step; SECONDS_A_STEP while unknown."""
        return self.seconds_a_step or DEFAULT_SECONDS_PER_STEP


def observe_step(rate: StepRate, step: int, now: float) -> StepRate:
    """Return the step rate after a job reported that it is at a step."""
    steps, seconds = step - rate.step, now - rate.since
    if steps < 0:  # the job went back
        return StepRate(rate.seconds_a_step, step, now)
    if steps == 0 or seconds < RATE_SECONDS:
        return rate
    seen = seconds / steps
    old = rate.seconds_a_step
    if not old:
        new = seen
    elif seen > PAUSE_FACTOR * old:
        new = old * (1 + RATE_WEIGHT)  # if it is not a pause, the rate gets there after some more of them
    else:
        new = old + RATE_WEIGHT * (seen - old)
    return StepRate(new, step, now)


@dataclass(slots=True)
class ReadSteps:
    """The step of a job, estimated from the planned steps of its reads.

    The job's workers read ahead of it, and other programs may read the same files in another order. An estimate too
    low costs a little space; one too high would drop bytes that are still needed. So the step follows the reads that
    are near it, and goes elsewhere only after a run of other steps, between which no read was near.

    near: of the last reads near the step. away: of other reads, each step once, in the order of their last reads.
    """

    near: deque[int] = field(default_factory=lambda: deque(maxlen=NEAR_READS))
    away: dict[int, None] = field(default_factory=dict)

    def clear(self) -> None:
        """Forget all reads: the job has said itself where it is."""
        self.near.clear()
        self.away.clear()

    def add_near(self, step: int, read: int) -> int:
        """Add a read of step `read`, of a job at `step`; return the step of the job: the smallest of the last reads."""
        self.away.clear()
        self.near.append(read)
        return max(step, min(self.near)) if len(self.near) == NEAR_READS else step

    def add_away(self, step: int, reads: Iterable[int]) -> int:
        """Add a read that may be of any of these steps, none of them near `step`; return the step of the job."""
        known = len(self.away)
        for read in reads:
            self.away.pop(read, None)
            self.away[read] = None
        if len(self.away) == known:
            return step  # a file that is still being read
        while len(self.away) > AWAY_STEPS:
            del self.away[next(iter(self.away))]
        found = first_of_run(list(self.away))
        if found is None:
            ahead = [read for read in self.away if read > step]
            found = min(ahead) if len(ahead) >= LOST_STEPS else step
        if found != step:
            self.clear()
        return found


def first_of_run(reads: Sequence[int]) -> int | None:
    """Return the smallest step at which a run begins, None if none does. reads: different steps, in the order of reads.

    A run is RUN_STEPS steps that were read one after the other, RUN_WIDTH at most from the first to the last. Reads of
    other steps may lie between.
    """
    place = {read: number for number, read in enumerate(reads)}
    steps = sorted(reads)
    for first in range(len(steps) - RUN_STEPS + 1):
        run = steps[first : first + RUN_STEPS]
        if run[-1] - run[0] <= RUN_WIDTH and all(place[a] < place[b] for a, b in pairwise(run)):
            return run[0]
    return None
