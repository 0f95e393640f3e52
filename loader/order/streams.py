"""Decides how many samples of each stream an epoch has, and which.

Steps 1 to 3 of StreamingDataset 0.13: weights give the samples of each stream (`StreamTable`), these give the samples
of each shard (`chosen_per_shard`), and these give *units* (`sampled_units`). A unit is a set of samples that stay
together until the shuffle: each full pass over a shard, and the partial pass after them. Ids count through all shards
of all streams in order. All functions are pure, and none shuffles.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Self

import numpy as np

from loader.errors import OrderError
from loader.order.spec import Ids, OrderSpec, Stored, Weight

# Samples processed at a time, which bounds temporary arrays.
CHUNK_SAMPLES = 1 << 18


@dataclass(frozen=True, slots=True, eq=False)
class StreamTable:
    """The streams of a dataset, and what an epoch takes of each.

    sizes: (shards,) int64, samples of each shard, stream after stream. borders: (streams + 1,) first shard of each.
    choose: (streams,) samples an epoch. proportions: (streams,) fraction of the epoch, with sum 1.
    """

    sizes: Ids
    borders: tuple[int, ...]
    choose: tuple[int, ...]
    proportions: tuple[float, ...]

    @classmethod
    def of(cls, sizes: Ids, shards_per_stream: Sequence[int], spec: OrderSpec) -> Self:
        """Apply the weights of `spec` to these shards.

        Raises OrderError if weights and streams differ in number, contradict each other, or leave no sample.
        """
        borders = [0, *np.cumsum(np.asarray(shards_per_stream, np.int64)).tolist()]
        if borders[-1] != sizes.size or min(shards_per_stream, default=-1) < 0:
            raise OrderError(f"shards a stream {list(shards_per_stream)} are not the {sizes.size} shards")
        counts = [int(sizes[first:stop].sum()) for first, stop in pairwise(borders)]
        for stream, count in enumerate(counts):
            if count == 0:
                raise OrderError(f"there are no samples to order: stream {stream} of {len(counts)} is empty")
        choose, proportions = _shares(np.array(counts, np.int64), spec)
        if sum(choose) == 0:
            raise OrderError("there are no samples to order: the weights of all streams come to 0 samples")
        return cls(sizes, tuple(borders), choose, proportions)

    @property
    def streams(self) -> int:
        """The number of streams."""
        return len(self.choose)

    @property
    def samples(self) -> int:
        """The number of samples of an epoch."""
        return sum(self.choose)

    @property
    def is_whole(self) -> bool:
        """Whether an epoch takes each sample exactly once."""
        return all(
            choose == int(self.stream_sizes(stream).sum()) for stream, choose in enumerate(self.choose)
        )

    def stream_sizes(self, stream: int) -> Ids:
        """(shards of the stream,) number of samples in each."""
        return self.sizes[self.borders[stream] : self.borders[stream + 1]]

    def first_ids(self) -> Ids:
        """(shards,) the id of each shard's first sample."""
        return np.cumsum(self.sizes) - self.sizes


def _shares(counts: Ids, spec: OrderSpec) -> tuple[tuple[int, ...], tuple[float, ...]]:
    """Return samples and proportion of each stream. counts: (streams,) samples that each contains."""
    weights = spec.weights or (Weight(),) * counts.size
    if len(weights) != counts.size:
        raise OrderError(f"there are {len(weights)} weights for {counts.size} streams")
    proportional = [weight.proportion is not None for weight in weights]
    if any(proportional) and not all(proportional):
        raise OrderError(
            "either all streams have a proportion or none has: proportions are of the whole epoch"
        )
    if all(proportional):
        shares = np.array([weight.proportion for weight in weights], np.float64)
        if not shares.any():
            raise OrderError("the proportions of all streams are 0")
        return _by_proportion(shares / shares.sum(), spec.epoch_size or int(counts.sum()), spec.seed)
    if spec.epoch_size is not None:
        if any(weight != Weight() for weight in weights):
            raise OrderError(
                "epoch_size goes with proportions, or no weights: repeat and choose already say how many "
                "samples an epoch has"
            )
        return _by_proportion(counts / counts.sum(), spec.epoch_size, spec.seed)
    choose = [_absolute(weight, count) for weight, count in zip(weights, counts.tolist(), strict=True)]
    total = sum(choose)
    return tuple(choose), tuple(count / total if total else 0.0 for count in choose)


def _by_proportion(
    shares: "np.ndarray[tuple[int], np.dtype[np.float64]]", samples: int, seed: int
) -> tuple[tuple[int, ...], tuple[float, ...]]:
    choose = (samples * shares).astype(np.int64)
    # The samples lost by rounding down go to randomly drawn streams, one each.
    remainder = np.random.default_rng(seed).choice(shares.size, samples - int(choose.sum()), replace=False)
    choose[remainder] += 1
    return tuple(choose.tolist()), tuple(shares.tolist())


def _absolute(weight: Weight, count: int) -> int:
    if weight.repeat is not None:
        return int(weight.repeat * count)
    return count if weight.choose is None else int(weight.choose)


def chosen_per_shard(sizes: Ids, choose: int, granularity: int, seed: int) -> Ids:
    """Return how many samples to take of each shard of a stream: (shards,) int64, with sum `choose`.

    First whole passes over the stream; then picks of `granularity` samples of one shard, in random order, until the
    sum is reached.
    """
    passes, rest = divmod(choose, int(sizes.sum()))
    chosen: Ids = sizes * passes
    if rest == 0:
        return chosen
    picks = -(-sizes // granularity)
    ends = np.cumsum(picks)
    last = sizes - (picks - 1) * granularity
    # Bit-compatibility: after an empty shard, StreamingDataset treats the pick before it as a full one.
    last[:-1][sizes[1:] == 0] = granularity
    for picked in _chunks(np.random.default_rng(seed).permutation(int(ends[-1]))):
        shards = np.searchsorted(ends, picked, side="right")
        taken = np.where(picked == ends[shards] - 1, last[shards], granularity)
        before = np.cumsum(taken) - taken
        taken = np.clip(rest - before, 0, taken)
        np.add.at(chosen, shards, taken)
        rest -= int(taken.sum())
        if rest == 0:
            break
    return chosen


def sampled_units(
    table: StreamTable, spec: OrderSpec, epoch: int, stream: int | None = None
) -> tuple[Ids, Stored | None]:
    """Return the units of an epoch, and the sample id at each position.

    stream: one of them, else all. Returns ((units,) sizes, (samples,) ids); ids is None if position and id are equal.
    Each call starts its generators from their seeds, as StreamingDataset does.
    """
    streams = range(table.streams) if stream is None else [stream]
    if stream in (None, 0 if table.streams == 1 else None) and table.is_whole:
        return table.sizes[table.sizes > 0], None
    # StreamingDataset redraws balanced samples each epoch, even if it does not shuffle.
    draw = np.random.default_rng(spec.seed + epoch if spec.sampling == "balanced" else spec.seed)
    firsts = table.first_ids()
    units: list[int] = []
    total = sum(table.choose[number] for number in streams)
    ids: Stored = np.empty(total, id_type(int(table.sizes.sum())))
    filled = 0
    for number in streams:
        sizes = table.stream_sizes(number)
        chosen = chosen_per_shard(sizes, table.choose[number], spec.granularity, spec.epoch_seed(epoch))
        begin = table.borders[number]
        for shard in np.flatnonzero(chosen).tolist():
            first, size = int(firsts[begin + shard]), int(sizes[shard])
            times, part = divmod(int(chosen[shard]), size)
            units += [size] * times
            for _ in range(times):
                ids[filled : filled + size] = np.arange(first, first + size)
                filled += size
            if part:
                units.append(part)
                ids[filled : filled + part] = first + np.sort(draw.choice(size, part, replace=False))
                filled += part
    return np.array(units, np.int64), ids


def id_type(samples: int) -> type[np.integer[Any]]:
    """Return the smallest integer type for ids below `samples`."""
    return np.uint32 if samples <= 1 << 32 else np.int64


def _chunks(array: Ids) -> Iterator[Ids]:
    for first in range(0, array.size, CHUNK_SAMPLES):
        yield array[first : first + CHUNK_SAMPLES]
