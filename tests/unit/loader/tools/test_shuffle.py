"""`fusecache dataset convert shuffle`: the same samples, all in a random order, which a seed gives."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from loader import MDSDataset, MDSWriter
from loader.__main__ import main
from loader.writing.copies import shuffle
from loader.writing.shard_packer import PackOptions

COUNT = 2000


def run(*arguments: object) -> int:
    return main([str(argument) for argument in arguments])


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dataset of samples in order, of many sizes."""
    folder = tmp_path_factory.mktemp("source") / "data"
    with MDSWriter(folder, {"id": "int", "text": "str"}, size_limit=2000) as writer:
        for number in range(COUNT):
            writer.write(sample(number))
    return folder


def sample(number: int) -> dict[str, Any]:
    return {"id": number, "text": "x" * (number % 37)}


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_all_samples_come_once_in_another_order_that_the_seed_gives(source: Path, tmp_path: Path) -> None:
    for name, seed in (("one", 7), ("same", 7), ("other", 8)):
        assert run("convert", "shuffle", source, tmp_path / name, "--seed", seed, "--size-limit", 2000) == 0
    orders = {name: [each["id"] for each in MDSDataset(tmp_path / name)] for name in ("one", "same", "other")}
    assert sorted(orders["one"]) == sorted(orders["other"]) == list(range(COUNT))
    assert list(MDSDataset(tmp_path / "one")) == [sample(number) for number in orders["one"]]
    assert files(tmp_path / "one") == files(tmp_path / "same")
    assert orders["one"] != orders["other"]


def test_samples_that_were_neighbours_come_to_places_all_over_the_dataset(
    source: Path, tmp_path: Path
) -> None:
    shuffle(source, tmp_path / "out", PackOptions(size_limit=2000), seed=3)
    order = np.array([each["id"] for each in MDSDataset(tmp_path / "out")])
    places = np.argsort(order)
    # Of two random places the distance is a third of the dataset on average.
    assert np.abs(np.diff(places)).mean() == pytest.approx(COUNT / 3, rel=0.05)


def test_the_order_does_not_depend_on_scratch_files_or_on_the_compression(
    source: Path, tmp_path: Path
) -> None:
    for number, nbytes in enumerate((1, 5_000, 1 << 30)):
        shuffle(
            source, tmp_path / str(number), PackOptions(size_limit=2000), seed=5, scratch_file_bytes=nbytes
        )
    assert files(tmp_path / "0") == files(tmp_path / "1") == files(tmp_path / "2")
    how = ("--compression", "zstd:3", "--hashes", "xxh64")
    assert run("convert", "shuffle", source, tmp_path / "packed", "--seed", 5, *how) == 0
    packed = MDSDataset(tmp_path / "packed", check_hashes=True)
    assert list(packed) == list(MDSDataset(tmp_path / "0"))


def test_nothing_is_left_in_the_scratch_folder(source: Path, tmp_path: Path) -> None:
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    seen: list[int] = []
    shuffle(
        source, tmp_path / "out", PackOptions(), seed=1, scratch=scratch,
        progress=lambda _: seen.append(len(list(scratch.glob("*/*")))),
    )  # fmt: skip
    assert max(seen) > 0
    assert not list(scratch.iterdir())


def test_what_cannot_be_shuffled_is_named(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mixed = tmp_path / "mixed"
    for part, columns in (("a", {"id": "int"}), ("b", {"text": "str"})):
        with MDSWriter(mixed / part, columns) as writer:
            writer.write({name: 1 if kind == "int" else "x" for name, kind in columns.items()})
    assert run("merge", mixed) == 0
    capsys.readouterr()
    for given, out, options, told in (
        (mixed, "new", (), "its shards have 2 different sets of columns"),
        (source, source, (), "lies in"),
        (source, source / "new", (), "lies in"),
        (
            source,
            "new",
            ("--scratch", tmp_path / "absent"),
            "absent: No such file or directory; shuffling needs",
        ),
        (source, "new", ("--seed", "-1"), "seed -1"),
    ):
        assert run("convert", "shuffle", given, tmp_path / out, *options) == 1
        assert told in capsys.readouterr().err


def test_a_harmed_source_leaves_no_index(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    harmed = tmp_path / "harmed"
    harmed.mkdir()
    for name, data in files(source).items():
        (harmed / name).write_bytes(data)
    gone = json.loads((harmed / "index.json").read_text())["shards"][2]["raw_data"]["basename"]
    (harmed / gone).unlink()
    assert run("convert", "shuffle", harmed, tmp_path / "out") == 1
    assert gone in capsys.readouterr().err
    assert not (tmp_path / "out" / "index.json").exists()


def test_what_an_unfinished_shuffle_left_is_named_without_an_option_that_there_is_not(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "shard.00000.mds").touch()
    assert run("convert", "shuffle", source, tmp_path / "out") == 1
    told = capsys.readouterr().err
    assert "out holds shard.00000.mds, which an unfinished run left: choose another directory" in told
    assert "--resume" not in told
