"""A process that waits for the bucket dies at once by SIGKILL. Needs the own FUSE session: pyfuse3 hides interrupts."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from fusecache.engine.runtime.procfs import KILL_LOOK_SECONDS
from tests.s3server import Fault, FaultAction
from tests.support.mounts import NEEDS_OWN_SESSION, Mount, pattern, wait_until
from tests.support.s3_buckets import Bucket

# Containers may hide where a process waits.
pytestmark = [pytest.mark.s3server_only, pytest.mark.whole_machine, NEEDS_OWN_SESSION]

# What the promise says, and what a loaded machine adds: without it these waits take 20 s or more.
DEAD_SECONDS = 1 + 4
SIZE = 1 << 20
# Where the kernel waits for the daemon: for a reply, or for the page that an asynchronous request reads.
WAITING = ("request_wait_answer", "folio_wait_bit_common", "folio_wait_bit")
WAITS = {
    "lookup": "os.stat(path + '/folder/unknown')",
    "readdir": "os.listdir(path + '/folder')",
    "read": "os.preadv(os.open(path + '/data', os.O_RDONLY | os.O_DIRECT), [mmap.mmap(-1, 4096)], 0)",
    "mapping": "mmap.mmap(os.open(path + '/data', os.O_RDONLY), 0, prot=mmap.PROT_READ)[4096]",
}
# Each with a function of the kernel in which it waits: requests before the change, as that of open(2), are others.
CHANGES = {
    "rename of a directory": ("os.rename(path + '/folder', path + '/moved')", "fuse_rename_common"),
    "rmdir": ("os.rmdir(path + '/folder')", "fuse_rmdir"),
    "truncate": ("os.truncate(path + '/data', 1000)", "fuse_do_setattr"),
}


@pytest.fixture
def silent(mount: Callable[..., Mount], bucket: Bucket) -> Iterator[Mount]:
    """A mount whose bucket takes requests and does not answer, after the root and a directory were listed."""
    bucket.put("data", pattern(SIZE))
    bucket.put("folder/known", b"1")
    bucket.put("listed/known", b"1")
    made = mount("--fuse-library", "own", "--attribute-seconds", "600")
    assert sorted(path.name for path in made.path.iterdir()) == ["data", "folder", "listed"]
    assert [path.name for path in (made.path / "listed").iterdir()] == ["known"]
    assert bucket.service.control is not None
    bucket.service.control.pause("blackhole")
    yield made
    bucket.service.control.resume()


def begun(silent: Mount, step: str, *, before: str = "") -> "subprocess.Popen[str]":
    """A process that waits in a step."""
    program = f"import mmap, os, signal, sys; path = sys.argv[1]; {before}\nprint('go', flush=True); {step}"
    process = subprocess.Popen(
        [sys.executable, "-c", program, silent.path],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "go\n"
    try:
        wait_until(lambda: wchan(process.pid) in WAITING, f"the wait in {step}")
    except AssertionError:
        process.kill()
        process.communicate()
        raise
    return process


def wchan(pid: int) -> str:
    with open(f"/proc/{pid}/wchan") as file:
        return file.read()


@pytest.mark.parametrize("step", WAITS)
def test_a_killed_process_is_gone(silent: Mount, step: str) -> None:
    process = begun(silent, WAITS[step])
    assert process.poll() is None
    began = time.monotonic()
    process.kill()
    process.communicate(timeout=DEAD_SECONDS)
    assert time.monotonic() - began < DEAD_SECONDS
    assert process.returncode == -signal.SIGKILL


def test_killed_processes_that_wait_for_each_others_locks_are_gone(silent: Mount) -> None:
    """The kernel has one lock for all renames to another directory: who waits for it cannot die before its holder."""
    holder = begun(silent, "os.rename(path + '/folder', path + '/listed/folder')")
    waiter = subprocess.Popen(["mv", silent.path / "data", silent.path / "listed"])
    try:
        wait_until(lambda: "rename" in wchan(waiter.pid), "the wait for the lock")
        began = time.monotonic()
        for process in (holder, waiter):
            process.kill()
        holder.communicate(timeout=DEAD_SECONDS)
        waiter.wait(DEAD_SECONDS)
        assert time.monotonic() - began < DEAD_SECONDS
    finally:
        waiter.kill()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root sees where a process waits in the kernel")
@pytest.mark.parametrize("step", CHANGES)
def test_a_process_that_is_killed_before_its_change_began_is_gone_and_nothing_has_changed(
    silent: Mount, bucket: Bucket, step: str
) -> None:
    program, function = CHANGES[step]
    process = begun(silent, program)
    wait_until(lambda: function in Path(f"/proc/{process.pid}/stack").read_text(), f"the wait in {function}")
    began = time.monotonic()
    process.kill()
    process.communicate(timeout=DEAD_SECONDS)
    assert time.monotonic() - began < DEAD_SECONDS
    assert bucket.service.control is not None
    bucket.service.control.resume()
    assert (silent.path / "data").read_bytes() == pattern(SIZE)
    assert (silent.path / "folder" / "known").read_bytes() == b"1"
    silent.sync()
    assert bucket.sizes() == {"data": SIZE, "folder/known": 1, "listed/known": 1}
    with open(silent.path / "data", "r+b") as file:
        file.write(b"new")
    silent.sync()
    assert bucket.get("data") == b"new" + pattern(SIZE)[3:]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root sees where a process waits in the kernel")
def test_the_first_write_of_a_program_with_threads_that_exits_is_published(
    silent: Mount, bucket: Bucket
) -> None:
    """exit(2) ends its other threads by SIGKILL, and the one that ends last closes the file."""
    program = (
        "import threading, time; "
        "waits = threading.Thread(target=os.stat, args=(path + '/folder/unknown',), daemon=True); waits.start(); "
        f"os.pwrite(os.open(path + '/data', {os.O_RDWR}), bytes(8192), 0); time.sleep(0.5); os._exit(0)"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", f"import os, sys; path = sys.argv[1]; {program}", silent.path]
    )

    def closes_the_file() -> bool:
        stacks = Path(f"/proc/{process.pid}/task").glob("*/stack")
        return any("fuse_flush" in stack.read_text() for stack in stacks)

    wait_until(closes_the_file, "the close by the last thread")
    began = time.monotonic()
    wait_until(lambda: time.monotonic() > began + 3 * KILL_LOOK_SECONDS, "looks at the process")
    assert process.poll() is None
    assert bucket.service.control is not None
    bucket.service.control.resume()
    assert process.wait(20) == 0
    silent.sync()
    assert bucket.get("data") == bytes(8192) + pattern(SIZE)[8192:]


def test_ctrl_c_ends_a_program_that_handles_it(silent: Mount) -> None:
    process = begun(silent, WAITS["lookup"])
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=DEAD_SECONDS)
    assert said.splitlines()[-1] == "KeyboardInterrupt"


def test_a_handled_signal_fails_no_system_call(silent: Mount, bucket: Bucket) -> None:
    """A trainer that saves a checkpoint at SIGTERM must not be told that a file is not there."""
    handler = "signal.signal(signal.SIGTERM, lambda *_: print('handled', flush=True))"
    process = begun(silent, "print(os.path.exists(path + '/folder/known'))", before=handler)
    process.send_signal(signal.SIGTERM)
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(1)
    assert bucket.service.control is not None
    bucket.service.control.resume()
    # The request that was swallowed is repeated after its timeout.
    said, _ = process.communicate(timeout=60)
    assert said.split() == ["handled", "True"]


def test_a_later_signal_ends_a_wait_that_a_handled_one_did_not(silent: Mount) -> None:
    handler = "signal.signal(signal.SIGTERM, lambda *_: None)"
    process = begun(silent, WAITS["lookup"], before=handler)
    process.send_signal(signal.SIGTERM)
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(1)
    process.kill()
    process.communicate(timeout=DEAD_SECONDS)
    assert process.returncode == -signal.SIGKILL


def test_ctrl_c_ends_a_remote_fsync_and_the_file_is_published_later(
    mount: Callable[..., Mount], bucket: Bucket
) -> None:
    made = mount("--fuse-library", "own", "--fsync", "remote")
    control = bucket.service.control
    assert control is not None
    control.clear_log()
    control.faults(Fault(FaultAction.HOLD, operation="PutObject"))
    before = "file = open(path + '/new', 'wb'); file.write(b'bytes'); file.flush()"
    process = begun(made, "os.fsync(file.fileno())", before=before)
    control.wait_requests(1, operation="PutObject", finished=False)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=DEAD_SECONDS)
    assert said.splitlines()[-1] == "KeyboardInterrupt"
    control.clear_faults()
    made.sync()
    assert bucket.get("new") == b"bytes"
