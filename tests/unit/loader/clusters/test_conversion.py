"""Conversions on a cluster, as far as they go without one: refusals, the files of a part, one attempt."""

import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loader import LoaderError, MDSDataset, convert
from loader.__main__ import main
from loader.clusters.conversion import RECORD_NAME, _file_counts
from loader.clusters.parts import PartTask, write_attempt
from loader.tools.row_sources import JsonLines

MODULES = {"ray": "ray.data", "spark": "pyspark.sql"}
COLUMNS = {"id": "int"}


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "in.jsonl"
    path.write_text('{"id": 1}\n{"id": 2}\n')
    return path


@pytest.mark.parametrize("engine", MODULES)
def test_a_missing_package_is_named_before_anything_is_written(
    engine: str,
    source: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setitem(sys.modules, MODULES[engine], None)
    out = tmp_path / "out"
    assert main(["convert", "jsonl", str(source), str(out), "--engine", engine]) == 1
    assert capsys.readouterr().err.splitlines() == [
        f"--engine {engine} needs the package 'fusecache[{engine}]': pip install 'fusecache[{engine}]'"
    ]
    assert not out.exists()


def test_what_cannot_work_is_refused(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    with pytest.raises(LoaderError, match="the engines are local, ray, spark"):
        convert("jsonl", [source], out, engine="dask")
    with pytest.raises(LoaderError, match="only local has processes"):
        convert("jsonl", [source], out, engine="ray", processes=2)
    with pytest.raises(LoaderError, match="kind 'csv': it is jsonl, parquet, or text"):
        convert("csv", [source], out)
    with pytest.raises(LoaderError, match="no file to convert"):
        convert("jsonl", [], out)
    assert not out.exists()


def test_the_local_engine_leaves_the_output_of_a_cluster_alone(source: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / RECORD_NAME).write_text("{}")
    with pytest.raises(LoaderError, match="holds the conversion of a cluster"):
        convert("jsonl", [source], tmp_path / "out", resume=True)
    assert [path.name for path in (tmp_path / "out").iterdir()] == [RECORD_NAME]


def test_the_local_engine_converts_as_the_command_does(source: Path, tmp_path: Path) -> None:
    assert convert("jsonl", [source], tmp_path / "api", columns=COLUMNS, hashes=["sha1"]) == 2
    command = ["convert", "jsonl", "--columns", "id:int", "--hashes", "sha1", str(source)]
    assert main([*command, str(tmp_path / "command")]) == 0
    for name in ("index.json", "shard.00000.mds"):
        assert (tmp_path / "api" / name).read_bytes() == (tmp_path / "command" / name).read_bytes()


@given(st.lists(st.integers(0, 30)), st.integers(0, 20))
def test_files_share_a_part_only_up_to_the_limit(sizes: list[int], limit: int) -> None:
    counts = _file_counts(sizes, limit)
    assert sum(counts) == len(sizes)
    rest = list(sizes)
    for number, count in enumerate(counts):
        part, rest = rest[:count], rest[count:]
        assert sum(part[1:]) == 0 or sum(part) <= limit
        # The next file did not fit.
        assert number == len(counts) - 1 or sum(part) + rest[0] > limit


def test_an_attempt_has_a_folder_of_its_own_and_returns_what_is_wrong_with_the_input(
    source: Path, tmp_path: Path
) -> None:
    task = PartTask(
        3, "00003-key", str(tmp_path / "out"), COLUMNS, (JsonLines(str(source), COLUMNS),) * 2, {}
    )
    first, second = write_attempt(task), write_attempt(task)
    assert (first.number, first.samples, first.problem) == (3, 4, "")
    assert first.folder != second.folder
    assert [sample["id"] for sample in MDSDataset(tmp_path / "out" / second.folder)] == [1, 2, 1, 2]

    source.write_text("{")
    third = write_attempt(task)
    assert f"{source}, line 1 is not JSON" in third.problem
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == sorted([first.folder, second.folder])


def test_a_url_that_no_mount_shows_is_named(source: Path) -> None:
    task = PartTask(0, "00000-key", "s3://nobody/out", COLUMNS, (JsonLines(str(source), COLUMNS),), {})
    assert "s3://nobody/out: no mount of the node" in write_attempt(task).problem
