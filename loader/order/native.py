"""The native order: the id at any position of an epoch in O(1), for any number of samples, nothing stored a sample.

1. The shards (the *units* of the epoch) are put into an order that a key of the run decides.
2. This sequence of samples is cut into lanes whose lengths differ by at most one sample. A lane keeps its shards for
   the whole run, so a node that reads some of the lanes reads only their shards (one that a border cuts lies in two).
3. Within a lane, a key of the epoch reorders the pieces of shards (*spans*).
4. Each lane is cut into blocks of `block_size`. Each lane has its own phase, so that block borders do not coincide
   across lanes. A key of the epoch mixes the samples within a block.
5. Positions take one sample of each lane in turn: position p is sample p // lanes of lane p % lanes. The longer
   lanes come first, so the positions end exactly where the samples end: no repeats, no omissions.

Memory is a few numbers a shard. An epoch that takes only part
of a stream takes the same share of each shard, to within one sample, and redraws it each epoch ("balanced").

Keyed permutations of 0..n-1, computed value by value: for any n, and without stored tables.

A Feistel network over pairs (left, right) of a rectangle that is just large enough for n values (Black and Rogaway,
"Ciphers with arbitrary finite domains", 2002). Each round adds a hash of one half to the other half, which can be
undone. The rectangle has a few pairs that are no value; the network is applied again until it yields a value
(cycle-walking). Good enough to mix samples, but not a cipher. Integer arithmetic modulo 2**64, so all machines agree.
"""

import hashlib
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from loader.order.shuffles import order_of_keys
from loader.order.spec import Ids, OrderSpec
from loader.order.streams import StreamTable

Keys = NDArray[np.uint64]

ROUNDS = 6
# Sizes below this get three times the rounds. With 6 rounds, the frequencies with which two values came to two
# positions differed by a quarter (root mean square over 20 000 keys, 8 values).
FEW = 4096
# Odd constants with well-mixed bits: from splitmix64 (Steele, Lea, Flood, 2014) and from the golden ratio.
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))
_HALF = np.uint64(32)
_SHIFT = np.uint64(29)


def key_of(*parts: int | str) -> int:
    """Return 64 bits that change with any change of any part."""
    digest = hashlib.blake2b("/".join(map(str, parts)).encode(), digest_size=8)
    return int.from_bytes(digest.digest(), "little")


def subkeys(key: int, *numbers: Ids) -> Keys:
    """Return a key for each tuple of numbers: arrays of one shape, values >= 0."""
    found = np.full(numbers[0].shape, key, np.uint64)
    for number in numbers:
        found += _GOLDEN
        found ^= number.astype(np.uint64) * _MIX[0]
        found = _mixed(found)
    return found


def keyed_order(count: int, key: int) -> Ids:
    """Return 0..count-1 in the order of a key, for counts small enough to store.

    Sorted by 32 bits of a hash; equal hashes by number.
    """
    bits = np.arange(count, dtype=np.uint64)
    bits *= _GOLDEN
    bits ^= np.uint64(key)
    return order_of_keys((_mixed(bits) >> _HALF).astype(np.uint32))


def permuted(values: Ids, sizes: Ids, keys: Keys) -> Ids:
    """Return the image of each value in its key's permutation of 0..size-1.

    values: 0 <= value < size < 2**62. The three arrays have one shape, or broadcast to that of values.
    """
    return _again_if_few(_cycle_walk(values, sizes, keys), sizes, keys)


def _again_if_few(values: Ids, sizes: Ids, keys: Keys) -> Ids:
    """Apply two more networks, in place, to values of small sizes, whose short halves are mixed too little by one."""
    few = np.flatnonzero(np.broadcast_to(np.asarray(sizes) < FEW, values.shape))
    if few.size:
        sizes = np.broadcast_to(np.asarray(sizes, np.int64), values.shape)[few]
        keys = np.broadcast_to(np.asarray(keys, np.uint64), values.shape)[few]
        for factor in _MIX:
            values[few] = _cycle_walk(values[few], sizes, keys * factor)
    return values


def _cycle_walk(values: Ids, sizes: Ids, keys: Keys) -> Ids:
    """Apply the network until each value is below its size."""
    sizes = np.broadcast_to(np.asarray(sizes, np.int64), values.shape)
    keys = np.broadcast_to(np.asarray(keys, np.uint64), values.shape)
    rows, columns = _rectangle(sizes)
    found = _network(values, rows, columns, keys)
    outside = np.flatnonzero(found >= sizes)
    while outside.size:
        again = _network(found[outside], rows[outside], columns[outside], keys[outside])
        found[outside] = again
        outside = outside[again >= sizes[outside]]
    return found


def _rectangle(sizes: Ids) -> tuple[Ids, Ids]:
    """Return the nearly equal sides of a rectangle with at least `sizes` fields; size >= 4: < 1 column to spare."""
    # IEEE 754 rounds square roots correctly, so all machines agree; a result that is off by one does no harm.
    rows = np.maximum(np.sqrt(sizes.astype(np.float64)).astype(np.int64), 2)
    return rows, -(-sizes // rows)


def _network(values: Ids, rows: Ids, columns: Ids, keys: Keys) -> Ids:
    left, right = np.divmod(values, columns)
    for number in range(ROUNDS):
        if number % 2:
            _add(right, _hash(left, keys, number, columns), columns)
        else:
            _add(left, _hash(right, keys, number, rows), rows)
    left *= columns
    left += right
    return left


def _add(half: Ids, shift: Ids, modulus: Ids) -> None:
    """Add to `half` modulo `modulus`, in place."""
    half += shift
    half -= modulus * (half >= modulus)


def _hash(half: Ids, keys: Keys, number: int, below: Ids) -> Ids:
    """Return a number in 0..below-1 that depends on half, key and round. below < 2**32."""
    bits = half.astype(np.uint64)
    # Set the round number above the bits of `half`, so that no two rounds hash the same bits.
    bits |= np.uint64(number + 1 << 32)
    bits *= _GOLDEN
    bits ^= keys
    bits = _mixed(bits)
    bits >>= _HALF
    bits *= below.astype(np.uint64)
    bits >>= _HALF
    return bits.astype(np.int64)


def _mixed(bits: Keys) -> Keys:
    """Spread each bit over all others, in place."""
    for factor in _MIX:
        bits ^= bits >> _SHIFT
        bits *= factor
    bits ^= bits >> _HALF
    return bits


# Products of two counts below this fit into 64 bits.
_SAFE_FACTOR = 1 << 31


@dataclass(frozen=True, slots=True, eq=False)
class Units:
    """Passes over shards, whole or in part.

    All arrays (units,). firsts: the id of the shard's first sample. sizes: samples taken. of: samples that the shard
    has. draws: keys that choose the samples of a partial pass.
    """

    firsts: Ids
    sizes: Ids
    of: Ids
    draws: Keys


def native_units(table: StreamTable, spec: OrderSpec, epoch: int, stream: int | None = None) -> Units:
    """Return the units of an epoch: of one stream, or of all.

    Each stream is passed over completely as often as its sample count allows. The rest takes the same share of each
    shard, rounded so that the sum is exact.
    """
    key = key_of("draw", spec.seed, epoch if spec.sampling == "balanced" else "")
    if stream is None and table.is_whole:
        held = np.flatnonzero(table.sizes)
        sizes = table.sizes[held]
        return Units(table.first_ids()[held], sizes, sizes, np.broadcast_to(np.uint64(0), sizes.shape))
    firsts, chosen = table.first_ids(), np.zeros_like(table.sizes)
    for number in range(table.streams) if stream is None else [stream]:
        shards = slice(table.borders[number], table.borders[number + 1])
        chosen[shards] = _chosen(table.sizes[shards], table.choose[number], key)
    times, parts = np.divmod(chosen, np.maximum(table.sizes, 1))
    shards_of = np.repeat(np.arange(chosen.size), times + (parts > 0))
    sizes = table.sizes[shards_of]
    last = np.flatnonzero(np.diff(shards_of, append=-1))
    partial = last[parts[shards_of[last]] > 0]
    taken = sizes.copy()
    taken[partial] = parts[shards_of[partial]]
    return Units(firsts[shards_of], taken, sizes, subkeys(key, shards_of))


def _chosen(sizes: Ids, choose: int, key: int) -> Ids:
    """Return (shards,) samples of each, with sum `choose`."""
    total = int(sizes.sum())
    passes, rest = divmod(choose, total)
    if rest == 0:
        return sizes * passes
    ends = np.concatenate([[0], np.cumsum(sizes)])
    if total >= _SAFE_FACTOR:
        ends = ends.astype(object)
    # The key decides which shards are rounded up.
    shares = ((ends * rest + key % total) // total).astype(np.int64)
    found: Ids = sizes * passes + np.diff(shares)
    return found


class NativeRun:
    """The part of the order that is fixed for a run: the order of its units, and how they are cut into lanes.

    A *place* is an index into the concatenation of all lanes, here in the order of the run.
    """

    def __init__(self, units: Units, spec: OrderSpec) -> None:
        self.units = units
        self.lanes = spec.rows
        self.samples = int(units.sizes.sum())
        self._least, self._longer = divmod(self.samples, self.lanes)
        # (units,) the unit at each index of the run's order, and the place where it ends
        self.unit_of = keyed_order(units.sizes.size, key_of("run", spec.seed))
        self.unit_ends = np.cumsum(units.sizes[self.unit_of])
        starts = self.starts(np.arange(self.lanes))
        # (spans,) where each begins; (lanes + 1,) the first span of each lane
        self.span_begins = self._cut(starts)
        self.borders = [*np.searchsorted(self.span_begins, starts).tolist(), self.span_begins.size]

    def _cut(self, starts: Ids) -> Ids:
        """Return the places where spans begin: at each unit, and within units at each lane's beginning."""
        begins = np.concatenate([[0], self.unit_ends[:-1]])
        starts = starts[starts < self.samples]
        at = np.searchsorted(begins, starts)
        new = begins[np.minimum(at, begins.size - 1)] != starts
        found: Ids = np.insert(begins, at[new], starts[new])
        return found

    def span_ends(self, span: Ids) -> Ids:
        """Return the places where these spans end."""
        following = np.minimum(span + 1, self.span_begins.size - 1)
        found: Ids = np.where(span + 1 < self.span_begins.size, self.span_begins[following], self.samples)
        return found

    def ids(self, places: Ids) -> Ids:
        """Return the ids at these places."""
        units = self.units
        number = np.searchsorted(self.unit_ends, places, side="right")
        unit = self.unit_of[number]
        within = places - (self.unit_ends[number] - units.sizes[unit])
        parts = np.flatnonzero(units.sizes[unit] != units.of[unit])
        if parts.size:
            drawn = unit[parts]
            within[parts] = permuted(within[parts], units.of[drawn], units.draws[drawn])
        found: Ids = units.firsts[unit] + within
        return found

    def lengths(self, lane: Ids) -> Ids:
        """Return the number of samples of these lanes."""
        return self._least + (lane < self._longer)

    def starts(self, lane: Ids) -> Ids:
        """Return the first place of these lanes."""
        found: Ids = lane * self._least + np.minimum(lane, self._longer)
        return found


class NativePartition:
    """The samples of one epoch of a run, by position."""

    def __init__(self, run: NativeRun, spec: OrderSpec, epoch: int) -> None:
        self._run, self._block = run, spec.block_size
        self.samples = run.samples
        lanes = np.arange(run.lanes)
        self._key = key_of("block", spec.seed, epoch)
        phase_key = key_of("phase", spec.seed, epoch)
        phases = (subkeys(phase_key, lanes) % np.uint64(self._block)).astype(np.int64)
        # A lane that fits into one block is not cut.
        self._phases = np.where(run.lengths(lanes) > self._block, phases, 0)
        # (spans,) the run's span at each index of the epoch's order, and the place where it ends
        self._span_of = self._reordered(key_of("spans", spec.seed, epoch))
        self._ends = np.cumsum(np.diff(run.span_begins, append=run.samples)[self._span_of])

    def _reordered(self, key: int) -> Ids:
        """Return the spans in the order of the epoch, each within its lane."""
        found = np.empty(self._run.span_begins.size, np.int64)
        for lane, lane_key in enumerate(subkeys(key, np.arange(self._run.lanes)).tolist()):
            first, stop = self._run.borders[lane : lane + 2]
            found[first:stop] = keyed_order(stop - first, lane_key)
            found[first:stop] += first
        return found

    def at(self, positions: Ids, nodes: int = 1) -> Ids:
        """Return (positions,) int64, the ids at these positions, each 0 <= position < samples, for any nodes."""
        run = self._run
        lane, column = positions % run.lanes, positions // run.lanes
        begins, sizes, keys = self._blocks(lane, column)
        places = run.starts(lane) + begins + permuted(column - begins, sizes, keys)
        number = np.searchsorted(self._ends, places, side="right")
        # Count from the span's end, because the epoch's ends are what is stored.
        return run.ids(places + run.span_ends(self._span_of[number]) - self._ends[number])

    def _blocks(self, lane: Ids, column: Ids) -> tuple[Ids, Ids, Keys]:
        """Return the first column, size and key of the block that contains each column of a lane."""
        phase = self._phases[lane]
        block = (column + phase) // self._block
        begins = np.maximum(block * self._block - phase, 0)
        stops = np.minimum((block + 1) * self._block - phase, self._run.lengths(lane))
        return begins, stops - begins, subkeys(self._key, lane, block)
