"""Which endpoint of a data set serves a read: a share of the objects for each, by health. Pure; not thread-safe.

An object's reads stay with one endpoint while its health stays the same (rendezvous hashing). A slow endpoint gets
fewer objects. A failing one gets none: after a pause that doubles with each failure, one probe finds out whether it
answers again.
"""

import enum
import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from fusecache.policy.backoff import LONGEST_SECONDS, backoff_seconds

# A GET's cost is the time that one of this size would take; so GETs of all sizes compare.
TYPICAL_BYTES = 1 << 20
# Of two endpoints that are both faster than this, neither is slow.
QUICK_SECONDS = 0.1
# An endpoint this many times slower than the fastest gets that many times fewer objects; SLOW_RATIO squared, the same
# again. A smaller ratio would follow the noise of a busy machine.
SLOW_RATIO = 4.0
# GETs that the averages cover, and are needed before they count: the first one of a connection is slow.
AVERAGED_GETS = 8
# After this long without a GET the averages are forgotten, so that a slow endpoint is measured again.
REMEMBERED_SECONDS = 30.0


class EndpointState(enum.Enum):
    """What reads an endpoint gets. OK: its share. SLOW: less. FAILING: none, one probe after each pause."""

    OK = "ok"
    SLOW = "slow"
    FAILING = "failing"


@dataclass(frozen=True, slots=True)
class GetTimes:
    """How long one GET took: to its first byte, and for the bytes after it."""

    first_byte_seconds: float
    body_bytes: int
    body_seconds: float


@dataclass(slots=True)
class EndpointHealth:
    """What is known of one endpoint. failures: in a row. failed_at: when the last one was counted."""

    name: str
    weight: float
    is_failing: bool = False
    is_probing: bool = False
    failures: int = 0
    failing_since: float = -math.inf
    failed_at: float = -math.inf
    paused_until: float = -math.inf
    gets: int = 0
    measured_at: float = -math.inf
    first_byte_seconds: float = 0.0
    _bytes: float = field(default=0.0)
    _seconds: float = field(default=0.0)

    def record(self, times: GetTimes, now: float) -> None:
        """Add a GET to the averages."""
        if now - self.measured_at > REMEMBERED_SECONDS:
            self.gets = 0
        share = 1 / min(self.gets + 1, AVERAGED_GETS)
        self.first_byte_seconds += share * (times.first_byte_seconds - self.first_byte_seconds)
        self._bytes += share * (times.body_bytes - self._bytes)
        self._seconds += share * (times.body_seconds - self._seconds)
        self.gets, self.measured_at = self.gets + 1, now

    def cost_seconds(self, now: float) -> float | None:
        """Return the time of a typical GET; None if too little is known."""
        if self.gets < AVERAGED_GETS or now - self.measured_at > REMEMBERED_SECONDS:
            return None
        rate_seconds = TYPICAL_BYTES * self._seconds / self._bytes if self._bytes else 0.0
        return max(QUICK_SECONDS, self.first_byte_seconds + rate_seconds)


class EndpointChoice:
    """Orders the endpoints for each read, and learns from how the reads end. Times are those of any one clock."""

    def __init__(self, endpoints: Sequence[tuple[str, float]]) -> None:
        """endpoints: name and weight of each. The names decide which objects an endpoint serves."""
        self.health = [EndpointHealth(name, weight) for name, weight in endpoints]

    def order(self, what: str, now: float) -> list[int]:
        """Return all endpoints in the order in which to ask them for an object; failing ones come last."""
        healthy = [index for index, each in enumerate(self.health) if not each.is_failing]
        factors = self._factors(now)
        healthy.sort(key=lambda index: self._score(index, what, factors[index]), reverse=True)
        return healthy + self._failing()

    def order_by_rank(self) -> list[int]:
        """Return all endpoints in their given order; failing ones come last."""
        healthy = [index for index, each in enumerate(self.health) if not each.is_failing]
        return healthy + self._failing()

    def begin_probes(self, now: float) -> list[int]:
        """Return the endpoints to probe now. Each probe must end with `on_probed` or `on_failure`."""
        due = [
            index
            for index, each in enumerate(self.health)
            if each.is_failing and not each.is_probing and now >= each.paused_until
        ]
        for index in due:
            self.health[index].is_probing = True
        return due

    def on_success(self, index: int, times: GetTimes | None, now: float) -> bool:
        """A request succeeded. Return whether the endpoint was failing until now. times: of a GET."""
        each = self.health[index]
        each.failures = 0
        if times is not None:
            each.record(times, now)
        return self._restore(each)

    def on_probed(self, index: int) -> bool:
        """A probe was answered: give the endpoint its reads again. Return whether it was failing until now.

        If its next read fails, the pause is longer than the last one.
        """
        self.health[index].is_probing = False
        return self._restore(self.health[index])

    def on_failure(
        self,
        index: int,
        *,
        began: float,
        now: float,
        chance: float,
        retry_after_seconds: float = 0.0,
        is_probe: bool = False,
    ) -> int:
        """A request that began at `began` failed. chance: random, in [0, 1).

        Return how many failed in a row; 0 if this one was in flight when another failed: they count once.
        """
        each = self.health[index]
        if is_probe:
            each.is_probing = False
        if began < each.failed_at:
            return 0
        if not each.is_failing:
            each.is_failing, each.failing_since = True, now
        each.failures += 1
        pause = max(backoff_seconds(each.failures, chance), min(LONGEST_SECONDS, retry_after_seconds))
        each.failed_at, each.paused_until = now, now + pause
        each.gets = 0  # an endpoint that comes back may be faster or slower
        return each.failures

    def state(self, index: int, now: float) -> EndpointState:
        """Return the state of an endpoint."""
        if self.health[index].is_failing:
            return EndpointState.FAILING
        return EndpointState.OK if self._factors(now)[index] == 1.0 else EndpointState.SLOW

    def _restore(self, each: EndpointHealth) -> bool:
        was_failing, each.is_failing = each.is_failing, False
        return was_failing

    def _failing(self) -> list[int]:
        failing = [index for index, each in enumerate(self.health) if each.is_failing]
        return sorted(failing, key=lambda index: self.health[index].paused_until)

    def _factors(self, now: float) -> list[float]:
        """Return, for each endpoint, the part of its weight that counts."""
        costs = [None if each.is_failing else each.cost_seconds(now) for each in self.health]
        best = min((cost for cost in costs if cost is not None), default=QUICK_SECONDS)
        return [_factor((cost or best) / best) for cost in costs]

    def _score(self, index: int, what: str, factor: float) -> float:
        """Return the endpoint's score for an object: the highest one serves it (weighted rendezvous hashing)."""
        each = self.health[index]
        digest = hashlib.blake2b(f"{each.name}\0{what}".encode(), digest_size=6).digest()
        uniform = (int.from_bytes(digest) + 0.5) / 2**48  # never 0 or 1
        return -each.weight * factor / math.log(uniform)


def _factor(ratio: float) -> float:
    """Return 1 for an endpoint less than SLOW_RATIO times slower than the fastest, then 1/4, then 1/16."""
    if ratio < SLOW_RATIO:
        return 1.0
    return 1 / SLOW_RATIO if ratio < SLOW_RATIO**2 else 1 / SLOW_RATIO**2
