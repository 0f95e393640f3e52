"""Datasets, and a run in the middle of an epoch, go over to the real StreamingDataset and come back."""

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from loader import ElasticBatchSampler, MDSDataset, MDSWriter, ShardError, Stream, World
from loader.order import OrderSpec
from tests.support import ROOT
from tests.support.streaming_process import digest

COLUMNS = {
    "id": "int",
    "text": "str",
    "blob": "bytes",
    "tokens": "ndarray:int32:16",
    "free": "ndarray",
    "score": "float32",
    "meta": "json",
}
COUNT = 300


def samples() -> list[dict[str, Any]]:
    rng = np.random.default_rng(1)
    return [
        {
            "id": number,
            "text": "ä" * int(rng.integers(0, 30)),
            "blob": rng.bytes(int(rng.integers(0, 100))),
            "tokens": rng.integers(0, 1000, 16, dtype=np.int32),
            "free": rng.random((int(rng.integers(1, 3)), 2)),
            "score": 0.5 * number,
            "meta": {"number": number, "list": [1, None, "x"]},
        }
        for number in range(COUNT)
    ]


def write_ours(out: Path, **options: Any) -> Path:
    with MDSWriter(out, COLUMNS, size_limit=4096, **options) as writer:
        for sample in samples():
            writer.write(sample)
    return out


@pytest.fixture(scope="module")
def library() -> Iterator["subprocess.Popen[str]"]:
    """A process with the real library."""
    with subprocess.Popen(
        [sys.executable, "-m", "tests.support.streaming_process"],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        yield process


@pytest.fixture
def read_streaming(library: "subprocess.Popen[str]", tmp_path: Path) -> Callable[..., Any]:
    """What the real StreamingDataset reads of a directory."""
    locks = tmp_path / "locks"
    locks.mkdir()
    assert library.stdin is not None
    assert library.stdout is not None

    def read(local: Path, what: str, stop: int = 0, **options: Any) -> Any:
        command = {"local": str(local), "options": options, "read": what, "stop": stop, "locks": str(locks)}
        library.stdin.write(json.dumps(command) + "\n")
        library.stdin.flush()
        found = json.loads(library.stdout.readline())
        assert "error" not in found, found["error"]
        return found

    return read


def test_the_librarys_dataset_reads_and_checks_what_we_wrote(
    tmp_path: Path, read_streaming: Callable[..., Any]
) -> None:
    local = write_ours(tmp_path / "ours", hashes=["sha1"], compression="zstd:7", align=64)
    found = read_streaming(local, "index", validate_hash="sha1", batch_size=1)
    assert found["digests"] == [digest(sample) for sample in samples()]


def test_a_run_moves_over_in_the_middle_of_an_epoch(
    tmp_path: Path, read_streaming: Callable[..., Any]
) -> None:
    local = write_ours(tmp_path / "ours")
    options = {"shuffle": True, "shuffle_seed": 7, "num_canonical_nodes": 4, "shuffle_block_size": 60}
    streaming = read_streaming(local, "iterate", stop=96, batch_size=24, **options)
    dataset = MDSDataset(local)
    settings: dict[str, Any] = {"seed": 7, "canonical_nodes": 4, "block_size": 60, "drop_last": False}
    whole = ElasticBatchSampler(dataset, global_batch_size=24, world=World(), **settings)
    batches = [[dataset[number]["id"] for number in batch] for batch in whole]
    assert list(chain.from_iterable(batches)) == streaming["ids"] + streaming["rest"]
    for ranks in (1, 2, 3):
        group = [
            ElasticBatchSampler(dataset, global_batch_size=24, world=World(rank, ranks), **settings)
            for rank in range(ranks)
        ]
        for sampler in group:
            sampler.load_state_dict(streaming["state"])
        rest = [sorted(chain.from_iterable(parts)) for parts in zip(*group, strict=True)]
        assert rest == [sorted(batch) for batch in batches[4:]]


def test_a_run_over_weighted_streams_moves_over_in_the_middle_of_an_epoch(
    tmp_path: Path, read_streaming: Callable[..., Any]
) -> None:
    first = 0
    for name, count in (("books", 300), ("code", 200), ("web", 700)):
        with MDSWriter(tmp_path / name, {"id": "int"}, size_limit=1024) as writer:
            for number in range(first, first + count):
                writer.write({"id": number})
        first += count
    shares = {"books": 2, "code": 1, "web": 1}
    streaming = read_streaming(
        tmp_path,
        "iterate",
        stop=120,
        streams=[{"local": str(tmp_path / name), "proportion": share} for name, share in shares.items()],
        batch_size=24,
        shuffle=True,
        shuffle_seed=7,
        num_canonical_nodes=4,
        shuffle_block_size=200,
        batching_method="stratified",
    )
    dataset = MDSDataset([Stream(tmp_path / name, proportion=share) for name, share in shares.items()])
    spec = OrderSpec("py1e", seed=7, canonical_nodes=4, block_size=200, batching="stratified")
    for ranks in (1, 2, 3):
        group = [
            ElasticBatchSampler(dataset, global_batch_size=24, order=spec, world=World(rank, ranks))
            for rank in range(ranks)
        ]
        for sampler in group:
            sampler.load_state_dict(streaming["state"])
        rest = [[dataset[number]["id"] for number in chain(*parts)] for parts in zip(*group, strict=True)]
        assert list(chain(*rest)) == streaming["rest"]


def test_the_library_says_nothing_of_a_missing_shard_and_we_do(
    tmp_path: Path, read_streaming: Callable[..., Any]
) -> None:
    """It ends the epoch early, or with workers waits for ever; which of them depends on its threads."""
    local = tmp_path / "ours"
    with MDSWriter(local, {"id": "int", "text": "str"}, size_limit=1024) as writer:
        for number in range(COUNT):
            writer.write({"id": number, "text": "some text"})
    (local / "shard.00003.mds").unlink()
    epochs = read_streaming(local, "loaders", batch_size=10)
    assert {found["end"] for found in epochs} & {"end", "hang"}, epochs
    assert all(found["count"] < COUNT for found in epochs), epochs
    with pytest.raises(ShardError, match=r"shard\.00003\.mds \(shard 3\): .*the file is missing"):
        _ = MDSDataset(local)[:]
