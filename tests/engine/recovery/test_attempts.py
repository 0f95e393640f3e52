"""A job that is killed again and again while it writes ends neither itself nor other writers.

Its attempts stay listed while there is space. When a writer finds none, older attempts at a name give way to newer
content of that name. All sizes are MiB of a cache of 60, of which written files may use 42.
"""

import logging
from pathlib import Path

import pytest
import trio

from fusecache.model.errors import LocalDiskError, NoSpace
from fusecache.model.objects import MIB
from fusecache.model.verdict import judge
from tests.support.node import Bucket, User, photograph, running_node

CACHE_BYTES = 60 * MIB


async def attempt(user: User, path: str, mib: int) -> None:
    """Write a file whose writer is killed before it closes it."""
    handle = await user.open(path)
    for start in range(0, mib * MIB, 2 * MIB):
        await user.fs.file_io.write(handle, start, bytes(2 * MIB))
    version = handle.node.version
    assert version is not None
    version.close_state.killed_writer = handle
    await user.fs.file_io.release(handle)


async def sizes(user: User) -> list[tuple[str, int]]:
    """Return path and MiB of each entry of `recover`, the oldest first."""
    found = await user.fs.quarantine.listing()
    return [(row["path"], row["bytes"] // MIB) for row in found["entries"]]


def verdict_of(user: User) -> tuple[str, list[str]]:
    judged = judge(user.fs.statistics(), {})
    return judged["verdict"], judged["reasons"]


async def test_attempts_at_one_name_use_the_space_of_one_file(
    bucket: Bucket, cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    async with running_node(bucket, cache, cache_bytes=CACHE_BYTES) as user:
        for _ in range(10):
            await attempt(user, "step", 8)
        await user.write("small", b"x")
        await user.write("step", bytes(30 * MIB))
        assert await user.drained() == "durable"
        assert user.fs.statistics()["shortages"] == {"files": 0}
    assert len(bucket.shows()["step"]) == 30 * MIB
    lines = [record.getMessage() for record in caplog.records if "older attempt" in record.getMessage()]
    assert lines
    assert all("path=step bytes=8388608" in line for line in lines)


async def test_all_attempts_stay_while_there_is_space_and_then_the_oldest_goes_first(
    bucket: Bucket, cache: Path
) -> None:
    async with running_node(bucket, cache, cache_bytes=CACHE_BYTES) as user:
        for mib in (8, 10, 12):
            await attempt(user, "step", mib)
        assert await sizes(user) == [("step", 8), ("step", 10), ("step", 12)]
        await attempt(user, "step", 14)
        assert await sizes(user) == [("step", 10), ("step", 12), ("step", 14)]


async def test_an_attempt_larger_than_half_of_the_space_gives_way_to_the_next(
    bucket: Bucket, cache: Path
) -> None:
    async with running_node(bucket, cache, cache_bytes=CACHE_BYTES) as user:
        for _ in range(3):
            await attempt(user, "step", 36)
        assert await sizes(user) == [("step", 36)]
        await user.write("step", bytes(36 * MIB))
        assert await user.drained() == "durable"


async def test_an_attempt_that_took_all_space_gives_way_as_the_file_is_created_again(
    bucket: Bucket, cache: Path
) -> None:
    async with running_node(bucket, cache, cache_bytes=CACHE_BYTES) as user:
        await attempt(user, "step", 42)
        with pytest.raises(NoSpace):
            await user.write("other", b"x")
        await user.write("step", b"whole")
        await user.write("other", b"x")
        assert await user.drained() == "durable"


async def test_a_daemon_that_is_killed_with_every_attempt_is_no_different(
    bucket: Bucket, cache: Path, tmp_path: Path
) -> None:
    directory = cache
    for number in range(6):
        async with running_node(bucket, directory, cache_bytes=CACHE_BYTES) as user:
            handle = await user.open("step")
            for start in range(0, 12 * MIB, 2 * MIB):
                await user.fs.file_io.write(handle, start, bytes(2 * MIB))
            await user.fs.close_protocol.fsync(handle)
            directory = tmp_path / f"killed-{number}"
            photograph(cache if number == 0 else tmp_path / f"killed-{number - 1}", directory)
            await user.close(handle)
            await user.unlink("step")
    async with running_node(bucket, directory, cache_bytes=CACHE_BYTES) as user:
        await user.write("step", bytes(20 * MIB))
        assert await user.drained() == "durable"


async def test_what_was_closed_under_the_name_since_stands_for_the_attempts(
    bucket: Bucket, cache: Path
) -> None:
    async with running_node(bucket, cache, cache_bytes=CACHE_BYTES) as user:
        for name in ("step-1", "step-2", "step-3"):
            await attempt(user, name, 12)
            await user.write(name, b"whole")
            (await user.fs.resolve(name)).lookups += 1  # as the kernel does
            assert await user.drained() == "durable"
        await user.write("large", bytes(30 * MIB))
        assert await user.drained() == "durable"
        assert await sizes(user) == [("step-3", 12)]


async def test_the_only_attempt_at_a_name_is_kept_and_the_verdict_says_what_holds_the_space(
    bucket: Bucket, cache: Path
) -> None:
    async with running_node(bucket, cache, cache_bytes=CACHE_BYTES) as user:
        await attempt(user, "log-1", 10)
        assert verdict_of(user) == ("OK", [])
        await attempt(user, "log-2", 10)
        assert verdict_of(user) == (
            "DEGRADED",
            [
                "2 unfinished files hold 20.0 MiB of the 42.0 MiB for files that wait for upload: "
                "see `fusecache recover`"
            ],
        )
        with pytest.raises(NoSpace):
            await user.write("new", bytes(30 * MIB))
        assert await sizes(user) == [("log-1", 10), ("log-2", 10)]
        verdict, reasons = verdict_of(user)
        assert verdict == "ACTION"
        assert reasons[0] == (
            "no space for 1 write: raise --cache-size, or restore or delete unfinished files: "
            "see `fusecache recover`"
        )


async def test_writers_that_find_no_space_at_once_share_what_one_attempt_frees(
    bucket: Bucket, cache: Path
) -> None:
    async with running_node(bucket, cache, cache_bytes=CACHE_BYTES) as user:
        await attempt(user, "step", 20)
        await attempt(user, "step", 20)
        handles = [await user.open(f"shard-{number}") for number in range(8)]
        async with trio.open_nursery() as nursery:
            for handle in handles:
                nursery.start_soon(user.fs.file_io.write, handle, 0, bytes(2 * MIB))
        for handle in handles:
            await user.close(handle)
        assert await user.drained() == "durable"
        assert await sizes(user) == [("step", 20)]


async def test_closed_content_never_gives_way(bucket: Bucket, cache: Path) -> None:
    """A file whose write failed may have been closed before: it stays."""
    async with running_node(bucket, cache, cache_bytes=CACHE_BYTES) as user:
        for _ in range(2):
            handle = await user.open("failed")
            await user.fs.file_io.write(handle, 0, bytes(10 * MIB))
            user.fs._write_back.write.states.fail(handle.node.version, LocalDiskError("the disk failed"))
            await user.fs.file_io.release(handle)
        with pytest.raises(NoSpace):
            await user.write("failed", bytes(30 * MIB))
        assert await sizes(user) == [("failed", 10), ("failed", 10)]
