"""Directories of many objects: read whole, looked into, walked through, in the memory of a small one."""

import os
import subprocess
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.mount.conftest import Place
from tests.support.mounts import Mount, run, wait_until
from tests.support.s3_buckets import Bucket

pytestmark = pytest.mark.s3server_only
COUNT = 50_000


@pytest.fixture(scope="module")
def large(whole_bucket: Bucket) -> Bucket:
    """A bucket with a directory of fifty thousand objects."""
    bucket = whole_bucket.below("large")
    bucket.control.add_many(f"{bucket.prefix}big/{{:06d}}.bin", COUNT, 1000)
    return bucket


@pytest.fixture
def one(mount: Callable[..., Mount], large: Bucket) -> Iterator[Mount]:
    """A fresh mount of it."""
    large.control.clear_log()
    yield mount(of=large)
    large.control.set(latency=0.0)


def memory_kib(mount: Mount) -> int:
    """Return what of a daemon's memory no file stands behind."""
    lines = Path(f"/proc/{mount.pid}/status").read_text().splitlines()
    facts = dict(line.split(":", 1) for line in lines)
    return sum(int(facts[name].split()[0]) for name in ("RssAnon", "RssShmem"))


def memory_at_rest_kib(mount: Mount) -> int | None:
    """Return that once it stays; None while it grows: a daemon answers before all that it needs is in its memory."""
    before = memory_kib(mount)
    time.sleep(2)
    after = memory_kib(mount)
    return after if after - before < 256 else None


@pytest.mark.usefixtures("kernels_names")
def test_a_directory_of_many_names_is_listed_and_searched_in_little_memory(
    mount: Callable[..., Mount], large: Bucket
):
    # What is no longer believed when `find` comes to it is looked up name by name, on a slow machine most of them.
    one = mount("--attribute-seconds", "600", of=large)
    large.control.clear_log()
    before = wait_until(lambda: memory_at_rest_kib(one), "the end of the start")
    assert len(os.listdir(one.path / "big")) == COUNT
    assert run("find", one.path / "big", "-size", "+0", "-type", "f").stdout.count("\n") == COUNT
    # A node a name would be fifty megabytes.
    assert memory_kib(one) - before < 20 * 1024
    asked = large.operations("ListObjectsV2")
    assert len(asked) <= 2 * (COUNT // 1000) + 4
    assert one.status()["in_memory"]["inodes"] < 100
    data = (one.path / "big" / "040000.bin").read_bytes()
    assert data == large.control.read(f"{large.prefix}big/040000.bin")


def test_a_known_file_in_a_large_directory_opens_without_listing_it(one: Mount, large: Bucket):
    large.control.clear_log()
    assert len((one.path / "big" / "030000.bin").read_bytes()) == 1000
    assert not (one.path / "big" / "030000").exists()
    assert len(large.requests("ListObjectsV2")) <= 4
    assert all(entry.query["max-keys"] == "2" for entry in large.requests("ListObjectsV2"))
    assert len(large.requests("GetObject")) == 1


def test_the_first_names_of_a_large_directory_come_before_the_last_are_asked_for(one: Mount, large: Bucket):
    large.control.set(latency=0.5)  # the listing goes on while nobody reads
    with os.scandir(one.path / "big") as entries:
        assert next(entries).name == "000000.bin"
        assert len(large.requests("ListObjectsV2")) < COUNT // 1000
        large.control.set(latency=0.0)
        assert sum(1 for _ in entries) == COUNT - 1


def test_a_listing_shows_the_directory_itself_and_its_parent(place: Place):
    place.bucket.put("dir/file", b"1")
    wait_until((place.path / "dir").is_dir, "the directory")
    words = [line.split() for line in run("ls", "-lain", place.path / "dir").stdout.splitlines()[1:]]
    assert [line[-1] for line in words] == [".", "..", "file"]
    inodes = [int(line[0]) for line in words]
    assert inodes[0] == (place.path / "dir").stat().st_ino
    assert inodes[1] == place.path.stat().st_ino
    assert os.listdir(place.path / "dir") == ["file"]


def test_a_file_keeps_its_inode_while_its_version_stays(place: Place):
    for index in range(20):
        place.bucket.put(f"dir/{index:02}", b"old")
    wait_until((place.path / "dir").is_dir, "the directory")

    def inodes() -> dict[str, int]:
        with os.scandir(place.path / "dir") as entries:
            return {entry.name: entry.inode() for entry in entries}

    first = inodes()
    (place.path / "dir" / "05").read_bytes()
    place.bucket.put("dir/07", b"newer")
    wait_until(lambda: inodes()["07"] != first["07"], "the new version")
    again = inodes()
    assert {name for name in first if again[name] != first[name]} == {"07"}
    assert {name: (place.path / "dir" / name).stat().st_ino for name in first} == again


def test_a_missing_name_is_there_as_soon_as_it_is_made_here(place: Place):
    for attempt in range(20):
        path = place.path / f"made{attempt}"
        assert not path.exists()
        path.write_bytes(b"1")
        assert path.exists()
        moved = place.path / f"moved{attempt}"
        assert not moved.exists()
        path.rename(moved)
        assert moved.read_bytes() == b"1"
        assert not path.exists()


def test_a_missing_name_that_another_client_makes_is_there_after_a_second(place: Place):
    assert not (place.path / "latest").exists()
    place.bucket.put("latest", b"1")
    wait_until((place.path / "latest").exists, "the name")


def test_a_shell_that_stays_in_a_directory_sees_it_change(place: Place):
    """Numbers of inodes that only a listing knows lead back to it, however often it is listed again."""
    for index in range(5):
        place.bucket.put(f"dir/{index}", b"1")
    wait_until((place.path / "dir").is_dir, "the directory")
    with subprocess.Popen(
        ["bash", "-c", "while read; do ls | wc -l; cat * | wc -c; done"],
        cwd=place.path / "dir",
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as shell:
        assert shell.stdin is not None
        assert shell.stdout is not None
        seen = []

        def look() -> tuple[int, int]:
            assert shell.stdin is not None
            assert shell.stdout is not None
            shell.stdin.write("\n")
            shell.stdin.flush()
            return int(shell.stdout.readline()), int(shell.stdout.readline())

        for index in range(5, 8):
            place.bucket.put(f"dir/{index}", b"1")
            wait_until(lambda count=index + 1: look() == (count, count), "the new file")
            seen.append(index)
        shell.stdin.close()
    assert seen == [5, 6, 7]


@pytest.fixture
def listed(mount: Callable[..., Mount], bucket: Bucket) -> Iterator[tuple[Mount, Path]]:
    """A mount with a directory of three thousand objects, listed so long ago that it must not be believed any more."""
    bucket.control.add_many(f"{bucket.prefix}big/{{:06d}}.bin", 3000, 1000)
    mounted = mount("--read-only", "--attribute-seconds", "0.3")
    folder = mounted.path / "big"
    assert len(os.listdir(folder)) == 3000
    # Nobody can tell by the mount how old its listing is: this is what is waited for.
    time.sleep(0.5)
    yield mounted, folder
    bucket.control.set(latency=0.0)


@pytest.mark.whole_machine
def test_readers_of_a_large_directory_do_not_wait_for_each_others_lookups(
    listed: tuple[Mount, Path], bucket: Bucket, forget_names: Callable[[], None]
):
    _, folder = listed
    # The kernel may ask for names that it knows side by side; those that it has forgotten it looks up in turn.
    opened = os.open(folder, os.O_RDONLY)  # the folder itself is to stay known
    forget_names()
    bucket.control.set(latency=1.0)
    bucket.control.clear_log()
    names = [f"{number:06d}.bin" for number in range(5, 3000, 400)]
    with ThreadPoolExecutor(len(names)) as pool:
        sizes = list(pool.map(lambda name: len((folder / name).read_bytes()), names))
    os.close(opened)
    assert sizes == [1000] * len(names)
    lists = bucket.requests("ListObjectsV2")
    overlapping = max(
        sum(other.time <= entry.time < other.time + other.seconds for other in lists) for entry in lists
    )
    assert overlapping >= 3  # one after the other there are two: a lookup, and the listing's page


def test_an_old_listing_of_a_large_directory_shows_no_version_that_was_replaced(
    listed: tuple[Mount, Path], bucket: Bucket
):
    _, folder = listed
    bucket.put("big/000700.bin", b"changed" * 300)
    assert (folder / "000700.bin").stat().st_size == 2100

    # That was of a listing that is too old. From here on a page of it may have just been renewed, and is to be believed
    # for a moment.
    def comes(what: Callable[[], bool], name: str) -> None:
        wait_until(what, f"the change of {name}")

    bucket.put("big/001500.bin", b"opened" * 400)
    comes(lambda: (folder / "001500.bin").read_bytes() == b"opened" * 400, "001500.bin")
    bucket.delete("big/002500.bin")
    comes(lambda: not (folder / "002500.bin").exists(), "002500.bin")
    bucket.delete("big/002600.bin")
    comes(lambda: not is_opened(folder / "002600.bin"), "002600.bin")
    bucket.put("big/002700.new", b"1")
    comes(lambda: is_opened(folder / "002700.new"), "002700.new")
    assert (folder / "002700.new").read_bytes() == b"1"


def is_opened(path: Path) -> bool:
    """Open and close a file; False if it is not there."""
    try:
        with path.open("rb"):
            return True
    except FileNotFoundError:
        return False


def test_what_another_client_removed_from_a_large_directory_is_made_again_at_once(
    mount: Callable[..., Mount], bucket: Bucket
):
    bucket.control.add_many(f"{bucket.prefix}big/{{:06d}}.bin", 2500, 1000)
    folder = mount("--attribute-seconds", "0.3").path / "big"
    assert len(os.listdir(folder)) == 2500
    bucket.delete("big/001700.bin")
    wait_until(lambda: not (folder / "001700.bin").exists(), "the name's end")
    with open(folder / "001700.bin", "xb") as file:
        file.write(b"exclusive")
