"""`convert imagefolder`: each image with the number of its class and its name, in torchvision's order."""

import io
import logging
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from loader import LoaderError, MDSDataset, convert
from loader.__main__ import main
from loader.clusters.conversion import ENGINES
from loader.clusters.parts import write_attempt
from loader.tools import image_folder

# Name -> class. A folder comes by its whole path, as in torchvision: b before b/x, and 10 before 2.
NAMES = {
    "ant/10.png": 0,
    "ant/2.PNG": 0,
    "bee/a.png": 1,
    "bee/x/a.jpeg": 1,
    "bee/y/0.png": 1,
    "cat/ü.png": 2,
}


def picture(number: int, kind: str = "PNG") -> bytes:
    out = io.BytesIO()
    Image.new("RGB", (3, 2), (number, 2, 3)).save(out, format=kind)
    return out.getvalue()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for number, name in enumerate(NAMES):
        path = tmp_path / "in" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(picture(number))
    return tmp_path / "in"


def expected(folder: Path) -> list[dict[str, Any]]:
    return [
        {"image": (folder / name).read_bytes(), "class": kind, "name": name} for name, kind in NAMES.items()
    ]


def test_images_classes_and_names_are_stored_as_they_are(folder: Path, tmp_path: Path) -> None:
    assert main(["convert", "imagefolder", str(folder), str(tmp_path / "out"), "--hashes", "sha1"]) == 0
    dataset = MDSDataset(tmp_path / "out")
    assert dataset.encodings == {"image": "bytes", "class": "int", "name": "str"}
    assert list(dataset) == expected(folder)


@pytest.mark.parametrize(
    ("how", "parts"),
    [
        ({}, 0),
        ({"processes": 2}, 3),
        ({"engine": "ray", "size_limit": 256}, 3),
        ({"engine": "spark"}, 1),
    ],
    ids=str,
)
def test_lists_of_files_are_dealt_to_the_parts(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: dict[str, Any], parts: int
) -> None:
    for engine in ("ray", "spark"):  # each task goes to another process, and so does this
        monkeypatch.setitem(
            ENGINES, engine, lambda: lambda tasks: map(write_attempt, pickle.loads(pickle.dumps(tasks)))
        )
    monkeypatch.setattr(image_folder, "FILES_OF_SOURCE", 2)
    monkeypatch.chdir(tmp_path)
    assert convert("imagefolder", ["in"], tmp_path / "out", **how) == len(NAMES)
    assert list(MDSDataset(tmp_path / "out")) == expected(folder)
    assert len(list((tmp_path / "out").glob("0*"))) == parts


def test_chosen_columns(folder: Path, tmp_path: Path) -> None:
    words = [
        "convert",
        "imagefolder",
        str(folder),
        str(tmp_path / "out"),
        "--columns",
        "image:png,class:uint16",
    ]
    assert main(words) == 0
    found = list(MDSDataset(tmp_path / "out"))
    assert [one["image"].getpixel((0, 0))[0] for one in found] == list(range(len(NAMES)))
    assert [int(one["class"]) for one in found] == list(NAMES.values())
    assert found[0].keys() == {"image", "class"}


def test_an_image_that_is_cut_short_is_named_where_images_are_checked(folder: Path, tmp_path: Path) -> None:
    cut = folder / "bee/a.png"
    cut.write_bytes(cut.read_bytes()[:45])
    with pytest.raises(LoaderError, match=rf"{cut}: column 'image': its \d+ bytes are not a whole image"):
        convert("imagefolder", [folder], tmp_path / "out", columns={"image": "png"})
    assert not (tmp_path / "out" / "index.json").exists()


def test_files_that_are_no_images_are_left_out_and_logged(
    folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (folder / "ant/Thumbs.db").write_text("x")
    (folder / "README").write_text("x")
    with caplog.at_level(logging.WARNING):
        assert convert("imagefolder", [folder], tmp_path / "out") == len(NAMES)
    assert "left out files that are no images of a class: files=2 first=README" in caplog.text


@pytest.mark.parametrize("engine", ["local", "ray"])
def test_a_file_that_goes_is_named(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, engine: str
) -> None:
    monkeypatch.setitem(ENGINES, "ray", lambda: lambda tasks: map(write_attempt, tasks))
    (folder / "cat/gone.png").symlink_to(folder / "nowhere")
    with pytest.raises(LoaderError, match=r"cat/gone\.png cannot be read: No such file or directory: "):
        convert("imagefolder", [folder], tmp_path / "out", engine=engine)
    assert not (tmp_path / "out" / "index.json").exists()


def test_other_files_cannot_continue_a_conversion(folder: Path, tmp_path: Path) -> None:
    (folder / "cat/zzz.png").symlink_to(folder / "nowhere")
    how = {"size_limit": 200}
    with pytest.raises(LoaderError, match="cannot be read"):
        convert("imagefolder", [folder], tmp_path / "out", **how)
    os.rename(folder / "cat/zzz.png", folder / "ant/0.png")
    (folder / "ant/0.png").unlink()
    (folder / "ant/0.png").write_bytes(picture(9))
    with pytest.raises(LoaderError, match="holds a conversion of other files"):
        convert("imagefolder", [folder], tmp_path / "out", resume=True, **how)


@pytest.mark.parametrize("name", [".", "out", "ant/out"])
def test_a_dataset_is_not_written_into_its_own_images(folder: Path, name: str) -> None:
    """A next run would take it for a class, and advise to remove it."""
    before = sorted(folder.rglob("*"))
    told = "which is not written to: choose another directory"
    with pytest.raises(LoaderError, match=told):
        convert("imagefolder", [folder], folder / name)
    assert main(["convert", "imagefolder", str(folder), str(folder / name)]) == 1
    assert sorted(folder.rglob("*")) == before


def test_what_is_no_folder_of_classes_is_refused(folder: Path, tmp_path: Path) -> None:
    for inputs, columns, told in (
        ([folder, folder], {}, "give one folder, whose folders are the classes"),
        ([tmp_path / "none"], {}, "none cannot be read: No such file or directory"),
        ([folder / "ant"], {}, "ant has no class folders: name the folder"),
        ([folder / "ant/2.PNG"], {}, "cannot be read: Not a directory"),
        ([folder], {"label": "int"}, "--columns label: an image folder has the columns image, class, name"),
        ([folder], {"image": "int"}, "--columns image:int: choose bytes, jpeg or png"),
    ):
        with pytest.raises(LoaderError, match=told):
            convert("imagefolder", inputs, tmp_path / "out", columns=columns)
    (folder / "dog").mkdir()
    with pytest.raises(LoaderError, match="dog has no image, so it is no class: remove it"):
        convert("imagefolder", [folder], tmp_path / "out")
    assert not (tmp_path / "out").exists()
