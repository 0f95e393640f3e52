"""Old checkpoints are removed faster than new ones go up: the bucket always has a whole one, and gets newer ones."""

from collections.abc import Awaitable, Callable
from functools import cache as cache_of_values
from pathlib import Path

import pytest
import trio
from trio.testing import MockClock

from fusecache.engine.offload import InlineOffload
from fusecache.model.nouns import MIB
from fusecache.remote.store import FileSlice
from tests.engine.nodes import Bucket, User, files_in, photograph, running_node

ROUNDS = 14
EVERY = 3.0
PART_SECONDS = 4.0


class Uplink(InlineOffload):
    """One part at a time, each of which takes seconds."""

    def __init__(self) -> None:
        super().__init__()
        self._line = trio.Lock()

    async def upload(self, call, *args):  # type: ignore[no-untyped-def,override]
        if not any(isinstance(each, FileSlice) for each in args):
            return await self.network(call, *args)
        async with self._line:
            await trio.sleep(PART_SECONDS)
            return await self.network(call, *args)

    async def publish(self, call, *args):  # type: ignore[no-untyped-def,override]
        return await self.network(call, *args)


@cache_of_values
def content(step: int) -> bytes:
    return bytes([step]) * (5 * MIB)


@cache_of_values
def half(step: int) -> bytes:
    return content(step)[: 4 * MIB]


async def save_file(user: User, step: int) -> None:
    await user.write(f"run/step-{step}", content(step))


async def remove_file(user: User, step: int) -> None:
    await user.unlink(f"run/step-{step}")


async def save_by_rename(user: User, step: int) -> None:
    await user.write(f"run/step-{step}.tmp", content(step))
    await user.rename(f"run/step-{step}.tmp", f"run/step-{step}")


async def save_directory(user: User, step: int) -> None:
    await user.mkdir(f"run/step-{step}")
    for name in ("model", "optimizer"):
        await user.write(f"run/step-{step}/{name}", half(step))


async def remove_directory(user: User, step: int) -> None:
    for name in ("model", "optimizer"):
        await user.unlink(f"run/step-{step}/{name}")
    await user.rmdir(f"run/step-{step}")


async def point(user: User, step: int) -> None:
    await user.write("run/latest", b"%d" % step)


async def point_by_rename(user: User, step: int) -> None:
    await user.write("run/latest.tmp", b"%d" % step)
    await user.rename("run/latest.tmp", "run/latest")


async def point_by_link(user: User, step: int) -> None:
    if step:
        await user.unlink("run/latest")
    await user.symlink(f"{step}", "run/latest")


def whole_steps(state: dict[str, bytes]) -> set[int]:
    """Return which checkpoints a bucket has all files of."""
    files = {key.removeprefix("run/"): data for key, data in files_in(state).items()}
    steps = {step for step in range(ROUNDS) if files.get(f"step-{step}") == content(step)}
    return steps | {
        step
        for step in range(ROUNDS)
        if all(files.get(f"step-{step}/{name}") == half(step) for name in ("model", "optimizer"))
    }


def pointed_at(state: dict[str, bytes]) -> int | None:
    """Return which checkpoint `latest` names in a bucket."""
    latest = state.get("run/latest")
    return None if latest is None else int(latest.removeprefix(b"-> "))


Step = Callable[[User, int], Awaitable[None]]


@pytest.mark.parametrize(
    ("save", "remove", "tell"),
    [
        (save_file, remove_file, None),
        (save_file, remove_file, point),
        (save_file, remove_file, point_by_rename),
        (save_file, remove_file, point_by_link),
        (save_by_rename, remove_file, point),
        (save_directory, remove_directory, None),
        (save_directory, remove_directory, point),
    ],
)
async def test_a_rotation_that_is_faster_than_the_uplink_leaves_a_whole_checkpoint(
    bucket: Bucket, tmp_path: Path, autojump_clock: MockClock, save: Step, remove: Step, tell: Step | None
) -> None:
    async with running_node(bucket, tmp_path / "1", offload=Uplink()) as user:
        await user.mkdir("run")
        await save(user, 0)
        if tell is not None:
            await tell(user, 0)
        assert await user.drained() == "durable"
        bucket.states.clear()
        for step in range(1, ROUNDS):
            await save(user, step)
            if tell is not None:
                await tell(user, step)
            await remove(user, step - 1)
            await trio.sleep(EVERY)
        arrived = set().union(*map(whole_steps, bucket.states))
        assert len(arrived) >= 3, arrived
        photograph(tmp_path / "1", tmp_path / "2")
        bucket.is_cut_off = True
    bucket.come_back()
    async with running_node(bucket, tmp_path / "2", offload=Uplink()) as user:
        assert await user.drained() == "durable"
        assert whole_steps(await user.tree("")) == {ROUNDS - 1}  # type: ignore[arg-type]
    for state in bucket.states:
        assert whole_steps(state)
        assert tell is None or pointed_at(state) in whole_steps(state)
    assert whole_steps(bucket.shows()) == {ROUNDS - 1}


async def test_a_directory_that_is_removed_while_it_goes_up_goes_up_no_further(
    bucket: Bucket, cache: Path, autojump_clock: MockClock
) -> None:
    async with running_node(bucket, cache, offload=Uplink()) as user:
        await user.mkdir("run")
        await user.mkdir("run/data")
        for number in range(8):
            await user.write(f"run/data/{number}", half(number))
        await trio.sleep(3 * PART_SECONDS)
        assert bucket.shows().keys() > {"run/", "run/data/"}, "some are there, others are not"
        for number in range(8):
            await user.unlink(f"run/data/{number}")
        await user.rmdir("run/data")
        await trio.sleep(2 * PART_SECONDS)
        bucket.requests.clear()
        assert await user.drained() == "durable"
        assert not [key for method, key in bucket.requests if method == "put"]
    assert bucket.shows() == {"run/": b""}
