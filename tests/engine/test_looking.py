"""Warming, evicting and checking by path, and what the statistics say of it."""

import json
from pathlib import Path

import pytest
import trio
from trio.testing import MockClock

from fusecache.engine.inspecting import NAMED, Check
from fusecache.engine.nodes import Node
from fusecache.engine.warming import WarmState, WarmUp
from fusecache.model.errors import NotFound, NotPermitted, Unavailable
from fusecache.model.nouns import MIB
from fusecache.remote.faulty import Fault, FaultyStore
from tests.engine.block_caches import some_bytes
from tests.engine.nodes import Bucket, User, running_node

OBJECTS = {"data/a": 3 * MIB, "data/b": 10 * MIB + 1, "data/deep/er/c": 7, "database": 5, "other": 6}


@pytest.fixture
def full_bucket(bucket: Bucket) -> Bucket:
    """A bucket with some objects, an empty one and a marker."""
    for key, size in OBJECTS.items():
        bucket.memory.put_bytes(key, some_bytes(size, seed=size))
    bucket.memory.put_bytes("data/empty", b"")
    bucket.memory.put_bytes("data/deep/", b"")
    return bucket


async def warm(user: User, *paths: str) -> WarmUp:
    """Warm paths to the end."""
    job = user.fs.warmer.start(paths)
    with trio.fail_after(3600):
        await job.ended.wait()
    return job


def gets(bucket: Bucket) -> int:
    return bucket.memory.statistics().gets


async def check(user: User, path: str = "") -> Check:
    progress = Check()
    await user.fs.inspector.check(path, progress)
    return progress


# ---- warming


async def test_a_warmed_directory_is_read_without_a_request(full_bucket: Bucket, cache: Path) -> None:
    async with running_node(full_bucket, cache) as user:
        job = await warm(user, "data")
        assert job.state is WarmState.DONE
        assert (job.files_done, job.files_total, job.files_failed) == (3, 3, 0)
        assert job.bytes_done == job.bytes_total == 13 * MIB + 8
        asked = gets(full_bucket)
        for path in ("data/a", "data/b", "data/deep/er/c"):
            assert await user.read(path) == some_bytes(OBJECTS[path], seed=OBJECTS[path])
        assert gets(full_bucket) == asked
        assert await user.read("database") == some_bytes(5, seed=5)
        assert gets(full_bucket) == asked + 1


async def test_single_files_and_the_whole_mount_can_be_warmed(full_bucket: Bucket, cache: Path) -> None:
    async with running_node(full_bucket, cache) as user:
        assert (await warm(user, "database", "data/a")).bytes_done == 3 * MIB + 5
        asked = gets(full_bucket)
        job = await warm(user, "", "data", "data/a")
        assert (job.paths, job.files_done) == (("",), 5)
        assert gets(full_bucket) == asked + 4  # two pieces of data/b; data/deep/er/c; other


async def test_a_warm_up_of_what_is_not_there_fails_with_its_name(full_bucket: Bucket, cache: Path) -> None:
    async with running_node(full_bucket, cache) as user:
        job = await warm(user, "data", "missing")
        assert job.state is WarmState.FAILED
        assert "missing" in job.message
        assert gets(full_bucket) == 0


async def test_what_the_cache_cannot_hold_is_refused_before_anything_is_fetched(
    full_bucket: Bucket, cache: Path
) -> None:
    async with running_node(full_bucket, cache, cache_bytes=12 * MIB) as user:
        job = await warm(user, "data")
        assert job.state is WarmState.FAILED
        assert "needs 13.0 MiB" in job.message
        assert "limit 12.0 MiB" in job.message
        assert gets(full_bucket) == 0


async def test_files_that_fail_are_named_and_the_others_are_cached(
    full_bucket: Bucket, cache: Path, autojump_clock: MockClock
) -> None:
    store = FaultyStore(full_bucket)  # type: ignore[arg-type]
    store.script(Fault(Unavailable("no answer"), method="get_into", key="data/b", times=10**6))
    async with running_node(store, cache) as user:
        job = await warm(user, "data")
        assert job.state is WarmState.FAILED
        assert (job.files_done, job.files_failed) == (2, 1)
        assert job.failures == ["data/b: no answer"]


async def test_what_is_not_uploaded_yet_is_passed_over(full_bucket: Bucket, cache: Path) -> None:
    async with running_node(full_bucket, cache, settle_seconds=3600) as user:
        await user.write("data/a", b"newer")
        await user.write("data/new", b"new")
        job = await warm(user, "data")
        assert (job.state, job.files_total) == (WarmState.DONE, 2)
        assert await user.read("data/a") == b"newer"
        with user.fs.publisher.draining():
            await user.drained()


async def test_a_warm_up_goes_on_when_the_tree_forgets_the_directory(
    full_bucket: Bucket, cache: Path
) -> None:
    async with running_node(full_bucket, cache) as user:

        async def resolve_and_forget(path: str) -> Node:
            node = await user.fs.resolve(path)
            user.fs.tree.forget(node.number, 0)
            assert not user.fs.tree.is_linked(node)
            return node

        user.fs.warmer._resolve = resolve_and_forget
        assert (await warm(user, "data")).state is WarmState.DONE


async def test_a_stopped_warm_up_says_so_and_another_goes_on_where_it_was(
    full_bucket: Bucket, cache: Path, autojump_clock: MockClock
) -> None:
    async with running_node(full_bucket, cache) as user:
        job = user.fs.warmer.start(["data"])
        await job.counted.wait()
        job.scope.cancel()
        await job.ended.wait()
        assert job.state is WarmState.STOPPED
        assert (await warm(user, "data")).state is WarmState.DONE


async def test_there_is_a_bound_on_warm_ups_and_the_newest_are_remembered(
    full_bucket: Bucket, cache: Path, autojump_clock: MockClock
) -> None:
    async with running_node(full_bucket, cache) as user:
        for _ in range(20):
            await warm(user, "database")
        assert len(user.fs.statistics()["warming"]) == 8
        for _ in range(8):
            user.fs.warmer.start(["data"])
        with pytest.raises(NotPermitted, match="wait"):
            user.fs.warmer.start(["data"])


# ---- evicting


async def test_evicting_a_directory_leaves_its_namesakes(full_bucket: Bucket, cache: Path) -> None:
    async with running_node(full_bucket, cache) as user:
        await warm(user, "")
        dropped = await user.fs.inspector.evict(["data"])
        assert dropped.left_bytes == 0
        assert dropped.freed_bytes >= 13 * MIB + 8
        asked = gets(full_bucket)
        await user.read("database")
        await user.read("other")
        assert gets(full_bucket) == asked
        assert await user.read("data/b") == some_bytes(10 * MIB + 1, seed=10 * MIB + 1)
        assert gets(full_bucket) > asked


async def test_evicting_does_not_touch_what_the_bucket_does_not_have(
    full_bucket: Bucket, cache: Path
) -> None:
    async with running_node(full_bucket, cache, settle_seconds=3600) as user:
        await user.write("data/new", b"only here")
        await warm(user, "")
        await user.fs.inspector.evict([""])
        assert await user.read("data/new") == b"only here"
        with user.fs.publisher.draining():
            await user.drained()
        assert full_bucket.shows()["data/new"] == b"only here"


async def test_evicting_what_is_not_there_is_an_error(full_bucket: Bucket, cache: Path) -> None:
    async with running_node(full_bucket, cache) as user:
        assert (await user.fs.inspector.evict(["data"])).freed_bytes == 0
        with pytest.raises(NotFound):
            await user.fs.inspector.evict(["missing"])


async def test_an_open_file_keeps_the_bytes_of_a_version_that_the_bucket_no_longer_has(
    full_bucket: Bucket, cache: Path, autojump_clock: MockClock
) -> None:
    async with running_node(full_bucket, cache) as user:
        await warm(user, "data/a")
        node = await user.fs.resolve("data/a")
        handle = user.fs.contents.open(node, writable=False, pid=0)
        old = some_bytes(3 * MIB, seed=3 * MIB)
        assert await user.fs.contents.read(handle, 0, 10) == old[:10]
        full_bucket.memory.put_bytes("data/a", b"replaced")
        await trio.sleep(2)
        assert await user.read("data/a") == b"replaced"
        dropped = await user.fs.inspector.evict([""])
        assert dropped.left_bytes == 3 * MIB
        assert await user.fs.contents.read(handle, 2 * MIB, 10) == old[2 * MIB : 2 * MIB + 10]
        await user.fs.contents.release(handle)


# ---- checking


async def test_a_check_names_damaged_files_and_unusable_keys(
    full_bucket: Bucket, cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for key in ("data//two", "data/../up", "data/a/below"):
        full_bucket.memory.put_bytes(key, b"x")
    async with running_node(full_bucket, cache) as user:
        await warm(user, "data/b", "other")
        for path in (cache / "cache" / "files").rglob("*"):
            if path.is_file() and path.stat().st_size > MIB:
                _damage(path)
        found = await check(user)
        assert (found.damaged_files, found.damaged) == (1, ["data/b"])
        assert [each["key"] for each in found.unusable] == ["data/../up", "data//two", "data/a"]
        assert found.keys == len(OBJECTS) + 5
        assert (await check(user)).damaged_files == 0
        below = await check(user, "data/deep")
        assert (below.blocks, below.keys, below.unusable_keys) == (0, 2, 0)


def _damage(path: Path) -> None:
    with open(path, "r+b") as file:
        file.seek(5000)
        file.write(b"damage")


async def test_what_a_check_names_is_bounded(bucket: Bucket, cache: Path) -> None:
    for index in range(NAMED + 10):
        bucket.memory.put_bytes(f"bad//{index:03}", b"x")
    async with running_node(bucket, cache) as user:
        found = await check(user)
        assert (found.unusable_keys, len(found.unusable)) == (NAMED + 10, NAMED)


# ---- statistics


async def test_statistics_are_plain_values_that_say_what_was_asked_and_waited_for(
    full_bucket: Bucket, cache: Path
) -> None:
    async with running_node(full_bucket, cache) as user:
        await user.read("data/a")
        await user.read("data/a")
        await warm(user, "data/b")
        said = json.loads(json.dumps(user.fs.statistics()))
        assert said["cache"]["hits"] >= said["cache"]["misses"] == 1
        assert said["cache"]["bytes_by_cause"]["hint"] == 10 * MIB + 1
        assert said["cache"]["wait_seconds"].keys() == {"network", "queue", "disk", "metadata"}
        assert said["cache"]["wait_seconds"]["metadata"] > 0
        assert said["requests"]["gets"] == gets(full_bucket)
        assert said["requests"]["class_b"] == said["requests"]["gets"] + said["requests"]["heads"]
        assert [job["state"] for job in said["warming"]] == ["done"]
