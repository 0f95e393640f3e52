"""warm, evict and check by path: their progress and results, and the status of pending changes."""

import json
import time
from pathlib import Path
from typing import Any

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from fusecache.engine.admin.inspector import NAMED, ScrubProgress
from fusecache.engine.admin.warmup import Warmup, WarmupState
from fusecache.engine.durability import status
from fusecache.engine.durability.status import Pending
from fusecache.engine.namespace.nodes import Node
from fusecache.model.errors import AccessDenied, NotFound, NotPermitted, Refused, Throttled, Unavailable
from fusecache.model.objects import MIB
from tests.engine.recovery.test_journal_replay import change_rows
from tests.support.block_caches import some_bytes
from tests.support.faulty_store import Fault, FaultyStore
from tests.support.node import Bucket, User, photograph, running_node

OBJECTS = {"data/a": 3 * MIB, "data/b": 10 * MIB + 1, "data/deep/er/c": 7, "database": 5, "other": 6}


@pytest.fixture
def full_bucket(bucket: Bucket) -> Bucket:
    """A bucket with some objects, an empty one and a marker."""
    for key, size in OBJECTS.items():
        bucket.memory.put_bytes(key, some_bytes(size, seed=size))
    bucket.memory.put_bytes("data/empty", b"")
    bucket.memory.put_bytes("data/deep/", b"")
    return bucket


async def warm(user: User, *paths: str) -> Warmup:
    """Warm paths to the end."""
    job = user.fs.warmup.start(paths)
    with trio.fail_after(3600):
        await job.ended.wait()
    return job


def gets(bucket: Bucket) -> int:
    return bucket.memory.statistics().gets


async def check(user: User, path: str = "") -> ScrubProgress:
    progress = ScrubProgress()
    await user.fs.inspector.check(path, progress)
    return progress


# ---- warming


@pytest.mark.real_time
async def test_a_warmed_directory_is_read_without_a_request(full_bucket: Bucket, cache: Path) -> None:
    async with running_node(full_bucket, cache) as user:
        job = await warm(user, "data")
        assert job.state is WarmupState.DONE
        assert (job.files_done, job.files_total, job.files_failed) == (3, 3, 0)
        assert job.bytes_done == job.bytes_total == 13 * MIB + 8
        asked = gets(full_bucket)
        for path in ("data/a", "data/b", "data/deep/er/c"):
            assert await user.read(path) == some_bytes(OBJECTS[path], seed=OBJECTS[path])
        assert gets(full_bucket) == asked
        assert await user.read("database") == some_bytes(5, seed=5)
        assert gets(full_bucket) == asked + 1


@pytest.mark.real_time
async def test_single_files_and_the_whole_mount_can_be_warmed(full_bucket: Bucket, cache: Path) -> None:
    async with running_node(full_bucket, cache) as user:
        assert (await warm(user, "database", "data/a")).bytes_done == 3 * MIB + 5
        asked = gets(full_bucket)
        job = await warm(user, "", "data", "data/a")
        assert (job.paths, job.files_done) == (("",), 5)
        assert gets(full_bucket) == asked + 4  # two pieces of data/b; data/deep/er/c; other


@pytest.mark.real_time
async def test_a_warm_up_of_what_is_not_there_fails_with_its_name(full_bucket: Bucket, cache: Path) -> None:
    async with running_node(full_bucket, cache) as user:
        job = await warm(user, "data", "missing")
        assert job.state is WarmupState.FAILED
        assert "missing" in job.message
        assert gets(full_bucket) == 0


async def test_files_that_fail_are_named_and_the_others_are_cached(full_bucket: Bucket, cache: Path) -> None:
    store = FaultyStore(full_bucket)  # type: ignore[arg-type]
    store.script(Fault(Unavailable("no answer"), method="get_into", key="data/b", times=10**6))
    async with running_node(store, cache) as user:
        job = await warm(user, "data")
        assert job.state is WarmupState.FAILED
        assert (job.files_done, job.files_failed) == (2, 1)
        assert job.failures == ["data/b: no answer"]


@pytest.mark.real_time
async def test_what_is_not_uploaded_yet_is_passed_over(full_bucket: Bucket, cache: Path) -> None:
    async with running_node(full_bucket, cache, settle_seconds=3600) as user:
        await user.write("data/a", b"newer")
        await user.write("data/new", b"new")
        job = await warm(user, "data")
        assert (job.state, job.files_total) == (WarmupState.DONE, 2)
        assert await user.read("data/a") == b"newer"
        with user.fs.publisher.draining():
            await user.drained()


@pytest.mark.real_time
async def test_a_warm_up_goes_on_when_the_tree_forgets_the_directory(
    full_bucket: Bucket, cache: Path
) -> None:
    async with running_node(full_bucket, cache) as user:

        async def resolve_and_forget(path: str) -> Node:
            node = await user.fs.resolve(path)
            user.fs.tree.forget(node.number, 0)
            assert not user.fs.tree.is_linked(node)
            return node

        user.fs.warmup._resolve = resolve_and_forget
        assert (await warm(user, "data")).state is WarmupState.DONE


async def test_a_stopped_warm_up_says_so_and_another_goes_on_where_it_was(
    full_bucket: Bucket, cache: Path
) -> None:
    async with running_node(full_bucket, cache) as user:
        job = user.fs.warmup.start(["data"])
        await job.counted.wait()
        job.scope.cancel()
        await job.ended.wait()
        assert job.state is WarmupState.STOPPED
        assert (await warm(user, "data")).state is WarmupState.DONE


async def test_there_is_a_bound_on_warm_ups_and_the_newest_are_remembered(
    full_bucket: Bucket, cache: Path
) -> None:
    async with running_node(full_bucket, cache) as user:
        for _ in range(20):
            await warm(user, "database")
        assert len(user.fs.statistics()["warming"]) == 8
        for _ in range(8):
            user.fs.warmup.start(["data"])
        with pytest.raises(NotPermitted, match="wait"):
            user.fs.warmup.start(["data"])


# ---- evicting


@pytest.mark.real_time
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


@pytest.mark.real_time
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


@pytest.mark.real_time
async def test_evicting_what_is_not_there_is_an_error(full_bucket: Bucket, cache: Path) -> None:
    async with running_node(full_bucket, cache) as user:
        assert (await user.fs.inspector.evict(["data"])).freed_bytes == 0
        with pytest.raises(NotFound):
            await user.fs.inspector.evict(["missing"])


async def test_an_open_file_keeps_the_bytes_of_a_version_that_the_bucket_no_longer_has(
    full_bucket: Bucket, cache: Path
) -> None:
    async with running_node(full_bucket, cache) as user:
        await warm(user, "data/a")
        node = await user.fs.resolve("data/a")
        handle = user.fs.file_io.open(node, writable=False, pid=0)
        old = some_bytes(3 * MIB, seed=3 * MIB)
        assert await user.fs.file_io.read(handle, 0, 10) == old[:10]
        full_bucket.memory.put_bytes("data/a", b"replaced")
        await trio.sleep(2)
        assert await user.read("data/a") == b"replaced"
        dropped = await user.fs.inspector.evict([""])
        assert dropped.left_bytes == 3 * MIB
        assert await user.fs.file_io.read(handle, 2 * MIB, 10) == old[2 * MIB : 2 * MIB + 10]
        await user.fs.file_io.release(handle)


# ---- checking


@pytest.mark.real_time
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


@pytest.mark.real_time
async def test_what_a_check_names_is_bounded(bucket: Bucket, cache: Path) -> None:
    for index in range(NAMED + 10):
        bucket.memory.put_bytes(f"bad//{index:03}", b"x")
    async with running_node(bucket, cache) as user:
        found = await check(user)
        assert (found.unusable_keys, len(found.unusable)) == (NAMED + 10, NAMED)


# ---- statistics


@pytest.mark.real_time
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
        assert [job["state"] for job in said["warming"]] == ["done"]


# ---- what the bucket does not have yet


async def state(user: User, path: str) -> str:
    return await user.fs.status.path_state(path)


async def test_the_state_of_a_file_is_one_word_from_the_first_write_to_the_bucket(
    bucket: Bucket, cache: Path
) -> None:
    async with running_node(bucket, cache) as user:
        bucket.takes_nothing = True
        await user.mkdir("d")
        handle = await user.open("d/small")
        await user.fs.file_io.write(handle, 0, b"1234")
        assert [await state(user, path) for path in ("d/small", "d", "")] == ["dirty"] * 3
        await user.close(handle)
        assert await state(user, "d/small") == "queued"
        await user.write("d/large", bytes(9 * MIB))
        there = await user.fs.status.path_status("d")
        assert (there["pending_files"], there["pending_bytes"]) == (3, 9 * MIB + 4)
        bucket.come_back()
        assert await user.drained() == "durable"
        assert [await state(user, path) for path in ("d/small", "d", "")] == ["clean"] * 3
        with pytest.raises(NotFound):
            await state(user, "d/nothing")


async def test_an_upload_under_way_says_how_far_it_is(bucket: Bucket, cache: Path) -> None:
    store = FaultyStore(bucket)  # type: ignore[arg-type]
    store.script(Fault(Unavailable("no answer"), method="complete_multipart", key="large", times=10**6))
    async with running_node(store, cache) as user:
        await user.write("large", bytes(9 * MIB))
        await trio.sleep(20)
        assert await state(user, "large") == f"uploading:{9 * MIB}/{9 * MIB}"
        said = user.fs.statistics()
        assert (said["pending_bytes"], said["uploading"][0]["sent"], said["seconds_left"]) == (
            9 * MIB,
            9 * MIB,
            None,
        )
        (waiting,) = said["waiting"]
        assert (waiting["path"], waiting["cause"]) == ("large", "no answer")
        assert waiting["remedy"]


async def test_what_is_in_requests_now_is_told_whether_whole_or_in_parts(bucket: Bucket, cache: Path) -> None:
    async with running_node(bucket, cache) as user:
        said: dict[str, Any] = {}
        bucket.on_request = lambda method, key: said.setdefault(
            f"{method} {key}", user.fs.statistics()["uploading"]
        )
        await user.write("small", bytes(1000))
        assert await user.drained() == "durable"
        await user.write("large", bytes(9 * MIB))
        assert await user.drained() == "durable"
        whole = {"path": "small", "bytes": 1000, "sent": 0, "under_way": 1000, "request_seconds": 0}
        assert said["put small"] == [whole]
        assert 0 < said["upload_part large"][0]["under_way"] <= 9 * MIB
        assert said["complete_multipart large"][0]["under_way"] == 0
        assert user.fs.statistics()["uploading"] == []


async def test_who_waits_is_not_told_that_the_bucket_asks_for_fewer_requests(
    bucket: Bucket, cache: Path
) -> None:
    store = FaultyStore(bucket)  # type: ignore[arg-type]
    store.script(Fault(Throttled("429"), method="put", key="file", times=2))
    async with running_node(store, cache) as user:
        await user.write("file", b"1")
        await trio.sleep(1.5)
        (waiting,) = user.fs.statistics()["waiting"]
        assert waiting["remedy"].startswith("no action needed")
        assert user.fs.status.progress(user.fs.status.pending())["waiting_for"] == ""
        assert await user.drained() == "durable"


async def test_a_key_that_is_refused_is_an_error_that_says_what_to_do(bucket: Bucket, cache: Path) -> None:
    store = FaultyStore(bucket)  # type: ignore[arg-type]
    store.script(Fault(AccessDenied("revoked"), method="put", key="file", times=10**6))
    async with running_node(store, cache) as user:
        await user.write("file", b"1")
        await trio.sleep(20)
        assert await state(user, "file") == "error:auth-failed"
        assert "renew the key" in user.fs.statistics()["waiting"][0]["remedy"]
        assert (await user.fs.wait_durable("file", 5)).message == "revoked"


async def test_what_only_this_node_holds_is_counted_whatever_the_reason(bucket: Bucket, cache: Path) -> None:
    store = FaultyStore(bucket)  # type: ignore[arg-type]
    store.script(Fault(Refused("locked"), method="put", key="refused", times=10**6))
    async with running_node(store, cache, local_only=("tmp/",)) as user:
        await user.mkdir("tmp")
        await user.write("refused", bytes(1000))
        assert await user.drained() == "error"
        bucket.takes_nothing = True
        await user.write("tmp/local", bytes(200))
        await user.write("queued", bytes(30))
        handle = await user.open("dirty")
        await user.fs.file_io.write(handle, 0, bytes(4))
        said = user.fs.statistics()
        assert (said["exposed_bytes"], said["pending_bytes"], said["dirty_bytes"]) == (1234, 30, 4)
        bucket.come_back()
        await user.close(handle)
        assert await user.drained() == "error"
        assert user.fs.statistics()["exposed_bytes"] == 1200


async def test_the_age_of_what_waits_counts_from_its_close_also_after_a_restart(
    bucket: Bucket, tmp_path: Path
) -> None:
    async with running_node(bucket, tmp_path / "1") as user:
        bucket.takes_nothing = True
        await user.write("file", b"1")
        await trio.sleep(30)
        assert 30 <= user.fs.statistics()["oldest_pending_seconds"] < 32
        photograph(tmp_path / "1", tmp_path / "2")
    change_rows(tmp_path / "2", lambda row: {**row, "moment": time.time() - 5000})
    async with running_node(bucket, tmp_path / "2") as user:
        assert 5000 <= user.fs.statistics()["oldest_pending_seconds"] < 5100
        bucket.come_back()
        assert await user.drained() == "durable"
        assert user.fs.statistics()["oldest_pending_seconds"] == 0
    # A clock that was set back makes nothing younger than its restart.
    change_rows(tmp_path / "1", lambda row: {**row, "moment": time.time() + 5000})
    async with running_node(bucket, tmp_path / "1") as user:
        assert user.fs.statistics()["oldest_pending_seconds"] >= 0


async def test_a_long_queue_is_counted_in_pieces_and_right(
    bucket: Bucket, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(status, "_BATCH_CHANGES", 10)
    async with running_node(bucket, cache) as user:
        bucket.takes_nothing = True
        for index in range(100):
            await user.write(f"file-{index}", b"x" * index)
        turns = 0

        async def take_turns() -> None:
            nonlocal turns
            while True:
                await trio.lowlevel.checkpoint()
                turns += 1

        async with trio.open_nursery() as nursery:
            nursery.start_soon(take_turns)
            pending = await user.fs.status.count()
            seen = turns
            nursery.cancel_scope.cancel()
        assert (pending.files, pending.bytes) == (100, sum(range(100)))
        assert seen >= 5
        assert user.fs.status.pending().files == 100
        await trio.sleep(10)
        assert (user.fs.status.pending().files, user.fs.status.pending().bytes) == (100, sum(range(100)))
        bucket.come_back()
        assert await user.drained() == "durable"
        assert user.fs.status.pending() == Pending()


@pytest.mark.case(49)
async def test_sync_of_a_directory_waits_for_all_that_was_closed_in_it_and_for_nothing_else(
    bucket: Bucket, cache: Path
) -> None:
    store = FaultyStore(bucket)  # type: ignore[arg-type]
    store.script(Fault(Unavailable("no answer"), method="put", key="elsewhere", times=10**6))
    async with running_node(store, cache) as user:
        await user.mkdir("d")
        await user.write("elsewhere", b"1")
        for index in range(100):
            await user.write(f"d/{index}", b"%d" % index)
        still_open = await user.open("d/open")
        await user.fs.file_io.write(still_open, 0, b"1")
        answer = await user.fs.wait_durable("d", 300)
        assert (answer.result, answer.message) == ("durable", "not covered, still open for writing: d/open")
        shown = bucket.shows()
        assert {f"d/{index}": b"%d" % index for index in range(100)}.items() <= shown.items()
        assert "elsewhere" not in shown
        await user.close(still_open)
        assert (await user.fs.wait_durable("elsewhere", 5)).result == "timeout"


@pytest.mark.parametrize("path", ["", "d"])
@pytest.mark.parametrize("between", [0, 1], ids=["in its place", "behind it"])
async def test_sync_waits_for_what_was_rewritten_and_renamed_since(
    bucket: Bucket, cache: Path, path: str, between: int
) -> None:
    stuck = Fault(Unavailable("no answer"), "put", "[de]/[by]*", times=None)
    store = FaultyStore(bucket, stuck)  # type: ignore[arg-type]
    async with running_node(store, cache) as user, trio.open_nursery() as nursery:
        for name in ("d", "e"):
            await user.mkdir(name)
        assert await user.drained() == "durable"
        await user.write("d/big", bytes(2 * MIB))
        await user.write("d/latest", b"1")  # behind it
        answers: list[tuple[str, bytes | None]] = []

        async def sync() -> None:
            answer = await user.fs.wait_durable(path, None)
            answers.append((answer.result, bucket.shows().get("e/y")))

        nursery.start_soon(sync)
        await trio.sleep(1)
        for index in range(between):
            await user.write(f"d/other-{index}", b"")
        await user.write("d/latest", b"2")
        await user.rename("d/latest", "e/y")
        store.heal(Fault(Unavailable("no answer"), "put", "e/y", times=None))
        await trio.sleep(100)
        assert "d/big" in bucket.shows()
        assert answers == []
        store.heal()
        await trio.sleep(100)
        assert answers == [("durable", b"2")]


async def test_sync_tells_of_what_was_refused_although_it_left_the_directory(
    bucket: Bucket, cache: Path
) -> None:
    store = FaultyStore(bucket, Fault(Refused("locked"), "put", "e/*", times=None))  # type: ignore[arg-type]
    async with running_node(store, cache) as user, trio.open_nursery() as nursery:
        for name in ("d", "e"):
            await user.mkdir(name)
        await user.write("d/file", b"1")
        answers: list[tuple[str, str]] = []

        async def sync() -> None:
            answer = await user.fs.wait_durable("d", 100)
            answers.append((answer.result, answer.message))

        nursery.start_soon(sync)
        await wait_all_tasks_blocked()
        await user.rename("d/file", "e/file")
        await trio.sleep(50)
        assert answers == [("error", "e/file: locked")]


async def test_sync_does_not_wait_for_removals_that_are_put_off_and_says_so(
    bucket: Bucket, cache: Path
) -> None:
    async with running_node(bucket, cache, delete_delay=36_000) as user:
        await user.mkdir("old")
        await user.write("old/model", b"1")
        assert await user.drained() == "durable"
        await user.unlink("old/model")
        await user.rmdir("old")
        await user.write("new", b"2")
        answer = await user.fs.wait_durable("", 60)
        assert answer.result == "durable"
        assert "old/model, old/" in answer.message
        assert bucket.shows() == {"old/": b"", "old/model": b"1", "new": b"2"}
        assert (await user.fs.wait_durable("new", 60)).message == ""
        with user.fs.publisher.draining():  # an unmount leaves nothing behind
            assert (await user.fs.wait_durable("", 60)).message == ""
        assert bucket.shows() == {"new": b"2"}


async def test_the_pace_of_uploads_and_what_is_left_are_said_while_they_last(
    bucket: Bucket, cache: Path
) -> None:
    async with running_node(bucket, cache) as user:
        await trio.sleep(100)
        assert user.fs.statistics()["upload_bytes_per_second"] == 0
        bucket.takes_nothing = True
        for index in range(3):
            await user.write(f"{index}.tmp", bytes(MIB))
        await trio.sleep(5)
        bucket.come_back()
        await user.rename("0.tmp", "0")
        await user.rename("1.tmp", "1")
        await trio.sleep(3)
        said = user.fs.statistics()
        assert said["pending_bytes"] == MIB
        # Two of three MiB since the bucket came back, three seconds ago at most, and one to go.
        assert 2 * MIB / 4 < said["upload_bytes_per_second"] <= 2 * MIB
        assert 0.5 <= said["seconds_left"] <= 2
        assert "KiB/s, about" in user.fs.status.line(user.fs.status.pending())
        assert await user.drained() == "durable"
        await trio.sleep(2)
        assert user.fs.statistics()["seconds_left"] is None
        assert user.fs.status.line(user.fs.status.pending()) == "everything is in the bucket"
