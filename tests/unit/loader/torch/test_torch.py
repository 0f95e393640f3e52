"""The loader under torch: DataLoader with and without workers, and several ranks as processes."""

import json
import os
import subprocess
import sys
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader

from loader import ElasticBatchSampler, MDSDataset, MDSWriter, StateError, World
from tests.support import ROOT

RANKS = 4

RANK_PROGRAM = """
import json, os, sys
import torch.distributed
from loader import ElasticBatchSampler, MDSDataset, World
from torch.utils.data import DataLoader

directory, state, rendezvous, rank = sys.argv[1:]
assert World.detect() == World(int(rank), 4, 2)  # by the environment
del os.environ["RANK"], os.environ["WORLD_SIZE"]
torch.distributed.init_process_group("gloo", "file://" + rendezvous, rank=int(rank), world_size=4)
dataset = MDSDataset(directory)
sampler = ElasticBatchSampler(dataset, global_batch_size=32, canonical_nodes=4, drop_last=False)
sampler.load_state_dict(json.loads(state))
steps = [batch["id"].tolist() for batch in DataLoader(dataset, batch_sampler=sampler)]
print(json.dumps([World.detect().rank, steps]))
"""


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("data")
    with MDSWriter(out, {"id": "int", "tokens": "ndarray:int32:64"}, size_limit=8192) as writer:
        for number in range(500):
            writer.write({"id": number, "tokens": np.full(64, number, np.int32)})
    return out


def sampler_of(dataset: MDSDataset, **options: Any) -> ElasticBatchSampler:
    settings: dict[str, Any] = {"global_batch_size": 32, "canonical_nodes": 4, "drop_last": False}
    return ElasticBatchSampler(dataset, world=World(), **settings | options)


def run_ranks(directory: Path, state: dict[str, Any], rendezvous: str) -> list[list[int]]:
    """The sorted union over RANKS processes of each step."""
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", RANK_PROGRAM, str(directory), json.dumps(state), rendezvous, str(rank)],
            cwd=ROOT,
            env=os.environ
            | {"RANK": str(rank), "WORLD_SIZE": str(RANKS), "LOCAL_WORLD_SIZE": "2", "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(RANKS)
    ]
    answers = [process.communicate(timeout=120)[0] for process in processes]
    assert [process.returncode for process in processes] == [0] * RANKS
    steps = dict(json.loads(answer.splitlines()[-1]) for answer in answers)
    assert sorted(steps) == list(range(RANKS))
    return [sorted(chain.from_iterable(parts)) for parts in zip(*steps.values(), strict=True)]


@pytest.mark.filterwarnings("ignore:This DataLoader will create 4 worker processes")  # on fewer cores
@pytest.mark.parametrize(
    "options",
    [
        {"num_workers": 0},
        {"num_workers": 1},
        {"num_workers": 4},
        {"num_workers": 4, "persistent_workers": True},
        {"num_workers": 1, "multiprocessing_context": "spawn"},
    ],
    ids=["no workers", "1 worker", "4 workers", "4 persistent workers", "1 spawned worker"],
)
def test_a_data_loader_delivers_the_samplers_batches(directory: Path, options: dict[str, Any]) -> None:
    dataset = MDSDataset(directory)
    sampler = sampler_of(dataset)
    expected = [list(sampler), list(sampler)]
    sampler.set_epoch(0)
    loader: DataLoader[Any] = DataLoader(dataset, batch_sampler=sampler, **options)
    assert len(loader) == len(expected[0])
    for epoch in range(2):
        sampler.set_epoch(epoch)
        delivered = []
        for batch in loader:
            assert batch["tokens"].shape == (len(batch["id"]), 64)
            assert (batch["tokens"][:, 0] == batch["id"]).all()
            delivered.append(batch["id"].tolist())
            sampler.record_step()
        assert delivered == expected[epoch]
        assert sampler.state_dict()["epoch"] == epoch + 1


@pytest.mark.parametrize("workers", [0, 2])
def test_a_checkpoint_in_the_middle_of_an_epoch_continues_it_though_workers_read_ahead(
    directory: Path, workers: int
) -> None:
    dataset = MDSDataset(directory)
    sampler = sampler_of(dataset)
    seen = []
    state: dict[str, Any] = {}
    for batch in DataLoader(dataset, batch_sampler=sampler, num_workers=workers):
        seen.append(batch["id"].tolist())
        sampler.record_step()
        if len(seen) == 5:
            state = json.loads(json.dumps(sampler.state_dict()))
            assert state == sampler.state_dict(batches_consumed=5)
    resumed = sampler_of(dataset)
    resumed.load_state_dict(state)
    rest = [batch["id"].tolist() for batch in DataLoader(dataset, batch_sampler=resumed, num_workers=workers)]
    assert rest == seen[5:]


@pytest.mark.filterwarnings("ignore:This DataLoader will create 4 worker processes")  # on fewer cores
@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")  # torchdata 0.11 calls it, torch 2.13 warns
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (DataLoader, {"num_workers": 0}),
        (DataLoader, {"num_workers": 1, "prefetch_factor": 3}),
        (DataLoader, {"num_workers": 4}),
        (DataLoader, {"num_workers": 4, "persistent_workers": True}),
        (StatefulDataLoader, {"num_workers": 2}),
    ],
    ids=["no workers", "1 worker", "4 workers", "4 persistent workers", "stateful, 2 workers"],
)
def test_an_epoch_is_over_when_the_loop_was_given_all_of_it_however_far_workers_have_read_ahead(
    directory: Path, kind: Any, options: dict[str, Any]
) -> None:
    dataset = MDSDataset(directory)
    # It asks for the state as it hands a batch out; nobody tells a plain one where the loop is.
    sampler = sampler_of(dataset, consumed_when_yielded=kind is StatefulDataLoader)
    whole = [list(sampler), list(sampler)]
    sampler.set_epoch(0)
    loader = kind(dataset, batch_sampler=sampler, **options)
    # It resumes 3 batches before the end, and the first of 4 workers' 8 asks for all of them.
    start = sampler.state_dict(batches_consumed=0) | {"samples": (len(sampler) - 3) * 32}
    for given in (1, 2, 3):
        sampler.load_state_dict(start)
        taken = [batch["id"].tolist() for batch in islice(loader, given)]
        assert taken == whole[0][-3:][:given]
        again = [batch["id"].tolist() for batch in loader]
        assert again == (whole[1] if given == 3 else whole[0][-3:])
        assert (sampler.epoch, sampler.set_epoch(sampler.epoch + 1)) == (given == 3, None)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_loop_that_breaks_off_near_the_end_keeps_its_place_by_what_it_recorded(
    directory: Path, workers: int
) -> None:
    dataset = MDSDataset(directory)
    sampler = sampler_of(dataset)
    whole = [list(sampler), list(sampler)]
    sampler.set_epoch(0)
    loader: DataLoader[Any] = DataLoader(dataset, batch_sampler=sampler, num_workers=workers)
    begun = sampler.state_dict() | {"samples": (len(sampler) - 3) * 32}
    sampler.load_state_dict(begun)
    for _ in islice(loader, 2):
        sampler.record_step()
    state = sampler.state_dict()
    assert (state["epoch"], state["samples"]) == (0, (len(sampler) - 1) * 32)
    sampler.set_epoch(0)  # as trainers do: the epoch under way keeps its place, and begins where it began
    assert [batch["id"].tolist() for batch in loader] == whole[0][-3:]
    sampler.load_state_dict(state)
    assert [batch["id"].tolist() for batch in loader] == whole[0][-1:]
    sampler.record_step()
    assert [batch["id"].tolist() for batch in loader] == whole[1]


# torch's iterator says so when its sampler's iterator raises.
@pytest.mark.filterwarnings("ignore:Exception ignored in. <function _MultiProcessingDataLoaderIter")
@pytest.mark.parametrize("workers", [0, 2])
def test_a_loop_given_a_whole_epoch_of_which_it_recorded_a_part_must_say_how_to_go_on(
    directory: Path, workers: int
) -> None:
    dataset = MDSDataset(directory)
    sampler = sampler_of(dataset)
    whole = [list(sampler), list(sampler)]
    loader: DataLoader[Any] = DataLoader(dataset, batch_sampler=sampler, num_workers=workers)
    ways = {
        "behind": lambda: sampler.load_state_dict(sampler.state_dict()),
        "next": lambda: sampler.set_epoch(1),
        "again": lambda: sampler.set_epoch(0),
    }
    for way, go_on in ways.items():
        sampler.set_epoch(0)
        assert len(list(loader)) == len(sampler)
        sampler.record_step(len(sampler) - 2)
        with pytest.raises(StateError, match="14 of 16 batches were recorded"):
            list(loader)
        go_on()
        expected = {"behind": whole[0][-2:], "next": whole[1], "again": whole[0]}[way]
        assert [batch["id"].tolist() for batch in loader] == expected
        sampler.record_step(len(expected))


def test_four_processes_share_each_global_batch(directory: Path, tmp_path: Path) -> None:
    sampler = sampler_of(MDSDataset(directory))
    single = list(sampler)
    shared = run_ranks(directory, sampler.state_dict(batches_consumed=6), str(tmp_path / "rendezvous"))
    assert shared[:-1] == [sorted(batch) for batch in single[6:-1]]
    assert set(shared[-1]) == set(single[-1])
