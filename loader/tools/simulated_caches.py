"""Simulates caches of whole shards, without the bytes: how much each would download for the same uses.

A shard is used at each step that reads a sample of it. Uses come in order, in large chunks. If no shard that is used
again within a chunk must be evicted, the chunk costs only a few array operations.
"""

from collections import OrderedDict
from collections.abc import Iterator

import numpy as np

from loader.hints.planned_reads import Ids
from loader.sampling.step_plan import StepPlan

# Number of uses processed together; below the smallest, they are processed one by one.
_CHUNK, _SMALLEST = 1 << 16, 1 << 6


def shard_uses_by_step(step_plan: StepPlan, ends: Ids, epoch: int) -> Iterator[Ids]:
    """Yield (uses,) shards in the order in which an epoch uses them, in chunks; a shard occurs once a step.

    ends: (shards,) one past the last id of each.
    """
    for _, ids in step_plan.ids(epoch * step_plan.steps, step_plan.steps):
        shards = np.searchsorted(ends, ids, side="right")
        keys = shards + np.arange(ids.shape[0])[:, None] * ends.size
        _, first = np.unique(keys.ravel(), return_index=True)
        uses = shards.ravel()[np.sort(first)]
        for start in range(0, uses.size, _CHUNK):
            yield uses[start : start + _CHUNK]


class LeastRecent:
    """Evicts the least recently used shard (LRU). sizes: (shards,) bytes; capacity: the cache's bytes."""

    def __init__(self, sizes: Ids, capacity: int) -> None:
        self._sizes, self._capacity = sizes, capacity
        self._plain_sizes: list[int] = sizes.tolist()
        self._used = 0
        self._order: OrderedDict[int, None] = OrderedDict()  # least recently used first
        self._is_here = np.zeros(sizes.size, bool)

    def use(self, uses: Ids) -> int:
        """Return the bytes downloaded for (uses,) shards."""
        fetched = self._use_together(uses)
        if fetched is not None:
            return fetched
        if uses.size <= _SMALLEST:
            return sum(map(self._use_one, uses.tolist()))
        half = uses.size // 2
        return self.use(uses[:half]) + self.use(uses[half:])

    def _use_together(self, uses: Ids) -> int | None:
        """Like `use`; returns None, and does nothing, if a shard that these use would have to be evicted."""
        last_first, places = np.unique(uses[::-1], return_index=True)
        used = set(last_first.tolist())
        fetched = int(self._sizes[last_first[~self._is_here[last_first]]].sum())
        going, left = [], self._used + fetched
        for shard in self._order:
            if left <= self._capacity:
                break
            if shard in used:
                return None
            going.append(shard)
            left -= self._plain_sizes[shard]
        if left > self._capacity:
            return None
        for shard in going:
            del self._order[shard]
        for shard in last_first[np.argsort(-places)].tolist():
            self._order[shard] = None
            self._order.move_to_end(shard)
        self._is_here[going] = False
        self._is_here[last_first] = True
        self._used = left
        return fetched

    def _use_one(self, shard: int) -> int:
        if shard in self._order:
            self._order.move_to_end(shard)
            return 0
        self._order[shard] = None
        self._is_here[shard] = True
        self._used += self._plain_sizes[shard]
        while self._used > self._capacity:
            gone = self._order.popitem(last=False)[0]
            self._is_here[gone] = False
            self._used -= self._plain_sizes[gone]
        return self._plain_sizes[shard]


class FirstCome:
    """Keeps the first shards that fit, and admits no more once full. sizes: (shards,) bytes; capacity: cache bytes."""

    def __init__(self, sizes: Ids, capacity: int) -> None:
        self._sizes, self._capacity = sizes, capacity
        self._is_kept = np.zeros(sizes.size, bool)
        self._is_known = np.zeros(sizes.size, bool)

    def use(self, uses: Ids) -> int:
        """Return the bytes downloaded for (uses,) shards."""
        new, places = np.unique(uses, return_index=True)
        is_new = ~self._is_known[new]
        new = new[is_new][np.argsort(places[is_new])]
        self._is_known[new] = True
        fetched = int(self._sizes[uses[~self._is_kept[uses]]].sum())
        again = np.bincount(uses, minlength=self._sizes.size)
        for shard, size in zip(new.tolist(), self._sizes[new].tolist(), strict=True):
            if size <= self._capacity:
                self._capacity -= size
                self._is_kept[shard] = True
                fetched -= size * (int(again[shard]) - 1)
        return fetched
