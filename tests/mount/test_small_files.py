"""Directories of small files: one GET a file and no HEAD, ahead of who reads them in order, none for others."""

import os
import random
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.s3server import Fault, FaultAction, LogEntry
from tests.support.mounts import Mount, run
from tests.support.s3_buckets import Bucket

pytestmark = pytest.mark.s3server_only


def _content(name: str) -> bytes:
    return name.encode() * 700


Files = Callable[[int], tuple[Bucket, Mount, list[str]]]


@pytest.fixture
def files(mount: Callable[[], Mount], bucket: Bucket) -> Files:
    """Mount a bucket with so many files, which takes a while to send one: the bucket, its mount, the names in order."""

    def make(count: int) -> tuple[Bucket, Mount, list[str]]:
        names = _fill(bucket, count)
        return bucket, mount(), names

    return make


def _fill(bucket: Bucket, count: int) -> list[str]:
    names = [f"image{number:05}.jpg" for number in range(count)]
    for name in names:
        bucket.put(name, _content(name))
    bucket.control.faults(Fault(FaultAction.DELAY, operation="GetObject", seconds=0.02))
    return names


def _check(path: Path, names: list[str]) -> None:
    """Read files and compare them."""
    for name in names:
        assert (path / name).read_bytes() == _content(name), name


def _most_at_once(entries: list[LogEntry]) -> int:
    """Return how many requests were in progress at the busiest moment."""
    moments = [(entry.time, 1) for entry in entries] + [(entry.time + entry.seconds, -1) for entry in entries]
    running = most = 0
    for _, change in sorted(moments):
        running += change
        most = max(most, running)
    return most


def _check_one_get_each(bucket: Bucket, one: Mount, names: list[str]) -> list[LogEntry]:
    """One GET a file; a second one only where the first was silent for so long that it was given up."""
    gets = bucket.requests("GetObject")
    asked = Counter(entry.key.rpartition("/")[2] for entry in gets)
    assert asked.keys() == set(names)
    assert len(gets) - len(names) <= one.status()["cache"]["stalls"]
    assert not bucket.requests("HeadObject")
    return gets


def test_files_read_in_order_by_one_thread_come_several_at_once(files: Files):
    bucket, one, names = files(300)
    _check(one.path, sorted(os.listdir(one.path)))
    gets = _check_one_get_each(bucket, one, names)
    assert _most_at_once(gets) > 4


def test_files_read_in_order_by_threads_that_share_a_list_come_ahead_of_them(files: Files):
    bucket, one, names = files(300)
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda name: _check(one.path, [name]), names))
    gets = _check_one_get_each(bucket, one, names)
    assert _most_at_once(gets) > 4


def test_files_read_in_a_random_order_are_all_that_is_asked_for(files: Files):
    bucket, one, names = files(300)
    chosen = random.Random(3).sample(names, 100)
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda name: _check(one.path, [name]), chosen))
    _check_one_get_each(bucket, one, chosen)


@pytest.mark.parametrize("command", ["tar cf - . | cat", "cp -r . {copy}", "md5sum *"])
def test_programs_that_take_a_whole_directory_are_walks(files: Files, command: str, tmp_path: Path):
    bucket, one, names = files(100)
    run("sh", "-c", command.format(copy=tmp_path / "copy") + " > /dev/null", cwd=one.path)
    gets = _check_one_get_each(bucket, one, names)
    assert _most_at_once(gets) > 4
