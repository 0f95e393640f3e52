"""Orders of several streams on any number of ranks: every resume, anywhere, continues the uninterrupted run."""

import json
import pickle
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch.utils.data import DataLoader

from loader import ElasticBatchSampler, MDSDataset, MDSWriter, OrderError, StateError, World
from loader.order import EpochOrders, OrderSpec, StreamTable, Weight, batch_plan
from loader.order.spec import Ids

GLOBAL_BATCH = 48
# ranks, ranks a node
LAYOUTS = [(1, 1), (2, 2), (2, 1), (3, 3), (4, 2), (8, 4), (8, 1), (16, 8)]
SPEC = OrderSpec(canonical_nodes=8, block_size=200)
PROPORTIONS = (Weight(proportion=2), Weight(proportion=1), Weight(proportion=0.5))
SPECS = {
    "py1e": SPEC,
    "py1e, weighted": replace(SPEC, weights=(Weight(repeat=1.5), Weight(), Weight(choose=100))),
    "sequential": replace(SPEC, order="sequential"),
    "stratified": replace(SPEC, batching="stratified", weights=PROPORTIONS),
    "per_stream": replace(SPEC, batching="per_stream"),
    "native": OrderSpec("native", block_size=50),
    "native, stratified": OrderSpec("native", block_size=50, batching="stratified", weights=PROPORTIONS),
    "native, per_stream": OrderSpec("native", block_size=50, batching="per_stream"),
}


@dataclass(frozen=True)
class Streams:
    """Shards of several streams, as a dataset offers them to a sampler."""

    shard_sizes: Ids
    shards_per_stream: Sequence[int]
    weights: Sequence[Weight] = ()
    fingerprint: str = "0123456789abcdef0123456789abcdef"


DATASET = Streams(np.array([(shard * 7919) % 97 + 1 for shard in range(20)], np.int64), (8, 7, 5))
TOTAL = int(DATASET.shard_sizes.sum())


def samplers(
    spec: OrderSpec, ranks: int = 1, ranks_per_node: int = 1, **options: Any
) -> list[ElasticBatchSampler]:
    """One sampler a rank."""
    return [
        ElasticBatchSampler(
            DATASET,
            **{"global_batch_size": GLOBAL_BATCH, "order": spec, "world": World(rank, ranks, ranks_per_node)}
            | options,
        )
        for rank in range(ranks)
    ]


def global_batches(group: Sequence[Any]) -> list[list[int]]:
    """The sorted union over ranks of each step."""
    return [sorted(chain.from_iterable(parts)) for parts in zip(*group, strict=True)]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("name", SPECS)
def test_a_resume_at_every_batch_on_every_layout_continues_the_uninterrupted_run(
    name: str, layout: tuple[int, int]
) -> None:
    (single,) = samplers(SPECS[name])
    whole = [sorted(batch) for batch in single]
    assert len(whole) > 8
    group = samplers(SPECS[name], *layout)
    for step in range(len(whole)):
        single.set_epoch(0)
        iterator = iter(single)
        for _ in range(step):
            next(iterator)
        state = json.loads(json.dumps(single.state_dict(batches_consumed=step)))
        for sampler in group:
            sampler.load_state_dict(state)
            assert sampler.state_dict() == state
            assert sampler.remaining_batches == len(whole) - step
        # To the end from the second batch; from each other one into the batch after the next resume.
        stop = len(whole) if step == 1 else step + 2
        assert global_batches([list(islice(sampler, stop - step)) for sampler in group]) == whole[step:stop]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small epoch: 6 whole global batches, and a rest."""
    out = tmp_path_factory.mktemp("data")
    with MDSWriter(out, {"id": "int", "x": "ndarray:int32:4"}, size_limit=1024) as writer:
        for number in range(6 * GLOBAL_BATCH + 5):
            writer.write({"id": number, "x": np.full(4, number, np.int32)})
    return out


def rank_loaders(
    directory: Path, ranks: int, ranks_per_node: int, workers: int
) -> list[tuple[ElasticBatchSampler, "DataLoader[Any]"]]:
    """Each rank's own dataset, sampler and DataLoader; workers stay from one resume to the next."""
    found = []
    for rank in range(ranks):
        dataset = MDSDataset(directory)
        sampler = ElasticBatchSampler(
            dataset, global_batch_size=GLOBAL_BATCH, order=SPEC, world=World(rank, ranks, ranks_per_node)
        )
        loader: DataLoader[Any] = DataLoader(
            dataset, batch_sampler=sampler, num_workers=workers, persistent_workers=workers > 0
        )
        found.append((sampler, loader))
    return found


def delivered(loaders: Sequence[tuple[ElasticBatchSampler, "DataLoader[Any]"]]) -> list[list[int]]:
    """The sorted union over ranks of what each step's DataLoaders deliver, to the end of the epoch."""
    steps = []
    for parts in zip(*(loader for _, loader in loaders), strict=True):
        assert all((part["x"][:, 0] == part["id"]).all() for part in parts)
        assert len({len(part["id"]) for part in parts}) == 1
        steps.append(sorted(chain.from_iterable(part["id"].tolist() for part in parts)))
    return steps


@pytest.fixture(scope="module")
def uninterrupted(directory: Path) -> tuple[list[list[int]], list[str]]:
    """The run on one rank, whose workers read ahead: its batches, and the state before each and at the end."""
    ((sampler, loader),) = rank_loaders(directory, 1, 1, 2)
    batches, states = [], [json.dumps(sampler.state_dict())]
    for batch in loader:
        batches.append(sorted(batch["id"].tolist()))
        sampler.record_step()
        states.append(json.dumps(sampler.state_dict()))
    assert len(batches) == 6
    return batches, states


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("layout", [(1, 1), (2, 1), (3, 3), (4, 2), (8, 4), (16, 8)], ids=str)
def test_data_loaders_of_every_layout_resumed_at_every_batch_deliver_the_uninterrupted_run(
    directory: Path, uninterrupted: tuple[list[list[int]], list[str]], layout: tuple[int, int], workers: int
) -> None:
    whole, states = uninterrupted
    loaders = rank_loaders(directory, *layout, workers)
    for step in range(len(whole)):
        for sampler, _ in loaders:
            sampler.load_state_dict(json.loads(states[step]))
        assert delivered(loaders) == whole[step:]
        assert {json.dumps(sampler.state_dict(len(whole) - step)) for sampler, _ in loaders} == {states[-1]}


@pytest.mark.parametrize("name", SPECS)
def test_batches_asked_for_in_any_order_are_the_same(name: str) -> None:
    spec = SPECS[name]
    table = StreamTable.of(DATASET.shard_sizes, DATASET.shards_per_stream, spec)
    plan = batch_plan(EpochOrders(table, spec), World(1, 2), 16, drop_last=False)
    count = plan.batches(0, drop_last=False)
    whole = [plan.batch(1, 0, number).tolist() for number in range(count)]
    for number in np.random.default_rng(1).permutation(count).tolist():
        assert plan.batch(1, 0, number).tolist() == whole[number]
        start = number // 2 * 16
        assert plan.batch(1, start, number - number // 2).tolist() == whole[number]
        if number % 16 == 0:
            plan.batch(0, 0, number)


def test_stratified_batches_hold_the_same_part_of_each_stream() -> None:
    borders = np.cumsum(DATASET.shard_sizes)[np.cumsum(DATASET.shards_per_stream) - 1]
    for name in ("stratified", "native, stratified"):
        for batch in global_batches(samplers(SPECS[name], 4, 2)):
            streams = np.searchsorted(borders, batch, side="right")
            assert np.bincount(streams).tolist() == [27, 14, 7]


def test_per_stream_batches_hold_one_stream_and_streams_take_turns() -> None:
    borders = np.cumsum(DATASET.shard_sizes)[np.cumsum(DATASET.shards_per_stream) - 1]
    for name in ("per_stream", "native, per_stream"):
        streams = [
            set(np.searchsorted(borders, batch, side="right").tolist())
            for batch in global_batches(samplers(SPECS[name], 4, 2))
        ]
        assert all(len(found) == 1 for found in streams)
        counts = np.bincount([found.pop() for found in streams])
        assert counts.tolist() == [
            int(DATASET.shard_sizes[first:stop].sum()) // GLOBAL_BATCH
            for first, stop in ((0, 8), (8, 15), (15, 20))
        ]


def test_device_per_stream_gives_each_rank_one_stream_and_resumes_on_the_same_ranks_only() -> None:
    spec = replace(SPEC, batching="device_per_stream")
    group = samplers(spec, 4, 2)
    whole = [list(sampler) for sampler in group]
    borders = np.cumsum(DATASET.shard_sizes)[np.cumsum(DATASET.shards_per_stream) - 1]
    for batch in chain.from_iterable(whole):
        assert len(set(np.searchsorted(borders, batch, side="right").tolist())) == 1
    state = samplers(spec, 4, 2)[0].state_dict()
    state["samples"] = 3 * GLOBAL_BATCH
    for sampler, batches in zip(group, whole, strict=True):
        sampler.load_state_dict(state)
        assert list(sampler) == batches[3:]
    for ranks, ranks_per_node in ((8, 2), (4, 4), (1, 1)):
        with pytest.raises(StateError, match=r"device_per_stream is not elastic\) was '2 x 2' and is"):
            samplers(spec, ranks, ranks_per_node)[0].load_state_dict(state)


def test_device_per_stream_says_what_it_cannot_do() -> None:
    spec = replace(SPEC, batching="device_per_stream")
    with pytest.raises(OrderError, match="needs drop_last=True"):
        samplers(spec, drop_last=False)
    with pytest.raises(OrderError, match="do not divide by 3 nodes"):
        samplers(spec, 3, 1)
    with pytest.raises(OrderError, match="has per_stream"):
        samplers(replace(spec, order="native"))
    with pytest.raises(OrderError, match="stream 0 of 3 has too few samples"):
        samplers(spec, global_batch_size=4800)


def test_streams_too_small_for_their_batches_are_errors_at_once() -> None:
    with pytest.raises(OrderError, match="stream 0 of 3 has too few samples"):
        samplers(SPECS["per_stream"], global_batch_size=4800)
    with pytest.raises(OrderError, match="no sample in a global batch"):
        samplers(SPECS["stratified"], global_batch_size=3)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"batching": "per_stream"}, "batching was 'stratified' and is 'per_stream'"),
        ({"sampling": "fixed"}, "sampling was 'balanced' and is 'fixed'"),
        ({"granularity": 4}, "granularity was 1 and is 4"),
        ({"weights": PROPORTIONS[::-1]}, "weights was 'proportion=2, proportion=1, proportion=0.5' and is"),
        ({"tail_layout": (2, 4)}, r"tail_layout was None and is \[2, 4\]"),
        ({"order": "py1s"}, "order was 'py1e' and is 'py1s'"),
    ],
)
def test_a_state_of_other_streams_is_refused_by_name(change: dict[str, Any], told: str) -> None:
    state = samplers(SPECS["stratified"])[0].state_dict()
    with pytest.raises(StateError, match=told):
        samplers(replace(SPECS["stratified"], **change))[0].load_state_dict(state)


def test_a_state_from_before_there_were_streams_is_that_of_a_plain_order() -> None:
    sampler = ElasticBatchSampler([500, 500], global_batch_size=10, world=World())
    state = sampler.state_dict() | {"samples": 50}
    for name in ("batching", "sampling", "granularity", "weights"):
        del state["settings"][name]
    sampler.load_state_dict(state)
    assert sampler.remaining_batches == 95


def test_the_state_of_hundreds_of_streams_is_small_and_tells_them_apart() -> None:
    sizes = np.full(300, 100, np.int64)
    states = []
    for last in (0.5, 0.25):
        weights = [Weight(proportion=0.123456789)] * 299 + [Weight(proportion=last)]
        streams = Streams(sizes, [1] * 300, weights)
        sampler = ElasticBatchSampler(streams, global_batch_size=512, world=World())
        states.append(sampler.state_dict())
        assert len(json.dumps(states[-1])) < 1024
    with pytest.raises(StateError, match="weights was '300 streams, "):
        sampler.load_state_dict(states[0])


def test_weights_come_from_the_dataset_or_the_spec_but_not_from_both() -> None:
    weighted = replace(DATASET, weights=PROPORTIONS)
    options: dict[str, Any] = {"global_batch_size": GLOBAL_BATCH, "world": World()}
    spec = replace(SPEC, batching="stratified")
    by_dataset = list(ElasticBatchSampler(weighted, order=spec, **options))
    assert by_dataset == list(*samplers(SPECS["stratified"]))
    with pytest.raises(OrderError, match="different weights"):
        ElasticBatchSampler(weighted, order=replace(spec, weights=PROPORTIONS[::-1]), **options)


def test_a_spec_and_single_settings_do_not_mix() -> None:
    with pytest.raises(OrderError, match="set them there"):
        samplers(SPEC, seed=3)


@pytest.mark.parametrize("name", SPECS)
def test_a_sampler_of_any_order_survives_pickling(name: str) -> None:
    (sampler,) = samplers(SPECS[name])
    whole = list(sampler)
    assert len(pickle.dumps(sampler)) < 20_000
    sampler.load_state_dict(sampler.state_dict(batches_consumed=4))
    assert list(pickle.loads(pickle.dumps(sampler))) == whole[4:]


@pytest.mark.parametrize("name", ["py1e", "native", "stratified", "per_stream"])
def test_a_state_dict_of_streaming_dataset_continues_every_elastic_order(name: str) -> None:
    (sampler,) = samplers(SPECS[name])
    whole = list(sampler)
    rows = SPECS[name].rows
    state = {"epoch": 0, "sample_in_epoch": 96, "num_canonical_nodes": rows, "shuffle_seed": 9176}
    sampler.load_state_dict(state | {"initial_physical_nodes": 2})
    assert list(sampler) == whole[2:]
