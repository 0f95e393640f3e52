"""Changes that follow content which a start finds lost: nothing else is lost, hidden, or taken for another client's."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import trio
from trio.testing import MockClock

from fusecache.index.journal import Journal
from tests.support.node import Bucket, User, files_in, files_of, photograph, running_node


@asynccontextmanager
async def power_cut(
    bucket: Bucket, cache: Path, after: Path, *, lost: str, which: int = 0
) -> AsyncIterator[User]:
    """Run a node. At the end of the body its cache directory is copied to `after`, without one version of a key.

    which: in the order of the closes.
    """
    async with running_node(bucket, cache) as user:
        yield user
        photograph(cache, after)
        bucket.is_cut_off = True
    with Journal(after / "journal") as journal:
        rows = sorted((row for row in journal.files() if row.key == lost), key=lambda row: row.sequence)
    (after / "staging" / f"{rows[which].generation:016d}").unlink()
    bucket.come_back()


async def under_way(user: User, path: str, data: bytes) -> None:
    """Write a file, and return while its request is under way."""
    await user.write(path, data)
    await trio.sleep(2.5)


async def test_a_swap_of_lost_content_leaves_what_the_bucket_has_of_both(
    bucket: Bucket, cache: Path, tmp_path: Path, autojump_clock: MockClock
) -> None:
    async with power_cut(bucket, cache, tmp_path / "1", lost="a") as user:
        await user.write("a", b"A")
        await user.write("b", b"B")
        assert await user.drained() == "durable"
        bucket.takes_nothing = True
        await under_way(user, "a", b"lost")
        await user.rename("a", "t")
        await user.rename("b", "a")
        await user.rename("t", "b")
        await trio.sleep(0.1)
    async with running_node(bucket, tmp_path / "1") as user:
        assert await user.drained() == "durable"
        assert user.fs.publisher.rejections.conflicts == {}
    assert set(bucket.shows().values()) == {b"A", b"B"}


async def test_a_marker_above_a_held_one_follows_it(
    bucket: Bucket, cache: Path, tmp_path: Path, autojump_clock: MockClock
) -> None:
    async with power_cut(bucket, cache, tmp_path / "1", lost="d/x") as user:
        await user.mkdir("d")
        assert await user.drained() == "durable"
        bucket.takes_nothing = True
        await under_way(user, "d/x", b"1")
        await user.write("d/latest", b"1")
        await user.write("d/x", b"2")
        await user.write("latest", b"d")
        await trio.sleep(10)
    async with running_node(bucket, tmp_path / "1") as user:
        assert await user.drained() == "error"
        assert files_in(bucket.shows()) == {"d/x": b"2"}
        await user.write("d/latest", b"2")
        await trio.sleep(10)
        assert await user.drained() == "durable"
    assert files_in(bucket.shows()) == {"d/x": b"2", "d/latest": b"2", "latest": b"d"}


async def test_a_delete_is_sent_if_newer_content_stands_for_all_that_is_lost(
    bucket: Bucket, cache: Path, tmp_path: Path, autojump_clock: MockClock
) -> None:
    async with power_cut(bucket, cache, tmp_path / "1", lost="d/x") as user:
        await user.mkdir("d")
        await user.write("other", b"0")
        assert await user.drained() == "durable"
        bucket.takes_nothing = True
        await under_way(user, "d/x", b"1")
        await user.write("d/latest", b"1")
        await user.write("d/x", b"2")
        await user.unlink("other")
        await trio.sleep(10)
    async with running_node(bucket, tmp_path / "1") as user:
        await user.drained()
        assert "other" not in await user.tree()
    assert files_in(bucket.shows()) == {"d/x": b"2"}


async def removed_directory(bucket: Bucket, cache: Path, after: Path) -> None:
    """Remove a directory with a file, and lose other content: the file is kept."""
    async with power_cut(bucket, cache, after, lost="large") as user:
        await user.mkdir("d")
        await user.write("d/f", b"1")
        assert await user.drained() == "durable"
        bucket.takes_nothing = True
        await user.write("large", b"1")
        await user.unlink("d/f")
        await user.rmdir("d")
        await trio.sleep(10)


async def test_a_directory_made_anew_over_kept_files_takes_new_ones(
    bucket: Bucket, cache: Path, tmp_path: Path, autojump_clock: MockClock
) -> None:
    await removed_directory(bucket, cache, tmp_path / "1")
    bucket.takes_nothing = True
    async with running_node(bucket, tmp_path / "1") as user:
        assert await user.tree() == {"d": None, "d/f": b"1"}
        await user.write("d/f", b"22")
        bucket.takes_nothing = False
        assert await user.drained() == "durable"
        assert user.fs.publisher.rejections.conflicts == {}
    assert files_in(bucket.shows()) == {"d/f": b"22"}


async def test_a_directory_moved_over_a_removed_one_with_kept_files(
    bucket: Bucket, cache: Path, tmp_path: Path, autojump_clock: MockClock
) -> None:
    async with power_cut(bucket, cache, tmp_path / "1", lost="large") as user:
        await user.mkdir("d")
        await user.write("d/f", b"1")
        await user.write("d/g", b"1")
        await user.mkdir("e")
        await user.write("e/f", b"2")
        assert await user.drained() == "durable"
        bucket.takes_nothing = True
        await user.write("large", b"1")
        for name in "fg":
            await user.unlink(f"d/{name}")
        await user.rmdir("d")
        await user.rename("e", "d")
        await trio.sleep(10)
    async with running_node(bucket, tmp_path / "1") as user:
        assert await user.drained() == "durable"
        assert user.fs.publisher.rejections.conflicts == {}
        assert await user.tree() == {"d": None, "d/f": b"2", "d/g": b"1"}
    assert files_in(bucket.shows()) == {"d/f": b"2", "d/g": b"1"}


async def test_an_empty_directory_with_a_kept_file_is_still_there_after_that_is_removed(
    bucket: Bucket, cache: Path, tmp_path: Path, autojump_clock: MockClock
) -> None:
    await removed_directory(bucket, cache, tmp_path / "1")
    async with running_node(bucket, tmp_path / "1") as user:
        assert await user.drained() == "durable"
        await user.unlink("d/f")
        assert await user.drained() == "durable"
        assert await user.tree() == {"d": None}


async def moved_directory(bucket: Bucket, cache: Path, after: Path) -> None:
    """Rename a directory with a file of which two versions are queued, and lose the newer one."""
    async with power_cut(bucket, cache, after, lost="d/f", which=1) as user:
        await user.mkdir("d")
        await user.write("d/f", b"1")
        assert await user.drained() == "durable"
        bucket.takes_nothing = True
        await under_way(user, "d/f", b"22")
        await user.write("d/f", b"333")
        await user.rename("d", "e")
        await trio.sleep(0.1)


async def test_queued_content_below_a_directory_that_was_renamed_is_shown(
    bucket: Bucket, cache: Path, tmp_path: Path, autojump_clock: MockClock
) -> None:
    await moved_directory(bucket, cache, tmp_path / "1")
    bucket.takes_nothing = True
    async with running_node(bucket, tmp_path / "1") as user:
        assert b"22" in (await user.tree()).values()
        bucket.takes_nothing = False
        assert await user.drained() == "durable"
        assert set(files_of(await user.tree()).values()) == {b"22"}
        assert user.fs.publisher.rejections.conflicts == {}
    assert set(files_in(bucket.shows()).values()) == {b"22"}


async def test_a_directory_that_was_renamed_and_is_made_anew_takes_a_file_of_the_lost_ones_name(
    bucket: Bucket, cache: Path, tmp_path: Path, autojump_clock: MockClock
) -> None:
    async with power_cut(bucket, cache, tmp_path / "1", lost="d/f") as user:
        await user.mkdir("d")
        await user.write("d/f", b"1")
        assert await user.drained() == "durable"
        bucket.takes_nothing = True
        await under_way(user, "d/f", b"22")
        await user.rename("d", "e")
        await trio.sleep(0.1)
    bucket.takes_nothing = True
    async with running_node(bucket, tmp_path / "1") as user:
        await user.write("d/f", b"333")
        bucket.takes_nothing = False
        assert await user.drained() == "durable"
        assert user.fs.publisher.rejections.conflicts == {}
    assert bucket.shows()["d/f"] == b"333"


async def test_a_file_that_was_moved_out_of_a_removed_directory_is_shown(
    bucket: Bucket, cache: Path, tmp_path: Path, autojump_clock: MockClock
) -> None:
    async with power_cut(bucket, cache, tmp_path / "1", lost="d/f", which=1) as user:
        await user.mkdir("d")
        await user.write("d/f", b"1")
        assert await user.drained() == "durable"
        bucket.takes_nothing = True
        await under_way(user, "d/f", b"22")
        await user.write("d/f", b"333")
        await user.rename("d/f", "f")
        await user.rmdir("d")
        await trio.sleep(0.1)
    bucket.takes_nothing = True
    async with running_node(bucket, tmp_path / "1") as user:
        assert b"22" in (await user.tree()).values()
        photograph(tmp_path / "1", tmp_path / "2")
        bucket.is_cut_off = True
    bucket.come_back()
    async with running_node(bucket, tmp_path / "2") as user:
        assert b"22" in (await user.tree()).values()
        assert await user.drained() == "durable"
        assert b"22" in (await user.tree()).values()
    assert b"22" in bucket.shows().values()
