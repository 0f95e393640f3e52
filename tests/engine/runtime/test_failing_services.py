"""A bug in a service of the engine: it starts again, and the mount goes on."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import trio

from fusecache.engine.admin.pinning import PinnedObjects
from fusecache.engine.cache.block_cache import BlockCache
from fusecache.engine.cache.block_table import BlockTable
from fusecache.engine.cache.evictor import DiskSpace
from fusecache.engine.cache.fetcher import FetchTasks, StallWatch
from fusecache.engine.durability.recent_rates import RecentRates
from fusecache.engine.durability.status import QueueStatus
from fusecache.engine.durability.sync import Drain
from fusecache.engine.namespace.lister import ListingRefresher
from fusecache.engine.prefetch.hint_service import HintService
from fusecache.engine.prefetch.prefetcher import Prefetcher
from fusecache.engine.publish.multipart_uploader import MultipartUploader
from fusecache.engine.publish.publisher import Publisher
from fusecache.engine.publish.retirement import Retirement
from fusecache.engine.publish.schedule import PublishSchedule
from fusecache.engine.runtime.batcher import Batcher
from fusecache.engine.write.snapshots import OpenFileSnapshots
from fusecache.index.journal import Journal
from fusecache.index.listings import Listings
from fusecache.model.errors import Throttled, Unavailable
from fusecache.model.hints import TO_THE_END
from fusecache.model.objects import MIB
from tests.engine.namespace.test_listing import FarOffload
from tests.engine.namespace.test_listing_refresher import keep, visit
from tests.engine.prefetch.test_hints import fetched_by, plan
from tests.engine.prefetch.test_hints import fill as fill_shards
from tests.support.faulty_store import Fault, FaultyStore
from tests.support.inline_offload import InlineOffload
from tests.support.mistakes import Mistake, MistakeIn
from tests.support.node import Bucket, User, running_node

LARGE = b"12345678" * (12 * MIB // 8)


def failures(user: User) -> dict[str, int]:
    """Return how often each task has failed."""
    return {name: task["failures"] for name, task in user.fs._tasks.supervisor.statistics().items()}


async def check_works(user: User, bucket: Bucket) -> None:
    """Check that reads are answered, closed files are published, and nothing is held for ever."""
    bucket.memory.put_bytes("check/theirs", b"theirs")
    await trio.sleep(5)  # listings are older than that now
    assert await user.read("check/theirs") == b"theirs"
    await user.write("check/ours", b"ours")
    await user.write("check/large", LARGE)
    assert await user.drained() == "durable"
    shown = bucket.shows()
    assert (shown["check/ours"], shown["check/large"]) == (b"ours", LARGE)
    await trio.sleep(60)
    cache = user.fs.cache
    assert cache.statistics().reserved_bytes == 0
    assert set(cache._fetcher._running.values()) == {0}
    chunks = [chunk for entry in cache._table.objects.values() for chunk in entry.chunks.values()]
    assert not any(chunk.fetches or chunk.disk_operations or chunk.readers for chunk in chunks)
    assert not any(buffer.busy for chunk in chunks for buffer in chunk.buffers)
    assert not list(user.fs.publisher._requests._changes)


# ---- what makes each service work


async def rest(user: User, bucket: Bucket) -> None:
    await trio.sleep(6)


async def write(user: User, bucket: Bucket) -> None:
    await user.write("file", b"1")
    assert await user.drained() == "durable"
    assert bucket.shows()["file"] == b"1"


async def write_in_turn(user: User, bucket: Bucket) -> None:
    """Publish changes that must keep their order."""
    for number in range(3):
        await user.write(f"file-{number}", b"1")
    await user.write("_SUCCESS", b"1")
    assert await user.drained() == "durable"
    await user.write("_SUCCESS", b"2")
    await user.unlink("file-0")
    assert await user.drained() == "durable"
    marked = [len(state) for state in bucket.states if "_SUCCESS" in state]
    assert marked == [4, 4, 3]  # first with all files, then replaced, then with one less


async def list_again(user: User, bucket: Bucket) -> None:
    for number in range(3):
        bucket.memory.put_bytes(f"directory/{number}", b"1")
        assert len(await user.tree("directory")) == number + 1
        await trio.sleep(5)


async def hint(user: User, bucket: Bucket) -> None:
    fill_shards(bucket, 2, MIB)
    rows = [(shard, 0, TO_THE_END, shard, 0) for shard in range(2)]
    await user.fs.hints.receive("job.plan", plan(2, rows))
    await fetched_by(user, 2 * MIB)


async def replace_pinned(user: User, bucket: Bucket) -> None:
    for letter in (b"1", b"2", b"3"):
        await user.write("pinned", letter * MIB)
        assert await user.drained() == "durable"
        await trio.sleep(2)


async def wait_for_check(user: User, bucket: Bucket) -> None:
    await trio.sleep(1300)


async def drain(user: User, bucket: Bucket) -> None:
    bucket.takes_nothing = True
    await user.write("file", b"1")
    async with trio.open_nursery() as nursery:
        nursery.start_soon(come_back, bucket)
        assert (await user.fs.drain(until_empty=True)).result == "durable"


async def come_back(bucket: Bucket) -> None:
    await trio.sleep(20)
    bucket.come_back()


async def read(user: User, bucket: Bucket) -> None:
    bucket.memory.put_bytes("theirs", b"1")
    assert await user.read("theirs") == b"1"
    await trio.sleep(5)


async def write_large(user: User, bucket: Bucket) -> None:
    await user.write("large", LARGE)
    assert await user.drained() == "durable"
    assert bucket.shows()["large"] == LARGE


def throttling(bucket: Bucket) -> Any:
    error = Throttled("too many requests")
    error.retry_after_seconds = 5.0
    return FaultyStore(bucket, Fault(error, method="get_into"))


def losing_a_part(bucket: Bucket) -> Any:
    return FaultyStore(bucket, Fault(Unavailable("reset"), method="upload_part", times=4))


class SlowGets(InlineOffload):
    """A GET takes a few seconds."""

    async def network(self, call: Callable[..., Any], *args: object) -> Any:
        await trio.sleep(3)
        return call(*args)


@dataclass(frozen=True, slots=True)
class ServiceCase:
    """A service that fails: in which method, and what makes it run into that."""

    service: str
    owner: Any
    method: str
    act: Callable[[User, Bucket], Awaitable[None]] = rest
    options: dict[str, Any] = field(default_factory=dict)
    skip: int = 0
    store: Callable[[Bucket], Any] = lambda bucket: bucket

    @property
    def name(self) -> str:
        return f"{self.service}: {self.method}"


PIN = {"pin": ("pinned",)}
CASES = [
    ServiceCase("journal", Journal, "apply", write, skip=1),  # the first call records the start
    ServiceCase("cache-shrink", DiskSpace, "shrink"),
    ServiceCase("cache-index", BlockTable, "flush_rows"),
    ServiceCase("cache-clean-up", BlockCache, "_clean_up_after_last_run"),
    ServiceCase("discarded-rows", Listings, "drop", list_again),
    ServiceCase("hints", HintService, "_end_jobs"),
    ServiceCase("prefetch", Prefetcher, "_start_one", hint),
    ServiceCase("retire", Retirement, "run", write),
    ServiceCase("publish", Publisher, "_prepare_ahead", write),
    ServiceCase("publish", Publisher, "_next_item", write_in_turn, skip=3),
    # It is asked for a change that was just taken out of its place in the schedule.
    ServiceCase("publish", PublishSchedule, "may_go", write_in_turn),
    ServiceCase("snapshots", OpenFileSnapshots, "_measure_uploads"),
    ServiceCase("pins", BlockCache, "is_open", replace_pinned, PIN),
    ServiceCase("pins-check", PinnedObjects, "_check", wait_for_check, PIN),
    ServiceCase("upload-rate", QueueStatus, "_sample"),
    ServiceCase("rates", RecentRates, "run"),
    ServiceCase("drain-watch", Drain, "_left", drain),
    ServiceCase("stall-watch", StallWatch, "_look", read, {"offload": SlowGets()}),
    ServiceCase("fetch-silence", FetchTasks, "_pump_after", read, store=throttling),
    ServiceCase("upload-pause", MultipartUploader, "_pump_at", write_large, store=losing_a_part),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
async def test_a_failed_service_starts_again(
    bucket: Bucket, cache: Path, monkeypatch: pytest.MonkeyPatch, case: ServiceCase
) -> None:
    mistake = MistakeIn(monkeypatch, case.owner, case.method, times=1, skip=case.skip)
    async with running_node(case.store(bucket), cache, **case.options) as user:
        await case.act(user, bucket)
        await check_works(user, bucket)
        assert mistake.times == 0
        assert mistake.calls > 1 + case.skip
        assert failures(user) == {case.service: 1}


async def test_both_batchers_start_again(
    bucket: Bucket, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One prepares small files, one hands published files over to the cache."""
    MistakeIn(monkeypatch, Batcher, "run", times=2)
    async with running_node(bucket, cache) as user:
        await check_works(user, bucket)
        assert failures(user) == {"prepare-batches": 1, "retire": 1}


async def test_a_service_that_always_fails_slows(
    bucket: Bucket, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An hour of failures fills no log, and the rest of the mount works."""
    MistakeIn(monkeypatch, RecentRates, "run", times=1_000_000)
    async with running_node(bucket, cache) as user:
        await trio.sleep(3600)
        assert 60 <= failures(user)["rates"] <= 130
        await check_works(user, bucket)


async def test_a_mount_ends_although_the_handover_of_published_files_always_fails(
    bucket: Bucket, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next mount does that."""
    run = Batcher.run

    async def fail(batcher: Any) -> None:
        if batcher._name == "retire":
            raise Mistake("in run")
        await run(batcher)

    monkeypatch.setattr(Batcher, "run", fail)
    with trio.fail_after(3600):
        async with running_node(bucket, cache) as user:
            await check_works(user, bucket)


async def test_listings_are_kept_fresh_after_failures(
    bucket: Bucket, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A lookup in a directory in use costs no request, also after the task that refreshes it has failed."""
    mistake = MistakeIn(monkeypatch, ListingRefresher, "_relist", times=1)
    bucket.memory.put_bytes("d/file", b"1")
    async with running_node(bucket, cache, offload=FarOffload(0.1), fresh_seconds=1.0) as user:
        keep(user, await user.fs.resolve("d"))
        for number in range(200):
            await visit(user, "d", f"{number}")
            await trio.sleep(0.05)
        assert mistake.calls > 1
        assert failures(user) == {"keep-fresh": 1}
        assert max([(await visit(user, "d", f"new-{number}"))[0] for number in range(20)]) < 0.001
