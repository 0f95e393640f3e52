"""What a daemon's death does to open files whose names move: nothing. Each scene goes on after it, with every byte."""

import os
import signal
from collections.abc import Callable, Generator
from pathlib import Path
from typing import BinaryIO, cast

import pytest

from tests.support.mounts import FUSECACHE, NEEDS_OWN_SESSION, Mount, is_running, run, tree_of, wait_until
from tests.support.s3_buckets import Bucket

MakeMount = Callable[..., Mount]

pytestmark = NEEDS_OWN_SESSION

# The content of each name in the end.
Tree = dict[str, bytes]
# Works in a directory; yields where the daemon dies; returns what is there in the end.
Scene = Callable[[Path, Bucket], Generator[None, None, Tree]]


def unbuffered(path: Path, mode: str) -> BinaryIO:
    return cast("BinaryIO", open(path, mode, buffering=0))


def save(path: Path, data: bytes) -> None:
    with unbuffered(path, "wb") as file:
        file.write(data)


def replace(path: Path, data: bytes) -> None:
    """Write a file as programs do that want it whole."""
    save(path.with_suffix(".tmp"), data)
    os.rename(path.with_suffix(".tmp"), path)


def published(bucket: Bucket, path: Path) -> None:
    """Return when the bucket has a file below the mount's first directory."""
    wait_until(lambda: f"{path.parent.name}/{path.name}" in bucket.names(), f"{path} in the bucket")


# ---- files that lost their names


def written_before_and_after(here: Path, bucket: Bucket) -> Generator[None, None, Tree]:
    """Two replaced files are written through their descriptors."""
    save(here / "a", b"old")
    first = unbuffered(here / "a", "r+b")
    replace(here / "a", b"new-1")
    first.write(b"XXXX")
    second = unbuffered(here / "a", "r+b")
    replace(here / "a", b"new-2")
    second.write(b"YYYY")
    os.fsync(second.fileno())
    yield
    first.write(b"ZZZZ")
    assert (os.pread(first.fileno(), 9, 0), os.pread(second.fileno(), 9, 0)) == (b"XXXXZZZZ", b"YYYY1")
    first.close()
    second.close()
    return {"a": b"new-2"}


def written_after(here: Path, bucket: Bucket) -> Generator[None, None, Tree]:
    """A replaced file is written for the first time after the daemon's death."""
    save(here / "a", b"old")
    file = unbuffered(here / "a", "r+b")
    replace(here / "a", b"new")
    yield
    file.write(b"XXXX")
    file.close()
    return {"a": b"new"}


def written_after_its_upload(here: Path, bucket: Bucket) -> Generator[None, None, Tree]:
    save(here / "a", b"old")
    published(bucket, here / "a")
    file = unbuffered(here / "a", "r+b")
    replace(here / "a", b"new")
    yield
    file.write(b"XXXX")
    file.close()
    return {"a": b"new"}


def read_by_others(here: Path, bucket: Bucket) -> Generator[None, None, Tree]:
    """Readers of three versions of a name keep theirs."""
    readers = []
    for number in range(3):
        replace(here / "a", b"version-%d" % number)
        readers.append(unbuffered(here / "a", "rb"))
        if number == 1:
            published(bucket, here / "a")
    yield
    for number, reader in enumerate(readers):
        assert reader.read() == b"version-%d" % number
        reader.close()
    return {"a": b"version-2"}


def removed_and_made_again(here: Path, bucket: Bucket) -> Generator[None, None, Tree]:
    save(here / "a", b"old")
    file = unbuffered(here / "a", "r+b")
    (here / "a").unlink()
    save(here / "a", b"new")
    yield
    file.write(b"XXXX")
    file.close()
    return {"a": b"new"}


def log_rotated_twice(here: Path, bucket: Bucket) -> Generator[None, None, Tree]:
    save(here / "log", b"0")
    first = unbuffered(here / "log", "ab")
    os.rename(here / "log", here / "log.1")
    save(here / "log", b"1")
    second = unbuffered(here / "log", "ab")
    os.rename(here / "log", here / "log.1")
    save(here / "log", b"2")
    yield
    first.write(b"lost")
    second.write(b"+")
    first.close()
    second.close()
    return {"log": b"2", "log.1": b"1+"}


# ---- open files of which the bucket shows an older version


def removed_while_open(here: Path, bucket: Bucket) -> Generator[None, None, Tree]:
    save(here / "a", b"old")
    published(bucket, here / "a")
    file = unbuffered(here / "a", "wb")
    yield
    (here / "a").unlink()
    file.close()
    return {}


def renamed_while_open(here: Path, bucket: Bucket) -> Generator[None, None, Tree]:
    save(here / "a", b"old")
    published(bucket, here / "a")
    file = unbuffered(here / "a", "wb")
    yield
    os.rename(here / "a", here / "b")
    file.write(b"new")
    file.close()
    return {"b": b"new"}


def replaced_while_open(here: Path, bucket: Bucket) -> Generator[None, None, Tree]:
    save(here / "a", b"old")
    published(bucket, here / "a")
    file = unbuffered(here / "a", "wb")
    yield
    replace(here / "a", b"third")
    file.write(b"new")
    file.close()
    return {"a": b"third"}


def written_during_its_upload(here: Path, bucket: Bucket) -> Generator[None, None, Tree]:
    """`last.ckpt`: closed, opened again before the bucket has it, and written on after that."""
    save(here / "last", b"first")
    file = unbuffered(here / "last", "r+b")
    file.write(b"SECOND")
    published(bucket, here / "last")
    yield
    file.write(b"+third")
    file.close()
    return {"last": b"SECOND+third"}


def directory_renamed_while_open(here: Path, bucket: Bucket) -> Generator[None, None, Tree]:
    (here / "x").mkdir()
    save(here / "x/a", b"old")
    wait_until(lambda: f"{here.name}/x/a" in bucket.names(), "x/a in the bucket")
    file = unbuffered(here / "x/a", "wb")
    yield
    os.rename(here / "x", here / "y")
    file.write(b"new")
    file.close()
    return {"y/a": b"new"}


def moved_over_a_pending_file(here: Path, bucket: Bucket) -> Generator[None, None, Tree]:
    (here / "x").mkdir()
    save(here / "x/b", b"old")
    file = unbuffered(here / "b", "ab")
    os.rename(here / "b", here / "x/b")
    yield
    os.rename(here / "x/b", here / "c")
    file.write(b"new")
    file.close()
    return {"c": b"new"}


SCENES: tuple[Scene, ...] = (
    written_before_and_after, written_after, written_after_its_upload, read_by_others, removed_and_made_again,
    log_rotated_twice, removed_while_open, renamed_while_open, replaced_while_open, written_during_its_upload,
    directory_renamed_while_open, moved_over_a_pending_file,
)  # fmt: skip


def kill(mount: Mount) -> None:
    """Kill the daemon; return when the next one answers."""
    before = mount.pid
    os.kill(before, signal.SIGKILL)
    mount.pid = wait_until(
        lambda: None if is_running(before) else mount.status()["pid"], "the next daemon", 60
    )


def upgrade(mount: Mount) -> None:
    """Have the same program take over."""
    before = mount.pid
    run(FUSECACHE, "upgrade", mount.path)
    mount.pid = mount.status()["pid"]
    assert mount.pid != before


@pytest.mark.parametrize(("death", "settle"), [(kill, "0.2"), (kill, "3"), (upgrade, "3")])
def test_open_files_go_on_whatever_their_names_do(
    mount: MakeMount, bucket: Bucket, death: Callable[[Mount], None], settle: str
) -> None:
    """settle: with the longer one, most is still pending when the daemon dies."""
    made = mount("--keep-mounted", "--settle-seconds", settle)
    running = {}
    for scene in SCENES:
        here = made.path / scene.__name__
        here.mkdir()
        running[here] = scene(here, bucket)
        next(running[here])
    death(made)
    wanted: dict[str, Tree] = {}
    for here, left in running.items():
        with pytest.raises(StopIteration) as ended:
            next(left)
        wanted[here.name] = ended.value.value
    shown = {here.name: files_below(here) for here in running}
    assert shown == wanted
    made.sync()
    assert {here.name: files_below(here) for here in running} == wanted
    stored: dict[str, Tree] = {here.name: {} for here in running}
    for key in bucket.names():
        folder, _, name = key.partition("/")
        if name and not name.endswith("/"):
            stored[folder][name] = bucket.get(key)
    assert stored == wanted
    assert list((made.cache / "orphans").iterdir()) == []


def files_below(root: Path) -> Tree:
    return {name: data for name, data in tree_of(root).items() if isinstance(data, bytes)}
