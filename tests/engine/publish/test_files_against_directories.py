"""One client has made a file, another a directory of its name: both show, the file under the name of a conflict."""

from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
import trio

from fusecache.model.objects import ObjectInfo
from tests.engine.publish.test_trees import CountingBucket
from tests.support.node import Bucket, User, running_node

# Longer than a listing is taken as new.
LATER_SECONDS = 5.0


async def file(user: User) -> None:
    await user.write("x", b"ours")


async def renamed_file(user: User) -> None:
    await user.write("y", b"ours")
    assert await user.drained() == "durable"
    await user.rename("y", "x")


async def symlink(user: User) -> None:
    await user.symlink("ours", "x")


WAYS = [(file, b"ours"), (renamed_file, b"ours"), (symlink, b"-> ours")]


def copy_of(tree: dict[str, bytes | None] | dict[str, bytes]) -> str:
    """Return the one name of a conflict."""
    (name,) = [each for each in tree if each.startswith("x.conflict-")]
    return name


async def hold(user: User, path: str) -> None:
    """Have the kernel remember the name."""
    (await user.fs.resolve(path)).lookups += 1


async def known(user: User) -> None:
    """Have the node list the directory, and let that become old."""
    await user.write("old", b"1")
    assert await user.drained() == "durable"
    await user.tree()
    await trio.sleep(LATER_SECONDS)


@pytest.mark.parametrize(("make", "shows"), WAYS)
@pytest.mark.parametrize("first", ["directory", "file"])
async def test_both_show_once_the_node_of_the_file_looks(
    bucket: Bucket, cache: Path, make: Callable[[User], Awaitable[None]], shows: bytes, first: str
) -> None:
    """No condition of the upload can tell: the directory has another key. The directory's node never looks again."""
    async with running_node(bucket, cache) as user:
        await known(user)
        await make(user)
        await hold(user, "x")
        if first == "directory":
            bucket.memory.put_bytes("x/inner", b"theirs")
            assert await user.drained() in ("durable", "conflict")
        else:
            assert await user.drained() == "durable"
            bucket.memory.put_bytes("x/inner", b"theirs")
        for _ in range(2):  # at once, and when the bucket has the new name
            await trio.sleep(LATER_SECONDS)
            tree = await user.tree()
            assert (tree["x/inner"], tree[copy_of(tree)]) == (b"theirs", shows)
            assert await user.drained() == "conflict"
        assert bucket.shows()[copy_of(tree)] == shows
        assert "x" not in bucket.shows()


async def test_a_lookup_of_the_name_tells_as_well(bucket: Bucket, cache: Path) -> None:
    async with running_node(bucket, cache) as user:
        await user.write("x", b"ours")
        await hold(user, "x")
        assert await user.drained() == "durable"
        bucket.memory.put_bytes("x/inner", b"theirs")
        await trio.sleep(LATER_SECONDS)
        assert await user.read("x/inner") == b"theirs"
        assert await user.drained() == "conflict"
        assert bucket.shows()[copy_of(bucket.shows())] == b"ours"


async def test_a_directory_in_place_of_a_file_that_another_client_removed_is_no_conflict(
    bucket: Bucket, cache: Path
) -> None:
    async with running_node(bucket, cache) as user:
        await user.write("x", b"ours")
        await hold(user, "x")
        assert await user.drained() == "durable"
        bucket.memory.delete("x")
        bucket.memory.put_bytes("x/inner", b"theirs")
        await trio.sleep(LATER_SECONDS)
        assert await user.tree() == {"x": None, "x/inner": b"theirs"}
        assert await user.drained() == "durable"


async def test_a_file_that_was_not_published_here_stays_where_it_is(bucket: Bucket, cache: Path) -> None:
    bucket.memory.put_bytes("x", b"1")
    async with running_node(bucket, cache) as user:
        await hold(user, "x")
        bucket.memory.put_bytes("x/inner", b"2")
        await trio.sleep(LATER_SECONDS)
        assert await user.tree() == {"x": None, "x/inner": b"2"}
        await hold(user, "x")
        await user.unlink("x/inner")  # which leaves the directory's marker
        assert await user.drained() == "durable"
    assert bucket.shows() == {"x": b"1", "x/": b""}


async def test_a_directory_over_another_clients_file_is_a_conflict_at_once(
    bucket: Bucket, cache: Path
) -> None:
    async with running_node(bucket, cache, fresh_seconds=60.0) as user:
        await known(user)
        bucket.memory.put_bytes("x", b"theirs")
        await user.mkdir("x")
        await user.write("x/inner", b"ours")
        assert await user.drained() == "conflict"
        await trio.sleep(60)
        tree = await user.tree()
        assert (tree["x/inner"], tree[copy_of(tree)]) == (b"ours", b"theirs")


@pytest.mark.parametrize(("age", "heads"), [(0.0, 0), (LATER_SECONDS, 1)])
async def test_only_a_directory_whose_name_was_not_just_listed_costs_a_head(
    cache: Path, age: float, heads: int
) -> None:
    bucket = CountingBucket()
    async with running_node(bucket, cache, fresh_seconds=600.0) as user:
        bucket.memory.put_bytes("old", b"1")
        await user.tree()
        await trio.sleep(age)
        await user.mkdir("x")
        assert await user.drained() == "durable"
    assert (bucket.heads, bucket.sent()) == (heads, ["x/"])


async def test_the_same_directory_of_two_nodes_costs_none_but_where_the_create_was_refused(
    tmp_path: Path,
) -> None:
    asked: list[str] = []

    class AskedBucket(Bucket):
        def head(self, key: str) -> ObjectInfo:
            asked.append(key)
            return self.memory.head(key)

    bucket = AskedBucket()
    async with running_node(bucket, tmp_path / "1") as one, running_node(bucket, tmp_path / "2") as two:
        for user in (one, two):
            await user.tree()
        for user in (one, two):
            await user.mkdir("x")
        assert [await user.drained() for user in (one, two)] == ["durable"] * 2
    assert (asked, bucket.shows()) == (["x/"], {"x/": b""})
