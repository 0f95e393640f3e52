"""Streams: their weights, and what an epoch takes of each. (That both are StreamingDataset's is tested with it.)"""

import numpy as np
import pytest

from loader.errors import OrderError
from loader.order import OrderSpec, StreamTable, Weight
from loader.order.batching import stratified_portions
from loader.order.streams import chosen_per_shard, sampled_units
from tests.support.epoch_ids import epoch_ids

SIZES = np.array([10, 20, 30, 40], np.int64)


def table(*weights: Weight, epoch_size: int | None = None, shards: tuple[int, ...] = (2, 2)) -> StreamTable:
    return StreamTable.of(SIZES, shards, OrderSpec(weights=weights, epoch_size=epoch_size))


def test_without_weights_an_epoch_takes_each_sample_once() -> None:
    found = table()
    assert found.choose == (30, 70)
    assert found.proportions == (0.3, 0.7)
    assert found.is_whole


def test_an_epoch_size_alone_takes_of_all_streams_alike() -> None:
    assert table(epoch_size=10).choose == (3, 7)
    assert table(epoch_size=200).choose == (60, 140)


def test_proportions_count_as_parts_of_their_sum() -> None:
    found = table(Weight(proportion=3), Weight(proportion=1))
    assert found.choose == (75, 25)
    assert table(Weight(proportion=3), Weight(proportion=1), epoch_size=8).choose == (6, 2)


def test_repeat_and_choose_say_how_many_samples_a_stream_has() -> None:
    assert table(Weight(repeat=1.5), Weight(choose=7)).choose == (45, 7)
    assert table(Weight(), Weight(repeat=0)).choose == (30, 0)


@pytest.mark.parametrize(
    ("weights", "epoch_size", "told"),
    [
        ((Weight(proportion=1), Weight()), None, "either all streams have a proportion or none"),
        ((Weight(proportion=0), Weight(proportion=0)), None, "proportions of all streams are 0"),
        ((Weight(repeat=2), Weight()), 50, "epoch_size goes with proportions"),
        ((Weight(choose=0), Weight(repeat=0)), None, "come to 0 samples"),
        ((Weight(),), None, "1 weights for 2 streams"),
    ],
)
def test_weights_that_contradict_each_other_are_errors(
    weights: tuple[Weight, ...], epoch_size: int | None, told: str
) -> None:
    with pytest.raises(OrderError, match=told):
        table(*weights, epoch_size=epoch_size)


def test_two_weights_of_a_stream_and_negative_ones_are_errors() -> None:
    with pytest.raises(OrderError, match="at most one"):
        Weight(repeat=1, choose=2)
    for wrong in (-1.0, float("nan"), float("inf")):
        with pytest.raises(OrderError, match="not a number from 0 up"):
            Weight(repeat=wrong)


def test_shards_that_are_not_the_datasets_and_empty_streams_are_errors() -> None:
    with pytest.raises(OrderError, match="are not the 4 shards"):
        table(shards=(2, 1))
    with pytest.raises(OrderError, match="stream 1 of 2 is empty"):
        StreamTable.of(np.array([3, 0], np.int64), [1, 1], OrderSpec())


@pytest.mark.parametrize("granularity", [1, 3, 64])
@pytest.mark.parametrize("choose", [0, 1, 37, 99, 100, 101, 250])
def test_the_samples_of_all_shards_are_as_many_as_the_stream_has(choose: int, granularity: int) -> None:
    chosen = chosen_per_shard(SIZES, choose, granularity, seed=3)
    assert int(chosen.sum()) == choose
    assert (chosen >= SIZES * (choose // 100)).all()
    assert (chosen <= SIZES * -(-choose // 100)).all()


def test_coarse_picks_come_from_fewer_shards() -> None:
    sizes = np.full(50, 10, np.int64)
    fine, coarse = (np.count_nonzero(chosen_per_shard(sizes, 50, size, seed=1)) for size in (1, 10))
    assert coarse == 5
    assert fine > 20


def test_balanced_sampling_draws_anew_each_epoch_and_fixed_does_not() -> None:
    for sampling, same in (("balanced", False), ("fixed", True)):
        spec = OrderSpec(weights=(Weight(repeat=0.5),), sampling=sampling, canonical_nodes=1)
        first, second = (sorted(epoch_ids(SIZES, spec, epoch).tolist()) for epoch in (0, 1))
        assert (first == second) is same
        assert len(set(first)) == 50


def test_units_are_the_passes_over_each_shard() -> None:
    spec = OrderSpec(weights=(Weight(repeat=2.5),))
    units, ids = sampled_units(StreamTable.of(SIZES, [4], spec), spec, epoch=0)
    assert ids is not None
    assert int(units.sum()) == ids.size == 250
    times = np.bincount(ids, minlength=100)
    assert set(times.tolist()) == {2, 3}


def test_a_global_batch_is_shared_out_without_remainder() -> None:
    assert stratified_portions((0.5, 0.5), 10) == (5, 5)
    assert stratified_portions((0.3, 0.7), 8) == (2, 6)
    assert sum(stratified_portions((1 / 3, 1 / 3, 1 / 3), 32)) == 32
    with pytest.raises(OrderError, match=r"stream 1 has a proportion of 0\.01"):
        stratified_portions((0.99, 0.01), 16)
