"""Content that the bucket rejects permanently while its name lives on: rewritten, renamed, removed, or at a restart."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lmdb
import pytest
import trio
from trio.testing import MockClock

from fusecache.index.journal import Journal, PutOperation
from fusecache.model.errors import NoSpace, ObjectArchived, Refused
from fusecache.model.objects import MIB
from fusecache.model.records import OperationKind, OperationRecord
from tests.support.faulty_store import Fault, FaultyStore
from tests.support.inline_offload import InlineOffload
from tests.support.node import Bucket, User, photograph, running_node


class Refusing:
    """A bucket that takes no PUT of some keys."""

    def __init__(self, bucket: Bucket, *keys: str) -> None:
        self._bucket = bucket
        self.keys = set(keys)

    def __getattr__(self, name: str) -> Any:
        call = getattr(self._bucket, name)
        if name != "put":
            return call

        def put(key: str, *args: Any, **options: Any) -> Any:
            if key in self.keys:
                raise Refused("locked")
            return call(key, *args, **options)

        return put


def slow_requests(user: User, seconds: float) -> trio.Event:
    """Have publishing requests be under way for so long; return what is set once one has begun."""
    publisher: Any = user.fs.publisher
    send, begun = publisher._requests._offload.publish, trio.Event()

    async def publish(call: Callable[..., Any], *args: object) -> Any:
        begun.set()
        await trio.sleep(seconds)
        return await send(call, *args)

    publisher._requests._offload.publish = publish
    return begun


async def refused(user: User) -> list[tuple[str, int]]:
    """Return path and bytes of what `fusecache recover` lists as refused."""
    things = (await user.fs.quarantine.listing())["entries"]
    return [(thing["path"], thing["bytes"]) for thing in things if thing["kind"] == "refused"]


async def bring_back(user: User) -> str:
    """Offer the one refused file again; return its path."""
    (thing,) = (await user.fs.quarantine.listing())["entries"]
    return await user.fs.quarantine.restore(thing["id"], "")


def queued(cache: Path) -> int:
    """Return how many changes of names a journal holds."""
    with lmdb.open(str(cache / "journal"), max_dbs=8, readonly=True) as env:
        operations = env.open_db(b"operations")
        with env.begin(db=operations) as txn:
            return int(txn.stat(operations)["entries"])


async def nothing_is_staged(user: User, cache: Path) -> None:
    """Fail unless the bucket has everything, and staging is empty a moment later."""
    assert await user.drained() == "durable"
    await trio.sleep(5)
    assert list((cache / "staging").iterdir()) == []


# ---- written again before the refusal came


@pytest.mark.parametrize("newer_is", ["being written", "closed"])
@pytest.mark.parametrize("end", ["published", "unlinked"])
async def test_newer_content_ends_what_was_refused_after_it_was_begun(
    bucket: Bucket, cache: Path, autojump_clock: MockClock, newer_is: str, end: str
) -> None:
    store = Refusing(bucket, "f")
    async with running_node(store, cache) as user:
        slow_requests(user, 3)
        await user.write("f", b"2")
        await trio.sleep(2.5)  # the request is under way
        handle = await user.open("f")
        await user.fs.file_io.write(handle, 0, b"newer")
        if newer_is == "closed":
            await user.close(handle)
        await trio.sleep(2)
        assert await refused(user) == ([("f", 1)] if newer_is == "being written" else [])
        store.keys.clear()
        if newer_is == "being written":
            await trio.sleep(5)
            await user.close(handle)
        assert await user.drained() == "durable"
        assert await refused(user) == []
        if end == "unlinked":
            await user.unlink("f")
        await nothing_is_staged(user, cache)
    async with running_node(bucket, cache) as user:
        assert (await user.tree(), await user.drained()) == (bucket.shows(), "durable")
    assert bucket.shows() == ({"f": b"newer"} if end == "published" else {})


async def test_what_is_refused_after_it_was_taken_and_the_node_ended_is_known_to_be_there(
    bucket: Bucket, cache: Path, tmp_path: Path, autojump_clock: MockClock
) -> None:
    later = tmp_path / "later"
    bucket.die_at(0, "after", lambda: photograph(cache, later))
    async with running_node(bucket, cache) as user:
        await user.write("f", b"bytes")
        await trio.sleep(3)
    bucket.come_back()
    async with running_node(Refusing(bucket, "f"), later) as user:
        assert await user.drained() == "durable"
        assert await refused(user) == []
        await user.rename("f", "g")
        assert await user.drained() == "durable"
    assert bucket.shows() == {"g": b"bytes"}


@pytest.mark.parametrize("end", ["unlinked", "replaced"])
async def test_a_refused_file_that_goes_while_it_is_open_stays_gone_after_a_crash(
    bucket: Bucket, cache: Path, tmp_path: Path, autojump_clock: MockClock, end: str
) -> None:
    async with running_node(Refusing(bucket, "f"), cache) as user:
        await user.write("f", b"2")
        assert await user.drained() == "error"
        await user.write("other", b"1")
        reader = user.fs.file_io.open(await user.fs.resolve("f"), writable=False, pid=0)
        writer = await user.open("f", truncate=False)
        await user.fs.file_io.write(writer, 1, b"+")
        await user.fs.file_io.read(reader, 0, 1)
        await (user.unlink("f") if end == "unlinked" else user.rename("other", "f"))
        photograph(cache, tmp_path / "crash")
        await user.fs.file_io.release(reader)
        await user.fs.file_io.release(writer)
    bucket.memory = Bucket().memory
    async with running_node(bucket, tmp_path / "crash") as user:
        expected = {"other" if end == "unlinked" else "f": b"1"}
        assert (await user.drained(), await user.tree(), await refused(user)) == ("durable", expected, [])


async def test_a_refused_file_whose_newer_writer_found_no_room_shows_again(
    bucket: Bucket, cache: Path, autojump_clock: MockClock
) -> None:
    store = Refusing(bucket, "f")
    async with running_node(store, cache) as user:
        await user.write("f", b"2")
        assert await user.drained() == "error"
        handle = await user.open("f", truncate=False)
        await user.fs.file_io.write(handle, 1, b"more")
        version = handle.node.version
        assert version is not None
        user.fs._write_back.write.states.fail(version, NoSpace("full"))
        with pytest.raises(NoSpace):
            await user.close(handle)
        assert (await user.read("f"), await refused(user)) == (b"2", [("f", 1)])
        store.keys.clear()
        assert await bring_back(user) == "f"
        await nothing_is_staged(user, cache)
    assert bucket.shows() == {"f": b"2"}


# ---- renamed after the refusal


@pytest.mark.parametrize("crash", ["before the rename is published", "after it"])
async def test_a_refused_file_that_was_renamed_stays_before_its_older_version_after_a_crash(
    bucket: Bucket, cache: Path, tmp_path: Path, autojump_clock: MockClock, crash: str
) -> None:
    async with running_node(bucket, cache) as user:
        await user.write("a", b"1")
        assert await user.drained() == "durable"
    async with running_node(Refusing(bucket, "a"), cache) as user:
        await user.write("a", b"22")
        assert await user.drained() == "error"
        bucket.takes_nothing = crash.startswith("before")
        await user.rename("a", "b")
        await trio.sleep(5)
        photograph(cache, tmp_path / "crash")
        bucket.is_cut_off = True
    bucket.come_back()
    async with running_node(bucket, tmp_path / "crash") as user:
        assert (await user.tree(), await refused(user)) == ({"b": b"22"}, [("b", 2)])
        assert await user.drained() == "error"
        assert bucket.shows() == {"b": b"1"}
    async with running_node(bucket, tmp_path / "crash") as user:
        assert await bring_back(user) == "b"
        await nothing_is_staged(user, tmp_path / "crash")
        assert await user.tree() == {"b": b"22"}
    assert bucket.shows() == {"b": b"22"}


@pytest.mark.parametrize("way_on", ["renamed", "written again"])
async def test_refused_content_that_took_the_place_of_a_removal_knows_what_the_bucket_shows(
    bucket: Bucket, cache: Path, autojump_clock: MockClock, way_on: str
) -> None:
    store = Refusing(bucket)
    async with running_node(store, cache) as user:
        await user.write("a", b"1")
        assert await user.drained() == "durable"
        store.keys.add("a")
        await user.unlink("a")
        await user.write("a", b"22")
        assert await user.drained() == "error"
        assert bucket.shows() == {"a": b"1"}
        store.keys.clear()
        if way_on == "renamed":
            await user.rename("a", "b")
            assert await user.tree() == {"b": b"22"}
            assert await bring_back(user) == "b"
        else:
            await user.write("a", b"22")
        await nothing_is_staged(user, cache)
        assert user.fs.publisher.rejections.conflicts == {}
    assert bucket.shows() == {"b" if way_on == "renamed" else "a": b"22"}


# ---- renamed while the request was under way


@pytest.mark.parametrize("start", ["nothing", "an older version", "another client's", "another target"])
@pytest.mark.parametrize("moves", [["b"], ["b", "c"]])
async def test_a_rename_behind_refused_content_moves_what_is_ours_and_nothing_else(
    bucket: Bucket, cache: Path, autojump_clock: MockClock, start: str, moves: list[str]
) -> None:
    async with running_node(bucket, cache) as user:
        if start == "an older version":
            await user.write("a", b"1")
        elif start == "another target":
            await user.write("b", b"target")
        assert await user.drained() == "durable"
    async with running_node(Refusing(bucket, "a"), cache) as user:
        slow_requests(user, 3)
        await user.write("a", b"22")
        await trio.sleep(2.5)
        for before, now in zip(["a", *moves], moves, strict=False):
            await user.rename(before, now)
        if start == "another client's":
            bucket.memory.put_bytes("a", b"theirs")
        await trio.sleep(60)
        last = moves[-1]
        shown = {
            "nothing": {},
            "an older version": {last: b"1"},
            "another client's": {"a": b"theirs"},
            "another target": {"b": b"target"},
        }[start]
        assert (bucket.shows(), user.fs.publisher.rejections.conflicts) == (shown, {})
        assert (await user.read(last), await refused(user)) == (b"22", [(last, 2)])
    async with running_node(bucket, cache) as user:
        assert await user.tree() == {**shown, last: b"22"}
        assert await bring_back(user) == last
        assert await user.drained() == "durable"
        assert user.fs.publisher.rejections.conflicts == {}
    assert bucket.shows() == {**shown, last: b"22"}


async def test_newer_content_under_the_new_name_is_published_although_the_old_was_refused(
    bucket: Bucket, cache: Path, autojump_clock: MockClock
) -> None:
    async with running_node(Refusing(bucket, "a"), cache) as user:
        slow_requests(user, 3)
        await user.write("a", b"22")
        await trio.sleep(2.5)
        await user.rename("a", "b")
        await user.write("b", b"newer")
        bucket.memory.put_bytes("a", b"theirs")
        await nothing_is_staged(user, cache)
        assert (user.fs.publisher.rejections.conflicts, await refused(user)) == ({}, [])
    assert bucket.shows() == {"a": b"theirs", "b": b"newer"}


@pytest.mark.parametrize("start", ["nothing", "another target"])
async def test_after_a_power_cut_a_rename_behind_lost_content_moves_nothing(
    bucket: Bucket, cache: Path, tmp_path: Path, autojump_clock: MockClock, start: str
) -> None:
    at_first = {"b": b"target"} if start == "another target" else {}
    for key, data in at_first.items():
        bucket.memory.put_bytes(key, data)
    async with running_node(bucket, cache) as user:
        bucket.takes_nothing = True
        await user.write("a", b"22")
        await trio.sleep(2.5)  # the request is under way
        await user.rename("a", "b")
        await user.rename("b", "c")
        await user.write("c", b"333")
        await trio.sleep(0.1)
        photograph(cache, tmp_path / "crash")
        bucket.is_cut_off = True
    staged = sorted((tmp_path / "crash" / "staging").iterdir())
    assert len(staged) == 2
    staged[0].unlink()
    bucket.come_back()
    bucket.memory.put_bytes("a", b"theirs")
    async with running_node(bucket, tmp_path / "crash") as user:
        assert (await user.drained(), user.fs.publisher.rejections.conflicts) == ("durable", {})
        assert await user.tree() == {**at_first, "a": b"theirs", "c": b"333"}
    assert bucket.shows() == {**at_first, "a": b"theirs", "c": b"333"}
    assert queued(tmp_path / "crash") == 0


@pytest.mark.parametrize("then", ["written", "a link", "replaced", "moved"])
async def test_after_a_power_cut_what_follows_lost_content_replaces_what_that_was_to_replace(
    bucket: Bucket, cache: Path, tmp_path: Path, autojump_clock: MockClock, then: str
) -> None:
    async with running_node(bucket, cache) as user:
        await user.write("a", b"1")
        await user.write("b", b"2")
        assert await user.drained() == "durable"
        bucket.takes_nothing = True
        await user.write("a", b"lost")
        await trio.sleep(2.5)  # the request is under way
        match then:
            case "written":
                await user.write("a", b"new")
            case "a link":
                await user.unlink("a")
                await user.symlink("b", "a")
            case "replaced":
                await user.rename("b", "a")
            case "moved":
                await user.rename("a", "b")
        await trio.sleep(0.1)
        photograph(cache, tmp_path / "1")
        bucket.is_cut_off = True
    min((tmp_path / "1" / "staging").iterdir()).unlink()
    wanted = {
        "written": {"a": b"new", "b": b"2"},
        "a link": {"a": b"-> b", "b": b"2"},
        "replaced": {"a": b"2"},
        "moved": {"a": b"1", "b": b"2"},  # nothing is moved for the sake of what is lost
    }[then]
    for start in "12":  # the second one knows nothing of what was lost
        bucket.is_cut_off = False
        async with running_node(bucket, tmp_path / start) as user:
            assert await user.tree() == wanted
            if start == "1":
                photograph(tmp_path / "1", tmp_path / "2")
                bucket.is_cut_off = True
            else:
                bucket.come_back()
                assert (await user.drained(), user.fs.publisher.rejections.conflicts) == ("durable", {})
    assert bucket.shows() == wanted


# ---- renamed before it was published


async def moved_and_refused(bucket: Bucket, user: User, store: Refusing) -> None:
    """Publish `a`, write it again, and rename it to `b` where the bucket refuses it."""
    await user.write("a", b"1")
    assert await user.drained() == "durable"
    bucket.takes_nothing = True
    await user.write("a", b"22")
    await user.rename("a", "b")
    store.keys.add("b")
    bucket.come_back()
    assert await user.drained() == "error"
    await trio.sleep(60)
    assert bucket.shows() == {"a": b"1"}
    assert await user.tree() == {"a": b"1", "b": b"22"}


@pytest.mark.parametrize("when", ["at once", "after a restart"])
@pytest.mark.parametrize("way_out", ["offered again", "renamed first", "written again", "unlinked"])
async def test_the_old_object_shows_again_if_its_newer_content_is_rejected_under_another_name(
    bucket: Bucket, cache: Path, autojump_clock: MockClock, way_out: str, when: str
) -> None:
    store = Refusing(bucket)
    expected = {"a": b"1"}

    async def go_on(user: User) -> None:
        assert await user.tree() == {"a": b"1", "b": b"22"}
        store.keys.clear()
        match way_out:
            case "offered again":
                await bring_back(user)
                expected["b"] = b"22"
            case "renamed first":
                await user.rename("b", "c")
                await bring_back(user)
                expected["c"] = b"22"
            case "written again":
                await user.write("b", b"333")
                expected["b"] = b"333"
            case "unlinked":
                await user.unlink("b")
        await nothing_is_staged(user, cache)
        assert await user.tree() == expected

    async with running_node(store, cache) as user:
        await moved_and_refused(bucket, user, store)
        if when == "at once":
            await go_on(user)
    if when == "after a restart":
        async with running_node(store, cache) as user:
            await go_on(user)
    assert bucket.shows() == expected
    assert all(state for state in bucket.states[:-1])
    assert queued(cache) == 0


@pytest.mark.parametrize("when", ["at once", "after a restart"])
async def test_a_name_that_shows_again_can_be_written_anew(
    bucket: Bucket, cache: Path, autojump_clock: MockClock, when: str
) -> None:
    store = Refusing(bucket)

    async def go_on(user: User) -> None:
        await user.write("a", b"new")
        assert await user.drained() == "error"
        assert user.fs.publisher.rejections.conflicts == {}
        assert bucket.shows() == {"a": b"new"}
        store.keys.clear()
        assert await bring_back(user) == "b"
        await nothing_is_staged(user, cache)
        await trio.sleep(60)
        assert await user.tree() == {"a": b"new", "b": b"22"}

    async with running_node(store, cache) as user:
        await moved_and_refused(bucket, user, store)
        if when == "at once":
            await go_on(user)
    if when == "after a restart":
        async with running_node(store, cache) as user:
            await go_on(user)
    assert bucket.shows() == {"a": b"new", "b": b"22"}


async def test_a_name_that_shows_again_and_was_closed_before_is_no_conflict(
    bucket: Bucket, cache: Path, autojump_clock: MockClock
) -> None:
    store = Refusing(bucket)
    async with running_node(store, cache) as user:
        await user.write("a", b"1")
        assert await user.drained() == "durable"
        bucket.takes_nothing = True
        await user.write("a", b"22")
        await user.rename("a", "b")
        handle = await user.open("a")
        await user.fs.file_io.write(handle, 0, b"new")
        await user.fs.close_protocol.flush(handle)  # its release, which queues it, is still to come
        store.keys.add("b")
        bucket.come_back()
        await trio.sleep(90)
        assert await refused(user) == [("b", 2)]
        await user.fs.file_io.release(handle)
        assert await user.drained() == "error"
        assert user.fs.publisher.rejections.conflicts == {}
    assert bucket.shows() == {"a": b"new"}


async def test_letting_a_refused_file_go_leaves_the_old_object_under_its_old_name(
    bucket: Bucket, cache: Path, autojump_clock: MockClock
) -> None:
    store = Refusing(bucket)
    async with running_node(store, cache) as user:
        await moved_and_refused(bucket, user, store)
        (thing,) = (await user.fs.quarantine.listing())["entries"]
        await user.fs.quarantine.delete(thing["id"])
        await nothing_is_staged(user, cache)
        await trio.sleep(5)
        assert await user.tree() == {"a": b"1"}
    assert bucket.shows() == {"a": b"1"}
    assert queued(cache) == 0


async def test_a_delete_that_an_earlier_version_left_waiting_for_rejected_content_is_given_up(
    bucket: Bucket, cache: Path, autojump_clock: MockClock
) -> None:
    store = Refusing(bucket)
    async with running_node(store, cache) as user:
        await moved_and_refused(bucket, user, store)
    etag = bucket.memory.head("a").etag
    journal = Journal(cache / "journal")
    waiting = OperationRecord(10_000, OperationKind.DELETE, "a", target="b", base_etag=etag)
    journal.apply([PutOperation(waiting)])
    journal.close()
    with lmdb.open(str(cache / "journal"), max_dbs=8) as env:
        files = env.open_db(b"files")
        with env.begin(write=True, db=files) as txn:
            for key, value in list(txn.cursor()):
                txn.put(key, json.dumps({**json.loads(value), "refused_at": 3}).encode())
    async with running_node(store, cache) as user:
        await trio.sleep(60)
        assert await user.drained() == "error"
        assert (await user.tree(), await refused(user)) == ({"a": b"1", "b": b"22"}, [("b", 2)])
    assert bucket.shows() == {"a": b"1"}


async def test_a_marker_that_was_closed_between_two_versions_of_a_rejected_file_comes_after_the_newer_one(
    bucket: Bucket, cache: Path, autojump_clock: MockClock
) -> None:
    store = Refusing(bucket, "d/f")
    async with running_node(store, cache) as user:
        await user.mkdir("d")
        assert await user.drained() == "durable"
        slow_requests(user, 3)
        await user.write("d/f", b"2")
        await trio.sleep(2.5)  # the request is under way
        await user.write("d/latest", b"f")
        await user.write("d/f", b"newer")
        await trio.sleep(2)
        store.keys.clear()
        await nothing_is_staged(user, cache)
        assert await refused(user) == []
    assert bucket.shows()["d/latest"] == b"f"
    assert all("d/latest" not in state or state.get("d/f") == b"newer" for state in bucket.states)


async def test_nor_does_one_come_first_that_was_closed_after_the_rejection(
    bucket: Bucket, cache: Path, autojump_clock: MockClock
) -> None:
    store = Refusing(bucket, "d/f")
    async with running_node(store, cache) as user:
        await user.mkdir("d")
        await user.write("d/f", b"2")
        assert await user.drained() == "error"
        store.keys.clear()
        slow_requests(user, 3)
        await user.write("d/latest", b"f")
        await user.write("d/f", b"newer")
        assert await user.drained() == "durable"
    assert bucket.shows()["d/latest"] == b"f"
    assert all("d/latest" not in state or state.get("d/f") == b"newer" for state in bucket.states)


async def test_newer_content_of_a_rejected_marker_comes_after_what_was_written_in_between(
    bucket: Bucket, cache: Path, autojump_clock: MockClock
) -> None:
    store = Refusing(bucket, "d/latest")
    async with running_node(store, cache) as user:
        await user.mkdir("d")
        await user.write("d/latest", b"1")
        assert await user.drained() == "error"
        store.keys.clear()
        slow_requests(user, 3)
        await user.write("d/2", b"2")
        await user.write("d/latest", b"22")
        assert await user.drained() == "durable"
    assert bucket.shows()["d/latest"] == b"22"
    assert all(state.get("d/latest") != b"22" or "d/2" in state for state in bucket.states)


async def test_of_a_refused_file_that_is_rewritten_the_disk_holds_one_version(
    bucket: Bucket, cache: Path, autojump_clock: MockClock
) -> None:
    """Also if it is refused between the close of the newer content and its release."""
    async with running_node(Refusing(bucket, "log"), cache) as user:
        for number in range(5):
            await user.write("log", b"%d" % number)
            handle = await user.open("log")
            await user.fs.file_io.write(handle, 0, b"newer %d" % number)
            await user.fs.close_protocol.flush(handle)
            await trio.sleep(20)
            await user.fs.file_io.release(handle)
            await trio.sleep(20)
        assert len(list((cache / "staging").iterdir())) == 1
        assert await user.drained() == "error"
        assert await user.read("log") == b"newer 4"


async def test_the_old_name_of_a_refused_file_shows_what_another_client_puts_there(
    bucket: Bucket, cache: Path, autojump_clock: MockClock
) -> None:
    async with running_node(Refusing(bucket, "a"), cache) as user:
        slow_requests(user, 5.0)
        await user.write("a", b"ours")
        await trio.sleep(3)
        await user.rename("a", "b")
        await trio.sleep(20)
        bucket.memory.put_bytes("a", b"theirs")
        await trio.sleep(120)
        assert await user.tree() == {"a": b"theirs", "b": b"ours"}


class SecondPartRefused(InlineOffload):
    """The bucket refuses the second part of each upload. The first one arrives 20 s later."""

    async def upload(self, call: Any, *args: Any) -> Any:
        number = args[2] if len(args) == 4 else 0
        if number == 2:
            raise Refused("locked")
        with trio.CancelScope(shield=True):
            await trio.sleep(20 if number == 1 else 0)
        return call(*args)


async def test_a_refused_file_says_why_although_one_of_its_parts_arrives_after_that(
    bucket: Bucket, cache: Path, autojump_clock: MockClock
) -> None:
    async with running_node(bucket, cache, offload=SecondPartRefused()) as user:
        await user.write("large", bytes(9 * MIB))
        await trio.sleep(120)
        assert [str(each.error) for each in user.fs.publisher.rejections.rejected] == ["locked"]
        assert await user.drained() == "error"


async def test_a_marker_in_place_of_a_refused_link_of_its_name_is_published(
    bucket: Bucket, cache: Path, autojump_clock: MockClock
) -> None:
    store = Refusing(bucket, "run/latest")
    async with running_node(store, cache) as user:
        await user.mkdir("run")
        await user.symlink("1", "run/latest")
        await trio.sleep(5)
        assert len(user.fs.publisher.rejections.rejected) == 1
        store.keys.clear()
        await user.write("run/latest", b"2")
        assert await user.drained() == "durable"
    assert bucket.shows()["run/latest"] == b"2"


async def test_of_content_that_was_refused_under_two_old_names_nothing_is_left_once_newer_is_published(
    bucket: Bucket, cache: Path, autojump_clock: MockClock
) -> None:
    async with running_node(Refusing(bucket, "a", "b"), cache) as user:
        slow_requests(user, 5.0)
        await user.write("a", b"1")
        await trio.sleep(3)  # it is under way
        await user.rename("a", "b")
        await user.write("b", b"22")
        await user.rename("b", "c")
        await user.write("c", b"333")
        await trio.sleep(60)
        assert bucket.shows() == {"c": b"333"}
        assert await refused(user) == []
    async with running_node(bucket, cache) as user:
        await trio.sleep(60)
        assert await user.tree() == {"c": b"333"}
        assert await user.drained() == "durable"
        assert list((cache / "staging").iterdir()) == []
    assert bucket.shows() == {"c": b"333"}


async def test_a_drain_goes_on_while_the_bucket_refuses_one_rename_after_another(
    bucket: Bucket, cache: Path, autojump_clock: MockClock
) -> None:
    """A change that is refused is progress, too: it sends no byte, and what comes after it may be accepted."""
    archived = Fault(ObjectArchived("archived in storage class GLACIER"), "copy", times=None)
    async with running_node(FaultyStore(bucket, archived), cache) as user:
        for number in range(100):
            await user.write(f"{number}", b"1")
        assert await user.drained() == "durable"
        slow_requests(user, 10.0)
        for number in range(100):
            await user.rename(f"{number}", f"new-{number}")
        await user.write("model", b"2")
        ended = await user.fs.drain(until_empty=True)
        assert ended.result == "error", ended.message
        assert len(user.fs.publisher.rejections.rejected) == 100
        assert bucket.shows()["model"] == b"2"


async def test_a_file_that_takes_the_name_of_a_refused_link_while_that_is_repeated_is_no_conflict(
    bucket: Bucket, cache: Path, autojump_clock: MockClock
) -> None:
    store = FaultyStore(bucket, Fault(Refused("locked"), "put", "link", times=1))
    async with running_node(store, cache) as user:
        await user.symlink("1", "link")
        await trio.sleep(1.5)
        assert len(user.fs.publisher.rejections.rejected) == 1
        begun = slow_requests(user, 0.8)
        await begun.wait()  # the link is repeated
        await user.write("link", b"a file")
        ended = await user.fs.drain(until_empty=True)
        assert (ended.result, ended.message) == ("durable", "")
    assert bucket.shows() == {"link": b"a file"}
