"""How long to wait after a failure, and how many requests a struggling bucket still gets."""

FIRST_SECONDS = 1.0
LONGEST_SECONDS = 60.0
# One 429 storm answers many requests at once: it counts as one signal.
SIGNAL_SECONDS = 1.0
# After so many different items in a row have failed, the bucket is taken for the cause.
OUTAGE_ITEMS = 3
# After no more failed tries than this it is none that lasted: a few keys that the bucket refuses look alike, and are to
# keep their pauses, while those of an outage so short are short as well.
LASTING_PROBES = 3
# While it is, one request tries so often at least.
PROBE_SECONDS = 10.0
# So long without a signal, the bucket is well again: what was taken away comes back by doubling.
WELL_SECONDS = 10.0


def backoff_seconds(attempt: int, chance: float) -> float:
    """Return the wait before attempt number `attempt` (1 is the first retry): exponential, jittered, 0.5-60
    s.

    chance: a random number in [0, 1), so that a thousand nodes do not come back in step.
    """
    base = min(LONGEST_SECONDS, FIRST_SECONDS * 2.0 ** min(attempt - 1, 16))
    return base * (0.5 + 0.5 * chance)


class RequestLimit:
    """Additive increase, multiplicative decrease: how many requests the whole client may have in flight.

    silent_until: before this moment none may start, as the bucket asked.
    Invariants: 1 <= limit <= ceiling; silent_until is at most LONGEST_SECONDS after the last signal.
    """

    def __init__(self, ceiling: int) -> None:
        if ceiling < 1:
            raise ValueError(f"at least one request must be allowed, not {ceiling}")
        self._ceiling = ceiling
        self._limit = float(ceiling)
        self._last_signal = float("-inf")
        self.silent_until = float("-inf")

    @property
    def limit(self) -> int:
        """Requests allowed in flight now."""
        return int(self._limit)

    def on_throttled(self, now: float, retry_after_seconds: float | None = None) -> None:
        """The bucket said to slow down, perhaps for how long: halve, at most once a second."""
        if retry_after_seconds is not None:
            self.silent_until = max(self.silent_until, now + min(LONGEST_SECONDS, retry_after_seconds))
        if now - self._last_signal >= SIGNAL_SECONDS:
            self._last_signal = now
            self._limit = max(1.0, self._limit / 2)

    def on_success(self, now: float) -> None:
        """A request went well: about one more for each full round of them, later one for each."""
        if self._limit < self._ceiling:
            is_well = now - self._last_signal >= WELL_SECONDS
            self._limit = min(float(self._ceiling), self._limit + (1.0 if is_well else 1 / self._limit))


class Outage:
    """Tells failures of one item from failures of the bucket: then one request at a time tries, now and then.

    Invariant: quiet_until is at most PROBE_SECONDS after the last failure.
    """

    def __init__(self) -> None:
        self._failed: set[int] = set()
        self._probes = 0
        self.quiet_until = float("-inf")
        self.last_success = float("-inf")

    @property
    def is_on(self) -> bool:
        """Whether nothing but single tries makes sense."""
        return len(self._failed) >= OUTAGE_ITEMS

    def on_failure(self, item: int, now: float, chance: float) -> None:
        """A request for an item failed in a way that may pass. chance: a random number in [0, 1)."""
        self._failed.add(item)
        if self.is_on and now >= self.quiet_until:
            self._probes += 1
            self.quiet_until = now + min(PROBE_SECONDS, backoff_seconds(self._probes, chance))

    def try_now(self) -> None:
        """Something else tells that the bucket may be well: the next try need not wait."""
        self.quiet_until = float("-inf")

    def on_success(self, now: float) -> bool:
        """A request was answered; return whether that ends an outage that lasted."""
        was_on = self.is_on and self._probes > LASTING_PROBES
        self._failed.clear()
        self._probes = 0
        self.quiet_until = float("-inf")
        self.last_success = now
        return was_on
