"""Whatever is renamed and removed in between: an old checkpoint goes only after the newer one has arrived."""

from pathlib import Path

import pytest
import trio

from tests.engine.writeback.test_rotation import Uplink, content
from tests.support.node import Bucket, User, running_node

# What a program does once the bucket has the checkpoint 0 under the first name.
PROGRAMS: dict[str, tuple[str, list[tuple[str, ...]]]] = {
    "commit marker's name, temporary name": (
        "last.ckpt",
        [("save 1", "new.tmp"), ("unlink", "last.ckpt"), ("rename", "new.tmp", "new")],
    ),
    "commit marker's name, other name": (
        "latest.pt",
        [("save 1", "new.1"), ("unlink", "latest.pt"), ("rename", "new.1", "new")],
    ),
    "commit marker's name, from a directory": (
        "latest.pt",
        [("mkdir", "d"), ("save 1", "d/new.1"), ("unlink", "latest.pt"), ("rename", "d/new.1", "new")],
    ),
    "directory gets a removed file's name": (
        "s",
        [("mkdir", "w"), ("save 1", "w/x"), ("unlink", "s"), ("rename", "w", "s")],
    ),
    "directory with a temporary name in it gets a removed file's name": (
        "s",
        [
            ("mkdir", "w"),
            ("save 1", "w/x.tmp"),
            ("unlink", "s"),
            ("rename", "w", "s"),
            ("rename", "s/x.tmp", "s/x"),
        ],
    ),
    "renamed unpublished, and removed": (
        "a",
        [("save 1", "a"), ("rename", "a", "b"), ("save 2", "c"), ("unlink", "b")],
    ),
    "renamed unpublished, and removed before a temporary name": (
        "a",
        [
            ("save 1", "a"),
            ("rename", "a", "b"),
            ("save 2", "c.tmp"),
            ("unlink", "b"),
            ("rename", "c.tmp", "c"),
        ],
    ),
    "made again, renamed and removed": (
        "a",
        [
            ("save 1", "b.tmp"),
            ("unlink", "a"),
            ("save 2", "a"),
            ("rename", "a", "z"),
            ("unlink", "z"),
            ("rename", "b.tmp", "b"),
        ],
    ),
}


async def publish(user: User, bucket: Bucket, name: str, data: bytes) -> None:
    """Write a file, and record the states of the bucket from the moment on when the bucket has it."""
    await user.write(name, data)
    assert await user.drained() == "durable"
    bucket.states.clear()


async def run(user: User, steps: list[tuple[str, ...]]) -> None:
    for word, *names in steps:
        if word.startswith("save"):
            await user.write(names[0], content(int(word[-1])))
        else:
            await getattr(user, word)(*names)


@pytest.mark.parametrize("program", PROGRAMS)
async def test_the_bucket_has_a_whole_checkpoint_at_every_moment(
    bucket: Bucket, cache: Path, program: str
) -> None:
    name, steps = PROGRAMS[program]
    async with running_node(bucket, cache, offload=Uplink()) as user:
        await publish(user, bucket, name, content(0))
        await run(user, steps)
        assert await user.drained() == "durable"
        left = await user.tree()
    assert all({content(number) for number in range(3)} & set(state.values()) for state in bucket.states)
    assert {key: data for key, data in bucket.shows().items() if data} == {
        key: data for key, data in left.items() if data
    }


async def test_a_file_that_is_renamed_after_a_close_can_still_be_written(bucket: Bucket, cache: Path) -> None:
    """A child process closed it, and its parent goes on: the bucket gets the whole."""
    async with running_node(bucket, cache) as user:
        await user.mkdir("d")
        await publish(user, bucket, "old", b"old")
        handle = await user.open("d/log.1")
        await user.fs.file_io.write(handle, 0, b"one ")
        await user.fs.close_protocol.flush(handle)
        await user.unlink("old")
        await user.rename("d", "e")
        await user.fs.file_io.write(handle, 4, b"two")
        await user.fs.close_protocol.flush(handle)
        await user.rename("e/log.1", "e/log")
        await user.fs.file_io.release(handle)
        assert await user.read("e/log") == b"one two"
        assert await user.drained() == "durable"
    assert not any(b"one " in state.values() for state in bucket.states)
    assert bucket.shows()["e/log"] == b"one two"
    assert not {"d/log.1", "old"} & set(bucket.shows())


@pytest.mark.parametrize("by_directory", [False, True])
async def test_a_mapped_file_that_is_renamed_is_not_published_before_its_pages(
    bucket: Bucket, cache: Path, *, by_directory: bool
) -> None:
    """A program may close a file right after mmap(2): its pages come with the release."""
    async with running_node(bucket, cache) as user:
        await user.mkdir("w")
        await publish(user, bucket, "old", b"old!")
        handle = await user.open("w/new.tmp")
        await user.fs.file_io.write(handle, 0, bytes(4))
        await user.fs.close_protocol.flush(handle)
        await user.unlink("old")
        if by_directory:
            await user.rename("w", "d")
            await user.rename("d/new.tmp", "d/new")
        else:
            await user.rename("w/new.tmp", "new")
        await trio.sleep(30)
        await user.fs.file_io.write(handle, 0, b"new!")
        await user.fs.file_io.release(handle)
        assert await user.drained() == "durable"
    assert not any(bytes(4) in state.values() for state in bucket.states)
