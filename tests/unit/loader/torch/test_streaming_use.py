"""How programs use StreamingDataset beyond its arguments: subclasses, attributes, torchdata's loader, replication."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader

from loader import MDSWriter, ShardError, StateError
from loader.order import OrderSpec
from loader.streaming import Stream, StreamingDataset
from tests.support import ROOT
from tests.support.streaming_library import Layout, library_work, load_library

COUNT = 75
ATTRIBUTES = [
    "allow_unsafe_types",
    "batch_size",
    "batching_method",
    "cache_limit",
    "epoch_seed_change",
    "epoch_size",
    "initial_physical_nodes",
    "length",
    "next_epoch",
    "num_canonical_nodes",
    "num_samples",
    "num_shards",
    "num_streams",
    "partition_algo",
    "predownload",
    "replication",
    "sample_offset_per_shard",
    "sample_offset_per_stream",
    "samples_per_shard",
    "samples_per_stream",
    "sampling_granularity",
    "sampling_method",
    "shard_offset_per_stream",
    "shards_per_stream",
    "shuffle",
    "shuffle_algo",
    "shuffle_block_size",
    "shuffle_seed",
    "size",
    "stream_per_shard",
]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("data")
    for part, count in (("a", COUNT), ("b", 30)):
        hashes = ["sha1"] if part == "a" else None
        with MDSWriter(out / part, {"id": "int"}, size_limit=256, hashes=hashes) as writer:
            for number in range(count):
                writer.write({"id": number})
    return out


def test_subclasses_attributes_and_refusals_are_the_librarys(
    directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    found = []
    for library in ("streaming", "loader.streaming"):
        arguments = [library, str(directory / "a"), str(directory / "b"), ",".join(ATTRIBUTES)]
        done = subprocess.run(
            [sys.executable, "-m", "tests.support.streaming_subclasses", *arguments],
            cwd=ROOT,
            env=os.environ | {"TMPDIR": str(tmp_path), "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert done.returncode == 0, done.stderr[-3000:]
        found.append(json.loads(done.stdout.splitlines()[-1]))
    real, ours = found
    assert ours == real
    assert sorted(sample["more"] for sample in ours["__getitem__"]["iterated"]) == list(range(1 - COUNT, 1))
    assert len(ours["refused"]) == 3


def test_a_stream_that_asks_for_its_hashes_is_checked_and_the_others_are_not(
    directory: Path, tmp_path: Path
) -> None:
    local = tmp_path / "a"
    local.mkdir()
    for file in (directory / "a").iterdir():
        (local / file.name).write_bytes(file.read_bytes())
    shard = local / "shard.00000.mds"
    shard.write_bytes(shard.read_bytes()[:-1] + b"\x01")
    for checked in (True, False):
        streams = [
            Stream(local=str(local), validate_hash="sha1" if checked else None),
            Stream(local=str(directory / "b")),
        ]
        dataset = StreamingDataset(streams=streams, batch_size=5)
        assert dataset[COUNT + 3] == {"id": 3}  # has no hashes at all
        if checked:
            with pytest.raises(ShardError, match="sha1"):
                dataset[0]
        else:
            assert dataset[0] == {"id": 0}


@pytest.mark.parametrize(
    ("nodes", "ranks_per_node", "replication", "rows"),
    [(2, 4, 2, None), (4, 2, 2, 4), (2, 4, 8, None), (2, 3, 2, 2)],
)
def test_replicated_ranks_read_what_the_librarys_do(
    directory: Path,
    monkeypatch: pytest.MonkeyPatch,
    nodes: int,
    ranks_per_node: int,
    replication: int,
    rows: int | None,
) -> None:
    library = load_library()
    shards = json.loads((directory / "a/index.json").read_text())["shards"]
    sizes = np.array([shard["samples"] for shard in shards])
    ranks = nodes * ranks_per_node
    monkeypatch.setenv("WORLD_SIZE", str(ranks))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks_per_node))
    for rank in range(ranks):
        world = library.world(nodes, ranks_per_node, 1, rank).replicate(replication)
        layout = Layout(world.num_nodes, world.ranks_per_node, 1, 4)
        canonical_nodes = rows or world.num_nodes
        spec = OrderSpec(canonical_nodes=canonical_nodes, block_size=4_000_000 // canonical_nodes)
        work = library_work(library, sizes, [sizes.size], spec, 0, layout)
        expected = work[world.node, world.rank_of_node].transpose(1, 0, 2).ravel()
        monkeypatch.setenv("RANK", str(rank))
        dataset = StreamingDataset(
            local=str(directory / "a"),
            shuffle=True,
            batch_size=4,
            num_canonical_nodes=rows,
            replication=replication,
        )
        assert [sample["id"] for sample in dataset] == expected[expected >= 0].tolist()
        state = dataset.state_dict(0, from_beginning=True)
        assert (state["initial_physical_nodes"], len(dataset)) == (
            world.num_nodes,
            -(-COUNT // world.num_ranks),
        )


class Doubling(StreamingDataset):
    """Has an iteration of its own, which begins when its first sample is asked for."""

    def __iter__(self) -> Iterator[Any]:
        for sample in super().__iter__():
            yield {"id": 2 * sample["id"]}


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")  # torchdata 0.11 calls it, torch 2.13 warns
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (StreamingDataset, {}),
        (Doubling, {}),
        (StreamingDataset, {"num_workers": 2}),
        (StreamingDataset, {"num_workers": 2, "persistent_workers": True}),
        (Doubling, {"num_workers": 2, "snapshot_every_n_steps": 3}),
    ],
    ids=["no workers", "lazy", "2 workers", "2 persistent workers", "lazy, 2 workers, seldom snapshots"],
)
@pytest.mark.parametrize("size", [8, 6], ids=["whole batches", "batches of another size"])
def test_torchdatas_stateful_loader_goes_on_without_loss_or_repetition(
    directory: Path, kind: type[StreamingDataset], options: dict[str, Any], size: int
) -> None:
    def loader_of() -> StatefulDataLoader[Any]:
        dataset = kind(local=str(directory / "a"), shuffle=True, batch_size=8)
        return StatefulDataLoader(dataset, batch_size=size, **options)

    def epochs(loader: Any) -> Iterator[list[int]]:
        for _ in range(2):
            yield from (batch["id"].tolist() for batch in loader)

    whole = list(epochs(loader_of()))
    steps = len(whole) // 2
    assert whole[:steps] != whole[steps:]
    assert len(set(chain.from_iterable(whole[:steps]))) == COUNT
    stops = (0, 1, 4, steps - 1, steps, steps + 1) if not options else (1, steps, steps + 1)
    for stop in stops:
        loader = loader_of()
        given = epochs(loader)
        seen = list(islice(given, stop))
        state = json.loads(json.dumps(loader.state_dict()))
        del given, loader
        resumed = loader_of()
        resumed.load_state_dict(state)
        seen += chain.from_iterable(epochs(resumed) for _ in range(2))
        assert seen[: len(whole)] == whole, stop
    loader = loader_of()
    assert [batch["id"].tolist() for batch in loader] == whole[:steps]
    resumed = loader_of()
    resumed.load_state_dict(json.loads(json.dumps(loader.state_dict())))
    assert [batch["id"].tolist() for batch in resumed] == whole[steps:]


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
def test_a_stateful_loaders_state_of_other_workers_or_ranks_is_refused(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def dataset_of() -> StreamingDataset:
        return StreamingDataset(local=str(directory / "a"), shuffle=True, batch_size=8)

    loader: StatefulDataLoader[Any] = StatefulDataLoader(dataset_of(), batch_size=8)
    next(iter(loader))
    state = dataset_of().state_dict()
    assert state["handed_out"] == 0
    state |= {"handed_out": 8, "handed_out_by": [0, 1, 1, 8]}
    dataset = dataset_of()
    dataset.load_state_dict(state)
    assert len(list(dataset)) == COUNT - 8
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "2"), ("LOCAL_WORLD_SIZE", "2")):
        monkeypatch.setenv(name, value)
    with pytest.raises(StateError, match="StreamingDataLoader"):
        dataset_of().load_state_dict(state)


def test_who_asks_for_the_state_where_nobody_counts_is_told_whom_to_ask(directory: Path) -> None:
    dataset = StreamingDataset(local=str(directory / "a"), batch_size=8)
    iterator = iter(DataLoader(dataset, batch_size=8, num_workers=2))
    next(iterator)
    with pytest.raises(StateError, match="num_samples"):
        dataset.state_dict()
