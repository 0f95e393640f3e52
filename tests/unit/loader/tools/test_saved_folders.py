"""`convert huggingface`: the rows of a folder of `save_to_disk`, in their order. pyarrow writes such folders here."""

import io
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from PIL import Image

from loader import LoaderError, MDSDataset, convert
from loader.__main__ import main


def saved(folder: Path, *files: list[dict[str, Any]]) -> Path:
    """As `Dataset.save_to_disk` does: files of Arrow's stream format, and a state that names them in their order."""
    folder.mkdir(parents=True)
    names = [f"data-{number:05}-of-{len(files):05}.arrow" for number in range(len(files))]
    for name, rows in zip(names, files, strict=True):
        table = pa.Table.from_pylist(rows)
        with pa.OSFile(str(folder / name), "wb") as file, pa.ipc.new_stream(file, table.schema) as stream:
            stream.write_table(table, max_chunksize=2)
    (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": name} for name in names]}))
    (folder / "dataset_info.json").write_text("{}")
    return folder


def rows(first: int, count: int) -> list[dict[str, Any]]:
    return [
        {"id": number, "text": f"row {number}", "tokens": [number, 2]}
        for number in range(first, first + count)
    ]


@pytest.mark.parametrize("processes", [1, 2])
def test_rows_come_in_the_order_of_the_files(tmp_path: Path, processes: int) -> None:
    folder = saved(tmp_path / "in", rows(0, 5), rows(5, 3))
    flags = ["--processes", str(processes)]
    assert main(["convert", "huggingface", *flags, str(folder), str(tmp_path / "out")]) == 0
    dataset = MDSDataset(tmp_path / "out")
    assert dataset.encodings == {"id": "int64", "text": "str", "tokens": "ndarray:int64"}
    assert [(row["id"], row["text"], row["tokens"].tolist()) for row in dataset] == [
        (row["id"], row["text"], row["tokens"]) for row in rows(0, 8)
    ]


def test_images_keep_the_bytes_of_their_files(tmp_path: Path) -> None:
    out = io.BytesIO()
    Image.new("RGB", (3, 2), (1, 2, 3)).save(out, format="PNG")
    folder = saved(tmp_path / "in", [{"image": {"bytes": out.getvalue(), "path": None}, "label": 1}])
    convert("huggingface", [folder], tmp_path / "out", columns={"image": "png", "label": "int"})
    assert MDSDataset(tmp_path / "out")[0]["image"].getpixel((0, 0)) == (1, 2, 3)


def test_several_splits_are_named(tmp_path: Path) -> None:
    folder = saved(tmp_path / "in/train", rows(0, 1)).parent
    (folder / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    with pytest.raises(LoaderError, match=f"name one of {folder}/train, {folder}/test"):
        convert("huggingface", [folder], tmp_path / "out")


def test_what_is_no_such_folder_is_named(tmp_path: Path) -> None:
    (tmp_path / "odd").mkdir()
    (tmp_path / "odd/state.json").write_text("[]")
    for name in ("none", "odd"):
        with pytest.raises(LoaderError, match=f"{name} is no folder of save_to_disk: .*state.json"):
            convert("huggingface", [tmp_path / name], tmp_path / "out")


def test_a_folder_without_rows_and_columns_of_one_name_are_named(tmp_path: Path) -> None:
    with pytest.raises(LoaderError, match="empty holds no rows"):
        convert("huggingface", [saved(tmp_path / "empty")], tmp_path / "out")
    folder = saved(tmp_path / "twice", rows(0, 1))
    (path,) = folder.glob("*.arrow")
    batch = pa.RecordBatch.from_arrays([pa.array([1]), pa.array([2])], names=["a", "a"])
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, batch.schema) as stream:
        stream.write_batch(batch)
    with pytest.raises(LoaderError, match="two columns of one name"):
        convert("huggingface", [folder], tmp_path / "out")


@pytest.mark.parametrize("cut", ["half", "all", "the end"])
def test_a_file_that_is_cut_short_is_an_error_and_no_shorter_dataset(tmp_path: Path, cut: str) -> None:
    folder = saved(tmp_path / "in", rows(0, 4), rows(4, 4))
    path = folder / "data-00001-of-00002.arrow"
    size = path.stat().st_size
    path.write_bytes(path.read_bytes()[: {"half": size // 2, "all": 0, "the end": size - 8}[cut]])
    with pytest.raises(LoaderError, match=r"data-00001-of-00002\.arrow.*fetch"):
        convert("huggingface", [folder], tmp_path / "out")
    assert not (tmp_path / "out/index.json").exists()


def test_datasets_writes_such_folders(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    datasets.Dataset.from_list(rows(0, 6)).save_to_disk(tmp_path / "in", num_shards=2)
    assert convert("huggingface", [tmp_path / "in"], tmp_path / "out") == 6
    assert [row["id"] for row in MDSDataset(tmp_path / "out")] == [0, 1, 2, 3, 4, 5]
