"""A directory that was removed here stays away, however long the bucket keeps what was in it."""

from pathlib import Path

import pytest
import trio

from fusecache.model.errors import Unavailable
from fusecache.model.objects import MIB
from tests.engine.writeback.test_rotation import Uplink
from tests.support.faulty_store import Fault, FaultyStore
from tests.support.node import Bucket, User, files_of, folders_in, photograph, running_node

ROUNDS = 8


async def save(user: User, step: int) -> None:
    await user.mkdir(f"run/{step}")
    await user.mkdir(f"run/{step}/rank")
    await user.write(f"run/{step}/rank/model", bytes(5 * MIB))
    await user.write(f"run/{step}/state", b"state")


async def remove(user: User, step: int) -> None:
    for name in ("rank/model", "state"):
        await user.unlink(f"run/{step}/{name}")
    for name in ("/rank", ""):
        await user.rmdir(f"run/{step}{name}")


async def saved(user: User) -> None:
    """Have a directory with a directory in the bucket."""
    await user.mkdir("run")
    await save(user, 0)
    assert await user.drained() == "durable"


async def folders(user: User) -> set[str]:
    """Return the directories that the mount shows."""
    return {path for path, data in (await user.tree()).items() if data is None}


@pytest.mark.parametrize("kept", [1, 2])
async def test_directories_of_a_rotation_that_is_faster_than_the_uplink_stay_away(
    bucket: Bucket, tmp_path: Path, kept: int
) -> None:
    are_there: set[str] = set()
    waited = 0
    async with running_node(bucket, tmp_path / "1", offload=Uplink()) as user:
        await saved(user)
        for step in range(1, ROUNDS):
            await save(user, step)
            if step >= kept:
                await remove(user, step - kept)
            steps = range(max(0, step - kept + 1), step + 1)
            are_there = {"run", *(f"run/{each}{name}" for each in steps for name in ("", "/rank"))}
            for _ in range(3):
                await trio.sleep(1.1)
                assert await folders(user) == are_there
                waited += not folders_in(bucket.shows()) <= are_there
        assert waited > ROUNDS
        photograph(tmp_path / "1", tmp_path / "2")
        bucket.is_cut_off = True
    bucket.come_back()
    async with running_node(bucket, tmp_path / "2", offload=Uplink()) as user:
        while len(user.fs.queue):
            assert await folders(user) == are_there
            await trio.sleep(1.1)
    assert folders_in(bucket.shows()) == are_there


async def test_a_directory_stays_away_while_somebody_has_its_file_open(bucket: Bucket, cache: Path) -> None:
    async with running_node(bucket, cache) as user:
        await saved(user)
        node = await user.fs.resolve("run/0/rank/model")
        handle = user.fs.file_io.open(node, writable=False, pid=0)
        await remove(user, 0)
        for _ in range(5):
            await trio.sleep(1.1)
            assert await folders(user) == {"run"}
        assert "run/0/rank/model" in bucket.shows()
        answer = await user.fs.wait_durable("", 60)
        assert answer.result == "durable"
        assert "run/0/rank/model, run/0/rank/, run/0/" in answer.message
        await user.fs.file_io.release(handle)
        await trio.sleep(10)
    assert bucket.shows() == {"run/": b""}


async def test_a_directory_stays_away_while_its_removal_waits_for_what_is_stuck(
    bucket: Bucket, cache: Path
) -> None:
    store = FaultyStore(bucket, Fault(Unavailable("503"), "put", "a/stuck", times=None))
    async with running_node(store, cache) as user:
        await user.mkdir("a")
        await saved(user)
        await user.write("a/stuck", b"1")
        await trio.sleep(30)
        await remove(user, 0)
        for number in range(60):
            await user.write("beside", b"%d" % number)
            await trio.sleep(1.1)
            assert await folders(user) == {"a", "run"}
        assert "run/0/rank/model" in bucket.shows()
        store.heal()
        assert await user.drained() == "durable"
    assert bucket.shows().keys() == {"a/", "a/stuck", "beside", "run/"}


NEW = {
    "directory": {"run/0/new": b"new"},
    "file": {"run/0": b"new"},
    "moved directory": {"run/0/new": b"new"},
}


@pytest.mark.parametrize("is_restarted", [False, True])
@pytest.mark.parametrize("made", NEW)
async def test_its_name_can_be_used_again_at_once(
    bucket: Bucket, tmp_path: Path, made: str, *, is_restarted: bool
) -> None:
    async with running_node(bucket, tmp_path / "1", delete_delay=300.0) as user:
        await saved(user)
        await remove(user, 0)
        await trio.sleep(10)
        if is_restarted:
            photograph(tmp_path / "1", tmp_path / "2")
            bucket.is_cut_off = True
        else:
            await use_again(user, bucket, made)
    bucket.come_back()
    if is_restarted:
        async with running_node(bucket, tmp_path / "2", delete_delay=300.0) as user:
            await use_again(user, bucket, made)
    assert {key: data for key, data in bucket.shows().items() if data} == NEW[made]


async def use_again(user: User, bucket: Bucket, made: str) -> None:
    """Make something of the removed directory's name; end once its old content is gone."""
    assert await folders(user) == {"run"}
    if made == "file":
        await user.write("run/0", b"new")
    else:
        first = "run/0" if made == "directory" else "run/1"
        await user.mkdir(first)
        await user.write(f"{first}/new", b"new")
        if first != "run/0":
            await user.rename(first, "run/0")
    assert files_of(await user.tree()) == NEW[made]
    await trio.sleep(20)
    assert NEW[made].items() <= bucket.shows().items(), "it does not wait for the old content's removal"
    assert "run/0/rank/model" in bucket.shows()
    await trio.sleep(400)
    assert files_of(await user.tree()) == NEW[made]
    if made != "file":
        await user.unlink("run/0/new")
        await user.rmdir("run/0")
        assert await folders(user) == {"run"}
        await user.mkdir("run/0")
        await user.write("run/0/new", b"new")
        assert await user.drained() == "durable"
