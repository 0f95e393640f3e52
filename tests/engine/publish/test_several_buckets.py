"""Two buckets in one engine: what one of them does not take, or does not answer, touches nothing of the other."""

from pathlib import Path
from typing import Any

import pytest
import trio
from trio.testing import MockClock

from fusecache.engine.options import BucketAccess
from fusecache.engine.publish import multipart_uploader, preparer, schedule
from fusecache.model.errors import (
    AccessDenied,
    AcrossDevices,
    NotPermitted,
    ReadOnly,
    RemoteError,
    Throttled,
    Unavailable,
)
from fusecache.model.objects import MIB
from fusecache.remote.bucket_router import BucketRouter, RoutedBucket
from tests.support.faulty_store import Fault, FaultyStore
from tests.support.inline_offload import InlineOffload
from tests.support.node import Bucket, User, photograph, running_node

LARGE = 4 * MIB + 1
FAILURES = [Unavailable("503"), AccessDenied("403"), Throttled("SlowDown")]


class Two:
    """The buckets `bad` and `good`, and the store over both."""

    def __init__(self, *faults: Fault) -> None:
        self.bad, self.good = Bucket(), Bucket()
        self.faults = FaultyStore(self.bad, *faults)
        self.store: Any = BucketRouter(
            {"bad": RoutedBucket(self.faults), "good": RoutedBucket(FaultyStore(self.good))}
        )

    def running(self, cache: Path, **options: Any) -> Any:
        """Run a node over both."""
        access = {"bad": BucketAccess(), "good": BucketAccess(), **options.pop("access", {})}
        return running_node(self.store, cache, buckets=access, **options)


async def good_is_published(user: User, two: Two, seconds: float) -> None:
    """Return once the good bucket has what was written to it. Raises trio.TooSlowError."""
    with trio.fail_after(seconds):
        assert (await user.fs.wait_durable("good", None)).result == "durable"


@pytest.fixture
def few_places(monkeypatch: pytest.MonkeyPatch) -> None:
    """A few stuck files fill all places of their bucket."""
    for module, name in (
        (schedule, "LIGHT_AT_ONCE"),
        (schedule, "HEAVY_AT_ONCE"),
        (preparer, "FILES_AHEAD"),
        (multipart_uploader, "PARTS_AT_ONCE"),
    ):
        monkeypatch.setattr(module, name, 4)


@pytest.mark.parametrize("error", FAILURES, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("size", [1, LARGE])
async def test_an_outage_delays_nothing_of_the_other_bucket(
    cache: Path, autojump_clock: MockClock, few_places: None, error: RemoteError, size: int
) -> None:
    two = Two()
    async with two.running(cache) as user:
        await user.tree()
        two.faults.script(Fault(error, times=None))
        for number in range(20):
            await user.write(f"bad/{number}", b"1" * size)
        await trio.sleep(100)
        for number in range(20):
            await user.write(f"good/{number}", b"2" * size)
        await good_is_published(user, two, 10)
        assert len(two.good.shows()) == 20
        assert two.bad.shows() == {}
        assert user.fs.publisher.of("good").failure is None
        assert type(user.fs.publisher.of("bad").failure) is type(error)
        assert await user.fs.path_state("good/1") == "clean"
        two.faults.heal()
        assert await user.drained() == "durable"
        assert len(two.bad.shows()) == 20


async def test_a_delete_waits_for_writes_of_its_own_bucket_alone(
    cache: Path, autojump_clock: MockClock
) -> None:
    two = Two(Fault(Unavailable("503"), "put", times=None))
    two.good.memory.put_bytes("old", b"1")
    async with two.running(cache) as user:
        await user.write("bad/first", b"1")
        await user.unlink("good/old")
        await user.write("good/_SUCCESS", b"")
        await good_is_published(user, two, 10)
        assert set(two.good.shows()) == {"_SUCCESS"}
        two.faults.heal()
        assert await user.drained() == "durable"


async def test_rotation_in_one_bucket_ignores_the_other(cache: Path, autojump_clock: MockClock) -> None:
    """A write that the other bucket does not take makes no removed file of this one be uploaded."""
    two = Two(Fault(Unavailable("503"), "put", times=None))
    two.good.memory.put_bytes("0", b"0")
    async with two.running(cache, settle_seconds=5) as user:
        await user.write("bad/first", b"1")
        await user.unlink("good/0")
        await user.write("good/1", b"1")
        await user.unlink("good/1")
        await good_is_published(user, two, 60)
        assert two.good.shows() == {}
        assert two.good.sent("put") == []
        two.faults.heal()
        assert await user.drained() == "durable"


async def test_a_crash_forgets_no_bucket(cache: Path, tmp_path: Path, autojump_clock: MockClock) -> None:
    two = Two()
    copy = tmp_path / "copy"
    async with two.running(cache) as user:
        await user.tree()
        two.good.is_cut_off = two.bad.is_cut_off = True
        for name in ("bad", "good"):
            await user.write(f"{name}/file", name.encode())
        await trio.sleep(5)
        photograph(cache, copy)
    assert two.bad.shows() == two.good.shows() == {}
    two.good.come_back()
    two.bad.come_back()
    async with two.running(copy) as user:
        assert await user.drained() == "durable"
        assert (two.bad.shows(), two.good.shows()) == ({"file": b"bad"}, {"file": b"good"})


async def test_names_of_a_silent_bucket_are_its_own_problem(cache: Path, autojump_clock: MockClock) -> None:
    two = Two()
    two.good.memory.put_bytes("a/file", b"1")
    async with two.running(cache) as user:
        assert set(await user.tree()) == {"bad", "good", "good/a", "good/a/file"}
        two.faults.script(Fault(Unavailable("503"), times=None))
        await user.fs.ask_bucket("bad")
        two.good.memory.put_bytes("a/new", b"2")
        with trio.fail_after(5):
            await trio.sleep(2)
            assert user.fs.bucket_facts("bad")["unanswered_seconds"] == 2
            assert user.fs.bucket_facts("good")["unanswered_seconds"] == 0
            assert await user.read("good/a/new") == b"2"


async def test_changes_stay_inside_one_bucket(cache: Path, autojump_clock: MockClock) -> None:
    two = Two()
    two.bad.memory.put_bytes("file", b"1")
    async with two.running(cache) as user:
        await user.write("good/file", b"2")
        with pytest.raises(AcrossDevices):
            await user.rename("good/file", "bad/other")
    async with two.running(cache, access={"bad": BucketAccess(read_only=True)}) as user:
        for change in (user.write("bad/new", b"3"), user.unlink("bad/file"), user.mkdir("bad/d")):
            with pytest.raises(ReadOnly):
                await change
        for change in (user.write("new", b"3"), user.mkdir("d"), user.rmdir("good")):
            with pytest.raises(NotPermitted):
                await change
        assert await user.drained() == "durable"
        assert (two.bad.shows(), two.good.shows()) == ({"file": b"1"}, {"file": b"2"})


async def test_a_hung_bucket_leaves_buffers_to_the_other(cache: Path, autojump_clock: MockClock) -> None:
    """Readers of one bucket wait for bytes that never come; a read of the other one is served at once."""
    two = Two()
    for bucket in (two.bad, two.good):
        for number in range(12):
            bucket.memory.put_bytes(str(number), b"1" * 8 * MIB)
    offload = HungOffload()
    async with two.running(cache, offload=offload) as user, trio.open_nursery() as nursery:
        for number in range(12):
            nursery.start_soon(user.read, f"bad/{number}")
        await trio.sleep(1)
        assert offload.hung
        with trio.fail_after(1):
            for number in range(12):
                assert len(await user.read(f"good/{number}")) == 8 * MIB
        offload.release.set()


class HungOffload(InlineOffload):
    """GETs of the bucket `bad` end only when `release` is set."""

    def __init__(self) -> None:
        self.release = trio.Event()
        self.hung = 0

    async def network(self, call: Any, *args: Any) -> Any:
        """Run the call, or wait."""
        chunk = getattr(args[0], "chunk", None) if args else None
        if chunk is not None and chunk.owner.object_id.key.startswith("bad/"):
            self.hung += 1
            await self.release.wait()
        return await super().network(call, *args)
