"""A close may be taken back by who still writes: what was closed, removed or cut before it is not lost by that."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import trio

from fusecache.engine.namespace.nodes import FileHandle
from fusecache.model.objects import MIB
from fusecache.policy.writeback.inline_write_gate import InlineWriteGate
from tests.engine.publish.test_multipart_uploader import PART, body, write
from tests.engine.recovery.test_journal_replay import change_rows
from tests.engine.write.test_writing import SlowUploads
from tests.support.inline_offload import InlineOffload
from tests.support.node import Bucket, User, photograph, running_node


async def test_a_removed_file_that_is_written_anew_by_a_shell_is_no_conflict(
    bucket: Bucket, cache: Path
) -> None:
    """A shell closes one of its two descriptors before the command writes."""
    async with running_node(bucket, cache) as user:
        await user.write("log", b"old")
        assert await user.drained() == "durable"
        await user.unlink("log")
        handle = await user.open("log")
        await user.fs.close_protocol.flush(handle)
        await user.fs.file_io.write(handle, 0, b"new")
        await user.close(handle)
        assert await user.drained() == "durable"
    assert bucket.shows() == {"log": b"new"}


async def test_a_removal_survives_a_kill_while_its_successor_is_still_written(
    bucket: Bucket, tmp_path: Path
) -> None:
    async with running_node(bucket, tmp_path / "1") as user:
        await user.write("log", b"old")
        assert await user.drained() == "durable"
        await user.unlink("log")
        handle = await user.open("log")
        await user.fs.close_protocol.flush(handle)
        await user.fs.file_io.write(handle, 0, b"new")
        photograph(tmp_path / "1", tmp_path / "2")
        bucket.is_cut_off = True
    bucket.come_back()
    async with running_node(bucket, tmp_path / "2") as user:
        assert await user.drained() == "durable"
        assert await user.tree() == {}
    assert bucket.shows() == {}


@pytest.mark.parametrize("truncate", [True, False])
async def test_a_close_that_returned_stands_though_its_release_comes_after_the_next_open(
    bucket: Bucket, tmp_path: Path, *, truncate: bool
) -> None:
    """The kernel does not wait for the answer to a RELEASE, nor, with many requests under way, for its turn."""
    async with running_node(bucket, tmp_path / "1") as user:
        await user.write("log", b"old")
        assert await user.drained() == "durable"
        first = await user.open("log")
        await user.fs.file_io.write(first, 0, b"closed")
        await user.fs.close_protocol.flush(first)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(partial(_append, user, "log", b", and more", truncate=truncate))
            await trio.sleep(0.3)
            await user.fs.file_io.release(first)
        photograph(tmp_path / "1", tmp_path / "2")
        bucket.is_cut_off = True
    bucket.come_back()
    async with running_node(bucket, tmp_path / "2") as user:
        assert await user.drained() == "durable"
    assert bucket.shows() == {"log": b"closed"}


class SlowCommits(InlineOffload):
    """A commit of the journal takes `seconds`."""

    seconds = 0.0

    async def rows(self, call: Callable[..., Any], *args: Any) -> Any:
        """Run the call inline, a commit late."""
        if getattr(call, "__name__", "") == "apply":
            await trio.sleep(self.seconds)
        return call(*args)


async def test_a_close_that_waits_longer_for_the_disk_than_files_settle_stands(
    bucket: Bucket, tmp_path: Path
) -> None:
    disk = SlowCommits()
    async with running_node(bucket, tmp_path / "1", offload=disk) as user:
        await user.write("file", b"old")
        assert await user.drained() == "durable"
        handle = await user.open("file")
        await user.fs.file_io.write(handle, 0, b"closed")
        disk.seconds = 3.0
        await user.fs.close_protocol.flush(handle)
        photograph(tmp_path / "1", tmp_path / "2")
        disk.seconds = 0.0
        bucket.is_cut_off = True
        await user.fs.file_io.release(handle)
    bucket.come_back()
    async with running_node(bucket, tmp_path / "2") as user:
        assert await user.drained() == "durable"
    assert bucket.shows() == {"file": b"closed"}


@pytest.mark.parametrize("then", ["at once", "after the settle delay"])
async def test_what_a_close_covers_is_published_though_its_release_never_comes(
    bucket: Bucket, cache: Path, then: str
) -> None:
    """The kernel drops the releases that it has not sent when the mount ends."""
    async with running_node(bucket, cache) as user:
        handle = await user.open("file")
        await user.fs.file_io.write(handle, 0, b"closed")
        await user.fs.close_protocol.flush(handle)
        user.fs.on_unmounted()
        if then != "at once":
            await trio.sleep(5)
        assert await user.drained() == "durable"
    assert bucket.shows() == {"file": b"closed"}


class SlowWrites(InlineOffload):
    """Each write to the disk takes a second."""

    async def disk(self, call: Callable[..., Any], *args: Any) -> Any:
        """Run the call inline, late."""
        await trio.sleep(1.0)
        return call(*args)


async def test_what_is_written_after_its_close_is_not_published_when_the_mount_ends(
    bucket: Bucket, cache: Path
) -> None:
    async with running_node(bucket, cache) as user:
        await user.write("file", b"old")
        assert await user.drained() == "durable"
        handle = await user.open("file")
        await user.fs.close_protocol.flush(handle)
        await user.fs.file_io.write(handle, 0, b"half")
        user.fs.on_unmounted()
        assert await user.drained() == "durable"
    assert bucket.shows() == {"file": b"old"}


async def test_what_is_closed_during_a_write_is_not_published_when_the_mount_ends_before_the_write(
    bucket: Bucket, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(InlineWriteGate, "is_quick", lambda _: False)  # as on a slow disk
    async with running_node(bucket, cache, offload=SlowWrites()) as user:
        await user.write("file", b"old")
        assert await user.drained() == "durable"
        handle = await user.open("file")
        async with trio.open_nursery() as nursery:
            nursery.start_soon(user.fs.file_io.write, handle, 0, b"half")
            await trio.sleep(0.5)
            await user.fs.close_protocol.flush(handle)
            user.fs.on_unmounted()
        assert await user.drained() == "durable"
    assert bucket.shows() == {"file": b"old"}


async def test_a_removed_file_that_is_held_open_is_no_orphan_after_a_kill(
    bucket: Bucket, tmp_path: Path
) -> None:
    async with running_node(bucket, tmp_path / "1") as user:
        handle = await user.open("file")
        await user.fs.file_io.write(handle, 0, b"gone")
        await user.fs.close_protocol.flush(handle)
        await user.unlink("file")
        await user.write("other", b"-")
        await trio.sleep(5)
        photograph(tmp_path / "1", tmp_path / "2")
        bucket.is_cut_off = True
        await user.fs.file_io.release(handle)
    bucket.come_back()
    async with running_node(bucket, tmp_path / "2") as user:
        assert [row.key for row, _ in user.fs.replayed.quarantined if row.key] == []


async def test_a_file_that_a_forked_child_closed_can_be_opened_by_others(bucket: Bucket, cache: Path) -> None:
    async with running_node(bucket, cache) as user:
        handle = await user.open("log")
        await user.fs.file_io.write(handle, 0, b"one")
        await user.fs.close_protocol.flush(handle)
        other = await user.open("log", truncate=False)
        await user.fs.file_io.write(other, 3, b", two")
        await user.close(other)
        await user.close(handle)
        assert await user.drained() == "durable"
    assert bucket.shows() == {"log": b"one, two"}


async def _append(user: User, path: str, data: bytes, *, truncate: bool) -> None:
    """Write at the end, and do not close it."""
    handle = await user.open(path, truncate=truncate)
    await user.fs.file_io.write(handle, handle.node.size, data)


async def test_a_close_after_a_childs_is_journaled_when_it_returns(bucket: Bucket, tmp_path: Path) -> None:
    async with running_node(bucket, tmp_path / "1") as user:
        handle = await user.open("file")
        await user.fs.file_io.write(handle, 0, b"whole")
        await user.fs.close_protocol.flush(handle)  # a forked child ends
        await trio.sleep(3)
        await user.fs.close_protocol.flush(handle)
        photograph(tmp_path / "1", tmp_path / "2")
        bucket.is_cut_off = True
    bucket.come_back()
    async with running_node(bucket, tmp_path / "2") as user:
        assert await user.drained() == "durable"
    assert bucket.shows() == {"file": b"whole"}


async def test_a_large_file_that_is_cut_while_its_parts_go_ahead_ends_nothing(
    bucket: Bucket, cache: Path
) -> None:
    async with running_node(bucket, cache) as user:
        handle = await user.open("model")
        await write(user, handle, body(8))
        await user.fs.file_io.truncate(handle.node, 0)
        await trio.sleep(5)
        await write(user, handle, body(6, b"2"))
        await user.fs.file_io.truncate(handle.node, 3 * PART + 5)
        await user.close(handle)
        assert await user.drained() == "durable"
        await trio.sleep(5)
    assert bucket.shows() == {"model": body(4, b"2")[: 3 * PART + 5]}
    assert bucket.memory.uploads() == ()


async def test_versions_of_a_file_that_is_rewritten_in_an_outage_do_not_pile_up(
    bucket: Bucket, cache: Path
) -> None:
    async with running_node(bucket, cache) as user:
        bucket.takes_nothing = True
        for number in range(6):
            await user.write("last.bin", b"%d" % number * (2 * MIB))
            await user.write(f"other-{number}", b"-")
            await trio.sleep(30)
        queued = [item for item in user.fs.queue.items() if item.changed_keys() == ("last.bin",)]
        assert len(queued) <= 2
        bucket.come_back()
        assert await user.drained() == "durable"
    assert bucket.shows()["last.bin"] == b"5" * (2 * MIB)


async def test_what_a_suspect_knew_of_the_bucket_passes_to_the_next_version(
    bucket: Bucket, tmp_path: Path
) -> None:
    async with running_node(bucket, tmp_path / "1") as user:
        await user.write("latest", b"1")
        assert await user.drained() == "durable"
        bucket.takes_nothing = True
        for number in (b"2", b"3"):
            await user.write("latest", number)
            await user.write(b"shard-".decode() + number.decode(), number)
        await trio.sleep(20)
        photograph(tmp_path / "1", tmp_path / "2")
        bucket.is_cut_off = True
    bucket.come_back()
    seen: list[str] = []

    def unsync(row: dict) -> dict:
        if row["key"] == "latest" and not seen:
            seen.append(row["key"])
            return {**row, "synced": False, "checksum": ""}
        return row

    change_rows(tmp_path / "2", lambda row: {**row, "boot_id": "an earlier boot"})
    change_rows(tmp_path / "2", unsync)
    async with running_node(bucket, tmp_path / "2") as user:
        assert user.fs.replayed.suspects == 1
        assert await user.drained() == "durable"
        assert not user.fs.publisher.rejections.conflicts
    assert bucket.shows()["latest"] == b"3"


async def published_under_a_rename(user: User, bucket: Bucket) -> FileHandle:
    """Return the handle of a closed file that was renamed over one whose newer version was on its way, and is there."""
    await user.write("file", b"1")
    assert await user.drained() == "durable"
    await user.write("file", b"2")
    await trio.sleep(21)  # settled, and sent
    assert [item.in_flight for item in user.fs.queue.items()] == [True]
    handle = await user.open("new")
    await user.fs.file_io.write(handle, 0, b"3")
    await user.fs.close_protocol.flush(handle)
    await user.rename("new", "file")
    await trio.sleep(3)
    assert bucket.shows() == {"file": b"2"}
    return handle


async def test_a_file_that_took_the_place_of_one_under_way_can_be_removed_and_made_anew(
    bucket: Bucket, cache: Path
) -> None:
    async with running_node(bucket, cache, offload=SlowUploads(2.0), settle_seconds=20.0) as user:
        handle = await published_under_a_rename(user, bucket)
        await user.close(handle)
        await user.unlink("file")
        await user.write("file", b"4")
        assert await user.drained() == "durable"
    assert bucket.shows() == {"file": b"4"}


async def test_a_close_that_is_taken_back_knows_what_was_published_before_it(
    bucket: Bucket, cache: Path
) -> None:
    async with running_node(bucket, cache, offload=SlowUploads(2.0), settle_seconds=20.0) as user:
        handle = await published_under_a_rename(user, bucket)
        await user.fs.file_io.write(handle, 1, b"3")
        await user.close(handle)
        assert await user.drained() == "durable"
    assert bucket.shows() == {"file": b"33"}


async def test_a_removed_name_that_is_made_anew_and_renamed_away_is_gone(bucket: Bucket, cache: Path) -> None:
    async with running_node(bucket, cache) as user:
        await user.write("before", b"1")
        assert await user.drained() == "durable"
        await user.unlink("before")
        await user.write("before", b"2")
        await user.rename("before", "after")
        assert await user.drained() == "durable"
        assert await user.tree() == {"after": b"2"}
        await user.write("before", b"3")
        assert await user.drained() == "durable"
    assert bucket.shows() == {"after": b"2", "before": b"3"}


async def test_a_removed_name_that_is_made_anew_may_be_renamed_while_it_is_written(
    bucket: Bucket, cache: Path
) -> None:
    async with running_node(bucket, cache) as user:
        await user.write("before", b"1")
        assert await user.drained() == "durable"
        bucket.takes_nothing = True
        await user.unlink("before")
        handle = await user.open("before")
        await user.fs.file_io.write(handle, 0, b"2")
        await user.rename("before", "after")
        bucket.come_back()
        await user.close(handle)
        assert await user.drained() == "durable"
    assert bucket.shows() == {"after": b"2"}
    assert bucket.sent("copy") == []
