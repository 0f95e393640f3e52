"""What the mount did in the last minute: bytes and requests a second, and the files that are read most."""

from collections import Counter
from typing import Any

import trio

from fusecache.engine.cache.block_cache import BlockCache
from fusecache.engine.namespace.tree import Tree
from fusecache.policy.rate_meter import RateMeter
from fusecache.remote.store import Store

WINDOW_SECONDS = 60.0
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
    """Samples the counters of cache and store. The rates are those of the last WINDOW_SECONDS, or since the start."""

    def __init__(self, tree: Tree, cache: BlockCache, store: Store) -> None:
        self.files = BusyFiles(trio.current_time())
        self._tree, self._cache, self._store = tree, cache, store
        self._meters = {name: RateMeter(WINDOW_SECONDS) for name in self._totals()}
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
