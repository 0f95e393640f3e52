"""Samples with one value that varies in size, read many at once: the format's bytes, in the order asked for."""

import gc
import os
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from loader import MDSDataset, MDSWriter, ShardError
from loader.mds.index import read_index
from loader.mds.shard_reader import ReadOptions, ShardReader

COUNT = 120
SHARD_BYTES = 90_000
ALONE = {"image": "bytes"}
# In the stored order, by name: four bytes before the image, eight after it.
AMONG = {"class": "int32", "image": "bytes", "serial": "int"}


def image(number: int) -> bytes:
    return np.random.default_rng(number).bytes(2000 + 211 * (number % 29)) if number % 11 else b""


def write(out: Path, columns: dict[str, str] = ALONE, **options: Any) -> Path:
    with MDSWriter(out, columns, **{"size_limit": SHARD_BYTES, **options}) as writer:
        for number in range(COUNT):
            sample = {"class": -number, "image": image(number), "serial": number}
            writer.write({name: sample[name] for name in columns})
    return out


def stored(directory: Path, *, before: int) -> list[bytes]:
    """Each sample's image, by the format's own description: a count, offsets, then a size and a value each."""
    found = []
    for path in sorted(directory.glob("shard.*.mds")):
        data = path.read_bytes()
        (count,) = struct.unpack_from("<I", data)
        for start in struct.unpack_from(f"<{count}I", data, 4):
            (size,) = struct.unpack_from("<I", data, start)
            found.append(data[start + 4 + before : start + 4 + before + size])
    return found


@pytest.mark.parametrize(("columns", "before"), [(ALONE, 0), (AMONG, 4)])
def test_a_batch_has_what_the_shards_hold_in_the_order_asked_for(
    tmp_path: Path, columns: dict[str, str], before: int
) -> None:
    dataset = MDSDataset(write(tmp_path, columns))
    expected = stored(tmp_path, before=before)
    assert expected == [image(number) for number in range(COUNT)]
    assert dataset.shard_sizes.size > 3
    ids = np.random.default_rng(1).integers(-COUNT, COUNT, 300)
    for which in (ids, ids.tolist(), ids[:1], sorted(ids.tolist(), reverse=True)):
        for number, found in zip(which, dataset[which], strict=True):
            assert type(found["image"]) is bytes
            assert found["image"] == expected[number]
            if columns is AMONG:
                assert (int(found["class"]), found["serial"]) == (-(number % COUNT), number % COUNT)
            assert list(found) == list(columns)
            assert dataset[number]["image"] == found["image"]


def test_what_a_caller_keeps_stays_as_it_is_however_much_is_read_after_it(tmp_path: Path) -> None:
    dataset = MDSDataset(write(tmp_path))
    order = np.random.default_rng(2)
    kept: list[tuple[int, bytes]] = []
    gc.freeze()  # what other tests imported is not to be gone through each time
    try:
        for _ in range(60):
            ids = order.permutation(COUNT)[:16].tolist()
            batch = dataset.__getitems__(ids)
            kept += [(number, batch[place]["image"]) for place, number in enumerate(ids) if place % 3 == 0]
            del batch
            gc.collect()
    finally:
        gc.unfreeze()
    assert all(value == image(number) for number, value in kept)


@pytest.mark.parametrize("columns", [ALONE, AMONG])
def test_a_batch_over_many_shards_names_the_one_that_was_cut_short_while_open(
    tmp_path: Path, columns: dict[str, str]
) -> None:
    dataset = MDSDataset(write(tmp_path, columns))
    first, second, *_ = dataset.shard_sizes.tolist()
    _ = dataset[:]
    path = tmp_path / "shard.00001.mds"
    os.truncate(path, path.stat().st_size - 1)
    last = first + second - 1
    with pytest.raises(ShardError, match=rf"shard\.00001\.mds .*sample {last}: .*truncated"):
        _ = dataset[[COUNT - 1, last, 0]]
    assert [found["image"] for found in dataset[[COUNT - 1, 0]]] == [image(COUNT - 1), image(0)]


def test_a_batch_over_shards_of_which_one_contradicts_its_table_is_an_error_that_names_it(
    tmp_path: Path,
) -> None:
    write(tmp_path)
    with open(tmp_path / "shard.00001.mds", "r+b") as file:
        (start,) = struct.unpack("<I", os.pread(file.fileno(), 4, 4))
        os.pwrite(file.fileno(), struct.pack("<I", 5), start)
    dataset = MDSDataset(tmp_path)
    first = int(dataset.shard_sizes[0])
    with pytest.raises(ShardError, match=rf"shard\.00001\.mds.*sample {first}, number 0 of the shard"):
        _ = dataset[[0, first, COUNT - 1]]


def test_a_batch_may_mix_columns_and_compressions(tmp_path: Path) -> None:
    parts = [
        write(tmp_path / "alone"),
        write(tmp_path / "among", AMONG),
        write(tmp_path / "z", compression="zstd"),
    ]
    dataset = MDSDataset([str(part) for part in parts])
    ids = np.random.default_rng(3).permutation(3 * COUNT)
    for which in (ids, ids[ids < COUNT], ids[ids >= 2 * COUNT]):
        for number, found in zip(which.tolist(), dataset[which], strict=True):
            assert found["image"] == image(number % COUNT)
            assert ("serial" in found) == (COUNT <= number < 2 * COUNT)


def test_few_open_files_are_enough_for_a_batch_over_more_shards(tmp_path: Path) -> None:
    index = read_index(write(tmp_path))
    reader = ShardReader(index, ReadOptions(open_files=2, offset_cache_bytes=1))
    shards = np.repeat(np.arange(index.shards), index.samples)
    samples = np.concatenate([np.arange(count) for count in index.samples])
    before = len(os.listdir("/proc/self/fd"))
    found = reader.read_blobs(shards.tolist(), samples.tolist(), 0, 0)
    assert found is not None
    assert [value for value, _ in found] == [image(number) for number in range(COUNT)]
    assert len(os.listdir("/proc/self/fd")) <= before + 2
