"""Many reads in one call: the same bytes by both ways, and what cannot be read is told, not raised."""

import os
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from loader import EncodingError, LoaderError, MDSDataset, MDSWriter, ShardError
from loader.mds import batched_reads
from loader.mds.record_table import RecordTable
from loader.torch.collate import collate

SIZE = 100
ROWS = 700  # more than one call takes


@pytest.fixture(params=["io_submit", "preadv"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "preadv":
        monkeypatch.setattr(batched_reads, "_context", lambda: None)
    elif batched_reads._context() is None:
        pytest.skip("this system has no io_submit")
    return str(request.param)


@pytest.fixture
def file(tmp_path: Path) -> Iterator[int]:
    (tmp_path / "file").write_bytes(np.arange(ROWS * SIZE // 2, dtype="<u2").tobytes())
    descriptor = os.open(tmp_path / "file", os.O_RDONLY)
    yield descriptor
    os.close(descriptor)


def read(file: int, order: np.ndarray, files: np.ndarray | None = None) -> tuple[np.ndarray, np.ndarray]:
    block = np.zeros((order.size, SIZE), np.uint8)
    which = np.full(order.size, file, np.int32) if files is None else files
    bad = batched_reads.read_batched(which, order * SIZE, block)
    return block.view("<u2")[:, 0], bad


def test_every_row_gets_its_bytes_in_the_order_asked_for(way: str, file: int) -> None:
    order = np.random.default_rng(1).permutation(ROWS)
    found, bad = read(file, order)
    assert bad.size == 0
    assert found.tolist() == (order * SIZE // 2).tolist()


def test_rows_beyond_the_end_and_of_a_file_that_is_not_open_are_told_and_no_others(
    way: str, file: int
) -> None:
    order = np.arange(ROWS)
    order[[3, 300]] = ROWS + 5
    files = np.full(ROWS, file, np.int32)
    files[[0, 600]] = 10_000
    found, bad = read(file, order, files)
    assert sorted(bad.tolist()) == [0, 3, 300, 600]
    good = np.setdiff1d(np.arange(ROWS), bad)
    assert (found[good] == good * SIZE // 2).all()


def test_a_child_and_other_threads_read_by_their_own(way: str, file: int) -> None:
    order = np.arange(ROWS)[::-1]
    expected = (order * SIZE // 2).tolist()
    assert read(file, order)[0].tolist() == expected
    found: list[list[int]] = []
    others = [threading.Thread(target=lambda: found.append(read(file, order)[0].tolist())) for _ in range(4)]
    for other in others:
        other.start()
    for other in others:
        other.join()
    assert found == [expected] * 4
    child = os.fork()
    if child == 0:
        right = read(file, order)[0].tolist() == expected
        os._exit(0 if right else 1)
    assert os.waitpid(child, 0)[1] == 0


@pytest.mark.parametrize("count", [20, 250])  # 20 are few enough for a system call each
@pytest.mark.parametrize("compression", [None, "zstd:3"])
def test_columns_of_fixed_sizes_are_those_that_were_written(
    way: str, tmp_path: Path, compression: str | None, count: int
) -> None:
    columns = {"a": "uint8", "b": "ndarray:float32:2,3", "c": "int", "d": "float64"}
    samples = [
        {"a": np.uint8(n % 256), "b": np.full((2, 3), n, np.float32), "c": -n, "d": np.float64(n / 3)}
        for n in range(300)
    ]
    with MDSWriter(tmp_path, columns, size_limit=2048, compression=compression) as writer:
        for sample in samples:
            writer.write(sample)
    dataset = MDSDataset(tmp_path)
    ids = np.random.default_rng(2).permutation(300)[:count]
    found = dataset.__getitems__(ids)
    assert isinstance(found, RecordTable) == (compression is None)
    batch = collate(found)
    for name in columns:
        assert batch[name].numpy().tolist() == [np.asarray(samples[n][name]).tolist() for n in ids]
    for number, sample in zip(ids.tolist(), found, strict=True):
        assert type(sample["c"]) is int
        assert sample["a"].dtype == np.uint8
        assert (sample["b"] == samples[number]["b"]).all()
        sample["b"] += 1  # its own to write to
    assert found[-1].keys() == columns.keys()
    assert [sample["c"] for sample in found[1:3]] == [-int(ids[1]), -int(ids[2])]


@pytest.mark.parametrize("count", [20, 299])
def test_a_record_that_is_gone_from_an_open_shard_is_an_error_and_the_others_are_read(
    tmp_path: Path, count: int
) -> None:
    with MDSWriter(tmp_path, {"a": "ndarray:int32:4"}) as writer:
        for number in range(300):
            writer.write({"a": np.full(4, number, np.int32)})
    dataset = MDSDataset(tmp_path)
    ids = list(range(count - 1, -1, -1))
    expected = collate(dataset.__getitems__(ids))["a"].tolist()
    shard = tmp_path / "shard.00000.mds"
    os.truncate(shard, shard.stat().st_size - (300 - count) * 16)
    assert collate(dataset.__getitems__(ids))["a"].tolist() == expected
    os.truncate(shard, shard.stat().st_size - 16)
    with pytest.raises(ShardError, match="truncated"):
        dataset.__getitems__(ids)


def test_one_value_that_varies_among_fixed_ones_is_read_by_itself(tmp_path: Path) -> None:
    columns = {"a": "int", "m": "bytes", "t": "ndarray:int16:4", "z": "uint8"}
    with MDSWriter(tmp_path, columns, size_limit=4096) as writer:
        for n in range(200):
            writer.write({"a": n, "m": bytes([n]) * n, "t": np.full(4, n, np.int16), "z": np.uint8(n)})
    dataset = MDSDataset(tmp_path)
    for n, sample in zip([7, 199, 0, 7], dataset[[7, 199, 0, 7]], strict=True):
        assert (sample["a"], sample["m"], sample["z"], list(sample)) == (n, bytes([n]) * n, n, list(columns))
        assert type(sample["m"]) is bytes
        sample["t"] += 1


def test_an_index_of_another_dataset_is_noticed_where_one_value_varies(tmp_path: Path) -> None:
    with MDSWriter(tmp_path, {"a": "bytes", "b": "bytes"}) as writer:
        for n in range(10):
            writer.write({"a": b"x" * n, "b": b"y" * 5})
    path = tmp_path / "index.json"
    text = path.read_text()
    for was, now in (
        ('["a", "b"]', '["a"]'),
        ('["bytes", "bytes"]', '["bytes"]'),
        ("[null, null]", "[null]"),
    ):
        assert was in text
        text = text.replace(was, now)
    path.write_text(text)
    with pytest.raises(ShardError, match="index belongs to another") as caught:
        MDSDataset(tmp_path)[3]
    assert isinstance(caught.value.__cause__, EncodingError)
    assert isinstance(caught.value, LoaderError)
