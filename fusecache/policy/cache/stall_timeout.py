"""When a silent request has waited too long, judged by how long its kind has waited before. Pure values.

A fixed limit is wrong for every link: short enough to notice a dead connection beside a fast bucket, it would
shoot at a slow one that works. So the limit is a multiple of what was seen, and each request that was given up
counts as one that would have taken at least that long: a link that turns slow moves the limit out of its way.
"""

from collections import deque

# Pauses of the machine itself (a busy CPU, a retransmission) are no stall.
FLOOR_SECONDS = 1.5
# Beyond this the store's own time-out is near anyway.
CEILING_SECONDS = 20.0
# Before anything is known of the link.
FIRST_SECONDS = 5.0
FEWEST_WAITS = 8
P50_FACTOR = 8.0
# Not p99: of a bucket that lets one answer in twenty stall, that would be a stall.
P90_FACTOR = 4.0
# Few enough to forget a bad hour in a minute, and to see with one round of requests that a link has turned slow.
REMEMBERED = 256
# So often a request may be begun again early; then it has the store's whole time-out. A dead network gets no storm.
EARLY_RETRIES = 3


class WaitHistory:
    """The latest waits of one kind, and the deadline that follows from them.

    Invariant: FLOOR_SECONDS <= deadline_seconds <= CEILING_SECONDS.
    """

    def __init__(self) -> None:
        self._waits: deque[float] = deque(maxlen=REMEMBERED)
        self._deadline: float | None = FIRST_SECONDS

    def record(self, seconds: float) -> None:
        """Remember a wait: one that ended, or one that was given up after so long."""
        self._waits.append(seconds)
        self._deadline = None

    @property
    def deadline_seconds(self) -> float:
        """How long a wait may last now."""
        if self._deadline is None:
            self._deadline = deadline_seconds(sorted(self._waits))
        return self._deadline


def deadline_seconds(waits: list[float]) -> float:
    """Return the deadline after these waits, in rising order."""
    if len(waits) < FEWEST_WAITS:
        # Few, but if they were long the link is slow.
        longest = waits[-1] if waits else 0.0
        return min(CEILING_SECONDS, max(FIRST_SECONDS, P90_FACTOR * longest))
    last = len(waits) - 1
    p50, p90 = waits[last // 2], waits[last * 9 // 10]
    return min(CEILING_SECONDS, max(FLOOR_SECONDS, P50_FACTOR * p50, P90_FACTOR * p90))
