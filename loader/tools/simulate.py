"""Estimates what a run will request from the bucket: its index, shards in use, first batch, downloads, dollars.

    fusecache dataset simulate DATASET --global-batch-size 512 --cache-bytes 500GB

It uses only the index and the order, and opens no shard. Figures are those of the first node, if not of all nodes.
Whole shards count as downloaded. As the order is known, a shard stays cached while it is in use. If the cache has no
room for it, its samples come as exact byte ranges, which sum up to the whole shard.

The constants are measured; docs/how-to/scale.md shows what was measured, and the formulas.
"""

import argparse
import os
from dataclasses import dataclass
from heapq import heappop, heappush
from pathlib import Path
from typing import Any

import numpy as np

from fusecache.model.prices import R2_PRICES
from loader.base.argument_checks import byte_count
from loader.errors import LoaderError
from loader.hints.plan_messages import Ids, shard_reads
from loader.mds.dataset import MDSDataset
from loader.mds.index import INDEX_NAME, Index
from loader.order import DEFAULT_SEED
from loader.sampling.sampler import ElasticBatchSampler, StepPlan
from loader.tools.commands import progress_bar, say
from loader.world import World

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


def downloads(intervals: UseIntervals, sizes: Ids, cache_bytes: int, steps: int, epochs: int) -> list[int]:
    """Return the bytes downloaded in each epoch of `steps` steps, with a cache that knows when shards are in use.

    sizes: (shards,) bytes. Only shards out of use are evicted, the one whose next use is last, which may be the newest;
    if all shards have one size, no other choice downloads less.
    """
    uses = list(zip(intervals.shard.tolist(), intervals.first.tolist(), intervals.last.tolist(), strict=True))
    following: dict[int, int] = {}
    again = [0] * len(uses)
    for number in reversed(range(len(uses))):
        shard = uses[number][0]
        again[number] = following.get(shard, 1 << 60)
        # The index of the use, not its step: many uses begin at an epoch's first step, one after the other.
        following[shard] = number
    shelf = _UnusedShards(sizes.tolist(), cache_bytes)
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

    def __init__(self, sizes: list[int], room: int) -> None:
        self._sizes, self._room = sizes, room
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
) -> dict[str, Figure]:
    """Return all figures of a run on one of `nodes` machines."""
    step_plan, index = sampler.step_plan, dataset.index
    ends: Ids = np.cumsum(index.samples)
    sizes = np.where(index.zip_bytes > 0, index.zip_bytes, index.raw_bytes)
    uses = use_intervals(step_plan, ends, epochs)
    counts, nbytes = in_use(uses, sizes, step_plan.steps)
    first = uses.shard[uses.first == 0]
    per_sample = float(index.raw_bytes.sum()) / max(1, int(index.samples.sum()))
    rounds = -(-first.size // CONNECTIONS)
    opening = index_costs(_index_bytes(index), index.samples.size)
    downloaded = downloads(uses, sizes, cache_bytes, step_plan.steps, epochs)
    gets = [gets_of(nbytes, sizes) for nbytes in downloaded]
    return {
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
        "bytes an epoch of a node": downloaded,
        "GETs an epoch of a node": gets,
        "dollars an epoch of all nodes": [nodes * dollars_of(each) for each in gets],
    }


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


def run_simulate(options: Any) -> int:
    """Print the figures. Raises LoaderError."""
    if min(options.epochs, options.nodes, options.ranks_per_node) < 1:
        raise LoaderError("--epochs, --nodes and --ranks-per-node are at least 1")
    cache_bytes = byte_count(options.cache_bytes, "--cache-bytes")
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
    figures = report(dataset, sampler, cache_bytes, options.epochs, options.nodes)
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
    return 0


def _figure_text(value: Figure) -> str:
    if isinstance(value, list):
        return "  ".join(map(_figure_text, value))
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:,.3f}".rstrip("0").rstrip(".") if value >= 1 else f"{value:.3g}"
