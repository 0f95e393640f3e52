"""Parquet files as a dataset: values, ids, the same order on any layout, errors that name the file."""

import gc
import logging
import os
import pickle
import re
import subprocess
import sys
import traceback
import weakref
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from threading import Barrier, Thread
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from torch.utils.data import DataLoader

from loader import (
    DatasetError,
    ElasticBatchSampler,
    LoaderError,
    ParquetDataset,
    ShardError,
    StateError,
    World,
)
from loader.fast import Loader
from loader.mds.record_table import RecordTable
from loader.parquet.row_groups import OpenParquetFile
from loader.torch.collate import Ragged, collate

ROWS = 400
FILES = 4


def table(first: int, rows: int) -> pa.Table:
    ids = range(first, first + rows)
    return pa.table(
        {
            "id": pa.array(ids, pa.int64()),
            "tokens": pa.array([[number, number + 1, -number] for number in ids], pa.list_(pa.int32())),
            "text": pa.array([f"text {number} ü" for number in ids], pa.string()),
            "ragged": pa.array([list(range(number % 5)) for number in ids], pa.list_(pa.uint16())),
        }
    )


@pytest.fixture(scope="module")
def web(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four files in two folders, in row groups of up to 32 rows, and things that are no part of the dataset."""
    out = tmp_path_factory.mktemp("web")
    for number in range(FILES):
        path = out / ("part2" if number < 2 else "part10") / f"{number}.parquet"
        path.parent.mkdir(exist_ok=True)
        pq.write_table(table(number * 100, 100), path, row_group_size=32, compression="zstd")
    for name in ("_temporary/9.parquet", "part2/.9.parquet", "part2/_SUCCESS", "readme.txt"):
        (out / name).parent.mkdir(exist_ok=True)
        (out / name).write_bytes(b"no Parquet")
    return out


def one_file(tmp_path: Path, columns: dict[str, Any], **options: Any) -> ParquetDataset:
    pq.write_table(pa.table(columns), tmp_path / "one.parquet", **options)
    return ParquetDataset(tmp_path / "one.parquet")


def steps(
    dataset: ParquetDataset, ranks: int, state: dict[str, Any] | None = None, **options: Any
) -> list[list[int]]:
    """The sorted union over the ranks of each step's ids, read by each rank."""
    found: list[list[int]] = []
    for rank in range(ranks):
        sampler = ElasticBatchSampler(
            dataset, global_batch_size=24, world=World(rank, ranks, ranks), **options
        )
        if state is not None:
            sampler.load_state_dict(state)
        for number, ids in enumerate(sampler):
            if number == len(found):
                found.append([])
            found[number] += [sample["id"] for sample in dataset.__getitems__(ids)]
    return [sorted(step) for step in found]


# ---- values


def test_every_id_gives_its_row_in_every_way_of_asking(web: Path) -> None:
    dataset = ParquetDataset(web)
    assert [len(dataset), len(dataset.files), dataset.shard_sizes.tolist()] == [
        ROWS,
        FILES,
        [32, 32, 32, 4] * FILES,
    ]
    assert [sample["id"] for sample in dataset] == list(range(ROWS))
    assert dataset[-1]["id"] == dataset[np.int64(ROWS - 1)]["id"] == ROWS - 1
    assert [sample["id"] for sample in dataset[95:210:5]] == list(range(95, 210, 5))
    shuffled = np.random.default_rng(0).permutation(ROWS)
    assert [sample["id"] for sample in dataset[shuffled]] == shuffled.tolist()
    assert [sample["text"] for sample in dataset[[3, -1, 3]]] == ["text 3 ü", "text 399 ü", "text 3 ü"]
    assert list(dataset.__getitems__([])) == dataset[5:5] == []
    for wrong in (ROWS, -ROWS - 1, [0, ROWS]):
        with pytest.raises(IndexError, match="is not among the 400 of"):
            dataset[wrong]
    with pytest.raises(TypeError):
        dataset["text"]  # type: ignore[call-overload]


def test_values_are_pythons_and_numpys(web: Path) -> None:
    sample = ParquetDataset(web)[3]
    assert {name: type(value) for name, value in sample.items()} == {
        "id": int,
        "tokens": np.ndarray,
        "text": str,
        "ragged": np.ndarray,
    }
    assert (sample["tokens"].dtype, sample["ragged"].dtype) == (np.int32, np.uint16)
    assert (sample["tokens"].tolist(), sample["ragged"].tolist()) == ([3, 4, -3], [0, 1, 2])
    sample["tokens"] += 1  # its own memory, not the cache's
    assert ParquetDataset(web)[3]["tokens"].tolist() == [3, 4, -3]


def test_every_kind_of_column_comes_as_it_was_written(tmp_path: Path) -> None:
    columns = {
        "bytes": pa.array([b"\0a", b""], pa.binary()),
        "float": pa.array([0.5, 2.0], pa.float32()),
        "double": [0.1, 0.2],
        "flag": [True, False],
        "small": pa.array([1, -1], pa.int8()),
        "word": pa.array(["a", "b"]).dictionary_encode(),
        "large": pa.array(["x", "y"], pa.large_string()),
        "maybe": pa.array([None, 7], pa.int64()),
        "maybe_text": [None, "t"],
        "fixed": pa.array([[1, 2], [3, 4]], pa.list_(pa.float16(), 2)),
        "matrix": [[[1, 2], [3, 4]], [[5, 6]]],
        "with_null": [[1, None], [2]],
        "struct": [{"bytes": b"j", "path": None}, {"bytes": b"k", "path": "p"}],
        "words": [["a"], []],
    }
    first, second = one_file(tmp_path, columns)[:]
    assert (first["bytes"], second["bytes"]) == (b"\0a", b"")
    assert (first["float"], first["float"].dtype, second["double"]) == (0.5, np.float32, 0.2)
    assert (bool(first["flag"]), bool(second["flag"]), second["small"].dtype) == (True, False, np.int8)
    assert (first["word"], second["large"]) == ("a", "y")
    assert (first["maybe"], second["maybe"], first["maybe_text"], second["maybe_text"]) == (
        None,
        7,
        None,
        "t",
    )
    assert (second["fixed"].dtype, second["fixed"].tolist()) == (np.float16, [3, 4])
    assert [row.tolist() for row in first["matrix"]] == [[1, 2], [3, 4]]
    assert (first["with_null"], first["struct"], first["words"]) == (
        [1, None],
        {"bytes": b"j", "path": None},
        ["a"],
    )


VIEWS: dict[str, tuple[Any, list[Any]]] = {
    "text": (pa.string_view(), ["a", None, "b" * 40, "", "ü"]),
    "bytes": (pa.binary_view(), [b"\0", b"c" * 40, None, b"", b"d"]),
    "texts": (pa.list_(pa.string_view()), [["a", None], None, [], ["b" * 40], ["c"]]),
    "many": (pa.large_list(pa.binary_view()), [[b"a"], None, [], [b"b" * 40, b""], [b"c"]]),
    "pair": (pa.list_(pa.string_view(), 2), [["a", "b"], None, ["c", None], ["d" * 40, ""], ["e", "f"]]),
    "deep": (pa.list_(pa.list_(pa.string_view())), [[["a"], []], None, [None], [["b" * 40]], []]),
    "image": (
        pa.struct([("bytes", pa.binary_view()), ("size", pa.list_(pa.int32()))]),
        [{"bytes": b"j" * 20, "size": [1, 2]}, None, {"bytes": None, "size": None}] * 2,
    ),
    "map": (pa.map_(pa.string_view(), pa.string_view()), [[("k", "v" * 20)], None, [], [("l", None)], []]),
}


@pytest.mark.parametrize("name", VIEWS)
def test_views_of_text_and_bytes_are_read_at_any_depth(tmp_path: Path, name: str) -> None:
    kind, values = VIEWS[name]
    path = tmp_path / "one.parquet"
    with pq.ParquetWriter(path, pa.schema([("x", kind)])) as writer:
        for part in (values[:3], values[3:5]):  # pyarrow cannot slice all of these
            writer.write_table(pa.table({"x": pa.array(part, kind)}))
    assert pq.read_schema(path).field("x").type == kind
    dataset = ParquetDataset(path)
    assert [sample["x"] for sample in dataset[[4, 0, 3, 1, 2]]] == [values[n] for n in (4, 0, 3, 1, 2)]
    assert [dataset[number]["x"] for number in range(5)] == values[:5]


def test_a_type_that_pyarrow_cannot_read_is_not_called_damage(tmp_path: Path) -> None:
    kind = pa.opaque(pa.string_view(), "kind", "vendor")
    column = pa.ExtensionArray.from_storage(kind, pa.array(["a", "b"], pa.string_view()))
    dataset = one_file(tmp_path, {"odd": column, "id": [1, 2]})
    with pytest.raises(
        ShardError, match=r"row group 0, samples 0 to 1: pyarrow .* has no way to read"
    ) as told:
        dataset[0]
    assert "`columns`" in str(told.value)
    assert not re.search("damaged|Restore", str(told.value))
    assert ParquetDataset(dataset.files[0], columns=["id"])[1] == {"id": 2}


def test_a_value_is_the_same_whichever_rows_are_read_with_it(tmp_path: Path) -> None:
    columns = {
        "wide": pa.array([1, 2, None, 4], pa.int64()),
        "narrow": pa.array([1, None, 3, 4], pa.int16()),
        "flag": pa.array([True, False, None, True]),
        "ragged": pa.array([[1], [2, 3], None, []], pa.list_(pa.int32())),
        "with_null": pa.array([[1.5], [None, 3.0], [2.5], []], pa.list_(pa.float32())),
        "nested": pa.array([[[1, 2]], [[3], [4, 5]], [], [[6, 7], [8, 9]]], pa.list_(pa.list_(pa.int64()))),
        "pairs": pa.array([[[1, 2]], [[3, 4], [5, 6]], [], [[7, 8]]], pa.list_(pa.list_(pa.int8(), 2))),
        "fixed": pa.array([[1, 2], None, [3, 4], [5, 6]], pa.list_(pa.uint8(), 2)),
    }
    dataset = one_file(tmp_path, columns, row_group_size=3)

    def told(value: Any) -> Any:
        if isinstance(value, np.ndarray):
            return "array", value.dtype, value.shape, value.tolist()
        return type(value), [told(one) for one in value] if isinstance(value, list) else value

    together = dataset[:]
    for number, sample in enumerate(together):
        for name, value in sample.items():
            assert told(value) == told(dataset[number][name]) == told(dataset[[3, number]][1][name]), name
    first, second = together[:2]
    assert (type(first["wide"]), type(first["narrow"]), second["narrow"]) == (int, np.int16, None)
    assert told(first["with_null"])[:2] == ("array", np.float32)
    assert second["with_null"] == [None, 3.0]
    assert [row.tolist() for row in second["nested"]] == [[3], [4, 5]]
    assert second["pairs"].shape == (2, 2)
    assert (together[2]["ragged"], together[3]["ragged"].shape) == (None, (0,))


def test_numbers_of_fixed_shapes_are_one_table_and_a_batch(web: Path) -> None:
    fixed = ParquetDataset(web, columns=["tokens", "id"])
    found = fixed.__getitems__([399, 0, 200])
    assert isinstance(found, RecordTable)
    batch = collate(found)
    assert list(batch) == ["tokens", "id"]
    assert batch["tokens"].dtype == torch.int32
    assert batch["tokens"].tolist() == [[399, 400, -399], [0, 1, 0], [200, 201, -200]]
    ragged = collate(ParquetDataset(web).__getitems__([7, 3]))
    assert isinstance(ragged["ragged"], Ragged)
    assert [ragged["id"].tolist(), ragged["text"]] == [[7, 3], ["text 7 ü", "text 3 ü"]]


def test_only_the_bytes_of_the_columns_asked_for_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    noise = np.random.default_rng(0).bytes(4 << 20)
    pq.write_table(
        pa.table({"id": [1, 2], "noise": [noise, noise[::-1]], "text": ["a", "b"]}), tmp_path / "a.parquet"
    )
    dataset = ParquetDataset(tmp_path, columns=["text", "id"])
    read, pread = [], os.pread
    monkeypatch.setattr(os, "pread", lambda *words: read.append(len(found := pread(*words))) or found)
    assert dataset[1] == {"text": "b", "id": 2}
    assert 0 < sum(read) < 1 << 20


def test_empty_files_and_row_groups_have_no_samples_and_harm_none(tmp_path: Path) -> None:
    pq.write_table(table(0, 0), tmp_path / "0.parquet")
    with pq.ParquetWriter(tmp_path / "1.parquet", table(0, 0).schema) as writer:
        for number in (3, 0, 5):
            writer.write_table(table(number, number))
    pq.write_table(table(0, 0), tmp_path / "2.parquet")
    dataset = ParquetDataset(tmp_path)
    assert [sample["id"] for sample in dataset] == [3, 4, 5, 5, 6, 7, 8, 9]
    assert dataset.index.samples.tolist() == [0, 8, 0]
    sampler = ElasticBatchSampler(dataset, global_batch_size=2, world=World())
    assert sorted(chain.from_iterable(sampler)) == list(range(8))


# ---- order


@pytest.mark.parametrize("order", ["py1e", "native"])
def test_the_batches_are_the_same_on_every_layout_and_after_a_resume(web: Path, order: str) -> None:
    dataset = ParquetDataset(web)
    options: dict[str, Any] = {"order": order, "canonical_nodes": 4, "block_size": 64}
    one = steps(dataset, 1, **options)
    assert len(set(chain.from_iterable(one))) == ROWS // 24 * 24
    assert one[0] != list(range(24))
    for ranks in (2, 3, 8):
        assert steps(dataset, ranks, **options) == one
    sampler = ElasticBatchSampler(dataset, global_batch_size=24, world=World(), **options)
    for _ in zip(sampler, range(5), strict=False):
        sampler.record_step()
    state = sampler.state_dict()
    for ranks in (1, 4):
        assert steps(dataset, ranks, state, **options) == one[5:]


@pytest.mark.parametrize("workers", [0, 2])
def test_a_dataloader_gives_the_samplers_batches_also_when_forked_off_a_reader(
    web: Path, workers: int
) -> None:
    dataset = ParquetDataset(web, columns=["id", "ragged"])
    assert dataset[17]["id"] == 17  # files are open, and a row group is decoded
    sampler = ElasticBatchSampler(dataset, global_batch_size=32, world=World())
    wanted = list(ElasticBatchSampler(dataset, global_batch_size=32, world=World()))
    loader = DataLoader(dataset, batch_sampler=sampler, num_workers=workers, collate_fn=collate)
    batches = list(loader)
    assert [batch["id"].tolist() for batch in batches] == wanted
    assert [len(row) for row in batches[0]["ragged"].rows()] == [number % 5 for number in wanted[0]]


def test_what_spawned_workers_get_has_no_caches(web: Path) -> None:
    dataset = ParquetDataset(web, columns=["id"])
    before = len(pickle.dumps(dataset))
    assert len(dataset[:]) == ROWS
    text = pickle.dumps(dataset)
    assert len(text) == before
    assert pickle.loads(text)[399] == {"id": 399}


def test_the_fast_loader_resumes_where_its_loop_was(web: Path) -> None:
    dataset = ParquetDataset(web)

    def make() -> Loader:
        return Loader(dataset, ElasticBatchSampler(dataset, global_batch_size=40, world=World()))

    whole = [batch["id"].tolist() for batch in make()]
    first = make()
    batches = iter(first)
    found = [next(batches)["id"].tolist() for _ in range(4)]
    rest = make()
    rest.load_state_dict(first.state_dict())
    assert found + [batch["id"].tolist() for batch in rest] == whole


def test_the_fingerprint_is_of_the_content_and_not_of_the_place(web: Path, tmp_path: Path) -> None:
    copy = tmp_path / "elsewhere"
    subprocess.run(["cp", "-r", web, copy], check=True)
    same = ParquetDataset(copy, columns=["text"])
    assert same.fingerprint == ParquetDataset(web).fingerprint
    state = ElasticBatchSampler(ParquetDataset(web), global_batch_size=8, world=World()).state_dict()
    sampler = ElasticBatchSampler(same, global_batch_size=8, world=World())
    sampler.load_state_dict(state)
    pq.write_table(table(300, 100), copy / "part10/3.parquet", row_group_size=25)
    other = ElasticBatchSampler(ParquetDataset(copy), global_batch_size=8, world=World())
    with pytest.raises(StateError, match="dataset"):
        other.load_state_dict(state)


def test_files_are_taken_as_listed(web: Path) -> None:
    listed = ParquetDataset([web / "part10/3.parquet", str(web / "part2")], columns=["id"])
    assert [listed[0]["id"], listed[100]["id"], len(listed)] == [300, 0, 300]
    assert listed.fingerprint != ParquetDataset([web / "part2", web / "part10/3.parquet"]).fingerprint


# ---- memory and threads


def test_decoded_row_groups_are_kept_within_the_limit_and_the_last_one_always(web: Path) -> None:
    loads: list[int] = []

    class Counting(ParquetDataset):
        def _read(self, group: int) -> Any:
            loads.append(group)
            return super()._read(group)

    all_kept = Counting(web)
    for number in (0, 40, 0, 40, 1):
        assert all_kept[number]["id"] == number
    assert loads == [0, 1]
    loads.clear()
    one_kept = Counting(web, cache_bytes=0)
    for number in (0, 1, 40, 41, 0):
        assert one_kept[number]["id"] == number
    assert loads == [0, 1, 0]


def test_threads_that_want_the_same_row_group_decode_it_once(web: Path) -> None:
    loads: list[int] = []
    barrier, found = Barrier(8), []

    class Counting(ParquetDataset):
        def _read(self, group: int) -> Any:
            loads.append(group)
            return super()._read(group)

    dataset = Counting(web)

    def read() -> None:
        barrier.wait()
        found.append(dataset[50]["id"])

    threads = [Thread(target=read) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (found, loads) == ([50] * 8, [1])


def test_an_order_that_the_cache_is_too_small_for_is_told_of_once(
    web: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "loader"):
        fits = ParquetDataset(web, columns=["id"])
        small = ParquetDataset(web, columns=["id"], cache_bytes=1)
        scattered = np.random.default_rng(0).integers(0, ROWS, 400).tolist()
        for number in range(200):
            fits[scattered[number]]
        for _ in range(20):
            list(small)  # each row group is read once a pass, as in a good order
        assert caplog.messages == []
        for number in scattered:
            small[number]
    (message,) = caplog.messages
    assert "decoded again and again" in message
    assert "cache_bytes" in message


# ---- errors


def cut_off(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 3)


def without_its_middle(path: Path) -> None:
    data = path.read_bytes()
    path.write_bytes(data[:-60] + data[-30:])


def empty(path: Path) -> None:
    path.write_bytes(b"")


def a_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def text(path: Path) -> None:
    path.write_text("a,b\n1,2\n" * 100)


def other_columns(path: Path) -> None:
    pq.write_table(pa.table({"id": [1]}), path)


def other_types(path: Path) -> None:
    changed = table(0, 3)
    pq.write_table(changed.set_column(0, "id", changed["id"].cast(pa.int32())), path)


def more_columns(path: Path) -> None:
    pq.write_table(table(0, 3).append_column("more", [[1, 2, 3]]), path)


@pytest.mark.parametrize(
    ("harm", "words"),
    [
        (Path.unlink, "missing"),
        (cut_off, "truncated"),
        (without_its_middle, "footer|truncated"),
        (empty, "truncated"),
        (a_pipe, "not a Parquet file"),
        (text, "another kind of file"),
        (other_columns, "column tokens is missing, and list"),
        (other_types, "column id is int32, and int64 in "),
        (more_columns, "column more is int64, and missing in "),
    ],
)
def test_a_file_that_does_not_belong_is_named_at_once(
    tmp_path: Path, harm: Callable[[Path], None], words: str
) -> None:
    paths = [tmp_path / f"{number}.parquet" for number in range(3)]
    for number, path in enumerate(paths):
        pq.write_table(table(number * 10, 10), path)
    harm(paths[1])
    with pytest.raises(DatasetError, match=words) as problem:
        ParquetDataset(paths)
    assert str(paths[1]) in str(problem.value)


def test_columns_that_files_share_are_enough(tmp_path: Path) -> None:
    pq.write_table(table(0, 3), tmp_path / "0.parquet")
    more = table(3, 3).append_column("more", [[1, 2, 3]])
    pq.write_table(more.select(["more", "text", "id"]), tmp_path / "1.parquet")
    dataset = ParquetDataset(tmp_path, columns=["id", "text"])
    assert [tuple(sample.values()) for sample in dataset][2:4] == [(2, "text 2 ü"), (3, "text 3 ü")]


@pytest.mark.parametrize(
    ("columns", "words"),
    [
        (["txt"], "no column txt; it has id, tokens"),
        ([], "no column"),
        ("text", r"\['text'\]"),
        (["id", "id"], "twice"),
    ],
)
def test_columns_that_cannot_be_are_named(web: Path, columns: Any, words: str) -> None:
    with pytest.raises(DatasetError, match=words):
        ParquetDataset(web, columns=columns)


def test_a_place_without_files_is_an_error(tmp_path: Path) -> None:
    for path, words in ((tmp_path, "has no .parquet file"), (tmp_path / "none", "missing"), ([], "no path")):
        with pytest.raises(DatasetError, match=words):
            ParquetDataset(path)


def damage_data(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[4:2000] = bytes(1996)
    path.write_bytes(data)


def replace(path: Path) -> None:
    os.replace(path.with_name("_other.parquet"), path)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize(
    ("harm", "words"),
    [
        (Path.unlink, "missing"),
        (cut_off, "truncated|replaced"),
        (damage_data, "damaged"),
        (replace, "was replaced"),
    ],
)
def test_a_file_that_changes_under_a_run_is_an_error_that_names_it(
    tmp_path: Path, harm: Callable[[Path], None], words: str, workers: int
) -> None:
    paths = [tmp_path / "0.parquet", tmp_path / "1.parquet"]
    for number, path in enumerate(paths):
        pq.write_table(table(number * 100, 100), path, row_group_size=50, write_page_checksum=True)
    pq.write_table(table(200, 100), tmp_path / "_other.parquet", row_group_size=50)
    dataset = ParquetDataset(tmp_path)
    harm(paths[1])
    assert dataset[99]["id"] == 99
    loader = DataLoader(dataset, batch_size=50, num_workers=workers, collate_fn=collate)
    said = ""
    try:
        for _ in loader:
            pass
    except ShardError as problem:
        said = str(problem)
        # torch's frames and the error keep each other, and the workers: these would be waited for later, and long.
        traceback.clear_frames(problem.__traceback__)
    assert f"{paths[1]}, row group 0, samples 100 to 149: " in said
    assert re.search(words, said)


def test_an_open_file_is_closed_when_nobody_uses_it(web: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        dataset = ParquetDataset(web)
        dataset[:]
        assert len(os.listdir("/proc/self/fd")) == before + FILES
        del dataset
    assert len(os.listdir("/proc/self/fd")) == before


def test_an_error_keeps_no_file_open(tmp_path: Path) -> None:
    pq.write_table(table(0, 10), tmp_path / "0.parquet")
    dataset = ParquetDataset(tmp_path)
    before = os.listdir("/proc/self/fd")
    pq.write_table(table(1, 10), tmp_path / "0.parquet")
    gc.disable()
    try:
        with pytest.raises(ShardError, match="was replaced"):
            dataset[0]
        assert os.listdir("/proc/self/fd") == before
        os.truncate(tmp_path / "0.parquet", 7)
        with pytest.raises(ShardError) as problem:
            dataset[0]
        kept = weakref.ref(dataset)
        del dataset, problem
        assert kept() is None
    finally:
        gc.enable()


def test_a_long_footer_is_read_whole(tmp_path: Path) -> None:
    pq.write_table(table(0, 3000), tmp_path / "0.parquet", row_group_size=2)
    data = (tmp_path / "0.parquet").read_bytes()
    assert int.from_bytes(data[-8:-4], "little") > 1 << 17
    assert OpenParquetFile(str(tmp_path / "0.parquet")).footer.rows.tolist() == [2] * 1500
    assert ParquetDataset(tmp_path)[2999]["id"] == 2999


def test_without_pyarrow_the_error_says_what_to_install_and_importing_takes_none() -> None:
    program = (
        "import sys, loader; assert 'pyarrow' not in sys.modules and 'yaml' not in sys.modules\n"
        "sys.modules['pyarrow'] = None\n"
        "try: loader.ParquetDataset('x')\n"
        "except loader.LoaderError as problem: print(problem)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert "pip install pyarrow" in done.stdout
    assert issubclass(DatasetError, LoaderError)
