"""Reading index.json: what is needed is checked, what is left out is left alone."""

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loader import DatasetError, MDSDataset
from loader.mds.index import read_index
from loader.mds.index_parser import MOST_SAMPLES, IndexRows, PackedNames

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
    assert list(read_index(write(tmp_path, shard)).raw_names) == ["17/shard.00085.mds"]


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


# Read piece by piece


def shard(number: int, **change: Any) -> dict[str, Any]:
    return {
        "column_encodings": ["int", "str"],
        "column_names": ["id", "text }, { text"],
        "column_sizes": [8, None],
        "compression": None,
        "format": "mds",
        "hashes": ["sha1"],
        "raw_data": {
            "basename": f"{number % 7}/shard.{number:05}.mds",
            "bytes": 9000 + number,
            "hashes": {"sha1": "ab"},
        },
        "samples": number % 5,
        "size_limit": 67108864,
        "version": 2,
        "zip_data": None,
    } | change


@pytest.mark.parametrize("piece", [1, 100, 701, 5000])
@pytest.mark.parametrize(
    "layout",
    [
        {"sort_keys": True},
        {"indent": 2},
        {"separators": (",", ":")},
        {"separators": ("\n,\t", " : ")},
    ],
    ids=str,
)
@pytest.mark.parametrize("version_first", [True, False])
def test_any_layout_and_piece_reads_the_same(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    piece: int,
    layout: dict[str, Any],
    *,
    version_first: bool,
) -> None:
    monkeypatch.setattr("loader.mds.index.CHUNK_BYTES", piece)
    shards: list[Any] = [shard(number) for number in range(50)]
    shards[20] |= {
        "compression": "zstd:3",
        "zip_data": {"basename": "x.mds.zstd", "bytes": 5, "hashes": {"sha1": "cd"}},
    }
    shards[30] = MINIMAL | {"note": [{"seam": "}, {"}, {"another": 1}]}
    head: dict[str, Any] = {"version": 2} if version_first else {"made": "by hand"}
    (tmp_path / "index.json").write_text(json.dumps(head | {"shards": shards}, **layout))
    index = read_index(tmp_path, with_hashes=True)
    assert index.samples.tolist() == [one["samples"] for one in shards]
    assert index.raw_bytes.tolist() == [one["raw_data"].get("bytes", 0) for one in shards]
    assert list(index.raw_names) == [one["raw_data"]["basename"] for one in shards]
    assert [number for number, name in enumerate(index.zip_names) if name] == [20]
    assert [index.compression(number) for number in (19, 20, 21)] == ["", "zstd", ""]
    assert [index.schema(number).names for number in (29, 30)] == [("id", "text }, { text"), ("id",)]
    assert index.hashes_of(20) == ({"sha1": "ab"}, {"sha1": "cd"})
    assert index.hashes_of(30) == ({}, {})


@pytest.mark.parametrize("piece", [64, 1 << 20])
@pytest.mark.parametrize("cut", [0, 1, 300, 2000, -1, -2, -40])
def test_an_index_that_is_cut_off_is_damaged_whatever_was_read_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cut: int, piece: int
) -> None:
    monkeypatch.setattr("loader.mds.index.CHUNK_BYTES", piece)
    text = json.dumps({"version": 2, "shards": [shard(number) for number in range(20)]})
    (tmp_path / "index.json").write_text(text[:cut])
    with pytest.raises(DatasetError, match="is damaged"):
        read_index(tmp_path)


@pytest.mark.parametrize("piece", [64, 1 << 20])
def test_a_shard_is_numbered_from_the_first_whatever_piece_it_is_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, piece: int
) -> None:
    monkeypatch.setattr("loader.mds.index.CHUNK_BYTES", piece)
    shards = [shard(number) for number in range(20)] + [shard(20, samples=-1), shard(21)]
    with pytest.raises(DatasetError, match="samples of shard 20 is -1"):
        read_index(write(tmp_path, *shards))


ODD: dict[str, Any] = {
    "samples": [0, 7, -1, 3.0, "3", None, True, 10**12, 10**30],
    "raw_data": [
        None,
        {},
        "x",
        *({"basename": name} for name in ("/x", "../x", "a/..b/c", "a\nb", "", "a\\b", 3)),
    ],
    "zip_data": [{"basename": "x.zstd", "bytes": 4}, {"basename": "x", "bytes": -4}, {"bytes": 3}],
    "compression": ["", "zstd", "zstd:99", "lzma", 7],
    "format": [None, "csv"],
    "version": [1, "2", None],
    "column_names": [[], ["a"], ["a", "a"], ["a", 3], None],
    "column_sizes": [[0, 0], [None, 4], [8], [-1, 2], ["8", 8], [True, None]],
}


@settings(max_examples=150, deadline=None)
@given(
    st.lists(
        st.fixed_dictionaries({}, optional={name: st.sampled_from(values) for name, values in ODD.items()}),
        max_size=4,
    )
)
def test_the_quick_way_and_the_careful_one_take_and_refuse_the_same(changes: list[dict[str, Any]]) -> None:
    shards = [shard(number, **change) for number, change in enumerate(changes)]
    quick, careful = IndexRows("index.json", with_hashes=True), IndexRows("index.json", with_hashes=True)
    told = []
    for take in (lambda: quick.add_text(json.dumps(shards).encode()), lambda: careful.add(shards)):
        try:
            take()
            told.append("")
        except DatasetError as problem:
            told.append(str(problem))
    assert told[0] == told[1]
    if not told[0]:
        one, other = quick.columns(), careful.columns()
        for name in ("samples", "raw_bytes", "zip_bytes", "schema_of", "compression_of"):
            assert getattr(one, name).tolist() == getattr(other, name).tolist()
        for name in ("raw_names", "zip_names", "hashes"):
            assert list(getattr(one, name)) == list(getattr(other, name))
        assert list(quick.schemas) == list(careful.schemas)


def test_the_writers_form_goes_the_quick_way(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = IndexRows("index.json")
    monkeypatch.setattr(IndexRows, "add", lambda *_: pytest.fail("one by one"))
    for packed in (False, True):
        change = {"compression": "zstd", "zip_data": {"basename": "x.mds.zstd", "bytes": 5}} if packed else {}
        rows.add_text(msgspec.json.encode([shard(number, **change) for number in range(10)]))
    assert rows.count == 20


def test_names_are_kept_in_one_buffer() -> None:
    names = ["a", "", "zwölf/🜚", "x" * 300]
    packed = PackedNames(names)
    assert list(packed) == names
    assert packed[-1] == names[-1]
    assert packed[-4] == packed[0] == names[0]
    assert list(PackedNames.joined([packed, PackedNames([]), packed])) == names * 2
    with pytest.raises(IndexError):
        packed[4]
    many = [f"{number}" for number in range(200_000)]
    for some in (names, many, ["one"], []):
        assert PackedNames(some).zero_separated() == "\0".join(some).encode()
