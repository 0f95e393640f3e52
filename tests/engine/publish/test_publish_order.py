"""The order in which closed files are published: concurrently where the order allows it, never too early."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import trio
from trio.testing import MockClock

from fusecache.engine.publish import multipart_uploader
from fusecache.model.errors import AccessDenied, Throttled, Unavailable
from fusecache.model.objects import MIB
from tests.support.faulty_store import Fault, FaultyStore
from tests.support.inline_offload import InlineOffload
from tests.support.node import Bucket, User, photograph, running_node

LARGE = 5 * MIB  # two parts here


class Far(InlineOffload):
    """Each publishing request takes `seconds`. most: how many were under way at once."""

    def __init__(self, seconds: float = 0.1) -> None:
        self.seconds = seconds
        self.most = self._under_way = 0

    @contextmanager
    def _counted(self) -> Iterator[None]:
        self._under_way += 1
        self.most = max(self.most, self._under_way)
        try:
            yield
        finally:
            self._under_way -= 1

    async def publish(self, call, *args):
        with self._counted(), trio.CancelScope(shield=True):
            await trio.sleep(self.seconds)
            return call(*args)


def _position(bucket: Bucket, method: str, key: str) -> int:
    return bucket.requests.index((method, key))


def _before(bucket: Bucket, first: tuple[str, str], second: tuple[str, str]) -> bool:
    return _position(bucket, *first) < _position(bucket, *second)


async def _published(user: User, *paths: str) -> None:
    for path in paths:
        folder = path.rpartition("/")[0]
        if folder:
            try:
                await user.fs.resolve(folder)
            except Exception:  # noqa: BLE001  # not there yet
                await user.mkdir(folder)
        await user.write(path, b"old " + path.encode())
    assert await user.drained() == "durable"
    await trio.sleep(2)


# ---- at once


async def test_new_files_are_published_side_by_side(bucket: Bucket, cache: Path) -> None:
    offload = Far()
    async with running_node(bucket, cache, offload=offload) as user:
        for number in range(200):
            await user.write(f"{number}", b"1")
        began = trio.current_time()
        assert await user.drained() == "durable"
        assert trio.current_time() - began < 3  # 20 s one after the other
    assert 16 <= offload.most <= 64


async def test_a_large_file_does_not_hold_up_small_ones(bucket: Bucket, cache: Path) -> None:
    class SlowBytes(InlineOffload):
        async def upload(self, call, *args):
            with trio.CancelScope(shield=True):
                await trio.sleep(10)
            return call(*args)

        async def publish(self, call, *args):
            await trio.lowlevel.checkpoint()
            return call(*args)

    async with running_node(bucket, cache, offload=SlowBytes()) as user:
        for number in range(20):
            await user.write(f"large-{number}", b"1" * LARGE)
        await user.mkdir("d")
        await user.write("d/small", b"2")
        await trio.sleep(5)
        assert bucket.shows() == {"d/": b"", "d/small": b"2"}
        assert await user.drained(600) == "durable"


# ---- ordering points


async def test_an_overwrite_comes_after_what_is_older_in_its_subtree_and_before_what_is_younger(
    bucket: Bucket, cache: Path
) -> None:
    async with running_node(bucket, cache, offload=Far()) as user:
        await _published(user, "run/model")
        await user.mkdir("run/deep")
        await user.write("run/deep/older", b"1")
        await user.write("run/model", b"2")
        await user.write("run/deep/younger", b"3")
        await user.write("elsewhere", b"4")
        bucket.requests.clear()
        await user.drained()
    assert _before(bucket, ("put", "run/deep/older"), ("put", "run/model"))
    assert _before(bucket, ("put", "run/model"), ("put", "run/deep/younger"))
    assert _before(bucket, ("put", "elsewhere"), ("put", "run/deep/younger"))


async def test_a_rename_of_a_published_file_counts_in_both_directories(bucket: Bucket, cache: Path) -> None:
    async with running_node(bucket, cache, offload=Far()) as user:
        await _published(user, "a/file", "b/other")
        await user.write("a/older", b"1")
        await user.write("b/older", b"1")
        await user.rename("a/file", "b/file")
        await user.write("a/younger", b"2")
        await user.write("b/younger", b"2")
        bucket.requests.clear()
        await user.drained()
    copy = _position(bucket, "copy", "b/file")
    assert all(_position(bucket, "put", f"{folder}/older") < copy for folder in "ab")
    assert all(_position(bucket, "put", f"{folder}/younger") > copy for folder in "ab")


async def test_a_symlink_comes_after_what_it_may_point_to(bucket: Bucket, cache: Path) -> None:
    async with running_node(bucket, cache, offload=Far()) as user:
        await user.mkdir("run")
        await user.write("run/model", b"1" * LARGE)
        await user.symlink("run/model", "current")
        await user.drained()
    assert _before(bucket, ("complete_multipart", "run/model"), ("put", "current"))


# ---- removals


async def test_a_removal_waits_for_older_writes_of_the_whole_mount(bucket: Bucket, cache: Path) -> None:
    async with running_node(bucket, cache, offload=Far()) as user:
        await _published(user, "old/model")
        await user.mkdir("new")
        await user.write("new/model", b"1" * LARGE)
        await user.unlink("old/model")
        await user.write("later", b"2")
        bucket.requests.clear()
        await user.drained()
    assert _before(bucket, ("complete_multipart", "new/model"), ("delete", "old/model"))


async def test_a_removal_does_not_wait_for_what_is_refused_or_in_conflict(
    bucket: Bucket, cache: Path
) -> None:
    async with running_node(bucket, cache) as user:
        await _published(user, "old")
        await user.write("new", b"ours")
        bucket.memory.put_bytes("new", b"theirs")
        await user.unlink("old")
        assert await user.drained() == "conflict"
    assert "old" not in bucket.shows()


async def test_a_removed_file_stays_readable_while_it_is_open_and_holds_nobody_back(
    bucket: Bucket, cache: Path
) -> None:
    bucket.memory.put_bytes("file", b"x" * (2 * MIB))
    async with running_node(bucket, cache) as user:
        handle = user.fs.file_io.open(await user.fs.resolve("file"), writable=False, pid=0)
        await user.unlink("file")
        await user.write("latest", b"1")
        await user.write("model", b"2")
        await trio.sleep(60)
        assert set(bucket.shows()) == {"file", "latest", "model"}
        assert await user.fs.file_io.read(handle, MIB, 10) == b"x" * 10
        await user.fs.file_io.release(handle)
        await trio.sleep(5)
        assert set(bucket.shows()) == {"latest", "model"}


async def test_a_sync_does_not_wait_for_the_deferred_deletes_of_a_directory_that_another_one_replaces(
    bucket: Bucket, cache: Path
) -> None:
    async with running_node(bucket, cache, delete_delay=3600.0) as user:
        await _published(user, "step/old", "new/model")
        await user.unlink("step/old")
        await user.rmdir("step")
        await user.rename("new", "step")
        with trio.fail_after(60):
            assert (await user.fs.wait_durable("step", None)).result == "durable"
        assert {"step/", "step/model", "step/old"} <= set(bucket.shows())


@pytest.mark.parametrize("end", ["time", "drain"])
async def test_a_reader_that_never_closes_keeps_a_removed_file_for_a_while_only(
    bucket: Bucket, cache: Path, end: str
) -> None:
    bucket.memory.put_bytes("file", b"1")
    async with running_node(bucket, cache) as user:
        handle = user.fs.file_io.open(await user.fs.resolve("file"), writable=False, pid=0)
        await user.unlink("file")
        await trio.sleep(590 if end == "time" else 20)
        assert "file" in bucket.shows()
        if end == "time":
            await trio.sleep(20)
        else:
            with user.fs.publisher.draining():
                await user.drained(5)
        assert bucket.shows() == {}
        await user.fs.file_io.release(handle)


async def test_removals_can_be_delayed_for_trainers_that_remove_before_they_write(
    bucket: Bucket, cache: Path
) -> None:
    async with running_node(bucket, cache, delete_delay=300.0) as user:
        await _published(user, "old/model")
        await user.unlink("old/model")
        await user.rmdir("old")
        await user.mkdir("new")
        await user.write("new/model", b"1")
        await user.write("latest", b"new")
        await trio.sleep(100)
        assert {"old/model", "new/model", "latest"} <= set(bucket.shows())
        await trio.sleep(250)
        assert set(bucket.shows()) == {"new/", "new/model", "latest"}


async def test_a_file_written_again_within_the_delay_of_its_removal_is_replaced_at_once(
    bucket: Bucket, cache: Path
) -> None:
    async with running_node(bucket, cache, delete_delay=300.0) as user:
        await _published(user, "model")
        await user.unlink("model")
        await user.write("model", b"new")
        await trio.sleep(10)
    assert bucket.shows() == {"model": b"new"}
    assert bucket.sent("delete") == []


async def test_a_removal_of_an_earlier_run_does_not_delay_newer_content_of_its_name(
    bucket: Bucket, cache: Path
) -> None:
    """Nobody knows whether it was sent: it goes first."""
    async with running_node(bucket, cache, delete_delay=3600.0) as user:
        await _published(user, "run/model", "run/old")
        await user.unlink("run/model")
        await user.unlink("run/old")
        await trio.sleep(2)
        photograph(cache, cache.with_suffix(".after"))
        bucket.is_cut_off = True
    bucket.come_back()
    async with running_node(bucket, cache.with_suffix(".after"), delete_delay=3600.0) as user:
        await user.write("run/model", b"new")
        await user.write("run/.metadata", b"new")
        await trio.sleep(20)
        assert bucket.shows() == {
            "run/": b"",
            "run/model": b"new",
            "run/.metadata": b"new",
            "run/old": b"old run/old",
        }


# ---- what fails


@pytest.mark.parametrize(
    ("request_", "size"), [("put", 1), ("create_multipart", 9 * MIB), ("upload_part", 9 * MIB)]
)
async def test_a_file_that_the_bucket_never_takes_holds_its_own_subtree_alone(
    bucket: Bucket, cache: Path, request_: str, size: int
) -> None:
    store = FaultyStore(bucket, Fault(Unavailable("503"), request_, "a/stuck", times=None))
    async with running_node(store, cache) as user:
        await _published(user, "a/before", "b/before", "b/latest")
        await user.write("a/stuck", b"1" * size)
        await user.write("a/latest", b"2")
        await trio.sleep(30)
        for number in range(5):
            await user.write(f"b/{number}", b"3")
            await user.write("b/latest", b"%d" % number)
            await trio.sleep(5)
        await user.unlink("b/before")
        await user.write("b/latest", b"last")
        await user.write("a/other", b"4")
        await trio.sleep(130)
        shown = bucket.shows()
        assert shown["b/latest"] == b"last"
        assert "b/before" in shown  # a removal waits for every older write
        assert "a/latest" not in shown
        waiting = (await user.fs.status.path_status("a/stuck"))["waiting"]
        assert [(row["path"], row["cause"]) for row in waiting] == [("a/stuck", "503")]
        assert user.fs.publisher.failure is not None
        store.heal()
        assert await user.drained() == "durable"
        assert user.fs.publisher.failure is None
    assert "b/before" not in bucket.shows()
    assert {"a/stuck", "a/latest", "a/other"} <= set(bucket.shows())


async def test_the_parts_of_a_file_that_the_bucket_never_takes_leave_room_for_those_of_others(
    bucket: Bucket, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(multipart_uploader, "PARTS_AT_ONCE", 2)
    store = FaultyStore(bucket, Fault(Unavailable("503"), "upload_part", "stuck", times=None))
    async with running_node(store, cache) as user:
        await user.write("stuck", b"1" * 17 * MIB)
        await trio.sleep(5)
        await user.write("large", b"2" * LARGE)
        await trio.sleep(30)
        assert set(bucket.shows()) == {"large"}
        store.heal()
        assert await user.drained() == "durable"
    assert bucket.shows() == {"stuck": b"1" * 17 * MIB, "large": b"2" * LARGE}
    assert bucket.memory.uploads() == ()


async def test_an_outage_is_probed_by_few_requests_and_ends_for_all_at_once(
    bucket: Bucket, cache: Path
) -> None:
    store = FaultyStore(bucket, Fault(Unavailable("no route"), "put", times=None))
    async with running_node(store, cache) as user:
        for number in range(300):
            await user.write(f"{number}", b"1")
        await trio.sleep(600)
        tried = len(store.calls("put"))
        assert tried < 64 + 300  # the first ones, then one a few seconds
        store.heal()
        began = trio.current_time()
        assert await user.drained() == "durable"
        assert trio.current_time() - began < 15
    assert len(bucket.shows()) == 300


async def test_a_bucket_that_asks_to_slow_down_gets_fewer_requests_of_all_kinds(
    bucket: Bucket, cache: Path
) -> None:
    store = FaultyStore(bucket, Fault(Throttled("429"), "put", times=40))
    async with running_node(store, cache) as user:
        before = user.fs.cache.request_limit.limit
        for number in range(50):
            await user.write(f"{number}", b"1")
        lowest = before
        with trio.fail_after(600):
            while len(bucket.shows()) < 50:
                lowest = min(lowest, user.fs.cache.request_limit.limit)
                await trio.sleep(0.1)
        assert lowest <= before // 2


@pytest.mark.parametrize("what", ["symlink", "delete"])
@pytest.mark.parametrize("late", [0.02, 0.05, 0.09, 0.2])
async def test_a_file_whose_release_is_read_after_a_standstill_of_the_loop_goes_before_what_was_queued_behind_it(
    bucket: Bucket, cache: Path, autojump_clock: MockClock, late: float, what: str
) -> None:
    async with running_node(bucket, cache) as user:
        await _published(user, "old")
        await trio.sleep(5)
        bucket.requests.clear()
        handle = await user.open("new")
        await user.fs.file_io.write(handle, 0, b"new")
        await user.fs.close_protocol.flush(handle)
        if what == "symlink":
            await user.symlink("new", "current")
        else:
            await user.unlink("old")
        await trio.sleep(0.05)
        autojump_clock.jump(0.95 + late)  # by its end, the change has settled
        await trio.sleep(0.01)
        await user.fs.file_io.release(handle)
        assert await user.drained() == "durable"
    assert bucket.requests[0] == ("put", "new")


async def test_a_removal_that_waits_costs_a_look_a_second(
    bucket: Bucket, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And not fifty, each of which woke the daemon."""
    async with running_node(bucket, cache, delete_delay=3600.0) as user:
        await user.write("f", b"1")
        assert await user.drained() == "durable"
        await user.unlink("f")
        schedule, looks = user.fs.publisher._schedule, []
        look = schedule.next_time
        monkeypatch.setattr(schedule, "next_time", lambda: looks.append(trio.current_time()) or look())
        await trio.sleep(600)
        assert 500 < len(looks) < 700


async def test_keys_that_are_refused_are_no_reason_to_give_up(bucket: Bucket, cache: Path) -> None:
    store = FaultyStore(bucket)
    async with running_node(store, cache) as user:
        store.script(Fault(AccessDenied("403"), "put", times=None))
        for number in range(10):
            await user.write(f"{number}", b"1")
        await trio.sleep(3600)
        assert isinstance(user.fs.publisher.failure, AccessDenied)
        store.heal()
        assert await user.drained(120) == "durable"
        assert user.fs.publisher.failure is None
    assert len(bucket.shows()) == 10


async def test_a_removed_directory_does_not_show_again_because_one_in_it_is_removed_late(
    bucket: Bucket, cache: Path
) -> None:
    store = FaultyStore(bucket)
    async with running_node(store, cache) as user:
        await user.mkdir("dir")
        await user.mkdir("dir/inner")
        assert await user.drained() == "durable"
        await trio.sleep(5)
        await user.rmdir("dir/inner")
        await user.rmdir("dir")
        store.script(Fault(Unavailable("no answer"), "delete", "dir/inner/", times=2))
        await trio.sleep(1.3)
        assert await user.tree() == {}
        await user.mkdir("dir")
        assert await user.drained() == "durable"
        assert await user.tree() == {"dir": None}
    assert bucket.sent("delete") == ["dir/inner/"]
    assert bucket.shows() == {"dir/": b""}


# ---- many


async def test_each_of_many_queued_files_is_looked_at_a_few_times_only(
    bucket: Bucket, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Counted in looks at the order, not in seconds."""
    from fusecache.policy.writeback.publish_order import PublishOrder

    files, looks = 400, 0
    look: Callable[..., object] = PublishOrder._barrier_before

    def counted(self: PublishOrder, entry: object) -> object:
        nonlocal looks
        looks += 1
        return look(self, entry)

    monkeypatch.setattr(PublishOrder, "_barrier_before", counted)
    async with running_node(bucket, cache) as user:
        bucket.takes_nothing = True
        for number in range(files):
            await user.write(f"{number}", b"1")
        bucket.come_back()
        looks = 0
        assert await user.drained() == "durable"
    assert looks < 12 * files
