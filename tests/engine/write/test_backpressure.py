"""Room on the local disk: closes slow down before its end, what begins is refused there, what was accepted is kept."""

from pathlib import Path

import pytest
import trio

from fusecache.disk.staging import StagingFile
from fusecache.model.errors import NoSpace
from fusecache.model.objects import MIB
from fusecache.policy.backoff import STANDSTILL_SECONDS
from tests.engine.durability.test_stopping import break_journal
from tests.engine.write.test_writing import kill, opened_by, program
from tests.support.node import Bucket, User, photograph, running_node

CACHE = 100 * MIB  # 70 MiB of staging, of which an eighth at most is a reserve
FILE = 10 * MIB


async def fill(user: User, stop: int) -> int:
    """Write files until staging holds `stop` bytes or the next one is refused; return how many were closed."""
    count = 0
    while user.fs.cache.statistics().staging_bytes + FILE <= stop:
        await user.write(f"file-{count}", bytes([count]) * FILE)
        count += 1
    return count


async def fill_to_the_end(user: User, names: list[str]) -> None:
    """Write files, noting the names of those that were closed."""
    for number in range(1000):
        await user.write(f"file-{number:02}", bytes(2 * MIB))
        names.append(f"file-{number:02}")


def high_water(user: User) -> int:
    """Bytes of staging above which closes wait."""
    return user.fs.cache.high_water_bytes()


# ---- slowing down


async def test_a_close_above_the_high_water_mark_waits_while_uploads_progress(
    bucket: Bucket, cache: Path
) -> None:
    async with running_node(bucket, cache, cache_bytes=CACHE) as user:
        bucket.takes_nothing = True
        count = await fill(user, high_water(user))
        closed = trio.Event()

        async def one_more() -> None:
            await user.write("one-more", bytes(FILE))
            closed.set()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(one_more)
            await trio.sleep(60)
            assert not closed.is_set()
            (waiting,) = user.fs.statistics()["closes_waiting"]["named"]
            assert waiting["path"] == "one-more"
            assert 59 <= waiting["seconds"] <= 60
            bucket.come_back()
            with trio.fail_after(120):
                await closed.wait()
        assert user.fs.statistics()["closes_waiting"]["files"] == 0
        assert await user.drained() == "durable"
    assert len(bucket.shows()) == count + 1


@pytest.mark.case(28)
async def test_without_progress_a_close_succeeds_in_the_end_and_nothing_is_lost(
    bucket: Bucket, cache: Path
) -> None:
    async with running_node(bucket, cache, cache_bytes=CACHE) as user:
        bucket.takes_nothing = True
        count = await fill(user, high_water(user))
        began = trio.current_time()
        await user.write("one-more", b"1" * FILE)
        assert STANDSTILL_SECONDS <= trio.current_time() - began < STANDSTILL_SECONDS + 10
        photograph(cache, cache.parent / "crashed")
        bucket.come_back()
        assert await user.drained() == "durable"
    assert len(bucket.shows()) == count + 1
    async with running_node(Bucket(), cache.parent / "crashed") as user:
        assert await user.read("one-more") == b"1" * FILE


async def test_reads_and_names_go_on_while_many_closes_wait(bucket: Bucket, cache: Path) -> None:
    bucket.memory.put_bytes("other", b"there")
    async with running_node(bucket, cache, cache_bytes=CACHE) as user:
        bucket.takes_nothing = True
        await fill(user, high_water(user))
        await user.write("full", bytes(FILE))
        async with trio.open_nursery() as nursery:
            for number in range(100):
                nursery.start_soon(user.write, f"small-{number}", b"1")
            await trio.sleep(1)
            with trio.fail_after(5):
                assert await user.read("other") == b"there"
                assert await user.read("file-0") == bytes(FILE)
                await user.rename("file-0", "renamed")
            bucket.come_back()
        assert await user.drained() == "durable"


async def test_what_others_wait_for_is_not_behind_a_close_that_waits(bucket: Bucket, cache: Path) -> None:
    """Else uploads would wait for the close, and the close for the uploads."""
    async with running_node(bucket, cache, cache_bytes=CACHE) as user:
        bucket.takes_nothing = True
        await fill(user, high_water(user))
        async with trio.open_nursery() as nursery:
            nursery.start_soon(user.write, "waits", bytes(FILE))
            await trio.sleep(5)
            bucket.come_back()
            await trio.sleep(100)
        assert await user.drained() == "durable"


async def test_a_close_that_no_upload_would_make_room_for_does_not_wait(bucket: Bucket, cache: Path) -> None:
    async with running_node(bucket, cache, cache_bytes=CACHE) as user:
        handle = await user.open("large")
        for offset in range(0, 60 * MIB, 4 * MIB):
            await user.fs.file_io.write(handle, offset, bytes(4 * MIB))
        with trio.fail_after(1):
            await user.close(handle)
        assert await user.drained() == "durable"


async def test_a_close_does_not_wait_for_removals_that_are_put_off(bucket: Bucket, cache: Path) -> None:
    async with running_node(bucket, cache, cache_bytes=CACHE, delete_delay=3600.0) as user:
        await user.write("old", b"1")
        assert await user.drained() == "durable"
        await user.unlink("old")
        handle = await user.open("large")
        for start in range(0, high_water(user) + FILE, FILE):
            await user.fs.file_io.write(handle, start, bytes(FILE))
        with trio.fail_after(5):
            await user.close(handle)


async def test_a_killed_writer_does_not_wait_in_its_last_close(bucket: Bucket, cache: Path) -> None:
    async with running_node(bucket, cache, cache_bytes=CACHE) as user:
        bucket.takes_nothing = True
        await fill(user, high_water(user))
        await user.write("file", b"1")
        with program() as process:
            handle = await opened_by(user, process, "file")
            for offset in range(0, FILE, MIB):
                await user.fs.file_io.write(handle, offset, bytes(MIB))
            kill(process)
            with trio.fail_after(5):
                await user.close(handle)
        assert await user.read("file") == b"1"
        bucket.come_back()
        assert await user.drained() == "durable"


# ---- the limit


@pytest.mark.case(28)
async def test_at_the_limit_what_begins_is_refused_and_what_was_begun_goes_on(
    bucket: Bucket, cache: Path
) -> None:
    async with running_node(bucket, cache, cache_bytes=CACHE) as user:
        await user.write("old", b"old")
        assert await user.drained() == "durable"
        begun = await user.open("begun")
        bucket.takes_nothing = True
        names: list[str] = []
        with pytest.raises(NoSpace):
            await fill_to_the_end(user, names)
        for call in (
            lambda: user.open("new"),
            lambda: user.open("old", truncate=False),
            lambda: user.fs.file_io.truncate(begun.node, FILE),
        ):
            with trio.fail_after(1), pytest.raises(NoSpace):
                await call()
        # The kernel had accepted these.
        await user.fs.file_io.write(begun, 0, bytes(MIB))
        await user.close(begun)
        bucket.come_back()
        assert await user.drained() == "durable"
        await user.write("new", b"1")
        assert await user.drained() == "durable"
    assert set(bucket.shows()) == {"old", "begun", "new", *names}


async def test_what_is_written_leaves_a_share_to_what_was_read(bucket: Bucket, cache: Path) -> None:
    """One checkpoint must not evict the data set."""
    data = {f"data-{number}": bytes([number]) * (4 * MIB) for number in range(7)}
    for key, value in data.items():
        bucket.memory.put_bytes(key, value)
    async with running_node(bucket, cache, cache_bytes=CACHE, buffer_bytes=24 * MIB) as user:
        for key in data:
            await user.read(key)
        await trio.sleep(5)
        kept = user.fs.cache.statistics().used_bytes
        assert kept >= sum(map(len, data.values()))
        bucket.takes_nothing = True
        with pytest.raises(NoSpace):
            await fill_to_the_end(user, [])
        assert user.fs.cache.statistics().used_bytes == kept
        bucket.come_back()
        assert await user.drained() == "durable"


# ---- the disk itself


@pytest.mark.case(33)
@pytest.mark.case(55)
async def test_a_file_that_the_disk_had_no_room_for_is_never_published_however_often_it_is_closed(
    bucket: Bucket, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel tells of a failed write at the first close, without a FLUSH; the second comes with one."""
    bucket.memory.put_bytes("file", b"old")
    async with running_node(bucket, cache) as user:
        handle = await user.open("file")
        await user.fs.file_io.write(handle, 0, b"first")

        def full(*_: object) -> None:
            raise NoSpace("the disk is full")

        with monkeypatch.context() as patch:
            patch.setattr(StagingFile, "write", full)
            with pytest.raises(NoSpace):
                await user.fs.file_io.write(handle, 5, b"lost")
        with pytest.raises(NoSpace):
            await user.fs.file_io.write(handle, 9, b"after it")
        for _ in range(2):
            with pytest.raises(NoSpace):
                await user.fs.close_protocol.flush(handle)
        await user.fs.file_io.release(handle)
        assert await user.drained() == "durable"
        assert await user.read("file") == b"old"
    assert bucket.shows() == {"file": b"old"}


async def test_an_fsync_of_such_a_file_tells_it_too(
    bucket: Bucket, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running_node(bucket, cache) as user:
        handle = await user.open("file")

        def full(*_: object) -> None:
            raise NoSpace("the disk is full")

        with monkeypatch.context() as patch:
            patch.setattr(StagingFile, "write", full)
            with pytest.raises(NoSpace):
                await user.fs.file_io.write(handle, 0, b"lost")
        with pytest.raises(NoSpace):
            await user.fs.fsync(handle)
        with pytest.raises(NoSpace):
            await user.close(handle)
        assert await user.drained() == "durable"
    assert bucket.requests == []


async def test_an_upload_that_is_only_tried_again_fails_no_close_that_wrote_nothing(
    bucket: Bucket, cache: Path
) -> None:
    async with running_node(bucket, cache) as user:
        bucket.takes_nothing = True
        await user.write("file", b"1")
        await trio.sleep(10)
        handle = user.fs.file_io.open(await user.fs.resolve("file"), writable=True, pid=0)
        await user.fs.fsync(handle)
        await user.close(handle)
        bucket.come_back()
        assert await user.drained() == "durable"


@pytest.mark.case(33)
async def test_a_rename_that_the_journal_has_no_room_for_says_so_and_reads_go_on(
    bucket: Bucket, cache: Path, tmp_path: Path
) -> None:
    bucket.memory.put_bytes("other", b"there")
    async with running_node(bucket, cache, settle_seconds=30.0) as user:
        await user.write("file", b"1")
        break_journal(user)
        for call in (user.rename("file", "renamed"), user.rename("other", "another"), user.mkdir("folder")):
            with pytest.raises(NoSpace):
                await call
        with pytest.raises(NoSpace):
            await user.write("new", b"2")
        assert await user.read("other") == b"there"
        photograph(cache, tmp_path / "after")
    async with running_node(bucket, tmp_path / "after") as user:
        assert await user.drained() == "durable"
        assert await user.read("file") == b"1"
    assert bucket.shows() == {"file": b"1", "other": b"there"}
