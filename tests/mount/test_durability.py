"""Writers that wait: for the bucket, for room. Nobody else on the mount does; and files that wait for nobody."""

import ctypes
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from tests.mount.conftest import Place
from tests.s3server import Fault, FaultAction
from tests.support.mounts import NEEDS_OWN_SESSION, Mount, pattern, run, wait_until
from tests.support.s3_buckets import Bucket

MakeMount = Callable[..., Mount]

MIB = 2**20
MNT_DETACH = 2  # umount2(2)
HOLD = Fault(FaultAction.HOLD, operation="PutObject")

WRITE_AND_SYNC = """
import os, sys
file = open(sys.argv[1], "wb")
file.write(b"synced")
file.flush()
print("syncing", flush=True)
os.fsync(file.fileno())
print("synced", flush=True)
sys.stdin.read()
"""


@contextmanager
def program(text: str, *arguments: object, **variables: str) -> Iterator[subprocess.Popen[str]]:
    """Run a program that says lines; it is gone afterwards."""
    with subprocess.Popen(
        [sys.executable, "-c", text, *map(str, arguments)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, **variables},
    ) as process:
        try:
            yield process
        finally:
            if process.poll() is None:
                process.kill()


def said(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


# ---- what was closed


@pytest.mark.parametrize("by", ["umount", "abort"])
def test_a_file_that_was_closed_right_before_the_mounts_end_is_published(
    mount: MakeMount, bucket: Bucket, by: str
) -> None:
    """The kernel drops a release that it has not sent when the mount ends, without a message."""
    umount2 = ctypes.CDLL(None).umount2
    for number in range(6):
        one = mount()
        point, name = os.fsencode(one.path), f"file-{number}"
        connection = Path(f"/sys/fs/fuse/connections/{os.minor(one.path.stat().st_dev)}/abort")
        file = os.open(one.path / name, os.O_WRONLY | os.O_CREAT)
        os.write(file, b"closed")
        if number % 2:
            os.fsync(file)
        os.close(file)
        if by == "umount":
            umount2(point, MNT_DETACH)
        else:
            connection.write_text("1")
        wait_until(lambda: not one.is_alive(), "the daemon's end")  # noqa: B023
        assert bucket.get(name) == b"closed"


@NEEDS_OWN_SESSION
@pytest.mark.s3server_only
def test_a_file_whose_release_the_kernel_holds_back_is_published_by_a_mount_that_is_aborted(
    mount: MakeMount, bucket: Bucket
) -> None:
    """Releases queue behind the read-ahead of other files. A read still waits for the bucket at the mount's end."""
    bucket.put("read", pattern(MIB))
    one = mount()
    connection = Path(f"/sys/fs/fuse/connections/{os.minor(one.path.stat().st_dev)}")
    file = os.open(one.path / "closed", os.O_WRONLY | os.O_CREAT)
    os.write(file, b"closed")
    os.fsync(file)
    (connection / "max_background").write_text("1")
    bucket.control.faults(Fault(FaultAction.HOLD, operation="GetObject", key=f"{bucket.prefix}read"))
    with program("import sys; open(sys.argv[1], 'rb').read()", one.path / "read"):
        bucket.control.wait_requests(1, operation="GetObject", finished=False)
        os.close(file)
        (connection / "abort").write_text("1")
        wait_until(lambda: "closed" in bucket.names(), "the closed file", seconds=30)
    bucket.control.clear_faults()


# ---- fsync = "remote"


def test_a_remote_fsync_returns_when_the_bucket_has_the_open_file(mount, bucket):
    one: Mount = mount("--fsync", "remote", "--settle-seconds", "3")
    (one.path / "step").mkdir()
    (one.path / "step" / "before").write_bytes(b"1")
    with open(one.path / "step" / "file", "wb") as file:
        file.write(b"first")
        file.flush()
        os.fsync(file.fileno())
        assert (bucket.get("step/file"), bucket.get("step/before")) == (b"first", b"1")
        file.write(b" second")
        file.flush()
        os.fdatasync(file.fileno())
        assert bucket.get("step/file") == b"first second"
    with open(one.path / "step" / ".metadata.tmp", "wb") as file:
        file.write(b"index")
        file.flush()
        os.fsync(file.fileno())
    assert set(bucket.names()) <= {"step/", "step/file", "step/before"}


@pytest.mark.case(29)
@pytest.mark.s3server_only
def test_who_waits_in_a_remote_fsync_holds_nobody_up_and_can_be_killed(mount, bucket, expect_log):
    bucket.put("other", b"there")
    one: Mount = mount("--fsync", "remote")
    bucket.control.clear_log()
    bucket.control.faults(HOLD)
    with program(WRITE_AND_SYNC, one.path / "file") as process:
        assert said(process) == "syncing"
        bucket.control.wait_requests(1, operation="PutObject", finished=False)
        assert set(os.listdir(one.path)) == {"file", "other"}
        assert (one.path / "other").read_bytes() == b"there"
        assert (one.path / "file").read_bytes() == b"synced"
        assert (one.path / "file").stat().st_size == 6
        (one.path / "another").write_bytes(b"2")
        run("ls", "-l", one.path, seconds=30)
        process.kill()
        assert process.wait(30) == -9
    bucket.control.clear_faults()
    one.sync()
    assert bucket.get("file") == b"synced"


@pytest.mark.s3server_only
def test_a_mount_that_ends_answers_who_waits_in_a_remote_fsync(mount, bucket, expect_log):
    expect_log("request failed call=fsync error=.*mount ends")
    one: Mount = mount("--fsync", "remote")
    bucket.control.clear_log()
    bucket.control.faults(HOLD)
    errors: list[OSError] = []

    def sync() -> None:
        descriptor = os.open(one.path / "file", os.O_CREAT | os.O_WRONLY)
        os.write(descriptor, b"1")
        try:
            os.fsync(descriptor)
        except OSError as exc:
            errors.append(exc)
        with suppress(OSError):
            os.close(descriptor)

    waiting = threading.Thread(target=sync)
    waiting.start()
    bucket.control.wait_requests(1, operation="PutObject", finished=False)
    os.kill(one.pid, 15)
    waiting.join(30)
    assert [exc.strerror for exc in errors] == ["Input/output error"]
    bucket.control.clear_faults()
    wait_until(lambda: not one.is_alive(), "the daemon's end")
    assert bucket.get("file") == b"1"


def test_a_job_of_several_nodes_is_told_once_that_fsync_does_not_wait_for_the_bucket(mount, expect_log):
    expect_log("fsync does not wait for the bucket.*WORLD_SIZE=16, LOCAL_WORLD_SIZE=8.*--fsync remote")
    one: Mount = mount()
    for name in ("a", "b"):
        with program(WRITE_AND_SYNC, one.path / name, WORLD_SIZE="16", LOCAL_WORLD_SIZE="8") as process:
            assert (said(process), said(process)) == ("syncing", "synced")
            process.communicate("")
    assert one.log().count("--fsync remote") == 1


# ---- room


@pytest.mark.case(28)
@pytest.mark.s3server_only
def test_while_the_bucket_takes_nothing_writers_slow_down_then_are_refused_and_readers_never_wait(
    mount, bucket, expect_log
):
    bucket.put("other", pattern(3 * MIB))
    one: Mount = mount("--cache-size", "200MiB")  # 140 MiB for what is written, 92 before closes wait
    bucket.control.clear_log()
    bucket.control.faults(HOLD)
    kept = {f"file-{number}": pattern(30 * MIB) for number in range(3)}
    for name, data in kept.items():
        (one.path / name).write_bytes(data)
    threads = [
        threading.Thread(target=(one.path / f"late-{number}").write_bytes, args=(pattern(200_000),))
        for number in range(60)
    ]
    slow = threading.Thread(target=(one.path / "slow").write_bytes, args=(pattern(8 * MIB),))
    slow.start()
    wait_until(lambda: one.status()["cache"]["staging_bytes"] > 97 * MIB, "the slow file's bytes")
    for thread in threads:
        thread.start()
    wait_until(lambda: all((one.path / f"late-{number}").exists() for number in range(60)), "all files")
    began = time.monotonic()
    assert (one.path / "other").read_bytes() == pattern(3 * MIB)
    assert (one.path / "file-1").read_bytes() == kept["file-1"]
    assert len(os.listdir(one.path)) == 65
    assert time.monotonic() - began < 60  # the closes wait for 300 s
    assert slow.is_alive()
    assert all(thread.is_alive() for thread in threads)
    with pytest.raises(OSError, match="No space left"):
        _fill(one, threads)
    bucket.control.clear_faults()
    for thread in (slow, *threads):
        thread.join(60)
        assert not thread.is_alive()
    wait_until(lambda: one.status()["dirty_files"] == 0, "the last close")
    one.sync()
    sizes = bucket.sizes()
    assert {name: sizes[name] for name in kept} == dict.fromkeys(kept, 30 * MIB)
    assert {sizes[f"late-{number}"] for number in range(60)} == {200_000}
    assert sizes["slow"] == 8 * MIB
    if "publish failed, will retry" in one.log():  # held for longer than a request may take
        expect_log("publish failed, will retry")


def _fill(one: Mount, threads: list[threading.Thread]) -> None:
    """Write files, whose closes wait, until one cannot be made."""
    for number in range(10):
        descriptor = os.open(one.path / f"fill-{number}", os.O_CREAT | os.O_WRONLY)
        threads.append(threading.Thread(target=_write_and_close, args=(descriptor,)))
        threads[-1].start()
        least = (104 + 8 * number) * MIB
        wait_until(lambda least=least: one.status()["cache"]["staging_bytes"] >= least, "its bytes")


def _write_and_close(descriptor: int) -> None:
    os.write(descriptor, pattern(8 * MIB))
    os.close(descriptor)


# ---- local_only


def test_a_temporary_directory_on_the_mount_makes_the_last_rename_atomic(mount, bucket):
    """As Lightning saves: a temporary file in $TMPDIR, then a rename."""
    one: Mount = mount("--local-only", "tmp/")
    (one.path / "tmp").mkdir()
    text = """
import os, sys, tempfile
with tempfile.NamedTemporaryFile(delete=False) as file:
    file.write(b"x" * 3_000_000)
os.chmod(file.name, 0o644)
os.replace(file.name, sys.argv[1])
"""
    with program(text, one.path / "model.ckpt", TMPDIR=str(one.path / "tmp")) as process:
        assert process.wait(20) == 0
    (one.path / "tmp" / "scratch").write_bytes(b"1")
    one.sync()
    assert {name: size for name, size in bucket.sizes().items() if not name.endswith("/")} == {
        "model.ckpt": 3_000_000
    }
    with pytest.raises(OSError, match="cross-device"):
        (one.path / "model.ckpt").rename(one.path / "tmp" / "model.ckpt")
    run("mv", one.path / "model.ckpt", one.path / "tmp" / "model.ckpt")
    one.sync()
    assert [name for name in bucket.names() if not name.endswith("/")] == []
    assert one.status("tmp/scratch")["state"] == "local-only"
    one.unmount()
    again: Mount = mount("--local-only", "tmp/", cache=one.cache)
    assert (again.path / "tmp" / "model.ckpt").stat().st_size == 3_000_000
    assert sorted(path.name for path in (again.path / "tmp").iterdir()) == ["model.ckpt", "scratch"]


# ---- changes of what another client replaced


# What programs do to a file at once, and what its size, permissions and time are then; None: any.
CHANGES: dict[str, tuple[Callable[[Path], object], tuple[int, int, float | None] | None]] = {
    "chmod": (lambda path: path.chmod(0o600), (5, 0o600, None)),
    "utime": (lambda path: os.utime(path, (1e9, 1.1e9)), (5, 0o644, 1.1e9)),
    "truncate": (lambda path: os.truncate(path, 3), (3, 0o644, None)),
    "append": (lambda path: path.open("ab").close(), (5, 0o644, None)),
    "move": (lambda path: path.rename(path.with_name("again")), (5, 0o644, None)),
    "remove": (Path.unlink, None),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_of_a_file_whose_new_version_was_found_by_its_rename(
    mount: MakeMount, bucket: Bucket, change: str
) -> None:
    """The kernel believes a name for a second; the daemon's own second began before."""
    one = mount("--settle-seconds", "0.5")
    file, moved = one.path / "file", one.path / "moved"
    closed = 0.0
    while time.monotonic() > closed + 1.4:  # else the daemon's second, which began with the upload, was over
        file.write_bytes(b"old")
        closed = time.monotonic()
        one.sync()
        published = time.monotonic()
        time.sleep(max(0.0, closed + 1.1 - published))
        file.stat()
    bucket.put("file", b"newer")
    time.sleep(max(0.0, published + 1.05 - time.monotonic()))
    file.rename(moved)
    make, expected = CHANGES[change]
    make(moved)
    time.sleep(1.1)  # the kernel asks again
    found = [path.stat() for path in one.path.iterdir()]
    seen = [(each.st_size, each.st_mode & 0o777, each.st_mtime) for each in found]
    assert [(*each[:2], None if expected is None or expected[2] is None else each[2]) for each in seen] == [
        each for each in [expected] if each is not None
    ]


@pytest.mark.parametrize("change", ["chmod", "utime", "truncate"])
def test_a_change_of_a_file_that_another_client_replaced_is_one_of_the_new_file(place: Place, change: str):
    place.bucket.put("file", b"old")
    path = place.path / "file"
    assert path.read_bytes() == b"old"
    place.bucket.put("file", b"newer")
    time.sleep(1.1)  # names are believed for a second
    if change == "chmod":
        path.chmod(0o600)
    elif change == "utime":
        os.utime(path, (1e9, 1.1e9))
    else:
        os.truncate(path, 3)
    seen = path.stat()
    if change == "chmod":
        assert (seen.st_mode & 0o777, seen.st_size) == (0o600, 5)
    elif change == "utime":
        assert (seen.st_mtime, seen.st_size) == (1.1e9, 5)
    else:
        assert path.read_bytes() == b"new"
