"""StreamingDataset's shuffles: from units to a permutation of their positions, bit by bit as in version 0.13.

All but `naive` and `py2s` start in the same way: units in an order fixed for the run are cut at the borders of the
canonical nodes into *spans*, which are shuffled within each node every epoch. The generator's draws form one
fixed sequence, so a shuffle always covers the whole epoch. `py1b` is that of version 0.9.1, the last version with it.

Invariants: 1. The same call gives the same array on every machine: in py1e's sort, equal places go by position, which
numpy leaves open. 2. Besides the result, memory is bounded by the block size and `CHUNK_SAMPLES` (py2s: plus one copy
of the result).

Sorts by 32-bit keys, several times faster than numpy's general argsort, and stable on every machine.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from loader.errors import OrderError
from loader.order.spec import STREAMING_ORDERS, Ids, Stored
from loader.order.streams import CHUNK_SAMPLES, id_type

# Below this size, the passes cost more than they save.
FEW = 4096
_KEYS = 2.0**32 - 2**10  # a little less than the number of keys, because products are rounded


def order_of_keys(keys: NDArray[np.uint32]) -> NDArray[np.intp]:
    """Return the order that sorts the keys; equal keys by index.

    numpy sorts 16-bit keys by counting, which is stable. Two such passes, low half first, make a radix sort.
    """
    by_low = np.argsort(keys.astype(np.uint16), kind="stable")
    found: NDArray[np.intp] = by_low[np.argsort((keys >> 16).astype(np.uint16)[by_low], kind="stable")]
    return found


def order_of_positions(places: NDArray[np.float64]) -> NDArray[np.intp]:
    """Return the order that sorts the places, equal ones by index. places: (n,) finite float64, n > 0.

    Sorts by 32 bits of each value's position between minimum and maximum, then sorts the few runs with equal bits.
    Fast for evenly spread values, correct for all.
    """
    if places.size < FEW:
        return np.argsort(places, kind="stable")
    least, most = float(places.min()), float(places.max())
    scale = _KEYS / (most - least) if most > least else 0.0
    keys = ((places - least) * scale).astype(np.uint32)
    order = order_of_keys(keys)
    ordered = places[order]
    wrong = np.flatnonzero(ordered[1:] < ordered[:-1])
    if wrong.size > places.size // 64:
        return np.argsort(places, kind="stable")
    if wrong.size:
        keys = keys[order]
        doubtful = np.unique(keys[wrong])
        firsts, stops = (np.searchsorted(keys, doubtful, side=side).tolist() for side in ("left", "right"))
        for first, stop in zip(firsts, stops, strict=True):
            order[first:stop] = order[first:stop][np.argsort(ordered[first:stop], kind="stable")]
    return order


def shuffle_units(
    order: str,
    units: Ids,
    canonical_nodes: int,
    seed: int,
    epoch: int,
    block_size: int,
    out: Stored | None = None,
) -> Stored:
    """Return (samples,) the positions 0..sum(units) in shuffled order.

    units: (units,) sizes, all positive. `naive` mixes everything. The others keep a canonical node's samples within
    its share; `py1s` and `py2s` within a unit; `py1b`, `py1br` and `py1e` within about `block_size` samples. out:
    (sum(units),) array for the result; None: a new one. Raises OrderError for an unknown name, a block too small for
    its shuffle, or (py1e only) a canonical node without samples.
    """
    total = int(units.sum())
    ids = np.empty(total, id_type(total)) if out is None else out
    if order not in STREAMING_ORDERS:
        raise OrderError(f"order {order!r} is unknown: choose one of {', '.join(STREAMING_ORDERS)}")
    smallest = SMALLEST_BLOCKS.get(order, 0)
    if block_size < smallest:
        raise OrderError(
            f"{order} cannot shuffle in blocks of {block_size} samples, only of {smallest} or more: raise "
            f"block_size (a stream has its proportion of it)"
        )
    if order in SHUFFLES:
        generator = np.random.default_rng(seed + epoch)
        spans = _epoch_spans(units, canonical_nodes, seed, generator)
        SHUFFLES[order](spans, generator, block_size, ids)
    elif order == "py2s":
        _shuffle_py2s(units, canonical_nodes, seed, epoch, ids)
    else:
        for first in range(0, total, CHUNK_SAMPLES):
            ids[first : first + CHUNK_SAMPLES] = np.arange(first, min(first + CHUNK_SAMPLES, total))
        if order == "naive":
            np.random.default_rng(seed + epoch).shuffle(ids)
    return ids


@dataclass(frozen=True, slots=True, eq=False)
class _Spans:
    """Runs of positions, none empty; those of canonical node c are [borders[c], borders[c + 1])."""

    starts: Ids  # (spans,)
    sizes: Ids  # (spans,)
    borders: Ids  # (canonical nodes + 1,)

    def fill(self, ids: Stored) -> None:
        """Write all positions, span after span, to ids: (sum of sizes,)."""
        ends = np.cumsum(self.sizes)
        offsets = self.starts - (ends - self.sizes)
        spans = np.searchsorted(ends, np.arange(0, ids.size, CHUNK_SAMPLES), side="right").tolist()
        spans.append(self.sizes.size - 1)
        for part, first in enumerate(range(0, ids.size, CHUNK_SAMPLES)):
            stop = min(first + CHUNK_SAMPLES, ids.size)
            of = slice(spans[part], spans[part + 1] + 1)
            lengths = np.minimum(ends[of], stop) - np.maximum(ends[of] - self.sizes[of], first)
            ids[first:stop] = np.repeat(offsets[of], np.maximum(lengths, 0)) + np.arange(first, stop)

    def nodes(self) -> Iterator[Ids]:
        """Yield the span sizes of each canonical node."""
        for first, stop in zip(self.borders[:-1], self.borders[1:], strict=True):
            yield self.sizes[first:stop]


def _epoch_spans(units: Ids, canonical_nodes: int, seed: int, generator: np.random.Generator) -> _Spans:
    """Return the spans in the epoch's order: units in the run's order, cut, and shuffled within each node."""
    order_of_units = np.arange(units.size)
    np.random.default_rng(seed).shuffle(order_of_units)
    ends = np.cumsum(units)
    starts, sizes, borders = _cut(
        ends[order_of_units] - units[order_of_units], units[order_of_units], canonical_nodes
    )
    for node in range(canonical_nodes):
        part = np.arange(borders[node], borders[node + 1])
        generator.shuffle(part)
        starts[borders[node] : borders[node + 1]] = starts[part]
        sizes[borders[node] : borders[node + 1]] = sizes[part]
    return _Spans(starts, sizes, borders)


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


def _shuffle_slices(ids: Stored, sizes: Ids, generator: np.random.Generator) -> None:
    """Shuffle consecutive slices of the given sizes, each separately, in place."""
    offset = 0
    for size in sizes.tolist():
        generator.shuffle(ids[offset : offset + size])
        offset += size


def _shuffle_py1s(spans: _Spans, generator: np.random.Generator, _block_size: int, ids: Stored) -> None:
    spans.fill(ids)
    _shuffle_slices(ids, spans.sizes, generator)


def _shuffle_py1b(spans: _Spans, generator: np.random.Generator, block_size: int, ids: Stored) -> None:
    spans.fill(ids)
    stop = 0
    for sizes in spans.nodes():
        start, stop = stop, stop + int(sizes.sum())
        borders = np.append(np.arange(start, stop, block_size), stop)
        _shuffle_slices(ids[start:stop], np.diff(borders), generator)


def _shuffle_py1br(spans: _Spans, generator: np.random.Generator, block_size: int, ids: Stored) -> None:
    spans.fill(ids)
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


def _shuffle_py1e(spans: _Spans, generator: np.random.Generator, block_size: int, ids: Stored) -> None:
    spans.fill(ids)
    stop = 0
    for node, sizes in enumerate(spans.nodes()):
        start, stop = stop, stop + int(sizes.sum())
        if start == stop:
            raise OrderError(
                f"canonical node {node} of {spans.borders.size - 1} gets no sample: the epoch has only "
                f"{ids.size}. Lower canonical_nodes, or enlarge the dataset or epoch_size."
            )
        part = ids[start:stop]
        _shuffle_slices(part, sizes, generator)
        _sort_by_place(part, _places(sizes, generator, block_size), block_size)


def _places(sizes: Ids, generator: np.random.Generator, block_size: int) -> Iterator[NDArray[np.float64]]:
    """Draw the target place of each sample of a node, yielded in order in runs of at most CHUNK_SAMPLES.

    A sample moves at most so far that its span stays within one block, and never out of its node.
    """
    shortest, longest = int(0.75 * block_size), int(1.25 * block_size)
    count = int(sizes.sum())
    run: list[NDArray[np.float64]] = []
    held = offset = 0
    for size in sizes.tolist():
        reach = max((int(generator.integers(shortest, longest)) - size) / 2, 0)
        low, high = max(-reach, -offset), min(reach, count - offset - size)
        # Drawing in parts gives the same values as drawing at once.
        for first in range(offset, offset + size, CHUNK_SAMPLES):
            places = generator.uniform(low, high, min(offset + size - first, CHUNK_SAMPLES))
            places += np.arange(first, first + places.size, dtype=np.float64)
            if held + places.size > CHUNK_SAMPLES:
                yield np.concatenate(run)
                run, held = [], 0
            run.append(places)
            held += places.size
        offset += size
    yield np.concatenate(run)


def _sort_by_place(ids: Stored, runs: Iterator[NDArray[np.float64]], block_size: int) -> None:
    """Sort ids by their places, in place.

    No sample moves by more than half the longest block. So samples further than that behind the last place drawn are
    final, and only about one block of other samples is held at a time.
    """
    if ids.size <= CHUNK_SAMPLES:
        (run,) = runs
        ids[:] = ids[order_of_positions(run)]
        return
    reach = int(1.25 * block_size) // 2 + 1
    held = min(2 * reach + CHUNK_SAMPLES, ids.size)
    places: NDArray[np.float64] = np.empty(held)
    samples: Stored = np.empty(held, ids.dtype)
    drawn = done = 0  # the first drawn - done entries are in use
    for run in runs:
        held, drawn = drawn - done, drawn + run.size
        places[held : held + run.size] = run
        samples[held : held + run.size] = ids[drawn - run.size : drawn]
        # In steps, because the last run makes everything held final.
        borders = [drawn - reach] if drawn < ids.size else [*range(done, drawn, CHUNK_SAMPLES), np.inf]
        for border in borders:
            held = drawn - done
            final = places[:held] < border
            kept = ~final
            if not final.any():
                continue
            sorted_samples = samples[:held][final][order_of_positions(places[:held][final])]
            left = held - sorted_samples.size
            places[:left], samples[:left] = places[:held][kept], samples[:held][kept]
            ids[done : drawn - left] = sorted_samples
            done = drawn - left


def _shuffle_py2s(units: Ids, canonical_nodes: int, seed: int, epoch: int, out: Stored) -> None:
    run = np.random.default_rng(seed)
    order_of_units = np.arange(units.size)
    run.shuffle(order_of_units)
    ends = np.cumsum(units)
    sizes = units[order_of_units]
    ids: Stored = np.empty(out.size, out.dtype)
    _Spans(ends[order_of_units] - sizes, sizes, np.array([0, sizes.size])).fill(ids)
    _shuffle_slices(ids, sizes, run)
    # From here on a span is a run of *places* in ids, because the samples of a unit are shuffled now.
    starts, sizes, borders = _cut(np.cumsum(sizes) - sizes, sizes, canonical_nodes)
    generator = np.random.default_rng(seed + epoch)
    filled = 0
    for node in range(canonical_nodes):
        part = np.arange(borders[node], borders[node + 1])
        generator.shuffle(part)
        for span in part.tolist():
            piece = ids[starts[span] : starts[span] + sizes[span]]
            generator.shuffle(piece)
            out[filled : filled + piece.size] = piece
            filled += piece.size


SHUFFLES: dict[str, Callable[[_Spans, np.random.Generator, int, Stored], None]] = {
    "py1s": _shuffle_py1s,
    "py1b": _shuffle_py1b,
    "py1br": _shuffle_py1br,
    "py1e": _shuffle_py1e,
}
# Below these sizes the range of a block's random length would be empty.
SMALLEST_BLOCKS = {"py1e": 1, "py1br": 2, "py1b": 1}
