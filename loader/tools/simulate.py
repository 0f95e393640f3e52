"""Estimates what a run will request from the bucket: its index, shards in use, first batch, downloads, dollars.

    fusecache dataset simulate DATASET --global-batch-size 512 --cache-bytes 500GB [--png FILE]

It uses only the index and the order, and opens no shard. Figures are those of the first node, if not of all nodes.
At each step that reads a sample of an uncached shard, the whole shard counts as downloaded. With a known order, a shard
stays cached while it is in use. If the cache has no room for it, its samples come as exact byte ranges, which sum up to
the whole shard.

Simulates caches of whole shards, without the bytes: how much each would download for the same uses.

A shard is used at each step that reads a sample of it. Uses come in order, in large chunks. If no shard that is used
again within a chunk must be evicted, the chunk costs only a few array operations.

What a data set costs a node beside the bytes of its samples: its index, and the requests of an epoch.

The constants are measured; docs/how-to/scale.md shows what was measured, and the formulas.
"""

import argparse
import os
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from heapq import heappop, heappush
from pathlib import Path
from typing import Any

import numpy as np

from fusecache.model.prices import R2_PRICES
from loader.base.argument_checks import parse_size
from loader.base.optional_imports import optional_module
from loader.errors import LoaderError
from loader.hints.plan_messages import Ids, shard_reads
from loader.mds.dataset import MDSDataset
from loader.mds.index import INDEX_NAME, Index
from loader.order import DEFAULT_SEED
from loader.sampling.sampler import ElasticBatchSampler
from loader.sampling.step_plan import StepPlan
from loader.tools.commands import progress_bar, say
from loader.world import World

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


# A mount fetches this much with one GET; a sequential read begins with smaller ones.
GET_BYTES = 8 << 20
_FIRST_GET_BYTES = 1 << 20
_SMALLER_GETS = 15
# Of a process that has opened an index.
INDEX_MEMORY_BYTES_A_SHARD = 165
INDEX_CPU_SECONDS_A_SHARD = 3e-6


@dataclass(frozen=True, slots=True)
class IndexCosts:
    """What each node pays for its index, at most. gets: once a node; the others: of each process."""

    nbytes: int
    gets: int
    memory_bytes: int
    cpu_seconds: float


def index_costs(nbytes: int, shards: int) -> IndexCosts:
    """Return what it costs to open an index of `nbytes` that names so many shards."""
    smaller = min(_SMALLER_GETS, max(0, -(-nbytes // _FIRST_GET_BYTES) - 1))
    return IndexCosts(
        nbytes,
        max(1, -(-nbytes // GET_BYTES)) + smaller,
        shards * INDEX_MEMORY_BYTES_A_SHARD,
        shards * INDEX_CPU_SECONDS_A_SHARD,
    )


def gets_of(nbytes: int, sizes: Ids) -> int:
    """Return the GETs for so many bytes of shards that are fetched whole; sizes: (shards,) bytes of each."""
    total = int(sizes.sum())
    return round(nbytes * int(np.maximum(1, -(-sizes // GET_BYTES)).sum()) / total) if total else 0


def dollars_of(gets: int) -> float:
    """Return what R2 bills for GETs, before its free tier."""
    return gets * R2_PRICES.class_b / 1e6


POLICIES = ("LRU", "keep what came first", "known order")
# A remote bucket, with the values of the project's benchmarks.
LATENCY_SECONDS = 0.04
BYTES_A_SECOND = 80e6
CONNECTIONS = 32
EPOCHS = 3

Figure = int | float | list[int] | list[float]


@dataclass(frozen=True, slots=True, eq=False)
class UseIntervals:
    """The steps at which shards are in use. All arrays: (uses,) int64, ordered by first; steps count over epochs."""

    shard: Ids
    first: Ids
    last: Ids


def use_intervals(step_plan: StepPlan, ends: Ids, epochs: int) -> UseIntervals:
    """Return the steps at which each shard is in use, one entry an epoch."""
    with progress_bar(epochs, "epoch") as progress:
        parts = []
        for epoch in range(epochs):
            parts.append(shard_reads(step_plan, ends, epoch * step_plan.steps, step_plan.steps))
            progress.update()
    return UseIntervals(
        np.concatenate([part.shard for part in parts]),
        np.concatenate([part.first for part in parts]),
        np.concatenate([part.last for part in parts]),
    )


def downloads(
    step_plan: StepPlan, ends: Ids, sizes: Ids, cache_bytes: int, epochs: int
) -> dict[str, list[int]]:
    """Return, for each policy, the bytes downloaded in each epoch, with a cache of cache_bytes.

    ends: (shards,) one past the last id of each; sizes: (shards,) bytes.
    """
    least, first = LeastRecent(sizes, cache_bytes), FirstCome(sizes, cache_bytes)
    intervals = use_intervals(step_plan, ends, epochs)
    fits = in_use(intervals, sizes, epochs * step_plan.steps)[1].max(initial=0) <= cache_bytes
    fetched: dict[str, list[int]] = {policy: [0] * epochs for policy in POLICIES}
    with progress_bar(epochs * step_plan.steps * step_plan.samples, "sample") as progress:
        for epoch in range(epochs):
            for uses in shard_uses_by_step(step_plan, ends, epoch):
                fetched[POLICIES[0]][epoch] += least.use(uses)
                if not fits:
                    fetched[POLICIES[1]][epoch] += first.use(uses)
            progress.update(step_plan.steps * step_plan.samples)
    for policy in POLICIES[1 if fits else 2 :]:
        fetched[policy] = known_use_downloads(intervals, sizes, cache_bytes, policy, step_plan.steps, epochs)
    return fetched


def known_use_downloads(
    intervals: UseIntervals, sizes: Ids, cache_bytes: int, policy: str, steps: int, epochs: int
) -> list[int]:
    """Return the bytes downloaded in each epoch of `steps` steps by a cache that knows when shards are in use.

    sizes: (shards,) bytes. Only shards out of use are evicted. Policy "keep what came first" evicts the shard that went
    out of use last. "known order" evicts the shard whose next use is last, which may be the newest; if all shards have
    one size, no other choice downloads less.
    """
    uses = list(zip(intervals.shard.tolist(), intervals.first.tolist(), intervals.last.tolist(), strict=True))
    following: dict[int, int] = {}
    again = [0] * len(uses)
    for number in reversed(range(len(uses))):
        shard = uses[number][0]
        again[number] = following.get(shard, 1 << 60)
        # The index of the use, not its step: many uses begin at an epoch's first step, one after the other.
        following[shard] = number
    shelf = _UnusedShards(policy, sizes.tolist(), cache_bytes)
    fetched = [0] * epochs
    ending: list[tuple[int, int, int]] = []
    for number, (shard, first, last) in enumerate(uses):
        while ending and ending[0][0] < first:
            _, done, next_use = heappop(ending)
            shelf.put(done, next_use)
        if not shelf.take(shard):
            fetched[first // steps] += int(sizes[shard])
        heappush(ending, (last, shard, again[number]))
    return fetched


class _UnusedShards:
    """The cached shards that are out of use; shards in use take cache space first."""

    def __init__(self, policy: str, sizes: list[int], room: int) -> None:
        self._policy, self._sizes, self._room = policy, sizes, room
        self._kept: dict[int, int] = {}
        self._heap: list[tuple[int, int]] = []
        self._used = 0

    def take(self, shard: int) -> bool:
        """Move a shard into use; return whether it was cached."""
        is_here = self._kept.pop(shard, None) is not None
        if not is_here:
            self._used += self._sizes[shard]
            self._shrink()
        return is_here

    def put(self, shard: int, next_use: int) -> None:
        """Move a shard out of use."""
        self._kept[shard] = next_use
        heappush(self._heap, (-next_use, shard))
        self._shrink()

    def _shrink(self) -> None:
        while self._used > self._room and self._kept:
            shard = self._victim()
            del self._kept[shard]
            self._used -= self._sizes[shard]

    def _victim(self) -> int:
        if self._policy == POLICIES[1]:
            return next(reversed(self._kept))
        while True:
            next_use, shard = heappop(self._heap)
            if self._kept.get(shard) == -next_use:
                return shard


def in_use(intervals: UseIntervals, sizes: Ids, steps: int) -> tuple[Ids, Ids]:
    """Return (steps,) the number of shards in use at each step of the first epoch, and their bytes."""
    mine = intervals.first < steps
    counts, nbytes = np.zeros(steps + 1, np.int64), np.zeros(steps + 1, np.int64)
    for total, weights in (
        (counts, np.ones(int(mine.sum()), np.int64)),
        (nbytes, sizes[intervals.shard[mine]]),
    ):
        np.add.at(total, intervals.first[mine], weights)
        np.add.at(total, np.minimum(intervals.last[mine] + 1, steps), -weights)
    return np.cumsum(counts)[:-1], np.cumsum(nbytes)[:-1]


def report(
    dataset: MDSDataset, sampler: ElasticBatchSampler, cache_bytes: int, epochs: int, nodes: int = 1
) -> tuple[dict[str, Figure], Ids]:
    """Return all figures of a run on one of `nodes` machines, and (steps,) the shards in use in its first epoch."""
    step_plan, index = sampler.step_plan, dataset.index
    ends: Ids = np.cumsum(index.samples)
    sizes = np.where(index.zip_bytes > 0, index.zip_bytes, index.raw_bytes)
    intervals = use_intervals(step_plan, ends, 1)
    counts, nbytes = in_use(intervals, sizes, step_plan.steps)
    first = intervals.shard[intervals.first == 0]
    per_sample = float(index.raw_bytes.sum()) / max(1, int(index.samples.sum()))
    rounds = -(-first.size // CONNECTIONS)
    opening = index_costs(_index_bytes(index), index.samples.size)
    downloaded = downloads(step_plan, ends, sizes, cache_bytes, epochs)
    gets = [gets_of(nbytes, sizes) for nbytes in downloaded[POLICIES[-1]]]
    figures: dict[str, Figure] = {
        "index of a node, bytes": opening.nbytes,
        "index of a node, GETs": opening.gets,
        "index, bytes of memory of a process": opening.memory_bytes,
        "index, CPU seconds of a process": opening.cpu_seconds,
        "index, dollars of all nodes": nodes * dollars_of(opening.gets),
        "steps an epoch": step_plan.steps,
        "bytes a step": round(per_sample * step_plan.samples),
        "dataset bytes": int(sizes.sum()),
        "shards in use, mean": float(counts.mean()),
        "shards in use, most": int(counts.max()),
        "bytes in use, most": int(nbytes.max()),
        "first batch, shards": int(first.size),
        "first batch, seconds by whole shards": rounds
        * (LATENCY_SECONDS + float(sizes[first].max(initial=0)) / BYTES_A_SECOND),
        "first batch, seconds by exact bytes": -(-step_plan.samples // CONNECTIONS)
        * (LATENCY_SECONDS + per_sample / BYTES_A_SECOND),
        **{f"bytes an epoch of a node, {policy}": each for policy, each in downloaded.items()},
        f"GETs an epoch of a node, {POLICIES[-1]}": gets,
        f"dollars an epoch of all nodes, {POLICIES[-1]}": [nodes * dollars_of(each) for each in gets],
    }
    return figures, counts


def _index_bytes(index: Index) -> int:
    return sum(os.stat(f"{directory}/{INDEX_NAME}").st_size for directory in index.directories)


def add_simulate(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("dataset", type=Path, help="directory that contains index.json")
    parser.add_argument("--global-batch-size", type=int, required=True, help="samples a step, over all ranks")
    parser.add_argument("--cache-bytes", required=True, help="cache size of each machine: 500GB, 1GiB, 500e9")
    parser.add_argument("--order", default="py1e", help="order of the sampler (default: py1e)")
    parser.add_argument(
        "--seed", type=int, default=DEFAULT_SEED, help=f"seed of the sampler (default: {DEFAULT_SEED})"
    )
    parser.add_argument("--canonical-nodes", type=int, help="as in the sampler (default: that of the order)")
    parser.add_argument("--block-size", type=int, default=0, help="in samples (default: that of the order)")
    parser.add_argument("--epochs", type=int, default=EPOCHS, help=f"number of epochs (default: {EPOCHS})")
    parser.add_argument(
        "--nodes", type=int, default=1, help="number of machines; the first one's share is shown"
    )
    parser.add_argument("--ranks-per-node", type=int, default=1, help="ranks of each machine (default: 1)")
    parser.add_argument("--png", type=Path, help="draw shards in use and downloads into this file")


def run_simulate(options: Any) -> int:
    """Print the figures, and draw the picture if requested. Raises LoaderError, and OSError for the picture."""
    if min(options.epochs, options.nodes, options.ranks_per_node) < 1:
        raise LoaderError("--epochs, --nodes and --ranks-per-node are at least 1")
    try:
        cache_bytes = parse_size(options.cache_bytes)
    except ValueError as problem:
        raise LoaderError(f"--cache-bytes {problem}") from None
    dataset = MDSDataset(options.dataset)
    if options.global_batch_size > len(dataset):
        raise LoaderError(
            f"--global-batch-size {options.global_batch_size} is more than the {len(dataset)} samples of "
            f"{options.dataset}: an epoch has no step. Name a smaller one"
        )
    sampler = ElasticBatchSampler(
        dataset,
        global_batch_size=options.global_batch_size,
        order=options.order,
        seed=options.seed,
        canonical_nodes=options.canonical_nodes,
        block_size=options.block_size,
        world=World(0, options.nodes * options.ranks_per_node, options.ranks_per_node),
    )
    figures, counts = report(dataset, sampler, cache_bytes, options.epochs, options.nodes)
    width = max(map(len, figures))
    for name, value in figures.items():
        say(f"{name:<{width}}  {_figure_text(value)}")
    most = figures["bytes in use, most"]
    if isinstance(most, int) and most > cache_bytes:
        say(
            f"warning: up to {most:,} bytes are in use at one time, and the cache has {cache_bytes:,}. Without hints, "
            "shards are downloaded repeatedly; these figures count whole shards, but the daemon may fetch parts. With "
            "hints, samples of uncached shards come as exact byte ranges. Enlarge the cache, or reduce the shards in "
            "use with a smaller --canonical-nodes or --block-size.",
            error=True,
        )
    if options.png is not None:
        draw(counts, figures, options.png)
        say(f"see {options.png}")
    return 0


def _figure_text(value: Figure) -> str:
    if isinstance(value, list):
        return "  ".join(map(_figure_text, value))
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:,.3f}".rstrip("0").rstrip(".") if value >= 1 else f"{value:.3g}"


def draw(counts: Ids, figures: Mapping[str, Figure], path: Path) -> None:
    """Draw the shards in use over the first epoch, and the downloads of each epoch by policy, as PNG."""
    figure = optional_module("matplotlib.figure", why="a picture").Figure(
        figsize=(9, 4), layout="constrained"
    )
    left, right = figure.subplots(1, 2)
    left.plot(counts)
    left.set(title="shards in use", xlabel="step of the first epoch", ylim=(0, None))
    for policy in POLICIES:
        bytes_an_epoch = np.array(figures[f"bytes an epoch of a node, {policy}"])
        right.plot(bytes_an_epoch / 1e9, marker="o", label=policy)
    right.set(title="GB downloaded", xlabel="epoch", ylim=(0, None))
    right.xaxis.get_major_locator().set_params(integer=True)
    right.legend()
    figure.savefig(path, format="png")
