"""fsync = "remote" returns when the bucket has the file, and all earlier changes of its directory."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import trio

from fusecache.engine.namespace.nodes import FileHandle
from fusecache.index.journal import Journal
from fusecache.model.errors import Interrupted, LocalDiskError, ObjectChanged, ReadOnly, Refused, Unavailable
from fusecache.model.objects import MIB
from fusecache.policy.backoff import STANDSTILL_SECONDS
from tests.engine.write.test_writing import SlowUploads, kill, opened_by, program
from tests.support.faulty_store import Fault, FaultyStore
from tests.support.node import Bucket, User, photograph, running_node

LARGE = 9 * MIB  # three parts


@asynccontextmanager
async def remote_node(store: Any, cache: Path, **options: Any) -> AsyncIterator[User]:
    """Run a node whose fsync waits for the bucket."""
    async with running_node(store, cache, fsync_is_remote=True, **options) as user:
        yield user


async def begun(user: User, path: str, data: bytes) -> FileHandle:
    """Write into a file that stays open."""
    handle = await user.open(path)
    for start in range(0, len(data), 4 * MIB):
        await user.fs.file_io.write(handle, start, data[start : start + 4 * MIB])
    return handle


# ---- what it promises


@pytest.mark.parametrize("size", [1, LARGE], ids=["small", "large"])
async def test_it_publishes_a_file_that_is_still_open(bucket: Bucket, cache: Path, size: int) -> None:
    async with remote_node(bucket, cache) as user:
        handle = await begun(user, "file", bytes(size))
        await user.fs.fsync(handle)
        assert bucket.shows() == {"file": bytes(size)}
        await user.close(handle)
        assert await user.drained() == "durable"
    assert len(bucket.states) == 1  # the close has nothing to add


async def test_it_fails_if_the_bucket_refuses_content_that_goes_up_under_an_earlier_name(
    bucket: Bucket, cache: Path
) -> None:
    store = FaultyStore(bucket)  # type: ignore[arg-type]
    async with remote_node(store, cache) as user:
        await user.mkdir("x")
        await user.mkdir("y")
        await user.write("a", b"1")
        assert await user.drained() == "durable"
        bucket.takes_nothing = True
        await user.write("a", b"2")
        await user.rename("a", "x/b")
        await user.write("other", b"o")  # so that the next rename follows the upload
        await user.rename("x/b", "y/c")
        store.script(Fault(Refused("EntityTooLarge"), "put", "*b", times=None))
        bucket.come_back()
        handle = await user.open("y/c", truncate=False)
        with trio.fail_after(100), pytest.raises(Refused):
            await user.fs.fsync(handle)
        assert "y/c" not in bucket.shows()
        with pytest.raises(Refused):
            await user.close(handle)


async def test_what_is_written_after_it_is_published_at_the_close(bucket: Bucket, cache: Path) -> None:
    async with remote_node(bucket, cache) as user:
        handle = await begun(user, "file", b"one")
        await user.fs.fsync(handle)
        await user.fs.file_io.write(handle, 3, b" two")
        assert await user.read("file") == b"one two"
        assert bucket.shows() == {"file": b"one"}
        await user.fs.fsync(handle)
        assert bucket.shows() == {"file": b"one two"}
        await user.fs.file_io.write(handle, 7, b" three")
        await user.close(handle)
        assert await user.drained() == "durable"
    assert [state["file"] for state in bucket.states] == [b"one", b"one two", b"one two three"]


async def test_everything_of_its_directory_that_was_ordered_before_is_there_too(
    bucket: Bucket, cache: Path
) -> None:
    async with remote_node(bucket, cache, settle_seconds=5.0) as user:
        await user.mkdir("step")
        await user.mkdir("step/deep")
        for name in ("a", "deep/b"):
            await user.write(f"step/{name}", name.encode())
        handle = await begun(user, "step/last", b"last")
        await user.fs.fsync(handle)
        shown = bucket.shows()
        assert {"step/a", "step/deep/b", "step/last"} <= shown.keys()
        await user.close(handle)


async def test_writes_during_it_are_not_mixed_into_what_is_published(bucket: Bucket, cache: Path) -> None:
    async with remote_node(bucket, cache) as user:
        handle = await begun(user, "file", b"A" * LARGE)
        bucket.takes_nothing = True
        async with trio.open_nursery() as nursery:
            nursery.start_soon(user.fs.fsync, handle)
            await trio.sleep(3)
            for offset in range(0, LARGE, MIB):
                await user.fs.file_io.write(handle, offset, b"B" * 100)
            assert (await user.read("file"))[:101] == b"B" * 100 + b"A"
            bucket.come_back()
        assert bucket.shows() == {"file": b"A" * LARGE}
        await user.close(handle)
        assert await user.drained() == "durable"
    assert bucket.shows()["file"].count(b"B") == 900


async def test_a_close_during_it_does_not_take_its_content_away(bucket: Bucket, cache: Path) -> None:
    """Newer content takes the place of older in the queue: not of one that somebody waits for."""
    async with remote_node(bucket, cache) as user:
        bucket.takes_nothing = True
        handle = await begun(user, "file", bytes(2 * MIB))
        other = user.fs.file_io.open(handle.node, writable=True, pid=0)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(user.fs.fsync, handle)
            await trio.sleep(1)
            await user.fs.file_io.write(other, 0, b"x")
            await user.fs.close_protocol.flush(other)  # and it stays open: nothing of it is published
            await trio.sleep(5)
            bucket.come_back()
        assert bucket.shows() == {"file": bytes(2 * MIB)}
        await user.close(other)
        await user.close(handle)
        assert await user.drained() == "durable"
    assert bucket.shows()["file"][:2] == b"x\0"


async def test_of_a_closed_file_it_waits_until_the_bucket_has_it(bucket: Bucket, cache: Path) -> None:
    async with remote_node(bucket, cache) as user:
        await user.write("file", b"1")
        handle = user.fs.file_io.open(await user.fs.resolve("file"), writable=False, pid=0)
        await user.fs.fsync(handle)
        assert bucket.shows() == {"file": b"1"}
        await user.fs.file_io.release(handle)


async def test_a_snapshot_outlives_the_daemon_and_its_writer(
    bucket: Bucket, cache: Path, tmp_path: Path
) -> None:
    async with remote_node(bucket, cache) as user:
        bucket.takes_nothing = True
        handle = await begun(user, "file", b"synced")
        with trio.move_on_after(2):
            await user.fs.fsync(handle)
        await user.fs.file_io.write(handle, 6, b" and more")
        await trio.sleep(1)
        photograph(cache, tmp_path / "crashed")
        bucket.come_back()
        await user.close(handle)
    bucket.memory.delete("file")
    async with running_node(bucket, tmp_path / "crashed") as user:
        assert await user.drained() == "durable"
    assert bucket.shows() == {"file": b"synced"}


async def test_content_that_is_rewritten_and_renamed_meanwhile_is_waited_for_where_it_is(
    bucket: Bucket, cache: Path
) -> None:
    """One of two closed versions goes with the rename: what stands for it must be there when fsync returns."""
    stuck = Fault(Unavailable("no answer"), "put", "step/*", times=None)
    store = FaultyStore(bucket, stuck)
    async with remote_node(store, cache) as user, trio.open_nursery() as nursery:
        await user.mkdir("step")
        await user.write("step/big", bytes(2 * MIB))
        await user.write("step/latest", b"1")
        handle = user.fs.file_io.open(await user.fs.resolve("step/latest"), writable=False, pid=0)
        shown: list[dict[str, bytes]] = []

        async def sync() -> None:
            await user.fs.fsync(handle)
            shown.append(bucket.shows())

        nursery.start_soon(sync)
        await trio.sleep(1)
        await user.write("step/latest", b"2")
        await user.rename("step/latest", "step/x")
        store.heal(Fault(Unavailable("no answer"), "put", "step/x", times=None))
        await trio.sleep(100)
        assert "step/big" in bucket.shows()
        assert shown == []
        store.heal()
        await trio.sleep(100)
        assert [each["step/x"] for each in shown] == [b"2"]
        await user.fs.file_io.release(handle)


async def test_what_was_ordered_before_is_waited_for_although_it_was_rewritten_and_left_the_directory(
    bucket: Bucket, cache: Path
) -> None:
    stuck = Fault(Unavailable("no answer"), "put", "step/*", times=None)
    store = FaultyStore(bucket, stuck)
    async with remote_node(store, cache) as user, trio.open_nursery() as nursery:
        await user.mkdir("step")
        await user.write("step/shard", bytes(2 * MIB))
        handle = await begun(user, "step/last", b"last")
        shown: list[dict[str, bytes]] = []

        async def sync() -> None:
            await user.fs.fsync(handle)
            shown.append(bucket.shows())

        nursery.start_soon(sync)
        await trio.sleep(1)
        await user.write("step/shard", bytes(3 * MIB))
        await user.rename("step/shard", "shard")
        store.heal(Fault(Unavailable("no answer"), "put", "*shard", times=None))
        await trio.sleep(100)
        assert "step/last" in bucket.shows()
        assert shown == []
        store.heal()
        await trio.sleep(100)
        assert [len(each["shard"]) for each in shown] == [3 * MIB]
        await user.close(handle)


async def test_it_does_not_wait_for_removals_that_are_put_off(bucket: Bucket, cache: Path) -> None:
    async with remote_node(bucket, cache, delete_delay=36_000) as user:
        await user.write("old", b"1")
        assert await user.drained() == "durable"
        await user.unlink("old")
        handle = await begun(user, "new", b"2")
        with trio.fail_after(60):
            await user.fs.fsync(handle)
        assert bucket.shows() == {"old": b"1", "new": b"2"}
        await user.close(handle)


# ---- what it never publishes


@pytest.mark.parametrize(("name", "data"), [("data", b""), (".metadata.tmp", b"index"), ("x.partial", b"1")])
async def test_an_unfinished_file_is_synced_here_and_what_was_before_it_is_in_the_bucket(
    bucket: Bucket, cache: Path, name: str, data: bytes
) -> None:
    async with remote_node(bucket, cache) as user:
        await user.write("shard", b"shard")
        handle = await begun(user, name, data)
        await user.fs.fsync(handle)
        assert bucket.shows() == {"shard": b"shard"}
        await user.rename(name, "final")
        await user.close(handle)
        assert await user.drained() == "durable"
    assert bucket.shows() == {"shard": b"shard", "final": data}
    assert bucket.sent("put") == ["shard", "final"]


async def test_an_unlinked_file_is_not_published(bucket: Bucket, cache: Path) -> None:
    async with remote_node(bucket, cache) as user:
        handle = await begun(user, "file", b"1")
        await user.unlink("file")
        await user.fs.fsync(handle)
        await user.close(handle)
        assert await user.drained() == "durable"
    assert bucket.requests == []


# ---- how it ends otherwise


@pytest.mark.case(29)
async def test_without_progress_it_fails_and_the_file_is_published_later(bucket: Bucket, cache: Path) -> None:
    async with remote_node(bucket, cache) as user:
        handle = await begun(user, "file", b"1")
        bucket.takes_nothing = True
        began = trio.current_time()
        with pytest.raises(Unavailable, match="still queued"):
            await user.fs.fsync(handle)
        assert STANDSTILL_SECONDS <= trio.current_time() - began < STANDSTILL_SECONDS + 30
        bucket.come_back()
        assert await user.drained() == "durable"
        assert bucket.shows() == {"file": b"1"}
        await user.close(handle)


async def test_a_file_that_is_refused_while_others_progress_fails_too(bucket: Bucket, cache: Path) -> None:
    store = FaultyStore(bucket, Fault(Unavailable("no"), "put", key="step/file", times=None))
    async with remote_node(store, cache) as user:
        await user.mkdir("step")
        handle = await begun(user, "step/file", b"1")

        async def others() -> None:
            for number in range(10_000):
                await user.write(f"other-{number}", b"2")
                await trio.sleep(5)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(others)
            with trio.fail_after(2 * STANDSTILL_SECONDS), pytest.raises(Unavailable):
                await user.fs.fsync(handle)
            nursery.cancel_scope.cancel()
        store.heal()
        await user.close(handle)
        assert await user.drained() == "durable"


async def test_a_slow_upload_is_no_standstill(bucket: Bucket, cache: Path) -> None:
    async with remote_node(bucket, cache, offload=SlowUploads(STANDSTILL_SECONDS * 0.8)) as user:
        handle = await begun(user, "file", bytes(LARGE))
        began = trio.current_time()
        await user.fs.fsync(handle)
        assert trio.current_time() - began > STANDSTILL_SECONDS
        assert bucket.shows() == {"file": bytes(LARGE)}
        await user.close(handle)


async def test_what_the_bucket_refuses_for_good_is_told(bucket: Bucket, cache: Path) -> None:
    store = FaultyStore(bucket, Fault(Refused("policy"), "put", times=None))
    async with remote_node(store, cache) as user:
        handle = await begun(user, "file", b"1")
        with pytest.raises(Refused):
            await user.fs.fsync(handle)


async def test_a_conflict_is_told_and_both_versions_stay(bucket: Bucket, cache: Path) -> None:
    async with remote_node(bucket, cache) as user:
        handle = await begun(user, "file", b"ours")
        bucket.memory.put_bytes("file", b"theirs")
        with pytest.raises(ObjectChanged, match="another client"):
            await user.fs.fsync(handle)
        await user.close(handle)
        await user.drained()
    shown = bucket.shows()
    (copy,) = (key for key in shown if key.startswith("file.conflict-"))
    assert shown == {"file": b"theirs", copy: b"ours"}


@pytest.mark.parametrize("when", ["before", "meanwhile"])
@pytest.mark.parametrize("size", [1, 0], ids=["written", "empty"])
async def test_what_the_bucket_refuses_of_what_was_ordered_before_is_told(
    bucket: Bucket, cache: Path, when: str, size: int
) -> None:
    store = FaultyStore(bucket, Fault(Refused("no"), "put", "step/shard", times=None))
    async with remote_node(store, cache) as user:
        for folder in ("step", "beside"):
            await user.mkdir(folder)
        await user.write("step/shard", b"bytes")
        if when == "before":
            assert await user.drained() == "error"
        beside = await begun(user, "beside/file", b"1")
        await user.fs.fsync(beside)
        last = await begun(user, "step/.metadata", b"1" * size)
        with pytest.raises(Refused):
            await user.fs.fsync(last)
        await user.unlink("step/shard")
        await user.fs.fsync(last)
        for handle in (beside, last):
            await user.close(handle)


@pytest.mark.parametrize("change", ["write", "symlink"])
async def test_a_conflict_of_what_was_ordered_before_is_told(
    bucket: Bucket, cache: Path, change: str
) -> None:
    async with remote_node(bucket, cache) as user:
        await user.mkdir("step")
        if change == "write":
            await user.write("step/shard", b"ours")
        else:
            await user.symlink("ours", "step/shard")
        bucket.memory.put_bytes("step/shard", b"theirs")
        last = await begun(user, "step/.metadata", b"1")
        with pytest.raises(ObjectChanged, match=r"step/shard"):
            await user.fs.fsync(last)
        await user.fs.fsync(last)  # told once; `fusecache recover` goes on to list it
        await user.close(last)


async def test_a_process_that_is_being_killed_is_let_go(bucket: Bucket, cache: Path) -> None:
    async with remote_node(bucket, cache) as user:
        bucket.takes_nothing = True
        await user.write("file", b"1")
        with program() as process:
            handle = await opened_by(user, process, "file")
            await user.fs.file_io.write(handle, 0, b"2")
            kill(process)
            with trio.fail_after(10), pytest.raises(Interrupted):
                await user.fs.fsync(handle)
            await user.fs.file_io.release(handle)
        bucket.come_back()
        assert await user.drained() == "durable"


async def test_the_end_of_the_mount_answers_who_waits(bucket: Bucket, cache: Path) -> None:
    async with remote_node(bucket, cache) as user:
        bucket.takes_nothing = True
        handle = await begun(user, "file", b"1")
        async with trio.open_nursery() as nursery:

            async def ending() -> None:
                await trio.sleep(10)
                user.fs.end_waiting()

            nursery.start_soon(ending)
            with trio.fail_after(15), pytest.raises(Unavailable, match="mount ends"):
                await user.fs.fsync(handle)
        bucket.come_back()
        await user.close(handle)
        assert await user.drained() == "durable"


# ---- ordered


@pytest.mark.parametrize(("world", "local", "warnings"), [("16", "8", 1), ("8", "8", 0), ("", "", 0)])
async def test_an_ordered_fsync_of_a_job_of_several_nodes_is_warned_of_once(
    bucket: Bucket,
    cache: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    world: str,
    local: str,
    warnings: int,
) -> None:
    for name, value in (("WORLD_SIZE", world), ("LOCAL_WORLD_SIZE", local)):
        if value:
            monkeypatch.setenv(name, value)
        else:
            monkeypatch.delenv(name, raising=False)
    async with running_node(bucket, cache) as user:
        await user.write("file", b"1")
        with program() as process:
            handle = await opened_by(user, process, "file")
            for _ in range(3):
                await user.fs.fsync(handle)
            await user.close(handle)
    told = [record for record in caplog.records if "--fsync remote" in record.getMessage()]
    assert len(told) == warnings


async def test_it_does_not_wait_for_a_temporary_file_beside_its_own(bucket: Bucket, cache: Path) -> None:
    async with remote_node(bucket, cache) as user:
        await user.mkdir("run")
        await user.write("run/other.tmp", b"of another rank")
        handle = await begun(user, "run/model", b"1")
        with trio.fail_after(30):
            await user.fs.fsync(handle)
        assert bucket.shows() == {"run/": b"", "run/model": b"1"}
        await user.close(handle)


async def test_a_sync_fails_once_the_journal_cannot_be_written(
    bucket: Bucket, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise LocalDiskError("input/output error")

    apply = Journal.apply
    async with running_node(bucket, cache) as user:
        bucket.takes_nothing = True
        await user.write("model", b"1")
        await user.write("_SUCCESS", b"")
        await trio.sleep(5)
        monkeypatch.setattr(Journal, "apply", fail)
        bucket.come_back()
        with trio.fail_after(120), pytest.raises(ReadOnly):
            await user.fs.wait_durable("", None)
        monkeypatch.setattr(Journal, "apply", apply)
        await trio.sleep(120)
        assert await user.drained() == "durable"
