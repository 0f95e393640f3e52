"""How long to wait after a failure, and how many requests a struggling bucket still gets.

A timeout that counts only the time without progress. Pure.

A limit of bytes a second, as the moment from which more may be sent or asked for. Pure.
"""

# An fsync that waits for the bucket, and a close that waits for disk space, fail after this long without progress.
STANDSTILL_SECONDS = 300.0


class ProgressTimeout:
    """Records progress; expires after `seconds` without any. Times are those of any one clock."""

    def __init__(self, now: float, seconds: float = STANDSTILL_SECONDS) -> None:
        self._seconds = seconds
        self._since = now
        self._mark: object = None

    def on_progress(self, mark: object, now: float) -> None:
        """Report the current state: there was progress if the mark differs from the last one."""
        if mark != self._mark:
            self._mark = mark
            self._since = now

    def is_over(self, now: float) -> bool:
        """Return whether there was no progress for too long."""
        return now - self._since >= self._seconds


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


FIRST_SECONDS = 1.0
LONGEST_SECONDS = 60.0
# A storm of 429s answers many requests at once, so signals within this time count as one.
SIGNAL_SECONDS = 1.0
# After this many different items failed in a row, the bucket is taken for the cause: the circuit opens.
OUTAGE_ITEMS = 3
# With at most this many failed probes it was no lasting outage. A few keys that the bucket rejects look the same, and
# must keep their backoff; after an outage that short, all backoffs are short anyway.
LASTING_PROBES = 3
# While the circuit is open, one request (half-open probe) is sent at least this often.
PROBE_SECONDS = 10.0
# After this long without a throttling signal the bucket counts as recovered: the limit grows by one per success, so it
# doubles per round.
WELL_SECONDS = 10.0
# A reader, or a lookup, waits this long for a bucket that does not answer.
PATIENCE_SECONDS = 60.0


def backoff_seconds(attempt: int, chance: float) -> float:
    """Return the wait before attempt number `attempt` (1: the first retry): exponential, jittered, 0.5 to 60 s.

    chance: a random number in [0, 1), so that a thousand nodes do not retry in step.
    """
    base = min(LONGEST_SECONDS, FIRST_SECONDS * 2.0 ** min(attempt - 1, 16))
    return base * (0.5 + 0.5 * chance)


class RequestLimit:
    """Limits the client's requests in flight: additive increase, multiplicative decrease.

    silent_until: no request may start before this moment, because the bucket asked for a pause.
    patience_seconds: how long a caller waits for a bucket that does not answer.
    Invariants: 1 <= limit <= ceiling; silent_until is at most LONGEST_SECONDS after the last signal.
    """

    def __init__(
        self, ceiling: int, pace: Pace | None = None, patience_seconds: float = PATIENCE_SECONDS
    ) -> None:
        """pace: of the bytes that requests ask for."""
        if ceiling < 1:
            raise ValueError(f"the request limit must be at least 1, not {ceiling}")
        self._ceiling = ceiling
        self._limit = float(ceiling)
        self._last_signal = float("-inf")
        self.silent_until = float("-inf")
        self.pace = pace or Pace(None)
        self.patience_seconds = patience_seconds

    @property
    def free_at(self) -> float:
        """The moment from which a request for bytes may start."""
        return max(self.silent_until, self.pace.free_at)

    @property
    def limit(self) -> int:
        """Requests allowed in flight now."""
        return int(self._limit)

    def on_throttled(self, now: float, retry_after_seconds: float | None = None) -> None:
        """The bucket asked to slow down, perhaps for a given time: halve the limit, at most once a second."""
        if retry_after_seconds is not None:
            self.silent_until = max(self.silent_until, now + min(LONGEST_SECONDS, retry_after_seconds))
        if now - self._last_signal >= SIGNAL_SECONDS:
            self._last_signal = now
            self._limit = max(1.0, self._limit / 2)

    def on_success(self, now: float) -> None:
        """A request succeeded: grow the limit by about one per full round, after recovery by one per success."""
        if self._limit < self._ceiling:
            is_well = now - self._last_signal >= WELL_SECONDS
            self._limit = min(float(self._ceiling), self._limit + (1.0 if is_well else 1 / self._limit))


class Outage:
    """A circuit breaker: distinguishes failures of single items from an outage, and paces the probes during one.

    Invariant: quiet_until is at most PROBE_SECONDS after the last failure.
    """

    def __init__(self) -> None:
        self._failed: set[int] = set()
        self._probes = 0
        self.quiet_until = float("-inf")
        self.last_success = float("-inf")

    @property
    def is_on(self) -> bool:
        """Whether the circuit is open, so that only single probes make sense."""
        return len(self._failed) >= OUTAGE_ITEMS

    def on_failure(self, item: int, now: float, chance: float) -> None:
        """A request for an item failed with a transient error. chance: a random number in [0, 1)."""
        self._failed.add(item)
        if self.is_on and now >= self.quiet_until:
            self._probes += 1
            self.quiet_until = now + min(PROBE_SECONDS, backoff_seconds(self._probes, chance))

    def try_now(self) -> None:
        """There is another sign that the bucket may be back: the next probe need not wait."""
        self.quiet_until = float("-inf")

    def on_success(self, now: float) -> bool:
        """A request succeeded; return whether that ends a lasting outage."""
        was_on = self.is_on and self._probes > LASTING_PROBES
        self._failed.clear()
        self._probes = 0
        self.quiet_until = float("-inf")
        self.last_success = now
        return was_on
