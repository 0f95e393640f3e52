"""Datasets, and a run in the middle of an epoch, go over to the real StreamingDataset and come back."""

import json
import os
import subprocess
import sys
import warnings
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from loader import ElasticBatchSampler, MDSDataset, MDSWriter, World
from tests.real_streaming import import_streaming
from tests.unit.loader.streaming_process import digest

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
ROOT = Path(__file__).parents[3]


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


def write_theirs(out: Path, **options: Any) -> Path:
    streaming = import_streaming()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with streaming.MDSWriter(out=str(out), columns=COLUMNS, size_limit=4096, **options) as writer:
            for sample in samples():
                writer.write(sample)
    return out


def run_streaming(local: Path, tmp_path: Path, read: str, stop: int = 0, **options: Any) -> dict[str, Any]:
    """What the real StreamingDataset reads of a directory, in its own process."""
    locks = tmp_path / "locks"
    locks.mkdir(exist_ok=True)
    command = {"local": str(local), "options": options, "read": read, "stop": stop}
    done = subprocess.run(
        [sys.executable, "-m", "tests.unit.loader.streaming_process", json.dumps(command)],
        cwd=ROOT,
        env=os.environ | {"TMPDIR": str(locks)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def files(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(directory.iterdir())}


def test_raw_datasets_are_byte_identical(tmp_path: Path) -> None:
    ours = write_ours(tmp_path / "ours", hashes=["sha1", "xxh64"])
    theirs = write_theirs(tmp_path / "theirs", hashes=["sha1", "xxh64"])
    assert len(files(ours)) > 5
    assert files(ours) == files(theirs)


@pytest.mark.parametrize("compression", [None, "zstd:7", "gz:1", "bz2:1", "br:2", "snappy"])
def test_we_read_what_the_library_wrote(tmp_path: Path, compression: str | None) -> None:
    dataset = MDSDataset(write_theirs(tmp_path, compression=compression))
    assert [digest(sample) for sample in dataset] == [digest(sample) for sample in samples()]


@pytest.mark.parametrize("options", [{"compression": "zstd:7"}, {"align": 64}])
def test_the_library_reads_what_we_wrote(tmp_path: Path, options: dict[str, Any]) -> None:
    local = write_ours(tmp_path / "ours", hashes=["sha1"], **options)
    found = run_streaming(local, tmp_path, "index", validate_hash="sha1", batch_size=1)
    assert found["digests"] == [digest(sample) for sample in samples()]


def test_a_run_moves_over_in_the_middle_of_an_epoch(tmp_path: Path) -> None:
    local = write_ours(tmp_path / "ours")
    options = {"shuffle": True, "shuffle_seed": 7, "num_canonical_nodes": 4, "shuffle_block_size": 60}
    streaming = run_streaming(local, tmp_path, "iterate", stop=96, batch_size=24, **options)
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
