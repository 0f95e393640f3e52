"""The rate of a counter that only grows, from a few samples, and the time that the rest will take."""

from collections import deque

WINDOW_SECONDS = 10.0
# A longer estimate is meaningless: something is stuck, or barely moves.
_LONGEST_SECONDS = 30 * 86400.0


class RateMeter:
    """The rate of a counter over the last `window_seconds`, or since the last reset if that is shorter."""

    def __init__(self, window_seconds: float = WINDOW_SECONDS) -> None:
        self._window_seconds = window_seconds
        self._samples: deque[tuple[float, float]] = deque()

    def reset(self, now: float, total: float) -> None:
        """Start counting from here: nothing was in progress before."""
        self._samples = deque([(now, total)])

    def record(self, now: float, total: float) -> None:
        """Record that the counter was at `total` at that moment."""
        self._samples.append((now, total))
        # The oldest sample kept is the newest one at or before the beginning of the window.
        while len(self._samples) > 1 and self._samples[1][0] <= now - self._window_seconds:
            self._samples.popleft()

    @property
    def span_seconds(self) -> float:
        """How long the rate was measured; 0 while too little is known."""
        return self._samples[-1][0] - self._samples[0][0] if self._samples else 0.0

    def per_second(self) -> float:
        """Return units per second; 0 while too little is known."""
        if len(self._samples) < 2:
            return 0.0
        (began, first), (now, last) = self._samples[0], self._samples[-1]
        return max(0.0, (last - first) / (now - began)) if now > began else 0.0


def seconds_left(amount: int, per_second: float) -> float | None:
    """Return how many seconds `amount` more will take, None if unknown."""
    if amount <= 0 or per_second <= 0:
        return None
    seconds = amount / per_second
    return seconds if seconds <= _LONGEST_SECONDS else None
