"""Datasets written onto the mount by our MDSWriter: case 54, an index never names a shard that is not there."""

import json
import shutil
import subprocess
import sys
from typing import TYPE_CHECKING

import numpy
import pytest

from loader import MDSDataset, MDSWriter, merge
from tests.trainers.checks import assert_last, assert_tidy
from tests.trainers.kills import SLEEPY, Found, Kills
from tests.trainers.workers import ROOT

if TYPE_CHECKING:
    from tests.support.mounts import Mount

SAMPLES = 200
COLUMNS = {"tokens": "ndarray:int32:1024"}
WRITE = f"""
import sys
import numpy
from loader.writing.writer import MDSWriter
with MDSWriter(sys.argv[1], {{"tokens": "ndarray:int32:1024"}}, size_limit=200_000) as writer:
    for index in range({SAMPLES}):
        writer.write({{"tokens": numpy.full(1024, index, "int32")}})
        if index % 50 == 0:
            print(index, flush=True)
            sys.stdin.readline()
"""


def start_writer(path: object) -> "subprocess.Popen[str]":
    """Start a program that writes a dataset; it wants a line now and then."""
    return subprocess.Popen(
        [sys.executable, "-c", WRITE, str(path)],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )


def write_dataset(path: object) -> None:
    with start_writer(path) as writer:
        writer.communicate("\n" * SAMPLES)
        assert writer.returncode == 0


def resume_dataset(path: object) -> None:
    """Go on behind the whole shards."""
    with MDSWriter(path, COLUMNS, size_limit=200_000, resume=True) as writer:
        assert writer.samples > 0
        for index in range(writer.samples, SAMPLES):
            writer.write({"tokens": numpy.full(1024, index, "int32")})


def assert_right(path: object) -> None:
    """Read the whole dataset."""
    dataset = MDSDataset(path)
    assert len(dataset) == SAMPLES
    assert all((dataset[index]["tokens"] == index).all() for index in range(SAMPLES))


def missing_shards(found: Found) -> list[str]:
    """Return the shards that the index names and the bucket lacks, or has with another size; none without an index."""
    files = found.below("data")
    if "index.json" not in files:
        return []
    shards = [shard["raw_data"] for shard in json.loads(files["index.json"])["shards"]]
    return [each["basename"] for each in shards if len(files.get(each["basename"], b"")) != each["bytes"]]


@pytest.mark.case(54)
def test_a_node_killed_at_any_request_leaves_no_index_that_names_a_missing_shard(mount, bucket, kills: Kills):
    node: Mount = mount(*SLEEPY)
    write_dataset(node.path / "data")
    with_index = 0
    for found in kills.at_every_request(kills.freeze(node), "data"):
        assert missing_shards(found) == [], found.request
        with_index += "data/index.json" in found.files
    assert kills.count >= 5  # four shards and the index
    assert with_index > 0
    assert_last(bucket, "index.json", "data")
    assert_tidy(bucket)
    assert_right(mount().path / "data")


@pytest.mark.case(54)
@pytest.mark.parametrize(("lines", "resume"), [(1, False), (3, False), (3, True)])
def test_a_node_killed_while_a_dataset_is_written_leaves_no_index_and_it_can_be_written_again(
    mount, bucket, expect_log, lines: int, *, resume: bool
):
    expect_log("recovered files=|quarantined")
    node: Mount = mount()
    with start_writer(node.path / "data") as writer:
        assert writer.stdin is not None
        assert writer.stdout is not None
        for _ in range(lines):
            writer.stdout.readline()
            writer.stdin.write("\n")
            writer.stdin.flush()
        writer.stdout.readline()
        node.kill()
        writer.communicate("\n" * SAMPLES)
        assert writer.returncode != 0
    again: Mount = mount(cache=node.cache)
    again.sync()
    shards = [name for name in bucket.names() if name.endswith(".mds")]
    assert len(shards) >= lines
    assert "data/index.json" not in bucket.names()
    if resume:
        resume_dataset(again.path / "data")
    else:
        shutil.rmtree(again.path / "data")  # a new writer takes no folder with another's shards
        write_dataset(again.path / "data")
    again.sync()
    assert_right(mount().path / "data")


def test_parts_that_two_nodes_wrote_are_merged_by_a_third(mount, bucket):
    halves = ((0, SAMPLES // 2), (SAMPLES // 2, SAMPLES))
    for part, (first, stop) in enumerate(halves):
        node: Mount = mount()
        with MDSWriter(node.path / "data" / str(part), COLUMNS, size_limit=200_000) as writer:
            for index in range(first, stop):
                writer.write({"tokens": numpy.full(1024, index, "int32")})
        node.sync()
    third: Mount = mount()
    assert merge(third.path / "data") == sum(name.endswith(".mds") for name in bucket.names())
    third.sync()
    assert_right(mount().path / "data")
