"""How far ahead hinted bytes are prefetched, and for which job next. Pure: time and disk space are arguments.

A byte that is prefetched long before its use takes the place of a byte that could stay for the next epoch. So the
prefetch horizon is short where disk space is scarce. Where nothing must be evicted, the horizon is all free space.
"""

from collections.abc import Sequence
from dataclasses import dataclass

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


def stalls(deadlines: Sequence[tuple[float, int]], bytes_per_second: float) -> int:
    """Return how many fetches will end too late; 0 while the rate is unknown.

    deadlines: (seconds from now, bytes), in the order of fetching.
    """
    if bytes_per_second <= 0:
        return 0
    late, ahead = 0, 0
    for seconds, nbytes in deadlines:
        ahead += nbytes
        late += ahead / bytes_per_second > seconds
    return late


def step_of_reads(steps: Sequence[int]) -> int:
    """Return the step of a job, estimated from the planned steps of its last few reads: the smallest of them.

    The job's workers read ahead of it, and other programs may read the same files in another order. An estimate too
    low costs a little space; one too high would drop bytes that are still needed.
    """
    return min(steps)
