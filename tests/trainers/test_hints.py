"""Hints for the data sets of other libraries: each reads files that are cached before it asks for them."""

import json
import subprocess
import sys
from collections.abc import Callable
from glob import glob
from pathlib import Path

import numpy
import pytest

from fusecache.model.objects import KIB
from loader import FileHints
from tests.support.mounts import Mount, wait_until
from tests.support.s3_buckets import Bucket

ROWS = 4000


def upload(bucket: Bucket, folder: Path) -> int:
    """Put the files of a folder into the bucket; return their bytes."""
    total = 0
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            total += path.stat().st_size
            bucket.put(f"{folder.name}/{path.relative_to(folder).as_posix()}", path.read_bytes())
    return total


def by_cause(mount: Mount) -> dict[str, int]:
    """Return the bytes that were fetched, by cause."""
    causes: dict[str, int] = mount.status()["cache"]["bytes_by_cause"]
    return causes


def wait_fetched(mount: Mount, paths: list[str]) -> int:
    """Wait until all of these files were fetched; return the bytes that hints did not fetch."""
    total = sum(Path(path).stat().st_size for path in paths)
    wait_until(lambda: sum(by_cause(mount).values()) >= total, "the hinted files", seconds=60)
    return not_hinted(mount)


def not_hinted(mount: Mount) -> int:
    """Return the bytes that were fetched because something waited for them, or by a guess."""
    return sum(count for cause, count in by_cause(mount).items() if cause != "hint")


def test_arrow_of_hugging_face(mount: Callable[..., Mount], bucket: Bucket, tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    rows = {"id": list(range(ROWS)), "text": [f"{number:05}" * 100 for number in range(ROWS)]}
    datasets.Dataset.from_dict(rows).save_to_disk(str(tmp_path / "arrow"), num_shards=4)
    upload(bucket, tmp_path / "arrow")
    one = mount()
    dataset = datasets.load_from_disk(str(one.path / "arrow"))  # reads the schema of each file
    with FileHints([file["filename"] for file in dataset.cache_files]):
        before = wait_fetched(one, [file["filename"] for file in dataset.cache_files])
        assert [row["id"] for row in dataset] == rows["id"]
        assert not_hinted(one) == before


def test_parquet_that_hugging_face_streams(
    mount: Callable[..., Mount], bucket: Bucket, tmp_path: Path
) -> None:
    datasets = pytest.importorskip("datasets")
    parquet = pytest.importorskip("pyarrow.parquet")
    pyarrow = pytest.importorskip("pyarrow")
    (tmp_path / "parquet").mkdir()
    for number in range(4):
        ids = list(range(number * 1000, number * 1000 + 1000))
        table = pyarrow.table({"id": ids, "text": [numpy.random.bytes(500) for _ in ids]})
        parquet.write_table(table, tmp_path / "parquet" / f"{number}.parquet")
    upload(bucket, tmp_path / "parquet")
    one = mount()
    files = sorted(glob(f"{one.path}/parquet/*.parquet"))
    with FileHints(files):
        assert wait_fetched(one, files) == 0
        stream = datasets.load_dataset("parquet", data_files=files, split="train", streaming=True)
        assert [row["id"] for row in stream] == list(range(4000))
        assert not_hinted(one) == 0


OPTIMIZE = """
import sys, numpy, litdata
def sample(index):
    return {"index": index, "data": numpy.full(1000, index, "int32")}
if __name__ == "__main__":
    litdata.optimize(sample, list(range(400)), output_dir=sys.argv[1], chunk_bytes="256KB", num_workers=1)
"""
STREAM = """
import json, sys, litdata
from loader import FileHints
if __name__ == "__main__":
    folder = sys.argv[1]
    chunks = [each["filename"] for each in json.load(open(f"{folder}/index.json"))["chunks"]]
    hints = FileHints([f"{folder}/{name}" for name in chunks])
    print("sent", flush=True)
    assert sys.stdin.readline()
    print(sum(int(sample["data"][7]) for sample in litdata.StreamingDataset(folder)), flush=True)
"""


def test_chunks_of_litdata(mount: Callable[..., Mount], bucket: Bucket, tmp_path: Path) -> None:
    pytest.importorskip("litdata")
    (tmp_path / "make.py").write_text(OPTIMIZE)
    (tmp_path / "read.py").write_text(STREAM)
    subprocess.run([sys.executable, tmp_path / "make.py", tmp_path / "chunks"], check=True, timeout=200)
    upload(bucket, tmp_path / "chunks")
    one = mount()
    chunks = [each["filename"] for each in json.loads((tmp_path / "chunks/index.json").read_text())["chunks"]]
    assert len(chunks) > 3
    command = [sys.executable, str(tmp_path / "read.py"), str(one.path / "chunks")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as reader:
        assert reader.stdin
        assert reader.stdout
        assert reader.stdout.readline() == "sent\n"
        before = wait_fetched(one, [f"{one.path}/chunks/{name}" for name in chunks])
        output, _ = reader.communicate("\n", timeout=200)
    assert output.split()[-1] == str(sum(range(400)))
    assert not_hinted(one) <= before + 16 * KIB
