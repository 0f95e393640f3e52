"""Thousands of requests that wait for the bucket: others are served, memory has a limit, each is answered."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from fusecache.config.node_limits import request_memory
from fusecache.model.objects import MIB
from tests.s3server import Fault, FaultAction
from tests.support.mounts import NEEDS_OWN_SESSION, Mount, pattern, run, wait_until
from tests.support.s3_buckets import Bucket

pytestmark = [pytest.mark.s3server_only, pytest.mark.whole_machine, NEEDS_OWN_SESSION]

# What the promise says, and what a loaded machine adds: without it these calls take 20 s or more.
SOON_SECONDS = 1 + 11
READERS = 5000
# More than may wait at once.
WRITERS = request_memory() // MIB + 50
# Whole places for requests, some of which are kept for the next burst.
MORE_BYTES = 20 * MIB

READ = """
file = os.open(path + "/data", os.O_RDONLY | os.O_DIRECT)
def call(number):
    os.preadv(file, [mmap.mmap(-1, 4096)], 4096 * number)
"""
WRITE = """
def call(number):
    memory = mmap.mmap(-1, 1 << 20)
    memory.write(number.to_bytes(8, "little") * (1 << 17))
    file = os.open(f"{path}/many/{number}", os.O_WRONLY | os.O_DIRECT)
    assert os.pwritev(file, [memory], 0) == 1 << 20
    os.close(file)
"""
# One thread for each call; ends with status 1 if a call failed.
AT_ONCE = """
import mmap, os, sys, threading
path = sys.argv[1]
threading.stack_size(1 << 16)
threading.excepthook = lambda failed: os._exit(1)
{}
for number in range(int(sys.argv[2])):
    threading.Thread(target=call, args=(number,)).start()
"""


@contextmanager
def at_once(mount: Mount, call: str, count: int) -> "Iterator[subprocess.Popen[bytes]]":
    """A program whose calls wait for the mount, all of them."""
    waiting = Path(f"/sys/fs/fuse/connections/{os.minor(os.stat(mount.path).st_dev)}/waiting")
    if not waiting.exists():
        pytest.skip("the control file system of FUSE is not mounted")
    with subprocess.Popen([sys.executable, "-c", AT_ONCE.format(call), mount.path, str(count)]) as process:
        try:
            wait_until(lambda: int(waiting.read_text()) >= count, f"{count} requests", seconds=60)
            yield process
        finally:
            process.kill()


def settled_bytes(pid: int) -> int:
    """Return the memory that the requests of a daemon use, once it takes no more of them."""
    seen = [-1]

    def has_settled() -> bool:
        seen.append(request_bytes(pid))
        time.sleep(0.5)
        return seen[-1] == seen[-2]

    wait_until(has_settled, "the last request that is taken")
    return seen[-1]


def request_bytes(pid: int) -> int:
    """Return the memory that the requests of a daemon use."""
    for link in Path(f"/proc/{pid}/fd").iterdir():
        if "fuse-requests" in os.readlink(link):
            return link.stat().st_blocks * 512
    raise AssertionError(f"process {pid} has no memory for requests")


def test_a_program_that_reads_at_thousands_of_places_blocks_no_other_and_can_be_killed(
    mount: Callable[..., Mount], bucket: Bucket
) -> None:
    control = bucket.service.control
    assert control is not None
    bucket.put("cached/file", pattern(MIB))
    control.add_synthetic(f"{bucket.prefix}data", READERS * 4096, 1)
    made = mount("--keep-mounted", "--attribute-seconds", "600")
    assert (made.path / "cached" / "file").read_bytes() == pattern(MIB)
    assert [len(os.listdir(path)) for path in (made.path, made.path / "cached")] == [2, 1]
    control.pause("blackhole")
    # What is open is kept also if another test drops the kernel's caches, and then the bucket would be asked.
    with open(made.path / "cached" / "file", "rb"), at_once(made, READ, READERS) as process:
        for words in (
            ("stat", made.path / "cached" / "file"),
            ("ls", "-l", made.path / "cached"),
            ("cat", made.path / ".fusecache" / "stats.json"),
            ("dd", "iflag=direct", "bs=64K", "status=none", f"if={made.path}/cached/file", "of=/dev/null"),
        ):
            run(*words, seconds=SOON_SECONDS)
        assert process.poll() is None
        assert request_bytes(made.pid) < MORE_BYTES
        began = time.monotonic()
        process.kill()
        process.wait(2 * SOON_SECONDS)
        assert process.returncode == -signal.SIGKILL
        assert time.monotonic() - began < SOON_SECONDS
    control.resume()


def test_writes_that_wait_have_a_limit_of_memory_and_are_all_done_also_if_the_daemon_is_killed(
    mount: Callable[..., Mount], bucket: Bucket
) -> None:
    """Each is the first write to its file, which is fetched before."""
    control = bucket.service.control
    assert control is not None
    control.add_many(bucket.prefix + "many/{}", WRITERS, MIB + 4096)
    made = mount("--keep-mounted", "--cache-size", "8GiB", "--attribute-seconds", "600")
    assert len(os.listdir(made.path / "many")) == WRITERS
    # Not a pause: requests that it swallows are repeated after a minute.
    control.faults(Fault(FaultAction.HOLD, operation="GetObject"))
    with at_once(made, WRITE, WRITERS) as process:
        assert settled_bytes(made.pid) < request_memory() + MORE_BYTES
        descriptors = len(os.listdir(f"/proc/{made.pid}/fd"))
        assert descriptors < WRITERS + 100, "one of each file, and none of its request"
        os.kill(made.pid, signal.SIGKILL)
        control.clear_faults()
        assert process.wait(60) == 0
    for number in range(WRITERS):
        with open(made.path / "many" / str(number), "rb") as file:
            assert file.read(MIB) == number.to_bytes(8, "little") * (MIB // 8)
    before, made.pid = made.pid, made.status()["pid"]
    assert made.pid != before
    assert settled_bytes(made.pid) < MORE_BYTES
