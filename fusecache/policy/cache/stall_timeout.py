"""The timeout of a silent request, learned from earlier waits of the same kind. Pure values.

A fixed timeout is wrong for every link: one short enough to notice a dead connection to a fast bucket would abort
working requests to a slow bucket. So the timeout is a multiple of the waits seen. An aborted request counts as a wait
of at least that long, so a link that becomes slow raises the timeout.
"""

from collections import deque

# Pauses of the machine itself (a busy CPU, a retransmission) are not stalls.
FLOOR_SECONDS = 1.5
# Beyond 20 s, the store's own timeout is near anyway.
CEILING_SECONDS = 20.0
# The timeout before the link was measured.
FIRST_SECONDS = 5.0
FEWEST_WAITS = 8
P50_FACTOR = 8.0
# Not p99: for a bucket that stalls one answer in twenty, p99 would be a stall itself.
P90_FACTOR = 4.0
# Few enough to forget a bad hour in a minute, and to notice a slow link after one round of requests.
REMEMBERED = 256
# Early retries of one request; after 3 it gets the store's whole timeout. So a dead network sees no retry storm.
EARLY_RETRIES = 3


class WaitHistory:
    """The latest waits of one kind, and the timeout computed from them.

    Invariant: FLOOR_SECONDS <= deadline_seconds <= CEILING_SECONDS.
    """

    def __init__(self) -> None:
        self._waits: deque[float] = deque(maxlen=REMEMBERED)
        self._deadline: float | None = FIRST_SECONDS

    def record(self, seconds: float) -> None:
        """Record a wait that ended, or that was aborted after `seconds`."""
        self._waits.append(seconds)
        self._deadline = None

    @property
    def deadline_seconds(self) -> float:
        """How long a wait may last now."""
        if self._deadline is None:
            self._deadline = deadline_seconds(sorted(self._waits))
        return self._deadline


def deadline_seconds(waits: list[float]) -> float:
    """Return the timeout after these waits, given in rising order."""
    if len(waits) < FEWEST_WAITS:
        # Few waits, but if they were long, the link is slow.
        longest = waits[-1] if waits else 0.0
        return min(CEILING_SECONDS, max(FIRST_SECONDS, P90_FACTOR * longest))
    last = len(waits) - 1
    p50, p90 = waits[last // 2], waits[last * 9 // 10]
    return min(CEILING_SECONDS, max(FLOOR_SECONDS, P50_FACTOR * p50, P90_FACTOR * p90))
