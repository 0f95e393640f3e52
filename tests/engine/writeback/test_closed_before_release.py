"""A file that was closed joins the queue only at its release, but has its place since the close: others know of it."""

from pathlib import Path
from typing import Any

import pytest
import trio
from trio.testing import MockClock

from fusecache.engine.namespace.nodes import FileHandle
from fusecache.model.errors import Refused
from tests.engine.publish.test_rejected_content import Refusing, refused
from tests.support.node import Bucket, User, files_in, photograph, running_node


async def close_without_release(user: User, path: str, content: bytes) -> FileHandle:
    """Write a file and close it; its release is still to come."""
    handle = await user.open(path)
    await user.fs.file_io.write(handle, 0, content)
    await user.fs.close_protocol.flush(handle)
    return handle


class NoDelete(Refusing):
    """A bucket that deletes no object of some keys."""

    def __getattr__(self, name: str) -> Any:
        call = getattr(self._bucket, name)
        if name != "delete":
            return call

        def delete(key: str, *args: Any, **options: Any) -> Any:
            if key in self.keys:
                raise Refused("locked")
            return call(key, *args, **options)

        return delete


@pytest.mark.parametrize("ends", ["is killed", "drains"])
async def test_a_delete_that_follows_a_rename_does_not_move_behind_it(
    bucket: Bucket, tmp_path: Path, autojump_clock: MockClock, ends: str
) -> None:
    async with running_node(bucket, tmp_path / "1") as user:
        await user.write("a", b"1")
        assert await user.drained() == "durable"
        bucket.takes_nothing = True
        await user.write("a", b"22")
        await user.rename("a", "b")  # the delete of `a` waits for `b`
        handle = await close_without_release(user, "a", b"new")
        await user.rename("b", "c")
        photograph(tmp_path / "1", tmp_path / "2")
        await user.fs.file_io.release(handle)
        if ends == "drains":
            bucket.come_back()
            assert await user.drained() == "durable"
        bucket.is_cut_off = ends == "is killed"
    if ends == "is killed":
        bucket.come_back()
        async with running_node(bucket, tmp_path / "2") as user:
            assert await user.drained() == "durable"
    assert bucket.shows() == {"a": b"new", "c": b"22"}


@pytest.mark.parametrize("is_rewritten", [False, True])
@pytest.mark.parametrize("ends", ["is killed", "drains"])
async def test_a_commit_marker_keeps_its_place_behind_its_files_in_a_renamed_directory(
    bucket: Bucket, tmp_path: Path, autojump_clock: MockClock, ends: str, *, is_rewritten: bool
) -> None:
    async with running_node(bucket, tmp_path / "1") as user:
        await user.mkdir("d")
        assert await user.drained() == "durable"
        if is_rewritten:
            await user.write("d/latest", b"0")
        await user.write("d/a", b"a")
        handle = await close_without_release(user, "d/latest", b"1")
        await user.rename("d", "e")
        photograph(tmp_path / "1", tmp_path / "2")
        await user.fs.file_io.release(handle)
        if ends == "drains":
            assert await user.drained() == "durable"
        bucket.is_cut_off = ends == "is killed"
    if ends == "is killed":
        bucket.come_back()
        async with running_node(bucket, tmp_path / "2") as user:
            assert await user.drained() == "durable"
    assert files_in(bucket.shows()) == {"e/a": b"a", "e/latest": b"1"}
    assert all("e/a" in state for state in bucket.states if state.get("e/latest") == b"1")


@pytest.mark.parametrize("when", ["before the rename", "after the rename"])
async def test_the_delete_of_a_commit_marker_does_not_move_behind_a_file_beside_it(
    bucket: Bucket, cache: Path, autojump_clock: MockClock, when: str
) -> None:
    async with running_node(bucket, cache) as user:
        await user.mkdir("d")
        await user.write("d/latest", b"1")
        await user.write("d/f", b"1")
        assert await user.drained() == "durable"
        bucket.takes_nothing = True
        await user.write("big", b"big")
        await user.unlink("d/latest")
        await user.write("later", b"later")
        handle = await close_without_release(user, "d/f", b"2")
        if when == "before the rename":
            await user.fs.file_io.release(handle)
        await user.rename("big", "bigger")  # the delete waited for it
        if when == "after the rename":
            await user.fs.file_io.release(handle)
        bucket.come_back()
        assert await user.drained() == "durable"
    assert bucket.shows()["d/f"] == b"2"
    assert all("d/latest" not in state for state in bucket.states if state.get("d/f") == b"2")


@pytest.mark.parametrize("ends", ["is killed", "drains"])
@pytest.mark.parametrize("rejected", ["content", "delete"])
async def test_it_replaces_what_the_bucket_has_if_the_change_before_it_is_rejected(
    bucket: Bucket, tmp_path: Path, autojump_clock: MockClock, rejected: str, ends: str
) -> None:
    store = Refusing(bucket) if rejected == "content" else NoDelete(bucket)
    async with running_node(store, tmp_path / "1") as user:
        await user.write("a", b"1")
        assert await user.drained() == "durable"
        store.keys.add("a")
        if rejected == "content":
            await user.write("a", b"22")
        else:
            await user.unlink("a")
        handle = await close_without_release(user, "a", b"new")
        await trio.sleep(30)
        assert await refused(user) == ([("a", 2 if rejected == "content" else 0)])
        photograph(tmp_path / "1", tmp_path / "2")
        store.keys.clear()
        bucket.is_cut_off = ends == "is killed"
        await user.fs.file_io.release(handle)
        if ends == "drains":
            assert await user.drained() == "durable"
            assert user.fs.publisher.rejections.conflicts == {}
    if ends == "is killed":
        bucket.come_back()
        async with running_node(bucket, tmp_path / "2") as user:
            await user.drained()
            assert user.fs.publisher.rejections.conflicts == {}
    assert bucket.shows() == {"a": b"new"}
