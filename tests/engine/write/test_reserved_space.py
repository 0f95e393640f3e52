"""Reserved room: what all files hold is what the ledger says, whatever grows, is cut, closed or removed meanwhile."""

import random
from contextlib import suppress
from pathlib import Path

import pytest
import trio

from fusecache.engine.namespace.nodes import FileVersion, Node
from fusecache.model.errors import FusecacheError, NotFound
from fusecache.model.objects import MIB
from fusecache.model.records import FileState
from tests.support.inline_offload import InlineOffload
from tests.support.node import Bucket, User, running_node

CACHE = 24 * MIB
NAMES = ("a", "b", "c")
STEPS = 25


class SlowDisk(InlineOffload):
    """Each call that may block takes a while, another each time: whatever can overtake another does."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    async def disk(self, call, *args):
        await trio.sleep(self._random.choice((0.0, 0.001, 0.02)))
        return call(*args)

    rows = network = upload = disk


def watched(user: User) -> list[FileVersion]:
    """Return a list that every generation of the node is added to."""
    made: list[FileVersion] = []
    make = user.fs.file_io._versions._make

    def make_and_note(node: Node) -> FileVersion:
        made.append(make(node))
        return made[-1]

    user.fs.file_io._versions._make = make_and_note
    return made


def check(user: User, made: list[FileVersion]) -> None:
    """No file holds more than was granted, or less than it needs."""
    held = [version.reserved for version in made]
    assert min(held, default=0) >= 0
    assert sum(held) <= user.fs.cache.statistics().staging_bytes
    for version in made:
        if version.state in {FileState.OPEN, FileState.FLUSHED, FileState.SEALED}:
            assert version.reserved >= version.size, version


class SlowRows(InlineOffload):
    """The journal takes a while."""

    async def rows(self, call, *args):
        await trio.sleep(0.02)
        return call(*args)


async def test_a_file_that_is_replaced_while_its_last_writer_leaves_holds_nothing(
    bucket: Bucket, cache: Path
) -> None:
    """An older version of it waits for the bucket: that one stays, for the order of changes."""
    async with running_node(bucket, cache, offload=SlowRows()) as user:
        bucket.takes_nothing = True
        await user.write("a", b"old")
        await user.write("b", b"new")
        handle = await user.open("a")
        await user.fs.file_io.write(handle, 0, b"late")
        async with trio.open_nursery() as nursery:
            nursery.start_soon(user.fs.file_io.release, handle)
            await trio.sleep(0.001)
            assert handle.node.handles == 0
            await user.rename("b", "a")
        bucket.come_back()
        assert await user.drained() == "durable"
        await trio.sleep(5)
        assert user.fs.cache.statistics().staging_bytes == 0
    async with running_node(bucket, cache) as user:
        assert await user.drained() == "durable"
        assert await user.tree() == {"a": b"new"}
    assert bucket.shows() == {"a": b"new"}


async def write_and_close(user: User, chance: random.Random, name: str, written: list[int]) -> None:
    """Do as a program does that writes here and there, for which there may be no room."""
    handle = await user.open(name, truncate=chance.random() < 0.3)
    contents = user.fs.file_io
    try:
        async with trio.open_nursery() as nursery:
            for _ in range(chance.randrange(1, 4)):
                offset, length = chance.randrange(4 * MIB), chance.choice((1, 70_000, MIB))

                async def write(offset: int = offset, length: int = length) -> None:
                    with suppress(FusecacheError):
                        written.append(await contents.write(handle, offset, bytes(length)))

                nursery.start_soon(write)
            if chance.random() < 0.5:
                await trio.sleep(chance.choice((0, 0.001, 0.01)))
                await user.fs.close_protocol.flush(handle)
        if chance.random() < 0.3:
            await contents.truncate(handle.node, chance.randrange(6 * MIB))
        await user.fs.close_protocol.flush(handle)
    finally:
        await contents.release(handle)


async def one_step(user: User, chance: random.Random, written: list[int]) -> None:
    name = chance.choice(NAMES)
    try:
        match chance.randrange(6):
            case 0:
                await user.unlink(name)
            case 1:
                await user.rename(name, chance.choice(NAMES))
            case 2:
                await user.read("clean")
            case _:
                await write_and_close(user, chance, name, written)
    except* (FusecacheError, NotFound):
        pass


@pytest.mark.parametrize("seed", range(6))
async def test_nothing_is_reserved_twice_or_given_back_twice(bucket: Bucket, cache: Path, seed: int) -> None:
    chance = random.Random(seed)
    bucket.memory.put_bytes("clean", bytes(12 * MIB))
    written: list[int] = []
    async with running_node(
        bucket, cache, cache_bytes=CACHE, buffer_bytes=24 * MIB, offload=SlowDisk(seed)
    ) as user:
        made = watched(user)
        await user.read("clean")

        async def program() -> None:
            for _ in range(STEPS):
                await one_step(user, chance, written)
                check(user, made)

        bucket.takes_nothing = chance.random() < 0.5
        async with trio.open_nursery() as nursery:
            for _ in range(3):
                nursery.start_soon(program)
        bucket.come_back()
        assert await user.drained() == "durable"
        await trio.sleep(5)
        # An older attempt is deleted if space is short, as it is at some times only.
        held = sum(size for _, size in user.fs.quarantine._quarantined.values())
        assert user.fs.cache.statistics().staging_bytes == held, [each for each in made if each.reserved]
    assert written
