"""What cannot be read is said at once, by name, and what waits is told of; nothing is left out in silence.

StreamingDataset ends the epoch early when a shard is missing, or waits for ever with workers: that it does so today
is shown in `test_exchange_with_streaming`. The same harms on a real mount: `tests/mount/test_loader_errors.py`.
"""

import gc
import os
import re
import shutil
import traceback
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch.utils.data import DataLoader

from loader import DatasetError, ElasticBatchSampler, LoaderError, MDSDataset, MDSWriter, ShardError, World
from loader.mds.index import read_index
from loader.mds.shard_reader import ReadOptions, ShardReader


def write(out: Path, compression: str | None = None, **options: Any) -> Path:
    with MDSWriter(
        out, {"id": "int", "text": "str"}, size_limit=1024, compression=compression, **options
    ) as writer:
        for number in range(300):
            writer.write({"id": number, "text": "some text"})
    return out


def remove(path: Path) -> None:
    path.unlink()


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def replace_by_a_longer_one(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"more")


def replace_by_a_directory(path: Path) -> None:
    path.unlink()
    path.mkdir()


def replace_by_a_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def change_a_byte(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-3] ^= 1
    path.write_bytes(data)


HARMS = [remove, truncate, replace_by_a_longer_one, replace_by_a_directory, replace_by_a_pipe, change_a_byte]


@pytest.mark.parametrize("compression", [None, "zstd"])
@pytest.mark.parametrize("harm", HARMS)
def test_every_harm_names_shard_bytes_and_samples(tmp_path: Path, harm: Any, compression: str | None) -> None:
    dataset = MDSDataset(write(tmp_path, compression, hashes=["xxh64"]), check_hashes=True)
    first, stop = np.cumsum(dataset.shard_sizes)[[2, 3]].tolist()
    path = next(tmp_path.glob("shard.00003.*"))
    harm(path)
    with pytest.raises(ShardError) as caught:
        _ = dataset[:]
    said = str(caught.value)
    assert re.search(rf"{re.escape(str(path))} \(shard 3\): bytes \d+ to \d+, samples? {first}", said)
    assert str(stop - 1) in said or f"sample {first}:" in said


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("compression", [None, "zstd"])
@pytest.mark.parametrize("harm", HARMS)
def test_a_training_loop_ends_with_the_shards_name_not_with_a_short_epoch(
    tmp_path: Path, harm: Any, compression: str | None, workers: int
) -> None:
    dataset = MDSDataset(write(tmp_path, compression, hashes=["sha1"]), check_hashes=True)
    harm(next(tmp_path.glob("shard.00003.*")))
    sampler = ElasticBatchSampler(dataset, global_batch_size=32, canonical_nodes=1, world=World())
    said = ""
    try:
        for _ in DataLoader(dataset, batch_sampler=sampler, num_workers=workers):
            pass
    except ShardError as problem:
        said = str(problem)
        # torch's frames and the error keep each other, and the workers: these would be waited for later, and long.
        traceback.clear_frames(problem.__traceback__)
    assert re.search(r"shard\.00003\.mds.* \(shard 3\): bytes \d+ to \d+, samples? \d+", said), said


def test_hashes_that_are_asked_for_and_not_there_are_an_error(tmp_path: Path) -> None:
    with pytest.raises(DatasetError, match="has no hash of shard 0, which check_hashes needs"):
        MDSDataset(write(tmp_path), check_hashes=True)


def test_a_shard_is_hashed_once(tmp_path: Path) -> None:
    index = read_index(write(tmp_path, hashes=["sha1"]), with_hashes=True)
    reader = ShardReader(index, ReadOptions(open_files=1, check_hashes=True))
    for shard in (0, 1):
        reader.read_many(shard, [0])
    change_a_byte(tmp_path / "shard.00000.mds")
    reader.read_many(0, [0])


def test_a_dataset_whose_mount_is_gone_is_dropped_without_a_word(tmp_path: Path) -> None:
    reader = ShardReader(read_index(write(tmp_path)))
    reader.read_many(0, [0])
    os.close(reader.files.file(0).fd)  # as a dead mount does: closing it once more fails
    del reader


@pytest.mark.parametrize("options", [{}, {"cache": True}, {"compression": "zstd"}], ids=str)
def test_a_dataset_that_is_dropped_closes_its_files_at_once(tmp_path: Path, options: dict[str, Any]) -> None:
    """A mount could not be unmounted until the next garbage collection."""
    cache = tmp_path / "cache" if options.get("cache") else None
    directory = write(tmp_path / "data", "zstd" if cache else options.get("compression"))
    before = sorted(os.listdir("/proc/self/fd"))
    gc.disable()
    try:
        dataset = MDSDataset(directory, cache_folder=cache)
        assert len(dataset[:]) == 300
        del dataset
        assert sorted(os.listdir("/proc/self/fd")) == before
    finally:
        gc.enable()


# Decompressed once


def test_a_cache_folder_holds_each_decompressed_shard_for_all_processes(tmp_path: Path) -> None:
    directory = write(tmp_path / "data", "zstd")
    before = sorted(path.name for path in directory.iterdir())
    cache = tmp_path / "cache" / "here"
    dataset = MDSDataset(directory, cache_folder=cache)
    assert [sample["id"] for sample in dataset] == list(range(300))
    kept = {path.name: path.stat().st_ino for path in cache.iterdir()}
    assert len(kept) == dataset.shard_sizes.size
    other = MDSDataset(directory, cache_folder=cache)
    assert [sample["id"] for sample in other[::-7]] == list(range(299, -1, -7))
    assert {path.name: path.stat().st_ino for path in cache.iterdir()} == kept
    assert sorted(path.name for path in directory.iterdir()) == before


def test_a_cache_folder_is_bounded_and_what_is_damaged_in_it_is_made_again(tmp_path: Path) -> None:
    directory = write(tmp_path / "data", "gz")
    cache = tmp_path / "cache"
    dataset = MDSDataset(directory, cache_folder=cache, decompressed_cache_bytes=3000)
    for _ in range(2):
        assert [sample["id"] for sample in dataset] == list(range(300))
        assert 0 < sum(path.stat().st_size for path in cache.iterdir()) <= 3000
        for path in cache.iterdir():
            os.truncate(path, 10)
        dataset = MDSDataset(directory, cache_folder=cache, decompressed_cache_bytes=3000)


def test_another_dataset_at_the_same_path_is_not_taken_from_the_cache_folder(tmp_path: Path) -> None:
    directory = write(tmp_path / "data", "zstd")
    assert MDSDataset(directory, cache_folder=tmp_path / "cache")[0]["text"] == "some text"
    shutil.rmtree(directory)
    with MDSWriter(directory, {"id": "int", "text": "str"}, size_limit=1024, compression="zstd") as writer:
        for number in range(300):
            writer.write({"id": number, "text": "SOME TEXT"})
    assert MDSDataset(directory, cache_folder=tmp_path / "cache")[0]["text"] == "SOME TEXT"


@pytest.mark.parametrize("inner", ["", "cache", "a/b"])
def test_a_cache_folder_in_the_dataset_is_refused(tmp_path: Path, inner: str) -> None:
    directory = write(tmp_path / "data", "zstd")
    before = sorted(directory.rglob("*"))
    with pytest.raises(LoaderError, match="which the loader never writes to"):
        MDSDataset(directory, cache_folder=directory / inner)
    assert sorted(directory.rglob("*")) == before


def test_a_cache_folder_that_cannot_be_made_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(LoaderError, match="cannot be made: Not a directory"):
        MDSDataset(write(tmp_path / "data", "zstd"), cache_folder=tmp_path / "file" / "cache")


def test_a_harmed_shard_is_named_though_there_is_a_cache_folder(tmp_path: Path) -> None:
    directory = write(tmp_path / "data", "zstd")
    truncate(directory / "shard.00000.mds.zstd")
    (directory / "shard.00001.mds.zstd").unlink()
    dataset = MDSDataset(directory, cache_folder=tmp_path / "cache")
    for shard, told in ((0, "truncated"), (1, "missing")):
        with pytest.raises(ShardError, match=rf"shard\.0000{shard}\.mds\.zstd.*{told}"):
            _ = dataset[shard * int(dataset.shard_sizes[0])]
