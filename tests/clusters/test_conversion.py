"""`loader.convert` on a cluster: what a local conversion writes, also if workers or the driver are killed."""

import json
import os
import shutil
import signal
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import tokenizers
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

from loader import MDSDataset
from loader.__main__ import main
from tests.clusters.engines import VENV, Cluster, Driver, HeldInput, convert
from tests.support.mounts import Mount, is_running, wait_until
from tests.support.s3_buckets import Bucket

FILES = 6
ROWS = 500
COLUMNS = {"id": "int", "text": "str"}
# Larger than one of the files and smaller than two, so that each is a part; a shard has less than a part.
WORDS = ["--columns", "id:int,text:str", "--size-limit", "40kb"]


def rows(file: int) -> list[dict[str, Any]]:
    return [{"id": ROWS * file + row, "text": f"text {file} {row} " * 3} for row in range(ROWS)]


def lines(file: int) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in rows(file)).encode()


@pytest.fixture
def inputs(tmp_path: Path) -> list[Path]:
    """JSON lines."""
    made = [tmp_path / f"{file}.jsonl" for file in range(FILES)]
    for file, path in enumerate(made):
        path.write_bytes(lines(file))
    return made


def check(out: Path, parts: int) -> None:
    """The dataset is sound, complete, and has each sample once and in order; no other attempt is left."""
    assert main(["verify", str(out)]) == 0
    assert list(MDSDataset(out)) == [row for file in range(FILES) for row in rows(file)]
    shards = json.loads((out / "index.json").read_text())["shards"]
    listed = list(dict.fromkeys(shard["raw_data"]["basename"].partition("/")[0] for shard in shards))
    assert [folder[:5] for folder in listed] == [f"{number:05}" for number in range(parts)]
    assert sorted(path.name for path in out.iterdir() if path.is_dir()) == listed
    times = {path: path.stat().st_mtime_ns for path in out.rglob("*") if path.is_file()}
    assert times[out / "_SUCCESS"] == max(times.values())


def complete(out: Path) -> dict[str, int]:
    """File of a complete part -> when it was written."""
    return {
        str(path.relative_to(out)): path.stat().st_mtime_ns
        for index in out.glob("*/index.json")
        for path in index.parent.iterdir()
    }


def held(inputs: list[Path], file: int) -> HeldInput:
    """Put a pipe in the place of a file. It has no size, so it shares the part of the file before it."""
    inputs[file].unlink()
    return HeldInput(inputs[file])


def test_a_part_of_a_killed_worker_is_written_again(
    cluster: Cluster, inputs: list[Path], tmp_path: Path
) -> None:
    out = tmp_path / "out"
    with (
        held(inputs, 3) as pipe,
        Driver(cluster, ["convert", "jsonl", *WORDS, *inputs, out, "--engine", cluster.engine]) as driver,
    ):
        killed = pipe.reader()
        os.kill(killed, signal.SIGKILL)
        wait_until(lambda: not is_running(killed), "the end of the killed worker")
        pipe.release(lines(3))
        assert driver.finish()[0] == 0, driver.finish()
    check(out, FILES - 1)


def test_an_interrupted_driver_is_continued_with_what_is_missing(
    cluster: Cluster, inputs: list[Path], tmp_path: Path
) -> None:
    out = tmp_path / "out"
    with held(inputs, 3) as pipe:
        words = ["convert", "jsonl", *WORDS, *inputs, out, "--engine", cluster.engine]
        with Driver(cluster, words) as driver:
            worker = pipe.reader()
            wait_until(lambda: len(list(out.glob("*/index.json"))) >= 3, "complete parts", 200)
        assert not (out / "index.json").exists()
        wait_until(lambda: not is_running(worker), "the end of the workers of a dead driver", 200)
        status, said = convert(cluster, "jsonl", *WORDS, *inputs, out)
        assert (status, said.splitlines()[-1]) == (
            1,
            f"{out} holds this conversion already: continue it with resume=True (--resume)",
        )
        before = complete(out)
        # A worker that was lost after it had written its part.
        first = min(out.glob("00000-*"))
        shutil.copytree(first, out / f"{first.name[:14]}-{'f' * 12}")
        with Driver(cluster, [*words, "--resume"]) as driver:
            pipe.release(lines(3))
            assert driver.finish()[0] == 0, driver.finish()
    assert before.items() <= complete(out).items()
    check(out, FILES - 1)


def test_a_bad_line_is_named_and_can_be_mended(cluster: Cluster, inputs: list[Path], tmp_path: Path) -> None:
    out = tmp_path / "out"
    inputs[4].write_bytes(lines(4) + b"{\n")
    status, said = convert(cluster, "jsonl", *WORDS, *inputs, out)
    assert status == 1
    assert f"{inputs[4]}, line {ROWS + 1} is not JSON" in said.splitlines()[-1]
    assert "Traceback" not in said
    assert not list(out.glob("index.json")) + list(out.glob("_SUCCESS"))

    status, said = convert(cluster, "jsonl", *WORDS, "--hashes", "sha1", *inputs, out, "--resume")
    assert (status, said.splitlines()[-1]) == (
        1,
        f"{out} holds another conversion, with other options: choose another directory, or remove it",
    )

    inputs[4].write_bytes(lines(4))
    assert convert(cluster, "jsonl", *WORDS, *inputs, out, "--resume")[0] == 0
    check(out, FILES)


def test_a_package_that_the_workers_lack_is_named_with_what_installs_it(
    cluster: Cluster, inputs: list[Path], tmp_path: Path
) -> None:
    if cluster.engine == "ray":
        pytest.skip("Ray's workers run the Python of their node")
    subprocess.run([VENV / "bin" / "python", "-m", "venv", "--without-pip", tmp_path / "bare"], check=True)
    python = {"PYSPARK_PYTHON": str(tmp_path / "bare" / "bin" / "python")}
    bare = replace(cluster, environment={**cluster.environment, **python})
    status, said = convert(bare, "jsonl", *WORDS, *inputs, tmp_path / "out")
    assert status == 1
    assert said.splitlines()[-1].startswith("a worker failed: ModuleNotFoundError: ")
    assert "install fusecache with its extra `spark` on all nodes" in said.splitlines()[-1]


def test_parquet_and_text_too(cluster: Cluster, tmp_path: Path) -> None:
    parquet = [tmp_path / f"{file}.parquet" for file in range(2)]
    for file, path in enumerate(parquet):
        pq.write_table(pa.Table.from_pylist(rows(file)), path)
    made = tokenizers.Tokenizer(WordLevel({"text": 0, "<unk>": 1}, unk_token="<unk>"))
    made.pre_tokenizer = Whitespace()
    made.save(str(tmp_path / "tokenizer.json"))
    text = [tmp_path / f"{file}.jsonl" for file in range(2)]
    for file, path in enumerate(text):
        path.write_bytes(lines(file))
    tokens = ["--tokenizer", tmp_path / "tokenizer.json", "--end", "", "--length", "32"]
    for kind, files, words in (("parquet", parquet, []), ("text", text, tokens)):
        for engine in ("local", cluster.engine):
            with Driver(
                cluster, ["convert", kind, *words, *files, tmp_path / f"{kind}-{engine}", "--engine", engine]
            ) as driver:
                assert driver.finish()[0] == 0, driver.finish()
        local, there = (MDSDataset(tmp_path / f"{kind}-{engine}") for engine in ("local", cluster.engine))
        assert len(local) > 0
        assert [list(map(str, sample.values())) for sample in local] == [
            list(map(str, sample.values())) for sample in there
        ]


@pytest.mark.s3server_only
def test_the_output_may_be_the_url_of_a_mounted_bucket(
    cluster: Cluster, inputs: list[Path], mount: Callable[..., Mount], bucket: Bucket
) -> None:
    mount("--fsync", "remote")
    status, said = convert(cluster, "jsonl", *WORDS, *inputs, f"{bucket.source}out")
    assert status == 0, said
    # At once, without a sync.
    assert bucket.get("out/_SUCCESS") == f"{FILES * ROWS} samples\n".encode()
    assert bucket.published()[-1][1] == "out/_SUCCESS"
    out = mount("--read-only").path / "out"
    assert main(["verify", str(out)]) == 0
    assert list(MDSDataset(out)) == [row for file in range(FILES) for row in rows(file)]
