"""Parts of a large file are uploaded while it is being written: never visible early, never wrong, always aborted."""

import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import trio

from fusecache.disk.staging import StagingFile, digests
from fusecache.engine.namespace.nodes import FileHandle, attributes_of
from fusecache.engine.publish import multipart_uploader
from fusecache.model.errors import NotAsSent, Refused, Unavailable
from fusecache.model.objects import MIB
from fusecache.policy.writeback import multipart
from fusecache.remote.store import FileSlice
from tests.support.faulty_store import Fault, FaultyStore
from tests.support.inline_offload import InlineOffload
from tests.support.node import Bucket, User, photograph, running_node
from tests.support.threads import stay

PART = 4 * MIB  # as `conftest.py` has it
ROW = MIB


def body(count: int, letter: bytes = b"1") -> bytes:
    """Return `count` parts, each of its own bytes."""
    return b"".join((letter + b"%07d" % index) * (PART // 8) for index in range(count))


class SlowDigests(InlineOffload):
    """The digests of a part take `seconds`."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    async def upload(self, call: Callable[..., Any], *args: object) -> Any:
        if call is digests:
            await trio.sleep(self.seconds)
        return await super().upload(call, *args)


class CountedDigests(SlowDigests):
    """count: of how many parts."""

    count = 0

    async def upload(self, call: Callable[..., Any], *args: object) -> Any:
        self.count += call is digests
        return await super().upload(call, *args)


class SlowSyncs(InlineOffload):
    """A sync of a staging file takes ten seconds."""

    def __init__(self) -> None:
        self.begun = trio.Event()

    async def disk(self, call: Callable[..., Any], *args: object) -> Any:
        if not args or not isinstance(args[0], StagingFile):
            return await super().disk(call, *args)
        self.begun.set()
        await stay(10)
        return call(*args)


class SlowAnswers(SlowSyncs):
    """The bucket has what is sent to it at once, and says so later than a sync ends."""

    async def upload(self, call: Callable[..., Any], *args: object) -> Any:
        answer = await super().upload(call, *args)
        if any(isinstance(arg, FileSlice) for arg in args):
            await trio.sleep(20)
        return answer


async def write(user: User, handle: FileHandle, data: bytes, offset: int = 0) -> None:
    """Write as the kernel does: 1 MiB at a time, with time in between for others."""
    for start in range(0, len(data), ROW):
        await user.fs.file_io.write(handle, offset + start, data[start : start + ROW])
        await trio.sleep(0.5)


def parts_of(bucket: Bucket) -> int:
    """Return how many parts were sent."""
    return len(bucket.sent("upload_part"))


# ---- what is sent when


async def test_parts_behind_the_writer_are_sent_and_nothing_is_visible_before_the_close(
    bucket: Bucket, cache: Path
) -> None:
    data = body(5) + b"tail"
    async with running_node(bucket, cache) as user:
        handle = await user.open("model")
        await write(user, handle, data)
        await trio.sleep(30)
        assert parts_of(bucket) == 4  # the last ones may still change
        assert bucket.shows() == {}
        await user.close(handle)
        assert await user.drained() == "durable"
        assert await user.read("model") == data
    assert bucket.shows() == {"model": data}
    assert parts_of(bucket) == 6
    assert [name for name, _ in bucket.requests].count("create_multipart") == 1
    assert bucket.memory.uploads() == ()


@pytest.mark.parametrize("name", [".tmp123", "model.tmp", ".model.Xy12ab"])
async def test_a_file_under_a_temporary_name_is_not_sent_before_it_has_its_own(
    bucket: Bucket, cache: Path, name: str
) -> None:
    data = body(4)
    async with running_node(bucket, cache) as user:
        handle = await user.open(name)
        await write(user, handle, data)
        assert bucket.requests == []
        await user.rename(name, "model")
        await user.close(handle)
        assert await user.drained() == "durable"
    assert bucket.shows() == {"model": data}
    assert {key for _, key in bucket.requests} == {"model"}


async def test_parts_are_read_once(bucket: Bucket, cache: Path) -> None:
    offload = CountedDigests(0.0)
    async with running_node(bucket, cache, offload=offload) as user:
        await user.write("model", body(3))
        assert await user.drained() == "durable"
    assert offload.count == 3
    assert bucket.shows() == {"model": body(3)}


@pytest.mark.parametrize("is_others", [False, True], ids=["the same", "others"])
async def test_the_bytes_of_a_part_that_failed_are_looked_at_again_and_others_are_not_published(
    bucket: Bucket,
    cache: Path,
    is_others: bool,  # noqa: FBT001
) -> None:
    async with running_node(bucket, cache) as user:
        await user.write("model", body(3))
        version = (await user.fs.resolve("model")).version
        assert version is not None

        refused: list[str] = []

        def damage(method: str, _key: str) -> None:
            """Refuse the first part that comes; the bytes are others by then."""
            if method == "upload_part" and not refused:
                refused.append(method)
                if is_others:
                    with version.file.path.open("r+b") as file:
                        for index in range(3):
                            file.seek(index * PART)
                            file.write(b"x")
                raise NotAsSent("BadDigest")

        bucket.on_request = damage
        assert await user.drained() == ("error" if is_others else "durable")
        if is_others:
            assert "changed without a write through the mount" in str(version.error)
            assert version.file.path.exists()
    assert bucket.shows() == ({} if is_others else {"model": body(3)})


async def test_parts_of_a_renamed_file_are_not_read_for_its_old_name(
    bucket: Bucket, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(multipart_uploader, "_PROCESSORS", 1)
    offload = SlowDigests(1.0)
    async with running_node(bucket, cache, offload=offload) as user:
        await user.write("model", body(8))
        await trio.sleep(0.5)
        await user.rename("model", "renamed")
        renamed = trio.current_time()
        assert await user.drained() == "durable"
        assert trio.current_time() < renamed + 1 + 8 / 2 + 2
    assert bucket.shows() == {"renamed": body(8)}


async def test_a_writer_at_random_places_has_no_part_read_over_and_over(bucket: Bucket, cache: Path) -> None:
    offload = CountedDigests(1.0)
    async with running_node(bucket, cache, offload=offload) as user:
        handle = await user.open("database")
        for start in range(0, 100 * ROW, ROW):
            await user.fs.file_io.write(handle, min(start, 3 * PART + 3 * ROW), body(4)[:ROW])
            await user.fs.file_io.write(handle, 0, b"page")
            await trio.sleep(0.3)
        assert 1 <= offload.count < 10
        await user.close(handle)
        assert await user.drained() == "durable"
    assert bucket.shows() == {"database": b"page" + body(1)[4:ROW] + 15 * body(1)[:ROW]}


async def test_a_file_that_is_removed_while_its_bytes_are_synced_leaves_nothing(
    bucket: Bucket, tmp_path: Path
) -> None:
    offload = SlowSyncs()
    async with running_node(bucket, tmp_path / "cache", offload=offload) as user:
        handle = await user.open("model")
        await write(user, handle, body(5))
        await trio.sleep(60)
        offload.begun = trio.Event()
        await user.close(handle)
        await offload.begun.wait()
        await user.unlink("model")
        assert await user.drained() == "durable"
        await trio.sleep(30)
        await user.write("next", b"1")
        assert await user.drained() == "durable"
    assert bucket.shows() == {"next": b"1"}
    assert bucket.memory.uploads() == ()


@pytest.mark.parametrize(("count", "size_now"), [(3, PART + 5), (1, 5 * PART)], ids=["cut", "lengthened"])
async def test_a_staging_file_that_others_change_while_it_is_sent_ends_no_publishing(
    bucket: Bucket, cache: Path, caplog: pytest.LogCaptureFixture, count: int, size_now: int
) -> None:
    """The bucket gets every byte as it was written; what is left of the file does not become cache."""
    offload = SlowAnswers()
    async with running_node(bucket, cache, offload=offload) as user:
        await user.write("model", body(count))
        version = (await user.fs.resolve("model")).version
        assert version is not None
        await offload.begun.wait()
        await trio.sleep(5)
        os.truncate(version.file.path, size_now)
        assert await user.drained() == "durable"
        assert [str(version.file.path) in message for message in caplog.messages] == [True]
        assert list((cache / "staging").iterdir()) == []
        facts = user.fs.cache.statistics()
        assert (facts.staging_bytes, facts.used_bytes) == (0, 0)
        await user.write("next", b"1")
        assert await user.drained() == "durable"
        assert await user.read("model") == body(count)
    assert bucket.shows() == {"model": body(count), "next": b"1"}


async def test_a_file_that_ends_small_is_one_put(bucket: Bucket, cache: Path) -> None:
    async with running_node(bucket, cache) as user:
        handle = await user.open("model")
        await write(user, handle, body(3))
        await trio.sleep(5)
        assert bucket.memory.uploads() == ("model",)
        await user.fs.file_io.truncate(handle.node, 100)
        await user.close(handle)
        assert await user.drained() == "durable"
        await trio.sleep(5)
    assert bucket.shows() == {"model": body(1)[:100]}
    assert len(bucket.sent("put")) == 1
    assert bucket.memory.uploads() == ()


async def test_a_writer_at_random_places_sends_little_twice(bucket: Bucket, cache: Path) -> None:
    async with running_node(bucket, cache) as user:
        handle = await user.open("database")
        await write(user, handle, body(4))
        for number in range(40):
            await user.fs.file_io.write(handle, number % 4 * PART + number, b"x")
            await trio.sleep(5)
        sent = parts_of(bucket)
        await user.close(handle)
        assert await user.drained() == "durable"
    assert sent <= 6
    wanted = bytearray(body(4))
    for number in range(40):
        wanted[number % 4 * PART + number] = ord("x")
    assert bucket.shows() == {"database": bytes(wanted)}


async def test_a_file_that_outgrows_its_parts_begins_anew_with_larger_ones(
    bucket: Bucket, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(multipart, "_PARTS_TARGET", 4)
    data = body(20)
    async with running_node(bucket, cache) as user:
        handle = await user.open("model")
        await write(user, handle, data)
        await user.close(handle)
        assert await user.drained() == "durable"
        await trio.sleep(5)
    assert bucket.shows() == {"model": data}
    assert len(bucket.sent("create_multipart")) == 2
    assert bucket.memory.uploads() == ()


# ---- bytes that change behind the writer


@pytest.mark.parametrize("moment", ["sent", "under way"])
async def test_a_part_that_is_written_again_is_sent_again(bucket: Bucket, cache: Path, moment: str) -> None:
    data = bytearray(body(4))
    async with running_node(bucket, cache) as user:
        handle = await user.open("model")

        def change(method: str, _key: str) -> None:
            version = handle.node.version
            if method == "upload_part" and parts_of(bucket) == 1 and version is not None:
                version.file.write(5, b"new")
                version.on_written(5, 8)

        if moment == "under way":
            bucket.on_request = change
        await write(user, handle, bytes(data))
        await trio.sleep(5)
        if moment == "sent":
            await user.fs.file_io.write(handle, 5, b"new")
        data[5:8] = b"new"
        await user.close(handle)
        assert await user.drained() == "durable"
        assert await user.read("model") == data
    assert bucket.shows() == {"model": bytes(data)}
    assert parts_of(bucket) == 5


async def test_a_file_that_is_cut_and_written_on_holds_what_it_says(bucket: Bucket, cache: Path) -> None:
    async with running_node(bucket, cache) as user:
        handle = await user.open("model")
        await write(user, handle, body(4))
        await trio.sleep(5)
        await user.fs.file_io.truncate(handle.node, PART + 7)
        await user.fs.file_io.truncate(handle.node, 3 * PART)
        await write(user, handle, body(1, b"2"), offset=3 * PART)
        await trio.sleep(5)
        await user.close(handle)
        assert await user.drained() == "durable"
    wanted = (body(4)[: PART + 7]).ljust(3 * PART, b"\0") + body(1, b"2")
    assert bucket.shows() == {"model": wanted}


async def test_a_file_begun_anew_while_its_parts_are_sent_holds_only_the_new_bytes(
    bucket: Bucket, cache: Path
) -> None:
    async with running_node(bucket, cache) as user:
        handle = await user.open("model")
        await write(user, handle, body(4))
        again = await user.open("model")
        await write(user, again, body(4, b"2"))
        await user.close(handle)
        await user.close(again)
        assert await user.drained() == "durable"
    assert bucket.shows() == {"model": body(4, b"2")}
    assert bucket.memory.uploads() == ()


# ---- what is not wanted is aborted


@pytest.mark.parametrize("end", ["unlink", "rename", "killed", "failed"])
async def test_an_upload_that_nobody_will_complete_is_aborted(bucket: Bucket, cache: Path, end: str) -> None:
    data = body(4)
    async with running_node(bucket, cache) as user:
        handle = await user.open("model")
        await write(user, handle, data)
        await trio.sleep(5)
        assert bucket.memory.uploads() == ("model",)
        version = handle.node.version
        assert version is not None
        match end:
            case "unlink":
                await user.unlink("model")
                await trio.sleep(5)
                assert bucket.memory.uploads() == ()
            case "rename":
                await user.rename("model", "other")
            case "killed":
                version.close_state.killed_writer = handle
            case "failed":
                user.fs._write_back.write.states.fail(version, Refused("broken"))
        if end in {"killed", "failed"}:
            await user.fs.file_io.release(handle)
        else:
            await user.close(handle)
        assert await user.drained() == "durable"
        await trio.sleep(5)
    assert bucket.shows() == ({"other": data} if end == "rename" else {})
    assert bucket.memory.uploads() == ()


async def test_an_upload_that_is_aborted_while_it_is_created_leaves_nothing(
    bucket: Bucket, cache: Path
) -> None:
    async with running_node(bucket, cache) as user:
        handle = await user.open("model")
        for start in range(0, 2 * PART, ROW):
            await user.fs.file_io.write(handle, start, body(2)[start : start + ROW])
        await user.unlink("model")
        await user.close(handle)
        await trio.sleep(5)
    assert bucket.memory.uploads() == ()


# ---- the bucket fails, the node ends


async def test_a_bucket_that_cannot_be_reached_holds_no_writer_up(bucket: Bucket, cache: Path) -> None:
    data = body(4)
    async with running_node(bucket, cache) as user:
        handle = await user.open("model")
        bucket.takes_nothing = True
        with trio.fail_after(20):  # of which the writer itself waits 8 s
            await write(user, handle, data)
            await user.close(handle)
        bucket.come_back()
        assert await user.drained() == "durable"
    assert bucket.shows() == {"model": data}


@pytest.mark.parametrize("error", [Refused("no"), Unavailable("not now")], ids=["refused", "unavailable"])
@pytest.mark.parametrize("after_effect", [False, True])
@pytest.mark.parametrize("method", ["create_multipart", "upload_part"])
async def test_a_request_ahead_that_fails_changes_nothing_in_the_end(
    bucket: Bucket,
    cache: Path,
    error: Refused | Unavailable,
    after_effect: bool,  # noqa: FBT001
    method: str,
) -> None:
    store = FaultyStore(bucket, Fault(error, method=method, after_effect=after_effect))
    data = body(4)
    async with running_node(store, cache) as user:
        handle = await user.open("model")
        await write(user, handle, data)
        await user.close(handle)
        assert await user.drained() == "durable"
        await trio.sleep(5)
    assert bucket.shows() == {"model": data}


async def test_an_upload_that_the_bucket_forgot_while_the_file_was_written_begins_anew(
    bucket: Bucket, cache: Path
) -> None:
    data = body(5)
    async with running_node(bucket, cache) as user:
        handle = await user.open("log")
        await write(user, handle, data[: 3 * PART])
        await trio.sleep(5)
        bucket.memory.lose_uploads()
        await write(user, handle, data[3 * PART :], offset=3 * PART)
        await user.close(handle)
        assert await user.drained() == "durable"
    assert bucket.shows() == {"log": data}


@pytest.mark.parametrize("when", ["before", "after"])
async def test_a_node_that_ends_while_a_file_is_written_publishes_and_leaves_nothing(
    bucket: Bucket, tmp_path: Path, when: str
) -> None:
    """At each request before the close: create, and each part."""
    for number in range(4):
        bucket, place, after = Bucket(), tmp_path / f"{number}", tmp_path / f"{number}-after"
        died = trio.Event()

        def die(place: Path = place, after: Path = after, died: trio.Event = died) -> None:
            photograph(place, after)
            died.set()

        bucket.die_at(number, when, die)
        async with running_node(bucket, place) as user:
            handle = await user.open("model")
            await write(user, handle, body(5))
            with trio.fail_after(60):
                await died.wait()
        bucket.come_back()
        async with running_node(bucket, after) as user:
            assert await user.tree() == {}
            assert user.fs.replayed.orphans == 1
            await trio.sleep(5)
        assert bucket.shows() == {}
        if (number, when) != (0, "after"):
            assert bucket.memory.uploads() == ()  # of that one nobody here ever heard
        shutil.rmtree(place)
        shutil.rmtree(after)


@pytest.mark.parametrize("when", ["before", "after"])
async def test_a_node_that_ends_after_the_close_publishes_every_byte_once(
    bucket: Bucket, tmp_path: Path, when: str
) -> None:
    """At each request after the close: the parts that are left, and the completion. One part was changed meanwhile."""
    data = bytearray(body(5))
    data[5:8] = b"new"
    for number in range(3, 12):
        bucket, place, after = Bucket(), tmp_path / f"{number}", tmp_path / f"{number}-after"
        died = trio.Event()

        def die(place: Path = place, after: Path = after, died: trio.Event = died) -> None:
            photograph(place, after)
            died.set()

        async with running_node(bucket, place) as user:
            handle = await user.open("model")
            await write(user, handle, body(4))
            await trio.sleep(5)
            ahead = len(bucket.requests)
            bucket.die_at(number - 3, when, die)
            await user.fs.file_io.write(handle, 5, b"new")
            for start in range(4 * PART, 5 * PART, ROW):
                await user.fs.file_io.write(handle, start, bytes(data[start : start + ROW]))
            await user.close(handle)
            with trio.move_on_after(100):
                await died.wait()
            if not died.is_set():
                assert number - 3 >= len(bucket.requests) - ahead
                break
        bucket.come_back()
        async with running_node(bucket, after) as user:
            shown = await user.tree()
            if shown:
                assert shown == {"model": bytes(data)}
                assert await user.drained() == "durable"
                assert bucket.shows() == {"model": bytes(data)}
                assert user.fs.publisher.rejections.conflicts == {}
            else:  # it ended while the file was still being written
                assert bucket.shows() == {}
            await trio.sleep(5)
        assert bucket.memory.uploads() == ()
        shutil.rmtree(place)
        shutil.rmtree(after)
    else:
        raise AssertionError("the program has more requests than were tried")


# ---- what the object tells


async def test_an_explicit_time_goes_with_the_object_although_its_parts_went_before(
    bucket: Bucket, cache: Path
) -> None:
    """As cp -a and tar do: contents first, then utimensat(2)."""
    async with running_node(bucket, cache) as user:
        handle = await user.open("model")
        await write(user, handle, body(4))
        await trio.sleep(5)
        old = replace(attributes_of(handle.node), mtime_ns=1_000_000_000)
        user.fs.file_io.set_attributes(handle.node, old)
        await user.close(handle)
        assert await user.drained() == "durable"
        await trio.sleep(5)
    metadata = bucket.memory.head("model").metadata
    assert metadata is not None
    assert float(metadata["mtime"]) == 1.0
    assert bucket.memory.uploads() == ()


# ---- beside reads


async def test_an_upload_leaves_reads_their_time_and_goes_at_full_speed_without_them(
    bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Digests take a second here: of two processors an upload gets a quarter of one beside reads."""
    monkeypatch.setattr(multipart_uploader, "_PROCESSORS", 2)
    source = tmp_path / "data"
    source.write_bytes(bytes(64 * MIB))
    bucket.memory.put("data", FileSlice(str(source), 0, 64 * MIB), metadata={})
    sent: list[float] = []
    bucket.on_request = lambda method, _key: (
        sent.append(trio.current_time()) if method == "upload_part" else None
    )
    node = running_node(bucket, tmp_path / "cache", offload=SlowDigests(1.0))
    async with node as user, trio.open_nursery() as nursery:
        reading = trio.CancelScope()

        async def read() -> None:
            handle = user.fs.file_io.open(await user.fs.resolve("data"), writable=False, pid=0)
            with reading:
                for place in range(256):  # all that was not read yet, here and there
                    await user.fs.file_io.read(handle, place * 37 % 256 * MIB // 4, MIB // 4)
                    await trio.sleep(0.1)
            await user.fs.file_io.release(handle)

        nursery.start_soon(read)
        await user.write("model", body(12))
        began = trio.current_time()
        await trio.sleep(20)
        assert 4 <= len(sent) <= 6
        reading.cancel()
        assert await user.drained() == "durable"
        assert trio.current_time() < began + 20 + 4 + 3
    assert bucket.shows()["model"] == body(12)
