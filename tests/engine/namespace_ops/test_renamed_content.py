"""Content that is renamed before it is published, and what stands or stood in its way: nothing is lost or mixed."""

from pathlib import Path

import pytest
import trio

from fusecache.model.objects import MIB
from tests.engine.recovery.test_journal_replay import change_rows
from tests.engine.write.test_late_mmap_pages import closed_by_a_child, orphans
from tests.engine.write.test_writing import kill, program
from tests.support.node import Bucket, User, files_in, photograph, running_node


async def newer_version_moved(user: User, bucket: Bucket) -> None:
    """Publish `a`; write it again and rename it to `b`, and write another: the bucket takes nothing."""
    await user.write("a", b"1")
    assert await user.drained() == "durable"
    bucket.takes_nothing = True
    await user.write("a", b"2")
    await user.rename("a", "b")
    await user.write("latest", b"b")


async def test_late_pages_come_after_the_rename_that_they_came_after(bucket: Bucket, cache: Path) -> None:
    async with running_node(bucket, cache) as user:
        await newer_version_moved(user, bucket)
        handle = await user.open("b", truncate=False)
        await user.fs.file_io.write(handle, 0, b"3")
        await user.fs.close_protocol.flush(handle)  # close(2); the mapping stays
        await trio.sleep(30)
        await user.rename("b", "c")
        await user.fs.file_io.write(handle, 0, b"4")
        await user.fs.file_io.release(handle)
        bucket.come_back()
        assert await user.drained() == "durable"
        assert await user.read("c") == b"4"
    assert bucket.shows() == {"c": b"4", "latest": b"b"}


@pytest.mark.parametrize("name", ["b.tmp", "d/b"])
async def test_content_that_goes_on_at_once_keeps_nobody_waiting_and_goes_up_once(
    bucket: Bucket, cache: Path, name: str
) -> None:
    async with running_node(bucket, cache) as user:
        await user.mkdir("d")
        await user.write("a", b"1")
        assert await user.drained() == "durable"
        bucket.takes_nothing = True
        await user.write("a", b"2")
        await user.rename("a", name)
        await user.rename(name, "c")
        bucket.come_back()
        bucket.requests.clear()
        began = trio.current_time()
        assert await user.drained() == "durable"
        assert trio.current_time() < began + 30
    assert bucket.requests == [("put", "c"), ("delete", "a")]


async def test_content_that_goes_back_to_its_name_replaces_what_is_there(bucket: Bucket, cache: Path) -> None:
    async with running_node(bucket, cache) as user:
        await user.write("a", b"1")
        assert await user.drained() == "durable"
        bucket.takes_nothing = True
        await user.write("a", b"2")
        await user.rename("a", "a.bak")
        await user.rename("a.bak", "a")
        bucket.come_back()
        bucket.requests.clear()
        assert await user.drained() == "durable"
        assert await user.tree() == {"a": b"2"}
    assert bucket.requests == [("put", "a")]


async def test_a_rename_whose_content_became_a_conflict_copy_moves_nothing_of_others(
    bucket: Bucket, cache: Path
) -> None:
    async with running_node(bucket, cache) as user:
        await newer_version_moved(user, bucket)
        await user.rename("b", "c")
        bucket.memory.put_bytes("b", b"theirs")
        bucket.come_back()
        assert await user.drained() == "conflict"
    shown = bucket.shows()
    (copy,) = [key for key in shown if key.startswith("b.conflict")]
    assert shown == {"b": b"theirs", copy: b"2", "latest": b"b"}


async def test_a_published_version_stays_where_its_newer_one_was_moved_and_lost_in_a_power_cut(
    bucket: Bucket, tmp_path: Path
) -> None:
    async with running_node(bucket, tmp_path / "1") as user:
        await newer_version_moved(user, bucket)
        photograph(tmp_path / "1", tmp_path / "2")
        bucket.is_cut_off = True
    bucket.come_back()
    change_rows(tmp_path / "2", lambda row: {**row, "boot_id": "earlier", "synced": False, "checksum": ""})
    async with running_node(bucket, tmp_path / "2") as user:
        assert await user.drained() == "durable"
        assert await user.tree() == {"a": b"1"}
    assert bucket.shows() == {"a": b"1"}


@pytest.mark.parametrize("is_saved_again", [False, True])
async def test_so_does_a_checkpoint_with_a_markers_name_although_a_file_follows_beside_it(
    bucket: Bucket, tmp_path: Path, *, is_saved_again: bool
) -> None:
    async with running_node(bucket, tmp_path / "1") as user:
        await user.mkdir("d")
        await user.write("d/last.ckpt", b"1")
        assert await user.drained() == "durable"
        bucket.takes_nothing = True
        await user.write("d/last.ckpt", b"2")
        await user.rename("d/last.ckpt", "best.ckpt")
        await user.write("d/log", b"2")
        if is_saved_again:
            await user.write("d/last.ckpt", b"3")
        photograph(tmp_path / "1", tmp_path / "2")
        bucket.is_cut_off = True
    bucket.come_back()
    lost = {"boot_id": "earlier", "synced": False, "checksum": ""}
    change_rows(tmp_path / "2", lambda row: {**row, **(lost if row["key"] == "best.ckpt" else {})})
    async with running_node(bucket, tmp_path / "2") as user:
        assert user.fs.replayed.suspects == 1
        assert await user.drained() == "durable"
    assert files_in(bucket.shows()) == {"d/last.ckpt": b"3" if is_saved_again else b"1", "d/log": b"2"}


async def test_what_was_taken_back_under_a_rename_does_not_come_back_after_a_kill(
    bucket: Bucket, tmp_path: Path
) -> None:
    async with running_node(bucket, tmp_path / "1") as user:
        handle = await user.open("file")
        await user.fs.file_io.write(handle, 0, b"torn")
        await user.fs.close_protocol.flush(handle)  # a forked child's
        await user.write("new", b"whole")
        await user.rename("new", "file")
        await trio.sleep(30)
        assert bucket.shows() == {"file": b"whole"}
        photograph(tmp_path / "1", tmp_path / "2")
        bucket.is_cut_off = True
        await user.close(handle)
    bucket.come_back()
    async with running_node(bucket, tmp_path / "2") as user:
        assert await user.tree() == {"file": b"whole"}
        assert await user.drained() == "durable"
    assert bucket.shows() == {"file": b"whole"}


async def test_a_killed_writers_file_is_not_published_before_what_was_renamed_over_it(
    bucket: Bucket, cache: Path
) -> None:
    async with running_node(bucket, cache) as user:
        with program() as process:
            handle = await closed_by_a_child(user, process)
            await user.write("new", b"whole")
            await user.rename("new", "file")
            kill(process)
            await user.close(handle)
        assert await user.drained() == "durable"
    assert bucket.shows() == {"file": b"whole"}
    assert b"half" not in [state.get("file") for state in bucket.states]
    assert orphans(cache) == []


async def test_a_published_version_moves_with_newer_content_that_is_not_closed_after_all(
    bucket: Bucket, cache: Path
) -> None:
    async with running_node(bucket, cache) as user:
        with program() as process:
            handle = await closed_by_a_child(user, process)
            await user.rename("file", "moved")
            await trio.sleep(30)  # the settle time: the close was not its writer's
            assert bucket.shows() == {"moved": b"old"}
            await user.fs.file_io.write(handle, 0, b"whole")
            await user.close(handle)
        assert await user.drained() == "durable"
        assert await user.tree() == {"moved": b"whole"}
    assert bucket.shows() == {"moved": b"whole"}
    assert all({"file", "moved"} & set(state) for state in bucket.states)


async def test_content_that_is_not_closed_after_all_comes_after_the_renames_of_its_name(
    bucket: Bucket, cache: Path
) -> None:
    async with running_node(bucket, cache) as user:
        await user.write("first", b"old")
        assert await user.drained() == "durable"
        bucket.takes_nothing = True
        await user.rename("first", "file")
        handle = await user.open("file", truncate=False)
        await user.fs.file_io.write(handle, 0, b"new")
        await user.fs.close_protocol.flush(handle)  # a forked child's
        await user.rename("file", "moved")
        await trio.sleep(30)
        await user.fs.file_io.write(handle, 3, b"er")
        await user.fs.file_io.release(handle)  # a mapping's late pages
        bucket.come_back()
        assert await user.drained() == "durable"
        assert await user.tree() == {"moved": b"newer"}
    assert bucket.shows() == {"moved": b"newer"}


async def test_a_closed_version_moves_with_newer_content_that_a_child_closed(
    bucket: Bucket, tmp_path: Path
) -> None:
    async with running_node(bucket, tmp_path / "1") as user:
        bucket.takes_nothing = True
        await user.write("file", b"closed")
        handle = await user.open("file", truncate=False)
        await user.fs.file_io.write(handle, 0, b"CL")
        await user.fs.close_protocol.flush(handle)  # a forked child's
        await user.rename("file", "moved")
        await trio.sleep(30)
        photograph(tmp_path / "1", tmp_path / "2")
        bucket.is_cut_off = True
        await user.close(handle)
    bucket.come_back()
    async with running_node(bucket, tmp_path / "2") as user:
        assert await user.drained() == "durable"
    assert bucket.shows() == {"moved": b"CLosed"}


async def test_content_that_is_not_closed_after_all_moves_nothing_that_was_removed_before_it(
    bucket: Bucket, cache: Path
) -> None:
    async with running_node(bucket, cache) as user:
        await user.write("file", b"old")
        assert await user.drained() == "durable"
        bucket.takes_nothing = True
        await user.unlink("file")
        handle = await user.open("file")
        await user.fs.file_io.write(handle, 0, b"half")
        await user.fs.close_protocol.flush(handle)  # a forked child's
        await user.rename("file", "moved")
        await trio.sleep(30)
        await user.fs.file_io.write(handle, 0, b"whole")
        bucket.come_back()
        await user.close(handle)
        assert await user.drained() == "durable"
    assert bucket.shows() == {"moved": b"whole"}


@pytest.mark.parametrize("ending", ["a late release", "late pages"])
async def test_content_that_takes_the_place_of_older_content_knows_what_the_bucket_shows(
    bucket: Bucket, cache: Path, ending: str
) -> None:
    async with running_node(bucket, cache) as user:
        await user.write("file", b"0")
        assert await user.drained() == "durable"
        bucket.takes_nothing = True
        if ending == "a late release":
            await user.write("file", bytes(5 * MIB))
        handle = await user.open("file", truncate=False)
        await user.fs.file_io.write(handle, 0, b"2")
        await user.fs.close_protocol.flush(handle)
        await user.write("other", b"3")
        await user.rename("other", "file")  # while the close's end is under way
        if ending == "late pages":
            await user.fs.file_io.write(handle, 1, b"late")
        await user.fs.file_io.release(handle)
        bucket.come_back()
        assert await user.drained() == "durable"
        assert await user.tree() == {"file": b"3"}
    assert bucket.shows() == {"file": b"3"}


async def test_a_file_that_went_and_came_back_beside_its_writer_is_removed(
    bucket: Bucket, cache: Path
) -> None:
    async with running_node(bucket, cache) as user:
        bucket.takes_nothing = True
        await user.write("file", b"closed")
        handle = await user.open("file", truncate=False)
        await user.fs.file_io.write(handle, 0, b"CL")
        await user.fs.close_protocol.flush(handle)  # a forked child's
        await user.rename("file", "away")
        await user.rename("away", "file")
        await user.unlink("file")
        bucket.come_back()
        await user.close(handle)
        assert await user.drained() == "durable"
        assert await user.tree() == {}
    assert bucket.shows() == {}


async def test_what_is_cached_of_a_published_file_stays_cached_under_its_new_name(
    bucket: Bucket, cache: Path
) -> None:
    async with running_node(bucket, cache) as user:
        await user.write("a", b"content")
        assert await user.drained() == "durable"
        await user.rename("a", "b")
        assert await user.drained() == "durable"
        assert await user.read("b") == b"content"
    async with running_node(bucket, cache) as user:
        assert await user.read("b") == b"content"
    assert bucket.gets == []


async def test_an_open_file_keeps_its_content_when_its_new_name_is_replaced(
    bucket: Bucket, cache: Path
) -> None:
    async with running_node(bucket, cache) as user:
        await user.write("a", b"old")
        assert await user.drained() == "durable"
        await user.rename("a", "b")
        assert await user.drained() == "durable"
        handle = await user.open("b", truncate=False)
        await user.unlink("b")
        await user.write("b", b"new")
        assert await user.drained() == "durable"
        await user.fs.file_io.write(handle, 3, b"er")
        assert bytes(await user.fs.file_io.read(handle, 0, 10)) == b"older"
        await user.close(handle)
        assert await user.read("b") == b"new"


@pytest.mark.parametrize("cached", [True, False])
async def test_an_open_file_keeps_its_content_when_the_file_that_replaced_it_moves_on(
    bucket: Bucket,
    cache: Path,
    cached: bool,  # noqa: FBT001
) -> None:
    async with running_node(bucket, cache) as user:
        if cached:
            await user.write("a", b"old")
            assert await user.drained() == "durable"
        else:
            bucket.memory.put_bytes("a", b"old")
        displaced = await user.open("a", truncate=False)
        other = await user.open("b")
        await user.fs.file_io.write(other, 0, b"new")
        await user.rename("b", "a")
        await user.rename("a", "c")
        await trio.sleep(30)
        await user.fs.file_io.write(displaced, 3, b"er")
        assert bytes(await user.fs.file_io.read(displaced, 0, 10)) == b"older"
        await user.close(displaced)
        await user.close(other)
        assert await user.drained() == "durable"
        assert bucket.shows() == {"c": b"new"}
