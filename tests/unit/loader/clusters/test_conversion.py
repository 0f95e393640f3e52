"""Conversions on a cluster, as far as they go without one: refusals, the files of a part, one attempt."""

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fusecache.installation import extra_command
from loader import LoaderError, MDSDataset, convert
from loader.__main__ import main
from loader.tools.row_sources import ArrowRows, CsvRows, JsonLines, ParquetRows
from loader.tools.tar_rows import TarRows
from loader.writing.clusters import ENGINES, RECORD_NAME, Attempt, PartTask, _file_counts, write_attempt

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
        f"--engine {engine} needs the package {MODULES[engine].partition('.')[0]}: {extra_command(engine)}"
    ]
    assert not out.exists()


def test_what_cannot_work_is_refused(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    with pytest.raises(LoaderError, match="the engines are local, ray, spark"):
        convert("jsonl", [source], out, engine="dask")
    with pytest.raises(LoaderError, match="only local has processes"):
        convert("jsonl", [source], out, engine="ray", processes=2)
    with pytest.raises(
        LoaderError, match="kind 'xml': it is jsonl, csv, parquet, huggingface, tar, webdataset, or text"
    ):
        convert("xml", [source], out)
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


class Here:
    """An engine that writes the parts in this process, one after the other, up to `stops_before` (all if None)."""

    def __init__(self) -> None:
        self.stops_before: int | None = None
        self.tasks: list[PartTask] = []

    def __call__(self, tasks: Sequence[PartTask]) -> Iterator[Attempt]:
        self.tasks = list(tasks)
        for task in tasks:
            if task.number == self.stops_before:
                raise KeyboardInterrupt
            yield write_attempt(task)


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> Here:
    engine = Here()
    monkeypatch.setitem(ENGINES, "here", lambda: engine)
    return engine


@pytest.mark.usefixtures("here")
def test_an_input_that_is_missing_is_named_before_anything_is_written(source: Path, tmp_path: Path) -> None:
    with pytest.raises(
        LoaderError, match=r"none\.jsonl cannot be read: No such file or directory: .*all nodes"
    ):
        convert("jsonl", [source, tmp_path / "none.jsonl"], tmp_path / "out", columns=COLUMNS, engine="here")
    assert not (tmp_path / "out").exists()


def test_a_late_worker_of_an_earlier_run_gives_no_part_of_files_that_were_mended(
    here: Here, tmp_path: Path
) -> None:
    files = [tmp_path / f"{number}.jsonl" for number in range(2)]
    for number, file in enumerate(files):
        file.write_text(f'{{"id": {number}}}\n')

    def run(*, resume: bool) -> int:
        return convert(
            "jsonl", files, tmp_path / "out", columns=COLUMNS, engine="here", resume=resume, size_limit=100
        )

    for file in files:  # each is a part
        file.write_text(file.read_text() * 20)
    here.stops_before = 0
    with pytest.raises(KeyboardInterrupt):
        run(resume=False)
    late = here.tasks[1]
    assert late.number == 1
    before = files[1].read_text()
    files[1].write_text('{"id": 5}\n' * 30)
    with pytest.raises(KeyboardInterrupt):
        run(resume=True)
    mended = files[1].read_text()
    files[1].write_text(before)  # what the late worker read
    assert write_attempt(late).samples == 20
    files[1].write_text(mended)

    here.stops_before = None
    assert run(resume=True) == 50
    assert [sample["id"] for sample in MDSDataset(tmp_path / "out")] == [0] * 20 + [5] * 30


def test_a_late_worker_gives_no_part_of_other_files_of_the_same_number(here: Here, tmp_path: Path) -> None:
    """Its files were dealt otherwise, as one of them had another size."""
    files = [tmp_path / f"{number}.jsonl" for number in range(3)]
    for number, file in enumerate(files):
        file.write_text(f'{{"id": {number}}}\n' * (1 if number else 20))
    how = {"columns": COLUMNS, "engine": "here", "size_limit": 100}
    here.stops_before = 0
    with pytest.raises(KeyboardInterrupt):
        convert("jsonl", files, tmp_path / "out", **how)
    late = here.tasks[1]
    assert len(late.sources) == 2
    files[1].write_text('{"id": 1}\n' * 20)
    with pytest.raises(KeyboardInterrupt):
        convert("jsonl", files, tmp_path / "out", resume=True, **how)
    files[1].write_text('{"id": 1}\n')
    assert write_attempt(late).samples == 2
    files[1].write_text('{"id": 1}\n' * 20)
    here.stops_before = None
    assert convert("jsonl", files, tmp_path / "out", resume=True, **how) == 41
    assert [sample["id"] for sample in MDSDataset(tmp_path / "out")] == [0] * 20 + [1] * 20 + [2]


def test_complete_parts_stay_if_a_file_of_another_part_is_mended_and_are_refused_if_theirs_changed(
    here: Here, tmp_path: Path
) -> None:
    files = [tmp_path / f"{number}.jsonl" for number in range(2)]
    files[0].write_text('{"id": 0}\n' * 20)
    files[1].write_text('{"id": 1}\n' * 20 + "{")
    how = {"columns": COLUMNS, "engine": "here", "size_limit": 100}
    with pytest.raises(LoaderError, match="line 21 is not JSON"):
        convert("jsonl", files, tmp_path / "out", **how)
    (kept,) = (tmp_path / "out").glob("00000-*")
    files[1].write_text('{"id": 1}\n' * 20)
    files[0].write_text('{"id": 0}\n' * 21)
    with pytest.raises(LoaderError, match=f"{kept}: its files changed: remove it"):
        convert("jsonl", files, tmp_path / "out", resume=True, **how)
    files[0].write_text('{"id": 0}\n' * 20)
    assert convert("jsonl", files, tmp_path / "out", resume=True, **how) == 40
    assert [path.name for path in (tmp_path / "out").glob("00000-*")] == [kept.name]
    assert [task.number for task in here.tasks] == [1]


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize("name", ["out[1]", "what?", "all*/out"])
def test_a_path_that_reads_as_a_pattern_is_refused_before_anything_is_written(
    source: Path, tmp_path: Path, name: str
) -> None:
    with pytest.raises(LoaderError, match=r"a path with .* choose another directory"):
        convert("jsonl", [source], tmp_path / name, columns=COLUMNS, engine="here")
    assert list(tmp_path.iterdir()) == [source]


@pytest.mark.parametrize("kind", ["jsonl", "csv", "parquet", "huggingface", "tar"])
def test_trouble_of_one_node_is_raised_so_that_another_node_tries_again(tmp_path: Path, kind: str) -> None:
    """Its input is not there, as on a node without the mount."""
    sources = {
        "jsonl": JsonLines(str(tmp_path / "none.jsonl"), COLUMNS),
        "tar": TarRows(str(tmp_path / "none.tar"), COLUMNS),
        "csv": CsvRows(str(tmp_path / "none.csv"), COLUMNS),
        "huggingface": ArrowRows(str(tmp_path / "none.arrow"), COLUMNS),
        "parquet": ParquetRows(str(tmp_path / "none.parquet"), COLUMNS),
    }
    task = PartTask(0, "00000-key", str(tmp_path / "out"), sources[kind].columns, (sources[kind],), {})
    with pytest.raises(LoaderError, match=r"none\."):
        write_attempt(task)
    assert list((tmp_path / "out").iterdir()) == []


def test_a_packed_file_that_is_damaged_is_no_trouble_of_the_node(tmp_path: Path) -> None:
    (tmp_path / "in.jsonl.gz").write_bytes(b"no gzip")
    source = JsonLines(str(tmp_path / "in.jsonl.gz"), COLUMNS)
    task = PartTask(0, "00000-key", str(tmp_path / "out"), COLUMNS, (source,), {})
    assert "it is damaged" in write_attempt(task).problem


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize(
    "text", ["{", "[]", "{}", '{"settings": {}, "sizes": [1], "counts": [1]}', '{"settings": 1}']
)
def test_a_damaged_record_is_named_with_the_way_out(source: Path, tmp_path: Path, text: str) -> None:
    out = tmp_path / "out"
    assert convert("jsonl", [source], out, columns=COLUMNS, engine="here") == 2
    (out / RECORD_NAME).write_text(text)
    with pytest.raises(
        LoaderError, match=rf"{out / RECORD_NAME} is damaged .*: choose another directory, or remove"
    ):
        convert("jsonl", [source], out, columns=COLUMNS, engine="here", resume=True)
    assert len(MDSDataset(out)) == 2
