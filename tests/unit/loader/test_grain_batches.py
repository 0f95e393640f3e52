"""Batches as records, for Grain: record k is the batch of step k, in every process and on every number of ranks."""

import pickle
from pathlib import Path

import numpy as np
import pytest

from loader import ElasticBatchSampler, MDSDataset, MDSWriter, OrderError, World
from loader.grain import GrainBatches

SAMPLES = 60


@pytest.fixture
def dataset(tmp_path: Path) -> MDSDataset:
    with MDSWriter(tmp_path / "data", {"id": "int", "name": "str"}, size_limit=200) as writer:
        for number in range(SAMPLES):
            writer.write({"id": number, "name": f"sample {number}"})
    return MDSDataset(tmp_path / "data")


def batches(dataset: MDSDataset, rank: int = 0, ranks: int = 1, epochs: int = 2) -> GrainBatches:
    sampler = ElasticBatchSampler(dataset, global_batch_size=12, world=World(rank, ranks))
    return GrainBatches(dataset, sampler, epochs=epochs)


def test_the_records_are_the_samplers_batches_epoch_after_epoch(dataset: MDSDataset) -> None:
    sampler = ElasticBatchSampler(dataset, global_batch_size=12)
    expected = [ids for _ in range(2) for ids in sampler]
    found = batches(dataset)
    assert len(found) == len(expected) == 10
    assert [found[step]["id"].tolist() for step in reversed(range(10))] == expected[::-1]
    assert found[3]["name"] == [f"sample {number}" for number in expected[3]]
    with pytest.raises(IndexError, match="step 10 is not among the 10 of 2 epochs"):
        _ = found[10]


def test_a_step_has_the_same_samples_on_any_number_of_ranks(dataset: MDSDataset) -> None:
    """And Grain, which compares the text of a data source with that of a saved state, takes it for the same."""
    alone = batches(dataset)
    for ranks in (2, 4):
        each = [batches(dataset, rank, ranks) for rank in range(ranks)]
        assert {repr(one) for one in each} == {repr(alone)}
        for step in range(len(alone)):
            ids = np.concatenate([one[step]["id"] for one in each])
            assert sorted(ids) == sorted(alone[step]["id"])


def test_a_copy_in_another_process_reads_the_same(dataset: MDSDataset) -> None:
    here = batches(dataset)
    there = pickle.loads(pickle.dumps(here))
    assert there[7]["id"].tolist() == here[7]["id"].tolist()


def test_hints_learn_how_far_it_has_read(dataset: MDSDataset) -> None:
    found = batches(dataset)
    assert found.position == (0, 0)
    _ = found[6]
    assert found.position == (1, 2)
    assert found.step_plan.steps == 5


def test_no_epoch_is_refused(dataset: MDSDataset) -> None:
    with pytest.raises(OrderError, match="epochs is at least 1"):
        batches(dataset, epochs=0)
