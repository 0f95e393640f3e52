"""What the mount's requests cost, in all and for a day at the present rate, if the store's prices are known."""

from typing import Any

import trio

from fusecache.model.prices import Prices
from fusecache.policy.rate_meter import RateMeter
from fusecache.remote.store import Store

# Polling programs repeat within seconds or a minute; longer, and a job that has ended still shows in the rate.
WINDOW_SECONDS = 300.0
_SAMPLE_SECONDS = 5.0
_DAY_SECONDS = 86_400
_KINDS = ("lists", "writes", "heads", "gets")


class RequestCosts:
    """Counts requests by price. The rate is that of the last WINDOW_SECONDS, or since the start if that is shorter."""

    def __init__(self, store: Store, prices: Prices | None) -> None:
        self._store = store
        self._prices = prices
        self._class_a, self._class_b = RateMeter(WINDOW_SECONDS), RateMeter(WINDOW_SECONDS)
        self._dollars = {kind: RateMeter(WINDOW_SECONDS) for kind in _KINDS}

    async def run(self) -> None:
        """Sample the counters until cancelled."""
        while True:
            self._sample()
            await trio.sleep(_SAMPLE_SECONDS)

    def _sample(self) -> None:
        now, counts = trio.current_time(), self._store.statistics()
        self._class_a.record(now, counts.class_a)
        self._class_b.record(now, counts.class_b)
        for kind, dollars in counts.dollars_by_kind(self._prices).items() if self._prices else ():
            self._dollars[kind].record(now, dollars)

    def statistics(self) -> dict[str, Any]:
        """Return the counts by class, their cost in dollars, and both for a day at the present rate.

        dollars_per_day_by_kind: of LISTs, the other requests of class A, HEADs and GETs. rate_seconds: how long the
        rate was measured. Dollars are None, and prices is "", if the prices are unknown.
        """
        counts = self._store.statistics()
        return {
            "class_a": counts.class_a,
            "class_b": counts.class_b,
            "class_a_per_day": round(self._class_a.per_second() * _DAY_SECONDS),
            "class_b_per_day": round(self._class_b.per_second() * _DAY_SECONDS),
            "rate_seconds": round(self._class_a.span_seconds, 1),
            "prices": self._prices.name if self._prices else "",
            **self._costs(),
        }

    def _costs(self) -> dict[str, Any]:
        if self._prices is None:
            return {
                "dollars": None,
                "dollars_per_day": None,
                "dollars_per_day_by_kind": dict.fromkeys(_KINDS),
            }
        by_kind = {kind: meter.per_second() * _DAY_SECONDS for kind, meter in self._dollars.items()}
        return {
            "dollars": round(sum(self._store.statistics().dollars_by_kind(self._prices).values()), 6),
            "dollars_per_day": round(sum(by_kind.values()), 6),
            "dollars_per_day_by_kind": {kind: round(dollars, 6) for kind, dollars in by_kind.items()},
        }
