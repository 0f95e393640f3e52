"""`wait_for` on mounts: files of other nodes are seen within seconds, at a bounded number of LISTs."""

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from loader import FilesMissingError, LoaderError, wait_for
from tests.mount.conftest import Place
from tests.support import ROOT
from tests.support.mounts import Mount, wait_until
from tests.support.s3_buckets import Bucket

# settle_seconds and the upload, a pause of `wait_for`, attribute_seconds; and what two busy cores add.
SEEN_SECONDS = 0.2 + 2.5 + 1 + 4


def lists(bucket: Bucket) -> int:
    return len(bucket.requests("ListObjectsV2"))


def is_listed(bucket: Bucket, folder: str) -> bool:
    return any(entry.query["prefix"] == bucket.prefix + folder for entry in bucket.requests("ListObjectsV2"))


def test_nodes_make_one_directory_at_once_without_warnings(place: Place) -> None:
    """R2 takes one write a second of a key. A marker that another node has put is as good as the own one."""
    names = [f"window-{number}" for number in range(10)]
    assert list(place.path.iterdir()) == list(place.second.iterdir()) == []
    with ThreadPoolExecutor() as threads:
        list(
            threads.map(
                lambda path: path.mkdir(),
                [root / name for name in names for root in (place.path, place.second)],
            )
        )
    for each in (place.first_mount, place.second_mount):
        each.sync(place.name)
    assert {f"{name}/" for name in names} <= set(place.bucket.names())


def test_files_of_several_nodes_are_seen_within_seconds(place: Place) -> None:
    names = ["window-1/peer-1", "window-1/peer-2"]
    with ThreadPoolExecutor() as threads:
        waits = [
            threads.submit(wait_for, [root / name for name in names], timeout=60)
            for root in (place.path, place.second)
        ]
        (place.path / "window-1").mkdir()
        wait_until((place.second / "window-1").is_dir, "the directory on the other node")
        for root, name in ((place.path, names[0]), (place.second, names[1])):
            (root / name).write_bytes(b"gradient")
        written = time.monotonic()
        for root, wait in zip((place.path, place.second), waits, strict=True):
            assert wait.result(60) == [str(root / name) for name in names]
            assert time.monotonic() - written < SEEN_SECONDS
    assert (place.path / names[1]).read_bytes() == (place.second / names[0]).read_bytes() == b"gradient"


def test_newer_objects_only_count_by_their_upload(place: Place) -> None:
    place.bucket.put("latest", b"old")
    wait_for(place.path / "latest", timeout=20)
    began = (place.path / "latest").stat().st_mtime
    with pytest.raises(FilesMissingError):
        wait_for(place.path / "latest", timeout=0, newer_than=began)
    wait_until(lambda: time.time() > began + 1.1, "the next second: a store may keep whole ones")
    place.bucket.put("latest", b"new")
    [path] = wait_for(place.path / "latest", timeout=20, newer_than=began)
    assert Path(path).read_bytes() == b"new"


@pytest.mark.s3server_only
def test_one_list_serves_all_patterns_of_a_directory(mount: Callable[..., Mount], bucket: Bucket) -> None:
    for number in range(30):
        bucket.put(f"gradients/window-1/peer-{number}", b"gradient")
    one = mount()
    before = lists(bucket)
    patterns = [one.path / f"gradients/window-1/peer-{number}" for number in range(30)]
    assert len(wait_for(patterns, timeout=0, newer_than=0)) == 30
    # A look at each level of the path, and the listing.
    assert lists(bucket) - before <= 3


@pytest.mark.s3server_only
def test_processes_that_wait_share_few_lists(mount: Callable[..., Mount], bucket: Bucket) -> None:
    bucket.put("gradients/window-1/peer-0", b"gradient")
    one = mount()
    program = (
        "import sys, loader; print('begins', flush=True); "
        "print(*loader.wait_for([f'{sys.argv[1]}/peer-{peer}' for peer in range(4)], timeout=60), flush=True)"
    )
    folder = one.path / "gradients/window-1"

    def listings() -> int:
        asked = bucket.prefix + "gradients/window-1/"
        return sum(entry.query["prefix"] == asked for entry in bucket.requests("ListObjectsV2"))

    before, before_listings, first = lists(bucket), listings(), time.monotonic()
    with contextlib.ExitStack() as stack:
        waiting = []
        for number in range(3):  # at moments that lie further apart than attribute_seconds
            command = [sys.executable, "-c", program, str(folder)]
            process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
            waiting.append(stack.enter_context(process))
            stack.callback(process.kill)
            assert process.stdout
            assert process.stdout.readline() == "begins\n"
            began = time.monotonic()
            wait_until(lambda: time.monotonic() > began + 1.2, f"the time after process {number}")  # noqa: B023
        wait_until(lambda: time.monotonic() > began + 7, "the end of the phase that lists most often")
        often, looks = listings(), lists(bucket) - before - (listings() - before_listings)
        seconds = time.monotonic() - first
        wait_until(lambda: time.monotonic() > began + 17, "10 s in which each process lists every 2.5 s")
        assert 3 <= listings() - often <= 7, "three processes that do not share make 12"
        assert often - before_listings <= 1 + seconds, "one at once, and then at most one a second"
        assert looks <= 3 * 2, "each process looks once at each of the two levels of the path"
        for peer in range(1, 4):
            bucket.put(f"gradients/window-1/peer-{peer}", b"gradient")
        for process in waiting:
            words, _ = process.communicate(timeout=30)
            assert words.split() == [str(folder / f"peer-{peer}") for peer in range(4)]


@pytest.mark.s3server_only
def test_a_directory_that_another_node_makes_again(mount: Callable[..., Mount], bucket: Bucket) -> None:
    bucket.put("window/other", b"old")
    one = mount()
    with ThreadPoolExecutor() as threads:
        wait = threads.submit(wait_for, one.path / "window/peer-1", timeout=60)
        wait_until(lambda: is_listed(bucket, "window/"), "the first listing")
        bucket.delete("window/other")
        wait_until(lambda: not (one.path / "window").exists(), "the mount to show that it is gone")
        bucket.put("window/peer-1", b"gradient")
        assert wait.result(20) == [str(one.path / "window/peer-1")]


def test_a_daemon_that_dies_ends_the_wait(mount: Callable[..., Mount]) -> None:
    one = mount()
    caught: list[LoaderError] = []

    def wait() -> None:
        try:
            wait_for(one.path / "peer-1", timeout=60)
        except LoaderError as problem:
            caught.append(problem)

    thread = threading.Thread(target=wait)
    thread.start()
    os.kill(one.pid, signal.SIGKILL)
    thread.join(30)
    assert [type(problem) for problem in caught] == [LoaderError]
    assert f"The daemon of the mount {one.path} is gone: run `fusecache status" in str(caught[0])
