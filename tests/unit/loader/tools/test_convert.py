"""`fusecache dataset convert` and `merge`: what goes in comes out, and what does not fit is named."""

import gzip
import io
import json
import os
import re
import sys
import tarfile
from decimal import Decimal
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import tokenizers
import zstandard
from PIL import Image
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

from loader import MDSDataset, MDSWriter, convert
from loader.__main__ import main
from tests.support import ROOT

WORDS = ["<end>", "<unk>", *(f"w{number}" for number in range(50))]


def run(*arguments: object) -> int:
    return main([str(argument) for argument in arguments])


def refused(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    assert run(*arguments) == 1
    said: str = capsys.readouterr().err
    assert "Traceback" not in said
    return said


@pytest.fixture
def tokenizer(tmp_path: Path) -> Path:
    made = tokenizers.Tokenizer(
        WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="<unk>")
    )
    made.pre_tokenizer = Whitespace()
    made.add_special_tokens(["<end>", "<unk>"])
    made.save(str(tmp_path / "tokenizer.json"))
    return tmp_path / "tokenizer.json"


def documents() -> list[str]:
    return [" ".join(f"w{(number * 7 + word) % 50}" for word in range(number % 13)) for number in range(60)]


def stream(texts: list[str], end: int | None = 0) -> list[int]:
    """All tokens of the documents, one after the other."""
    return [
        token
        for text in texts
        for token in [*(WORDS.index(word) for word in text.split()), *([] if end is None else [end])]
    ]


@pytest.mark.parametrize("end", ["<end>", ""])
@pytest.mark.parametrize("ending", [".jsonl", ".jsonl.gz", ".jsonl.zst"])
def test_documents_are_laid_end_to_end_and_cut(
    tmp_path: Path, tokenizer: Path, ending: str, end: str, caplog: pytest.LogCaptureFixture
) -> None:
    text = "".join(json.dumps({"words": text}) + "\n" for text in documents()).encode()
    packed = {".jsonl": text, ".jsonl.gz": gzip.compress(text), ".jsonl.zst": zstandard.compress(text)}[
        ending
    ]
    (tmp_path / f"in{ending}").write_bytes(packed)
    how = ("--tokenizer", tokenizer, "--length", 19, "--end", end, "--field", "words", "--hashes", "sha1")
    assert run("convert", "text", *how, tmp_path / f"in{ending}", tmp_path / "out") == 0
    dataset = MDSDataset(tmp_path / "out")
    assert dataset.encodings == {"tokens": "ndarray:int32:19"}
    expected = stream(documents(), 0 if end else None)
    whole = len(expected) // 19 * 19
    assert np.concatenate([sample["tokens"] for sample in dataset]).tolist() == expected[:whole]
    assert f"tokens={len(expected) - whole} path={tmp_path}/in{ending}" in caplog.text


@pytest.mark.parametrize("processes", ["1", "2"])
def test_text_that_fills_no_sample_is_an_error_not_an_empty_dataset(
    tmp_path: Path, tokenizer: Path, capsys: pytest.CaptureFixture[str], processes: str
) -> None:
    (tmp_path / "in.txt").write_text("w1 w2 w3")
    how = ["--tokenizer", str(tokenizer), "--end", "", "--length", "100000", "--processes", processes]
    assert main(["convert", "text", *how, str(tmp_path / "in.txt"), str(tmp_path / "out")]) == 1
    told = capsys.readouterr().err
    assert "no file has the 100000 tokens of a sample: lower --length" in told
    assert not (tmp_path / "out/index.json").exists()


def test_each_document_or_line_is_a_sample_of_its_own_length(tmp_path: Path, tokenizer: Path) -> None:
    (tmp_path / "in.txt").write_text("".join(f"{text}\n" for text in documents()))
    how = ("--tokenizer", tokenizer, "--end", "", "--length", 0, "--dtype", "uint16")
    assert run("convert", "text", *how, "--lines", tmp_path / "in.txt", tmp_path / "lines") == 0
    lines = [sample["tokens"] for sample in MDSDataset(tmp_path / "lines")]
    assert [tokens.tolist() for tokens in lines] == [
        found for text in documents() if (found := stream([text], None))
    ]
    assert lines[0].dtype == np.uint16
    assert run("convert", "text", *how, tmp_path / "in.txt", tmp_path / "whole") == 0
    assert [sample["tokens"].tolist() for sample in MDSDataset(tmp_path / "whole")] == [
        stream(documents(), None)
    ]


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--end", "<none>"], "has no token '<none>'"),
        ([], "name it with --end"),
        (["--end", "", "--length", "-1"], "--length -1"),
        (["--end", "", "--tokenizer", "in.txt"], "is not a tokenizer"),
        (
            ["--end", "", "--tokenizer", "tok/tokenizer.json"],
            "there is no tokenizer tok/tokenizer.json: no such",
        ),
        (["--end", "", "--tokenizer", "./tok"], "there is no tokenizer ./tok: no such file or folder"),
        (["--end", "", "--tokenizer", "a/b/c"], "there is no tokenizer a/b/c: no such file or folder"),
    ],
)
def test_a_tokenizer_that_does_not_fit_is_named_before_anything_is_written(
    tmp_path: Path,
    tokenizer: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    told: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("in.txt").write_text("w1")
    how = ["--tokenizer", tokenizer, "--length", 4, *arguments]
    assert told in refused(capsys, "convert", "text", *how, "in.txt", "out")
    assert not Path("out").exists()


def rows() -> list[dict[str, Any]]:
    return [
        {"id": number, "score": number / 2 if number else 0, "text": "ü", "tags": [number]}
        for number in range(30)
    ]


def write_jsonl(path: Path, some: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in some))
    return path


@pytest.mark.parametrize("place", [1, 2, 3])
def test_paths_may_stand_before_and_behind_an_option(tmp_path: Path, place: int) -> None:
    paths = [write_jsonl(tmp_path / "0.jsonl", rows()[:20]), write_jsonl(tmp_path / "1.jsonl", rows()[20:])]
    paths.append(tmp_path / "out")
    assert run("convert", "jsonl", *paths[:place], "--compression", "zstd", *paths[place:]) == 0
    assert list(MDSDataset(tmp_path / "out")) == rows()


def test_json_lines_become_samples_of_columns_told_by_the_first_rows(tmp_path: Path) -> None:
    files = [write_jsonl(tmp_path / "0.jsonl", rows()[:20]), write_jsonl(tmp_path / "1.jsonl", rows()[20:])]
    assert (
        run("convert", "jsonl", *files, tmp_path / "out", "--compression", "zstd", "--size-limit", "1kb") == 0
    )
    dataset = MDSDataset(tmp_path / "out")
    assert dataset.encodings == {"id": "int", "score": "float64", "tags": "json", "text": "str"}
    assert list(dataset) == rows()


def test_several_processes_convert_into_folders_of_one_dataset(tmp_path: Path) -> None:
    files = [write_jsonl(tmp_path / f"{number}.jsonl", rows()[number::3]) for number in range(3)]
    columns = ("--columns", "tags:ndarray:int16:1,id:int32")
    assert run("convert", "jsonl", *files, tmp_path / "out", *columns, "--processes", 2) == 0
    dataset = MDSDataset(tmp_path / "out")
    assert dataset.encodings == {"id": "int32", "tags": "ndarray:int16:1"}
    assert [int(sample["id"]) for sample in dataset] == [
        row["id"] for part in range(3) for row in rows()[part::3]
    ]
    assert all(sample["tags"].tolist() == [sample["id"]] for sample in dataset)


def test_a_conversion_that_was_cut_short_is_resumed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write_jsonl(tmp_path / "in.jsonl", [*rows(), {"id": "no number"}])
    how = ("convert", "jsonl", file, tmp_path / "out", "--columns", "id:int", "--size-limit", 300)
    told = f"{file}, line 31: column 'id': a str is not a valid int"
    assert told in refused(capsys, *how)
    kept = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "out").glob("shard.*")}
    assert kept
    assert not (tmp_path / "out" / "index.json").exists()
    assert told in refused(capsys, *how, "--resume")
    write_jsonl(file, rows())
    assert run(*how, "--resume") == 0
    assert [sample["id"] for sample in MDSDataset(tmp_path / "out")] == list(range(30))
    assert {name: (tmp_path / "out" / name).stat().st_mtime_ns for name in kept} == kept


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (b'{"id": 1}\n{"id": 2', "line 2 is not JSON"),
        (b'{"id": 1}\n\n', "line 2 is empty"),
        (b'{"id": 1}\n[2]\n', "line 2 is not a JSON object"),
        (b'{"id": 1}\n{"other": 2}\n', "id is missing in some rows: name the columns that all rows have"),
        (b'{"id": 1}\n{"id": null}\n', "id is null in some rows: use --columns id:json"),
        (b"", "no row to determine the columns from"),
        (b'{"id": 1}\n{"id": "\xff\xfe"}\n', "line 2: the byte 0xff is not UTF-8: write the file again"),
        (b'{"id": 1}\n{"id": ' + b"[" * 200_000, "line 2 is nested too deeply: "),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_lines_that_are_no_rows_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: bytes, told: str
) -> None:
    (tmp_path / "in.jsonl").write_bytes(text)
    said = refused(capsys, "convert", "jsonl", tmp_path / "in.jsonl", tmp_path / "out")
    assert f"{tmp_path}/in.jsonl" in said
    assert told in said
    assert not (tmp_path / "out").exists()


PACKED = {
    ".gz": gzip.compress,
    ".zst": zstandard.compress,
}


@pytest.mark.parametrize("ending", PACKED)
def test_a_packed_file_that_is_harmed_is_named_and_never_taken_for_a_shorter_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], ending: str
) -> None:
    lines = [json.dumps({"id": number, "text": os.urandom(20).hex()}) + "\n" for number in range(5000)]
    path = tmp_path / f"in.jsonl{ending}"
    halves = [PACKED[ending]("".join(part).encode()) for part in (lines[:2500], lines[2500:])]
    path.write_bytes(b"".join(halves))  # in two frames, as some tools write
    assert run("convert", "jsonl", path, tmp_path / "whole") == 0
    assert len(MDSDataset(tmp_path / "whole")) == 5000
    for harmed in (
        halves[0][: len(halves[0]) // 2],
        halves[0] + halves[1][:-1],
        b"hello",
        halves[0] + b"hello",
    ):
        path.write_bytes(harmed)
        said = refused(capsys, "convert", "jsonl", path, tmp_path / "out", "--columns", "id:int", "--resume")
        assert re.search(
            rf"{path}, line \d+: \S.*; it is damaged, cut short, or not what its name says", said
        ), said
        assert not (tmp_path / "out" / "index.json").exists()


@pytest.mark.parametrize("lines", [[], ["--lines"]])
def test_a_text_that_is_not_utf8_is_named_with_its_line(
    tmp_path: Path, tokenizer: Path, capsys: pytest.CaptureFixture[str], lines: list[str]
) -> None:
    (tmp_path / "in.txt").write_bytes("w1\r\nü\n".encode() + b"w\xe9\n")
    how = ("--tokenizer", tokenizer, "--end", "", "--length", 0, *lines)
    said = refused(capsys, "convert", "text", *how, tmp_path / "in.txt", tmp_path / "out")
    assert f"{tmp_path}/in.txt, line 3: the byte 0xe9 is not UTF-8" in said


def test_nulls_go_into_a_column_of_json_and_into_no_other(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = {"jsonl": tmp_path / "in.jsonl", "parquet": tmp_path / "in.parquet"}
    write_jsonl(files["jsonl"], [{"a": 1, "b": 1}, {"a": None}])
    pq.write_table(pa.table({"a": [1, None], "b": [1, 2]}), files["parquet"])
    for kind, file in files.items():
        how = ("convert", kind, file, tmp_path / kind)
        assert "a is null" in (said := refused(capsys, *how))
        assert "--columns" in said
        assert "a:json" in said
        assert run(*how, "--columns", "a:json", "--resume") == 0
        assert list(MDSDataset(tmp_path / kind)) == [{"a": 1}, {"a": None}]
    how = ("convert", "jsonl", files["jsonl"], tmp_path / "out")
    assert "line 2: b is missing" in refused(capsys, *how, "--columns", "a:json,b:json")


def picture() -> bytes:
    out = BytesIO()
    Image.new("RGB", (3, 2), (1, 2, 3)).save(out, format="PNG")
    return out.getvalue()


def test_parquet_rows_become_samples_of_columns_told_by_the_schema(tmp_path: Path) -> None:
    table = pa.table(
        {
            "text": ["a", "bc"],
            "blob": [b"1", b""],
            "small": pa.array([1, 2], pa.uint8()),
            "half": pa.array(np.array([0.5, 1], np.float16)),
            "flag": [True, False],
            "money": pa.array([Decimal("1.10"), Decimal("2.20")]),
            "tokens": pa.array([[1, 2], [3, 4]], pa.list_(pa.int32(), 2)),
            "free": pa.array([[1.5], [2.5, 3.5]], pa.list_(pa.float32())),
        }
    )
    pq.write_table(table, tmp_path / "in.parquet")
    assert run("convert", "parquet", tmp_path / "in.parquet", tmp_path / "out") == 0
    dataset = MDSDataset(tmp_path / "out")
    assert dataset.encodings == {
        "text": "str",
        "blob": "bytes",
        "small": "uint8",
        "half": "float16",
        "flag": "uint8",
        "money": "str_decimal",
        "tokens": "ndarray:int32:2",
        "free": "ndarray:float32",
    }
    second = dataset[1]
    assert (second["text"], second["blob"], second["small"], second["flag"]) == ("bc", b"", 2, 0)
    assert second["money"] == Decimal("2.20")
    assert second["tokens"].tolist() == [3, 4]
    assert second["free"].tolist() == [2.5, 3.5]


def test_parquet_images_and_chosen_columns(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table = pa.table({"image": [{"bytes": picture(), "path": "x.png"}], "meta": [{"a": 1}], "when": [None]})
    pq.write_table(table, tmp_path / "in.parquet")
    how = ("convert", "parquet", tmp_path / "in.parquet", tmp_path / "out")
    assert "column image is struct" in refused(capsys, *how)
    assert "when is null" in refused(capsys, *how, "--columns", "when:str")
    assert "in.parquet has no column nowhere: name columns of image, meta, when" in refused(
        capsys, *how, "--columns", "nowhere:str", "--resume"
    )
    assert "write name:encoding" in refused(capsys, *how, "--columns", "meta")
    assert run(*how, "--columns", "image:png,meta:json", "--resume") == 0
    sample = MDSDataset(tmp_path / "out")[0]
    assert sample["image"].getpixel((0, 0)) == (1, 2, 3)
    assert sample["meta"] == {"a": 1}


def test_what_is_no_parquet_file_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "in.parquet").write_text("no")
    assert "is not a Parquet file" in refused(
        capsys, "convert", "parquet", tmp_path / "in.parquet", tmp_path / "out"
    )
    assert "is not a file" in refused(
        capsys, "convert", "parquet", tmp_path / "none.parquet", tmp_path / "out"
    )


def test_a_damaged_page_of_parquet_is_named_with_its_row(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "in.parquet"
    table = pa.table({"a": np.random.default_rng(0).integers(0, 1 << 60, 20_000)})
    pq.write_table(table, path, row_group_size=10_000, compression="zstd", use_dictionary=False)
    chunk = pq.ParquetFile(path).metadata.row_group(1).column(0)
    data = bytearray(path.read_bytes())
    start, size = chunk.data_page_offset, chunk.total_compressed_size
    data[start : start + size] = bytes(size)
    path.write_bytes(data)
    said = refused(capsys, "convert", "parquet", path, tmp_path / "out")
    found = re.search(rf"{path}, row (\d+): \S.*; the file is damaged", said)
    assert found, said
    assert 9_000 < int(found[1]) <= 10_001


@pytest.mark.parametrize("before", [None, "gz"])
@pytest.mark.parametrize("after", [None, "zstd:5"])
def test_recompressing_keeps_samples_and_shards(
    tmp_path: Path, before: str | None, after: str | None
) -> None:
    columns = {"id": "int", "text": "str"}
    with MDSWriter(tmp_path / "in", columns, size_limit=500, compression=before) as writer:
        for number in range(100):
            writer.write({"id": number, "text": "x" * (number % 20)})
    how = ("--compression", after, "--hashes", "xxh64,sha1") if after else ("--align", "64")
    assert run("convert", "recompress", tmp_path / "in", tmp_path / "out", *how) == 0
    old, new = MDSDataset(tmp_path / "in"), MDSDataset(tmp_path / "out", check_hashes=after is not None)
    assert new.shard_sizes.tolist() == old.shard_sizes.tolist()
    assert list(new) == list(old)
    assert {path.name.split(".", 2)[2] for path in (tmp_path / "out").glob("shard.*")} == {
        "mds.zstd" if after else "mds"
    }


def test_a_dataset_is_not_recompressed_into_itself_or_another(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("in", "other"):
        with MDSWriter(tmp_path / name, {"id": "int"}) as writer:
            writer.write({"id": 1})
    (tmp_path / "unfinished").mkdir()
    (tmp_path / "unfinished" / "shard.00000.mds").touch()
    for out, told in (
        ("in", "holds a dataset already"),
        ("other", "holds a dataset"),
        ("in/new", "lies in"),
        ("unfinished", "unfinished holds shard.00000.mds, which an unfinished run left"),
    ):
        assert told in refused(capsys, "convert", "recompress", tmp_path / "in", tmp_path / out)


def test_a_harmed_source_leaves_no_index(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with MDSWriter(tmp_path / "in", {"id": "int"}, size_limit=300) as writer:
        for number in range(100):
            writer.write({"id": number})
    (tmp_path / "in" / "shard.00002.mds").unlink()
    assert "shard.00002.mds" in refused(capsys, "convert", "recompress", tmp_path / "in", tmp_path / "out")
    assert not (tmp_path / "out" / "index.json").exists()


@pytest.mark.parametrize("by_command", [False, True])
def test_a_conversion_stores_hashes_so_that_verify_finds_a_changed_value(
    tmp_path: Path, *, by_command: bool
) -> None:
    (tmp_path / "in.jsonl").write_text('{"a": "first"}\n')
    out = tmp_path / "out"
    if by_command:
        assert main(["convert", "jsonl", str(tmp_path / "in.jsonl"), str(out)]) == 0
    else:
        convert("jsonl", [tmp_path / "in.jsonl"], out)
    assert main(["verify", str(out)]) == 0
    shard = out / "shard.00000.mds"
    shard.write_bytes(shard.read_bytes().replace(b"first", b"other"))
    assert main(["verify", str(out)]) == 1


def test_a_huge_member_is_held_no_more_than_twice(tmp_path: Path) -> None:
    """Its text, and what is written; a small archive may have it."""

    def peak(size: int) -> int:
        tar = tmp_path / f"{size}.tar.gz"
        with tarfile.open(tar, "w:gz", compresslevel=1) as file:
            info = tarfile.TarInfo("one.txt")
            info.size = size
            file.addfile(info, io.BytesIO(b"x" * size))
        words = [sys.executable, "-m", "loader", "convert", "tar", str(tar), str(tmp_path / f"out-{size}")]
        child = os.posix_spawn(words[0], words, {**os.environ, "PYTHONPATH": str(ROOT)})
        _, status, used = os.wait4(child, 0)
        assert status == 0
        return used.ru_maxrss * 1024

    size = 100 << 20
    assert peak(size) - peak(1) < 2.5 * size
    assert len(MDSDataset(tmp_path / f"out-{size}")[0]["txt"]) == size


@pytest.mark.parametrize("shape", [(1 << 40,), (1 << 62, 1 << 62), (3,)])
def test_an_array_that_claims_more_than_it_has_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], shape: tuple[int, ...]
) -> None:
    array = io.BytesIO()
    np.lib.format.write_array_header_1_0(array, {"descr": "<f8", "fortran_order": False, "shape": shape})
    array.write(bytes(16))
    with tarfile.open(tmp_path / "a.tar", "w") as file:
        info = tarfile.TarInfo("one.npy")
        info.size = len(array.getvalue())
        file.addfile(info, io.BytesIO(array.getvalue()))
    words = ["convert", "tar", "--columns", "npy:ndarray", str(tmp_path / "a.tar"), str(tmp_path / "out")]
    assert main(words) == 1
    assert "a.tar, member one.npy: npy: its header claims" in capsys.readouterr().err
