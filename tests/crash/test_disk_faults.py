"""A cache disk that is full, read-only or fails: what the bucket has can be read, and what waits is published later."""

import json
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from fusecache.index.row_file import RETRY_SECONDS
from tests.s3server import ServerProcess
from tests.support.daemons import Daemon, some_bytes
from tests.support.disks import Disk, has_disks

pytestmark = [
    pytest.mark.whole_machine,
    pytest.mark.skipif(not has_disks(), reason="needs root and loop devices"),
]

FOLDERS = 10
FILES = 20
# More than fit into space that a file has by chance.
LARGE = 1200


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    """A disk for the cache directory of the first daemon that a test makes."""
    with Disk.new(tmp_path / "image", tmp_path / "disk") as disk:
        yield disk


@pytest.fixture
def mounted(disk: Disk, make_daemon: Callable[..., Daemon]) -> Callable[..., Daemon]:
    """Mount with the cache directory on the disk: `mounted(*flags)`."""

    def mount(*flags: str) -> Daemon:
        daemon = make_daemon("--cache-size", "1GiB", *flags)
        daemon.cache = disk.path / "cache"
        daemon.mount()
        return daemon

    return mount


def put_objects(server: ServerProcess) -> dict[str, bytes]:
    """Store files in several directories; return them by path."""
    content = {
        f"folder-{folder:02}/file-{number:02}": some_bytes(5000 + number, folder * 100 + number)
        for folder in range(FOLDERS)
        for number in range(FILES)
    }
    content |= {f"large/{number:05}": b"x" for number in range(LARGE)}
    for key, data in content.items():
        server.control.put(key, data)
    return content


def drop_cached_pages(folder: Path) -> None:
    """Have the kernel forget what it holds of the files there, as memory pressure does."""
    for path in folder.rglob("*"):
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)


@pytest.mark.parametrize("flags", [(), ("--read-only",)], ids=["writable", "read-only"])
@pytest.mark.parametrize("fault", ["fill", "make_read_only", "shut_down", "break_device"])
def test_names_and_bytes_outlive_the_cache_disk(
    server: ServerProcess, disk: Disk, mounted: Callable[..., Daemon], fault: str, flags: tuple[str, ...]
) -> None:
    """With a full, read-only or failed cache disk, everything in the bucket is listed and read, at a bounded cost."""
    content = put_objects(server)
    daemon = mounted(*flags)
    files = [key for key in content if not key.startswith("large/")]
    seen = files[: FILES * 3]
    assert all((daemon.path / key).read_bytes() == content[key] for key in seen)
    assert len(os.listdir(daemon.path)) == FOLDERS + 1
    os.sync()
    drop_cached_pages(daemon.cache / "names")
    getattr(disk, fault)()
    asked = len([entry for entry in server.control.log() if entry.operation == "ListObjectsV2"])
    for folder in range(FOLDERS):
        names = sorted(os.listdir(daemon.path / f"folder-{folder:02}"))
        assert names == [f"file-{number:02}" for number in range(FILES)]
    assert len(os.listdir(daemon.path / "large")) == LARGE
    assert all((daemon.path / key).stat().st_size == len(content[key]) for key in files)
    assert all((daemon.path / key).read_bytes() == content[key] for key in files)
    for number in range(20):
        assert not (daemon.path / "folder-03" / f"none-{number}").exists()
    asked = len([entry for entry in server.control.log() if entry.operation == "ListObjectsV2"]) - asked
    assert asked < 12 * FOLDERS
    assert daemon.is_running()
    assert daemon.log().count("refuses listings") <= 1


def test_listings_return_to_a_disk_with_space(
    server: ServerProcess, disk: Disk, mounted: Callable[..., Daemon]
) -> None:
    """What a full disk refused is in memory, and moves to the disk when that has space again."""
    put_objects(server)
    daemon = mounted("--read-only")
    disk.fill()
    assert len(os.listdir(daemon.path / "large")) == LARGE
    status = json.loads(daemon.command("status", daemon.path, "--json").stdout)
    assert status["listings"]["memory_bytes"] > 0
    disk.empty()
    time.sleep(RETRY_SECONDS)
    assert len(os.listdir(daemon.path / "folder-03")) == FILES
    status = json.loads(daemon.command("status", daemon.path, "--json").stdout)
    assert status["listings"]["memory_bytes"] == 0
