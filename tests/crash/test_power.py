"""A power cut: pages that were not written back are gone, the boot is another. Nothing unverified is ever uploaded."""

import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest

from fusecache.index.journal import Journal
from fusecache.model.records import DOUBTFUL, OWED, FileState
from tests.s3server import Fault, FaultAction, ServerProcess
from tests.support.daemons import Daemon, some_bytes
from tests.support.disks import Disk, has_disks
from tests.support.mounts import wait_until

pytestmark = [
    pytest.mark.whole_machine,
    pytest.mark.skipif(not has_disks(), reason="needs root and loop devices"),
]

SIZE = 300_001
PIECE = 13_001
SETTLE_SECONDS = 1
SYNCED = [f"synced-{number}" for number in range(3)] + ["dsync", "sync", "log"]
SETTLED = [f"settled-{number}" for number in range(3)]
DIRTY = [f"dirty-{number}" for number in range(10)]
# A daemon that takes this boot for another.
ANOTHER_BOOT = (
    "import sys, fusecache.index.cache_index as index; index.read_boot_id = lambda: 'another boot';"
    "from fusecache.cli.main import main; sys.exit(main())"
)


def content(name: str) -> bytes:
    return some_bytes(SIZE, sum(name.encode()))


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def write(path: Path, *, sync: bool = False) -> None:
    with path.open("wb") as file:
        file.write(content(path.name))
        if sync:
            file.flush()
            os.fsync(file.fileno())


def write_synced(path: Path) -> None:
    """Write a file and sync it, each as its name says: once, or piece by piece."""
    data = content(path.name)
    flags = {"dsync": os.O_DSYNC, "sync": os.O_SYNC, "log": os.O_APPEND}.get(path.name)
    if flags is None:
        write(path, sync=True)
        return
    file = os.open(path, os.O_CREAT | os.O_WRONLY | flags)
    for start in range(0, len(data), PIECE):
        os.write(file, data[start : start + PIECE])
        if path.name == "log":
            os.fsync(file)
    os.close(file)


def wait_until_synced(daemon: Daemon, names: list[str]) -> None:
    """Return once the journal says that these files are on the disk, synced in the background."""
    with Journal(daemon.cache / "journal") as journal:  # LMDB: read beside the daemon's process
        wait_until(
            lambda: {row.key for row in journal.files() if row.synced} >= {*names}, "the background sync", 60
        )


def write_dirty(daemon: Daemon) -> float:
    """Write what is not synced; return when the last of it was begun, in seconds of the monotonic clock."""
    began = 0.0
    for name in DIRTY:
        began = time.monotonic()
        write(daemon.path / name)
    return began


def wait_for_the_cut(daemon: Daemon, seconds: float | None) -> None:
    """Wait so long after the last close; None: until everything is synced."""
    if seconds is None:
        wait_until_synced(daemon, DIRTY)
    else:
        threading.Event().wait(seconds)


def doubtful(daemon: Daemon) -> set[str]:
    """Return the keys of what is kept aside as damaged, of a daemon that has ended."""
    with Journal(daemon.cache / "journal") as journal:
        return {
            row.key for row in journal.files() if row.state is FileState.ORPHAN and row.reason in DOUBTFUL
        }


@pytest.mark.case(35)
@pytest.mark.parametrize("seconds", [0.0, 0.4, 1.2, None])
def test_a_power_cut_uploads_nothing_unverified_and_loses_nothing_synced(
    server: ServerProcess, stack: ExitStack, tmp_path: Path, seconds: float | None
) -> None:
    """seconds: from the last close to the cut; None: until the background sync has come."""
    disk = stack.enter_context(Disk.new(tmp_path / "image", tmp_path / "disk"))
    daemon = Daemon(server, tmp_path / "before", "--settle-seconds", str(SETTLE_SECONDS))
    daemon.cache = disk.path / "cache"
    stack.callback(daemon.clean_up)
    daemon.mount()
    write(daemon.path / "published")
    assert daemon.sync() == 0
    server.control.faults(Fault(FaultAction.ANSWER, operation="PutObject", status=503))
    for name in SETTLED:
        write(daemon.path / name)
    wait_until_synced(daemon, SETTLED)
    for name in SYNCED:
        write_synced(daemon.path / name)
    full_at = disk.written_bytes() + len(DIRTY) * SIZE
    last_began = write_dirty(daemon)
    unfinished = os.open(daemon.path / "open", os.O_CREAT | os.O_WRONLY)
    os.write(unfinished, content("open"))
    wait_for_the_cut(daemon, seconds)
    daemon.kill()
    # All of DIRTY, if it took so long, or if the kernel wrote that much by itself, as it does for other programs' sake.
    may_be_synced = time.monotonic() > last_began + SETTLE_SECONDS or disk.written_bytes() >= full_at
    after = disk.cut(tmp_path / "image-after", tmp_path / "disk-after")
    with suppress(OSError):
        os.close(unfinished)
    server.control.clear_faults()

    stack.enter_context(after)
    with Journal(after.path / "cache" / "journal") as journal:  # it opens, and all rows can be read
        owed = {row.key for row in journal.files() if row.state in OWED}
    assert owed >= {*SYNCED, *SETTLED}
    again = Daemon(server, tmp_path / "after", "--settle-seconds", str(SETTLE_SECONDS))
    again.cache = after.path / "cache"
    again.program = [sys.executable, "-c", ANOTHER_BOOT]
    stack.callback(again.clean_up)
    again.mount()
    assert again.sync() == 0
    shown = {key: server.control.read(key) for key in server.control.objects()}
    assert {name for name, data in shown.items() if data != content(name)} == set()
    # What was fsynced and closed is published, as if nothing had happened.
    assert shown.keys() >= {"published", *SETTLED, *SYNCED}
    assert "open" not in shown
    kept = [path for path in (again.cache / "suspect").iterdir() if path.name.isdigit()]
    lost = set(DIRTY) - shown.keys()
    whole = {path.read_bytes() for path in kept}
    if seconds is None:
        assert lost == set()  # all of them came to the disk in the background
    else:
        dropped = [name for name in lost if content(name) not in whole]
        assert dropped or may_be_synced, "the cut lost nothing: it shows nothing"
    if lost:
        wait_until(lambda: "quarantined" in again.log(), "the alarm")
    for name in shown:
        assert (again.path / name).read_bytes() == content(name)
    again.kill()
    assert doubtful(again) == lost  # none of them is forgotten, even if its very file is gone


def test_a_disk_that_loses_its_power_loses_what_was_not_synced(stack: ExitStack, tmp_path: Path) -> None:
    """The model itself: without this the test above would show nothing."""
    disk = stack.enter_context(Disk.new(tmp_path / "image", tmp_path / "disk"))
    write(disk.path / "synced", sync=True)
    write(disk.path / "dirty")
    folder = os.open(disk.path, os.O_RDONLY)
    os.fsync(folder)
    os.close(folder)
    after = stack.enter_context(disk.cut(tmp_path / "image-after", tmp_path / "disk-after"))
    assert (after.path / "synced").read_bytes() == content("synced")
    # Its name was synced with the folder, its pages were not.
    assert (after.path / "dirty").read_bytes() == b""
