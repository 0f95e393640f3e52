"""Reading index.json: what is needed is checked, what is left out is left alone."""

import json
from pathlib import Path
from typing import Any

import pytest

from loader import DatasetError, MDSDataset
from loader.index import MOST_SAMPLES, read_index

MINIMAL = {
    "samples": 3,
    "raw_data": {"basename": "shard.00000.mds"},
    "column_names": ["id"],
    "column_encodings": ["int"],
    "column_sizes": [8],
}


def write(directory: Path, *shards: Any, **document: Any) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "index.json").write_text(json.dumps({"version": 2, "shards": list(shards)} | document))
    return directory


def test_a_minimal_index_is_enough(tmp_path: Path) -> None:
    index = read_index(write(tmp_path, MINIMAL))
    assert index.samples.tolist() == [3]
    assert index.raw_bytes.tolist() == [0]
    assert index.schema(0).names == ("id",)


def test_as_many_samples_as_offsets_have_room_for_are_taken(tmp_path: Path) -> None:
    full = MINIMAL | {"samples": 1000, "raw_data": {"basename": "x", "bytes": 4 * 1002}}
    index = read_index(write(tmp_path, MINIMAL | {"samples": MOST_SAMPLES}, full, MINIMAL | {"samples": 0}))
    assert index.samples.tolist() == [MOST_SAMPLES, 1000, 0]


def test_an_index_that_is_a_directory_is_said_to_be_one(tmp_path: Path) -> None:
    (tmp_path / "index.json").mkdir()
    with pytest.raises(DatasetError, match=r"index\.json cannot be read: Is a directory$"):
        MDSDataset(tmp_path)


def test_a_merged_index_has_relative_paths(tmp_path: Path) -> None:
    shard = MINIMAL | {"raw_data": {"basename": "17/shard.00085.mds", "bytes": 50}, "zip_data": None}
    assert read_index(write(tmp_path, shard)).raw_names == ["17/shard.00085.mds"]


def test_schemas_may_differ_between_shards(tmp_path: Path) -> None:
    other = MINIMAL | {"column_names": ["x"], "column_encodings": ["str"], "column_sizes": [None]}
    index = read_index(write(tmp_path, MINIMAL, other, MINIMAL))
    assert [index.schema(shard).names for shard in range(3)] == [("id",), ("x",), ("id",)]
    assert len(index.schemas) == 2


def test_an_empty_dataset_has_no_samples(tmp_path: Path) -> None:
    dataset = MDSDataset(write(tmp_path))
    assert len(dataset) == 0
    assert dataset[:] == []
    assert dataset.column_names == ()


def test_a_missing_index_names_the_splits_that_are_there(tmp_path: Path) -> None:
    write(tmp_path / "train", MINIMAL)
    with pytest.raises(DatasetError, match=r"index\.json does not exist.*train"):
        MDSDataset(tmp_path)
    assert len(MDSDataset(tmp_path, split="train")) == 3


@pytest.mark.parametrize("split", ["../elsewhere", "/absolute"])
def test_a_split_outside_the_dataset_is_refused(tmp_path: Path, split: str) -> None:
    with pytest.raises(DatasetError, match="outside"):
        MDSDataset(tmp_path, split=split)


@pytest.mark.parametrize(
    "text", ["", "{", "[" * 100_000, "\xff", '{"version": 2}', "[]", '{"shards": {}}', "null"]
)
def test_a_damaged_index_is_an_error_that_names_the_file(tmp_path: Path, text: str) -> None:
    (tmp_path / "index.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(DatasetError, match=r"index\.json"):
        MDSDataset(tmp_path)


def test_a_newer_version_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DatasetError, match="version 3"):
        MDSDataset(write(tmp_path, MINIMAL, version=3))


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"raw_data": {"basename": "/etc/passwd"}}, "outside the dataset"),
        ({"raw_data": {"basename": "../x.mds"}}, "outside the dataset"),
        ({"raw_data": {"basename": "a/../../x.mds"}}, "outside the dataset"),
        ({"raw_data": {"basename": ""}}, "no basename"),
        ({"raw_data": None}, "names no file"),
        ({"raw_data": "shard.00000.mds"}, "no basename"),
        ({"raw_data": {"basename": "x", "bytes": -1}}, "bytes"),
        ({"samples": -1}, "samples"),
        ({"samples": "3"}, "samples"),
        ({"samples": None}, "samples"),
        ({"samples": True}, "samples"),
        ({"samples": 3.0}, "samples"),
        ({"samples": float("nan")}, "samples"),
        ({"samples": 10**12}, "1000000000000, but a shard holds 1073741822 at most"),
        ({"samples": 10**30}, "samples"),
        ({"samples": MOST_SAMPLES + 1}, "damaged"),
        ({"samples": 1000, "raw_data": {"basename": "x", "bytes": 4007}}, "4007 bytes, too few"),
        ({"format": "csv"}, "csv"),
        ({"version": 1}, "version 1"),
        ({"column_names": None}, "lacks column_names"),
        ({"column_names": ["id", "id"]}, "differ in number"),
        ({"column_sizes": [8, 8]}, "differ in number"),
        ({"column_names": [3]}, "not text"),
        ({"column_encodings": ["int129"]}, "int129"),
        ({"column_sizes": [4]}, "4 bytes, but int has 8"),
        ({"column_encodings": ["pkl"], "column_sizes": [None]}, "allow_pickle"),
        ({"compression": "lzma", "zip_data": {"basename": "x.lzma"}}, "lzma"),
        ({"compression": "zstd:99", "zip_data": {"basename": "x.zstd"}}, "levels of zstd"),
        ({"zip_data": {"basename": "x.zstd"}}, "names no compression"),
    ],
)
def test_a_shard_that_cannot_be_read_is_an_error_that_names_it(
    tmp_path: Path, change: dict[str, Any], told: str
) -> None:
    with pytest.raises(DatasetError, match=told) as caught:
        MDSDataset(write(tmp_path, MINIMAL, MINIMAL | change))
    assert "index.json" in str(caught.value)


def test_something_else_than_shards_in_the_list_is_an_error(tmp_path: Path) -> None:
    for shards in ([MINIMAL, 3], [MINIMAL, {"basename": "x"}], [[MINIMAL]], [MINIMAL, None]):
        with pytest.raises(DatasetError, match="shard"):
            read_index(write(tmp_path, *shards))


def test_what_else_an_index_holds_is_left_alone(tmp_path: Path) -> None:
    shard = MINIMAL | {"note": {"by": "me"}}
    assert read_index(write(tmp_path, shard, samples=3, made={"with": [{"care": 1}]})).shards == 1


def test_the_fingerprint_tells_datasets_apart(tmp_path: Path) -> None:
    changes: list[dict[str, Any]] = [
        {},
        {"samples": 4},
        {"raw_data": {"basename": "other.mds"}},
        {"raw_data": {"basename": "shard.00000.mds", "bytes": 70}},
        {"column_names": ["other"]},
    ]
    prints = {MDSDataset(write(tmp_path / str(n), MINIMAL | c)).fingerprint for n, c in enumerate(changes)}
    assert len(prints) == len(changes)
    assert MDSDataset(write(tmp_path / "same", MINIMAL)).fingerprint in prints
