"""What kill -9 leaves behind is read again or fetched again, never wrong."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import lmdb
import pytest

from fusecache.model.objects import MIB, ObjectId
from tests.support import ROOT
from tests.support.block_caches import new_bucket, read_all, running_cache, some_bytes

pytestmark = pytest.mark.real_time

SIZE = 30 * MIB + 1234
# Reads the object, says so and forgets it, again and again; or has it kept, says so, and waits to be killed.
CHILD = """
import sys, trio
from pathlib import Path
from tests.support.block_caches import fill_all, new_bucket, read_all, running_cache, some_bytes

async def main():
    bucket = new_bucket()
    data = some_bytes({size})
    object_id = bucket.put("a", data)
    async with running_cache(bucket.watched, Path(sys.argv[1])) as cache:
        if {keeps}:
            await fill_all(cache, object_id, len(data))
            print("read", flush=True)
            await trio.sleep_forever()
        while True:
            await read_all(cache, object_id, len(data))
            print("read", flush=True)
            await cache.forget(object_id)

trio.run(main)
"""


def _run_and_kill(directory: Path, reads: int, wait: Callable[[], None] | None = None) -> None:
    child = subprocess.Popen(
        [sys.executable, "-c", CHILD.format(size=SIZE, keeps=wait is not None), str(directory)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert child.stdout is not None
    with child.stdout:
        for _ in range(reads):
            assert child.stdout.readline() == b"read\n"
        if wait is not None:
            wait()
        child.send_signal(signal.SIGKILL)
        assert child.wait() == -signal.SIGKILL


def _wait_for_rows(directory: Path) -> None:
    """Return once the index has rows of all bytes: within a minute, or the test fails."""
    deadline = time.monotonic() + 60
    with lmdb.open(str(directory / "index" / "rows"), max_dbs=5, readonly=True) as env:
        meta = env.open_db(b"meta", create=False)
        while True:
            with env.begin(db=meta) as txn:
                if int.from_bytes(txn.get(b"used_bytes", b"")) >= SIZE:
                    return
            assert time.monotonic() < deadline, "the rows are not written"
            time.sleep(0.1)


async def _check(directory: Path) -> int:
    """Read everything in the next run under the same boot; return how many GETs that took."""
    bucket = new_bucket()
    data = some_bytes(SIZE)
    object_id = ObjectId("a", bucket.memory.put_bytes("a", data))
    async with running_cache(bucket.watched, directory) as cache:
        assert await read_all(cache, object_id, len(data)) == data
        assert cache.statistics().checksum_failures == 0
    return bucket.memory.statistics().gets


async def test_a_kill_in_the_middle_of_writing_leaves_right_bytes(tmp_path: Path) -> None:
    for reads in (1, 3, 6):
        _run_and_kill(tmp_path, reads)
        await _check(tmp_path)


async def test_a_kill_some_seconds_later_loses_nothing(tmp_path: Path) -> None:
    _run_and_kill(tmp_path, 1, lambda: _wait_for_rows(tmp_path))
    assert await _check(tmp_path) == 0
