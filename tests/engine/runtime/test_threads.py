"""A call in a thread cannot be cancelled: whatever happens during it, the mount goes on and loses nothing."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from fusecache.disk.staging import StagingFile
from fusecache.model.errors import NotFound
from fusecache.model.objects import MIB
from tests.support.inline_offload import InlineOffload
from tests.support.node import Bucket, User, photograph, running_node
from tests.support.threads import stay

PART = 4 * MIB  # as `conftest.py` has it


class Slow(InlineOffload):
    """Commits, publishing requests, or the answers of reading ones take so many seconds more in their threads."""

    rows_seconds = publish_seconds = answer_seconds = 0.0

    async def network(self, call: Callable[..., Any], *args: object) -> Any:
        answer = await super().network(call, *args)
        await stay(self.answer_seconds)
        return answer

    async def rows(self, call: Callable[..., Any], *args: object) -> Any:
        await stay(self.rows_seconds)
        return await super().rows(call, *args)

    async def publish(self, call: Callable[..., Any], *args: object) -> Any:
        await stay(self.publish_seconds)
        return await super().publish(call, *args)


def rows_of(user: User) -> list[str]:
    """Return the keys of all files that the journal speaks of."""
    return [row.key for row in user.fs.journal.journal.files()]


async def test_a_file_removed_while_its_late_pages_are_promised_does_not_come_back(
    bucket: Bucket, cache: Path
) -> None:
    offload = Slow()
    async with running_node(bucket, cache, offload=offload) as user, trio.open_nursery() as nursery:
        handle = await user.open("file")
        await user.fs.file_io.write(handle, 0, b"....")
        await user.fs.close_protocol.flush(handle)
        reader = user.fs.file_io.open(handle.node, writable=False, pid=0)
        await user.fs.file_io.write(handle, 1, b"XX")  # pages of a mapping: no close follows
        offload.rows_seconds = 5.0
        nursery.start_soon(user.fs.file_io.release, handle)
        await trio.sleep(1)
        nursery.start_soon(user.unlink, "file")
        await trio.sleep(20)
        offload.rows_seconds = 0.0
        assert await user.drained() == "durable"
        assert bytes(await user.fs.file_io.read(reader, 0, 10)) == b".XX."
        await user.fs.file_io.release(reader)
        await trio.sleep(5)
        assert rows_of(user) == []
    assert bucket.shows() == {}
    assert bucket.states == []


async def test_a_file_renamed_over_one_whose_late_pages_are_promised_is_published_after_it(
    bucket: Bucket, cache: Path
) -> None:
    offload = Slow()
    async with running_node(bucket, cache, offload=offload) as user, trio.open_nursery() as nursery:
        await user.write("new", b"new")
        handle = await user.open("file")
        await user.fs.file_io.write(handle, 0, b"....")
        await user.fs.close_protocol.flush(handle)
        await user.fs.file_io.write(handle, 1, b"XX")  # pages of a mapping: no close follows
        offload.rows_seconds = 5.0
        nursery.start_soon(user.fs.file_io.release, handle)
        await trio.sleep(1)
        nursery.start_soon(user.rename, "new", "file")
        await trio.sleep(20)
        offload.rows_seconds = 0.0
        await user.write("later", b"later")
        with trio.fail_after(600):
            assert await user.drained() == "durable"
        assert await user.read("file") == b"new"
    assert bucket.shows() == {"file": b"new", "later": b"later"}


async def test_an_open_file_that_is_removed_while_it_is_published_leaves_nothing(
    bucket: Bucket, cache: Path
) -> None:
    offload = Slow()
    async with running_node(bucket, cache, offload=offload) as user:
        offload.publish_seconds = 10.0
        await user.write("file", b"1")
        handle = user.fs.file_io.open(await user.fs.resolve("file"), writable=False, pid=0)
        await trio.sleep(5)
        assert handle.node.version is not None
        assert handle.node.version.in_flight
        await user.unlink("file")
        assert await user.drained() == "durable"
        assert bytes(await user.fs.file_io.read(handle, 0, 10)) == b"1"
        await user.fs.file_io.release(handle)
        await trio.sleep(5)
        assert rows_of(user) == []
        assert user.fs.statistics()["cache"]["staging_bytes"] == 0
    assert list((cache / "staging").iterdir()) == []
    assert bucket.shows() == {}


@pytest.mark.parametrize("is_open", [False, True])
async def test_a_node_that_ends_before_the_bytes_of_a_removed_file_go_keeps_none_of_them(
    bucket: Bucket,
    cache: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    is_open: bool,  # noqa: FBT001
) -> None:
    """No file is left for a person to decide about that nobody wants any more."""
    after = tmp_path / "after"
    delete = StagingFile.delete

    def die(file: StagingFile) -> None:
        if not after.exists():
            photograph(cache, after)
        delete(file)

    async with running_node(bucket, cache, settle_seconds=100.0) as user:
        await user.write("file", b"secret")
        handle = await user.open("file", truncate=False) if is_open else None
        if handle is None:
            monkeypatch.setattr(StagingFile, "delete", die)
        await user.unlink("file")
        if handle is not None:
            await trio.sleep(1)
            photograph(cache, after)
            await user.close(handle)
        else:
            await trio.sleep(1)
    assert len(list((after / "staging").iterdir())) == 1
    async with running_node(bucket, after) as user:
        await user.drained()
        assert (user.fs.replayed.orphans, await user.tree(), rows_of(user)) == (0, {}, [])
        assert user.fs.statistics()["cache"]["staging_bytes"] == 0
    for folder in ("staging", "orphans"):
        assert list((after / folder).iterdir()) == []


async def test_a_large_file_removed_as_its_preparation_begins_leaves_no_upload(
    bucket: Bucket, cache: Path
) -> None:
    async with running_node(bucket, cache, settle_seconds=10.0) as user:
        await user.write("first", b"1")
        assert await user.drained() == "durable"
        preparer = user.fs.publisher._preparer
        begin, preparer.begin = preparer.begin, lambda *_, **__: None  # type: ignore[method-assign]
        await user.write("model", bytes(3 * PART))
        node = await user.fs.resolve("model")
        preparer.begin = begin  # type: ignore[method-assign]
        preparer.begin(node.version, is_settled=True)
        await user.unlink("model")
        await trio.sleep(60)
        assert rows_of(user) == []
    assert bucket.memory.uploads() == ()
    assert bucket.sent("upload_part") == []


async def test_an_answer_about_a_name_that_is_older_than_its_publication_is_not_believed(
    bucket: Bucket, cache: Path
) -> None:
    """The bucket takes writes meanwhile, and what was known of names must do."""
    offload = Slow()
    async with running_node(bucket, cache, offload=offload) as user, trio.open_nursery() as nursery:
        assert await user.tree() == {}
        await trio.sleep(5)
        offload.answer_seconds = 30.0

        async def look() -> None:
            with pytest.raises(NotFound):
                await user.fs.resolve("file")

        nursery.start_soon(look)
        await trio.sleep(12)
        await user.write("file", b"1")
        assert await user.drained() == "durable"
        await trio.sleep(60)
        offload.answer_seconds = 0.0
        bucket.is_cut_off = True
        assert await user.tree() == {"file": b"1"}


@pytest.mark.real_time
async def test_a_close_is_not_taken_back_because_the_loop_stood_still_before_it_heard_of_its_end(
    bucket: Bucket, cache: Path
) -> None:
    """Its RELEASE lies in the kernel, unread; taken back, it would let what was written after it go first."""
    clock = MockClock()

    async def main() -> None:
        async with running_node(bucket, cache) as user:
            handle = await user.open("shard")
            await user.fs.file_io.write(handle, 0, b"shard")
            await user.fs.close_protocol.flush(handle)
            await user.write("latest", b"shard")
            clock.jump(
                5.0
            )  # a commit in the middle of a pass, a machine that swaps: nothing runs for so long
            for _ in range(10):
                await wait_all_tasks_blocked()
                clock.jump(0.001)
            await user.fs.file_io.release(handle)
            clock.autojump_threshold = 0
            assert await user.drained() == "durable"

    await trio.to_thread.run_sync(lambda: trio.run(main, clock=clock))
    assert bucket.states == [{"shard": b"shard"}, {"shard": b"shard", "latest": b"shard"}]
