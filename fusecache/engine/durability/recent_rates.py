"""What the mount did of late: bytes and requests a second, the files that are read most, and what the requests cost.

Costs are those of all requests, and of a day at the present rate, if the store's prices are known.
"""

from collections import Counter
from collections.abc import Mapping
from typing import Any

import trio

from fusecache.engine.cache.block_cache import BlockCache
from fusecache.engine.namespace.tree import Tree
from fusecache.model.prices import Prices
from fusecache.policy.rate_meter import RateMeter
from fusecache.remote.store import Store

WINDOW_SECONDS = 60.0
# Of costs. Polling programs repeat within seconds or a minute; longer, and an ended job still shows in the rate.
COST_WINDOW_SECONDS = 300.0
_DAY_SECONDS = 86_400
_SAMPLE_SECONDS = 2.0
# Two samples closer than this differ by chance.
_FRESH_SECONDS = 0.5
# Files whose reads are counted are forgotten after this long, or twice that.
_FILES_SECONDS = 10.0
# Files counted in that time; a job that reads more than these has no busiest file.
_FILES_COUNTED = 1000
_FILES_NAMED = 20


class BusyFiles:
    """Counts the bytes that programs read from each file, by inode number, of the last _FILES_SECONDS or twice that."""

    def __init__(self, now: float) -> None:
        self._before: Counter[int] = Counter()
        self._counts: Counter[int] = Counter()
        self._began = self._began_before = now

    def count(self, number: int, nbytes: int) -> None:
        """Count a read."""
        if number in self._counts or len(self._counts) < _FILES_COUNTED:
            self._counts[number] += nbytes

    def turn(self, now: float) -> None:
        """Forget what is too old; call it now and then."""
        if now >= self._began + _FILES_SECONDS:
            self._before, self._counts = self._counts, Counter()
            self._began_before, self._began = self._began, now

    def rates(self, now: float) -> list[tuple[int, float]]:
        """Return the busiest files with their bytes a second, the busiest first."""
        seconds = max(now - self._began_before, _FRESH_SECONDS)
        together = (self._before + self._counts).most_common(_FILES_NAMED)
        return [(number, nbytes / seconds) for number, nbytes in together]


class RecentRates:
    """Samples the counters of cache and store. The rates are those of the last WINDOW_SECONDS, or since the start.

    Those of costs are of the last COST_WINDOW_SECONDS.
    """

    def __init__(self, tree: Tree, cache: BlockCache, store: Store, prices: Prices | None) -> None:
        self.files = BusyFiles(trio.current_time())
        self._tree, self._cache, self._store = tree, cache, store
        self._prices = prices
        self._meters = {name: RateMeter(WINDOW_SECONDS) for name in self._totals()}
        self._cost_meters = {kind: RateMeter(COST_WINDOW_SECONDS) for kind in self._counts()}
        self._sampled = float("-inf")

    async def run(self) -> None:
        """Sample until cancelled."""
        while True:
            self._sample(trio.current_time())
            await trio.sleep(_SAMPLE_SECONDS)

    def _sample(self, now: float) -> None:
        self._sampled = now
        self.files.turn(now)
        for name, total in self._totals().items():
            self._meters[name].record(now, total)
        for kind, count in self._counts().items():
            self._cost_meters[kind].record(now, count)

    def _totals(self) -> dict[str, int]:
        read, made = self._cache.statistics(), self._store.statistics()
        return {
            **{f"{source}_bytes": nbytes for source, nbytes in read.bytes_from.items()},
            "fetched_bytes": made.bytes_read,
            "sent_bytes": made.bytes_sent,
            "requests": made.class_a + made.class_b + made.deletes + made.aborts,
        }

    def statistics(self) -> dict[str, Any]:
        """Return the rates, each `<what>_per_second`, the seconds that they cover, and the busiest files."""
        now = trio.current_time()
        if now >= self._sampled + _FRESH_SECONDS:
            self._sample(now)
        rates = {f"{name}_per_second": round(meter.per_second(), 3) for name, meter in self._meters.items()}
        return {
            "rates": {"seconds": round(self._meters["requests"].span_seconds, 1), **rates},
            "busy_files": [
                {"path": self._tree.path(node), "read_bytes_per_second": round(pace)}
                for number, pace in self.files.rates(now)
                if (node := self._tree.nodes.get(number)) is not None and self._tree.is_linked(node)
            ],
        }

    # ---- costs

    def _counts(self) -> dict[str, int]:
        made = self._store.statistics()
        return {
            "lists": made.lists,
            "writes": made.class_a - made.lists,
            "heads": made.heads,
            "gets": made.gets,
        }

    def costs(self) -> dict[str, Any]:
        """Return the cost of all requests in dollars, and the counts and the cost of a day at the present rate.

        dollars_per_day_by_kind: of LISTs, the other requests of class A, HEADs and GETs. rate_seconds: how long the
        rate was measured. Dollars are None, and prices is "", if the prices are unknown.
        """
        a_day = {kind: meter.per_second() * _DAY_SECONDS for kind, meter in self._cost_meters.items()}
        made, by_kind = self._dollars(self._counts()), self._dollars(a_day)
        return {
            "class_a_per_day": round(a_day["lists"] + a_day["writes"]),
            "class_b_per_day": round(a_day["heads"] + a_day["gets"]),
            "rate_seconds": round(self._cost_meters["gets"].span_seconds, 1),
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
