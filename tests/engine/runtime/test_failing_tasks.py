"""A bug in a child task of the engine: exactly its waiters get the error, and the mount goes on."""

import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import trio

from fusecache.disk.cache_files import CacheFiles
from fusecache.disk.staging import StagingFile
from fusecache.engine.admin.warmup import WarmupRunner, WarmupState
from fusecache.engine.cache.adoption import Adoption
from fusecache.engine.cache.block_table import BlockTable
from fusecache.engine.cache.chunks import Fetch
from fusecache.engine.cache.disk_tier import DiskTier
from fusecache.engine.cache.evictor import Evictor
from fusecache.engine.cache.fetcher import FetchTasks
from fusecache.engine.cache.maintenance import CacheMaintenance
from fusecache.engine.cache.readahead import PrefetchRange, Readahead
from fusecache.engine.namespace import lister
from fusecache.engine.namespace.lister import Lister
from fusecache.engine.namespace.lookup import Lookup
from fusecache.engine.publish import preparer
from fusecache.engine.publish.multipart_uploader import MultipartAborts, MultipartUploader
from fusecache.engine.publish.preparer import Preparer
from fusecache.engine.publish.publisher import Publisher
from fusecache.engine.publish.rejections import Rejections
from fusecache.engine.publish.results import PublishResults
from fusecache.engine.publish.retirement import Retirement
from fusecache.index.cache_index import CacheIndex
from fusecache.index.listings import Listings
from fusecache.model.errors import FusecacheError, InternalError, LocalDiskError, Refused, Unavailable
from fusecache.model.hints import TO_THE_END
from fusecache.model.objects import MIB
from tests.engine.prefetch.test_hints import fill as fill_shards
from tests.engine.prefetch.test_hints import plan
from tests.engine.publish.test_multipart_uploader import SlowSyncs
from tests.engine.runtime.test_failing_services import LARGE, check_works, failures
from tests.support.block_caches import some_bytes
from tests.support.faulty_store import Fault, FaultyStore
from tests.support.memory_store import MemoryStore
from tests.support.mistakes import Mistake, MistakeIn
from tests.support.node import Bucket, User, running_node

# Three parts of the cache's disk and of an upload.
DATA = some_bytes(24 * MIB)
Act = Callable[[User, Bucket, MistakeIn], Awaitable[None]]


def fails(about: str) -> Any:
    """Expect the error that names the failed task."""
    return pytest.raises(InternalError, match=f"^{about}: unexpected error in the daemon: Mistake")


async def empty_buffers(user: User) -> None:
    """Keep what was read on the disk alone."""
    await trio.sleep(5)
    await user.fs.cache.maintenance._empty_buffers(lambda _key: True)


# ---- reads


async def fail_get(user: User, bucket: Bucket, mistake: MistakeIn) -> None:
    mistake.times = 1
    with fails("cache-get theirs"):
        await user.read("theirs")
    assert await user.read("theirs") == DATA


async def fail_pause(user: User, bucket: Bucket, mistake: MistakeIn) -> None:
    mistake.times = 1
    with fails("fetch-pause"):
        await user.read("theirs")
    assert await user.read("theirs") == DATA


async def fail_load(user: User, bucket: Bucket, mistake: MistakeIn) -> None:
    assert await user.read("theirs") == DATA
    await empty_buffers(user)
    mistake.times = 1
    with fails("cache-load theirs"):
        await user.read("theirs")
    assert await user.read("theirs") == DATA


async def fail_store(user: User, bucket: Bucket, mistake: MistakeIn) -> None:
    """A block that could not be written to the cache still reaches its reader."""
    mistake.times = 1
    assert await user.read("theirs") == DATA
    await empty_buffers(user)
    assert await user.read("theirs") == DATA


async def fail_eviction(user: User, bucket: Bucket, mistake: MistakeIn) -> None:
    assert await user.read("theirs") == DATA
    mistake.times = 1
    with fails("cache-eviction"):
        await user.write("ours", bytes(16 * MIB))
    await user.write("again", bytes(4 * MIB))


async def fail_adoption(user: User, bucket: Bucket, mistake: MistakeIn) -> None:
    mistake.times = 1
    await user.write("ours", b"1" * (MIB + 5))
    assert await user.drained() == "durable"
    await trio.sleep(1)
    assert user.fs.cache.statistics().used_bytes == 0  # no block of it is cache
    assert not [
        path for path in (user.fs.options.directory / "cache" / "files").glob("*/*") if path.is_file()
    ]
    assert await user.read("ours") == b"1" * (MIB + 5)


async def fail_drop(user: User, bucket: Bucket, mistake: MistakeIn) -> None:
    assert await user.read("theirs") == DATA
    await trio.sleep(5)
    mistake.times = 1
    with fails("cache-drop"):
        await user.fs.inspector.evict(["theirs"])
    assert (await user.fs.inspector.evict(["theirs"])).freed_bytes == len(DATA)


async def fail_forget(user: User, bucket: Bucket, mistake: MistakeIn) -> None:
    mistake.times = 1
    for letter in (b"1", b"2", b"3"):
        await user.write("pinned", letter * MIB)
        assert await user.drained() == "durable"
        await trio.sleep(5)


async def fail_read_ahead(user: User, bucket: Bucket, mistake: MistakeIn) -> None:
    assert await user.read("theirs") == DATA
    await empty_buffers(user)
    mistake.times = 1
    assert await user.read("theirs") == DATA


async def fail_prefetch(user: User, bucket: Bucket, mistake: MistakeIn) -> None:
    version = bucket.memory.head("theirs")
    mistake.times = 1
    user.fs.cache.prefetch([PrefetchRange(version.object_id, version.size, MIB)])
    await trio.sleep(1)
    assert await user.read("theirs") == DATA


# ---- names


async def fail_probe(user: User, bucket: Bucket, mistake: MistakeIn) -> None:
    mistake.times = 1
    with fails("probe theirs"):
        await user.fs.resolve("theirs")
    assert (await user.fs.resolve("theirs")).size == len(DATA)


async def fail_listing(user: User, bucket: Bucket, mistake: MistakeIn) -> None:
    bucket.memory.put_bytes("directory/empty", b"")
    mistake.times = 1
    with fails("list directory"):
        await user.tree("directory")
    await trio.sleep(5)
    assert await user.tree("directory") == {"directory/empty": b""}


async def fail_page(user: User, bucket: Bucket, mistake: MistakeIn) -> None:
    bucket.memory.put_bytes("directory/file", b"1")
    await user.tree("directory")
    directory = await user.fs.resolve("directory")
    mistake.times = 1
    asked = user.fs.lookup.lister.refresh_pages(directory, "")
    while not asked.done:
        await asked.wait()
    with fails("list-page directory"):
        raise asked.failure or AssertionError("it succeeded")
    bucket.memory.put_bytes("directory/new", b"1")
    await trio.sleep(5)
    assert len(await user.tree("directory")) == 2


# ---- warm-ups and hints


async def fail_warmup(user: User, bucket: Bucket, mistake: MistakeIn) -> None:
    mistake.times = 1
    job = user.fs.warmup.start(["theirs"])
    await job.ended.wait()
    assert job.state is WarmupState.FAILED
    assert "unexpected error" in job.message
    job = user.fs.warmup.start(["theirs"])
    await job.ended.wait()
    assert job.state is WarmupState.DONE


async def fail_warm_piece(user: User, bucket: Bucket, mistake: MistakeIn) -> None:
    for name in ("a", "b", "c"):
        bucket.memory.put_bytes(f"data/{name}", b"1")
    mistake.times = 1
    job = user.fs.warmup.start(["data"])
    await job.ended.wait()
    assert (job.files_done, job.files_failed) == (2, 1)
    assert "unexpected error" in job.failures[0]


async def fail_hinted(user: User, bucket: Bucket, mistake: MistakeIn) -> None:
    fill_shards(bucket, 3, MIB)
    mistake.times = 1
    rows = [(shard, 0, TO_THE_END, shard, 0) for shard in range(3)]
    await user.fs.hints.receive("job.plan", plan(3, rows))
    await trio.sleep(10)
    assert user.fs.hints.as_dict("job")["skipped"] == 1
    assert user.fs.cache.statistics().used_bytes == 2 * MIB


# ---- uploads


async def fail_write(user: User, bucket: Bucket, mistake: MistakeIn) -> None:
    """The change keeps its place, and is retried."""
    mistake.times = 1
    await user.write("ours", b"1")
    await user.write("_SUCCESS", b"ours")
    assert await user.drained() == "durable"
    assert bucket.shows()["ours"] == b"1"
    assert all("ours" in state for state in bucket.states if "_SUCCESS" in state)


async def fail_preparation(user: User, bucket: Bucket, mistake: MistakeIn) -> None:
    """What was not synced is not published."""
    mistake.times = 1
    await user.write("ours", b"1")
    assert await user.drained() == "durable"
    assert mistake.calls == 2


async def fail_medium_write(user: User, bucket: Bucket, mistake: MistakeIn) -> None:
    mistake.times = 1
    await user.write("ours", b"1" * (3 * MIB))
    assert await user.drained() == "durable"
    assert mistake.calls == 2
    assert bucket.shows()["ours"] == b"1" * (3 * MIB)


async def fail_large_write(user: User, bucket: Bucket, mistake: MistakeIn) -> None:
    mistake.times = 1
    await user.write("ours", LARGE)
    assert await user.drained() == "durable"
    assert mistake.calls > 1
    assert bucket.shows()["ours"] == LARGE
    await trio.sleep(60)
    assert bucket.memory.uploads() == ()


async def fail_early_part(user: User, bucket: Bucket, mistake: MistakeIn) -> None:
    """The upload of an open file starts again after the close."""
    mistake.times = 1
    handle = await user.open("ours")
    for start in range(0, len(DATA), MIB):
        await user.fs.file_io.write(handle, start, DATA[start : start + MIB])
        await trio.sleep(0.5)
    assert mistake.times == 0
    await user.close(handle)
    assert await user.drained() == "durable"
    assert bucket.shows()["ours"] == DATA
    await trio.sleep(60)
    assert bucket.memory.uploads() == ()


async def fail_rename(user: User, bucket: Bucket, mistake: MistakeIn) -> None:
    await user.write("ours", b"1")
    assert await user.drained() == "durable"
    mistake.times = 1
    await user.rename("ours", "moved")
    await user.write("ours", b"2")
    assert await user.drained() == "durable"
    shown = bucket.shows()
    assert (shown["ours"], shown["moved"]) == (b"2", b"1")


async def fail_retry(user: User, bucket: Bucket, mistake: MistakeIn) -> None:
    """Even the handling of a failure fails."""
    bucket.takes_nothing = True
    await user.write("ours", b"1")
    mistake.times = 1
    await trio.sleep(10)
    bucket.come_back()
    assert await user.drained() == "durable"
    assert bucket.shows()["ours"] == b"1"


async def fail_rejection(user: User, bucket: Bucket, mistake: MistakeIn) -> None:
    """The bucket refuses a file: it is kept, though that failed at first."""
    mistake.times = 1
    await user.write("refused", b"1")
    with trio.fail_after(600):
        assert (await user.fs.wait_durable("refused", None)).result == "error"
    assert await user.read("refused") == b"1"
    await user.unlink("refused")


def refusing(bucket: Bucket) -> Any:
    return FaultyStore(bucket, Fault(Refused("never"), method="put", key="refused", times=None))


def resetting(bucket: Bucket) -> Any:
    return FaultyStore(bucket, Fault(Unavailable("reset"), method="get_into"))


@dataclass(frozen=True, slots=True)
class TaskCase:
    """A child task that fails: in which method, and what its waiters see."""

    task: str
    owner: Any
    method: str
    act: Act
    options: dict[str, Any] = field(default_factory=dict)
    store: Callable[[Bucket], Any] = lambda bucket: bucket

    @property
    def name(self) -> str:
        return f"{self.task}: {self.method}"


CASES = [
    TaskCase("cache-get", FetchTasks, "_get", fail_get),
    TaskCase("cache-get", Fetch, "begin_attempt", fail_get),
    TaskCase("fetch-pause", FetchTasks, "_requeue_after", fail_pause, store=resetting),
    TaskCase("cache-load", DiskTier, "load", fail_load),
    TaskCase("cache-write", DiskTier, "store", fail_store),
    TaskCase("cache-write", CacheFiles, "store", fail_store),
    TaskCase("cache-eviction", Evictor, "evict", fail_eviction, {"cache_bytes": 36 * MIB}),
    TaskCase("cache-adopt", Adoption, "_take_over", fail_adoption),
    TaskCase("cache-adopt", Adoption, "_link_all", fail_adoption),
    TaskCase("cache-adopt", CacheIndex, "apply", fail_adoption),
    TaskCase("cache-drop", Evictor, "_drop", fail_drop),
    TaskCase("cache-forget", DiskTier, "_forget", fail_forget, {"pin": ("pinned",)}),
    TaskCase("read-ahead", Readahead, "_run_unloaded", fail_read_ahead),
    TaskCase("prefetch-files", BlockTable, "load_objects", fail_prefetch),
    TaskCase("probe", Lookup, "_known_version", fail_probe),
    TaskCase("probe", Lookup, "_correct", fail_probe),
    TaskCase("list", Lister, "_store", fail_listing),
    TaskCase("list", lister, "fetch_page", fail_listing),
    TaskCase("list", lister, "_completed", fail_listing),
    TaskCase("list-page", Lister, "_replace_page", fail_page),
    TaskCase("warm-up", WarmupRunner, "_check_space", fail_warmup),
    TaskCase("warm-up", CacheMaintenance, "fill", fail_warm_piece),
    TaskCase("hinted-fetch", CacheMaintenance, "fill", fail_hinted),
    TaskCase("prepare-small", preparer, "sync_all", fail_write),
    TaskCase("prepare-small", preparer, "sync_all", fail_preparation),
    TaskCase("prepare-small", StagingFile, "checksums", fail_preparation),
    TaskCase("prepare-small", Preparer, "_on_synced", fail_preparation),
    TaskCase("prepare", preparer, "_sync_and_sum", fail_medium_write),
    TaskCase("prepare", Preparer, "_checksums", fail_large_write),
    TaskCase("prepare", MultipartUploader, "finish", fail_large_write),
    TaskCase("upload-create", MultipartUploader, "_send_request", fail_large_write),
    TaskCase("upload-part", MultipartUploader, "_digest", fail_large_write),
    TaskCase("upload-part", MultipartUploader, "_send_bytes", fail_large_write),
    TaskCase("upload-part", MultipartUploader, "_send_bytes", fail_early_part),
    TaskCase("publish-change", Publisher, "_attempt", fail_write),
    TaskCase("publish-change", Publisher, "_attempt", fail_rename),
    TaskCase("publish-change", Publisher, "_send", fail_large_write),
    TaskCase("publish-change", PublishResults, "stored", fail_write),
    TaskCase("publish-change", Publisher, "_retry_later", fail_retry),
    TaskCase("publish-change", Rejections, "handle_error", fail_rejection, store=refusing),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.name} {case.act.__name__}")
async def test_a_failed_task_fails_only_waiters(
    bucket: Bucket,
    cache: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    case: TaskCase,
) -> None:
    bucket.memory.put_bytes("theirs", DATA)
    mistake = MistakeIn(monkeypatch, case.owner, case.method)
    async with running_node(case.store(bucket), cache, **case.options) as user:
        await case.act(user, bucket, mistake)
        await check_works(user, bucket)
        assert mistake.times == 0
        assert failures(user) == {case.task: 1}
    errors = [record for record in caplog.records if record.levelno == logging.ERROR and record.exc_info]
    assert [f"task={case.task}" in record.getMessage() for record in errors] == [True]


async def test_half_a_get_fails_cleanly(bucket: Bucket, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The store fails in the middle of a body: no wrong byte is served, before or after."""
    real, cut = MemoryStore.get_into, [True]

    def half(store: Any, object_id: Any, extent: Any, buffer: Any, progress: Any, *more: Any) -> None:
        def counted(received: int) -> None:
            progress(received)
            if cut and received >= extent.size // 2:
                raise Mistake(f"after {received} bytes of {cut.pop()}")

        real(store, object_id, extent, buffer, counted, *more)

    monkeypatch.setattr(MemoryStore, "get_into", half)
    bucket.memory.put_bytes("theirs", DATA)
    async with running_node(bucket, cache) as user:
        with pytest.raises(InternalError):
            await user.read("theirs")
        assert await user.read("theirs") == DATA
        await empty_buffers(user)
        assert await user.read("theirs") == DATA
        await check_works(user, bucket)
        assert failures(user) == {"cache-get": 1}


async def test_a_failed_correction_hides_no_file(
    bucket: Bucket, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A row that was removed from a fresh listing, and not put back, does not mean that there is no such file."""
    for name in ("file", "other"):
        bucket.memory.put_bytes(f"directory/{name}", b"1")
    mistake = MistakeIn(monkeypatch, Listings, "put")
    async with running_node(bucket, cache, fresh_seconds=1000.0) as user:
        directory = await user.fs.resolve("directory")
        directory.lookups += 1
        await user.tree("directory")
        bucket.memory.put_bytes("directory/file", b"22")
        child = await user.fs.lookup.lookup(directory, "file")
        child.verified = float("-inf")  # as after a read that found another version
        mistake.times = 1
        with fails("probe directory/file"):
            await user.fs.lookup.lookup(directory, "file")
        user.fs.tree.forget(child.number, 0)
        assert (await user.fs.lookup.lookup(directory, "file")).size == 2
        assert len(await user.tree("directory")) == 2
        assert failures(user) == {"probe": 1}


async def test_other_readers_of_a_file_go_on(
    bucket: Bucket, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the readers whose bytes a failed request was to bring get the error."""
    bucket.memory.put_bytes("theirs", DATA)
    bucket.memory.put_bytes("other", DATA)
    mistake = MistakeIn(monkeypatch, FetchTasks, "_get")
    results: list[bytes | FusecacheError] = []

    async def read(user: User, path: str) -> None:
        try:
            results.append(await user.read(path))
        except FusecacheError as exc:
            results.append(exc)

    async with running_node(bucket, cache) as user:
        assert await user.fs.resolve("theirs")
        assert await user.fs.resolve("other")
        mistake.times = 1
        async with trio.open_nursery() as nursery:
            for path in ("theirs", "other"):
                nursery.start_soon(read, user, path)
        assert len(results) == 2
        assert [type(result) for result in results if result != DATA] == [InternalError]
        await check_works(user, bucket)


async def test_a_persistent_bug_rejects_one_file(
    bucket: Bucket, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After some retries the file is kept and reported, and the others are published."""
    real = Publisher._send

    async def faulty(publisher: Publisher, item: Any, *args: Any) -> Any:
        if item.changed_keys() == ("odd",):
            raise Mistake("in every attempt")
        return await real(publisher, item, *args)

    monkeypatch.setattr(Publisher, "_send", faulty)
    async with running_node(bucket, cache) as user:
        await user.write("odd", b"1")
        with trio.fail_after(600):
            durability = await user.fs.wait_durable("odd", None)
        assert (durability.result, "Mistake" in durability.message) == ("error", True)
        assert failures(user) == {"publish-change": 5}
        assert await user.read("odd") == b"1"
        await user.unlink("odd")
        await check_works(user, bucket)
    assert "odd" not in bucket.shows()


async def test_failing_failure_handling_backs_off(
    bucket: Bucket, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A refused file whose rejection fails is tried again, and ever more rarely."""
    mistake = MistakeIn(monkeypatch, Rejections, "handle_error", times=1_000_000)
    async with running_node(refusing(bucket), cache) as user:
        await user.write("refused", b"1")
        await trio.sleep(600)
        assert 10 <= failures(user)["publish-change"] <= 30
        mistake.times = 0
        with trio.fail_after(600):
            assert (await user.fs.wait_durable("refused", None)).result == "error"
        await user.unlink("refused")
        await check_works(user, bucket)


@pytest.mark.parametrize("method", ["_digest", "finish"])
async def test_a_failed_part_hides_no_failed_sync(
    bucket: Bucket, cache: Path, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    """The kernel reports a failed sync once: the file is rejected then, whatever else failed during that sync."""
    MistakeIn(monkeypatch, MultipartUploader, method, times=1)
    sync, failed = StagingFile.sync, [LocalDiskError("Input/output error")]

    def failing_once(file: StagingFile) -> None:
        if failed:
            raise failed.pop()
        sync(file)

    monkeypatch.setattr(StagingFile, "sync", failing_once)
    async with running_node(bucket, cache, offload=SlowSyncs()) as user:
        await user.write("ours", LARGE)
        with trio.fail_after(600):
            durability = await user.fs.wait_durable("", None)
        assert (durability.result, "Input/output error" in durability.message) == ("error", True)
    assert "ours" not in bucket.shows()


@pytest.mark.parametrize(
    ("owner", "method", "task"),
    [
        (Preparer, "_discard", "discard"),
        (Retirement, "_release", "retire"),
        (Adoption, "_take_over", "cache-adopt"),
        (MultipartAborts, "abort", "upload-abort"),
    ],
)
async def test_the_next_mount_cleans_up(
    bucket: Bucket, cache: Path, monkeypatch: pytest.MonkeyPatch, owner: Any, method: str, task: str
) -> None:
    """What a failed clean-up leaves is accounted for, and goes with the next mount."""
    mistake = MistakeIn(monkeypatch, owner, method)
    async with running_node(bucket, cache) as user:
        mistake.times = 1
        handle = await user.open("gone")
        for start in range(0, len(DATA), MIB):
            await user.fs.file_io.write(handle, start, DATA[start : start + MIB])
            await trio.sleep(0.5)
        await user.write("ours", b"1" * MIB)
        await user.unlink("gone")
        await user.close(handle)
        await check_works(user, bucket)
        assert failures(user) == {task: 1}
        staged = sum(path.stat().st_size for path in (cache / "staging").iterdir())
        assert user.fs.cache.statistics().staging_bytes == staged
    async with running_node(bucket, cache) as user:
        assert await user.drained() == "durable"
        await trio.sleep(60)
        assert user.fs.cache.statistics().staging_bytes == 0
        assert await user.read("ours") == b"1" * MIB
    assert list((cache / "staging").iterdir()) == []
    assert bucket.memory.uploads() == ()


async def test_a_failed_fsync_publishes_nothing(
    bucket: Bucket, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk may have the bytes or not: as after an error of the disk, they are kept aside."""
    mistake = MistakeIn(monkeypatch, StagingFile, "checksums")
    async with running_node(bucket, cache) as user:
        handle = await user.open("ours")
        await user.fs.file_io.write(handle, 0, b"1")
        mistake.times = 1
        with pytest.RaisesGroup(Mistake):
            await user.fs.close_protocol.fsync(handle)
        with pytest.raises(InternalError):
            await user.close(handle)
        await check_works(user, bucket)
    assert "ours" not in bucket.shows()
    assert [path.read_bytes() for path in (cache / "orphans").iterdir()] == [b"1"]
