"""The MDSWriter of loader.streaming takes what MosaicML's takes, and does with it what that does."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import loader
from loader import LoaderError
from loader.streaming import MDSWriter, StreamingDataset
from loader.writing import streaming_writer
from tests.support.real_streaming import import_streaming

COLUMNS = {"id": "int", "text": "str"}


def fill(writer: Any, count: int = 60) -> None:
    with writer:
        for number in range(count):
            writer.write({"id": number, "text": "x" * number})


def files(directory: Path) -> dict[str, bytes]:
    return (
        {path.name: path.read_bytes() for path in sorted(directory.iterdir())} if directory.exists() else {}
    )


@pytest.mark.parametrize("keep_local", [False, True])
@pytest.mark.parametrize("pair", [False, True])
@pytest.mark.parametrize("compression", [None, "zstd:3"])
def test_files_lie_where_the_librarys_writer_puts_them(
    tmp_path: Path, *, keep_local: bool, pair: bool, compression: str | None
) -> None:
    found = []
    for writer_class, name in ((MDSWriter, "ours"), (import_streaming().MDSWriter, "theirs")):
        local, remote = tmp_path / name / "local", tmp_path / name / "remote"
        writer = writer_class(
            columns=COLUMNS,
            out=(str(local), str(remote)) if pair else str(local),
            keep_local=keep_local,
            compression=compression,
            hashes=["sha1"],
            size_limit="1kb",
            progress_bar=False,
            max_workers=2,
            retry=3,
            exist_ok=True,
        )
        fill(writer)
        found.append((files(local), files(remote)))
    assert found[0] == found[1]
    assert sum(len(each) > 1 for each in found[0]) == 1 + (pair and keep_local)


def test_a_directory_with_files_is_refused_or_emptied(tmp_path: Path) -> None:
    local = tmp_path / "local"
    (local / "folder").mkdir(parents=True)
    (local / "folder/file").write_text("old")
    (local / "link").symlink_to(tmp_path)
    for writer_class in (MDSWriter, import_streaming().MDSWriter):
        with pytest.raises(FileExistsError, match="not empty"):
            writer_class(columns=COLUMNS, out=str(local))
    fill(MDSWriter(columns=COLUMNS, out=str(local), exist_ok=True))
    assert sorted(files(local)) == ["index.json", "shard.00000.mds"]
    assert tmp_path.exists()
    with pytest.raises(FileExistsError, match="holds a dataset already"):
        MDSWriter(columns=COLUMNS, out=(str(tmp_path / "new"), str(local)))


def test_a_url_is_written_on_the_mount_that_shows_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(LoaderError, match=r"s3://b/x: .*Mount it with `fusecache mount s3://b/x DIRECTORY`"):
        MDSWriter(columns=COLUMNS, out="s3://b/x")
    monkeypatch.setattr(streaming_writer, "mounted_path", {"s3://b/x": str(tmp_path / "mount/x")}.get)
    local = tmp_path / "local"
    fill(MDSWriter(columns=COLUMNS, out=(str(local), "s3://b/x")))
    assert sorted(files(tmp_path / "mount/x")) == ["index.json", "shard.00000.mds"]
    assert files(local) == {}


def test_an_exception_leaves_no_index(tmp_path: Path) -> None:
    out = tmp_path / "local", tmp_path / "remote"
    with (
        pytest.raises(ZeroDivisionError),
        MDSWriter(columns=COLUMNS, out=(str(out[0]), str(out[1])), keep_local=True) as writer,
    ):
        writer.write({"id": 1 // 0, "text": ""})
    assert all("index.json" not in files(each) for each in out)


# What the library raises where; ours is of the same kind, and a LoaderError.
MISTAKES: list[tuple[type[Exception], Any]] = [
    (ValueError, {"compression": "zst"}),
    (ValueError, {"hashes": ["sha9"]}),
    (ValueError, {"size_limit": 1 << 32}),
    (ValueError, {"shufle": 1}),
    (ValueError, {"out": ("a", "b", "c")}),
    (TypeError, {"columns": {"id": "integer"}}),
]


@pytest.mark.parametrize(("kind", "options"), MISTAKES)
def test_mistakes_are_of_the_librarys_kinds(tmp_path: Path, kind: type[Exception], options: Any) -> None:
    for writer_class in (MDSWriter, import_streaming().MDSWriter):
        with pytest.raises(kind) as raised:
            writer_class(**{"columns": COLUMNS, "out": str(tmp_path / writer_class.__module__), **options})
        assert isinstance(raised.value, LoaderError) == (writer_class is MDSWriter)


@pytest.mark.parametrize(
    ("kind", "sample"),
    [
        (AttributeError, {"id": 1, "text": 2}),
        (KeyError, {"id": 1}),
        (ValueError, {"id": 1, "text": "", "array": "wrong shape"}),
    ],
)
def test_values_that_do_not_fit_are_of_the_librarys_kinds(
    tmp_path: Path, kind: type[Exception], sample: dict[str, Any]
) -> None:
    columns = dict(COLUMNS)
    if "array" in sample:
        columns["array"] = "ndarray:int32:3"
        sample = sample | {"array": np.zeros(4, np.int32)}
    for writer_class in (MDSWriter, import_streaming().MDSWriter):
        writer = writer_class(columns=columns, out=str(tmp_path / writer_class.__module__))
        with pytest.raises(kind) as raised:
            writer.write(sample)
        assert "the sample" in str(raised.value) or kind is not KeyError or writer_class is not MDSWriter
        assert not str(raised.value).startswith('"') or writer_class is not MDSWriter


def test_orig_is_the_same_order_and_refuses_nodes_that_do_not_fit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(MDSWriter(columns=COLUMNS, out=str(tmp_path / "data"), size_limit=1024))
    options: dict[str, Any] = {"local": str(tmp_path / "data"), "batch_size": 4, "shuffle": True}
    orders = [
        [sample["id"] for sample in StreamingDataset(**options, partition_algo=algo)]
        for algo in ("orig", "relaxed")
    ]
    assert orders[0] == orders[1]
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "3"), ("LOCAL_WORLD_SIZE", "1")):
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match="4 canonical nodes and 3 nodes divide each other"):
        StreamingDataset(**options, partition_algo="orig", num_canonical_nodes=4)
    with pytest.raises(ValueError, match="partition_algo 'other' is unknown"):
        StreamingDataset(**options, partition_algo="other")


def test_the_loader_tells_its_version() -> None:
    assert loader.__version__.count(".") >= 2
