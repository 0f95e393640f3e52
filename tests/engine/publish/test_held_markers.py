"""What a held commit marker's older version names stays in the bucket until the newer one is there."""

from pathlib import Path

import pytest
import trio
from trio.testing import MockClock

from fusecache.model.errors import Unavailable
from tests.engine.publish.test_rejected_content import Refusing, refused
from tests.support.faulty_store import Fault, FaultyStore
from tests.support.node import Bucket, User, files_in, photograph, running_node


async def hold(user: User, bucket: Bucket, store: Refusing) -> None:
    """Publish a model that `run/latest` names, write another, and have `run/latest` held; remove the first model."""
    await user.mkdir("run")
    await user.mkdir("run/1")
    await user.write("run/1/model", b"1")
    await user.write("run/latest", b"1")
    await user.write("run/index.json", b"1")
    assert await user.drained() == "durable"
    store.keys.add("run/log")
    await user.write("run/log", b"log")
    await user.write("run/model2", b"2")
    await user.write("run/latest", b"2")
    await user.unlink("run/1/model")
    await trio.sleep(20)
    assert "run/1/model" in bucket.shows()


def names_nothing_missing(bucket: Bucket) -> bool:
    """Return whether the first model was there whenever the first marker was, once both were published."""
    return all("run/1/model" in state for state in bucket.states if state.get("run/latest") == b"1")


async def write_marker(user: User, how: str) -> None:
    """Write the marker again; its release, which queues it, may be still to come."""
    match how:
        case "written again":
            await user.write("run/latest", b"3")
        case "renamed over":
            await user.write("run/tmp", b"3")
            await user.rename("run/tmp", "run/latest")
        case "closed":
            handle = await user.open("run/latest")
            await user.fs.file_io.write(handle, 0, b"3")
            await user.fs.close_protocol.flush(handle)


@pytest.mark.parametrize("how", ["released", "written again", "renamed over"])
async def test_until_the_newer_one_is_published(
    bucket: Bucket, cache: Path, autojump_clock: MockClock, how: str
) -> None:
    store = Refusing(bucket)
    async with running_node(store, cache) as user:
        await hold(user, bucket, store)
        await write_marker(user, how)
        await trio.sleep(20)
        assert bucket.shows()["run/latest"] == b"1"
        store.keys.clear()
        await user.write("run/log", b"log2")
        await trio.sleep(20)
        assert await user.drained() == "durable"
    assert files_in(bucket.shows()) == {
        "run/log": b"log2",
        "run/model2": b"2",
        "run/latest": b"2" if how == "released" else b"3",
        "run/index.json": b"1",
    }
    assert names_nothing_missing(bucket)


@pytest.mark.parametrize("is_cured", [False, True])
@pytest.mark.parametrize("how", ["released", "written again", "renamed over", "closed"])
async def test_until_the_newer_one_is_published_after_a_kill(
    bucket: Bucket, tmp_path: Path, autojump_clock: MockClock, how: str, *, is_cured: bool
) -> None:
    store = Refusing(bucket)
    async with running_node(store, tmp_path / "1") as user:
        await hold(user, bucket, store)
        bucket.takes_nothing = True
        if is_cured:
            store.keys.clear()
            await user.write("run/log", b"log2")
        await write_marker(user, how)
        await trio.sleep(3 if is_cured else 0.2)
        photograph(tmp_path / "1", tmp_path / "2")
        bucket.is_cut_off = True
    bucket.come_back()
    async with running_node(store, tmp_path / "2") as user:
        await trio.sleep(30)
        if not is_cured:
            store.keys.clear()
            await user.write("run/log", b"log2")
        await user.drained()
        assert await user.drained() == "durable"
    assert bucket.shows()["run/latest"] == (b"2" if how == "released" else b"3")
    assert "run/1/model" not in bucket.shows()
    assert names_nothing_missing(bucket)


@pytest.mark.parametrize(
    "then", ["a marker is removed", "a directory takes its name", "its directory goes", "made again"]
)
async def test_no_delete_waits_for_ever(
    bucket: Bucket, cache: Path, autojump_clock: MockClock, then: str
) -> None:
    store = Refusing(bucket)
    async with running_node(store, cache) as user:
        await hold(user, bucket, store)
        match then:
            case "a marker is removed":
                await user.unlink("run/index.json")
            case "a directory takes its name":
                await user.mkdir("run/1/model")
                await user.write("run/1/model/x", b"x")
            case _:
                await user.rmdir("run/1")
                if then == "made again":
                    await user.mkdir("run/1")
                    await user.write("run/1/x", b"x")
        store.keys.clear()
        await user.write("run/log", b"log2")
        with trio.fail_after(100):
            await trio.sleep(20)
            assert await user.drained() == "durable"
    assert bucket.shows()["run/latest"] == b"2"
    assert "run/1/model" not in bucket.shows()
    assert ("run/index.json" in bucket.shows()) == (then != "a marker is removed")


@pytest.mark.parametrize("seconds", [0.2, 0.5, 1.0])
async def test_a_marker_comes_after_what_was_written_in_place_of_a_rejected_file(
    bucket: Bucket, cache: Path, autojump_clock: MockClock, seconds: float
) -> None:
    store = Refusing(bucket, "d/f")
    async with running_node(store, cache) as user:
        await user.mkdir("d")
        assert await user.drained() == "durable"
        await user.write("d/f", b"2")
        await trio.sleep(0.9)
        await user.write("d/latest", b"f")
        await trio.sleep(seconds)
        assert await refused(user) == [("d/f", 1)]
        store.keys.clear()
        await user.write("d/f", b"newer")
        assert await user.drained() == "durable"
    assert bucket.shows()["d/latest"] == b"f"
    assert all(state.get("d/f") == b"newer" for state in bucket.states if "d/latest" in state)


async def test_the_old_object_stays_if_a_rejected_marker_that_was_moved_there_has_newer_content(
    bucket: Bucket, cache: Path, autojump_clock: MockClock
) -> None:
    store = Refusing(bucket)
    async with running_node(store, cache) as user:
        await user.write("a", b"1")
        assert await user.drained() == "durable"
        bucket.takes_nothing = True
        await user.write("a", b"22")
        await user.rename("a", "latest")
        await user.write("x", b"x")
        await user.write("latest", b"333")
        store.keys.add("latest")
        bucket.come_back()
        await trio.sleep(90)
        assert await refused(user) == [("latest", 3)]
        assert await user.tree() == {"a": b"1", "x": b"x", "latest": b"333"}
    assert bucket.shows() == {"a": b"1", "x": b"x"}


async def test_a_sync_waits_for_a_delete_that_waits_for_a_marker_which_is_held_no_longer(
    bucket: Bucket, cache: Path, autojump_clock: MockClock
) -> None:
    refusing = Refusing(bucket)
    store = FaultyStore(refusing)
    async with running_node(store, cache) as user:
        await hold(user, bucket, refusing)
        store.script(Fault(Unavailable("503"), "put", "run/latest", times=4))
        refusing.keys.clear()
        await user.write("run/log", b"log2")
        await trio.sleep(5)
        assert bucket.shows()["run/latest"] == b"1"
        assert await user.drained() == "durable"
        assert bucket.shows()["run/latest"] == b"2"
        assert "run/1/model" not in bucket.shows()
