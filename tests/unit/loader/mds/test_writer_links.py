"""A dataset is written through no symlink in its directory. On a mount, another client may put one there."""

import os
import subprocess
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest

from loader import MDSDataset, MDSWriter, WriterError
from loader.streaming import MDSWriter as StreamingMDSWriter
from loader.writing.parallel_writer import write_parallel

COLUMNS = {"id": "int"}
NOT_FOLLOWED = "it is a symlink, which is not followed"


@pytest.fixture
def victim(tmp_path: Path) -> Path:
    """A file outside that nothing may touch."""
    path = tmp_path / "victim"
    path.write_text("good")
    return path


def rows() -> Iterable[Mapping[str, Any]]:
    """Return samples for two shards."""
    return [{"id": number} for number in range(100)]


def write(out: str | Path, **options: Any) -> None:
    rest = iter(rows())
    with MDSWriter(out, COLUMNS, size_limit=600, **options) as writer:
        writer.skip_written(rest)
        for row in rest:
            writer.write(row)


@pytest.mark.parametrize("name", ["shard.00000.mds", "shard.00001.mds", "index.json.tmp"])
def test_no_file_is_written_through_a_link(tmp_path: Path, victim: Path, name: str) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / name).symlink_to(victim)
    with pytest.raises(OSError, match=NOT_FOLLOWED):
        write(out, resume=True)
    assert victim.read_text() == "good"
    (out / name).unlink()
    write(out, resume=True)
    assert len(MDSDataset(out)) == 100


def test_a_directory_that_becomes_a_link_is_not_followed(tmp_path: Path) -> None:
    out, elsewhere = tmp_path / "out", tmp_path / "elsewhere"
    elsewhere.mkdir()
    writer = MDSWriter(out, COLUMNS)
    writer.write({"id": 1})
    os.rename(out, tmp_path / "moved")
    out.symlink_to(elsewhere)
    with pytest.raises(OSError, match=NOT_FOLLOWED):
        writer.close()
    assert os.listdir(elsewhere) == []


def test_an_output_that_the_user_named_by_a_link_is_fine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "out").symlink_to("disk")
    monkeypatch.chdir(tmp_path)
    write("out")
    assert len(MDSDataset(tmp_path / "disk")) == 100


def test_the_part_of_another_process_is_written_through_no_link(tmp_path: Path, victim: Path) -> None:
    out, elsewhere = tmp_path / "out", tmp_path / "elsewhere"
    out.mkdir()
    elsewhere.mkdir()
    (out / "00001").symlink_to(elsewhere)
    with pytest.raises(WriterError, match=NOT_FOLLOWED):
        write_parallel(out, COLUMNS, [rows, rows], processes=1, resume=True)
    assert os.listdir(elsewhere) == []
    (out / "00001").unlink()
    (out / "index.json.tmp").symlink_to(victim)
    with pytest.raises(OSError, match=NOT_FOLLOWED):
        write_parallel(out, COLUMNS, [rows, rows], processes=1, resume=True)
    assert victim.read_text() == "good"


def test_the_copy_of_a_streaming_writer_is_written_through_no_link(tmp_path: Path, victim: Path) -> None:
    local = tmp_path / "local"
    writer = StreamingMDSWriter(columns=COLUMNS, out=(str(local), str(tmp_path / "remote")), keep_local=True)
    (local / "shard.00000.mds").symlink_to(victim)
    writer.write({"id": 1})
    with pytest.raises(OSError, match=NOT_FOLLOWED):
        writer.close()
    assert victim.read_text() == "good"


@pytest.mark.parametrize("name", ["_inputs.json.tmp", "index.json.tmp"])
def test_a_conversion_says_in_one_line_which_link_is_in_the_way(
    tmp_path: Path, victim: Path, name: str
) -> None:
    (tmp_path / "rows.jsonl").write_text('{"id": 1}\n{"id": 2}\n')
    out = tmp_path / "out"
    out.mkdir()
    (out / name).symlink_to(victim)
    words = ["convert", "jsonl", "rows.jsonl", "out", "--columns", "id:int", "--resume"]
    done = subprocess.run(
        [sys.executable, "-m", "loader", *words], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert f"{name}: {NOT_FOLLOWED}" in done.stderr
    assert "Traceback" not in done.stderr
    assert victim.read_text() == "good"
