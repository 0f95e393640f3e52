"""Many files of one directory fail, for now or permanently: the rest of the mount is still published."""

from pathlib import Path

import pytest
import trio

from fusecache.disk.staging import StagingFile
from fusecache.engine.namespace.nodes import FileVersion
from fusecache.engine.publish import multipart_uploader, preparer, schedule
from fusecache.model.errors import AccessDenied, LocalDiskError, Unavailable
from fusecache.model.objects import MIB
from tests.support.faulty_store import Fault, FaultyStore
from tests.support.node import Bucket, User, running_node

LARGE = 4 * MIB + 1


@pytest.fixture(autouse=True)
def few_places(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many files as can be stuck in a test are more than there are places."""
    for module, name in (
        (schedule, "CHANGES_AT_ONCE"),
        (preparer, "FILES_AHEAD"),
        (multipart_uploader, "PARTS_AT_ONCE"),
    ):
        monkeypatch.setattr(module, name, 4)


async def in_bucket(bucket: Bucket, key: str, seconds: float) -> None:
    """Return when the bucket shows a key. Raises trio.TooSlowError."""
    with trio.fail_after(seconds):
        while key not in bucket.shows():  # noqa: ASYNC110  # the store has no event for it
            await trio.sleep(0.5)


async def content(user: User, path: str) -> FileVersion:
    """Return the unpublished content of a file."""
    version = (await user.fs.resolve(path)).version
    assert version is not None
    return version


@pytest.mark.parametrize(
    ("request_", "size"), [("put", 1), ("create_multipart", LARGE), ("upload_part", LARGE)]
)
async def test_a_directory_that_is_refused_holds_none_of_another(
    bucket: Bucket, cache: Path, request_: str, size: int
) -> None:
    store = FaultyStore(bucket, Fault(AccessDenied("403"), request_, "bad/*", times=None))
    async with running_node(store, cache) as user:
        await user.mkdir("bad")
        await user.mkdir("good")
        for number in range(20):
            await user.write(f"bad/{number}", b"1" * size)
        await trio.sleep(100)
        await user.write("good/large", b"2" * LARGE)
        await user.write("good/small", b"2")
        await in_bucket(bucket, "good/small", 25)
        await in_bucket(bucket, "good/large", 25)
        before = len(store.calls(request_, "bad/*"))
        for number in range(100):
            await user.write(f"good/{number}", b"2")
            await trio.sleep(1)
        await in_bucket(bucket, "good/99", 25)
        # Of each one or two a minute, however often another succeeds.
        assert len(store.calls(request_, "bad/*")) - before < 20 * 8
        assert {key for key in bucket.shows() if key.startswith("bad/")} <= {"bad/"}
        store.heal()
        assert await user.drained(120) == "durable"
    assert bucket.memory.uploads() == ()


async def test_keys_that_are_refused_keep_their_pauses_while_others_are_accepted_now_and_then(
    bucket: Bucket, cache: Path
) -> None:
    """Each success must not count as the end of an outage: all of them would be tried again at once."""
    store = FaultyStore(bucket, Fault(AccessDenied("403"), "put", "bad/*", times=None))
    async with running_node(store, cache) as user:
        await user.mkdir("bad")
        for number in range(6):
            await user.write(f"bad/{number}", b"1")
        for number in range(90):
            await user.write(f"first-{number}", b"2")
            await trio.sleep(1)
        before = len(store.calls("put", "bad/*"))
        for number in range(24):
            await user.write(f"now-and-then-{number}", b"2")
            await trio.sleep(25)
        # In 10 minutes, of the six and of their directory.
        assert len(store.calls("put", "bad/*")) - before < 10 * 7 * 3
        store.heal()
        assert await user.drained(120) == "durable"


async def test_large_files_that_the_bucket_does_not_take_are_on_the_disk_all_the_same(
    bucket: Bucket, cache: Path
) -> None:
    async with running_node(bucket, cache) as user:
        bucket.takes_nothing = True
        for number in range(12):
            await user.write(f"{number}", b"1" * LARGE)
        await trio.sleep(30)
        assert all([(await content(user, f"{number}")).record.synced for number in range(12)])
        bucket.come_back()
        assert await user.drained() == "durable"


async def test_what_the_disk_did_not_take_before_its_turn_is_never_published(
    bucket: Bucket, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failed: list[StagingFile] = []
    sync = StagingFile.sync

    def fail_once(file: StagingFile) -> None:
        if file.size() == LARGE and not failed:
            failed.append(file)
            raise LocalDiskError("input/output error")
        sync(file)  # as if nothing had been lost: the kernel reports an error once

    monkeypatch.setattr(StagingFile, "sync", fail_once)
    store = FaultyStore(bucket)
    async with running_node(store, cache) as user:
        await user.write("pointer", b"old")
        assert await user.drained() == "durable"
        store.script(Fault(Unavailable("503"), "put", "pointer", times=None))
        await user.write("pointer", b"new")
        await user.write("large", b"1" * LARGE)
        await trio.sleep(130)
        assert failed
        store.heal()
        assert await user.drained() == "error"
    assert bucket.shows() == {"pointer": b"new"}


async def test_parts_that_failed_before_their_turn_are_sent_before_it_once_they_can_be(
    bucket: Bucket, cache: Path
) -> None:
    store = FaultyStore(bucket)
    async with running_node(store, cache) as user:
        await user.write("pointer", b"old")
        assert await user.drained() == "durable"
        store.script(Fault(Unavailable("503"), "create_multipart", times=None))
        store.script(Fault(Unavailable("503"), "put", "pointer", times=None))
        await user.write("pointer", b"new")
        for number in range(3):
            await user.write(f"large-{number}", b"1" * LARGE)
        await trio.sleep(60)
        assert bucket.sent("upload_part") == []
        store.heal(Fault(Unavailable("503"), "put", "pointer", times=None))
        await trio.sleep(80)
        assert sorted(bucket.sent("upload_part")) == [f"large-{n}" for n in range(3) for _ in range(2)]
        assert bucket.sent("complete_multipart") == []
        store.heal()
        assert await user.drained() == "durable"
    assert len(bucket.sent("upload_part")) == 6


@pytest.mark.parametrize("request_", ["create_multipart", "upload_part"])
async def test_parts_of_a_file_that_is_being_written_go_on_when_an_outage_is_over(
    bucket: Bucket, cache: Path, request_: str
) -> None:
    store = FaultyStore(
        bucket, Fault(Unavailable("503"), request_, times=None), Fault(Unavailable("503"), "put", times=None)
    )
    async with running_node(store, cache) as user:
        handle = await user.open("large")
        for start in range(0, 4 * LARGE, MIB):
            await user.fs.file_io.write(handle, start, b"1" * MIB)
            await trio.sleep(0.5)
        for number in range(40):  # enough that always one of them has not failed yet, and waits for no pause
            await user.write(f"small-{number}", b"1")
        await trio.sleep(200)
        failed = len(store.calls(request_))
        while len(store.calls(request_)) == failed:  # noqa: ASYNC110  # the store has no event for it
            await trio.sleep(0.1)
        store.heal()  # the upload pauses for 30 s or more from now on; the bucket is probed after 10 s at the latest
        await trio.sleep(15)
        assert bucket.sent("upload_part") != []
        await user.close(handle)
        assert await user.drained() == "durable"


async def test_in_an_outage_one_large_file_at_a_time_asks_whether_it_is_over(
    bucket: Bucket, cache: Path
) -> None:
    store = FaultyStore(bucket, Fault(Unavailable("503"), "create_multipart", times=None))
    async with running_node(store, cache) as user:
        for number in range(30):
            await user.write(f"{number}", b"1" * LARGE)
        await trio.sleep(300)  # each was tried
        before = len(store.calls("create_multipart"))
        await trio.sleep(600)
        # Every 10 s one file, with three attempts.
        assert len(store.calls("create_multipart")) - before <= 600 / 10 * 3
        store.heal()
        assert await user.drained() == "durable"


async def test_a_file_whose_parts_failed_while_it_was_written_is_no_failure_once_it_is_removed(
    bucket: Bucket, cache: Path
) -> None:
    store = FaultyStore(bucket, Fault(Unavailable("503"), "create_multipart", times=None))
    async with running_node(store, cache) as user:
        handle = await user.open("large")
        for start in range(0, 4 * LARGE, MIB):
            await user.fs.file_io.write(handle, start, b"1" * MIB)
            await trio.sleep(0.5)
        assert store.calls("create_multipart") != ()
        await user.unlink("large")
        await user.close(handle)
        assert await user.drained() == "durable"
        assert user.fs.publisher.failure is None
