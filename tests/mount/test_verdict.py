"""The verdict on a mount: the first line of `status`, and the exit status of `health`."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.s3server import Fault, FaultAction
from tests.support.mounts import Mount, run, wait_until

pytestmark = pytest.mark.s3server_only
PROGRAM = (sys.executable, "-m", "fusecache")


def health(path: Path) -> tuple[int, str]:
    """Return the exit status of `fusecache health`, and its one line."""
    done = run(*PROGRAM, "health", path, check=False)
    assert done.stdout.count("\n") == 1, done
    return done.returncode, done.stdout.strip()


def first_line(path: Path) -> str:
    return run(*PROGRAM, "status", path).stdout.splitlines()[0]


def test_a_mount_in_order_is_ok(mount):
    made: Mount = mount()
    assert health(made.path) == (0, "OK")
    assert first_line(made.path) == "OK"
    assert (made.status()["verdict"], made.status()["reasons"]) == ("OK", [])


def test_uploads_under_way_are_ok(mount):
    """The line says how much is left."""
    made: Mount = mount("--settle-seconds", "60")
    (made.path / "file").write_bytes(b"12345")
    assert health(made.path) == (0, "OK, uploading 1 change, 5 B")


def test_keys_that_no_path_can_name_are_counted_and_degrade_nothing(mount, bucket):
    """Counted as `fusecache check` counts them, in the directories that were listed, until they are gone."""
    hidden = ["sub//empty part", "sub/../up", "sub/./dot", f"sub/{'n' * 256}", f"sub/{'한' * 86}"]
    for key in (*hidden, "sub/shown", f"sub/{'한' * 85}", "sub/e\u0301"):
        bucket.put(key, b"1")
    made: Mount = mount("--attribute-seconds", "0")
    assert health(made.path) == (0, "OK")
    assert len(os.listdir(made.path / "sub")) == 3
    line = f"OK, {len(hidden)} keys not visible in the mount: see `fusecache check`"
    assert (health(made.path), first_line(made.path)) == ((0, line), line)
    assert made.status()["hidden_keys"] == len(hidden)
    checked = run(*PROGRAM, "check", made.path, check=False).stdout
    assert f"{len(hidden)} not visible in the mount" in checked
    for key in hidden[1:]:
        bucket.delete(key)
    wait_until(
        lambda: os.listdir(made.path / "sub") and "OK, 1 key not visible" in health(made.path)[1], "one key"
    )
    bucket.delete(hidden[0])
    bucket.delete("sub/shown")
    wait_until(lambda: os.listdir(made.path / "sub") and health(made.path) == (0, "OK"), "no key")


def test_a_bucket_that_does_not_answer_degrades(mount, bucket):
    made: Mount = mount()
    bucket.put("file", b"here")
    assert (made.path / "file").read_bytes() == b"here"
    os.listdir(made.path)
    bucket.control.pause("refuse")
    wait_until(lambda: (made.path / "file").stat() and health(made.path)[0] == 1, "the degraded state")
    assert first_line(made.path).startswith("DEGRADED: the bucket has not answered for ")
    bucket.control.resume()
    wait_until(lambda: os.listdir(made.path) and health(made.path) == (0, "OK"), "the end of it", seconds=70)


def test_a_conflict_asks_for_action(mount, bucket, expect_log):
    expect_log("conflict")
    made: Mount = mount()
    bucket.control.faults(Fault(FaultAction.HOLD, operation="PutObject"))
    (made.path / "file").write_bytes(b"ours")
    bucket.put("file", b"theirs")
    bucket.control.clear_faults()
    wait_until(lambda: made.status()["conflict_files"], "the conflict")
    status, line = health(made.path)
    assert status == 2
    assert line.startswith("ACTION: 1 conflict with another client")


def test_health_answers_although_the_daemon_hangs(mount):
    """In 5 s with the start of Python, with exit status 2, and it leaves no process that holds the caller's pipe."""
    made: Mount = mount()
    os.kill(made.pid, signal.SIGSTOP)
    try:
        status, line = health(made.path)
    finally:
        os.kill(made.pid, signal.SIGCONT)
    assert status == 2
    assert line.startswith(f"ACTION: {made.path}: no answer from the daemon within 4 s: ")


@pytest.mark.parametrize("is_dead", [False, True])
def test_health_of_no_mount_asks_for_action(mount, tmp_path, is_dead):
    """Where nothing is mounted, or the daemon is dead."""
    path = tmp_path
    made: Mount | None = None
    if is_dead:
        made = mount()
        os.kill(made.pid, signal.SIGKILL)
        wait_until(lambda: not made.is_alive(), "the daemon's end")
        path = made.path
    done = subprocess.run([*PROGRAM, "health", path], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stdout.startswith("ACTION: ")
    if made is not None:
        made.pid = 0
        made.detach()
