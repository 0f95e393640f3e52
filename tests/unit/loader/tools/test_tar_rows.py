"""`convert tar`: the samples of a tar come out as they went in, and a tar that is damaged is never a shorter one."""

import gzip
import io
import json
import pickle
import re
import tarfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zstandard
from PIL import Image

from loader import LoaderError, MDSDataset, convert
from loader.__main__ import main
from loader.writing.clusters import ENGINES, write_attempt

COUNT = 30
Files = list[tuple[str, bytes]]


def sample(number: int) -> dict[str, Any]:
    """What is stored of a sample."""
    return {
        "txt": f"text ü {number}",
        "cls": number - 3,
        "json": {"tags": [number, None]},
        "seg.bin": bytes([number]) * (number * 50),
    }


def files(numbers: Iterable[int], *, folder: str = "a.b/") -> Files:
    """The members of these samples."""
    return [
        (f"{folder}{number:04}.{column}", content)
        for number in numbers
        for column, content in (
            ("txt", sample(number)["txt"].encode()),
            ("cls", f"{sample(number)['cls']}\n".encode()),
            ("json", json.dumps(sample(number)["json"]).encode()),
            ("seg.bin", sample(number)["seg.bin"]),
        )
    ]


def tar_bytes(members: Files, kind: int = tarfile.GNU_FORMAT) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=kind) as tar:
        for name, content in members:
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return out.getvalue()


def tar_file(path: Path, members: Files) -> Path:
    path.write_bytes(tar_bytes(members))
    return path


@pytest.mark.parametrize("kind", ["tar", "webdataset"])
@pytest.mark.parametrize("ending", [".tar", ".tar.gz", ".tgz", ".tar.zst"])
@pytest.mark.parametrize("style", [tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_members_become_columns_by_their_extension(
    tmp_path: Path, kind: str, ending: str, style: int
) -> None:
    made = [
        tar_bytes(files(range(20)), style),
        tar_bytes(files(range(20, COUNT), folder="ü" * 120 + "/"), style),
    ]
    pack = {".tar": bytes, ".tar.zst": zstandard.compress}.get(ending, gzip.compress)
    paths = [tmp_path / f"{number}{ending}" for number in range(2)]
    for path, content in zip(paths, made, strict=True):
        path.write_bytes(pack(content))
    assert main(["convert", kind, *map(str, paths), str(tmp_path / "out"), "--size-limit", "2kb"]) == 0
    dataset = MDSDataset(tmp_path / "out")
    assert dataset.encodings == {"txt": "str", "cls": "int", "json": "json", "seg.bin": "bytes"}
    assert list(dataset) == [sample(number) for number in range(COUNT)]


def test_what_webdataset_wrote_comes_out_as_it_reads_it(tmp_path: Path) -> None:
    webdataset = pytest.importorskip("webdataset")
    with webdataset.TarWriter(str(tmp_path / "in.tar")) as writer:
        for number in range(COUNT):
            writer.write({"__key__": f"{number:04}", **sample(number)})
    assert convert("webdataset", [tmp_path / "in.tar"], tmp_path / "out") == COUNT
    assert list(MDSDataset(tmp_path / "out")) == [sample(number) for number in range(COUNT)]


@pytest.mark.parametrize(
    "how", [{"processes": 2}, {"engine": "ray", "size_limit": 4096}, {"engine": "spark"}], ids=str
)
def test_other_engines_write_the_same_samples(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: dict[str, Any]
) -> None:
    for engine in ("ray", "spark"):  # each task goes to another process, and so does this
        monkeypatch.setitem(
            ENGINES, engine, lambda: lambda tasks: map(write_attempt, pickle.loads(pickle.dumps(tasks)))
        )
    paths = [tar_file(tmp_path / f"{part}.tar", files(range(part, COUNT, 3))) for part in range(3)]
    assert convert("tar", paths, tmp_path / "out", **how) == COUNT
    assert list(MDSDataset(tmp_path / "out")) == [
        sample(number) for part in range(3) for number in range(part, COUNT, 3)
    ]


def test_chosen_columns_are_decoded_by_their_encoding(tmp_path: Path) -> None:
    picture, array = io.BytesIO(), io.BytesIO()
    Image.new("RGB", (3, 2), (1, 2, 3)).save(picture, format="PNG")
    np.save(array, np.array([[1.5, 2.5]]))
    members = [
        ("0.png", picture.getvalue()),
        ("0.list.json", b"[1, 2, 3]"),
        ("0.npy", array.getvalue()),
        ("0.score", b" 0.5\n"),
        ("0.LABEL", b"7"),
        ("0.left-out", b"x"),
        ("README", b"x"),
    ]
    columns = {
        "png": "png",
        "list.json": "ndarray:int16",
        "npy": "ndarray:float32:2",
        "score": "float64",
        "label": "uint8",
    }
    assert convert("tar", [tar_file(tmp_path / "in.tar", members)], tmp_path / "out", columns=columns) == 1
    found = MDSDataset(tmp_path / "out")[0]
    assert found["png"].getpixel((0, 0)) == (1, 2, 3)
    assert (found["list.json"].tolist(), found["npy"].tolist()) == ([1, 2, 3], [1.5, 2.5])
    assert (found["score"], found["label"]) == (0.5, 7)


@pytest.mark.parametrize(
    ("members", "columns", "told"),
    [
        ([("0.cls", b"1.5")], {}, r"member 0\.cls: cls: b'1.5' is not a whole number; .*--columns"),
        ([("0.cls", b"")], {}, r"member 0\.cls: cls: b'' is not a whole number"),
        ([("0.json", b"{")], {}, r"member 0\.json: json: Expecting"),
        ([("0.txt", b"\xff")], {}, r"member 0\.txt: txt: 'utf-8' codec"),
        ([("0.a", b"[1.5]")], {"a": "ndarray:int32"}, r"member 0\.a: a: 1.5 does not fit ndarray:int32"),
        ([("0.a", b"300")], {"a": "uint8"}, r"in\.tar, sample 0: column 'a': 300 is out of range"),
        ([("0.a", b"x")], {"a": "pil"}, r"--columns a:pil: a member of a tar, or a field of CSV, has bytes"),
        ([("0.a", b"x"), ("0.a", b"y")], {}, r"member 0\.a: the sample 0 has a twice"),
        (
            [("0.a", b"x"), ("1.a", b"y"), ("1.b", b"z")],
            {},
            "b is missing in some samples: .*--columns.*--sort",
        ),
        (
            [("0.a", b"x"), ("0.b", b"y"), ("1.a", b"z")],
            {"b": "str"},
            "sample 1: b is missing: .*--sort=name",
        ),
        ([("0.a", b"x"), ("0.b", b"y"), ("README", b"z")], {"b": "str"}, None),
        ([("0.a", b"1_0")], {"a": "float64"}, r"member 0\.a: a: b'1_0' is not a number; .*--columns"),
        ([("0.a", b"1_0")], {"a": "str_float"}, r"member 0\.a: a: b'1_0' is not a number"),
        ([("0.a", b"1_0")], {"a": "str_decimal"}, r"member 0\.a: a: '1_0' does not fit str_decimal"),
        ([("0.a", b"x"), ("1.b", b"y")], {"a": "str", "b": "str"}, "sample 0: b is missing: .*--sort=name"),
        ([("0.a", b"x"), ("README", b"y")], {}, "member README has no extension"),
        ([("0.a", b"x"), ("dir/.hidden.b", b"y")], {}, r"member dir/\.hidden\.b has no extension"),
        ([], {}, "no sample to determine the columns from"),
    ],
    ids=str,
)
def test_what_does_not_fit_is_named_with_its_member(
    tmp_path: Path, members: Files, columns: dict[str, str], told: str | None
) -> None:
    path = tar_file(tmp_path / "in.tar", members)
    if told is None:
        assert convert("tar", [path], tmp_path / "out", columns=columns) == 1
        return
    with pytest.raises(LoaderError, match=told):
        convert("tar", [path], tmp_path / "out", columns=columns)
    assert not list(tmp_path.glob("out/*.mds"))


def test_a_later_member_that_is_no_detected_column_is_refused(tmp_path: Path) -> None:
    paths = [
        tar_file(tmp_path / "0.tar", [("0.a", b"x")]),
        tar_file(tmp_path / "1.tar", [("1.a", b"x"), ("1.b", b"y")]),
    ]
    with pytest.raises(LoaderError, match=rf"{paths[1]}, member 1\.b: b is no column .*--columns"):
        convert("tar", paths, tmp_path / "out")
    assert convert("tar", paths, tmp_path / "named", columns={"a": "bytes"}) == 2


@pytest.mark.parametrize("kind", [tarfile.LNKTYPE, tarfile.SYMTYPE])
def test_a_link_is_refused_and_not_left_out(tmp_path: Path, kind: bytes) -> None:
    with tarfile.open(tmp_path / "in.tar", "w") as tar:
        folder = tarfile.TarInfo("data.d")
        folder.type = tarfile.DIRTYPE
        tar.addfile(folder)
        tar.addfile(tarfile.TarInfo("data.d/0.a"))
        link = tarfile.TarInfo("data.d/1.a")
        link.type, link.linkname = kind, "data.d/0.a"
        tar.addfile(link)
    with pytest.raises(LoaderError, match=r"in\.tar, member data\.d/1\.a is a link .*--dereference"):
        convert("tar", [tmp_path / "in.tar"], tmp_path / "out", columns={"a": "bytes"})


# 512 bytes each: a header, and the content of a member.
BLOCKS = tar_bytes([(f"{number}.a", bytes([65 + number]) * 512) for number in range(4)])


@pytest.mark.parametrize(
    ("harmed", "where"),
    [
        (BLOCKS[: 5 * 512 + 100], r"member 2\.a"),
        (BLOCKS[: 5 * 512], r"member 2\.a"),
        (BLOCKS[: 4 * 512 + 100], r"after the member 1\.a"),
        (BLOCKS[: 4 * 512], r"after the member 1\.a: it has no end mark"),
        (BLOCKS[: 8 * 512], r"after the member 3\.a: it has no end mark"),
        (
            BLOCKS[: 4 * 512] + b"x" * 512 + BLOCKS[5 * 512 :],
            r"after the member 1\.a: the next header is damaged",
        ),
        (BLOCKS[: 9 * 512] + BLOCKS, r"after the member 3\.a: there is more behind its end mark"),
        (BLOCKS + BLOCKS, r"after the member 3\.a: there is more behind its end mark"),
        (b"hello", "before its first member"),
        (b"", "before its first member"),
    ],
    ids=range(10),
)
@pytest.mark.parametrize("columns", [{"a": "bytes"}, {}], ids=str)
@pytest.mark.parametrize("ending", [".tar", ".tar.gz"])
def test_a_tar_that_is_cut_or_damaged_is_named_with_the_member(
    tmp_path: Path, harmed: bytes, where: str, columns: dict[str, str], ending: str
) -> None:
    path = tmp_path / f"in{ending}"
    path.write_bytes(gzip.compress(harmed) if ending == ".tar.gz" else harmed)
    with pytest.raises(LoaderError) as told:
        convert("tar", [path], tmp_path / "out", columns=columns)
    assert re.search(
        rf"{path}, {where}.*; it is damaged, cut short, or not what its name says", str(told.value)
    )
    assert not list(tmp_path.glob("out/*.mds"))


def test_a_tar_that_is_cut_in_a_member_that_is_left_out_is_named(tmp_path: Path) -> None:
    path = tmp_path / "in.tar"
    path.write_bytes(tar_bytes([("0.b", b"x"), ("0.a", b"y" * 900)])[: 3 * 512 + 100])
    with pytest.raises(LoaderError, match=r"in\.tar, after the member 0\.a: .*; it is damaged, cut short"):
        convert("tar", [path], tmp_path / "out", columns={"b": "bytes"})
    assert not (tmp_path / "out" / "index.json").exists()


@pytest.mark.parametrize("keep", [0.3, 0.9, 0.999])
def test_a_packed_tar_that_is_cut_is_never_taken_for_a_shorter_one(tmp_path: Path, keep: float) -> None:
    whole = gzip.compress(
        tar_bytes([(f"{number}.a", np.random.default_rng(number).bytes(700)) for number in range(90)])
    )
    path = tmp_path / "in.tar.gz"
    path.write_bytes(whole[: int(len(whole) * keep)])
    with pytest.raises(LoaderError, match=r"in\.tar\.gz, .*; it is damaged, cut short"):
        convert("tar", [path], tmp_path / "out", columns={"a": "bytes"}, size_limit=2000)
    assert not (tmp_path / "out" / "index.json").exists()
    path.write_bytes(whole)
    assert (
        convert("tar", [path], tmp_path / "out", columns={"a": "bytes"}, size_limit=2000, resume=True) == 90
    )


def test_a_tar_that_is_missing_is_named(tmp_path: Path) -> None:
    with pytest.raises(LoaderError, match=r"none\.tar cannot be read: No such file"):
        convert("tar", [tmp_path / "none.tar"], tmp_path / "out")
