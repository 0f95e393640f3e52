"""What a program wrote and closed is what the bucket shows, whatever moves meanwhile; what it did not, never."""

import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import trio

from fusecache.disk.staging import StagingFile, digests
from fusecache.engine.namespace.nodes import FileHandle, attributes_of
from fusecache.model.errors import NoSpace, NotFound, Refused, Unavailable
from fusecache.model.objects import MIB
from tests.support.faulty_store import Fault, FaultyStore
from tests.support.inline_offload import InlineOffload
from tests.support.node import Bucket, User, photograph, running_node

LARGE = 5 * MIB  # two parts


async def write(user: User, handle: FileHandle, data: bytes, offset: int = 0) -> None:
    """Write into an open file."""
    await user.fs.file_io.write(handle, offset, data)


async def close_a_copy(user: User, handle: FileHandle) -> None:
    """close(2) of a descriptor that dup(2) or fork(2) made: the file stays open."""
    await user.fs.close_protocol.flush(handle)


async def assert_nothing_is_left(user: User, cache: Path) -> None:
    """No bytes, no file and no node of something that was removed."""
    await user.drained()
    await trio.sleep(5)
    assert user.fs.cache.statistics().staging_bytes == 0
    assert list((cache / "staging").iterdir()) == []
    assert list(user.fs.tree.nodes.values()) == [user.fs.tree.root]


# ---- the version that a new one replaces


async def test_a_file_renamed_while_it_is_written_replaces_what_was_published_meanwhile(
    bucket: Bucket, cache: Path
) -> None:
    """So do all libraries that write a temporary file and rename it before they close it."""
    async with running_node(bucket, cache) as user:
        await user.write("model", b"one")
        handle = await user.open("other")
        await write(user, handle, b"two")
        await user.rename("other", "model")
        await trio.sleep(10)
        assert bucket.shows() == {"model": b"one"}
        await write(user, handle, b"+", offset=3)
        await user.close(handle)
        assert await user.drained() == "durable"
    assert bucket.shows() == {"model": b"two+"}


async def test_a_file_renamed_while_it_is_written_replaces_what_a_rename_brought_there(
    bucket: Bucket, cache: Path
) -> None:
    bucket.memory.put_bytes("published", b"old")
    async with running_node(bucket, cache) as user:
        await user.rename("published", "model")
        handle = await user.open("other")
        await write(user, handle, b"new")
        await user.rename("other", "model")
        await trio.sleep(10)
        await user.close(handle)
        assert await user.drained() == "durable"
    assert bucket.shows() == {"model": b"new"}


async def test_saves_in_a_row_into_a_slow_bucket_are_no_conflicts(bucket: Bucket, cache: Path) -> None:
    async with running_node(bucket, cache) as user:
        for number in range(3):
            bucket.takes_nothing = True
            handle = await user.open("other")
            await write(user, handle, b"%d" % number)
            await user.rename("other", "model")
            if number:
                bucket.come_back()
                await trio.sleep(70)
            await user.close(handle)
            await trio.sleep(2)
        bucket.come_back()
        assert await user.drained() == "durable"
    assert bucket.shows() == {"model": b"2"}


async def test_a_file_held_open_and_renamed_is_published_under_its_new_name_only(
    bucket: Bucket, cache: Path
) -> None:
    bucket.memory.put_bytes("model", b"old")
    async with running_node(bucket, cache) as user:
        handle = await user.open("model", truncate=False)
        await write(user, handle, b"new")
        await close_a_copy(user, handle)
        await trio.sleep(3)
        await user.rename("model", "renamed")
        await trio.sleep(3)
        await user.close(handle)
        assert await user.drained() == "durable"
    assert bucket.shows() == {"renamed": b"new"}


async def test_a_rewrite_held_open_while_the_version_before_it_is_published_is_no_conflict(
    bucket: Bucket, cache: Path
) -> None:
    async with running_node(bucket, cache) as user:
        bucket.takes_nothing = True
        await user.write("model", b"one")
        await trio.sleep(3)
        handle = await user.open("model", truncate=False)
        await write(user, handle, b"two")
        await close_a_copy(user, handle)
        await trio.sleep(3)
        bucket.come_back()
        await trio.sleep(30)
        assert bucket.shows() == {"model": b"one"}
        await user.close(handle)
        assert await user.drained() == "durable"
    assert bucket.shows() == {"model": b"two"}


async def test_a_file_begun_before_the_one_that_it_replaces_is_published_after_it(
    bucket: Bucket, cache: Path
) -> None:
    async with running_node(bucket, cache) as user:
        handle = await user.open("other")
        await write(user, handle, b"newer")
        await close_a_copy(user, handle)
        await trio.sleep(3)
        bucket.takes_nothing = True
        await user.write("model", b"older")
        await user.rename("other", "model")
        await user.close(handle)
        bucket.come_back()
        assert await user.drained() == "durable"
        assert await user.read("model") == b"newer"
    assert bucket.shows() == {"model": b"newer"}


async def test_what_is_replaced_before_its_turn_passes_on_what_the_bucket_shows(
    bucket: Bucket, cache: Path
) -> None:
    bucket.memory.put_bytes("model", b"old")
    async with running_node(bucket, cache) as user:
        handle = await user.open("model")
        await write(user, handle, b"never seen")
        await close_a_copy(user, handle)
        await user.write("other", b"new")
        await user.rename("other", "model")
        await user.fs.file_io.release(handle)
        assert await user.drained() == "durable"
    assert bucket.shows() == {"model": b"new"}


# ---- rewritten again and again


class SlowUploads(InlineOffload):
    """Each request that writes takes so many seconds, and cannot be cancelled, as a thread cannot."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    async def upload(self, call, *args):
        with trio.CancelScope(shield=True):
            await trio.sleep(0 if call is digests else self._seconds)
        return call(*args)


@pytest.mark.parametrize(
    ("size", "pause", "upload"), [(2 * MIB, 0.3, 0.0), (LARGE, 10.0, 8.0)], ids=["small", "large and slow"]
)
async def test_a_file_appended_to_without_end_holds_no_other_file_back(
    bucket: Bucket, cache: Path, size: int, pause: float, upload: float
) -> None:
    async with running_node(bucket, cache, offload=SlowUploads(upload)) as user:

        async def append() -> None:
            at = size
            while True:
                await trio.sleep(pause)
                handle = await user.open("log", truncate=False)
                await write(user, handle, b"x", offset=at)
                await user.close(handle)
                at += 1

        await user.write("log", bytes(size))
        async with trio.open_nursery() as nursery:
            nursery.start_soon(append)
            await trio.sleep(1)
            await user.write("checkpoint", b"important")
            await trio.sleep(120)
            nursery.cancel_scope.cancel()
        assert bucket.shows()["checkpoint"] == b"important"
        assert len(bucket.shows()["log"]) >= size


# ---- writers that are killed


@contextmanager
def program() -> Iterator["subprocess.Popen[bytes]"]:
    """Run a process that may be killed."""
    with subprocess.Popen(["sleep", "600"]) as process:
        try:
            yield process
        finally:
            process.kill()


def kill(process: "subprocess.Popen[bytes]") -> None:
    """Kill it, but do not collect it: so it looks when the kernel closes its files."""
    process.send_signal(signal.SIGKILL)
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)


async def opened_by(user: User, process: "subprocess.Popen[bytes]", path: str) -> FileHandle:
    """Open a file for writing as a process does."""
    return user.fs.file_io.open(await user.fs.resolve(path), writable=True, pid=process.pid)


async def test_a_killed_writer_leaves_what_was_closed_before_it(bucket: Bucket, cache: Path) -> None:
    async with running_node(bucket, cache) as user:
        bucket.takes_nothing = True
        await user.write("file", b"closed")
        with program() as killed:
            handle = await opened_by(user, killed, "file")
            await write(user, handle, b"half")
            kill(killed)
            await user.close(handle)
        assert await user.read("file") == b"closed"
        bucket.come_back()
        assert await user.drained() == "durable"
        assert await user.read("file") == b"closed"
    assert bucket.shows() == {"file": b"closed"}


async def test_a_killed_process_that_wrote_nothing_spoils_nothing(bucket: Bucket, cache: Path) -> None:
    async with running_node(bucket, cache) as user:
        writer = await user.open("file")
        with program() as killed:
            bystander = await opened_by(user, killed, "file")
            await write(user, writer, b"all of it")
            await user.close(writer)
            kill(killed)
            await user.close(bystander)
        assert await user.drained() == "durable"
    assert bucket.shows() == {"file": b"all of it"}


async def test_a_child_that_closes_after_its_killed_parent_publishes_nothing(
    bucket: Bucket, cache: Path
) -> None:
    """The inherited descriptor is the same open file: that the parent did not finish it stays true."""
    bucket.memory.put_bytes("file", b"old")
    async with running_node(bucket, cache) as user:
        with program() as parent:
            handle = await opened_by(user, parent, "file")
            await user.fs.file_io.truncate(handle.node, 0)
            await write(user, handle, b"half")
            kill(parent)
            await close_a_copy(user, handle)
        await user.close(handle)  # the parent is collected by now
        assert await user.drained() == "durable"
        assert await user.read("file") == b"old"
    assert bucket.shows() == {"file": b"old"}


async def test_after_a_write_that_failed_the_file_has_another_inode(bucket: Bucket, cache: Path) -> None:
    """The kernel caches the lost bytes under the old one."""
    bucket.memory.put_bytes("file", b"old")
    store = FaultyStore(bucket)
    async with running_node(store, cache) as user:
        with program() as writer:
            handle = await opened_by(user, writer, "file")
            handle.node.lookups += 1  # the kernel goes on to know it
            store.script(Fault(Unavailable("no route"), "get_into", times=None))
            with pytest.raises(Unavailable):
                await write(user, handle, b"lost")
            store.heal()
            with pytest.raises(Unavailable):
                await user.close(handle)
        assert (await user.fs.resolve("file")).number != handle.node.number
        assert await user.read("file") == b"old"
        assert await user.drained() == "durable"
    assert bucket.shows() == {"file": b"old"}


# ---- files without a name


async def test_a_file_rewritten_after_its_unlink_leaves_nothing(bucket: Bucket, cache: Path) -> None:
    async with running_node(bucket, cache) as user:
        await user.write("file", bytes(MIB))
        handle = await user.open("file", truncate=False)
        await user.unlink("file")
        await write(user, handle, b"x")
        await user.close(handle)
        await assert_nothing_is_left(user, cache)
    assert bucket.shows() == {}


async def test_a_file_unlinked_published_and_rewritten_leaves_nothing(bucket: Bucket, cache: Path) -> None:
    async with running_node(bucket, cache) as user:
        bucket.takes_nothing = True
        await user.write("file", bytes(MIB))
        await trio.sleep(3)
        handle = await user.open("file", truncate=False)
        await user.unlink("file")
        bucket.come_back()
        await trio.sleep(60)
        await write(user, handle, b"x")
        await user.close(handle)
        await assert_nothing_is_left(user, cache)
    assert bucket.shows() == {}


async def test_an_unlinked_file_that_is_still_open_does_not_come_back_after_a_crash(
    bucket: Bucket, cache: Path, tmp_path: Path
) -> None:
    """fchmod(2) and futimens(2) write rows of the journal; fsync(2) does too."""
    async with running_node(bucket, cache, settle_seconds=100.0) as user:
        await user.write("file", b"secret")
        handle = await user.open("file", truncate=False)
        await user.unlink("file")
        node = handle.node
        user.fs.file_io.set_attributes(node, replace(attributes_of(node), mtime_ns=1))
        await user.fs.close_protocol.fsync(handle)
        await trio.sleep(1)
        photograph(cache, tmp_path / "crashed")
        await user.close(handle)
    async with running_node(bucket, tmp_path / "crashed") as user:
        await user.drained()
        assert await user.tree() == {}
    assert bucket.shows() == {}


async def test_a_file_unlinked_while_the_bucket_refuses_it_does_not_come_back(
    bucket: Bucket, cache: Path
) -> None:
    store = FaultyStore(bucket, Fault(Unavailable("no answer"), "put", times=2))
    store.script(Fault(Refused("policy"), "put", times=None))
    async with running_node(store, cache) as user:
        await user.write("file", b"1")
        with trio.fail_after(60):
            while not store.calls("put"):  # noqa: ASYNC110  # a store has no events
                await trio.sleep(0.01)
        await user.unlink("file")
        assert await user.drained() == "durable"
        assert await user.tree() == {}
    async with running_node(bucket, cache) as user:
        assert await user.tree() == {}
        assert user.fs.statistics()["rejected"] == []
    assert bucket.shows() == {}


async def test_a_file_unlinked_while_a_part_is_refused_harms_nobody(bucket: Bucket, cache: Path) -> None:
    store = FaultyStore(bucket, Fault(Refused("no parts"), "upload_part", times=None))
    async with running_node(store, cache, offload=SlowUploads(5.0)) as user:
        await user.write("large", bytes(LARGE))
        await trio.sleep(8)
        assert store.calls("create_multipart")
        assert not store.calls("upload_part")  # it is on its way
        await user.unlink("large")
        await user.write("other", b"1")
        assert await user.drained() == "durable"
        await trio.sleep(30)
        assert list((cache / "staging").iterdir()) == []
    assert bucket.shows() == {"other": b"1"}
    assert bucket.memory.uploads() == ()


# ---- writes that fail


async def test_after_a_failed_first_write_all_fail_until_the_close_and_nothing_is_published(
    bucket: Bucket, cache: Path
) -> None:
    """What came after the lost bytes must not be published without them."""
    bucket.memory.put_bytes("file", bytes(MIB))
    store = FaultyStore(bucket)
    async with running_node(store, cache) as user:
        handle = await user.open("file", truncate=False)
        store.script(Fault(Unavailable("no route"), "get_into", times=None))
        with pytest.raises(Unavailable):
            await write(user, handle, b"first")
        store.heal()
        with pytest.raises(Unavailable):
            await write(user, handle, b"second", offset=4096)
        with pytest.raises(Unavailable):
            await user.close(handle)
        assert await user.drained() == "durable"
        assert bucket.shows() == {"file": bytes(MIB)}
        again = await user.open("file", truncate=False)
        await write(user, again, b"third")
        await user.close(again)
        assert await user.drained() == "durable"
    assert bucket.shows() == {"file": b"third" + bytes(MIB - 5)}


async def test_fsync_of_a_closed_file_brings_its_bytes_to_the_disk(
    bucket: Bucket, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As programs do that close a file, open it again for reading, and fsync(2) that."""
    synced: list[str] = []
    sync = StagingFile.sync_data

    def noted(file: StagingFile) -> None:
        synced.append(file.path.name)
        sync(file)

    monkeypatch.setattr(StagingFile, "sync_data", noted)
    async with running_node(bucket, cache, settle_seconds=30.0) as user:
        await user.write("file", b"1")
        assert synced == []
        handle = user.fs.file_io.open(await user.fs.resolve("file"), writable=False, pid=0)
        await user.fs.close_protocol.fsync(handle)
        assert len(synced) == 1
        await user.fs.file_io.release(handle)


async def test_bytes_that_the_disk_did_not_keep_are_not_published_and_hold_nobody_back(
    bucket: Bucket, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sync, failures = StagingFile.sync_data, [NoSpace("fdatasync: no space left")]

    def failing_once(file: StagingFile) -> None:
        if failures:
            raise failures.pop()
        sync(file)

    monkeypatch.setattr(StagingFile, "sync_data", failing_once)
    async with running_node(bucket, cache) as user:
        await user.write("broken", b"1")
        assert await user.drained() == "error"
        assert [each["path"] for each in user.fs.statistics()["rejected"]] == ["broken"]
        await user.write("good", b"2")
        assert (await user.fs.wait_durable("good", 600)).result == "durable"
    assert bucket.shows() == {"good": b"2"}


async def test_an_unlinked_file_can_be_written_and_read_until_it_is_closed(
    bucket: Bucket, cache: Path
) -> None:
    bucket.memory.put_bytes("file", b"published")
    async with running_node(bucket, cache) as user:
        handle = await user.open("file", truncate=False)
        await user.unlink("file")
        await write(user, handle, b"P")
        assert bytes(await user.fs.file_io.read(handle, 0, 100)) == b"Published"
        with pytest.raises(NotFound):
            await user.fs.resolve("file")
        await user.close(handle)
        await assert_nothing_is_left(user, cache)
    assert bucket.shows() == {}


@pytest.mark.parametrize("state", ["queued", "published"])
async def test_a_file_that_is_removed_while_it_is_cut_is_gone(
    bucket: Bucket, cache: Path, state: str
) -> None:
    """truncate(2) has no handle, and copies what it keeps."""

    class SlowDisk(InlineOffload):
        async def disk(self, call, *args):  # type: ignore[no-untyped-def,override]
            if call.__name__ == "copy_from" or (call.__name__ == "write" and state == "published"):
                await trio.sleep(5)
            return await super().disk(call, *args)

    async with running_node(bucket, cache, offload=SlowDisk()) as user:
        bucket.takes_nothing = state == "queued"
        await user.write("file", b"content")
        if state == "published":
            assert await user.drained() == "durable"
            user.fs.file_io._writer._inline_gate.is_quick = lambda: False  # type: ignore[method-assign]
        node = await user.fs.resolve("file")
        async with trio.open_nursery() as nursery:

            async def cut() -> None:
                with pytest.raises(NotFound, match="was removed while it was opened"):
                    await user.fs.file_io.truncate(node, 3)

            nursery.start_soon(cut)
            await trio.sleep(1)
            await user.unlink("file")
        bucket.come_back()
        assert await user.drained() == "durable"
        assert await user.tree() == {}
    assert bucket.shows() == {}
    assert not list((cache / "staging").iterdir())
