"""Mode and owner of directories: the bucket has no place for them, so this node keeps them."""

from dataclasses import replace
from pathlib import Path

from fusecache.engine.namespace.nodes import attributes_of
from fusecache.engine.namespace.tree import Ownership
from tests.engine.namespace.test_listing import read_all
from tests.support.node import Bucket, User, running_node


async def seen(user: User, path: str) -> tuple[int, int, int]:
    """Return mode and owner as `stat` shows them; `ls -l` must show the same. Both are asked of a new inode."""
    await forget(user, path)
    parent, _, name = path.rpartition("/")
    [entry] = [each for each in await read_all(user, await user.fs.resolve(parent)) if each.name == name]
    node = await user.fs.resolve(path)
    assert (entry.mode, entry.uid, entry.gid) == (node.mode, node.uid, node.gid)
    return node.mode, node.uid, node.gid


async def forget(user: User, path: str) -> None:
    """Drop an inode, as the kernel does when memory is short."""
    node = await user.fs.resolve(path)
    node.lookups += 1
    user.fs.tree.forget(node.number, node.lookups)
    assert node.number not in user.fs.tree.nodes


async def make(user: User, path: str, mode: int, maker: tuple[int, int] = (0, 0)) -> None:
    parent, _, name = path.rpartition("/")
    await user.fs.namespace_ops.mkdir(await user.fs.resolve(parent), name, mode, maker)


async def change(user: User, path: str, mode: int, uid: int, gid: int) -> None:
    node = await user.fs.resolve(path)
    user.fs.file_io.set_attributes(node, replace(attributes_of(node), mode=mode, uid=uid, gid=gid))


async def test_they_outlive_the_inode_renames_and_the_daemon(bucket: Bucket, cache: Path) -> None:
    bucket.memory.put_bytes("top/inner/file", b"1")
    async with running_node(bucket, cache) as user:
        await change(user, "top/inner", 0o700, 7, 8)
        await make(user, "top/made", 0o750, (9, 10))
        assert await user.drained() == "durable"
        assert await seen(user, "top/inner") == (0o700, 7, 8)
        assert await seen(user, "top/made") == (0o750, 9, 10)
        await user.rename("top", "moved")
        assert await user.drained() == "durable"
        await forget(user, "moved/inner")
        await user.rename("moved", "again")
        assert await user.drained() == "durable"
    async with running_node(bucket, cache) as user:
        assert await seen(user, "again/inner") == (0o700, 7, 8)
        assert await seen(user, "again/made") == (0o750, 9, 10)


async def test_they_outlive_a_daemon_that_has_not_yet_published_the_directory(
    bucket: Bucket, cache: Path
) -> None:
    bucket.takes_nothing = True
    async with running_node(bucket, cache) as user:
        await make(user, "made", 0o755)
        await change(user, "made", 0o700, 7, 8)
        await make(user, "made/below", 0o755)
    bucket.come_back()
    async with running_node(bucket, cache) as user:
        rebuilt = attributes_of(await user.fs.resolve("made"))
        assert (rebuilt.mode, rebuilt.uid, rebuilt.gid) == (0o700, 7, 8)
        assert await user.drained() == "durable"
        assert await seen(user, "made") == (0o700, 7, 8)


async def test_a_directory_that_is_made_again_does_not_have_those_of_the_removed_one(
    bucket: Bucket, cache: Path
) -> None:
    async with running_node(bucket, cache) as user:
        await make(user, "made", 0o755)
        assert await user.drained() == "durable"
        default = await seen(user, "made")
        await change(user, "made", 0o700, 7, 8)
        await user.rmdir("made")
        await make(user, "made", 0o755)
        assert await user.drained() == "durable"
        assert await seen(user, "made") == default


async def test_the_time_of_a_directory_is_not_kept_and_keeps_nothing(bucket: Bucket, cache: Path) -> None:
    """Else a program that knows the names of an older time would look for no newer ones."""
    bucket.memory.put_bytes("top/file", b"1")
    async with running_node(bucket, cache) as user:
        before = attributes_of(await user.fs.resolve("top"))
        user.fs.file_io.set_attributes(await user.fs.resolve("top"), replace(before, mtime_ns=5))
        await forget(user, "top")
        assert attributes_of(await user.fs.resolve("top")) == before
    async with running_node(bucket, cache, ownership=Ownership(7, 8, 0o077)) as user:
        assert await seen(user, "top") == (0o700, 7, 8)


async def test_a_fixed_owner_holds_for_directories_that_had_another(bucket: Bucket, cache: Path) -> None:
    bucket.memory.put_bytes("top/file", b"1")
    async with running_node(bucket, cache) as user:
        await change(user, "top", 0o750, 3, 4)
    async with running_node(bucket, cache, ownership=Ownership(7, 8, 0o022, is_fixed=True)) as user:
        assert await seen(user, "top") == (0o750, 7, 8)


async def test_a_changed_mode_is_on_the_disk_when_fsync_returns(bucket: Bucket, cache: Path) -> None:
    bucket.memory.put_bytes("top/file", b"1")
    async with running_node(bucket, cache) as user:
        rows = user.fs._storage.journal_rows
        handle = user.fs.file_io.open(await user.fs.resolve("top/file"), writable=False, pid=0)
        assert handle.node.object is not None
        await change(user, "top/file", 0o700, 7, 8)
        assert rows.attributes("top/file", handle.node.object.etag) is None
        await user.fs.fsync(handle)
        kept = rows.attributes("top/file", handle.node.object.etag)
        assert kept is not None
        assert kept.mode == 0o700
        await user.fs.file_io.release(handle)
