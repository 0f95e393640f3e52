"""The sample order of an epoch: a pure function of shard sizes, seed, epoch and a few settings.

Bit-identical with MosaicML StreamingDataset 0.13 ("random" batching), so that a run can change over in the
middle of an epoch. Nothing here reads files, keeps state or knows of torch. How an epoch comes about:

1. Sampling: every shard is taken as often as `epoch_size` asks (`sample_units`); each full pass over a shard,
   and the rest, is a *unit*: samples that stay together until the shuffle.
2. Shuffle: the units are cut at the borders of the canonical nodes and shuffled (`shuffle_units`).
3. The line: canonical node c is row c; the line takes one sample of each row in turn (`Line`).
4. Global batch b is the line's `[b * GBS, (b + 1) * GBS)` whatever the number of ranks; each rank takes its
   part of it (`rank_positions`). A change of world only re-cuts the batches.

The tail, exactly as StreamingDataset has it: a row that is one sample short repeats its last sample, so the
line has `ceil(samples / canonical_nodes) * canonical_nodes` positions. Where the last, incomplete global
batch is wanted, the line is filled up by repeats of samples near its end until every rank has the same
number. Padding ids of -1, which StreamingDataset uses inside, do not exist here.

Invariants: 1. the set of samples of a complete global batch does not depend on the world. 2. The same call
gives the same array on every machine: ties in py1e's sort, which numpy leaves open, go by position.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from loader.errors import OrderError
from loader.world import World

Ids = NDArray[np.int64]

# Both from StreamingDataset 0.13: the seed and block size of a run that sets neither.
DEFAULT_SEED = 9176
SMALLEST_DEFAULT_BLOCK = 1 << 18
SAMPLES_OF_DEFAULT_BLOCKS = 4_000_000

SEQUENTIAL = "sequential"
ORDERS = ("py1e", "py1br", "py1b", "py1s", "py2s", "naive", SEQUENTIAL)


@dataclass(frozen=True, slots=True)
class OrderSpec:
    """All that decides an order, apart from the dataset, the epoch and the batch size.

    order: one of ORDERS. canonical_nodes: rows of the line; never derived from the world, so that the order
    stays what it is when the world changes. block_size: samples; 0 stands for the default. epoch_size:
    samples an epoch, None for each sample once; with another size every epoch draws anew ("balanced"
    sampling). Raises OrderError for values out of range.
    """

    order: str = "py1e"
    seed: int = DEFAULT_SEED
    canonical_nodes: int = 8
    block_size: int = 0
    epoch_size: int | None = None

    def __post_init__(self) -> None:
        if self.order not in ORDERS:
            raise OrderError(f"order {self.order!r} is unknown: choose one of {', '.join(ORDERS)}")
        if self.seed < 0:
            raise OrderError(f"seed {self.seed} is negative")
        if self.canonical_nodes < 1:
            raise OrderError(f"canonical_nodes {self.canonical_nodes} is not positive")
        if self.epoch_size is not None and self.epoch_size < 1:
            raise OrderError(f"epoch_size {self.epoch_size} is not positive; None means each sample once")
        if self.block_size == 0:
            default = max(SAMPLES_OF_DEFAULT_BLOCKS // self.canonical_nodes, SMALLEST_DEFAULT_BLOCK)
            object.__setattr__(self, "block_size", default)
        if self.block_size < 2:
            raise OrderError(
                f"block_size {self.block_size} shuffles nothing: at least 2, or 0 for the default"
            )


def epoch_ids(sizes: Ids, spec: OrderSpec, epoch: int) -> Ids:
    """Return the ids of an epoch's samples in shuffled order, row after row (not yet in the order of the
    line).

    sizes: (shards,) samples of each shard; ids count through the shards in order. Returns (epoch size,).
    Raises OrderError if there are fewer samples than canonical nodes, where py1e is not defined.
    """
    if epoch < 0:
        raise OrderError(f"epoch {epoch} is negative")
    units, ids = sample_units(sizes, spec, epoch)
    if spec.order == SEQUENTIAL:
        return np.arange(int(units.sum()), dtype=np.int64) if ids is None else ids
    shuffled = shuffle_units(spec.order, units, spec.canonical_nodes, spec.seed, epoch, spec.block_size)
    return shuffled if ids is None else ids[shuffled]


def sample_units(sizes: Ids, spec: OrderSpec, epoch: int) -> tuple[Ids, Ids | None]:
    """Return the units of an epoch and the sample behind each of their positions.

    Returns ((units,) sizes, (epoch size,) ids), ids None where the positions are the ids. Balanced sampling:
    whole passes over the dataset, the rest drawn sample by sample over all shards, anew in each epoch if it
    is shuffled.
    """
    total = int(sizes.sum())
    if total == 0:
        raise OrderError("there is no sample to order")
    if spec.epoch_size is None or spec.epoch_size == total:
        return sizes[sizes > 0], None
    shuffled = spec.order != SEQUENTIAL
    passes, rest = divmod(spec.epoch_size, total)
    chosen = sizes * passes
    if rest:
        picks = np.random.default_rng(spec.seed + epoch if shuffled else spec.seed).permutation(total)[:rest]
        shard_of_pick = np.searchsorted(np.cumsum(sizes), picks, side="right")
        chosen = chosen + np.bincount(shard_of_pick, minlength=sizes.size)
    # StreamingDataset draws the samples anew each epoch even where it does not shuffle.
    draw = np.random.default_rng(spec.seed + epoch)
    units: list[int] = []
    pieces: list[Ids] = []
    first = 0
    for size, count in zip(sizes.tolist(), chosen.tolist(), strict=True):
        times, part = divmod(count, size) if size else (0, 0)
        units += [size] * times
        pieces += [np.arange(first, first + size)] * times
        if part:
            units.append(part)
            pieces.append(first + np.sort(draw.choice(size, part, replace=False)))
        first += size
    return np.array(units, np.int64), np.concatenate(pieces)


def shuffle_units(
    order: str, units: Ids, canonical_nodes: int, seed: int, epoch: int, block_size: int
) -> Ids:
    """Return the positions 0..sum(units) in shuffled order.

    units: (units,) sizes, all positive. `naive` mixes everything; the others keep a canonical node's samples
    within its share, `py1s` and `py2s` within a unit, `py1b`, `py1br` and `py1e` within about `block_size`
    samples. Raises OrderError for an unknown name, or (py1e only) for a canonical node without samples.
    """
    if order == "naive":
        return np.random.default_rng(seed + epoch).permutation(int(units.sum()))
    if order == "py2s":
        return _shuffle_py2s(units, canonical_nodes, seed, epoch)
    shuffle = {
        "py1s": _shuffle_py1s,
        "py1b": _shuffle_py1b,
        "py1br": _shuffle_py1br,
        "py1e": _shuffle_py1e,
    }.get(order)
    if shuffle is None:
        raise OrderError(f"order {order!r} is unknown: choose one of {', '.join(ORDERS)}")
    run = np.random.default_rng(seed)
    order_of_units = np.arange(units.size)
    run.shuffle(order_of_units)
    ends = np.cumsum(units)
    starts, sizes, borders = _cut(
        ends[order_of_units] - units[order_of_units], units[order_of_units], canonical_nodes
    )
    generator = np.random.default_rng(seed + epoch)
    for node in range(canonical_nodes):
        part = np.arange(borders[node], borders[node + 1])
        generator.shuffle(part)
        starts[borders[node] : borders[node + 1]] = starts[part]
        sizes[borders[node] : borders[node + 1]] = sizes[part]
    return shuffle(_Spans(starts, sizes, borders), generator, block_size)


@dataclass(frozen=True, slots=True)
class _Spans:
    """Runs of positions, none empty; those of canonical node c are [borders[c], borders[c + 1])."""

    starts: Ids  # (spans,)
    sizes: Ids  # (spans,)
    borders: Ids  # (canonical nodes + 1,)

    def positions(self) -> Ids:
        """All positions, span after span."""
        ends = np.cumsum(self.sizes)
        found: Ids = np.repeat(self.starts - (ends - self.sizes), self.sizes) + np.arange(
            int(self.sizes.sum())
        )
        return found

    def nodes(self) -> Iterator[Ids]:
        """The span sizes of each canonical node."""
        for first, stop in zip(self.borders[:-1], self.borders[1:], strict=True):
            yield self.sizes[first:stop]


def _cut(starts: Ids, sizes: Ids, parts: int) -> tuple[Ids, Ids, Ids]:
    """Cut spans at the borders of `parts` equal shares of their samples.

    Returns ((spans,) starts, (spans,) sizes, (parts + 1,) the first span of each part).
    """
    ends = np.cumsum(sizes)
    total = int(ends[-1])
    borders = np.arange(parts + 1) * total // parts
    cuts = np.unique(np.concatenate([[0], ends, borders]))  # also the offsets at which the new spans begin
    owner = np.searchsorted(ends, cuts[:-1], side="right")
    new_starts = starts[owner] + (cuts[:-1] - (ends[owner] - sizes[owner]))
    return new_starts, np.diff(cuts), np.searchsorted(cuts, borders)


def _shuffle_slices(ids: Ids, sizes: Ids, generator: np.random.Generator) -> None:
    """Shuffle consecutive slices of the given sizes, each for itself, in place."""
    offset = 0
    for size in sizes.tolist():
        generator.shuffle(ids[offset : offset + size])
        offset += size


def _shuffle_py1s(spans: _Spans, generator: np.random.Generator, _block_size: int) -> Ids:
    ids = spans.positions()
    _shuffle_slices(ids, spans.sizes, generator)
    return ids


def _shuffle_py1b(spans: _Spans, generator: np.random.Generator, block_size: int) -> Ids:
    ids = spans.positions()
    stop = 0
    for sizes in spans.nodes():
        start, stop = stop, stop + int(sizes.sum())
        for block in range(start, stop, block_size):
            generator.shuffle(ids[block : min(block + block_size, stop)])
    return ids


def _shuffle_py1br(spans: _Spans, generator: np.random.Generator, block_size: int) -> Ids:
    ids = spans.positions()
    shortest, longest = int(0.75 * block_size), int(1.25 * block_size)
    staggers = generator.integers(0, shortest, (spans.borders.size - 1,)).tolist()
    stop = 0
    for stagger, sizes in zip(staggers, spans.nodes(), strict=True):
        start, stop = stop, stop + int(sizes.sum())
        blocks: list[tuple[int, int]] = []
        end = start
        while end < stop:
            length = int(generator.integers(shortest, longest))
            block = max(end - stagger, start), min(end + length - stagger, stop)
            blocks.append(block)
            end += block[1] - block[0]
        for first, last in blocks:
            generator.shuffle(ids[first:last])
    return ids


def _shuffle_py1e(spans: _Spans, generator: np.random.Generator, block_size: int) -> Ids:
    ids = spans.positions()
    shortest, longest = int(0.75 * block_size), int(1.25 * block_size)
    stop = 0
    for node, sizes in enumerate(spans.nodes()):
        start, stop = stop, stop + int(sizes.sum())
        count = stop - start
        if count == 0:
            raise OrderError(
                f"canonical node {node} of {spans.borders.size - 1} gets no sample: the epoch has only "
                f"{int(spans.sizes.sum())}. Lower canonical_nodes, or enlarge the dataset or epoch_size."
            )
        part = ids[start:stop]
        _shuffle_slices(part, sizes, generator)
        places = np.arange(count, dtype=np.float64)
        offset = 0
        for size in sizes.tolist():
            # A sample moves at most so far that its span stays within one block, and never out of its node.
            reach = max((int(generator.integers(shortest, longest)) - size) / 2, 0)
            low, high = max(-reach, -offset), min(reach, count - offset - size)
            places[offset : offset + size] += generator.uniform(low, high, size)
            offset += size
        part[:] = part[_argsort(places)]
    return ids


def _argsort(places: NDArray[np.float64]) -> NDArray[np.intp]:
    """Sort, equal places by index: numpy's fastest sort leaves those open, and differs between processors."""
    order = np.argsort(places)
    ordered = places[order]
    equal = np.flatnonzero(ordered[1:] == ordered[:-1])
    for first in equal.tolist():
        stop = int(np.searchsorted(ordered, ordered[first], side="right"))
        start = int(np.searchsorted(ordered, ordered[first], side="left"))
        order[start:stop] = np.sort(order[start:stop])
    return order


def _shuffle_py2s(units: Ids, canonical_nodes: int, seed: int, epoch: int) -> Ids:
    run = np.random.default_rng(seed)
    order_of_units = np.arange(units.size)
    run.shuffle(order_of_units)
    ends = np.cumsum(units)
    sizes = units[order_of_units]
    ids = _Spans(ends[order_of_units] - sizes, sizes, np.array([0, sizes.size])).positions()
    _shuffle_slices(ids, sizes, run)
    # From here on a span is a run of *places* in ids, as the samples of a unit are in no order any more.
    starts, sizes, borders = _cut(np.cumsum(sizes) - sizes, sizes, canonical_nodes)
    generator = np.random.default_rng(seed + epoch)
    pieces: list[Ids] = []
    for node in range(canonical_nodes):
        part = np.arange(borders[node], borders[node + 1])
        generator.shuffle(part)
        for span in part.tolist():
            piece = ids[starts[span] : starts[span] + sizes[span]]
            generator.shuffle(piece)
            pieces.append(piece)
    return np.concatenate(pieces)


@dataclass(frozen=True, slots=True)
class Line:
    """The positions that global batches are cut from, as indices into `epoch_ids`.

    samples: of the epoch. nodes: physical ones; they matter only beyond `length_of_any_world`, where more
    nodes than canonical ones round the rows up to a whole number of samples a node.
    """

    samples: int
    canonical_nodes: int
    nodes: int = 1

    @property
    def width(self) -> int:
        """Positions in a row."""
        return -(-self.samples // self.canonical_nodes)

    @property
    def length_of_any_world(self) -> int:
        """Positions whose samples do not depend on the number of nodes."""
        return self.width * self.canonical_nodes

    @property
    def padded_width(self) -> int:
        """Positions in a row, with those that fill it up for `nodes`."""
        ratio = self.nodes // self.canonical_nodes
        if ratio <= 1 or self.nodes % self.canonical_nodes:
            return self.width
        return -(-self.width // ratio) * ratio

    @property
    def length(self) -> int:
        """All positions."""
        return self.padded_width * self.canonical_nodes

    def indices(self, positions: Ids) -> Ids:
        """Return which of the epoch's samples stand at the given positions of the line, each < length."""
        rows = positions % self.canonical_nodes
        columns = positions // self.canonical_nodes
        if not self._rows_fill():
            # Fewer samples than rows: StreamingDataset tiles them over the rows, end to end.
            tiled: Ids = (rows * self.padded_width + columns) % self.samples
            return tiled
        padding = self.padded_width - self.width
        if padding:
            back = self.nodes // self.canonical_nodes - 1 + padding
            columns = np.where(columns < self.width, columns, columns - back)
            if columns.size and int(columns.min()) < 0:
                raise OrderError(f"{self.samples} samples are too few for {self.nodes} nodes")
        starts = rows * self.samples // self.canonical_nodes
        lengths = (rows + 1) * self.samples // self.canonical_nodes - starts
        found: Ids = starts + np.minimum(columns, lengths - 1)
        return found

    def _rows_fill(self) -> bool:
        if self.samples == self.canonical_nodes:
            return self.nodes <= self.canonical_nodes
        return self.samples > self.canonical_nodes


def samples_per_rank(length: int, world: World, drop_first: int = 0) -> int:
    """Return how many samples each rank reads of a line past `drop_first`, repeats at the end included."""
    return -(-_per_node(length, world, drop_first) // world.ranks_per_node)


def rank_positions(length: int, world: World, first: int, stop: int, drop_first: int = 0) -> Ids:
    """Return the line positions of a rank's samples [first, stop), in the order it reads them.

    length: of the line, a multiple of the nodes. drop_first: positions consumed already, a multiple of the
    nodes. Position p past `drop_first` belongs to node p % nodes, and there to rank (p // nodes) %
    ranks_per_node. Raises OrderError if a rank has no such samples.
    """
    per_node = _per_node(length, world, drop_first)
    ranks = world.ranks_per_node
    if not 0 <= first <= stop <= samples_per_rank(length, world, drop_first):
        raise OrderError(
            f"samples {first}..{stop} are not in a rank's {samples_per_rank(length, world, drop_first)}"
        )
    of_node = np.arange(first, stop, dtype=np.int64) * ranks + world.rank_of_node
    missing = -per_node % ranks
    if missing and stop * ranks > per_node:
        # The last ranks fill up with samples a little before the end, so that none is read twice in one step.
        back = ranks + missing - 1
        repeated = of_node - back if back <= per_node else (of_node - per_node) % per_node
        of_node = np.where(of_node < per_node, of_node, repeated)
    return drop_first + of_node * world.nodes + world.node


def _per_node(length: int, world: World, drop_first: int) -> int:
    remaining = length - drop_first
    if drop_first < 0 or remaining < 0 or drop_first % world.nodes or length % world.nodes:
        raise OrderError(f"{drop_first} of {length} positions cannot be dropped on {world.nodes} nodes")
    return remaining // world.nodes
