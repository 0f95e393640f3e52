"""The native order: every sample exactly once, any position at once, lanes that keep their shards."""

import hashlib
import tracemalloc
from itertools import chain

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loader import ElasticBatchSampler, OrderError, World
from loader.order import NativePartition, NativeRun, OrderSpec, StreamTable, Weight, native, native_units
from loader.order.native import Keys, key_of, keyed_order, permuted, subkeys
from loader.order.shuffles import FEW, order_of_keys, order_of_positions
from loader.order.spec import Ids

BILLION = 10**9
# First 16 hex digits of the sha256 of an order as int64, little-endian.
GOLDEN = "f967a246add37af4"
GOLDEN_DRAWN = "ee9bdb6a644be2f3"


def native_line(sizes: Ids, epoch: int = 0, **options: object) -> NativePartition:
    spec = OrderSpec("native", **options)  # type: ignore[arg-type]
    table = StreamTable.of(sizes, [sizes.size], spec)
    return NativePartition(NativeRun(native_units(table, spec, epoch), spec), spec, epoch)


def restored(values: Ids, sizes: "Ids | np.int64", keys: "Keys | np.uint64") -> Ids:
    """The inverse of `permuted`: the values that it maps to these."""
    found, sizes, keys = (
        values.copy(),
        np.broadcast_to(sizes, values.shape),
        np.broadcast_to(keys, values.shape),
    )
    few = np.flatnonzero(sizes < native.FEW)
    for factor in reversed(native._MIX):
        found[few] = cycle_walked_back(found[few], sizes[few], keys[few] * factor)
    return cycle_walked_back(found, sizes, keys)


def cycle_walked_back(values: Ids, sizes: Ids, keys: Keys) -> Ids:
    rows, columns = native._rectangle(sizes)
    found = values
    outside = np.ones(values.shape, bool)
    while outside.any():
        left, right = np.divmod(found, columns)
        for number in reversed(range(native.ROUNDS)):
            if number % 2:
                right = (right - native._hash(left, keys, number, columns)) % columns
            else:
                left = (left - native._hash(right, keys, number, rows)) % rows
        found = np.where(outside, left * columns + right, found)
        outside = found >= sizes
    return found


def position_of(line: NativePartition, ids: Ids) -> Ids:
    """The inverse of `line.at`, in an epoch that takes each sample once."""
    run = line._run
    firsts = run.units.firsts[run.unit_of]
    by_id = np.argsort(firsts)
    number = by_id[np.searchsorted(firsts, ids, side="right", sorter=by_id) - 1]
    places = run.unit_ends[number] - run.units.sizes[run.unit_of[number]] + ids - firsts[number]
    span = np.searchsorted(run.span_begins, places, side="right") - 1
    places += line._ends[np.argsort(line._span_of)[span]] - run.span_ends(span)
    lane = np.searchsorted(run.starts(np.arange(run.lanes)), places, side="right") - 1
    place = places - run.starts(lane)
    begins, sizes, keys = line._blocks(lane, place)
    found: Ids = (begins + restored(place - begins, sizes, keys)) * run.lanes + lane
    return found


def billion_sizes() -> Ids:
    """Shards of unequal sizes with 10**9 samples in all."""
    sizes = np.random.default_rng(1).integers(6000, 10_000, 130_000)
    ends = np.cumsum(sizes)
    count = int(np.searchsorted(ends, BILLION))
    return np.append(sizes[:count], BILLION - ends[count - 1]).astype(np.int64)


def test_a_keyed_permutation_of_any_small_size_takes_each_value_once_and_can_be_undone() -> None:
    for size in [*range(1, 140), 1000, 4099]:
        for key in range(3):
            values = np.arange(size)
            found = permuted(values, np.int64(size), np.uint64(key_of(key)))
            assert sorted(found.tolist()) == values.tolist()
            assert np.array_equal(restored(found, np.int64(size), np.uint64(key_of(key))), values)


@pytest.mark.parametrize("size", [BILLION, BILLION + 7, 2**40 - 1, 2**61])
def test_a_keyed_permutation_of_a_huge_size_stays_within_it_and_can_be_undone(size: int) -> None:
    values = np.unique(np.random.default_rng(size).integers(0, size, 50_000))
    found = permuted(values, np.int64(size), np.uint64(key_of("x")))
    assert found.min() >= 0
    assert found.max() < size
    assert np.unique(found).size == values.size
    assert np.array_equal(restored(found, np.int64(size), np.uint64(key_of("x"))), values)


def test_values_of_different_sizes_and_keys_are_permuted_side_by_side() -> None:
    sizes = np.repeat([5, 1, 300], [5, 1, 300])
    keys = subkeys(3, sizes)
    values = np.concatenate([np.arange(5), np.arange(1), np.arange(300)])
    found = permuted(values, sizes, keys)
    assert [sorted(part) for part in np.split(found, [5, 6])] == [list(range(n)) for n in (5, 1, 300)]
    assert np.array_equal(restored(found, sizes, keys), values)


@pytest.mark.parametrize("size", [2, 3, 5, 8, 12, 37])
def test_every_value_goes_everywhere_equally_often(size: int) -> None:
    keys = subkeys(key_of("even"), np.arange(20_000))
    first, last = (permuted(np.full(keys.size, value), np.int64(size), keys) for value in (0, size - 1))
    pairs = first * size + last  # of which those with first == last never occur
    for found, fields in ((first, size), (last, size), (pairs, size * (size - 1))):
        expected = keys.size / fields
        counts = np.bincount(found)
        chi_square = float(((counts[counts > 0] - expected) ** 2 / expected).sum())
        assert np.count_nonzero(counts) == fields
        # five standard deviations above its mean
        assert chi_square < fields - 1 + 5 * (2 * (fields - 1)) ** 0.5


def test_neighbours_do_not_stay_neighbours() -> None:
    found = permuted(np.arange(60_000), np.int64(60_000), np.uint64(key_of("apart")))
    steps = np.diff(found)
    assert np.count_nonzero(np.abs(steps) <= 3) < 20  # of 60 000; by chance it would be 6
    assert abs(float(np.corrcoef(found[1:], found[:-1])[0, 1])) < 0.02


def test_a_keyed_order_holds_each_number_once_and_differs_between_keys() -> None:
    orders = [keyed_order(1000, key).tolist() for key in range(20)]
    assert all(sorted(order) == list(range(1000)) for order in orders)
    assert len(set(map(tuple, orders))) == 20


@settings(max_examples=60, deadline=None)
@given(st.lists(st.floats(-1e9, 1e9, allow_nan=False), min_size=1, max_size=40), st.integers(0, 200))
def test_places_are_sorted_as_by_a_stable_sort(few: list[float], repeats: int) -> None:
    places = np.array(few * (1 + repeats * FEW // 200 // len(few)))
    assert np.array_equal(order_of_positions(places), np.argsort(places, kind="stable"))
    keys = places.view(np.uint32)
    assert np.array_equal(order_of_keys(keys), np.argsort(keys, kind="stable"))


@pytest.mark.parametrize("scale", [1.0, 1e-12, 1e12])
def test_places_too_close_to_be_told_apart_by_their_keys_are_sorted_too(scale: float) -> None:
    rng = np.random.default_rng(1)
    clustered = np.concatenate([rng.random(3 * FEW) * scale, rng.random(50) * 1e-9 * scale, [1e3 * scale]])
    for places in (clustered, np.repeat(clustered, 2), np.zeros(2 * FEW), np.arange(2.0 * FEW)):
        assert np.array_equal(order_of_positions(places), np.argsort(places, kind="stable"))


@settings(max_examples=80, deadline=None)
@given(
    st.lists(st.integers(0, 40), min_size=1, max_size=12).filter(any),
    st.integers(1, 20),
    st.integers(2, 60),
    st.integers(0, 3),
)
def test_a_line_of_any_shards_holds_each_sample_once(
    sizes: list[int], lanes: int, block_size: int, epoch: int
) -> None:
    line = native_line(np.array(sizes, np.int64), epoch, canonical_nodes=lanes, block_size=block_size)
    ids = line.at(np.arange(line.samples))
    assert sorted(ids.tolist()) == list(range(sum(sizes)))
    assert position_of(line, ids).tolist() == list(range(line.samples))


def test_a_billion_samples_need_little_memory_and_every_position_tried_is_found_again() -> None:
    sizes = billion_sizes()
    tracemalloc.start()
    line = native_line(sizes, epoch=2)
    first = line.at(np.arange(512))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 50e6
    assert np.unique(first).size == 512
    rng = np.random.default_rng(3)
    positions = np.unique(np.concatenate([rng.integers(0, BILLION, 100_000), [0, BILLION - 1]]))
    ids = line.at(positions)
    assert ids.min() >= 0
    assert ids.max() < BILLION
    assert np.unique(ids).size == positions.size
    assert np.array_equal(position_of(line, ids), positions)
    numbers = rng.integers(0, BILLION, 100_000)
    found = position_of(line, numbers)
    assert found.min() >= 0
    assert found.max() < BILLION
    assert np.array_equal(line.at(found), numbers)


def test_a_lane_of_a_hundred_million_samples_holds_whole_shards() -> None:
    sizes = billion_sizes()[:13_000]
    line = native_line(sizes, epoch=1)
    ids = line.at(np.arange(17, line.samples, 64))
    assert np.unique(ids).size == ids.size
    read = np.bincount(np.searchsorted(np.cumsum(sizes), ids, side="right"), minlength=sizes.size)
    touched = np.flatnonzero(read)
    # only where the lane begins and ends does it share a shard with another
    assert np.count_nonzero(read[touched] != sizes[touched]) <= 2


def test_a_node_reads_the_same_shards_in_every_epoch_and_no_others_do() -> None:
    sizes = np.full(128, 50, np.int64)
    seen: list[set[int]] = []
    for epoch in range(3):
        line = native_line(sizes, epoch, canonical_nodes=8, block_size=100)
        for node in range(4):
            ids = line.at(np.arange(node, line.samples, 4))
            shards = set((ids // 50).tolist())
            assert len(shards) == 32
            if epoch:
                assert shards == seen[node]
            else:
                seen.append(shards)
    assert len(set().union(*seen)) == 128


def test_few_shards_are_open_at_a_time() -> None:
    line = native_line(np.full(400, 50, np.int64), 0, canonical_nodes=4, block_size=200)
    for first in range(0, line.samples, 400):  # 100 samples of each lane
        shards = np.unique(line.at(np.arange(first, min(first + 400, line.samples))) // 50)
        assert shards.size <= 4 * 3 * (200 // 50)


def test_epochs_seeds_and_blocks_give_different_orders() -> None:
    sizes = np.full(40, 25, np.int64)
    orders = {
        native_line(sizes, epoch, seed=seed, block_size=block).at(np.arange(1000)).tobytes()
        for epoch in (0, 1)
        for seed in (1, 2)
        for block in (5, 10)
    }
    assert len(orders) == 8


def test_the_native_order_never_changes() -> None:
    sizes = np.array([(shard * 7919) % 500 + 1 for shard in range(200)], np.int64)
    line = native_line(sizes, epoch=3, seed=9176, block_size=4096)
    digest = hashlib.sha256(line.at(np.arange(line.samples)).astype("<i8").tobytes()).hexdigest()[:16]
    assert digest == GOLDEN
    drawn = native_line(sizes, epoch=3, weights=(Weight(repeat=1.3),))
    digest = hashlib.sha256(drawn.at(np.arange(drawn.samples)).astype("<i8").tobytes()).hexdigest()[:16]
    assert digest == GOLDEN_DRAWN


@pytest.mark.parametrize("repeat", [0.1, 0.5, 1.0, 1.7, 3.0])
def test_a_weight_takes_the_same_share_of_every_shard_and_no_sample_twice_too_often(repeat: float) -> None:
    sizes = np.array([10, 0, 33, 1, 250, 7, 7, 92], np.int64)
    orders = []
    for epoch in (0, 1):
        line = native_line(sizes, epoch, weights=(Weight(repeat=repeat),))
        assert line.samples == int(repeat * 400)
        ids = line.at(np.arange(line.samples))
        times = np.bincount(ids, minlength=400)
        assert set(times.tolist()) <= {int(repeat), int(repeat) + 1}
        shards = np.bincount(np.searchsorted(np.cumsum(sizes), ids, side="right"), minlength=sizes.size)
        assert (np.abs(shards - sizes * repeat) <= 1).all()
        orders.append(sorted(ids.tolist()))
    assert (orders[0] == orders[1]) == float(repeat).is_integer()


def test_fixed_sampling_draws_the_same_samples_in_every_epoch() -> None:
    sizes = np.array([100, 300], np.int64)
    drawn = [
        native_line(sizes, epoch, weights=(Weight(repeat=0.5),), sampling="fixed").at(np.arange(200))
        for epoch in (0, 1)
    ]
    assert sorted(drawn[0].tolist()) == sorted(drawn[1].tolist())
    assert drawn[0].tolist() != drawn[1].tolist()


@pytest.mark.parametrize("layout", [(1, 1), (2, 2), (4, 2), (3, 3), (6, 2), (8, 1), (16, 4)])
@pytest.mark.parametrize("total", [960, 961, 1000, 1007])
def test_an_epoch_holds_each_sample_once_and_loses_only_what_drop_last_says(
    layout: tuple[int, int], total: int
) -> None:
    ranks, ranks_per_node = layout
    for drop_last in (True, False):
        options = {"global_batch_size": 48, "order": "native", "drop_last": drop_last}
        rest = total % 48
        if not drop_last and 0 < rest < ranks:
            with pytest.raises(OrderError, match=f"{rest} samples for {ranks} ranks"):
                ElasticBatchSampler([total // 2, total - total // 2], world=World(0, ranks), **options)
            continue
        batches = [
            list(
                ElasticBatchSampler(
                    [total // 2, total - total // 2], world=World(rank, ranks, ranks_per_node), **options
                )
            )
            for rank in range(ranks)
        ]
        steps = total // 48 + (rest > 0 and not drop_last)
        assert {len(found) for found in batches} == {steps}
        seen = sorted(chain.from_iterable(chain.from_iterable(batches)))
        assert len(seen) == len(set(seen)) == (total - rest if drop_last else total)
        assert max(len(found[-1]) for found in batches) - min(len(found[-1]) for found in batches) <= 1
