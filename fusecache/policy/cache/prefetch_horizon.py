"""How far ahead hinted bytes are fetched, and whose come next. Pure: time and room are arguments.

What is fetched long before its use takes room from what would have been used again: each byte that lies ahead of its
reader is a byte less that is kept from one epoch to the next. So the horizon is short where room is scarce, and as
wide as the room where nothing has to go for it.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from fusecache.model.objects import GIB

# Of the room, what may lie ahead of its readers at the cost of others: with a cache of half the data it costs 2.5 %
# more bytes an epoch than if everything came at the very last moment.
LEAD_SHARE = 40
# More than that bridges no longer outage: it is half a minute of a fast link.
LEAD_BYTES_MAX = 4 * GIB
# Readers who consume faster than that share allows for get so many seconds: a shard comes in pieces, side by side, and
# each in some tenths of one. With 4 s, a cache of 256 MiB that holds half of the data fetched a tenth too much …
LEAD_SECONDS = 1.0
# … and no more than this part of the room.
LEAD_SHARE_MOST = 4
# The pace of a job that has not shown one: most are slower.
SECONDS_A_STEP = 0.1
# A job that says nothing, and reads nothing that it has named, for so long has ended.
SILENT_SECONDS = 600.0
# A pace is believed after so many seconds, and follows the job's with this weight for each further portion of as many.
PACE_SECONDS = 0.2
PACE_WEIGHT = 0.3
# A step that took longer than so many usual ones was a pause (a checkpoint, an evaluation): no word on the pace.
PAUSE_FACTOR = 10.0


@dataclass(frozen=True, slots=True)
class JobFront:
    """What a job needs next that is not here. seconds: until then; nbytes: how large it is; ahead_bytes: what lies
    ahead of the job already, fetched by its hints and not yet read."""

    seconds: float
    nbytes: int
    ahead_bytes: int


def lead_bytes(room_bytes: int, bytes_per_second: float, jobs: int) -> int:
    """Return how many bytes each of so many jobs may have lie ahead, though others must go for them.

    bytes_per_second: what a job consumes of what it has to fetch.
    """
    share = room_bytes // LEAD_SHARE
    wanted = int(bytes_per_second * LEAD_SECONDS)
    return min(max(share, min(wanted, room_bytes // LEAD_SHARE_MOST)), LEAD_BYTES_MAX) // max(1, jobs)


def may_replace(front: JobFront, lead: int) -> bool:
    """Say whether cached bytes may go for a front: it fits the lead, or nothing lies ahead of the job at all."""
    return front.ahead_bytes == 0 or front.ahead_bytes + front.nbytes <= lead


def choose_front(fronts: Sequence[JobFront], *, lead: int, free_bytes: int) -> int | None:
    """Return the index of the front to fetch now, None if none may be.

    What is needed soonest comes first among those for which there is room: free room, or that of others within the
    lead. So a job that is far ahead holds up no other.
    """
    allowed = [
        (front.seconds, index)
        for index, front in enumerate(fronts)
        if front.nbytes <= free_bytes or may_replace(front, lead)
    ]
    return min(allowed)[1] if allowed else None


@dataclass(frozen=True, slots=True)
class StepRate:
    """How fast a job goes: seconds_a_step, 0.0 while that is unknown; since when and where it is measured."""

    seconds_a_step: float = 0.0
    step: int = 0
    since: float = 0.0

    @property
    def seconds(self) -> float:
        """Seconds a step, a guess if nothing is known yet."""
        return self.seconds_a_step or SECONDS_A_STEP


def observe_step(pace: StepRate, step: int, now: float) -> StepRate:
    """Return the pace after a job said that it has come to a step."""
    steps, seconds = step - pace.step, now - pace.since
    if steps < 0:  # it went back
        return StepRate(pace.seconds_a_step, step, now)
    if steps == 0 or seconds < PACE_SECONDS:
        return pace
    seen = seconds / steps
    old = pace.seconds_a_step
    if not old:
        new = seen
    elif seen > PAUSE_FACTOR * old:
        new = old * (1 + PACE_WEIGHT)  # if it is no pause it will be believed after some more
    else:
        new = old + PACE_WEIGHT * (seen - old)
    return StepRate(new, step, now)


def stalls(deadlines: Sequence[tuple[float, int]], bytes_per_second: float) -> int:
    """Return how many fetches will come too late. deadlines: (seconds from now, bytes) in the order of fetching.

    0 while the rate is unknown.
    """
    if bytes_per_second <= 0:
        return 0
    late, ahead = 0, 0
    for seconds, nbytes in deadlines:
        ahead += nbytes
        late += ahead / bytes_per_second > seconds
    return late


def step_of_reads(steps: Sequence[int]) -> int:
    """Return where a job is by the steps for which it had named its last few reads: the least of them.

    Its workers read ahead of it, and somebody else may read the same files in another order: to be behind costs a
    little room, to be ahead would drop what is still needed.
    """
    return min(steps)
