"""The batch sampler: the same global batches on every world, before and after every resume."""

import json
import pickle
from itertools import chain, islice
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loader import ElasticBatchSampler, OrderError, StateError, World
from loader.order import ORDERS

SIZES = np.array([(shard * 7919) % 97 + 1 for shard in range(23)], np.int64)
TOTAL = int(SIZES.sum())
GLOBAL_BATCH = 48
WORLDS = [(1, 1), (2, 2), (3, 3), (4, 4), (4, 2), (4, 1), (8, 8), (8, 4), (8, 1), (6, 2), (16, 1)]


def samplers(ranks: int, ranks_per_node: int, **options: Any) -> list[ElasticBatchSampler]:
    """One sampler a rank."""
    options = {"global_batch_size": GLOBAL_BATCH, "canonical_nodes": 4, "block_size": 200} | options
    return [
        ElasticBatchSampler(SIZES, world=World(rank, ranks, ranks_per_node), **options)
        for rank in range(ranks)
    ]


def global_batches(group: list[ElasticBatchSampler], limit: int | None = None) -> list[list[int]]:
    """The sorted union over ranks of each step, up to `limit` steps; no rank has more than another."""
    batches = []
    for parts in zip(*group, strict=True):
        assert len({len(part) for part in parts}) == 1
        batches.append(sorted(number for part in parts for number in part))
        if len(batches) == limit:
            break
    return batches


@pytest.mark.parametrize(("ranks", "ranks_per_node"), WORLDS)
def test_every_world_sees_the_same_global_batches(ranks: int, ranks_per_node: int) -> None:
    assert global_batches(samplers(ranks, ranks_per_node)) == global_batches(samplers(1, 1))


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("epoch_size", [None, TOTAL // 2, 2 * TOTAL + 7])
def test_every_order_and_epoch_size_is_elastic(order: str, epoch_size: int | None) -> None:
    options = {"order": order, "epoch_size": epoch_size}
    assert global_batches(samplers(8, 4, **options)) == global_batches(samplers(1, 1, **options))


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from(WORLDS), st.integers(0, 30)), min_size=1, max_size=6),
    st.booleans(),
)
def test_any_chain_of_resumes_on_any_worlds_continues_the_run(
    resumes: list[tuple[tuple[int, int], int]],
    drop_last: bool,  # noqa: FBT001 -- hypothesis passes it
) -> None:
    whole = [samplers(1, 1, drop_last=drop_last)[0] for _ in range(1)]
    expected = [batch for _ in range(8) for batch in global_batches(whole)]
    seen: list[list[int]] = []
    state: dict[str, Any] | None = None
    for (ranks, ranks_per_node), steps in resumes:
        group = samplers(ranks, ranks_per_node, drop_last=drop_last)
        if state is not None:
            for sampler in group:
                sampler.load_state_dict(json.loads(json.dumps(state)))
        taken = global_batches(group, steps) if steps else []
        seen += taken
        states = [sampler.state_dict(batches_consumed=len(taken)) for sampler in group]
        assert all(each == states[0] for each in states)
        state = states[0]
    full = len(expected[0])
    for number, batch in enumerate(seen):
        # Repeats fill an incomplete last batch up to a whole number of ranks; all else is equal.
        assert (
            set(batch) >= set(expected[number]) if len(expected[number]) < full else batch == expected[number]
        )


def test_a_complete_epoch_reads_each_sample_once() -> None:
    # 1024 samples: whole rows, whole batches, so no repeats and nothing to drop
    group = [
        ElasticBatchSampler([64] * 16, global_batch_size=64, canonical_nodes=4, world=World(rank, 4))
        for rank in range(4)
    ]
    assert sorted(chain.from_iterable(global_batches(group))) == list(range(1024))


def test_an_incomplete_last_batch_is_dropped_or_delivered() -> None:
    dropped, kept = (global_batches(samplers(4, 4, drop_last=drop)) for drop in (True, False))
    assert kept[:-1] == dropped
    assert len(dropped) == TOTAL // GLOBAL_BATCH
    # rows of 4 canonical nodes, filled up by repeats of their last samples
    assert len(kept[-1]) == -(-TOTAL // 4) * 4 - len(dropped) * GLOBAL_BATCH
    assert set(chain.from_iterable(kept)) == set(range(TOTAL))


@pytest.mark.parametrize(("ranks", "ranks_per_node"), WORLDS)
def test_len_is_the_number_of_batches_on_every_world(ranks: int, ranks_per_node: int) -> None:
    for drop_last in (True, False):
        sampler = samplers(ranks, ranks_per_node, drop_last=drop_last)[-1]
        assert len(sampler) == len(list(sampler)) == len(samplers(1, 1, drop_last=drop_last)[0])


def test_epochs_follow_each_other_and_can_be_chosen() -> None:
    (sampler,) = samplers(1, 1)
    first, second = list(sampler), list(sampler)
    assert first != second
    sampler.set_epoch(0)
    assert list(sampler) == first
    sampler.set_epoch(1)
    assert list(sampler) == second


def test_a_broken_off_epoch_begins_again() -> None:
    (sampler,) = samplers(1, 1)
    broken_off = [batch for batch, _ in zip(sampler, range(5), strict=False)]
    assert list(sampler)[:5] == broken_off


@pytest.mark.parametrize("loaded", [0, 3])
def test_a_loop_that_takes_as_many_batches_as_there_are_need_not_ask_for_one_more(loaded: int) -> None:
    """Composer counts to len(loader), and asks for no batch past it: the first epoch came again and again."""
    (sampler,) = samplers(1, 1)
    whole = [list(sampler), list(sampler)]
    sampler.set_epoch(0)
    next(iter(sampler))
    list(sampler)
    sampler.load_state_dict(sampler.state_dict(batches_consumed=loaded))
    seen = list(islice(sampler, sampler.remaining_batches))
    sampler.record_step(len(seen))
    assert sampler.state_dict()["epoch"] == 1
    seen += islice(sampler, len(sampler))
    assert seen == whole[0][loaded:] + whole[1]


def test_set_epoch_of_the_loaded_epoch_keeps_the_position() -> None:
    (sampler,) = samplers(1, 1)
    whole = list(sampler)
    sampler.set_epoch(0)
    list(sampler)
    state = sampler.state_dict(batches_consumed=3)
    (resumed,) = samplers(1, 1)
    resumed.load_state_dict(state)
    resumed.set_epoch(resumed.epoch)
    assert resumed.remaining_batches == len(whole) - 3
    assert list(resumed) == whole[3:]


def test_the_state_counts_what_was_consumed_not_what_was_read_ahead() -> None:
    (sampler,) = samplers(1, 1)
    iterator = iter(sampler)
    for _ in range(7):  # a DataLoader's workers are that far ahead
        next(iterator)
    sampler.record_step()
    sampler.record_step()
    assert sampler.state_dict()["samples"] == 2 * GLOBAL_BATCH
    assert sampler.state_dict(batches_consumed=5)["samples"] == 5 * GLOBAL_BATCH


def test_a_state_without_knowing_what_was_consumed_is_an_error() -> None:
    (sampler,) = samplers(1, 1)
    assert sampler.state_dict()["samples"] == 0
    next(iter(sampler))
    with pytest.raises(StateError, match="record_step"):
        sampler.state_dict()


def test_more_than_handed_out_cannot_be_consumed() -> None:
    (sampler,) = samplers(1, 1)
    next(iter(sampler))
    sampler.record_step()
    with pytest.raises(StateError, match="handed out"):
        sampler.record_step()
    with pytest.raises(StateError, match="handed out"):
        sampler.state_dict(batches_consumed=2)


def test_a_loader_that_asks_when_it_takes_a_batch_needs_no_record() -> None:
    (sampler,) = samplers(1, 1, consumed_when_yielded=True)
    iterator = iter(sampler)
    for count in range(1, 4):
        next(iterator)
        assert sampler.state_dict()["samples"] == count * GLOBAL_BATCH


def test_the_end_of_an_epoch_is_the_start_of_the_next() -> None:
    (sampler,) = samplers(1, 1)
    count = len(list(sampler))
    state = sampler.state_dict(batches_consumed=count)
    assert (state["epoch"], state["samples"]) == (1, 0)


def test_the_state_is_small_and_json() -> None:
    (sampler,) = samplers(1, 1)
    assert len(json.dumps(sampler.state_dict())) < 1024


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"seed": 1}, "seed was 9176 and is 1"),
        ({"order": "py1s"}, "order was 'py1e'"),
        ({"canonical_nodes": 2}, "canonical_nodes was 4 and is 2"),
        ({"global_batch_size": 96}, "global_batch_size was 48 and is 96"),
        ({"epoch_size": 500}, "epoch_size"),
        ({"block_size": 300}, "block_size was 200 and is 300"),
        ({"drop_last": False}, "drop_last"),
    ],
)
def test_a_state_of_another_order_is_refused_by_name(change: dict[str, Any], told: str) -> None:
    state = samplers(1, 1)[0].state_dict()
    with pytest.raises(StateError, match=told):
        samplers(1, 1, **change)[0].load_state_dict(state)


def test_a_state_of_another_dataset_is_refused() -> None:
    state = samplers(1, 1)[0].state_dict()
    other = ElasticBatchSampler(
        [TOTAL], global_batch_size=GLOBAL_BATCH, canonical_nodes=4, block_size=200, world=World()
    )
    with pytest.raises(StateError, match="dataset was"):
        other.load_state_dict(state)


@pytest.mark.parametrize(
    "state",
    [{}, {"version": 2}, {"epoch": 1, "sample_in_epoch": 4}, {"version": 1, "settings": 5}],
)
def test_what_is_no_state_is_refused(state: dict[str, Any]) -> None:
    with pytest.raises(StateError):
        samplers(1, 1)[0].load_state_dict(state)


@pytest.mark.parametrize("position", [{"epoch": -1}, {"samples": "3"}, {"samples": 10**9}, {"epoch": True}])
def test_a_position_that_cannot_be_is_refused(position: dict[str, Any]) -> None:
    (sampler,) = samplers(1, 1)
    with pytest.raises(StateError):
        sampler.load_state_dict(sampler.state_dict() | position)


def test_settings_that_cannot_work_are_errors() -> None:
    with pytest.raises(OrderError, match="does not divide by 5 ranks"):
        samplers(5, 5)
    with pytest.raises(OrderError, match="empty"):
        ElasticBatchSampler([0, 0], global_batch_size=1, world=World())


def test_a_sampler_survives_pickling_in_the_middle_of_an_epoch() -> None:
    (sampler,) = samplers(1, 1)
    whole = list(sampler)
    sampler.load_state_dict(sampler.state_dict(batches_consumed=4))
    assert list(pickle.loads(pickle.dumps(sampler))) == whole[4:]


def streaming_state(samples: Any, **changes: Any) -> dict[str, Any]:
    """What StreamingDataset.state_dict() returns."""
    return {
        "epoch": 0,
        "sample_in_epoch": samples,
        "num_canonical_nodes": 4,
        "shuffle_seed": 9176,
        "initial_physical_nodes": 1,
    } | changes


@pytest.mark.parametrize("drop_last", [True, False])
@pytest.mark.parametrize("samples", [7, GLOBAL_BATCH - 1, GLOBAL_BATCH + 1])
def test_a_position_within_a_global_batch_is_refused_with_a_way_out(
    samples: int,
    drop_last: bool,  # noqa: FBT001 -- pytest passes it
) -> None:
    (sampler,) = samplers(1, 1, drop_last=drop_last)
    for state in (streaming_state(samples), sampler.state_dict() | {"samples": samples}):
        with pytest.raises(
            StateError, match=rf"sample {samples} .*of 48, not between two.*divides {samples}"
        ):
            sampler.load_state_dict(state)
    assert (sampler.epoch, sampler.remaining_batches) == (0, len(sampler))


def test_a_position_between_global_batches_is_the_same_on_every_world() -> None:
    expected = global_batches(samplers(1, 1))[2:]
    for ranks, ranks_per_node in WORLDS:
        group = samplers(ranks, ranks_per_node)
        for sampler in group:
            sampler.load_state_dict(streaming_state(2 * GLOBAL_BATCH))
        assert global_batches(group) == expected


@pytest.mark.parametrize("drop_last", [True, False])
def test_the_very_end_of_an_epoch_is_the_next_one_also_past_an_incomplete_batch(
    drop_last: bool,  # noqa: FBT001 -- pytest passes it
) -> None:
    end = -(-TOTAL // 4) * 4  # rows of 4 canonical nodes, filled up
    assert end % GLOBAL_BATCH
    (sampler,) = samplers(1, 1, drop_last=drop_last)
    for state in (
        streaming_state(end),
        samplers(1, 1, drop_last=drop_last)[0].state_dict() | {"samples": end},
    ):
        sampler.load_state_dict(state)
        assert (sampler.epoch, sampler.remaining_batches) == (1, len(sampler))


def test_the_librarys_state_before_its_first_epoch_is_the_beginning() -> None:
    (sampler,) = samplers(1, 1)
    sampler.set_epoch(3)
    sampler.load_state_dict(streaming_state(0, epoch=-1))
    assert (sampler.epoch, sampler.remaining_batches) == (0, len(sampler))
    with pytest.raises(StateError, match="epoch of the saved state is -1"):
        sampler.load_state_dict(streaming_state(GLOBAL_BATCH, epoch=-1))


@pytest.mark.parametrize("drop_last", [True, False])
def test_the_librarys_end_of_an_epoch_counts_the_repeats_of_its_ranks(
    drop_last: bool,  # noqa: FBT001 -- pytest passes it
) -> None:
    # 203 samples on 2 ranks x 8 samples: the library reads 102 on each, and saves 204.
    for ranks, batch, end in ((2, 16, 204), (8, 16, 208), (1, 7, 204)):
        for rank in range(ranks):
            sampler = ElasticBatchSampler(
                [50, 50, 50, 53],
                global_batch_size=batch,
                canonical_nodes=1,
                world=World(rank, ranks),
                drop_last=drop_last,
            )
            sampler.load_state_dict(streaming_state(end, num_canonical_nodes=1))
            assert (sampler.epoch, sampler.remaining_batches) == (1, len(sampler))


@pytest.mark.parametrize(
    ("state", "told"),
    [
        (None, "not NoneType"),
        ([], "not list"),
        ("{}", "not str"),
        (3, "not int"),
        ({}, "it holds nothing"),
        ({1: 2, "model": 3}, "it holds 1, model"),
        ({"version": "1", "settings": {}}, "not a state of a sampler"),
        ({"version": 1, "settings": None}, "not a state of a sampler"),
        ({"version": 1, "settings": []}, "not a state of a sampler"),
        ({"version": 1, "settings": {1: 2}}, "1 was 2 and is None"),
        (streaming_state("48"), "sample_in_epoch of the saved state is '48'"),
        (streaming_state(None), "sample_in_epoch of the saved state is None"),
        (streaming_state(48.0), "sample_in_epoch of the saved state is 48.0"),
        (streaming_state(48, epoch=None), "epoch of the saved state is None"),
        (streaming_state(48, shuffle_seed=[]), r"seed was \[\]"),
    ],
)
def test_a_state_of_wrong_types_is_refused_and_says_what_is_wrong(state: Any, told: str) -> None:
    with pytest.raises(StateError, match=told):
        samplers(1, 1)[0].load_state_dict(state)


@pytest.mark.parametrize("name", ["version", "settings", "epoch", "samples"])
@pytest.mark.parametrize("value", [None, "x", [1], {}, 1.5])
def test_any_wrong_value_in_a_state_is_refused(name: str, value: Any) -> None:
    (sampler,) = samplers(1, 1)
    with pytest.raises(StateError):
        sampler.load_state_dict(sampler.state_dict() | {name: value})


@pytest.mark.parametrize("size", [0, -1])
def test_a_global_batch_of_no_sample_is_an_error_that_says_so(size: int) -> None:
    with pytest.raises(OrderError, match=f"global_batch_size is {size}: a step takes at least 1 sample"):
        samplers(1, 1, global_batch_size=size)


def test_a_global_batch_larger_than_the_epoch_is_an_error_unless_incomplete_ones_count() -> None:
    with pytest.raises(OrderError, match=r"11 is more than the epoch's 10 samples.*drop_last=False"):
        ElasticBatchSampler([10], global_batch_size=11, canonical_nodes=1, world=World())
    kept = ElasticBatchSampler([10], global_batch_size=11, canonical_nodes=1, world=World(), drop_last=False)
    assert [sorted(batch) for batch in kept] == [list(range(10))]
    for canonical in (None, 64):  # rows that are filled up by repeats make no batch of them
        with pytest.raises(OrderError, match="61 is more than the epoch's 60 samples"):
            ElasticBatchSampler([60], global_batch_size=61, canonical_nodes=canonical, world=World())
    exact = ElasticBatchSampler([10], global_batch_size=10, canonical_nodes=1, world=World())
    assert [sorted(batch) for batch in exact] == [list(range(10))]
