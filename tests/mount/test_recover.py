"""`status`, `sync` and `recover` by the real command line: what is said of bytes that the bucket does not have.

What a test only looks up it asks the daemon for itself: an interpreter takes as long to start as most tests last.
"""

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fusecache.cli.recover import LiveMount
from fusecache.mount.control_client import find_mount
from tests.mount.test_commands import fusecache
from tests.s3server import Fault, FaultAction
from tests.support.mounts import Mount, run, wait_until
from tests.support.s3_buckets import Bucket

pytestmark = pytest.mark.s3server_only

HALF = b"half a checkpoint " * 5000
KILLED_WRITER = """
import os, signal, sys
file = os.open(sys.argv[1], os.O_CREAT | os.O_WRONLY)
os.write(file, b"half a checkpoint " * 5000)
os.kill(os.getpid(), signal.SIGKILL)
"""


def kill_a_writer(path: Path, mount: Mount) -> None:
    """Have a process killed in the middle of writing; return when its bytes lie aside."""
    before = len(things(mount))
    done = subprocess.run([sys.executable, "-c", KILLED_WRITER, path], check=False)
    assert done.returncode == -signal.SIGKILL
    wait_until(lambda: len(things(mount)) > before, "the orphan")


def things(mount: Mount) -> list[dict[str, Any]]:
    """Return what the daemon lists."""
    found, _ = find_mount(mount.path, os.environ)
    return list(LiveMount(found).listing()["entries"])


def taken(mount: Mount) -> tuple[int, int, int]:
    """Return how many files lie aside, their bytes, and the room that the cache has given to files of its own."""
    said = mount.status()
    return said["orphans"], said["aside_bytes"], said["cache"]["staging_bytes"]


def listed(place: Path) -> list[dict[str, Any]]:
    """Return what the command line lists."""
    return list(json.loads(fusecache("recover", place, "--json").stdout)["entries"])


# ---- on a mount


def test_an_unfinished_file_is_listed_brought_back_and_published(
    mount: Callable[..., Mount], bucket: Bucket, expect_log: Any
) -> None:
    expect_log("quarantined unfinished file")
    one = mount()
    (one.path / "step").mkdir()
    kill_a_writer(one.path / "step" / "model", one)
    said = fusecache("recover", one.path).stdout
    (thing,) = listed(one.path)
    first, second, *_ = said.splitlines()
    assert re.match(rf" *{thing['id']}  orphan +87\.9 KiB  \d{{4}}-\d\d-\d\d [\d:]+  step/model$", first)
    assert second.strip() == f"its writer was killed before it closed the file; {thing['local_path']}"
    assert (one.status()["orphans"], one.status()["aside_bytes"]) == (1, len(HALF))
    metrics = fusecache("metrics", one.path).stdout
    assert re.search(rf"^fusecache_quarantined_bytes\{{.*\}} {len(HALF)}(\.0)?$", metrics, re.MULTILINE)
    assert "1 unfinished file in quarantine" in fusecache("status", one.path).stdout

    with pytest.raises(FileNotFoundError):
        (one.path / "step" / "model.recovered-1").stat()  # the kernel remembers this for a second
    back = one.path / "step" / "model.recovered-1"
    done = fusecache("recover", one.path, "--restore", str(thing["id"]))
    assert done.stdout == f"{thing['id']}: {back}\n"
    assert back.read_bytes() == HALF
    assert fusecache("recover", one.path).stdout == "nothing to recover\n"
    assert one.status()["orphans"] == 0
    one.sync()
    assert bucket.get("step/model.recovered-1") == HALF
    assert "step/model" not in bucket.names()


def test_it_comes_back_where_one_says_on_the_mount_or_as_a_local_copy(
    mount: Callable[..., Mount], tmp_path: Path, expect_log: Any
) -> None:
    expect_log("quarantined unfinished file")
    one = mount()
    (one.path / "there").mkdir()
    kill_a_writer(one.path / "model", one)
    (thing,) = things(one)
    number = str(thing["id"])
    (one.path / "taken").write_bytes(b"mine")
    done = fusecache("recover", one.path, "--restore", number, "--to", one.path / "taken", status=1)
    assert "exists" in done.stderr
    done = fusecache("recover", one.path, "--restore", number, "--to", tmp_path / "copy")
    assert (tmp_path / "copy").read_bytes() == HALF
    assert (
        "exists"
        in fusecache("recover", one.path, "--restore", number, "--to", tmp_path / "copy", status=1).stderr
    )
    assert len(things(one)) == 1
    done = fusecache("recover", one.path, "--restore", number, "--to", one.path / "there")
    assert done.stdout == f"{number}: {one.path / 'there' / 'model'}\n"
    assert (one.path / "there" / "model").read_bytes() == HALF
    assert (one.path / "taken").read_bytes() == b"mine"
    assert "no such entry" in fusecache("recover", one.path, "--restore", number, status=1).stderr


def test_a_read_only_mount_says_that_it_brings_nothing_back(
    mount: Callable[..., Mount], tmp_path: Path, expect_log: Any
) -> None:
    expect_log("quarantined unfinished file")
    one = mount()
    kill_a_writer(one.path / "model", one)
    number = str(things(one)[0]["id"])
    expect_log.seen += one.new_alarms()
    one.unmount()
    one.start("--read-only")
    for words in (("--restore", number), ("--delete", number, "--yes")):
        done = fusecache("recover", one.path, *words, status=1)
        assert "read-only" in done.stderr
        assert "--to" in done.stderr
    fusecache("recover", one.path, "--restore", number, "--to", tmp_path / "copy")
    assert (tmp_path / "copy").read_bytes() == HALF
    assert one.status()["pending_files"] == 0
    one.unmount()
    one.start()
    fusecache("recover", one.path, "--restore", number, "--to", one.path / "back")
    assert (one.path / "back").read_bytes() == HALF


def test_deleting_asks_first_and_frees_the_room_also_for_the_next_daemon(
    mount: Callable[..., Mount], expect_log: Any
) -> None:
    expect_log("quarantined unfinished file")
    one = mount("--local-only", "tmp/", "--local-only", "scratch/")
    for folder in ("tmp", "scratch"):
        (one.path / folder).mkdir()
        (one.path / folder / "file").write_bytes(b"12345")
    kill_a_writer(one.path / "a", one)
    kill_a_writer(one.path / "b", one)
    first, second = things(one)
    done = fusecache("recover", one.path, "--delete", str(first["id"]), status=1)
    assert f"would delete a, {'87.9 KiB'}" in done.stdout
    assert "--yes" in done.stderr
    assert one.status()["orphans"] == 2
    done = fusecache("recover", one.path, "--delete", str(first["id"]), "--yes")
    assert done.stdout == f"{first['id']}: deleted, 87.9 KiB freed\n"
    assert not Path(first["local_path"]).exists()
    expect_log.seen += one.new_alarms()
    assert [line for line in one.unmount().splitlines() if "uploading" not in line] == [
        f"fusecache: 1 unfinished file is in quarantine, 87.9 KiB: fusecache recover {one.cache}",
        f"fusecache: 2 local-only files, 10 B, exist only in {one.cache}: the next mount with this cache directory "
        "shows them again",
    ]
    assert one.start("--local-only=tmp/,scratch/") == ""  # nothing that was not known at the end
    (one.path / "tmp" / "file").unlink()
    (one.path / "scratch" / "file").unlink()
    assert [thing["path"] for thing in things(one)] == ["b"]
    # Room is given back when the disk has the journal of it, a moment after the call.
    wait_until(lambda: taken(one) == (1, len(HALF), len(HALF)), "the room of what was unlinked")
    fusecache("recover", one.path, "--delete", str(second["id"]), "--yes")
    wait_until(lambda: taken(one) == (0, 0, 0), "the room of what was removed")


def test_a_conflict_ends_sync_with_3_until_somebody_has_seen_to_it(
    mount: Callable[..., Mount], bucket: Bucket, expect_log: Any
) -> None:
    expect_log("conflict key=")
    bucket.put("file", b"theirs")
    one = mount()
    bucket.control.faults(Fault(FaultAction.HOLD, operation="PutObject"))
    (one.path / "file").write_bytes(b"ours")
    bucket.put("file", b"theirs, newer")
    bucket.control.clear_faults()
    wait_until(lambda: one.status()["conflict_files"], "the conflict")
    for _ in range(2):
        done = fusecache("sync", one.path / "file", status=3)
        assert "compare them, then remove or rename the copy" in done.stderr
    (thing,) = things(one)
    copy = one.path / thing["kept_as"]
    assert copy.name.endswith(f"-{thing['id']}")  # one number for both
    first = fusecache("status", one.path / "file").stdout.splitlines()[0]
    assert first.split(maxsplit=1) == ["file", "conflict (1 in conflict)"]
    one.sync(copy.name)
    assert copy.read_bytes() == b"ours"
    expect_log.seen += one.new_alarms()
    one.unmount()  # both versions are in the bucket: nothing to wait for
    one.start()
    fusecache("sync", one.path, status=3)
    fusecache("recover", one.path, "--delete", str(thing["id"]), "--yes")
    fusecache("sync", one.path)
    assert bucket.names() == ["file"]
    assert things(one) == []


@pytest.mark.case(49)
def test_sync_of_a_directory_of_a_hundred_dirty_files(mount: Callable[..., Mount], bucket: Bucket) -> None:
    one = mount()
    (one.path / "d").mkdir()
    for index in range(100):
        (one.path / "d" / f"{index}").write_bytes(b"%d" % index * 100)
    assert fusecache("sync", one.path / "d").stderr.count("\n") <= 2
    shown = {key: bucket.get(key) for key in bucket.names() if not key.endswith("/")}
    assert shown == {f"d/{index}": b"%d" % index * 100 for index in range(100)}
    assert fusecache("status", one.path / "d").stdout.splitlines()[0].split() == ["d", "clean"]


def test_sync_that_runs_out_of_time_ends_with_1(mount: Callable[..., Mount], bucket: Bucket) -> None:
    one = mount("--settle-seconds", "30")
    (one.path / "file").write_bytes(b"1")
    done = fusecache("sync", one.path / "file", "--timeout", "1", status=1)
    assert "timeout: uploads are still under way, 1 change, 1 B left\n" in done.stderr
    said = fusecache("status", one.path / "file").stdout
    assert re.match(r"file +queued \(1 change, 1 B not in the bucket yet, the oldest for", said)
    one.unmount()
    assert bucket.get("file") == b"1"


# ---- without one


def test_a_cache_directory_without_a_mount_gives_its_files_back(
    mount: Callable[..., Mount], bucket: Bucket, tmp_path: Path, expect_log: Any
) -> None:
    expect_log("recovered files=")
    expect_log("quarantined key=")
    one = mount("--settle-seconds", "30")
    assert f"`fusecache recover {one.path}`" in fusecache("recover", one.cache, status=1).stderr
    unfinished = os.open(one.path / "unfinished", os.O_CREAT | os.O_WRONLY)
    os.write(unfinished, HALF)
    os.fsync(unfinished)
    (one.path / "closed").write_bytes(b"closed")
    one.kill()
    with pytest.raises(OSError, match="not connected"):
        os.close(unfinished)
    found = {thing["path"]: thing for thing in listed(one.cache)}
    assert {path: thing["kind"] for path, thing in found.items()} == {
        "unfinished": "orphan",
        "closed": "waiting",
    }
    for path, content in (("closed", b"closed"), ("unfinished", HALF)):
        number = str(found[path]["id"])
        assert "--to" in fusecache("recover", one.cache, "--restore", number, status=1).stderr
        fusecache("recover", one.cache, "--restore", number, "--to", tmp_path)
        assert (tmp_path / path).read_bytes() == content
    waiting, orphan = str(found["closed"]["id"]), str(found["unfinished"]["id"])
    assert "on the mount" in fusecache("recover", one.cache, "--delete", waiting, "--yes", status=1).stderr
    fusecache("recover", one.cache, "--delete", orphan, "--yes")
    assert one.start("--settle-seconds", "30") == "1 change of the last run is pending and will be uploaded"
    expect_log.seen += one.new_alarms()
    again = os.open(one.path / "again", os.O_CREAT | os.O_WRONLY)
    os.write(again, HALF)
    os.fsync(again)
    one.kill()
    with pytest.raises(OSError, match="not connected"):
        os.close(again)
    assert one.start() == (
        "1 change of the last run is pending and will be uploaded; 1 unfinished file is in quarantine: "
        f"fusecache recover {one.path}"
    )
    one.sync()
    assert bucket.names() == ["closed"]
    fusecache("recover", one.path, "--delete", "all", "--yes")
    assert things(one) == []


def test_a_read_only_mount_over_unpublished_files_is_refused_with_the_way_out(
    mount: Callable[..., Mount], bucket: Bucket, expect_log: Any
) -> None:
    expect_log("recovered files=")
    one = mount("--settle-seconds", "30")
    (one.path / "file").write_bytes(b"1")
    one.kill()
    environment = bucket.service.environment()
    done = run(*one.command("--read-only"), env=environment, check=False)
    assert done.returncode == 1
    for words in ("1 change, 1 B", "read-write once", f"fusecache recover {one.cache}", "--cache-dir"):
        assert words in done.stderr
    assert len(done.stderr.splitlines()) == 1
    one.start()
    one.sync()
    expect_log.seen += one.new_alarms()
    one.unmount()
    one.start("--read-only")
    assert (one.path / "file").read_bytes() == b"1"


def test_sockets_of_killed_daemons_go_at_the_next_start_of_any_mount(mount: Callable[..., Mount]) -> None:
    one, two = mount(), mount()
    stale = Path((one.path / ".fusecache" / "socket").read_text().strip())
    alive = Path((two.path / ".fusecache" / "socket").read_text().strip())
    assert stale.is_socket()
    one.kill()
    three = mount()
    assert not stale.exists()
    assert alive.is_socket()
    assert two.status()["pid"] == two.pid
    assert three.status()["pid"] == three.pid
