"""What `status` and `sync` report: each change under the path that it will have, with its cause, while it is true."""

from pathlib import Path

import pytest
import trio

from fusecache.engine.options import BucketAccess
from fusecache.engine.write.staging_space import REMEMBERED_SECONDS
from fusecache.model.errors import AccessDenied, NoSpace, NotFound, Unavailable
from fusecache.model.objects import MIB
from tests.support.faulty_store import Fault, FaultyStore
from tests.support.node import Bucket, User, listed, running_node

DENIED = AccessDenied("InvalidAccessKeyId (403)")


# ---- where it is counted


@pytest.mark.parametrize("size", [2 * MIB, 9 * MIB], ids=["whole", "parts"])
async def test_what_uploads_under_an_old_name_is_counted_under_the_path_that_it_will_have(
    bucket: Bucket, cache: Path, size: int
) -> None:
    stuck = [Fault(Unavailable("no answer"), method, "a/*", times=None) for method in ("put", "complete*")]
    store = FaultyStore(bucket, *stuck)
    async with running_node(store, cache) as user:
        await user.mkdir("a")
        for name in ("one", "two"):
            await user.write(f"a/{name}", bytes(size))
        await trio.sleep(30)
        await user.rename("a", "b")
        await user.rename("b", "c")
        there = await user.fs.status.path_status("c")
        assert there["state"].startswith("uploading:")
        assert there["pending_bytes"] == 2 * size
        assert there["oldest_pending_seconds"] >= 30
        assert sorted(each["path"] for each in there["uploading"]) == ["c/one", "c/two"]
        file = await user.fs.status.path_status("c/one")
        assert (file["pending_bytes"], [each["path"] for each in file["uploading"]]) == (size, ["c/one"])
        whole = user.fs.statistics()
        assert sorted(each["path"] for each in whole["uploading"]) == ["c/one", "c/two"]
        assert whole["pending_bytes"] == 2 * size
        store.heal()
        assert await user.drained() == "durable"
        assert (await user.fs.status.path_status("c"))["pending_files"] == 0
    assert {"c/one", "c/two"} <= set(bucket.shows())


async def test_changes_of_names_are_told_from_files_and_removals_that_are_put_off_from_both(
    bucket: Bucket, cache: Path
) -> None:
    async with running_node(bucket, cache, delete_delay=600) as user:
        await user.mkdir("old")
        for name in ("one", "two"):
            await user.write(f"old/{name}", b"1")
        assert await user.drained() == "durable"
        for name in ("one", "two"):
            await user.unlink(f"old/{name}")
        await trio.sleep(60)
        for said in (user.fs.statistics(), await user.fs.status.path_status("old")):
            assert (said["pending_files"], said["deferred_files"], said["pending_contents"]) == (2, 2, 0)
            assert 530 <= said["deferred_seconds"] <= 541
            assert said["oldest_pending_seconds"] == 0
        assert user.fs.status.line(user.fs.status.pending()) == "2 removals deferred"
        bucket.takes_nothing = True
        await user.mkdir("new")
        await user.write("new/file", bytes(5))
        said = user.fs.status.progress(await user.fs.status.count("new"))
        assert (said["pending_files"], said["pending_contents"], said["deferred_files"]) == (2, 1, 0)
        bucket.come_back()
        assert await user.drained() == "durable"


async def test_a_bucket_that_takes_next_to_nothing_has_no_pace(bucket: Bucket, cache: Path) -> None:
    async with running_node(bucket, cache) as user:
        await user.write("tiny", b"123")
        assert await user.drained() == "durable"
        bucket.takes_nothing = True
        await user.write("large", bytes(MIB))
        await trio.sleep(1)
        said = user.fs.statistics()
        assert said["pending_bytes"] == MIB
        assert (said["upload_bytes_per_second"], said["seconds_left"]) == (0, None)
        bucket.come_back()
        assert await user.drained() == "durable"


async def test_the_bytes_of_an_open_file_are_told_also_while_a_snapshot_of_it_is_queued(
    bucket: Bucket, cache: Path
) -> None:
    async with running_node(bucket, cache) as user:
        bucket.takes_nothing = True
        log = await user.open("log")

        def told() -> tuple[int, int, int]:
            said = user.fs.statistics()
            return said["dirty_bytes"], said["pending_bytes"], said["exposed_bytes"]

        await user.fs.file_io.write(log, 0, bytes(10))
        assert told() == (10, 0, 10)
        await trio.sleep(70)  # a snapshot is queued: nothing of the file is in no queue
        assert told() == (0, 10, 10)
        assert (await user.fs.status.path_state("log")).startswith(("queued", "uploading:0"))
        await user.fs.file_io.write(log, 10, bytes(5))
        assert told() == (15, 10, 25)  # the file as it is now, and the snapshot
        assert await user.fs.status.path_state("log") == "dirty"
        await user.close(log)
        dirty, pending, exposed = told()
        assert (dirty, exposed) == (0, pending)
        assert pending >= 15
        bucket.come_back()
        assert await user.drained() == "durable"
        assert told() == (0, 0, 0)


# ---- no room


async def test_a_file_that_found_no_room_is_told_until_one_of_its_size_does(
    bucket: Bucket, cache: Path
) -> None:
    async with running_node(bucket, cache, cache_bytes=64 * MIB) as user:
        bucket.takes_nothing = True
        await user.mkdir("run")
        await user.write("run/first", bytes(24 * MIB))
        handle = await user.open("run/model")
        await user.fs.file_io.write(handle, 0, bytes(8 * MIB))
        with pytest.raises(NoSpace):
            await user.fs.file_io.write(handle, 24 * MIB, bytes(8 * MIB))
        assert (await user.fs.status.path_status("run/model"))["state"] == "error:no-space"
        with pytest.raises(NoSpace):
            await user.close(handle)
        for said in (user.fs.statistics(), await user.fs.status.path_status("run")):
            shortages = said["shortages"]
            assert (shortages["files"], shortages["path"]) == (1, "run/model")
            assert shortages["bytes"] == 32 * MIB
            assert shortages["cause"]
        assert (await user.fs.status.path_status("run/model"))["state"] == "error:no-space"
        assert (await user.fs.status.path_status("run/first"))["shortages"] == {"files": 0}
        with pytest.raises(NotFound):
            await user.fs.status.path_status("run/mode")
        bucket.come_back()
        assert await user.drained() == "durable"
        await user.write("small", b"1")
        assert user.fs.statistics()["shortages"]["files"] == 1
        await user.write("other", bytes(32 * MIB))
        assert user.fs.statistics()["shortages"] == {"files": 0}
        assert await user.drained() == "durable"


async def test_a_file_that_found_no_room_is_forgotten_after_a_while(bucket: Bucket, cache: Path) -> None:
    async with running_node(bucket, cache, cache_bytes=64 * MIB) as user:
        handle = await user.open("model")
        with pytest.raises(NoSpace):
            await user.fs.file_io.truncate(handle.node, 120 * MIB)
        await user.fs.file_io.release(handle)
        assert user.fs.statistics()["shortages"]["bytes"] == 120 * MIB
        await trio.sleep(REMEMBERED_SECONDS - 1)
        assert user.fs.statistics()["shortages"]["files"] == 1
        await trio.sleep(2)
        assert user.fs.statistics()["shortages"] == {"files": 0}


# ---- refused keys


async def refuse(user: User, store: FaultyStore) -> None:
    """Have the keys refused for a while, with three files that were tried meanwhile."""
    await listed(user, "run")
    store.script(Fault(DENIED, "*", times=None))
    for number in range(3):
        await user.write(f"run/{number}", b"1")
    for _ in range(20):
        await trio.sleep(2)
        await user.fs.resolve("run/file")
    assert user.fs.statistics()["refused_seconds"] > 20


@pytest.mark.parametrize("keys", ["the same", "others"])
async def test_a_publication_ends_the_refusal_of_the_keys_at_once_unless_they_are_others(
    bucket: Bucket, cache: Path, keys: str
) -> None:
    bucket.memory.put_bytes("run/file", b"1")
    store = FaultyStore(bucket)
    async with running_node(store, cache, access=BucketAccess(writes_by_other_keys=keys == "others")) as user:
        await refuse(user, store)
        store.heal(Fault(DENIED, "list_page", times=None))
        assert await user.drained() == "durable"
        assert (user.fs.statistics()["refused_seconds"] > 0) is (keys == "others")


async def test_what_was_not_tried_yet_waits_for_the_keys_like_all_that_was(
    bucket: Bucket, cache: Path
) -> None:
    bucket.memory.put_bytes("run/file", b"1")
    store = FaultyStore(bucket)
    async with running_node(store, cache, access=BucketAccess(keys_from="environment")) as user:
        await refuse(user, store)
        await user.write("run/new", b"2")
        for path in ("run/new", "run/1", "run"):
            assert await user.fs.status.path_state(path) == "error:auth-failed"
        assert await user.fs.status.path_state("run/file") == "clean"
        waiting = user.fs.statistics()["waiting"]
        assert waiting
        assert all("unmount --force" in each["remedy"] for each in waiting)
        store.heal()
        assert await user.drained() == "durable"


@pytest.mark.parametrize("keys", ["the same", "others"])
async def test_an_upload_from_before_the_refusal_shows_the_refusal_as_its_cause(
    bucket: Bucket, cache: Path, keys: str
) -> None:
    store = FaultyStore(bucket, Fault(Unavailable("down"), "put", times=None))
    async with running_node(store, cache, access=BucketAccess(writes_by_other_keys=keys == "others")) as user:
        await user.write("file", b"1")
        await trio.sleep(20)
        (row,) = user.fs.statistics()["waiting"]
        assert (row["cause"], row["code"]) == ("down", "unavailable")
        store.script(Fault(DENIED, "list_page", times=None))
        await user.fs.ask_bucket()
        (row,) = user.fs.statistics()["waiting"]
        assert row["code"] == ("auth-failed" if keys == "the same" else "unavailable")
        assert row["cause"] == (str(DENIED) if keys == "the same" else "down")
        store.heal()


async def test_a_single_file_that_is_refused_is_no_error_of_the_others(bucket: Bucket, cache: Path) -> None:
    store = FaultyStore(bucket, Fault(DENIED, "put", "secret", times=None))
    async with running_node(store, cache) as user:
        await user.write("secret", b"1")
        await trio.sleep(20)
        await user.write("free", b"1")
        await trio.sleep(5)
        await user.write("next", b"1")
        assert await user.fs.status.path_state("next") == "queued"
        assert await user.fs.status.path_state("secret") == "error:auth-failed"
        store.heal()
        assert await user.drained() == "durable"


# ---- symlinks


async def test_a_symlink_has_a_state_of_its_own(bucket: Bucket, cache: Path) -> None:
    async with running_node(bucket, cache) as user:
        bucket.takes_nothing = True
        await user.symlink("step-1", "best")
        there = await user.fs.status.path_status("best")
        assert (there["state"], there["link_to"], there["pending_contents"]) == ("queued", "step-1", 0)
        bucket.come_back()
        assert await user.drained() == "durable"
        assert await user.fs.status.path_state("best") == "clean"
