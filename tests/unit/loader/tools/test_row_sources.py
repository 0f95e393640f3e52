"""Rows of JSON lines and Parquet: a value is stored as it is, or refused; no column is lost unnoticed."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from loader import LoaderError, MDSDataset, convert

NO_FIT = [
    ("ndarray:int32", [1.7, 2.9], "1.7"),
    ("ndarray:int32", [1e10, 3.0], "10000000000.0"),
    ("ndarray:int32", [3, 1 << 40], str(1 << 40)),
    ("ndarray:uint8", [1, -1], "-1"),
    ("ndarray:int64", [0.5, float((1 << 53) + 2)], "0.5"),
    ("ndarray:int32", ["7", "8"], "'7'"),
    ("ndarray:int32", [7, "8"], "'8'"),
    ("ndarray", ["7", "8"], "'7'"),
    ("ndarray", [7, "8"], "'8'"),
    ("ndarray:float32", [1.7, None], "None"),
    ("ndarray:float32", [[1.7, 1.0], None], "None"),
    ("ndarray", [1.7, None], "None"),
    ("ndarray:float16", [70000], "70000"),
    ("ndarray:float16", [1.5, 70000.5], "70000.5"),
    ("ndarray:float32", [1e300], "1e+300"),
    ("ndarray:float32", [(1 << 24) + 1], str((1 << 24) + 1)),
    ("ndarray:float64", [(1 << 53) + 1, 2], str((1 << 53) + 1)),
    ("ndarray", [(1 << 63) + 1, -1], str((1 << 63) + 1)),
    ("float32", 1e300, "1e+300"),
    ("float16", 70000.0, "70000.0"),
    ("float64", "7", "'7'"),
    ("float64", (1 << 53) + 1, str((1 << 53) + 1)),
]


def json_file(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def leaves(value: list[Any]) -> list[Any]:
    """The numbers of a list, or of a list of lists."""
    return [number for item in value for number in (item if isinstance(item, list) else [item])]


@pytest.mark.parametrize(("encoding", "value", "named"), NO_FIT, ids=lambda value: str(value)[:30])
def test_a_value_that_a_column_would_change_is_refused_with_its_line_and_what_helps(
    tmp_path: Path, encoding: str, value: Any, named: str
) -> None:
    file = json_file(tmp_path / "in.jsonl", [{"x": 1 if encoding[0] == "f" else [1]}, {"x": value}])
    with pytest.raises(LoaderError) as refusal:
        convert("jsonl", [file], tmp_path / "out", columns={"x": encoding})
    assert f"{file}, line 2: x: {named} does not fit {encoding}" in str(refusal.value)
    assert "--columns x:json" in str(refusal.value)
    assert not list(tmp_path.glob("out/*.mds"))


@pytest.mark.parametrize(
    ("kind", "values", "encoding"),
    [
        (pa.list_(pa.float64()), [[1.0], [1.7]], "ndarray:int32"),
        (pa.list_(pa.float64()), [[1.0], [1.7, None]], "ndarray:float32"),
        (pa.list_(pa.string()), [["7"], ["8"]], "ndarray:int32"),
        (pa.list_(pa.float32()), [[1.0], [70000.0]], "ndarray:float16"),
        (pa.list_(pa.int64()), [[1], [None]], "ndarray:int64"),
    ],
    ids=str,
)
def test_a_list_of_parquet_that_a_column_would_change_is_refused_with_its_row(
    tmp_path: Path, kind: Any, values: list[Any], encoding: str
) -> None:
    pq.write_table(pa.table({"x": pa.array(values, kind)}), tmp_path / "in.parquet")
    with pytest.raises(LoaderError, match=rf"in\.parquet, row [12]: x: \S+ does not fit {encoding}"):
        convert("parquet", [tmp_path / "in.parquet"], tmp_path / "out", columns={"x": encoding})
    assert not list(tmp_path.glob("out/*.mds"))


@pytest.mark.parametrize(
    ("encoding", "value"),
    [
        ("ndarray:int32", [1.0, 2.0, -(2.0**31)]),
        ("ndarray:int64", [float(1 << 62), 1]),
        ("ndarray:uint64", [(1 << 64) - 1, 0]),
        ("ndarray:uint8", [True, 255]),
        ("ndarray:float16", [65504, 0.5]),
        ("ndarray:float32", [float("nan"), float("inf"), 1.0]),
        ("ndarray:float64", [1 << 60, 0.5]),
        ("ndarray:float32:2,2", [[1, 2], [3, 4]]),
        ("ndarray", [[1], [2]]),
    ],
    ids=str,
)
def test_a_list_whose_numbers_a_column_holds_is_stored_as_it_is(
    tmp_path: Path, encoding: str, value: list[Any]
) -> None:
    file = json_file(tmp_path / "in.jsonl", [{"x": value}])
    assert convert("jsonl", [file], tmp_path / "out", columns={"x": encoding}) == 1
    stored = MDSDataset(tmp_path / "out")[0]["x"]
    np.testing.assert_array_equal(stored.ravel(), np.array(leaves(value), stored.dtype))


def test_a_list_of_decimals_of_parquet_fits_floats(tmp_path: Path) -> None:
    table = pa.table(
        {"x": pa.array([[1.5, 2.25]], pa.list_(pa.float64())).cast(pa.list_(pa.decimal128(9, 2)))}
    )
    pq.write_table(table, tmp_path / "in.parquet")
    assert (
        convert("parquet", [tmp_path / "in.parquet"], tmp_path / "out", columns={"x": "ndarray:float32"}) == 1
    )
    assert MDSDataset(tmp_path / "out")[0]["x"].tolist() == [1.5, 2.25]


@pytest.mark.parametrize(
    ("encoding", "value"),
    [("ndarray:int32", [[1, 2], [3]]), ("ndarray", [[1, 2], [3]]), ("ndarray:int8", {"a": 1})],
)
def test_what_is_no_array_of_numbers_is_refused(tmp_path: Path, encoding: str, value: Any) -> None:
    file = json_file(tmp_path / "in.jsonl", [{"x": value}])
    with pytest.raises(LoaderError, match=r"line 1: x: .* does not fit ndarray.*--columns x:json"):
        convert("jsonl", [file], tmp_path / "out", columns={"x": encoding})


def test_a_name_that_only_some_of_the_first_rows_have_is_no_column_and_not_left_out_either(
    tmp_path: Path,
) -> None:
    file = json_file(tmp_path / "in.jsonl", [{"a": 1}, {"a": 2, "b": 3}])
    with pytest.raises(LoaderError, match=r"b is missing in some rows: name the columns .* with --columns"):
        convert("jsonl", [file], tmp_path / "out")
    assert convert("jsonl", [file], tmp_path / "out", columns={"a": "int"}) == 2
    assert list(MDSDataset(tmp_path / "out")) == [{"a": 1}, {"a": 2}]


def test_a_later_row_with_a_name_that_is_no_detected_column_is_refused(tmp_path: Path) -> None:
    files = [
        json_file(tmp_path / "0.jsonl", [{"a": 1}]),
        json_file(tmp_path / "1.jsonl", [{"a": 2}, {"a": 3, "b": 4}]),
    ]
    with pytest.raises(LoaderError, match=rf"{files[1]}, line 2: b is no column .*--columns"):
        convert("jsonl", files, tmp_path / "out")
    assert convert("jsonl", files, tmp_path / "named", columns={"a": "int"}) == 3


def test_a_later_parquet_file_with_another_column_is_refused(tmp_path: Path) -> None:
    files = [tmp_path / "0.parquet", tmp_path / "1.parquet"]
    pq.write_table(pa.table({"a": [1]}), files[0])
    pq.write_table(pa.table({"a": [2], "b": [3]}), files[1])
    with pytest.raises(LoaderError, match=rf"{files[1]}: b is no column .*--columns"):
        convert("parquet", files, tmp_path / "out")
    assert convert("parquet", files, tmp_path / "named", columns={"a": "int64"}) == 2


@pytest.mark.parametrize("processes", [1, 2])
def test_lines_and_rows_are_counted_from_one_whatever_is_wrong_with_them(
    tmp_path: Path, processes: int
) -> None:
    """The second row does not fit by its type, the third one is null."""
    kinds = {"jsonl": "line", "parquet": "row"}
    values = {"range": [1, 1 << 40, 3], "null": [1, 2, None]}
    for fault, numbers in values.items():
        json_file(tmp_path / f"{fault}.jsonl", [{"x": number} for number in numbers])
        pq.write_table(pa.table({"x": numbers}), tmp_path / f"{fault}.parquet")
        for kind, word in kinds.items():
            file = tmp_path / f"{fault}.{kind}"
            place = 2 if fault == "range" else 3
            with pytest.raises(LoaderError, match=rf"{file}, {word} {place}: "):
                convert(
                    kind,
                    [file] * processes,
                    tmp_path / f"{fault}-{kind}",
                    columns={"x": "int32"},
                    processes=processes,
                )
