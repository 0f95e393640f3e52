"""Ends of writing that are no close: pages of a mapping that come late, and descriptors that a forked child closes."""

from pathlib import Path

import pytest
import trio

from fusecache.model.errors import LocalDiskError
from tests.engine.write.test_open_file_snapshots import SNAPSHOT
from tests.engine.write.test_writing import kill, opened_by, program
from tests.support.node import Bucket, User, photograph, running_node


async def write(user: User, handle, offset: int, data: bytes) -> None:
    await user.fs.file_io.write(handle, offset, data)


def orphans(cache: Path) -> list[bytes]:
    return [path.read_bytes() for path in (cache / "orphans").iterdir()]


async def test_late_pages_of_a_published_file_are_published(bucket: Bucket, cache: Path) -> None:
    async with running_node(bucket, cache) as user:
        await user.write("file", b"....")
        assert await user.drained() == "durable"
        with program() as process:
            handle = await opened_by(user, process, "file")
            await user.fs.close_protocol.flush(handle)  # close(2); the mapping stays
            await trio.sleep(100)
            await write(user, handle, 1, b"XX")
            await user.fs.file_io.release(handle)
        assert await user.drained() == "durable"
        assert await user.read("file") == b".XX."
    assert bucket.shows() == {"file": b".XX."}
    assert orphans(cache) == []


async def test_late_pages_of_a_new_file_that_was_published_open_are_published(
    bucket: Bucket, cache: Path
) -> None:
    async with running_node(bucket, cache) as user:
        handle = await user.open("file")
        await write(user, handle, 0, b"....")
        await user.fs.close_protocol.flush(handle)
        await trio.sleep(SNAPSHOT + 5)
        assert bucket.shows() == {"file": b"...."}
        await write(user, handle, 1, b"XX")
        await user.fs.file_io.release(handle)
        assert await user.drained() == "durable"
    assert bucket.shows() == {"file": b".XX."}


async def test_late_pages_are_ordered_at_the_end_of_writing(bucket: Bucket, cache: Path) -> None:
    async with running_node(bucket, cache) as user:
        await user.write("shard", b"....")
        assert await user.drained() == "durable"
        bucket.takes_nothing = True
        handle = await user.open("shard", truncate=False)
        await user.fs.close_protocol.flush(handle)
        await write(user, handle, 0, b"late")
        await user.fs.file_io.release(handle)
        await user.write("latest", b"shard")
        bucket.come_back()
        assert await user.drained() == "durable"
    assert all(state["shard"] == b"late" for state in bucket.states if "latest" in state)


@pytest.mark.parametrize(("mapped", "saved"), [("latest", "shard"), ("shard", "latest")])
async def test_marker_and_mapped_files_keep_their_order(
    bucket: Bucket, cache: Path, mapped: str, saved: str
) -> None:
    """A marker follows what was written before its last pages; a mapped shard comes before a marker written since."""
    async with running_node(bucket, cache) as user:
        for name in ("shard", "latest"):
            await user.write(name, b"....")
        assert await user.drained() == "durable"
        bucket.takes_nothing = True
        handle = await user.open(mapped, truncate=False)
        await write(user, handle, 0, b"soon")
        await user.fs.close_protocol.flush(handle)
        await user.write(saved, b"new")
        await write(user, handle, 0, b"late")
        await user.fs.file_io.release(handle)
        bucket.come_back()
        assert await user.drained() == "durable"
    assert bucket.shows() == {mapped: b"late", saved: b"new"}
    marked = [state for state in bucket.states if state.get("latest", b"....") != b"...."]
    assert [state["shard"] for state in marked] == [b"late" if mapped == "shard" else b"new"]


@pytest.mark.parametrize("written", ["before the kill", "by the kill"])
async def test_late_pages_of_a_killed_process_are_kept_aside(
    bucket: Bucket, cache: Path, written: str
) -> None:
    """The kernel writes pages back when it likes: at the end of the mapping at the latest."""
    async with running_node(bucket, cache) as user:
        await user.write("file", b"....")
        assert await user.drained() == "durable"
        with program() as process:
            handle = await opened_by(user, process, "file")
            await user.fs.close_protocol.flush(handle)
            if written == "before the kill":
                await write(user, handle, 1, b"XX")
            kill(process)
            if written == "by the kill":
                await write(user, handle, 1, b"XX")
                process.wait()  # nothing is to be seen of it when RELEASE comes
            await user.fs.file_io.release(handle)
        assert await user.drained() == "durable"
        assert await user.read("file") == b"...."
    assert bucket.shows() == {"file": b"...."}
    assert orphans(cache) == [b".XX."]


async def test_what_was_closed_is_published_although_its_process_is_killed_while_it_maps_it(
    bucket: Bucket, cache: Path
) -> None:
    async with running_node(bucket, cache) as user:
        with program() as process:
            await user.write("file", b"")
            handle = await opened_by(user, process, "file")
            await write(user, handle, 0, b"closed")
            await user.fs.close_protocol.flush(handle)
            await trio.sleep(30)
            kill(process)
            await user.fs.file_io.release(handle)
        assert await user.drained() == "durable"
    assert bucket.shows() == {"file": b"closed"}


async def test_a_cut_file_whose_write_was_refused_is_not_published_by_its_last_release(
    bucket: Bucket, cache: Path
) -> None:
    async with running_node(bucket, cache) as user:
        await user.write("file", b"whole")
        assert await user.drained() == "durable"
        handle = await user.open("file", truncate=False)
        handle.node.write_error = LocalDiskError(
            "cannot be fetched"
        )  # its own write failed before anything was made for it
        await user.fs.file_io.truncate(handle.node, 2)  # another program's
        with pytest.raises(LocalDiskError, match="cannot be fetched"):
            await user.fs.close_protocol.flush(handle)
        await user.fs.file_io.release(handle)
        assert await user.drained() == "durable"
        assert await user.read("file") == b"whole"
    assert bucket.shows() == {"file": b"whole"}


# ---- a child's close


async def closed_by_a_child(user: User, process) -> object:
    """Return the handle of a process that wrote half of a file; a child that it forked has ended since."""
    await user.write("file", b"old")
    assert await user.drained() == "durable"
    handle = await opened_by(user, process, "file")
    await write(user, handle, 0, b"half")
    await user.fs.close_protocol.flush(handle)
    return handle


@pytest.mark.case(17)
@pytest.mark.parametrize("seconds", [0.1, 30.0])
async def test_a_writer_that_is_killed_after_its_childs_close_publishes_nothing(
    bucket: Bucket, cache: Path, seconds: float
) -> None:
    async with running_node(bucket, cache) as user:
        with program() as process:
            handle = await closed_by_a_child(user, process)
            await trio.sleep(seconds)
            kill(process)
            await user.close(handle)
        assert await user.drained() == "durable"
        assert await user.read("file") == b"old"
    assert bucket.shows() == {"file": b"old"}
    assert orphans(cache) == [b"half"]


@pytest.mark.case(17)
@pytest.mark.parametrize("seconds", [0, 3])
async def test_a_node_that_ends_takes_a_childs_close_for_a_close(
    bucket: Bucket, tmp_path: Path, seconds: int
) -> None:
    """Nothing tells it that the parent holds the file, and what was closed must not be lost."""
    async with running_node(bucket, tmp_path / "1") as user:
        with program() as process:
            handle = await closed_by_a_child(user, process)
            await trio.sleep(seconds)
            photograph(tmp_path / "1", tmp_path / "2")
            bucket.is_cut_off = True
            await user.close(handle)
    bucket.come_back()
    async with running_node(bucket, tmp_path / "2") as user:
        assert await user.drained() == "durable"
    assert bucket.shows() == {"file": b"half"}


@pytest.mark.case(17)
async def test_a_node_that_ends_after_another_write_keeps_the_file_aside(
    bucket: Bucket, tmp_path: Path
) -> None:
    async with running_node(bucket, tmp_path / "1") as user:
        with program() as process:
            handle = await closed_by_a_child(user, process)
            await write(user, handle, 4, b" and half")
            photograph(tmp_path / "1", tmp_path / "2")
            bucket.is_cut_off = True
            await user.close(handle)
    bucket.come_back()
    async with running_node(bucket, tmp_path / "2") as user:
        assert await user.drained() == "durable"
        assert await user.read("file") == b"old"
    assert bucket.shows() == {"file": b"old"}
    assert orphans(tmp_path / "2") == [b"half and half"]


@pytest.mark.parametrize("before", ["new", "published"])
async def test_sync_waits_for_pages_that_came_after_the_close_and_for_the_release_behind_them(
    bucket: Bucket, cache: Path, before: str
) -> None:
    async with running_node(bucket, cache) as user:
        if before == "published":
            await user.write("mapped", b"old")
            await user.drained()
        handle = await user.open("mapped")
        if before == "new":
            await user.fs.file_io.write(handle, 0, b"old")
        await user.fs.close_protocol.flush(handle)
        await user.fs.file_io.write(handle, 0, b"new")
        async with trio.open_nursery() as nursery:

            async def end() -> None:
                await trio.sleep(0.1)
                await user.fs.file_io.release(handle)

            nursery.start_soon(end)
            assert (await user.fs.wait_durable("mapped", None)).message == ""
        assert bucket.shows()["mapped"] == b"new"
