"""`wait_for` on a plain directory: what counts, in which order it comes, and what a timeout says."""

import os
import pickle
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from loader import FilesMissingError, LoaderError, wait_for
from loader.errors import ArgumentError
from loader.waiting import _pause
from tests.support.mounts import wait_until


def put(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"content")
    return path


class Waiter(threading.Thread):
    """Waits in a thread. result: what `wait_for` returned or raised."""

    def __init__(self, *patterns: Path, timeout: float = 30) -> None:
        super().__init__(daemon=True)
        self._patterns, self._timeout = patterns, timeout
        self.result: Any = None
        self.start()

    def run(self) -> None:
        try:
            self.result = wait_for(self._patterns, timeout=self._timeout)
        except LoaderError as problem:
            self.result = problem

    def end(self) -> Any:
        self.join(20)
        assert not self.is_alive(), "it still waits"
        return self.result


def holds(folder: Path) -> bool:
    """Return whether this process has the directory open: it waits there."""
    return str(folder) in {os.path.realpath(link) for link in Path("/proc/self/fd").iterdir()}


def test_files_that_are_there_come_at_once(tmp_path: Path) -> None:
    for name in ("peer-10", "peer-2", "peer-1", "other"):
        put(tmp_path / name)
    found = wait_for(tmp_path / "peer-*", timeout=0, at_least=3)
    assert found == [str(tmp_path / name) for name in ("peer-1", "peer-2", "peer-10")]
    several = [tmp_path / "other", f"{tmp_path}//peer-2", tmp_path / "peer-2", tmp_path / "peer-?"]
    names = [os.path.basename(path) for path in wait_for(several, timeout=0)]
    assert names == ["other", "peer-2", "peer-1"]


def test_names_without_a_directory_are_of_this_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put(tmp_path / "peer-1")
    monkeypatch.chdir(tmp_path)
    assert wait_for("peer-*", timeout=0) == ["peer-1"]


def test_unfinished_files_and_directories_do_not_count(tmp_path: Path) -> None:
    for name in ("a.tmp", "a.part", ".a", "a-folder/b"):
        put(tmp_path / name)
    (tmp_path / "a-link-to-nothing").symlink_to(tmp_path / "nothing")
    with pytest.raises(FilesMissingError):
        wait_for(tmp_path / "*", timeout=0)
    (tmp_path / "a.tmp").rename(tmp_path / "a")
    (tmp_path / "link").symlink_to(tmp_path / "a")
    assert wait_for(tmp_path / "*", timeout=0, at_least=2) == [str(tmp_path / "a"), str(tmp_path / "link")]


def test_a_file_is_found_in_a_directory_made_later(tmp_path: Path) -> None:
    path = tmp_path / "gradients/window-7/peer-1"
    waiter = Waiter(path)
    wait_until(lambda: holds(tmp_path), "it to wait in the nearest directory that exists")
    path.parent.parent.mkdir()
    wait_until(lambda: holds(path.parent.parent), "it to wait one level further down")
    put(path)
    assert waiter.end() == [str(path)]
    assert not holds(tmp_path)
    assert not holds(path.parent)


def test_a_directory_made_again_is_watched_again(tmp_path: Path) -> None:
    path = put(tmp_path / "window/other").with_name("peer-1")
    waiter = Waiter(path)
    wait_until(lambda: holds(path.parent), "it to wait in the directory")
    (path.parent / "other").unlink()
    path.parent.rmdir()
    wait_until(lambda: holds(tmp_path), "it to notice that the directory is gone")
    put(path)
    assert waiter.end() == [str(path)]


def test_patterns_in_several_directories_are_all_waited_for(tmp_path: Path) -> None:
    first, second = put(tmp_path / "a/1"), tmp_path / "b/1"
    waiter = Waiter(first, second)
    wait_until(lambda: holds(tmp_path), "it to wait for the second")
    put(second)
    assert waiter.end() == [str(first), str(second)]


def test_older_files_do_not_count(tmp_path: Path) -> None:
    old, new = put(tmp_path / "old"), put(tmp_path / "new")
    os.utime(old, (1000, 1000))
    os.utime(new, (2000, 2000))
    assert wait_for(tmp_path / "*", timeout=0, newer_than=1000) == [str(new)]
    with pytest.raises(FilesMissingError):
        wait_for(tmp_path / "*", timeout=0, newer_than=2000)


@pytest.mark.parametrize(
    ("waited", "pause"), [(0, 0.5), (4.9, 0.5), (5, 2.5), (19.9, 2.5), (20, 5), (1e6, 5)]
)
def test_all_processes_list_at_the_same_moments(waited: float, pause: float) -> None:
    before = time.time()
    seconds = _pause(waited)
    after = time.time()
    assert 0 < seconds <= pause
    assert (after + seconds) // pause > (before + seconds - 1e-3) // pause, "not at a multiple of the pause"


def test_a_timeout_names_what_is_missing_and_there(tmp_path: Path) -> None:
    there, late = put(tmp_path / "peer-1"), tmp_path / "peer-2"
    with pytest.raises(TimeoutError, match=rf"after 0.2 s missing: {late}; there: {there}\. Wait") as caught:
        wait_for([there, late], timeout=0.2)
    copy = pickle.loads(pickle.dumps(caught.value))
    assert isinstance(copy, FilesMissingError)
    assert (copy.found, copy.missing, str(copy)) == ((str(there),), (str(late),), str(caught.value))
    with pytest.raises(FilesMissingError, match=r"/none does not exist\. "):
        wait_for(tmp_path / "none/peer-1", timeout=0)
    with pytest.raises(FilesMissingError, match=r"missing: /nothing/peer-0, .*-19 and 5 more; there: none"):
        wait_for([f"/nothing/peer-{number}" for number in range(25)], timeout=0)
    with pytest.raises(FilesMissingError) as too_few:
        wait_for(tmp_path / "peer-*", timeout=0, at_least=2)
    assert (too_few.value.found, too_few.value.missing) == ((str(there),), (str(tmp_path / "peer-*"),))


@pytest.mark.parametrize(
    ("wait", "words"),
    [
        (lambda root: wait_for([], timeout=1), "0 patterns, .*at least one pattern"),
        (lambda root: wait_for(root / "a", timeout=-1), "timeout -1"),
        (lambda root: wait_for(root / "a", timeout=1, at_least=0), "at_least 0"),
        (lambda root: wait_for(root / "window-*/a", timeout=1), "only the last part may be a pattern"),
        (lambda root: wait_for(f"{root}/", timeout=1), "is a directory: wait for a file in it"),
        (lambda root: wait_for(root / "a.tmp", timeout=1), "counts as unfinished"),
        (lambda root: wait_for(root / ".a", timeout=1), "counts as unfinished"),
        (lambda root: wait_for("s3://bucket/a", timeout=1), "Mount the bucket"),
    ],
)
def test_a_pattern_that_can_never_match_is_refused(
    tmp_path: Path, wait: Callable[[Path], object], words: str
) -> None:
    with pytest.raises(ArgumentError, match=words):
        wait(tmp_path)


def test_a_file_in_place_of_the_directory_is_named(tmp_path: Path) -> None:
    put(tmp_path / "window")
    with pytest.raises(LoaderError, match=r"/window cannot be listed: Not a directory\. Check the path"):
        wait_for(tmp_path / "window/peer-1", timeout=5)
