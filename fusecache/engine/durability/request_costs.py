"""What the mount's requests cost, in all and for a day at the present rate, if the store's prices are known."""

from collections.abc import Mapping
from typing import Any

import trio

from fusecache.model.prices import Prices
from fusecache.policy.rate_meter import RateMeter
from fusecache.remote.store import Store

# Polling programs repeat within seconds or a minute; longer, and a job that has ended still shows in the rate.
WINDOW_SECONDS = 300.0
_SAMPLE_SECONDS = 5.0
_DAY_SECONDS = 86_400


class RequestCosts:
    """Counts requests by price. The rate is that of the last WINDOW_SECONDS, or since the start if that is shorter."""

    def __init__(self, store: Store, prices: Prices | None) -> None:
        self._store = store
        self._prices = prices
        self._meters = {kind: RateMeter(WINDOW_SECONDS) for kind in ("lists", "writes", "heads", "gets")}

    async def run(self) -> None:
        """Sample the counters until cancelled."""
        while True:
            self._sample()
            await trio.sleep(_SAMPLE_SECONDS)

    def _sample(self) -> None:
        now = trio.current_time()
        for kind, count in self._counts().items():
            self._meters[kind].record(now, count)

    def _counts(self) -> dict[str, int]:
        made = self._store.statistics()
        return {
            "lists": made.lists,
            "writes": made.class_a - made.lists,
            "heads": made.heads,
            "gets": made.gets,
        }

    def statistics(self) -> dict[str, Any]:
        """Return the cost of all requests in dollars, and the counts and the cost of a day at the present rate.

        dollars_per_day_by_kind: of LISTs, the other requests of class A, HEADs and GETs. rate_seconds: how long the
        rate was measured. Dollars are None, and prices is "", if the prices are unknown.
        """
        a_day = {kind: meter.per_second() * _DAY_SECONDS for kind, meter in self._meters.items()}
        made, by_kind = self._dollars(self._counts()), self._dollars(a_day)
        return {
            "class_a_per_day": round(a_day["lists"] + a_day["writes"]),
            "class_b_per_day": round(a_day["heads"] + a_day["gets"]),
            "rate_seconds": round(self._meters["gets"].span_seconds, 1),
            "prices": self._prices.name if self._prices else "",
            "dollars": made and round(sum(made.values()), 6),
            "dollars_per_day": by_kind and round(sum(by_kind.values()), 6),
            "dollars_per_day_by_kind": by_kind,
        }

    def _dollars(self, counts: Mapping[str, float]) -> dict[str, float] | None:
        """Return what requests cost, by kind; None if the prices are unknown."""
        if self._prices is None:
            return None
        prices = {"lists": self._prices.class_a, "writes": self._prices.class_a}
        return {
            kind: round(count * prices.get(kind, self._prices.class_b) / 1e6, 6)
            for kind, count in counts.items()
        }
