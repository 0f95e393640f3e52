"""`convert litdata`: the samples of LitData's chunks come out as they went in. Most tests need the package litdata."""

import json
import pickle
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from loader import LoaderError, MDSDataset, convert
from loader.__main__ import main
from loader.clusters.conversion import ENGINES
from loader.clusters.parts import write_attempt

COUNT = 60


def values(number: int) -> dict[str, Any]:
    return {
        "id": number,
        "text": f"ü{number}",
        "score": number / 2,
        "blob": bytes([number]) * number,
        "tokens": np.arange(number + 1, dtype=np.int32),
        "grid": np.full((2, 2), number, np.float32),
    }


def plain(sample: dict[str, Any]) -> dict[str, Any]:
    return {name: value.tolist() if hasattr(value, "tolist") else value for name, value in sample.items()}


def write(folder: Path, samples: list[dict[str, Any]], **options: Any) -> Path:
    """Write chunks of about 1 KB, as `litdata.optimize` does."""
    streaming = pytest.importorskip("litdata.streaming")
    cache = streaming.Cache(str(folder), chunk_bytes=1000, **options)
    for number, sample in enumerate(samples):
        cache[number] = sample
    cache.done()
    cache.merge()
    return folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write(tmp_path / "in", [values(number) for number in range(COUNT)])


def test_the_package_that_is_missing_is_named_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "litdata", None)
    assert main(["convert", "litdata", str(tmp_path), str(tmp_path / "out")]) == 1
    assert capsys.readouterr().err == "convert litdata needs the package litdata: pip install litdata\n"
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "how", [{}, {"processes": 2}, {"engine": "ray", "size_limit": 4096}, {"engine": "spark"}], ids=str
)
def test_samples_come_out_as_they_went_in(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: dict[str, Any]
) -> None:
    for engine in ("ray", "spark"):  # each task goes to another process, and so does this
        monkeypatch.setitem(
            ENGINES, engine, lambda: lambda tasks: map(write_attempt, pickle.loads(pickle.dumps(tasks)))
        )
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert convert("litdata", [folder], tmp_path / "out", **how) == COUNT
    dataset = MDSDataset(tmp_path / "out")
    assert [plain(sample) for sample in dataset] == [plain(values(number)) for number in range(COUNT)]
    assert dataset.encodings["blob"] == "bytes"
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


def test_chunks_that_are_compressed(tmp_path: Path) -> None:
    folder = write(tmp_path / "in", [values(number) for number in range(COUNT)], compression="zstd")
    names = sorted(path.name for path in folder.iterdir())
    assert convert("litdata", [folder], tmp_path / "out") == COUNT
    assert plain(MDSDataset(tmp_path / "out")[COUNT - 1]) == plain(values(COUNT - 1))
    assert sorted(path.name for path in folder.iterdir()) == names


def test_chosen_columns_and_several_folders(folder: Path, tmp_path: Path) -> None:
    more = write(tmp_path / "more", [{"id": COUNT + number, "tokens": np.ones(3)} for number in range(5)])
    columns = {"tokens": "ndarray:int16", "id": "uint8"}
    assert convert("litdata", [folder, more], tmp_path / "out", columns=columns) == COUNT + 5
    assert [int(sample["id"]) for sample in MDSDataset(tmp_path / "out")] == list(range(COUNT + 5))
    with pytest.raises(LoaderError, match="more has no blob, grid, score, text: leave it out of --columns"):
        convert("litdata", [folder, more], tmp_path / "other")
    with pytest.raises(LoaderError, match="in: blob, grid, score, text is no column of the first folder"):
        convert("litdata", [more, folder], tmp_path / "other")


def test_a_value_that_a_column_would_change_is_named_with_its_chunk_and_sample(tmp_path: Path) -> None:
    folder = write(tmp_path / "in", [{"score": 1.0}, {"score": 1e300}])
    with pytest.raises(
        LoaderError, match=r"chunk-0-0\.bin, sample 1: score: 1e\+300 does not fit float32; .*--columns"
    ):
        convert("litdata", [folder], tmp_path / "out", columns={"score": "float32"})


def test_the_bytes_of_an_image_are_stored_and_not_its_pixels(tmp_path: Path) -> None:
    pytest.importorskip("litdata")
    Image.new("RGB", (8, 8), (9, 99, 9)).save(tmp_path / "x.jpg")
    with Image.open(tmp_path / "x.jpg") as picture:
        folder = write(tmp_path / "in", [{"image": picture, "class": 1}])
    assert convert("litdata", [folder], tmp_path / "out", columns={"image": "bytes"}) == 1
    assert MDSDataset(tmp_path / "out")[0]["image"] == (tmp_path / "x.jpg").read_bytes()
    assert convert("litdata", [folder], tmp_path / "all") == 1
    assert MDSDataset(tmp_path / "all").encodings == {"image": "jpeg", "class": "int"}


class Trap:
    """Unpickled, it makes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


def test_a_pickle_is_refused_and_never_loaded(tmp_path: Path) -> None:
    folder = write(tmp_path / "in", [{"id": 1, "odd": Trap(tmp_path / "ran")}])
    (tmp_path / "ran").unlink(missing_ok=True)
    with pytest.raises(LoaderError, match=r"in: odd is stored as pickle, .*--columns"):
        convert("litdata", [folder], tmp_path / "out")
    assert convert("litdata", [folder], tmp_path / "out", columns={"id": "int"}) == 1
    assert not (tmp_path / "ran").exists()


def test_a_chunk_that_is_cut_short_or_missing_is_named(folder: Path, tmp_path: Path) -> None:
    chunk = folder / json.loads((folder / "index.json").read_text())["chunks"][1]["filename"]
    whole = chunk.read_bytes()
    chunk.write_bytes(whole[:-1])
    with pytest.raises(LoaderError, match=rf"{chunk} is cut short: it has \d+ of {len(whole)} bytes"):
        convert("litdata", [folder], tmp_path / "out")
    chunk.unlink()
    with pytest.raises(LoaderError, match=f"{chunk} cannot be read: No such file or directory"):
        convert("litdata", [folder], tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("sample", "told"),
    [((1, 2), "its samples are not dicts of plain values"), ({"a": {"b": 1}}, "not dicts of plain values")],
    ids=str,
)
def test_samples_that_are_no_dicts_of_plain_values_are_refused(
    tmp_path: Path, sample: Any, told: str
) -> None:
    folder = write(tmp_path / "in", [sample])
    with pytest.raises(LoaderError, match=told):
        convert("litdata", [folder], tmp_path / "out")


def test_what_is_no_folder_of_litdata_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("litdata")
    with pytest.raises(
        LoaderError, match=r"index\.json cannot be read: No such file .*: name a folder of LitData"
    ):
        convert("litdata", [tmp_path], tmp_path / "out")
    (tmp_path / "index.json").write_text("{}")
    with pytest.raises(LoaderError, match=r"index\.json is no index of LitData"):
        convert("litdata", [tmp_path], tmp_path / "out")
