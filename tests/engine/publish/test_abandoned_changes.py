"""Operations that the bucket rejects: later renames move no other client's object, and no report of them stays."""

from pathlib import Path

import pytest
import trio

from fusecache.model.errors import Refused
from fusecache.model.objects import MIB
from tests.support.faulty_store import Fault, FaultyStore
from tests.support.node import Bucket, files_in, running_node


@pytest.mark.parametrize("size", [1, 5 * MIB], ids=["small", "parts"])
@pytest.mark.parametrize("theirs", [b"theirs", None], ids=["changed", "removed"])
@pytest.mark.parametrize("replaces", [False, True])
async def test_ours_replaces_theirs_where_one_asks_for_that(
    bucket: Bucket,
    cache: Path,
    size: int,
    theirs: bytes | None,
    replaces: bool,  # noqa: FBT001
) -> None:
    async with running_node(bucket, cache, last_wins=True) as user:
        if replaces:
            await user.write("file", b"old")
            assert await user.drained() == "durable"
        bucket.takes_nothing = True
        await user.write("file", b"1" * size)
        await user.write("latest", b"1")
        await trio.sleep(5)
        if theirs is not None:
            bucket.memory.put_bytes("file", theirs)
        elif replaces:
            bucket.memory.delete("file")
        bucket.come_back()
        assert await user.drained() == "durable"
        assert await user.read("file") == b"1" * size
        assert user.fs.statistics()["conflict_files"] == 0
    assert bucket.shows() == {"file": b"1" * size, "latest": b"1"}


async def test_a_rename_behind_one_that_another_client_was_quicker_with_leaves_theirs_alone(
    bucket: Bucket, cache: Path
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
    bucket: Bucket, cache: Path
) -> None:
    store = FaultyStore(bucket, Fault(Refused("locked"), "copy", "b", times=None))
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
    bucket: Bucket, cache: Path
) -> None:
    store = FaultyStore(bucket, Fault(Refused("locked"), "delete", "d/old", times=1))
    async with running_node(store, cache, fsync_is_remote=True) as user:
        await user.mkdir("d")
        await user.write("d/old", b"1")
        assert await user.drained() == "durable"
        await user.unlink("d/old")
        assert await user.drained() == "error"
        handle = await user.open("d/new")
        await user.fs.file_io.write(handle, 0, b"1")
        await user.fs.fsync(handle)  # it does not come after what was given up before
        await user.close(handle)
        assert user.fs.statistics()["rejected_files"] == 1
        await user.unlink("d/old")
        assert await user.drained() == "durable"
        assert user.fs.statistics()["rejected_files"] == 0
        assert await user.fs.status.path_state("d") == "clean"
