"""Writing by several, in several goes, and into one index: never a wrong one."""

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from loader import DatasetError, MDSDataset, MDSWriter, WriterError, merge
from loader.base.paths import natural_key
from loader.writing.parallel_writer import write_parallel
from loader.writing.shard_packer import OFFSET_LIMIT
from loader.writing.writer import ResumePoint
from tests.support import ROOT

COLUMNS = {"id": "int", "text": "str"}
STORED = [
    {},
    {"compression": "zstd"},
    {"hashes": ["xxh64"]},
    {"compression": "gz:1", "hashes": ["sha1"], "align": 64},
]


def samples(first: int, stop: int) -> Iterator[dict[str, Any]]:
    return ({"id": number, "text": "x" * (number % 50)} for number in range(first, stop))


def write(out: Path, first: int, stop: int, **options: Any) -> Path:
    with MDSWriter(out, COLUMNS, **{"size_limit": 2000, **options}) as writer:
        for sample in samples(first, stop):
            writer.write(sample)
    return out


def ids(directory: Path) -> list[int]:
    return [sample["id"] for sample in MDSDataset(directory)]


def files(directory: Path) -> dict[str, bytes]:
    return {str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*.*")}


# In several goes


KILLED = """
import os, signal, sys
from pathlib import Path
from tests.unit.loader.mds.test_writer import COLUMNS, samples
from loader import MDSWriter
writer = MDSWriter(sys.argv[1], COLUMNS, size_limit=2000, compression="zstd", resume=True)
for sample in samples(0, 500):
    writer.write(sample)
    if len(list(Path(sys.argv[1]).iterdir())) == 4:
        os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_killed_writer_is_gone_on_with_and_the_dataset_is_as_if_never_killed(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path / "out")], cwd=ROOT, check=False)
    assert done.returncode == -signal.SIGKILL
    with pytest.raises(DatasetError):
        MDSDataset(tmp_path / "out")
    with MDSWriter(tmp_path / "out", COLUMNS, size_limit=2000, compression="zstd", resume=True) as writer:
        assert 0 < writer.samples < 500
        for sample in samples(writer.samples, 500):
            writer.write(sample)
    assert files(tmp_path / "out") == files(write(tmp_path / "whole", 0, 500, compression="zstd"))


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def cut_within_the_header(path: Path) -> None:
    os.truncate(path, 5)


def empty(path: Path) -> None:
    os.truncate(path, 0)


def zeros(path: Path) -> None:
    path.write_bytes(bytes(path.stat().st_size))


def remove(path: Path) -> None:
    path.unlink()


@pytest.mark.parametrize("options", STORED, ids=str)
@pytest.mark.parametrize("harm", [cut, cut_within_the_header, empty, zeros, remove])
def test_what_is_not_whole_is_written_again(tmp_path: Path, harm: Any, options: dict[str, Any]) -> None:
    whole = write(tmp_path / "whole", 0, 300, **options)
    out = shutil.copytree(whole, tmp_path / "out")
    (out / "index.json").unlink()
    sizes = MDSDataset(whole).shard_sizes.tolist()
    harm(sorted(out.iterdir())[2])
    with MDSWriter(out, COLUMNS, size_limit=2000, resume=True, **options) as writer:
        assert writer.samples == sum(sizes[:2])
        for sample in samples(writer.samples, 300):
            writer.write(sample)
    assert files(out) == files(whole)


def test_a_last_shard_whose_samples_do_not_decode_is_written_again(tmp_path: Path) -> None:
    whole = write(tmp_path / "whole", 0, 300)
    out = shutil.copytree(whole, tmp_path / "out")
    (out / "index.json").unlink()
    last = sorted(out.iterdir())[-1]
    last.write_bytes(last.read_bytes()[:-100] + b"\xff" * 100)
    with MDSWriter(out, COLUMNS, size_limit=2000, resume=True) as writer:
        assert writer.samples == MDSDataset(whole).shard_sizes[:-1].sum()
        for sample in samples(writer.samples, 300):
            writer.write(sample)
    assert files(out) == files(whole)


def test_resuming_where_nothing_is_begins(tmp_path: Path) -> None:
    assert ids(write(tmp_path / "out", 0, 30, resume=True)) == list(range(30))


@pytest.mark.parametrize(
    "options",
    [{"size_limit": 3000}, {"hashes": ["sha1"]}, {"columns": {"id": "int", "text": "bytes"}}],
    ids=str,
)
def test_shards_of_other_settings_are_not_written_over(tmp_path: Path, options: dict[str, Any]) -> None:
    out = write(tmp_path / "out", 0, 300)
    (out / "index.json").unlink()
    before = files(out)
    with pytest.raises(WriterError, match="other settings"):
        MDSWriter(out, **{"columns": COLUMNS, "size_limit": 2000, "resume": True, **options})
    assert files(out) == before


def test_a_finished_dataset_is_not_resumed(tmp_path: Path) -> None:
    with pytest.raises(WriterError, match="holds a dataset already"):
        MDSWriter(write(tmp_path, 0, 5), COLUMNS, size_limit=2000, resume=True)


def test_progress_is_told_after_each_shard(tmp_path: Path) -> None:
    told: list[ResumePoint] = []
    write(tmp_path, 0, 300, compression="zstd", progress=told.append)
    entries = json.loads((tmp_path / "index.json").read_text())["shards"]
    assert [progress.shards for progress in told] == list(range(1, len(entries) + 1))
    assert told[-1] == ResumePoint(
        len(entries),
        300,
        sum(entry["raw_data"]["bytes"] for entry in entries),
        sum(path.stat().st_size for path in tmp_path.glob("shard.*")),
    )


@pytest.mark.parametrize("size_limit", ["", "64xb", "mb", "-1", "5gb", 1.5, "nan"])
def test_a_size_limit_that_is_none_is_an_error(tmp_path: Path, size_limit: Any) -> None:
    with pytest.raises(WriterError, match="size"):
        MDSWriter(tmp_path, COLUMNS, size_limit=size_limit)


def test_one_shard_for_all_ends_before_its_offsets_wrap(tmp_path: Path) -> None:
    writer = MDSWriter(tmp_path, COLUMNS, size_limit=None)
    writer.write({"id": 1, "text": "x"})
    writer._pending_bytes = OFFSET_LIMIT - 10  # as after 4 GiB of samples
    with pytest.raises(WriterError, match="set a size_limit"):
        writer.write({"id": 1, "text": "x"})


# By several


def part(first: int, stop: int) -> Iterator[dict[str, Any]]:
    return samples(first, stop)


def failing(first: int) -> Iterator[dict[str, Any]]:
    yield from samples(first, first + 5)
    yield {"id": "no number", "text": ""}


def test_several_processes_write_one_dataset_and_a_second_go_keeps_what_is_done(tmp_path: Path) -> None:
    sources = [partial(part, 0, 100), partial(part, 100, 100), partial(part, 100, 250)]
    told: list[tuple[int, int]] = []
    how: dict[str, Any] = {"processes": 2, "options": {"size_limit": 1000, "hashes": ["sha1"]}}
    with pytest.raises(Exception, match=r"out/00003: sample 5: column 'id'"):
        write_parallel(tmp_path / "out", COLUMNS, [*sources, partial(failing, 250)], **how)
    assert not (tmp_path / "out" / "index.json").exists()
    with pytest.raises(WriterError, match="not empty"):
        write_parallel(tmp_path / "out", COLUMNS, sources, **how)
    sources.append(partial(part, 250, 260))
    shutil.rmtree(tmp_path / "out" / "00002", ignore_errors=True)
    count = write_parallel(
        tmp_path / "out", COLUMNS, sources, resume=True, progress=lambda *args: told.append(args), **how
    )
    assert count == 260
    assert told[-1] == (4, 260)
    assert ids(tmp_path / "out") == list(range(260))
    assert MDSDataset(tmp_path / "out", check_hashes=True)[255]["id"] == 255


# Into one index


def test_parts_are_merged_in_natural_order_with_whole_relative_paths(tmp_path: Path) -> None:
    for number, name in enumerate(["1", "2", "10", "b/7", "b/30", "b/30/x"]):
        write(tmp_path / name, number * 10, number * 10 + 10)
    assert merge(tmp_path) == 6
    assert ids(tmp_path) == list(range(60))
    names = [
        shard["raw_data"]["basename"] for shard in json.loads((tmp_path / "index.json").read_text())["shards"]
    ]
    assert names[-2:] == ["b/30/shard.00000.mds", "b/30/x/shard.00000.mds"]


def test_names_sort_by_the_numbers_in_them() -> None:
    names = ["b", "a10", "a2/x", "a2", "10", "9", "a2/10", "a2/9", "01", "1"]
    assert sorted(names, key=natural_key) == ["01", "1", "9", "10", "a2", "a2/9", "a2/10", "a2/x", "a10", "b"]


def test_listed_parts_keep_their_order(tmp_path: Path) -> None:
    for number in range(3):
        write(tmp_path / str(number), number * 10, number * 10 + 10)
    merge(tmp_path, ["2", tmp_path / "0"])
    assert ids(tmp_path) == [*range(20, 30), *range(10)]


def test_a_merge_of_merges_names_each_shard_once(tmp_path: Path) -> None:
    for number in range(4):
        write(tmp_path / str(number // 2) / str(number), number * 10, number * 10 + 10)
    merge(tmp_path / "0")
    merge(tmp_path / "1")
    merge(tmp_path)
    assert ids(tmp_path) == list(range(40))
    with pytest.raises(WriterError, match=r"named twice: by 0/index.json and 0/1/index.json"):
        merge(tmp_path, ["0", "0/1"], replace=True)


def test_an_index_is_merged_over_only_if_told(tmp_path: Path) -> None:
    write(tmp_path / "0", 0, 10)
    merge(tmp_path)
    write(tmp_path / "1", 10, 20)
    with pytest.raises(WriterError, match="exists already"):
        merge(tmp_path)
    merge(tmp_path, replace=True)
    assert ids(tmp_path) == list(range(20))


def test_a_part_whose_writer_has_not_finished_is_not_left_out_without_a_word(tmp_path: Path) -> None:
    write(tmp_path / "0", 0, 10)
    (write(tmp_path / "1", 10, 20) / "index.json").unlink()
    with pytest.raises(WriterError, match=r"1/shard\.00000\.mds is in no index: its writer has not finished"):
        merge(tmp_path)


@pytest.mark.parametrize(("harm", "told"), [(remove, "but not there"), (cut, "its index says")])
def test_a_part_with_a_harmed_shard_is_not_merged(tmp_path: Path, harm: Any, told: str) -> None:
    write(tmp_path / "0", 0, 10)
    harm(tmp_path / "0" / "shard.00000.mds")
    with pytest.raises(WriterError, match=told):
        merge(tmp_path)
    assert not (tmp_path / "index.json").exists()


def test_a_part_elsewhere_or_none_is_an_error(tmp_path: Path) -> None:
    write(tmp_path / "elsewhere", 0, 10)
    (tmp_path / "root").mkdir()
    for parts in (["../elsewhere"], [tmp_path / "elsewhere"], ["."]):
        with pytest.raises(WriterError, match="does not lie below"):
            merge(tmp_path / "root", parts)
    with pytest.raises(WriterError, match="nothing to merge"):
        merge(tmp_path / "root")
