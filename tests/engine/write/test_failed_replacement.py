"""A file whose write failed is renamed over another: what was closed under that name shows again, and nothing else."""

from pathlib import Path

import trio

from tests.engine.write.test_writing import SlowUploads
from tests.engine.writeback.test_own_versions import end, find_no_room
from tests.support.node import Bucket, User, running_node


async def rename_what_fails(user: User, name: str, target: str) -> None:
    """Do as a program does that renames what it still writes, and finds no room after that."""
    handle = await user.open(name)
    await user.fs.file_io.write(handle, 0, b"unfinished")
    await user.rename(name, target)
    find_no_room(user, handle)
    await end(user, handle)


async def test_a_target_that_was_on_its_way_to_the_bucket_shows_again_and_can_be_removed(
    bucket: Bucket, cache: Path
) -> None:
    bucket.memory.put_bytes("a", b"old")
    async with running_node(bucket, cache, offload=SlowUploads(8.0)) as user:
        await user.write("a", b"closed")
        await trio.sleep(4)  # it is on its way
        await rename_what_fails(user, "b", "a")
        assert await user.read("a") == b"closed"
        await trio.sleep(10)
        assert bucket.shows() == {"a": b"closed"}
        assert await user.read("a") == b"closed"
        await user.unlink("a")
        assert await user.drained() == "durable"
        assert await user.tree() == {}
    assert bucket.shows() == {}


async def test_a_target_that_is_still_read_shows_again_to_all(bucket: Bucket, cache: Path) -> None:
    bucket.memory.put_bytes("a", b"old")
    async with running_node(bucket, cache, offload=SlowUploads(8.0)) as user:
        await user.write("a", b"closed")
        reader = user.fs.file_io.open(await user.fs.resolve("a"), writable=False, pid=0)
        await trio.sleep(4)  # it is on its way
        await rename_what_fails(user, "b", "a")
        assert await user.fs.file_io.read(reader, 0, 10) == b"closed"
        await trio.sleep(10)
        assert await user.fs.file_io.read(reader, 0, 10) == b"closed"
        await user.fs.file_io.release(reader)
        assert await user.read("a") == b"closed"
        assert await user.drained() == "durable"
    assert bucket.shows() == {"a": b"closed"}


async def test_a_target_that_is_written_again_shows_what_was_closed_of_it(
    bucket: Bucket, cache: Path
) -> None:
    bucket.memory.put_bytes("a", b"old")
    async with running_node(bucket, cache, offload=SlowUploads(8.0)) as user:
        await user.write("a", b"closed")
        await trio.sleep(4)  # it is on its way
        writer = await user.open("a", truncate=False)
        await user.fs.file_io.write(writer, 0, b"newer, and nowhere by now")
        await rename_what_fails(user, "b", "a")
        assert await user.read("a") == b"closed"
        await user.close(writer)
        assert await user.read("a") == b"closed"
        assert await user.drained() == "durable"
        assert await user.read("a") == b"closed"
    assert bucket.shows() == {"a": b"closed"}


async def test_a_symlink_that_was_on_its_way_shows_again(bucket: Bucket, cache: Path) -> None:
    async with running_node(bucket, cache, offload=SlowUploads(8.0)) as user:
        await user.symlink("there", "a")
        await trio.sleep(4)  # it is on its way
        await rename_what_fails(user, "b", "a")
        assert await user.tree() == {"a": b"-> there"}
        assert await user.drained() == "durable"
        assert await user.tree() == {"a": b"-> there"}
    assert bucket.shows() == {"a": b"-> there"}


async def test_what_was_removed_before_stays_removed(bucket: Bucket, cache: Path) -> None:
    async with running_node(bucket, cache, offload=SlowUploads(8.0)) as user:
        await user.write("a", b"closed")
        await trio.sleep(4)  # it is on its way
        await user.unlink("a")
        await rename_what_fails(user, "b", "a")
        assert await user.tree() == {}
        assert await user.drained() == "durable"
        assert await user.tree() == {}
    assert bucket.shows() == {}
