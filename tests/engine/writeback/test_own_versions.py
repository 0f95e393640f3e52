"""What this node closed, and nobody else touched, is shown, moved and removed without a conflict, and not lost."""

from pathlib import Path

import pytest
import trio

from fusecache.engine.namespace.nodes import FileHandle
from fusecache.model.errors import NoSpace
from fusecache.model.objects import MIB
from tests.engine.write.test_writing import SlowUploads
from tests.support.node import Bucket, User, running_node


async def failing(user: User, name: str) -> FileHandle:
    """Open a file for writing, and have a write find no room."""
    handle = await user.open(name, truncate=False)
    await user.fs.file_io.write(handle, 0, b"half")
    find_no_room(user, handle)
    return handle


def find_no_room(user: User, handle: FileHandle) -> None:
    version = handle.node.version
    assert version is not None
    user.fs._write_back.write.states.fail(version, NoSpace("full"))


async def end(user: User, handle: FileHandle) -> None:
    with pytest.raises(NoSpace):
        await user.close(handle)


async def append(user: User, name: str, data: bytes) -> None:
    handle = await user.open(name, truncate=False)
    await user.fs.file_io.write(handle, handle.node.size, data)
    await user.close(handle)


@pytest.mark.parametrize("before", ["nothing", "older"])
@pytest.mark.parametrize("act", ["unlink", "write", "append"])
async def test_what_was_published_under_a_writer_that_fails_then_is_no_other_clients(
    bucket: Bucket, cache: Path, act: str, before: str
) -> None:
    async with running_node(bucket, cache) as user:
        if before == "older":
            await user.write("a", b"old")
            assert await user.drained() == "durable"
        await trio.sleep(5)
        await user.tree()
        await trio.sleep(0.5)
        await user.write("a", b"closed")
        handle = await failing(user, "b")
        await user.rename("b", "a")
        while bucket.shows().get("a") != b"closed":
            await user.tree()  # the last listing is of shortly before
            await trio.sleep(0.05)
        await end(user, handle)
        assert await user.read("a") == b"closed"
        if act == "unlink":
            await user.unlink("a")
        elif act == "write":
            await user.write("a", b"newer")
        else:
            await append(user, "a", b"+")
        assert await user.drained() == "durable"
        assert user.fs.publisher.rejections.conflicts == {}
    expected = {"unlink": {}, "write": {"a": b"newer"}, "append": {"a": b"closed+"}}
    assert bucket.shows() == expected[act]


@pytest.mark.parametrize("whose", ["its own", "the target's"])
async def test_content_on_its_way_under_an_older_name_shows_again_when_what_came_after_it_failed(
    bucket: Bucket, cache: Path, whose: str
) -> None:
    async with running_node(bucket, cache, offload=SlowUploads(8.0)) as user:
        await user.write("x", b"closed")
        await trio.sleep(4)  # it is on its way
        if whose == "the target's":
            await user.rename("x", "a")
            handle = await failing(user, "b")
            await user.rename("b", "a")
        else:
            handle = await failing(user, "x")
            await user.rename("x", "a")
        await end(user, handle)
        await append(user, "a", b"+")
        assert await user.read("a") == b"closed+"
        assert await user.drained() == "durable"
    assert bucket.shows() == {"a": b"closed+"}


async def test_content_of_a_name_between_shows_again_when_what_came_after_it_failed(
    bucket: Bucket, cache: Path
) -> None:
    async with running_node(bucket, cache, offload=SlowUploads(8.0)) as user:
        await user.write("a", b"older")
        await trio.sleep(4)  # it is on its way
        await user.rename("a", "b")
        await user.write("b", b"closed")
        await user.rename("b", "a")
        await end(user, await failing(user, "a"))
        assert await user.read("a") == b"closed"
        assert await user.drained() == "durable"
    assert bucket.shows() == {"a": b"closed"}


async def test_a_name_whose_object_is_about_to_go_has_nothing_to_be_moved(
    bucket: Bucket, cache: Path
) -> None:
    async with running_node(bucket, cache) as user:
        await user.write("a", b"old")
        assert await user.drained() == "durable"
        bucket.takes_nothing = True
        await user.unlink("a")
        first, second = await user.open("a"), await user.open("b")
        for handle in (first, second):
            await user.fs.file_io.write(handle, 0, b"new")
        await user.rename("b", "a")
        await user.rename("a", "c")
        bucket.come_back()
        await user.close(first)
        await trio.sleep(20)
        assert user.fs.publisher.rejections.conflicts == {}  # no conflict, not even for a moment
        await user.close(second)
        assert await user.drained() == "durable"
    assert bucket.shows() == {"c": b"new"}


async def test_what_came_to_the_bucket_under_an_older_name_meanwhile_shows_again(
    bucket: Bucket, cache: Path
) -> None:
    large = bytes(6 * MIB)
    async with running_node(bucket, cache, offload=SlowUploads(8.0)) as user:
        await user.write("large", large)
        await user.write("x", b"closed")
        await trio.sleep(4)  # both are on their way
        await user.rename("x", "a")
        handle = await failing(user, "b")
        await user.rename("b", "a")
        await trio.sleep(10)
        assert set(bucket.shows()) == {"x"}  # the rename waits for the large file
        await end(user, handle)
        assert await user.read("a") == b"closed"
        await append(user, "a", b"+")
        assert await user.drained() == "durable"
    assert bucket.shows() == {"a": b"closed+", "large": large}


async def test_a_removed_name_stays_so_though_what_took_its_place_was_taken_back(
    bucket: Bucket, cache: Path
) -> None:
    async with running_node(bucket, cache) as user:
        await user.write("a", b"old")
        assert await user.drained() == "durable"
        bucket.takes_nothing = True
        await user.unlink("a")
        handle = await user.open("b")
        await user.fs.file_io.write(handle, 0, b"half")
        await user.fs.close_protocol.flush(handle)  # a forked child's
        await user.rename("b", "a")
        await user.fs.file_io.write(handle, 4, b"more")
        find_no_room(user, handle)
        await end(user, handle)
        assert await user.tree() == {}
        bucket.come_back()
        assert await user.drained() == "durable"
        assert await user.tree() == {}
    assert bucket.shows() == {}
