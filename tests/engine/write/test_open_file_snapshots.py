"""Files that are never closed, or closed all the time, are in the bucket all the same, as they really were."""

from pathlib import Path

import pytest
import trio

from fusecache.engine.namespace.nodes import FileHandle
from fusecache.model.objects import MIB
from tests.engine.write.test_writing import SlowUploads
from tests.support.node import Bucket, User, photograph, running_node

LARGE = 6 * MIB  # more than one part
SNAPSHOT = 60.0


async def open_log(user: User, path: str) -> FileHandle:
    """Make and open as a logger does, with O_APPEND."""
    node = await user.fs.namespace_ops.create(user.fs.tree.root, path, 0o644)
    return user.fs.file_io.open(node, writable=True, pid=0, appends=True)


async def append(user: User, handle: FileHandle, data: bytes) -> None:
    await user.fs.file_io.write(handle, handle.node.size, data)


def assert_states(states: list[bytes], line: bytes) -> None:
    """Every version is whole lines, and each holds the one before."""
    for before, now in zip([b"", *states], states, strict=False):
        assert now.startswith(before)
        assert now == line * (len(now) // len(line))


@pytest.mark.case(53)
async def test_a_log_held_open_is_published_as_it_is(bucket: Bucket, cache: Path) -> None:
    line = b"one line\n"
    async with running_node(bucket, cache) as user:
        log = await user.open("log")
        for _ in range(3000):
            await append(user, log, line)
            await trio.sleep(0.1)
        states = [state["log"] for state in bucket.states]
        assert 3 <= len(states) <= 6  # 300 s
        assert_states(states, line)
        await user.close(log)
        assert await user.drained() == "durable"
        assert await user.read("log") == line * 3000
    assert bucket.shows() == {"log": line * 3000}


async def test_an_interval_is_as_long_as_the_engine_is_told(bucket: Bucket, cache: Path) -> None:
    async with running_node(bucket, cache, snapshot_seconds=5.0) as user:
        log = await user.open("log")
        for _ in range(100):
            await append(user, log, b".")
            await trio.sleep(0.3)
        assert 3 <= len(bucket.states) <= 6
        await user.close(log)


async def test_a_log_that_rests_is_not_published_again(bucket: Bucket, cache: Path) -> None:
    async with running_node(bucket, cache) as user:
        log = await user.open("log")
        await append(user, log, b"x")
        await trio.sleep(1000)
        assert bucket.sent("put") == ["log"]
        await user.close(log)
        assert await user.drained() == "durable"
    assert bucket.sent("put") == ["log"]


@pytest.mark.case(18)
async def test_a_log_reopened_for_each_line_is_published_too_and_not_too_often(
    bucket: Bucket, cache: Path
) -> None:
    line = b"one line\n"
    async with running_node(bucket, cache) as user:
        await user.write("log", b"")
        for _ in range(600):
            log = user.fs.file_io.open(await user.fs.resolve("log"), writable=True, pid=0, appends=True)
            await append(user, log, line)
            await user.close(log)
            await trio.sleep(0.1)
        assert await user.drained() == "durable"
    states = [state["log"] for state in bucket.states]
    assert 2 <= len(states) <= 55
    assert_states(states, line)
    assert states[-1] == line * 600


async def test_a_large_file_that_is_not_appended_to_is_not_published_in_part(
    bucket: Bucket, cache: Path
) -> None:
    """A checkpoint on its way to a slow disk."""
    async with running_node(bucket, cache) as user:
        handle = await user.open("checkpoint")
        await user.fs.file_io.truncate(handle.node, LARGE)
        for offset in range(0, LARGE, MIB):
            await user.fs.file_io.write(handle, offset, b"x" * MIB)
            await trio.sleep(100)
        assert bucket.states == []
        await user.close(handle)
        assert await user.drained() == "durable"
    assert bucket.shows() == {"checkpoint": b"x" * LARGE}


async def test_a_large_log_that_is_appended_to_is_published(bucket: Bucket, cache: Path) -> None:
    async with running_node(bucket, cache) as user:
        log = await open_log(user, "log")
        for _ in range(LARGE // MIB):
            await append(user, log, b"x" * MIB)
        await trio.sleep(100)
        assert bucket.shows() == {"log": b"x" * LARGE}
        await append(user, log, b"y")
        await user.close(log)
        assert await user.drained() == "durable"
    assert bucket.shows() == {"log": b"x" * LARGE + b"y"}


@pytest.mark.parametrize("name", [".tmpxyz", "model.tmp"])
async def test_a_temporary_name_is_not_published_while_it_is_open(
    bucket: Bucket, cache: Path, name: str
) -> None:
    async with running_node(bucket, cache) as user:
        handle = await user.open(name)
        await append(user, handle, b"x")
        await trio.sleep(1000)
        await user.rename(name, "model")
        await user.close(handle)
        assert await user.drained() == "durable"
    assert bucket.sent("put") == ["model"]


async def test_a_slow_upload_makes_snapshots_rarer(bucket: Bucket, cache: Path) -> None:
    async with running_node(bucket, cache, offload=SlowUploads(10.0)) as user:
        log = await user.open("log")
        for _ in range(1500):
            await append(user, log, b".")
            await trio.sleep(1.0)
        # After 60 s, and then every 600 s or so.
        assert 2 <= len(bucket.states) <= 4
        await user.close(log)
        assert await user.drained() == "durable"


async def test_a_snapshot_of_a_writer_that_is_killed_later_stays_published(
    bucket: Bucket, cache: Path
) -> None:
    async with running_node(bucket, cache) as user:
        log = await user.open("log")
        await append(user, log, b"first")
        await trio.sleep(100)
        await append(user, log, b" second")
        assert log.node.version is not None
        log.node.version.close_state.killed_writer = log
        await user.close(log)
        assert await user.drained() == "durable"
        assert await user.read("log") == b"first"
    assert bucket.shows() == {"log": b"first"}


async def test_snapshots_are_there_after_a_crash_and_what_came_after_is_kept_aside(
    bucket: Bucket, cache: Path, tmp_path: Path
) -> None:
    async with running_node(bucket, cache) as user:
        log = await user.open("log")
        await append(user, log, b"first")
        bucket.takes_nothing = True
        await trio.sleep(SNAPSHOT + 5)
        await append(user, log, b" second")
        await trio.sleep(1)
        photograph(cache, tmp_path / "crashed")
    bucket.come_back()
    async with running_node(bucket, tmp_path / "crashed") as user:
        assert await user.drained() == "durable"
        assert await user.read("log") == b"first"
    assert bucket.shows() == {"log": b"first"}
    (orphan,) = (tmp_path / "crashed" / "orphans").iterdir()
    assert orphan.read_bytes() == b"first second"


async def test_while_the_bucket_takes_nothing_snapshots_do_not_pile_up(bucket: Bucket, cache: Path) -> None:
    async with running_node(bucket, cache) as user:
        bucket.takes_nothing = True
        log = await user.open("log")
        for _ in range(60):
            await append(user, log, b"x")
            await trio.sleep(30)
        assert len(user.fs.queue) <= 2
        bucket.come_back()
        await user.close(log)
        assert await user.drained() == "durable"
    assert bucket.shows() == {"log": b"x" * 60}
