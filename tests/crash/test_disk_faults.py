"""A cache disk that is full, read-only or fails: what the bucket has can be read, and what waits is published later."""

import errno
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from fusecache.index.listings import RETRY_SECONDS
from tests.s3server import Fault, FaultAction, ServerProcess
from tests.support.daemons import Daemon, some_bytes
from tests.support.disks import Disk, has_disks
from tests.support.mounts import wait_until

pytestmark = [
    pytest.mark.whole_machine,
    pytest.mark.skipif(not has_disks(), reason="needs root and loop devices"),
]

# A daemon whose journal has no disk space in reserve.
WITHOUT_RESERVE = """
import sys
import fusecache.index.journal as journal
from fusecache.cli.main import main

journal.RESERVE_BYTES = 0
sys.exit(main())
"""
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
    """Mount with the cache directory on the disk: `mounted(*flags)`; program: text to run instead of the command."""

    def mount(*flags: str, program: str = "") -> Daemon:
        daemon = make_daemon("--cache-size", "1GiB", *flags)
        if program:
            daemon.program = [sys.executable, "-c", program]
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
    for key, data in content.items():
        server.control.put(key, data)
    server.control.add_many("large/{:05}", LARGE)
    return content


def status_of(daemon: Daemon) -> dict[str, Any]:
    done = daemon.command("status", daemon.path, "--json")
    assert done.stdout, done.stderr + daemon.log()
    status: dict[str, Any] = json.loads(done.stdout)
    return status


def drop_cached_pages(folder: Path) -> None:
    """Have the kernel forget what it holds of the files there, as memory pressure does."""
    for path in folder.rglob("*"):
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)


def write_and_sync(file: int, data: bytes) -> None:
    os.write(file, data)
    os.fsync(file)


@pytest.mark.parametrize("flags", [(), ("--read-only",)], ids=["writable", "read-only"])
@pytest.mark.parametrize("fault", ["fill", "make_read_only", "shut_down", "break_device"])
def test_names_and_bytes_outlive_the_cache_disk(
    server: ServerProcess, disk: Disk, mounted: Callable[..., Daemon], fault: str, flags: tuple[str, ...]
) -> None:
    """With a full, read-only or failed cache disk, everything in the bucket is listed and read, at a bounded cost."""
    content = put_objects(server)
    daemon = mounted(*flags)
    seen = list(content)[: FILES * 3]
    assert all((daemon.path / key).read_bytes() == content[key] for key in seen)
    assert len(os.listdir(daemon.path)) == FOLDERS + 1
    os.sync()
    drop_cached_pages(daemon.cache / "names")
    began = time.monotonic()
    getattr(disk, fault)()
    asked = len([entry for entry in server.control.log() if entry.operation == "ListObjectsV2"])
    for folder in range(FOLDERS):
        names = sorted(os.listdir(daemon.path / f"folder-{folder:02}"))
        assert names == [f"file-{number:02}" for number in range(FILES)]
    assert len(os.listdir(daemon.path / "large")) == LARGE
    assert all((daemon.path / key).stat().st_size == len(content[key]) for key in content)
    assert all((daemon.path / key).read_bytes() == content[key] for key in content)
    for number in range(20):
        assert not (daemon.path / "folder-03" / f"none-{number}").exists()
    asked = len([entry for entry in server.control.log() if entry.operation == "ListObjectsV2"]) - asked
    assert asked < 12 * FOLDERS
    assert daemon.is_running()
    # The daemon tries the disk again every RETRY_SECONDS, and a full one takes a pack where another was.
    assert daemon.log().count("refuses listings") <= 1 + (time.monotonic() - began) // RETRY_SECONDS


def test_listings_return_to_a_disk_with_space(
    server: ServerProcess, disk: Disk, mounted: Callable[..., Daemon]
) -> None:
    """What a full disk refused is in memory, and moves to the disk when that has space again."""
    put_objects(server)
    folders = [f"more-{number}" for number in range(40)]
    for folder in folders:
        server.control.add_many(folder + "/{:05}", LARGE)
    daemon = mounted("--read-only")
    disk.fill()
    for folder in folders:  # a commit may make some room behind `fill`: the first ones take that
        assert len(os.listdir(daemon.path / folder)) == LARGE
        if status_of(daemon)["in_memory"]["listing_bytes"]:
            break
    else:
        pytest.fail("the full disk took all listings")
    disk.empty()
    time.sleep(RETRY_SECONDS)
    assert len(os.listdir(daemon.path / "folder-03")) == FILES
    status = status_of(daemon)
    assert status["in_memory"]["listing_bytes"] == 0


def write_all(daemon: Daemon, names: list[str]) -> dict[str, bytes]:
    """Write and close files; return those whose close gave 0."""
    closed = {}
    for name in names:
        with suppress(OSError):
            (daemon.path / name).write_bytes(some_bytes(3000, len(closed)))
            closed[name] = some_bytes(3000, len(closed))
    return closed


def test_publishing_survives_a_full_disk(
    server: ServerProcess, disk: Disk, mounted: Callable[..., Daemon]
) -> None:
    """What was closed is published while the disk is full; without a remount, writing works when it has space."""
    daemon = mounted()
    server.control.faults(Fault(FaultAction.HOLD, operation="PutObject"))
    closed = write_all(daemon, [f"before-{number}" for number in range(300)])
    assert len(closed) == 300
    disk.fill()
    closed |= write_all(daemon, [f"during-{number}" for number in range(5)])
    server.control.clear_faults()
    assert daemon.sync() == 0
    assert set(server.control.objects()) >= set(closed)
    disk.empty()
    wait_until(lambda: write_all(daemon, ["first"]), "space for writes")
    closed |= write_all(daemon, [f"after-{number}" for number in range(100)])
    assert len(closed) >= 400
    assert daemon.sync() == 0
    assert set(server.control.objects()) >= set(closed)
    daemon.signal(signal.SIGTERM)
    assert daemon.wait() == 0


def test_a_start_on_a_full_disk_serves_and_nothing_is_lost(
    server: ServerProcess, disk: Disk, mounted: Callable[..., Daemon]
) -> None:
    """The index has space ahead of its rows. What was closed before is published."""
    daemon = mounted()
    server.control.faults(Fault(FaultAction.ANSWER, operation="PutObject"))
    closed = write_all(daemon, ["before"])
    daemon.kill()
    disk.fill()
    daemon.mount()
    assert (daemon.path / "before").read_bytes() == closed["before"]
    disk.empty()
    server.control.clear_faults()
    assert daemon.sync() == 0
    assert set(server.control.objects()) == set(closed)


def test_a_full_journal_heals_without_a_remount(
    server: ServerProcess, disk: Disk, mounted: Callable[..., Daemon]
) -> None:
    """If even the journal's reserve is gone, writers get ENOSPC, `status` says why, and all of it ends by itself."""
    daemon = mounted(program=WITHOUT_RESERVE)
    closed = write_all(daemon, [f"before-{number}" for number in range(50)])
    disk.fill()
    began = time.monotonic()
    error = 0
    for number in range(10_000):
        try:
            (daemon.path / f"folder-{number}").mkdir()
        except OSError as exc:
            error = exc.errno
            break
    assert error == errno.ENOSPC
    assert time.monotonic() - began < 60
    status = status_of(daemon)
    assert status["state"] == "journal-failed"
    assert "journal" in status["journal_error"]
    assert "disk is full" in daemon.command("unmount", daemon.path).stderr
    disk.empty()
    wait_until(lambda: "written again" in daemon.log(), "the journal")
    wait_until(lambda: write_all(daemon, ["after"]), "space for writes")
    closed |= {"after": some_bytes(3000, 0)}
    assert daemon.sync() == 0
    assert set(server.control.objects()) >= set(closed)
    daemon.signal(signal.SIGTERM)
    assert daemon.wait() == 0


@pytest.mark.parametrize("fault", ["make_read_only", "shut_down"])
def test_writes_to_a_failed_disk_are_refused(
    server: ServerProcess, disk: Disk, mounted: Callable[..., Daemon], fault: str
) -> None:
    """On a failed disk a change gets an error in time, `status` says why, reads go on, and the daemon can end."""
    server.control.put("there", b"bytes")
    daemon = mounted()
    (daemon.path / "folder").mkdir()
    assert daemon.sync() == 0
    getattr(disk, fault)()
    began = time.monotonic()
    with pytest.raises(OSError, match=r"Read-only file system|Input/output error"):
        (daemon.path / "other").mkdir()
    assert time.monotonic() - began < 60
    assert status_of(daemon)["state"] == "journal-failed"
    with pytest.raises(OSError, match=r"Read-only file system|Input/output error"):
        (daemon.path / "file").write_bytes(b"1")
    assert (daemon.path / "there").read_bytes() == b"bytes"
    assert daemon.is_running()
    daemon.signal(signal.SIGTERM)
    daemon.wait()


@pytest.mark.parametrize("fault", ["make_read_only", "shut_down"])
def test_an_open_file_gives_its_name_back(
    server: ServerProcess, disk: Disk, mounted: Callable[..., Daemon], fault: str
) -> None:
    """If the disk fails under an open file, its writer gets the error, and the name shows what was there before."""
    server.control.put("file", b"before")
    daemon = mounted()
    file = os.open(daemon.path / "file", os.O_WRONLY | os.O_TRUNC)
    os.write(file, b"new")
    getattr(disk, fault)()
    with pytest.raises(OSError, match=r"Read-only file system|Input/output error"):
        write_and_sync(file, b"bytes" * 100_000)
    with suppress(OSError):
        os.close(file)
    wait_until(lambda: (daemon.path / "file").read_bytes() == b"before", "the bytes before")
    assert "unexpected failure" not in daemon.log()
    daemon.signal(signal.SIGTERM)
    daemon.wait()
