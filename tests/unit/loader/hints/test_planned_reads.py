"""What a machine reads, planned ahead: the batches of its ranks, as shards and as bytes."""

import pickle
import weakref
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from itertools import chain
from pathlib import Path
from threading import Barrier, BrokenBarrierError
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, reject, settings
from hypothesis import strategies as st

from loader.errors import OrderError
from loader.hints.plan_messages import GAP_BYTES, reads_from, sample_reads, shard_reads, table_bytes
from loader.mds.dataset import MDSDataset
from loader.order import NATIVE, OrderSpec, Weight, epoch_order
from loader.sampling import sampler as sampling
from loader.sampling.sampler import ElasticBatchSampler
from loader.world import Machine, World
from loader.writing.writer import MDSWriter


def batches(sampler: ElasticBatchSampler, epoch: int) -> list[list[int]]:
    """All batches of a rank in an epoch, as the training loop gets them."""
    sampler.set_epoch(epoch)
    return list(sampler)


@st.composite
def runs(draw: st.DrawFn) -> dict:
    spec = draw(st.sampled_from(["py1e", "py1s", NATIVE, "stratified", "per_stream", "naive"]))
    nodes, per_node = draw(st.sampled_from([(1, 1), (1, 2), (2, 1), (2, 2), (3, 2), (4, 1)]))
    # Tensor and pipeline peers: any of the ranks may be on the machine.
    here = draw(st.sets(st.integers(0, nodes * per_node - 1)))
    place = Machine(draw(st.integers(0, 3)), 0, sorted(here)) if here else None
    return {
        "sizes": draw(st.lists(st.integers(1, 60), min_size=2, max_size=12)),
        "order": spec,
        "world": World(draw(st.integers(0, nodes - 1)) * per_node, nodes * per_node, per_node, place=place),
        "batch": nodes * per_node * draw(st.integers(1, 4)),
        "drop_last": draw(st.booleans()),
        "block": draw(st.sampled_from([1, 7, 64, 1 << 20])),
        "canonical_nodes": draw(st.sampled_from([2, 8])),
    }


class Sizes:
    """Two streams without files."""

    def __init__(self, sizes: list[int]) -> None:
        self.shard_sizes = np.array(sizes, np.int64)
        self.fingerprint = "x"
        self.shards_per_stream = [1, len(sizes) - 1]
        self.weights = (Weight(), Weight())


# The padding of an incomplete last step, planned from the middle of the epoch.
PADDED = {
    "sizes": [1, 18],
    "order": "py1e",
    "world": World(2, 6, 2),
    "batch": 6,
    "drop_last": False,
    "block": 64,
    "canonical_nodes": 2,
}


@given(runs())
@example(PADDED)
@settings(max_examples=100, deadline=None)
def test_a_course_has_the_batches_of_all_ranks_of_the_machine(run: dict) -> None:
    batching = run["order"] if run["order"] in {"stratified", "per_stream"} else "random"
    spec = OrderSpec(
        order="py1s" if batching != "random" else run["order"],
        canonical_nodes=run["canonical_nodes"],
        block_size=64,
        batching=batching,
    )
    world = run["world"]
    try:
        samplers = [
            ElasticBatchSampler(
                Sizes(run["sizes"]),
                global_batch_size=run["batch"],
                order=spec,
                world=replace(world, rank=rank),
                drop_last=run["drop_last"],
            )
            for rank in world.machine.dp_ranks
        ]
    except OrderError:  # no run at all with these settings
        reject()
    for epoch in (0, 2):
        try:
            of_ranks = [batches(sampler, epoch) for sampler in samplers]
        except OrderError:  # too few samples for this order
            reject()
        steps = len(of_ranks[0])
        expected = [sorted(chain.from_iterable(rank[step] for rank in of_ranks)) for step in range(steps)]
        ahead = samplers[0].step_plan
        assert ahead.steps == steps
        for first in (0, steps // 2):
            found: list[list[int]] = []
            sampling.BLOCK_SAMPLES, before = run["block"], sampling.BLOCK_SAMPLES
            try:
                for step, ids in ahead.ids(epoch * steps + first, steps):
                    assert step == epoch * steps + first + len(found)
                    found += [sorted(row) for row in ids.tolist()]
            finally:
                sampling.BLOCK_SAMPLES = before
            assert found == expected[first:]


def test_a_course_and_its_sampler_hold_the_order_of_an_epoch_once(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []
    real, meeting = epoch_order.shuffle_units, Barrier(2)

    def shuffle(order: str, units: Any, rows: int, seed: int, epoch: int, *rest: Any) -> Any:
        made.append(epoch)
        with suppress(BrokenBarrierError):
            meeting.wait(0.2)  # of two that make an order at a time
        return real(order, units, rows, seed, epoch, *rest)

    monkeypatch.setattr(epoch_order, "shuffle_units", shuffle)
    sampler = ElasticBatchSampler(np.full(40, 25), global_batch_size=20, world=World())
    ahead = sampler.step_plan
    with ThreadPoolExecutor(1) as other:
        first = other.submit(lambda: next(ahead.ids(0, 1)))
        mine = next(iter(sampler))
        assert sorted(first.result()[1].ravel().tolist()) == sorted(mine)
    assert made == [0]
    held = weakref.ref(ahead.epoch_orders.get(0))
    next(ahead.ids(ahead.steps, 1))  # the course goes ahead to the next epoch
    assert made == [0, 1]
    assert held() is not None
    sampler.set_epoch(1)
    next(iter(sampler))
    assert made == [0, 1]
    assert held() is None  # nobody is at the first epoch any more
    again = pickle.loads(pickle.dumps(sampler))
    assert list(again) == batches(sampler, 1)


@pytest.fixture
def dataset(tmp_path: Path) -> MDSDataset:
    with MDSWriter(tmp_path / "data", {"text": "str", "number": "int"}, size_limit=4096) as writer:
        for number in range(300):
            writer.write({"text": "x" * (number % 37), "number": number})
    return MDSDataset(tmp_path / "data")


def test_uses_of_shards_have_the_first_and_the_last_step_of_each(dataset: MDSDataset) -> None:
    sampler = ElasticBatchSampler(dataset, global_batch_size=20, world=World())
    ends = np.cumsum(dataset.index.samples)
    uses = shard_reads(sampler.step_plan, ends, 15 + 3, 9)
    steps: dict[int, list[int]] = {}
    for step, ids in enumerate(batches(sampler, 1)[3:12], 18):
        for shard in np.searchsorted(ends, ids, side="right").tolist():
            steps.setdefault(shard, []).append(step)
    assert {
        shard: (first, last)
        for shard, first, last in zip(
            uses.shard.tolist(), uses.first.tolist(), uses.last.tolist(), strict=True
        )
    } == {shard: (min(found), max(found)) for shard, found in steps.items()}
    assert (np.diff(uses.first) >= 0).all()
    later = reads_from(uses, 22)
    assert set(later.shard.tolist()) == {shard for shard, found in steps.items() if max(found) >= 22}
    assert int(later.first.min()) == 22
    assert (np.diff(later.first) >= 0).all()


@pytest.mark.parametrize("is_fixed", [True, False])
def test_exact_bytes_are_those_of_the_samples(tmp_path: Path, *, is_fixed: bool) -> None:
    columns = (
        {"number": "int", "wide": "ndarray:int32:4096"}
        if is_fixed
        else {"number": "int", "wide": "ndarray:int32"}
    )
    with MDSWriter(tmp_path / "data", columns, size_limit=1 << 20) as writer:
        for number in range(200):
            writer.write({"number": number, "wide": np.full(4096, number, np.int32)})
    dataset = MDSDataset(tmp_path / "data")
    index, ends = dataset.index, np.cumsum(dataset.index.samples)
    sampler = ElasticBatchSampler(dataset, global_batch_size=16, world=World())

    def table_of(shard: int):
        size = table_bytes(index, shard)
        assert size
        data = (tmp_path / "data" / index.raw_names[shard]).read_bytes()
        return np.frombuffer(data[4:size], "<u4")

    uses = sample_reads(sampler.step_plan, index, ends, 0, 3, table_of=table_of)
    assert [table_bytes(index, shard) > 0 for shard in range(index.shards)] == [not is_fixed] * index.shards
    wanted = batches(sampler, 0)[:3]
    total = int((uses.stop - uses.start).sum())
    assert total <= sum(map(len, wanted)) * (4096 * 4 + 8 + 6 + GAP_BYTES)
    for step, ids in enumerate(wanted):
        for sample in ids:
            shard = int(np.searchsorted(ends, sample, side="right"))
            data = (tmp_path / "data" / index.raw_names[shard]).read_bytes()
            value = np.full(4096, sample, "<i4").tobytes()
            place = data.index(value)
            mine = (uses.shard == shard) & (uses.first == step)
            assert ((uses.start[mine] <= place) & (place + len(value) <= uses.stop[mine])).any()
    assert (uses.first == uses.last).all()
