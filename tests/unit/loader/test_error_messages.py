"""What a user who is new here gets wrong is told with the object, the cause and a way out."""

import errno
import os
import re
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import DataLoader

from loader import (
    DatasetError,
    ElasticBatchSampler,
    EncodingError,
    Hints,
    LoaderError,
    MDSDataset,
    MDSWriter,
    OrderError,
    ParquetDataset,
    ShardError,
    StateError,
    TemplarDataset,
    World,
    WriterError,
    merge,
)
from loader.__main__ import main
from loader.base import paths as module
from loader.fast import Loader
from loader.mds.encodings import encoder
from loader.writing.copies import recompress, shuffle
from loader.writing.parallel_writer import write_parallel
from loader.writing.shard_packer import PackOptions

COLUMNS = {"id": "int", "text": "str"}


def write(out: Path, count: int = 64, columns: dict[str, str] | None = None, text: Any = "text") -> Path:
    with MDSWriter(out, columns or COLUMNS, size_limit=600) as writer:
        for number in range(count):
            writer.write({"id": number, "text": text})
    return out


def sampler_of(dataset: Any, batch: int = 8) -> ElasticBatchSampler:
    return ElasticBatchSampler(dataset, global_batch_size=batch, world=World())


def rows(first: int, stop: int) -> Iterator[dict[str, Any]]:
    return ({"id": number, "text": "text"} for number in range(first, stop))


def rows_then_none() -> Iterator[dict[str, Any]]:
    yield from rows(0, 3)
    raise ConnectionResetError("the source went away")


# Paths of other machines

TAKERS: dict[str, Callable[[Any], object]] = {
    "MDSWriter": lambda path: MDSWriter(path, COLUMNS),
    "write_parallel": lambda path: write_parallel(path, COLUMNS, [partial(rows, 0, 1)], processes=1),
    "merge": merge,
    "recompress": lambda path: recompress(".", path, PackOptions()),
    "recompress's source": lambda path: recompress(path, "out", PackOptions()),
    "shuffle": lambda path: shuffle(".", path, PackOptions(), seed=0),
    "shuffle's source": lambda path: shuffle(path, "out", PackOptions(), seed=0),
    "MDSDataset": MDSDataset,
    "a split": lambda path: MDSDataset(path, split="train"),
    "ParquetDataset": ParquetDataset,
    "TemplarDataset": TemplarDataset,
}


@pytest.mark.parametrize("path", ["s3://bucket/data", Path("s3://bucket/data"), "gs://bucket/data"])
@pytest.mark.parametrize("taker", TAKERS)
def test_an_address_is_never_taken_for_a_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, taker: str, path: str | Path
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(
        LoaderError, match=r"^(s3|gs)://bucket/data: .*Mount the bucket, and give its directory"
    ):
        TAKERS[taker](path)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "command",
    [
        ["ls", "s3://bucket/data"],
        ["merge", "s3://bucket/data"],
        ["convert", "jsonl", "s3://bucket/in.jsonl", "out"],
        ["convert", "jsonl", "in.jsonl", "s3://bucket/data"],
    ],
)
def test_the_tools_say_so_too(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    command: list[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(command) == 1
    assert "Mount the bucket, and give its directory" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_a_pair_of_directories_and_exist_ok_are_told_of(tmp_path: Path) -> None:
    out: Any = (str(tmp_path / "out"), "s3://bucket/data")
    with pytest.raises(LoaderError, match="give one directory, the loader uploads nothing"):
        MDSWriter(out=out, columns=COLUMNS)
    with pytest.raises(WriterError, match=r"exist_ok=True would remove all that is in .*/out"):
        MDSWriter(out=tmp_path / "out", columns=COLUMNS, exist_ok=True)
    assert not list(tmp_path.iterdir())
    with MDSWriter(out=tmp_path / "out", columns=COLUMNS, exist_ok=False) as writer:
        writer.write({"id": 1, "text": ""})


# A sampler and its dataset


@pytest.mark.parametrize("make", [Loader, Hints])
def test_a_sampler_of_another_dataset_is_refused_and_both_are_named(tmp_path: Path, make: Any) -> None:
    mine, other = MDSDataset(write(tmp_path / "mine")), MDSDataset(write(tmp_path / "other", 40))
    for dataset, sampler in ((mine, sampler_of(other)), (other, sampler_of(mine))):
        with pytest.raises(OrderError, match="made for another dataset") as caught:
            make(dataset, sampler)
        assert f"{tmp_path}/mine" in str(caught.value)
        assert f"{tmp_path}/other" in str(caught.value)
    with pytest.raises(OrderError, match="for 40 samples, not for MDSDataset"):
        make(mine, sampler_of(other.shard_sizes))


def test_a_sampler_of_the_same_samples_elsewhere_or_of_their_sizes_is_taken(tmp_path: Path) -> None:
    mine, copy = MDSDataset(write(tmp_path / "mine")), MDSDataset(write(tmp_path / "copy"))
    for sampler in (sampler_of(copy), sampler_of(copy.shard_sizes), sampler_of([64])):
        with Hints(mine, sampler):
            assert sum(len(batch["id"]) for batch in Loader(mine, sampler)) == 64


def test_a_state_of_another_dataset_names_the_one_at_hand_and_what_is_compared(tmp_path: Path) -> None:
    state = sampler_of(MDSDataset(write(tmp_path / "was"))).state_dict()
    with pytest.raises(StateError) as caught:
        sampler_of(MDSDataset(write(tmp_path / "now", 80))).load_state_dict(state)
    assert re.search(
        rf"another dataset than MDSDataset\('{tmp_path}/now': 80 samples .*\): names, sample counts, sizes or columns",
        str(caught.value),
    )
    with pytest.raises(StateError, match="belongs to another order: global_batch_size was 8 and is 16"):
        sampler_of(MDSDataset(tmp_path / "was"), batch=16).load_state_dict(state)


# Mounts that do not answer


@pytest.fixture
def mount(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that the kernel's list has as a mount of the daemon; its name has a blank."""
    root = tmp_path / "a mount"
    text = str(root).replace(" ", "\\040")
    mounts = tmp_path / "mountinfo"
    mounts.write_text(
        f"22 1 8:1 / / rw - ext4 /dev/root rw\n23 22 0:39 / {text} rw,nosuid - fuse.fusecache s3://bucket/ rw\n"
    )
    monkeypatch.setattr(module, "_MOUNTS", str(mounts))
    return root


@pytest.mark.parametrize(
    ("number", "told"),
    [
        (
            errno.ENOTCONN,
            "The daemon of the mount {root} is gone: run `fusecache status {root}`, and mount it again.",
        ),
        (errno.EIO, "The mount {root} or its bucket failed to deliver it: run `fusecache status {root}`."),
    ],
)
def test_a_mount_that_does_not_answer_is_no_damaged_shard(
    mount: Path, monkeypatch: pytest.MonkeyPatch, number: int, told: str
) -> None:
    def fail(*_: Any, **__: Any) -> Any:
        raise OSError(number, os.strerror(number))

    dataset = MDSDataset(write(mount / "data"))
    _ = dataset[0]
    told = told.format(root=mount)
    with monkeypatch.context() as broken:
        broken.setattr(os, "pread", fail)
        with pytest.raises(ShardError) as in_reading:
            _ = dataset[1]
    with monkeypatch.context() as broken:
        broken.setattr(os, "open", fail)
        with pytest.raises(ShardError) as in_opening:
            _ = dataset[63]
    for caught in (in_reading, in_opening):
        assert str(caught.value).endswith(f": {os.strerror(number)}. {told}")
    with monkeypatch.context() as broken:
        broken.setattr("builtins.open", fail)
        with pytest.raises(DatasetError) as in_index:
            MDSDataset(mount / "data")
    assert str(in_index.value).endswith(f"index.json cannot be read: {os.strerror(number)}. {told}")


def test_an_error_of_a_disk_is_still_the_shards(mount: Path) -> None:
    problem = OSError(errno.EIO, "Input/output error")
    assert not module.mount_advice(problem, mount.parent / "data/shard")
    assert not module.mount_advice(problem, f"{mount}s/data")
    assert not module.mount_advice(FileNotFoundError(errno.ENOENT, "no"), mount / "data")


@pytest.mark.parametrize(
    ("name", "written"), [(b"d\xc3\xbc", rb"d\303\274"), (b"d\xff", b"d\xff"), (b"a\rb", b"a\rb")]
)
def test_a_mount_is_named_whatever_bytes_its_path_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: bytes, written: bytes
) -> None:
    table = tmp_path / "mountinfo"
    folder = os.fsencode(tmp_path)
    table.write_bytes(b"23 22 0:39 / " + folder + b"/" + written + b" rw - fuse.fusecache s3://bucket/ rw\n")
    monkeypatch.setattr(module, "_MOUNTS", str(table))
    root = tmp_path / os.fsdecode(name)
    gone = OSError(errno.ENOTCONN, os.strerror(errno.ENOTCONN))
    assert module.mount_advice(gone, root / "data").startswith(f"The daemon of the mount {root} is gone")
    assert module.mounted_path("s3://bucket/data") == str(root / "data")


# What is no dataset


def test_parts_that_nobody_merged_and_parquet_files_are_told_of(tmp_path: Path) -> None:
    for name in ("a", "b"):
        write(tmp_path / name)
    with pytest.raises(
        DatasetError, match=rf"there is a, b; if .* `fusecache dataset merge {tmp_path}` makes one"
    ):
        MDSDataset(tmp_path)
    (tmp_path / "web").mkdir()
    (tmp_path / "web/0.parquet").touch()
    with pytest.raises(DatasetError, match=rf"Parquet files, which ParquetDataset\('{tmp_path}/web'\) reads"):
        MDSDataset(tmp_path / "web")
    with pytest.raises(DatasetError, match=r"\*\.parquet: .*Patterns are not expanded: give the directory"):
        ParquetDataset(f"{tmp_path}/web/*.parquet")
    with pytest.raises(DatasetError, match=rf"{tmp_path}/a/index\.json is a file: give the directory"):
        MDSDataset(tmp_path / "a/index.json")


def test_a_merge_of_parts_with_other_columns_is_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write(tmp_path / "a")
    write(tmp_path / "b", columns={"id": "int", "text": "json"})
    write(tmp_path / "c")
    merge(tmp_path)
    assert [record.message.partition(". ")[0] for record in caplog.records] == [
        "b has other columns than a: text is json, not str"
    ]


# Sources


def test_an_error_of_a_source_names_its_part_and_how_many_samples_came_before_it(tmp_path: Path) -> None:
    with pytest.raises(ConnectionResetError) as caught:
        write_parallel(tmp_path, COLUMNS, [partial(rows, 0, 9), rows_then_none], processes=1)
    (note,) = caught.value.__notes__
    assert re.fullmatch(
        rf"{tmp_path}/00001: the source <function rows_then_none.*> .* after its first 3 samples", note
    )


def test_a_source_that_no_other_process_can_have_is_named(tmp_path: Path) -> None:
    with pytest.raises(WriterError, match=r"source 1, <function .*<lambda>.*: give a function of a module"):
        write_parallel(tmp_path / "out", COLUMNS, [partial(rows, 0, 9), lambda: rows(0, 9)], processes=2)
    assert not list(tmp_path.iterdir())


# Loaders


def test_batches_in_the_place_of_ids_are_told_of(tmp_path: Path) -> None:
    dataset = MDSDataset(write(tmp_path))
    with pytest.raises(
        IndexError, match="give a batch sampler to the DataLoader as batch_sampler=, not as sampler="
    ):
        next(iter(DataLoader(dataset, sampler=sampler_of(dataset))))  # type: ignore[arg-type]


def test_a_loader_without_a_sampler_and_one_that_is_closed_are_told_of(tmp_path: Path) -> None:
    dataset = MDSDataset(write(tmp_path))
    sampler: Any = 16
    with pytest.raises(LoaderError, match=r"takes a sampler, .*ElasticBatchSampler\(dataset, .*not 16"):
        Loader(dataset, sampler)
    loader = Loader(dataset, sampler_of(dataset))
    batches = iter(loader)
    next(batches)
    loader.close()
    with pytest.raises(LoaderError, match="the loader was closed"):
        next(batches)


# Values


def test_a_value_that_is_no_image_is_told_of_by_its_bytes(tmp_path: Path) -> None:
    out = write(tmp_path, 1, {"id": "int", "text": "bytes"}, b"no image at all")
    # The writer checks images, so an unchecked column becomes one of images.
    index = out / "index.json"
    index.write_text(index.read_text().replace('["int", "bytes"]', '["int", "jpeg"]'))
    dataset = MDSDataset(out)
    with pytest.raises(
        ShardError,
        match=r"'text' does not decode: its 15 bytes are not an image that PIL can read: they begin",
    ):
        _ = dataset[0]


def test_kinds_have_their_article() -> None:
    for value, told in ((1, "an int is not text"), (b"", "a bytes is not text"), ([], "a list is not text")):
        with pytest.raises(EncodingError, match=told):
            encoder("str")(value)
