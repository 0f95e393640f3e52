"""Changes of names that the bucket does not take: what came after them moves nothing of others, and no alarm stays."""

from pathlib import Path

import trio
from trio.testing import MockClock

from fusecache.model.errors import Refused
from fusecache.remote.faulty import Fault, FaultyStore
from tests.engine.nodes import Bucket, files_in, running_node


async def test_a_rename_behind_one_that_another_client_was_quicker_with_leaves_theirs_alone(
    bucket: Bucket, cache: Path, autojump_clock: MockClock
) -> None:
    async with running_node(bucket, cache) as user:
        await user.write("a", b"ours")
        assert await user.drained() == "durable"
        await user.rename("a", "b")
        await user.rename("b", "c")
        bucket.memory.put_bytes("b", b"theirs")
        assert await user.drained() == "conflict"
        await trio.sleep(10)
    assert files_in(bucket.shows()) == {"a": b"ours", "b": b"theirs"}


async def test_a_rename_behind_one_that_is_refused_does_not_move_what_that_was_to_replace(
    bucket: Bucket, cache: Path, autojump_clock: MockClock
) -> None:
    store = FaultyStore(bucket, Fault(Refused("locked"), "copy", "b", times=1))
    async with running_node(store, cache) as user:
        await user.write("a", b"ours")
        await user.write("b", b"old")
        assert await user.drained() == "durable"
        await user.rename("a", "b")
        await user.rename("b", "c")
        await user.drained()
        await trio.sleep(10)
    assert files_in(bucket.shows()) == {"a": b"ours", "b": b"old"}


async def test_a_refused_change_is_no_error_any_more_once_it_is_made_again(
    bucket: Bucket, cache: Path, autojump_clock: MockClock
) -> None:
    store = FaultyStore(bucket, Fault(Refused("locked"), "delete", "d/old", times=1))
    async with running_node(store, cache, fsync_is_remote=True) as user:
        await user.mkdir("d")
        await user.write("d/old", b"1")
        assert await user.drained() == "durable"
        await user.unlink("d/old")
        assert await user.drained() == "error"
        handle = await user.open("d/new")
        await user.fs.contents.write(handle, 0, b"1")
        await user.fs.fsync(handle)  # it does not come after what was given up before
        await user.close(handle)
        assert user.fs.statistics()["rejected_files"] == 1
        await user.unlink("d/old")
        assert await user.drained() == "durable"
        assert user.fs.statistics()["rejected_files"] == 0
        assert await user.fs.path_state("d") == "clean"
