"""A limit of bytes a second, as the moment from which more may be sent or asked for. Pure."""


class Pace:
    """Spreads bytes over time. In any `t` seconds at most `rate * t` bytes are let through, and one piece more."""

    def __init__(self, bytes_per_second: float | None) -> None:
        """bytes_per_second: None sets no limit."""
        self._rate = bytes_per_second
        # The moment from which the next piece may go.
        self.free_at = float("-inf")

    def charge(self, now: float, nbytes: int) -> float:
        """A piece goes at `now`, or once it may; return in how many seconds the piece after it may go."""
        if self._rate is None:
            return 0.0
        self.free_at = max(self.free_at, now) + nbytes / self._rate
        return self.free_at - now
