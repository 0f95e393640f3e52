"""Whole trees are removed and moved side by side, with few requests; commit markers keep their place in the order."""

from pathlib import Path

import pytest
import trio

from fusecache.model.errors import Unavailable
from fusecache.model.objects import SYMLINK_TARGET, ObjectInfo
from tests.engine.publish.test_publish_order import Far
from tests.support.faulty_store import Fault, FaultyStore
from tests.support.node import Bucket, User, listed, photograph, running_node

COUNT = 100


class CountingBucket(Bucket):
    """Counts the HEADs of a node: other requests that change nothing are not those of the publisher."""

    heads = 0

    def head(self, key: str) -> ObjectInfo:
        self.heads += 1
        return self.memory.head(key)


def fill(bucket: Bucket, folder: str = "d", count: int = COUNT) -> None:
    for number in range(count):
        bucket.memory.put_bytes(f"{folder}/{number:03}", b"%d" % number)


async def remove(user: User, folder: str) -> None:
    """Remove a directory of files, as `rm -r` does."""
    for path in await user.tree(folder):
        await user.unlink(path)
    await user.rmdir(folder)


async def seconds_to_drain(user: User) -> float:
    began = trio.current_time()
    assert await user.drained() == "durable"
    return trio.current_time() - began


async def test_the_files_of_a_removed_directory_go_side_by_side(cache: Path) -> None:
    fill(bucket := CountingBucket())
    offload = Far()
    async with running_node(bucket, cache, offload=offload) as user:
        await remove(user, "d")
        assert await seconds_to_drain(user) < 3  # 10 s one after the other
    assert bucket.shows() == {}
    assert 16 <= offload.most <= 64
    assert bucket.heads == COUNT


async def test_the_files_of_a_moved_directory_move_side_by_side(cache: Path) -> None:
    fill(bucket := CountingBucket())
    offload = Far()
    async with running_node(bucket, cache, offload=offload) as user:
        await user.rename("d", "e")
        assert await seconds_to_drain(user) < 3
        assert len(await user.tree("e")) == COUNT
    assert bucket.shows() == {"e/": b"", **{f"e/{number:03}": b"%d" % number for number in range(COUNT)}}
    assert 16 <= offload.most <= 64
    assert (bucket.heads, len(bucket.sent("copy"))) == (0, COUNT)


async def test_after_a_kill_the_rest_of_a_moved_directory_still_moves_side_by_side(
    bucket: Bucket, cache: Path
) -> None:
    fill(bucket)
    after = cache.with_suffix(".after")
    async with running_node(bucket, cache) as user:
        await user.rename("d", "e")
        bucket.die_at(20, "after", lambda: photograph(cache, after))
        with trio.move_on_after(30):
            await user.drained()
    bucket.come_back()
    assert {key[0] for key in bucket.shows()} == {"d", "e"}
    offload = Far()
    async with running_node(bucket, after, offload=offload) as user:
        assert await seconds_to_drain(user) < 5
        assert user.fs.publisher.rejections.conflicts == {}
    assert {key[0] for key in bucket.shows()} == {"e"}
    assert len(bucket.shows()) == COUNT + 1
    assert offload.most >= 16


async def test_what_names_others_moves_after_the_others_of_its_directory(bucket: Bucket, cache: Path) -> None:
    bucket.memory.put_bytes("d/latest", b"099")
    bucket.memory.put_bytes("d/DONE", b"")
    fill(bucket)
    async with running_node(bucket, cache, offload=Far()) as user:
        await user.symlink("000", "d/link")
        assert await user.drained() == "durable"
        await trio.sleep(30)
        bucket.requests.clear()
        await user.rename("d", "e")
        assert await user.drained() == "durable"
    copied = bucket.sent("copy")
    assert set(copied[-3:]) == {"e/latest", "e/DONE", "e/link"}
    assert bucket.shows()["e/link"] == b"-> 000"


async def test_a_removed_commit_marker_goes_before_what_is_removed_after_it(
    bucket: Bucket, cache: Path
) -> None:
    fill(bucket)
    bucket.memory.put_bytes("d/_SUCCESS", b"all are here")
    async with running_node(bucket, cache, offload=Far()) as user:
        names = [path for path in await user.tree("d") if path != "d/_SUCCESS"]
        for path in (*names[:50], "d/_SUCCESS", *names[50:]):
            await user.unlink(path)
        assert await user.drained() == "durable"
    deleted = bucket.sent("delete")
    assert set(names[50:]) <= set(deleted[deleted.index("d/_SUCCESS") :])


async def test_a_write_comes_before_the_removals_after_it(bucket: Bucket, cache: Path) -> None:
    fill(bucket)
    async with running_node(bucket, cache, offload=Far()) as user:
        names = list(await user.tree("d"))
        for path in names[:50]:
            await user.unlink(path)
        await user.write("d/new", b"1")
        for path in names[50:]:
            await user.unlink(path)
        assert await user.drained() == "durable"
    changes = [
        key for method, key in bucket.requests if method in {"put", "delete"} and not key.endswith("/")
    ]
    assert set(names[50:]) <= set(changes[changes.index("d/new") :])


async def test_one_file_that_cannot_move_does_not_stop_the_others_of_its_directory(
    bucket: Bucket, cache: Path
) -> None:
    fill(bucket)
    store = FaultyStore(bucket, Fault(Unavailable("503"), "copy", "e/050", times=None))
    async with running_node(store, cache) as user:
        await user.rename("d", "e")
        await trio.sleep(300)
        assert {key for key in bucket.shows() if key.startswith("d/")} == {"d/050"}
        store.heal()
        assert await user.drained() == "durable"
    assert len(bucket.shows()) == COUNT + 1


@pytest.mark.parametrize("when", ["before", "after"])
async def test_what_another_client_replaces_in_a_moving_or_removed_directory_stays(
    bucket: Bucket, cache: Path, when: str
) -> None:
    """when: before or after the rest of its directory went."""
    fill(bucket, "d", 10)
    fill(bucket, "r", 10)
    async with running_node(bucket, cache, offload=Far()) as user:
        await listed(user, "r")
        await user.rename("d", "e")
        await remove(user, "r")
        if when == "after":
            bucket.on_request = lambda _method, key: key in {"d/000", "r/000"} and theirs(bucket)
        else:
            theirs(bucket)
        assert await user.drained() == "conflict"
    shown = bucket.shows()
    assert (shown["d/005"], shown["r/005"]) == (b"theirs", b"theirs")


def theirs(bucket: Bucket) -> None:
    bucket.on_request = lambda _method, _key: None
    for key in ("d/005", "r/005"):
        bucket.memory.put_bytes(key, b"theirs")


async def test_an_object_of_another_client_under_a_new_name_is_not_replaced(
    bucket: Bucket, cache: Path
) -> None:
    fill(bucket, "d", 3)
    async with running_node(bucket, cache) as user:
        await user.rename("d", "e")
        bucket.memory.put_bytes("e/001", b"theirs")
        bucket.memory.put_bytes("e/002", b"2")  # the same bytes
        assert await user.drained() == "conflict"
        assert list(user.fs.publisher.rejections.conflicts) == ["e/001"]
    assert bucket.shows() == {"d/001": b"1", "e/": b"", "e/000": b"0", "e/001": b"theirs", "e/002": b"2"}


async def test_an_empty_file_of_another_client_is_not_taken_for_a_moved_symlink(
    bucket: Bucket, cache: Path
) -> None:
    async with running_node(bucket, cache) as user:
        await user.mkdir("d")
        await user.symlink("target", "d/link")
        assert await user.drained() == "durable"
        await user.rename("d", "e")
        bucket.memory.put_bytes("e/link", b"")
        assert await user.drained() == "conflict"
    assert (bucket.shows()["d/link"], bucket.shows()["e/link"]) == (b"-> target", b"")
    assert bucket.memory.head("d/link").metadata is not None
    assert (bucket.memory.head("d/link").metadata or {})[SYMLINK_TARGET] == "target"


async def test_a_file_that_is_renamed_twice_while_it_goes_up_keeps_its_size(
    bucket: Bucket, cache: Path
) -> None:
    async with running_node(bucket, cache, offload=Far(5.0)) as user:
        await user.write("log", b"1" * 12)
        assert await user.drained() == "durable"
        await user.write("log", b"2" * 300)
        await trio.sleep(3.0)  # the request is under way
        assert [item.in_flight for item in user.fs.queue.items()] == [True]
        await user.rename("log", "log.1")
        await user.rename("log.1", "log.2")
        assert await user.drained() == "durable"
        assert await user.read("log.2") == b"2" * 300
