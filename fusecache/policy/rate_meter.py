"""How fast something goes, and how long the rest will take: from a few samples of a counter that only grows."""

from collections import deque

WINDOW_SECONDS = 10.0
# A longer forecast says nothing: something is stuck, or barely moves.
_LONGEST_SECONDS = 30 * 86400.0


class RateMeter:
    """The pace of a counter over the last WINDOW_SECONDS, or since it was reset if that is shorter."""

    def __init__(self) -> None:
        self._samples: deque[tuple[float, int]] = deque()

    def reset(self, now: float, total: int) -> None:
        """Count from here: nothing was under way before."""
        self._samples = deque([(now, total)])

    def record(self, now: float, total: int) -> None:
        """The counter stood at `total` at that moment."""
        self._samples.append((now, total))
        # The oldest kept is the youngest at or before the window's beginning.
        while len(self._samples) > 1 and self._samples[1][0] <= now - WINDOW_SECONDS:
            self._samples.popleft()

    def per_second(self) -> float:
        """Return units a second; 0 while too little is known."""
        if len(self._samples) < 2:
            return 0.0
        (began, first), (now, last) = self._samples[0], self._samples[-1]
        return max(0.0, (last - first) / (now - began)) if now > began else 0.0


def seconds_left(amount: int, per_second: float) -> float | None:
    """Return how long `amount` more will take, None if that cannot be said."""
    if amount <= 0 or per_second <= 0:
        return None
    seconds = amount / per_second
    return seconds if seconds <= _LONGEST_SECONDS else None
