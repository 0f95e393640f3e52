"""`convert csv`: a field is stored as it is, or as the number that it is, or it is refused by its line."""

import gzip
from pathlib import Path

import pytest

from loader import MDSDataset, convert
from loader.__main__ import main

ROWS = 'id,code,weight,text\n1,007,0.5,"a ""b"", c"\n-2,x,1e3,"two\r\nlines"\n3,,12,\n'


def written(path: Path, text: str = ROWS) -> Path:
    path.write_text(text, newline="")
    return path


def test_numbers_are_told_from_codes_by_the_first_rows(tmp_path: Path) -> None:
    assert main(["convert", "csv", str(written(tmp_path / "in.csv")), str(tmp_path / "out")]) == 0
    dataset = MDSDataset(tmp_path / "out")
    assert dataset.encodings == {"code": "str", "id": "int", "text": "str", "weight": "float64"}
    assert list(dataset) == [
        {"id": 1, "code": "007", "weight": 0.5, "text": 'a "b", c'},
        {"id": -2, "code": "x", "weight": 1000.0, "text": "two\r\nlines"},
        {"id": 3, "code": "", "weight": 12.0, "text": ""},
    ]


@pytest.mark.parametrize("value", ["9" * 19, "0.1234567890123456789e999", "nan", "+1", "1_0", " 1"])
def test_what_a_number_would_not_keep_is_text(tmp_path: Path, value: str) -> None:
    convert("csv", [written(tmp_path / "in.csv", f"a\n{value}\n")], tmp_path / "out")
    assert [row["a"] for row in MDSDataset(tmp_path / "out")] == [value]


def test_a_file_of_tabs_packed_and_with_the_mark_of_excel(tmp_path: Path) -> None:
    path = tmp_path / "in.tsv.gz"
    path.write_bytes(gzip.compress("\ufeffa,b\tc\n1,2\t3\n".encode()))
    convert("csv", [path], tmp_path / "out")
    assert list(MDSDataset(tmp_path / "out")) == [{"a,b": "1,2", "c": 3}]


def test_quoted_names_behind_the_mark_and_an_empty_last_line(tmp_path: Path) -> None:
    path = written(tmp_path / "in.csv", '\ufeff"id, x","text"\n1,a\n\n')
    convert("csv", [path], tmp_path / "out")
    assert list(MDSDataset(tmp_path / "out")) == [{"id, x": 1, "text": "a"}]


def test_chosen_columns_are_parsed_as_their_encodings_ask(tmp_path: Path) -> None:
    path = written(tmp_path / "in.csv", 'a,b,c,d\n007,"[1, 2]",x,"{""k"": null}"\n')
    convert("csv", [path], tmp_path / "out", columns={"a": "int", "b": "ndarray:int16", "d": "json"})
    row = MDSDataset(tmp_path / "out")[0]
    assert (row["a"], row["b"].tolist(), row["b"].dtype.name, row["d"]) == (7, [1, 2], "int16", {"k": None})


@pytest.mark.parametrize(
    ("text", "columns", "words"),
    [
        ("a,b\n1,2\n3\n", "", "line 3 has 1 fields, and the first line 2: mend it"),
        ("a,a\n1,2\n", "", "line 1: it is the names of the columns: give each column one of its own"),
        ("a,\n1,2\n", "", "line 1: it is the names of the columns"),
        ('a\n"x" y\n', "", "line 2: ',' expected after '\"'; mend it"),
        ('a\n"x\n', "", "line 2: unexpected end of data; mend it"),
        ("a\n", "", "has no row to determine the columns from"),
        ("a,b\n1,2\n", "c:int", "has no column c: name columns of a, b"),
        (
            "a\n1\nx\n",
            "a:int",
            "line 3: a: b'x' is not a whole number; mend it, or keep it with --columns a:str",
        ),
        ("a\n300\n", "a:uint8", "300"),
        ("a\n1\n", "a:pil", "a field of CSV"),
        (
            "a\n" + "1\n" * 1000 + "007\n",
            "",
            "line 1002: a: '007' is no plain number, as the first rows have",
        ),
    ],
)
def test_a_row_that_does_not_fit_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, columns: str, words: str
) -> None:
    flags = ["--columns", columns] if columns else []
    path = written(tmp_path / "in.csv", text)
    assert main(["convert", "csv", *flags, str(path), str(tmp_path / "out")]) == 1
    assert words in capsys.readouterr().err
    assert not (tmp_path / "out/index.json").exists()


def test_a_later_file_with_other_columns_is_refused(tmp_path: Path) -> None:
    paths = [written(tmp_path / "1.csv", "a\n1\n"), written(tmp_path / "2.csv", "a,b\n1,2\n")]
    with pytest.raises(Exception, match=r"2\.csv, line 2: it has other columns than the first file"):
        convert("csv", paths, tmp_path / "out")
