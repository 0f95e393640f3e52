"""Our face of StreamingDataset reads what the real one reads, batch by batch, rank by rank, worker by worker."""

import json
import os
import subprocess
import sys
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from loader import LoaderError, MDSWriter, StateError
from loader.order import OrderSpec
from loader.streaming import Stream, StreamingDataLoader, StreamingDataset
from tests.support import ROOT
from tests.support.streaming_library import Layout, library_work, load_library

COUNT = 203
JOBS: dict[str, dict[str, Any]] = {
    "shuffled, no workers": {"options": {"shuffle": True}, "workers": 0},
    "shuffled, two workers": {"options": {"shuffle": True, "num_canonical_nodes": 4}, "workers": 2},
    "persistent workers": {
        "options": {"shuffle": True, "shuffle_algo": "py1s", "epoch_size": 150},
        "workers": 2,
        "persistent": True,
    },
    "in order": {"options": {}, "workers": 2},
    "streams": {
        "options": {"shuffle": True, "shuffle_seed": 5, "batching_method": "per_stream", "streams": True},
        "workers": 2,
    },
    "stratified": {
        "options": {"shuffle": True, "batching_method": "stratified", "streams": True},
        "workers": 0,
    },
}


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("data")
    first = 0
    for part, count in (("a", COUNT), ("b", 60)):
        with MDSWriter(out / part, {"id": "int", "tokens": "ndarray:int32:8"}, size_limit=1024) as writer:
            for number in range(first, first + count):
                writer.write({"id": number, "tokens": np.full(8, number, np.int32)})
        first += count
    return out


def jobs(directory: Path) -> list[dict[str, Any]]:
    found = []
    for job in JOBS.values():
        options = {"batch_size": 8, **job["options"]}
        if "streams" in options:
            options["streams"] = [
                {"local": str(directory / "a"), "proportion": 0.75},
                {"local": str(directory / "b"), "proportion": 0.25},
            ]
        local = None if "streams" in options else str(directory / "a")
        found.append({"epochs": 2, "stop": 5, **job, "options": options, "local": local})
    return found


@pytest.fixture(scope="module")
def answers(
    directory: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, tuple[dict[str, Any], dict[str, Any]]]:
    """For each job what the library read, and what we read."""
    locks = tmp_path_factory.mktemp("locks")
    texts = []
    for library in ("streaming", "loader.streaming"):
        done = subprocess.run(
            [
                sys.executable,
                "-m",
                "tests.support.streaming_loaders",
                library,
                json.dumps(jobs(directory)),
            ],
            cwd=ROOT,
            env=os.environ | {"TMPDIR": str(locks), "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
        )
        assert done.returncode == 0, done.stderr[-3000:]
        texts.append(done.stdout.splitlines()[-1])
    real, ours = map(json.loads, texts)
    return dict(zip(JOBS, zip(real, ours, strict=True), strict=True))


@pytest.mark.parametrize("name", JOBS)
def test_a_data_loader_delivers_the_librarys_batches_and_resumes_where_it_does(
    name: str, answers: dict[str, tuple[dict[str, Any], dict[str, Any]]]
) -> None:
    real, ours = answers[name]
    assert ours == real
    assert len(ours["epochs"][0]) > 5
    assert ours["epochs"][0] != ours["epochs"][1] or name == "in order"


@pytest.mark.parametrize(("nodes", "ranks_per_node", "workers"), [(1, 2, 2), (2, 2, 0)])
def test_each_rank_and_worker_reads_what_the_librarys_does(
    directory: Path, monkeypatch: pytest.MonkeyPatch, nodes: int, ranks_per_node: int, workers: int
) -> None:
    layout = Layout(nodes, ranks_per_node, max(workers, 1), 8)
    sizes = np.array(
        [shard["samples"] for shard in json.loads((directory / "a/index.json").read_text())["shards"]]
    )
    spec = OrderSpec(canonical_nodes=4, block_size=1 << 18)
    work = library_work(load_library(), sizes, [sizes.size], spec, 1, layout)
    for rank in range(nodes * ranks_per_node):
        monkeypatch.setenv("RANK", str(rank))
        monkeypatch.setenv("WORLD_SIZE", str(nodes * ranks_per_node))
        monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks_per_node))
        dataset = StreamingDataset(
            local=str(directory / "a"), shuffle=True, batch_size=8, num_canonical_nodes=4
        )
        dataset.next_epoch = 1
        loader = StreamingDataLoader(dataset, batch_size=8, num_workers=workers)
        delivered = list(chain.from_iterable(batch["id"].tolist() for batch in loader))
        of_rank = work[rank // ranks_per_node, rank % ranks_per_node]  # (workers, batches, batch)
        expected = of_rank.transpose(1, 0, 2).ravel()
        assert delivered == expected[expected >= 0].tolist()


GLOBAL_BATCH = 12


def rank_loaders(
    directory: Path, monkeypatch: pytest.MonkeyPatch, ranks: int, **options: Any
) -> list[StreamingDataLoader]:
    """Each rank's loader; workers by `num_workers` and `persistent_workers`."""
    found = []
    for rank in range(ranks):
        set_rank(monkeypatch, rank, ranks)
        size = GLOBAL_BATCH // ranks
        dataset = StreamingDataset(local=str(directory / "a"), shuffle=True, batch_size=size)
        found.append(StreamingDataLoader(dataset, batch_size=size, **options))
    return found


def set_rank(monkeypatch: pytest.MonkeyPatch, rank: int, ranks: int) -> None:
    for name, value in (("RANK", rank), ("WORLD_SIZE", ranks), ("LOCAL_WORLD_SIZE", ranks)):
        monkeypatch.setenv(name, str(value))


def taken(loaders: list[StreamingDataLoader], steps: int | None) -> list[set[int]]:
    """The union over ranks of each step of an iteration, up to so many; no rank has more steps than another."""
    parts = zip(*(islice(loader, steps) for loader in loaders), strict=True)
    return [set(chain.from_iterable(part["id"].tolist() for part in step)) for step in parts]


def state_of(monkeypatch: pytest.MonkeyPatch, loaders: list[StreamingDataLoader]) -> dict[str, Any]:
    """The state that all ranks agree on, as a checkpoint keeps it."""
    states = []
    for rank, loader in enumerate(loaders):
        set_rank(monkeypatch, rank, len(loaders))
        states.append(json.dumps(loader.state_dict()))
    assert len(set(states)) == 1
    found: dict[str, Any] = json.loads(states[0])
    return found


@pytest.mark.parametrize("workers", [0, 2])
def test_a_run_moves_to_other_numbers_of_ranks_in_an_epoch_and_between_two(
    directory: Path, monkeypatch: pytest.MonkeyPatch, workers: int
) -> None:
    (alone,) = rank_loaders(directory, monkeypatch, 1)
    whole = [taken([alone], None) for _ in range(4)]
    steps = len(whole[0])
    assert steps == 17  # the last has 11 samples, which fill 12 places
    expected = list(chain.from_iterable(whole))
    seen: list[set[int]] = []
    state = state_of(monkeypatch, rank_loaders(directory, monkeypatch, 2))  # saved before the first step
    # ranks, then where each iteration ends; a whole epoch's state is its end, which an empty iteration follows.
    for ranks, stops in (
        (2, [5]), (1, [4]), (2, [steps - 10]), (3, [None]), (2, [None, 3]), (3, [None]), (2, [None, 1]), (1, [None]),
    ):  # fmt: skip
        loaders = rank_loaders(
            directory, monkeypatch, ranks, num_workers=workers, persistent_workers=workers > 0
        )
        for loader in loaders:
            loader.load_state_dict(state)
        assert state_of(monkeypatch, loaders)["sample_in_epoch"] == state["sample_in_epoch"]
        for stop in stops:
            seen += taken(loaders, stop)
        state = state_of(monkeypatch, loaders)
        assert seen == expected[: len(seen)]
    assert len(seen) == 3 * steps


def test_a_state_loaded_into_a_loader_that_has_delivered_is_the_one_that_it_says(directory: Path) -> None:
    dataset = StreamingDataset(local=str(directory / "a"), shuffle=True, batch_size=8)
    loader = StreamingDataLoader(dataset, batch_size=8)
    assert len(list(islice(loader, 5))) == 5
    state = loader.state_dict()
    assert len(list(islice(loader, 3))) == 3
    assert state is not None
    loader.load_state_dict(state)
    assert loader.state_dict() == state


def test_an_order_that_is_not_the_librarys_is_refused_as_its_states_do_not_tell_it(directory: Path) -> None:
    with pytest.raises(LoaderError, match=r"'native'.*ElasticBatchSampler"):
        StreamingDataset(local=str(directory / "a"), shuffle=True, shuffle_algo="native")


@pytest.mark.parametrize("context", ["fork", "spawn"])
def test_workers_agree_on_the_epoch_though_the_one_before_was_broken_off(
    directory: Path, context: str
) -> None:
    dataset = StreamingDataset(local=str(directory / "a"), shuffle=True, batch_size=8)
    alone = StreamingDataset(local=str(directory / "a"), shuffle=True, batch_size=8)
    expected = [[sample["id"] for sample in alone] for _ in range(2)]
    loader = StreamingDataLoader(
        dataset, batch_size=8, num_workers=2 if context == "fork" else 1, multiprocessing_context=context
    )
    iterator = iter(loader)
    assert next(iterator)["id"].tolist() == expected[0][:8]
    del iterator
    assert list(chain.from_iterable(batch["id"].tolist() for batch in loader)) == expected[1]


def test_a_state_of_another_order_is_refused_and_changes_nothing(directory: Path) -> None:
    dataset = StreamingDataset(local=str(directory / "a"), shuffle=True, batch_size=8)
    state = dataset.state_dict(16, from_beginning=True)
    with pytest.raises(StateError, match="lies within a global batch"):
        dataset.load_state_dict({**state, "epoch": 0, "sample_in_epoch": 13, "shuffle_seed": 1})
    assert dataset.shuffle_seed == state["shuffle_seed"]
    with pytest.raises(LoaderError, match="lacks 'epoch'"):
        dataset.load_state_dict({})
    with pytest.raises(StateError, match=r"a StreamingDataset's state is the dict .*, not NoneType"):
        dataset.load_state_dict(None)  # type: ignore[arg-type]
    with pytest.raises(StateError, match="the state counts 3 samples"):
        dataset.load_state_dict({**state, "handed_out": 3})


def test_what_would_have_to_be_downloaded_or_is_unknown_is_refused(directory: Path) -> None:
    with pytest.raises(
        LoaderError,
        match=r"no mount of this node shows it\. Mount it with `fusecache mount s3://not-mounted/data",
    ):
        StreamingDataset(remote="s3://not-mounted/data", local=str(directory / "a"))
    with pytest.raises(
        LoaderError,
        match=r"no mount of this node shows it\. Mount it with `fusecache mount s3://not-mounted/data",
    ):
        Stream(remote="s3://not-mounted/data", local=str(directory / "a"))
    with pytest.raises(LoaderError, match="unknown arguments: shufle"):
        StreamingDataset(local=str(directory / "a"), shufle=True)
    StreamingDataset(local=str(directory / "a"), cache_limit="10gb", predownload=8)


def test_a_missing_and_an_empty_dataset_raise_what_the_library_raises(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"index.json does not exist"):
        StreamingDataset(remote=str(tmp_path), batch_size=1)
    with pytest.raises(RuntimeError, match=r"index.json does not exist"):
        StreamingDataset(local=str(tmp_path), batch_size=1)
    (tmp_path / "index.json").write_text('{"version": 2, "shards": []}')
    with pytest.raises(RuntimeError, match="no samples"):
        StreamingDataset(local=str(tmp_path), batch_size=1)


def test_a_stream_is_made_with_stream_config_and_never_of_another_class(directory: Path) -> None:
    local = str(directory / "a")
    dataset = StreamingDataset(
        local=local, stream_name="stream", stream_config={"repeat": 2, "local": "other"}
    )
    (stream,) = dataset.streams
    assert (stream.local, stream.repeat, dataset.epoch_size) == (local, 2, 2 * COUNT)
    StreamingDataset(local=local, stream_name="stream", stream_config=None)
    with pytest.raises(LoaderError, match="unknown arguments: custom"):
        StreamingDataset(local=local, stream_config={"custom": 1})
    with pytest.raises(ValueError, match=r"stream_name 'mine': .*pass streams=\["):
        StreamingDataset(local=local, stream_name="mine")


@pytest.mark.parametrize(
    ("weights", "epoch_size"),
    [
        ([{}, {}], None),
        ([{}, {}], 100),
        ([{"repeat": 1.5}, {"choose": 7}], None),
        ([{"proportion": 3}, {"proportion": 1}], None),
        ([{"proportion": 3}, {"proportion": 1}], 50),
    ],
)
def test_streams_know_their_share_afterwards(
    directory: Path, weights: list[dict[str, Any]], epoch_size: int | None
) -> None:
    library = load_library()
    paths = [str(directory / part) for part in ("a", "b")]
    ours = [Stream(local=path, **weight) for path, weight in zip(paths, weights, strict=True)]
    theirs = [library.stream(local=path, **weight) for path, weight in zip(paths, weights, strict=True)]
    library.stream.apply_weights(theirs, np.array([COUNT, 60]), epoch_size, 9176)
    StreamingDataset(streams=ours, epoch_size=epoch_size, batch_size=1)
    for mine, other in zip(ours, theirs, strict=True):
        assert (mine.local, mine.remote, mine.split) == (other.local, other.remote, other.split)
        assert (mine.proportion, mine.repeat, mine.choose) == (other.proportion, other.repeat, other.choose)


def test_a_remote_directory_is_read_in_place(directory: Path, tmp_path: Path) -> None:
    local = tmp_path / "nothing is copied here"
    for options in ({"remote": str(directory / "a")}, {"remote": str(directory / "a"), "local": str(local)}):
        dataset = StreamingDataset(**options, batch_size=1)
        assert dataset[COUNT - 1]["id"] == COUNT - 1
        assert dataset.streams[0].local == str(directory / "a")
    assert not local.exists()


@pytest.mark.parametrize(("text", "samples"), [("1k", 1000), ("0.5k", 500), (120, 120), (None, COUNT)])
def test_an_epochs_size_is_a_number_or_its_short_form(
    directory: Path, text: int | str | None, samples: int
) -> None:
    assert len(StreamingDataset(local=str(directory / "a"), epoch_size=text)) == samples


def test_unpacked_shards_lie_in_the_folder_that_is_named(tmp_path: Path) -> None:
    with MDSWriter(tmp_path / "data", {"id": "int"}, size_limit=512, compression="zstd") as writer:
        for number in range(COUNT):
            writer.write({"id": number})
    folder = tmp_path / "cache"
    local = str(tmp_path / "data")
    options: dict[str, Any] = {"local": local, "batch_size": 8, "shuffle": True, "num_canonical_nodes": 1}
    plain = [sample["id"] for sample in StreamingDataset(**options)]
    kept = [sample["id"] for sample in StreamingDataset(**options, cache_folder=folder)]
    assert kept == plain
    names = [path.suffix for path in folder.iterdir()]
    shards = len(list((tmp_path / "data").glob("shard.*")))
    assert names.count(".mds") == shards
    assert shards > 3
    tight = StreamingDataset(**options, cache_folder=tmp_path / "tight", decompressed_cache_bytes=1100)
    assert [sample["id"] for sample in tight] == plain
    assert 1 <= len(list((tmp_path / "tight").glob("*.mds"))) <= 2
