"""Files under names that are never published: kept here, across restarts, until a rename takes them out."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import trio

from fusecache.model.errors import AcrossDevices, NoSpace
from fusecache.model.objects import MIB
from tests.support.node import Bucket, User, files_in, photograph, running_node

LARGE = 5 * MIB


@asynccontextmanager
async def node(bucket: Any, cache: Path, **options: Any) -> AsyncIterator[User]:
    """Run a node with a directory for temporary files."""
    async with running_node(bucket, cache, **{"local_only": ("tmp/",), **options}) as user:
        yield user


async def test_they_are_read_and_written_here_and_never_published(bucket: Bucket, cache: Path) -> None:
    async with node(bucket, cache, fsync_is_remote=True) as user:
        await user.mkdir("tmp")
        handle = await user.open("tmp/file")
        await user.fs.file_io.write(handle, 0, b"one")
        await user.fs.fsync(handle)
        await user.close(handle)
        await trio.sleep(200)
        handle = await user.open("tmp/file", truncate=False)
        await user.fs.file_io.write(handle, 3, b" two")
        await trio.sleep(200)
        assert await user.drained(5) == "durable"
        assert (await user.fs.wait_durable("tmp/file", 5)).message == ""
        await user.close(handle)
        assert await user.read("tmp/file") == b"one two"
        status = user.fs.statistics()
        assert (status["local_only_files"], status["local_only_bytes"]) == (1, 7)
        assert (status["pending_files"], status["dirty_files"]) == (0, 0)
        assert await user.fs.status.path_state("tmp/file") == "local-only"
        assert user.fs.cache.statistics().staging_bytes == 7
    assert files_in(bucket.shows()) == {}


async def test_a_directory_with_one_of_them_says_so_unless_something_graver_is_in_it(
    bucket: Bucket, cache: Path
) -> None:
    async with node(bucket, cache) as user:
        await user.mkdir("tmp")
        await user.write("tmp/large", b"12345")
        await user.write("other", b"1")
        assert await user.drained() == "durable"
        there = await user.fs.status.path_status("tmp")
        assert (there["state"], there["local_only_files"], there["local_only_bytes"]) == ("local-only", 1, 5)
        assert await user.fs.status.path_state("other") == "clean"
        bucket.takes_nothing = True
        await user.write("other2", b"1")
        assert await user.fs.status.path_state("") == "queued"
        bucket.come_back()
        handle = await user.open("tmp/written")
        await user.fs.file_io.write(handle, 0, b"123")
        assert (await user.fs.status.path_status("tmp"))["local_only_bytes"] == 8
        await user.close(handle)
        assert await user.drained() == "durable"


@pytest.mark.parametrize("size", [1, LARGE], ids=["small", "large"])
async def test_a_rename_out_publishes_without_a_copy(bucket: Bucket, cache: Path, size: int) -> None:
    bucket.memory.put_bytes("model", b"old")
    async with node(bucket, cache) as user:
        await user.mkdir("tmp")
        await user.write("tmp/file", b"x" * size)
        await user.rename("tmp/file", "model")
        assert await user.read("model") == b"x" * size
        assert await user.drained() == "durable"
        assert user.fs.statistics()["local_only_files"] == 0
    assert files_in(bucket.shows()) == {"model": b"x" * size}
    assert bucket.sent("copy") == []
    assert not [key for _, key in bucket.requests if key.startswith("tmp/file")]


async def test_a_file_renamed_out_while_it_is_written_is_published_at_its_close(
    bucket: Bucket, cache: Path
) -> None:
    async with node(bucket, cache) as user:
        await user.mkdir("tmp")
        await user.write("tmp/file", b"first")
        handle = await user.open("tmp/file", truncate=False)
        await user.rename("tmp/file", "model")
        await trio.sleep(10)
        assert files_in(bucket.shows()) == {}
        await user.fs.file_io.write(handle, 5, b" second")
        await user.close(handle)
        assert await user.drained() == "durable"
    assert files_in(bucket.shows()) == {"model": b"first second"}


async def test_a_directory_renamed_out_takes_its_files_along(bucket: Bucket, cache: Path) -> None:
    async with node(bucket, cache) as user:
        await user.mkdir("tmp")
        await user.mkdir("tmp/step")
        for name in ("a", "b"):
            await user.write(f"tmp/step/{name}", name.encode())
        await user.rename("tmp/step", "step")
        assert await user.drained() == "durable"
    assert files_in(bucket.shows()) == {"step/a": b"a", "step/b": b"b"}


async def test_renames_among_them_stay_here(bucket: Bucket, cache: Path, tmp_path: Path) -> None:
    async with node(bucket, cache) as user:
        await user.mkdir("tmp")
        await user.write("tmp/one", b"1")
        await user.write("tmp/two", b"2")
        await user.rename("tmp/one", "tmp/two")
        photograph(cache, tmp_path / "crashed")
    async with node(bucket, tmp_path / "crashed") as user:
        assert await user.drained() == "durable"
        assert await user.tree() == {"tmp": None, "tmp/two": b"1"}
    assert files_in(bucket.shows()) == {}


@pytest.mark.parametrize("state", ["published", "queued", "directory"])
async def test_a_rename_in_is_refused_as_between_file_systems(
    bucket: Bucket, cache: Path, state: str
) -> None:
    """What others may rely on does not leave the bucket by a rename: `mv` copies it, and removes it in its order."""
    async with node(bucket, cache) as user:
        await user.mkdir("tmp")
        await user.mkdir("folder")
        await user.write("folder/file", b"1")
        if state != "queued":
            assert await user.drained() == "durable"
        source = "folder" if state == "directory" else "folder/file"
        with pytest.raises(AcrossDevices):
            await user.rename(source, "tmp/there")
        assert await user.read("folder/file") == b"1"
        assert await user.drained() == "durable"
    assert files_in(bucket.shows()) == {"folder/file": b"1"}


async def test_they_are_there_after_a_kill_and_after_a_restart(
    bucket: Bucket, cache: Path, tmp_path: Path
) -> None:
    async with node(bucket, cache) as user:
        await user.mkdir("tmp")
        await user.write("tmp/file", b"1" * LARGE)
        handle = await user.open("tmp/file", truncate=False)
        await user.fs.file_io.write(handle, LARGE, b"more")
        photograph(cache, tmp_path / "crashed")
        await user.close(handle)
    for directory in (cache, tmp_path / "crashed"):
        async with node(bucket, directory) as user:
            assert await user.read("tmp/file") == b"1" * LARGE + b"more"
            assert user.fs.statistics()["local_only_files"] == 1
            assert user.fs.cache.statistics().staging_bytes == LARGE + 4
            await user.unlink("tmp/file")
            assert await user.drained() == "durable"
            await trio.sleep(5)
            assert user.fs.cache.statistics().staging_bytes == 0
            assert list((directory / "staging").iterdir()) == []
    assert files_in(bucket.shows()) == {}


async def test_an_unlinked_one_that_is_still_open_does_not_come_back_after_a_kill(
    bucket: Bucket, cache: Path, tmp_path: Path
) -> None:
    async with node(bucket, cache) as user:
        await user.mkdir("tmp")
        for name, end in (("unlinked", user.unlink), ("replaced", None)):
            await user.write(f"tmp/{name}", b"old")
            handle = await user.open(f"tmp/{name}", truncate=False)
            if end is not None:
                await end(f"tmp/{name}")
            else:
                await user.write("tmp/other", b"new")
                await user.rename("tmp/other", f"tmp/{name}")
            await user.fs.file_io.write(handle, 0, b"x")
        photograph(cache, tmp_path / "crashed")
    async with node(bucket, tmp_path / "crashed") as user:
        assert await user.tree() == {"tmp": None, "tmp/replaced": b"new"}


async def test_without_the_option_they_are_published(bucket: Bucket, cache: Path) -> None:
    async with node(bucket, cache) as user:
        await user.mkdir("tmp")
        await user.write("tmp/file", b"1")
    async with node(bucket, cache, local_only=()) as user:
        assert await user.drained() == "durable"
        assert await user.read("tmp/file") == b"1"
    assert files_in(bucket.shows()) == {"tmp/file": b"1"}


async def test_a_glob_names_files_anywhere(bucket: Bucket, cache: Path) -> None:
    async with node(bucket, cache, local_only=("*.swp", "runs/*/scratch/*")) as user:
        await user.mkdir("runs")
        await user.mkdir("runs/one")
        await user.mkdir("runs/one/scratch")
        for name in ("a.swp", "b", "runs/one/scratch/c", "runs/one/d"):
            await user.write(name, b"1")
        assert await user.drained() == "durable"
    assert set(files_in(bucket.shows())) == {"b", "runs/one/d"}


async def test_what_was_closed_is_kept_aside_when_there_is_no_room_to_append_to_it(
    bucket: Bucket, cache: Path
) -> None:
    async with node(bucket, cache, cache_bytes=100 * MIB) as user:
        await user.mkdir("tmp")
        await user.write("tmp/log", b"closed")
        handle = await user.open("tmp/log", truncate=False)
        with pytest.raises(NoSpace):
            await user.fs.file_io.write(handle, 200 * MIB, b"too far")
        with pytest.raises(NoSpace):
            await user.close(handle)
        (thing,) = (await user.fs.quarantine.listing())["entries"]
        await user.fs.quarantine.restore(thing["id"], "tmp/log")
        assert await user.read("tmp/log") == b"closed"
        assert await user.fs.status.path_state("tmp/log") == "local-only"


async def test_what_is_being_written_is_counted_as_only_here(bucket: Bucket, cache: Path) -> None:
    async with node(bucket, cache) as user:
        await user.mkdir("tmp")
        handle = await user.open("tmp/save")
        await user.fs.file_io.write(handle, 0, bytes(MIB))
        assert user.fs.statistics()["exposed_bytes"] == MIB
        await user.close(handle)
        assert user.fs.statistics()["exposed_bytes"] == MIB
