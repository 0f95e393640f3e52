"""What the mount's requests cost, in all and for a day at the present rate, at the prices of Cloudflare R2."""

from typing import Any

import trio

from fusecache.policy.rate_meter import RateMeter
from fusecache.remote.store import Store

# Polling programs repeat within seconds or a minute; longer, and a job that has ended still shows in the rate.
WINDOW_SECONDS = 300.0
_SAMPLE_SECONDS = 5.0
_DAY_SECONDS = 86_400


class RequestCosts:
    """Counts requests by price. The rate is that of the last WINDOW_SECONDS, or since the start if that is shorter."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._class_a, self._class_b = RateMeter(WINDOW_SECONDS), RateMeter(WINDOW_SECONDS)
        self._dollars = RateMeter(WINDOW_SECONDS)

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Sample the counters until cancelled."""
        self._sample()
        task_status.started()
        while True:
            await trio.sleep(_SAMPLE_SECONDS)
            self._sample()

    def _sample(self) -> None:
        now, counts = trio.current_time(), self._store.statistics()
        self._class_a.record(now, counts.class_a)
        self._class_b.record(now, counts.class_b)
        self._dollars.record(now, counts.dollars)

    def statistics(self) -> dict[str, Any]:
        """Return the counts by class, their cost in dollars, and both for a day at the present rate.

        rate_seconds: how long the rate was measured.
        """
        counts = self._store.statistics()
        return {
            "class_a": counts.class_a,
            "class_b": counts.class_b,
            "dollars": round(counts.dollars, 6),
            "class_a_per_day": round(self._class_a.per_second() * _DAY_SECONDS),
            "class_b_per_day": round(self._class_b.per_second() * _DAY_SECONDS),
            "dollars_per_day": round(self._dollars.per_second() * _DAY_SECONDS, 6),
            "rate_seconds": round(self._dollars.span_seconds, 1),
        }
