"""Hints on a whole node under a virtual clock: what is fetched and kept by them, and that no read depends on one."""

import itertools
import logging
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import trio

from fusecache.engine.cache import range_cache
from fusecache.model.errors import NotFound, ObjectMissing, RemoteError, Throttled, Unavailable
from fusecache.model.hints import TO_THE_END, HintError, encode_cursor, encode_plan
from fusecache.model.objects import KIB, MIB, Extent, ObjectId
from fusecache.policy.cache.prefetch_horizon import SILENT_SECONDS
from tests.support.faulty_store import Fault, FaultyStore
from tests.support.inline_offload import InlineOffload
from tests.support.node import Bucket, User, running_node
from tests.support.threads import stay

# One epoch reads each shard once, one a step.
SHARDS, SHARD_BYTES = 192, 256 * KIB


def name(number: int) -> str:
    return f"data/shard.{number:05d}.mds"


def fill(bucket: Bucket, shards: int, size: int) -> list[bytes]:
    """Put shards of random bytes."""
    contents = [random.Random(number).randbytes(size) for number in range(shards)]
    for number, data in enumerate(contents):
        bucket.memory.put_bytes(name(number), data)
    return contents


def plan(
    shards: int,
    rows: Sequence[tuple[int, int, int, int, int]],
    *,
    window: int = 0,
    step: int = 0,
    is_exact: bool = False,
) -> bytes:
    """A plan of (shard, start, length, first, span) in the order of their steps."""
    columns = zip(*rows, strict=True)
    return encode_plan(
        window=window,
        step=step,
        is_exact=is_exact,
        paths=[name(number) for number in range(shards)],
        **dict(zip(("path", "start", "length", "first", "span"), columns, strict=True)),
    )


def epoch_plan(order: Sequence[int], epoch: int, step: int) -> bytes:
    """A whole epoch, one shard a step."""
    rows = [(shard, 0, TO_THE_END, epoch * len(order) + place, 0) for place, shard in enumerate(order)]
    return plan(len(order), rows, window=epoch, step=step)


def fetched(user: User) -> int:
    return sum(user.fs.cache.statistics().bytes_by_cause.values())


async def fetched_by(user: User, count: int, seconds: float = 60) -> None:
    """Wait until so many bytes were fetched."""
    with trio.fail_after(seconds):
        while fetched(user) < count:  # noqa: ASYNC110  # polled on a virtual clock
            await trio.sleep(0.01)


async def read(user: User, path: str, start: int, length: int) -> bytes:
    """Read a part of a file as a trainer does: by page, in one request."""
    handle = user.fs.file_io.open(await user.fs.resolve(path), writable=False, pid=0)
    first, stop = start // 4096 * 4096, -(-(start + length) // 4096) * 4096
    data = bytes(await user.fs.file_io.read(handle, first, stop - first))
    await user.fs.file_io.release(handle)
    return data[start - first : start - first + length]


def belady(orders: Sequence[Sequence[int]], room: int) -> list[int]:
    """Return how many shards each epoch fetches at least, with room for so many: by who knows the whole order."""
    reads = [shard for order in orders for shard in order]
    following: dict[int, int] = {}
    next_read = [0] * len(reads)
    for place in reversed(range(len(reads))):
        next_read[place] = following.get(reads[place], len(reads) * 2)
        following[reads[place]] = place
    cached: dict[int, int] = {}
    misses = [0] * len(orders)
    for place, shard in enumerate(reads):
        misses[place // len(orders[0])] += shard not in cached
        cached[shard] = next_read[place]
        if len(cached) > room:
            del cached[max(cached, key=cached.__getitem__)]
    return misses


@pytest.mark.parametrize("share", [0.5, 0.25])
async def test_steady_epochs_fetch_hardly_more_than_who_knows_the_whole_future(
    tmp_path: Path, share: float
) -> None:
    bucket = Bucket()
    contents = fill(bucket, SHARDS, SHARD_BYTES)
    orders = [random.Random(epoch).sample(range(SHARDS), SHARDS) for epoch in range(4)]
    ideal = belady(orders, int(SHARDS * share))
    by_epoch: dict[bool, list[float]] = {}
    # With half of it, who keeps what he has and knows nothing is as good.
    for has_hints in (True, False) if share == 0.25 else (True,):
        counts = by_epoch[has_hints] = []
        directory = tmp_path / str(has_hints)
        async with running_node(bucket, directory, cache_bytes=int(SHARDS * SHARD_BYTES * share)) as user:
            for epoch, order in enumerate(orders[:3]):
                before = fetched(user)
                for place, shard in enumerate(order):
                    step = epoch * SHARDS + place
                    if has_hints and place == 0:
                        for each in (epoch, epoch + 1)[epoch > 0 :]:
                            await user.fs.hints.receive("run.plan", epoch_plan(orders[each], each, step))
                    if has_hints and place % 4 == 0:
                        await user.fs.hints.receive("run.cursor", encode_cursor(step))
                    assert await user.read(name(shard)) == contents[shard]
                    await trio.sleep(1)
                counts.append((fetched(user) - before) / SHARD_BYTES)
    assert sum(by_epoch[True][1:]) <= 1.05 * sum(ideal[1:3])
    if share == 0.25:
        assert sum(by_epoch[True][1:]) < 0.95 * sum(by_epoch[False][1:])


async def test_of_shards_that_are_all_in_use_and_do_not_fit_only_what_is_read_is_fetched(
    tmp_path: Path,
) -> None:
    """A shuffle over the whole dataset takes neighbouring samples of each shard now and then: they are no stream."""
    bucket = Bucket()
    contents = fill(bucket, 8, MIB)
    async with running_node(bucket, tmp_path / "cache", cache_bytes=4 * MIB + 512 * KIB) as user:
        rows = [(shard, 0, TO_THE_END, 0, 100) for shard in range(8)]
        await user.fs.hints.receive("run.plan", plan(8, rows))
        await fetched_by(user, 4 * MIB)
        handles = [
            user.fs.file_io.open(await user.fs.resolve(name(shard)), writable=False, pid=0)
            for shard in range(8)
        ]
        before, read_bytes = fetched(user), 0
        for place in range(4):
            for shard, handle in enumerate(handles):
                start = place * 256 * KIB
                for _ in range(3):
                    data = await user.fs.file_io.read(handle, start, 8 * KIB)
                    assert data == contents[shard][start:][: 8 * KIB]
                    start += 64 * KIB
                    read_bytes += 8 * KIB
        # Half of it was here; while there is room, what is around what is read is kept as well.
        assert 0 < fetched(user) - before <= read_bytes // 2 + 512 * KIB
        # Nothing that was let go is remembered.
        assert user.fs.cache.range_cache.held_bytes == len(user.fs.cache.range_cache._read) == 0
        for handle in handles:
            await user.fs.file_io.release(handle)


async def test_the_next_epoch_begins_before_this_one_ends(tmp_path: Path) -> None:
    bucket = Bucket()
    fill(bucket, 16, MIB)
    async with running_node(bucket, tmp_path / "cache") as user:
        first, second = list(range(8)), list(range(8, 16))
        await user.fs.hints.receive("run.plan", plan(16, [(s, 0, MIB, n, 0) for n, s in enumerate(first)]))
        await fetched_by(user, 8 * MIB)
        await user.fs.hints.receive(
            "run.plan", plan(16, [(s, 0, MIB, 8 + n, 0) for n, s in enumerate(second)], window=1, step=4)
        )
        await fetched_by(user, 16 * MIB)
        statistics = user.fs.cache.statistics()
        assert statistics.bytes_by_cause == {"demand": 0, "hint": 16 * MIB, "readahead": 0}
        facts = user.fs.hints.as_dict("run")
        assert (facts["step"], facts["windows"], facts["horizon_steps"]) == (4, [0, 1], 11)
        for number in range(16):
            await user.read(name(number))
        assert fetched(user) == 16 * MIB
        assert user.fs.hints.as_dict("run")["missed_bytes"] == 0


async def test_the_first_batches_come_as_their_bytes_and_the_shards_behind_them(tmp_path: Path) -> None:
    bucket = Bucket()
    shards, sample, batch = 16, 16 * KIB, 32
    contents = fill(bucket, shards, 2 * MIB)
    rng = random.Random(7)
    wanted = [(rng.randrange(shards), rng.randrange(2 * MIB - sample)) for _ in range(2 * batch)]
    cold = [(shard, start, sample, place // batch, 0) for place, (shard, start) in enumerate(wanted)]
    rows = [(shard, 0, TO_THE_END, 2, 100) for shard in range(shards)]
    async with running_node(bucket, tmp_path / "cache") as user:
        await user.fs.hints.receive("run.plan", plan(shards, cold, is_exact=True))
        await user.fs.hints.receive("run.plan", plan(shards, rows, window=1))
        pages = sum(-(-(start + sample) // 4096) - start // 4096 for _, start in wanted[:batch])
        while fetched(user) < pages * 4096:
            await trio.lowlevel.checkpoint()
        for shard, start in wanted[:batch]:
            assert await read(user, name(shard), start, sample) == contents[shard][start : start + sample]
        await trio.sleep(0.2)  # until the batch is handed out
        assert fetched(user) <= 3 * batch * sample
        await trio.sleep(0.5)
        for shard, start in wanted[batch:]:
            assert await read(user, name(shard), start, sample) == contents[shard][start : start + sample]
        with trio.fail_after(60):
            while user.fs.cache.statistics().used_bytes < shards * 2 * MIB:  # noqa: ASYNC110
                await trio.sleep(0.01)
        await user.fs.hints.receive("run.cursor", encode_cursor(2))
        assert user.fs.cache.range_cache.held_bytes == 0
        for shard in range(shards):
            assert await user.read(name(shard)) == contents[shard]
        assert user.fs.cache.statistics().bytes_by_cause["demand"] == 0


async def test_what_nobody_reads_at_first_holds_the_shards_up_for_a_moment_only(tmp_path: Path) -> None:
    bucket = Bucket()
    fill(bucket, 4, MIB)
    async with running_node(bucket, tmp_path / "cache") as user:
        await user.fs.hints.receive(
            "run.plan", plan(4, [(0, 0, 4096, 0, 0), (1, 0, 4096, 1, 0)], is_exact=True)
        )
        await user.fs.hints.receive("run.plan", plan(4, [(s, 0, MIB, 2, 0) for s in range(4)], window=1))
        await trio.sleep(0.5)
        assert fetched(user) == 4096
        await fetched_by(user, 2 * 4096 + 4 * MIB, seconds=10)


class Counting(InlineOffload):
    """GETs take seconds; what is shorter than a shard of 1 MiB is exact bytes.

    most_exact: GETs of these at once; most_beside, most_alone: those of shards while exact bytes came, or none did.
    """

    def __init__(self) -> None:
        self.exact = self.large = 0
        self.most_exact = self.most_beside = self.most_alone = 0

    async def network(self, call: Callable[..., Any], *args: object) -> Any:
        extent = next((each for each in args if isinstance(each, Extent)), None)
        if extent is None:
            return await super().network(call, *args)
        is_exact = extent.size < MIB
        self.exact += is_exact
        self.large += not is_exact
        self.most_exact = max(self.most_exact, self.exact)
        if self.exact:
            self.most_beside = max(self.most_beside, self.large)
        else:
            self.most_alone = max(self.most_alone, self.large)
        await trio.sleep(10 if is_exact else 1)
        self.exact -= is_exact
        self.large -= not is_exact
        return await super().network(call, *args)


@pytest.mark.parametrize("sample", [4 * KIB, 512 * KIB])
async def test_shards_come_more_slowly_while_the_exact_bytes_of_the_next_steps_are_on_their_way(
    tmp_path: Path, sample: int
) -> None:
    bucket, offload = Bucket(), Counting()
    fill(bucket, 64, MIB)
    cold = [(4 * step + shard, 0, sample, step, 0) for step in range(2) for shard in range(4)]
    whole = [(shard, 0, MIB, 2, 0) for shard in range(8, 64)]
    async with running_node(bucket, tmp_path / "cache", offload=offload, buffer_bytes=256 * MIB) as user:
        await user.fs.hints.receive("run.plan", plan(8, cold, is_exact=True))
        await user.fs.hints.receive("run.plan", plan(64, whole, window=1))
        await fetched_by(user, 8 * sample + 56 * MIB)
        assert offload.most_alone == user.fs.cache.maintenance.large_at_once > 2
    assert offload.most_exact >= 4
    assert 1 <= offload.most_beside <= 2


async def test_exact_bytes_that_were_read_make_room_for_those_of_later_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A job says late that a step is over, as its workers may still be at it."""
    monkeypatch.setattr(range_cache, "RANGE_CACHE_BYTES", 64 * KIB)
    bucket = Bucket()
    (data,) = fill(bucket, 1, MIB)
    rows = [(0, 32 * KIB * step, 16 * KIB, step, 0) for step in range(24)]
    async with running_node(bucket, tmp_path / "cache") as user:
        await user.fs.hints.receive("run.plan", plan(1, rows, is_exact=True))
        await fetched_by(user, 3 * 16 * KIB)
        for _, start, length, step, _ in rows:
            for half in (start, start + length // 2):
                assert await read(user, name(0), half, length // 2) == data[half : half + length // 2]
                assert user.fs.cache.range_cache.held_bytes <= 64 * KIB
                await trio.sleep(0.1)
            await fetched_by(user, min(24, step + 3) * 16 * KIB)
        assert fetched(user) == 24 * 16 * KIB
        assert user.fs.cache.statistics().used_bytes == 0


async def test_exact_bytes_are_bounded_and_the_rest_comes_by_granules(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(range_cache, "RANGE_CACHE_BYTES", 32 * KIB)
    bucket = Bucket()
    (data,) = fill(bucket, 1, MIB)
    rows = [(0, 128 * KIB * number, 16 * KIB, 0, 0) for number in range(4)]
    async with running_node(bucket, tmp_path / "cache") as user:
        await user.fs.hints.receive("run.plan", plan(1, rows, is_exact=True))
        await user.fs.hints.receive("run.plan", plan(1, [(0, 0, TO_THE_END, 1, 0)], window=1))
        with trio.fail_after(60):
            while user.fs.cache.statistics().used_bytes < MIB:
                assert user.fs.cache.range_cache.held_bytes <= 32 * KIB
                await trio.sleep(0.01)
        for number in range(4):
            start = 128 * KIB * number
            assert await read(user, name(0), start, 16 * KIB) == data[start : start + 16 * KIB]
        assert user.fs.cache.statistics().bytes_by_cause["demand"] == 0


async def test_hints_that_lie_change_no_byte_and_are_told_of_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    bucket = Bucket()
    contents = fill(bucket, 4, MIB)
    rows = [
        (5, 0, TO_THE_END, 0, 0),  # not there
        (6, 0, TO_THE_END, 0, 0),
        (0, 5 * MIB, 1, 0, 0),  # behind its end
        (1, MIB - 1, TO_THE_END, 0, 9),
        (2, 3, 10, 1, 0),
        (3, 0, 100 * MIB, 2, 0),
    ]
    async with running_node(bucket, tmp_path / "cache") as user:
        await user.fs.hints.receive("liar.plan", plan(7, rows))
        await fetched_by(user, MIB)
        await trio.sleep(3)
        assert [await user.read(name(number)) for number in range(4)] == contents
        assert user.fs.hints.as_dict("liar")["skipped"] == 2
        with pytest.raises(NotFound):
            await user.read(name(5))
    told = [record for record in caplog.records if "skipped" in record.message]
    assert [record.levelname for record in told] == ["INFO"]
    assert "job=liar" in told[0].message


@pytest.mark.parametrize("is_exact", [False, True])
@pytest.mark.parametrize(
    ("start", "length"), [(0, 4096), (2 * MIB, 4096), (0, 100 * MIB)], ids=["here", "beyond", "whole"]
)
async def test_a_long_plan_of_what_need_not_be_fetched_lets_others_have_their_turns(
    tmp_path: Path, *, start: int, length: int, is_exact: bool
) -> None:
    bucket, count = Bucket(), 3000
    fill(bucket, 1, MIB)
    async with running_node(bucket, tmp_path / "cache") as user:
        await user.read(name(0))
        rows = [(0, start, length, 0, 0)] * count
        await user.fs.hints.receive("run.plan", plan(1, rows, is_exact=is_exact))
        seen = [0]
        while seen[-1] < count:
            await trio.lowlevel.checkpoint()
            assert len(seen) < 100_000
            seen.append(user.fs.hints.as_dict("run")["fetched"][0])
        assert max(after - before for before, after in itertools.pairwise(seen)) <= 200


async def test_a_job_that_goes_while_its_long_plan_is_looked_at_is_gone(tmp_path: Path) -> None:
    bucket = Bucket()
    contents = fill(bucket, 2, MIB)
    async with running_node(bucket, tmp_path / "cache") as user:
        await user.read(name(0))
        rows = [(0, 0, 4096, 0, 0)] * 3000
        for ending in ("forget", "plan", "cursor"):
            await user.fs.hints.receive("run.plan", plan(2, [*rows, (0, 0, 4096, 9, 0)]))
            for _ in range(10_000):
                await trio.lowlevel.checkpoint()
                if 0 < user.fs.hints.as_dict("run")["fetched"][0] < 3000:
                    break
            assert 0 < user.fs.hints.as_dict("run")["fetched"][0] < 3000
            match ending:
                case "forget":
                    user.fs.hints.forget("run")
                case "plan":
                    await user.fs.hints.receive("run.plan", plan(2, rows))
                    with trio.fail_after(60):
                        while user.fs.hints.as_dict("run")["fetched"] != [3000]:  # noqa: ASYNC110
                            await trio.sleep(0.01)
                case "cursor":
                    await user.fs.hints.receive("run.cursor", encode_cursor(10))
            await trio.sleep(5)
        assert user.fs.hints.as_dict("run")["windows"] == []
        user.fs.hints.forget("run")
        await user.fs.hints.receive("run.plan", plan(2, [(1, 0, TO_THE_END, 0, 0)]))
        await fetched_by(user, 2 * MIB)
        assert await user.read(name(1)) == contents[1]
        user.fs.hints.forget("run")
        await trio.sleep(1)
        versions = [bucket.memory.head(name(number)).object_id for number in range(2)]
        assert not any(map(user.fs.cache.is_open, versions))


async def test_a_file_that_is_replaced_is_read_as_it_is_now(tmp_path: Path) -> None:
    bucket = Bucket()
    fill(bucket, 2, MIB)
    async with running_node(bucket, tmp_path / "cache") as user:
        await user.tree()  # the listing is known, and becomes old
        new = random.Random(99).randbytes(MIB)
        bucket.memory.put_bytes(name(0), new)
        await trio.sleep(5)
        await user.fs.hints.receive("run.plan", plan(2, [(0, 0, TO_THE_END, 0, 0), (1, 0, TO_THE_END, 1, 0)]))
        await fetched_by(user, MIB)
        await trio.sleep(3)
        assert await user.read(name(0)) == new


@pytest.mark.parametrize("error", [None, Unavailable("reset"), Throttled("slow down"), ObjectMissing("gone")])
async def test_who_reads_exact_bytes_before_they_were_fetched_brings_these_and_no_more(
    tmp_path: Path, error: RemoteError | None
) -> None:
    bucket = Bucket()
    contents = fill(bucket, 1, MIB)
    store = FaultyStore(bucket)  # type: ignore[arg-type]
    async with running_node(store, tmp_path / "cache") as user:
        places = [step * 64 * KIB for step in range(16)]
        rows = [(0, place, 4096, step, 0) for step, place in enumerate(places)]
        await user.fs.hints.receive("run.plan", plan(1, rows, is_exact=True))
        await fetched_by(user, 3 * 4096)
        if error is not None:
            store.script(Fault(error, "get_into"))
        for _ in range(2):
            found = await read(user, name(0), places[8], 4096)
            assert found == contents[0][places[8] :][:4096]
        demanded = user.fs.cache.statistics().bytes_by_cause["demand"]
        # What fails once is asked for by those who know what to do with an error, and their granules.
        assert demanded == 4096 if error is None else demanded >= 4096


class Stuck(InlineOffload):
    """The next GET, and every look into the index, stays in its thread for so many seconds."""

    network_seconds = rows_seconds = 0.0

    async def network(self, call: Callable[..., Any], *args: object) -> Any:
        if args and isinstance(args[0], ObjectId):
            seconds, self.network_seconds = self.network_seconds, 0.0
            await stay(seconds)
        return await super().network(call, *args)

    async def rows(self, call: Callable[..., Any], *args: object) -> Any:
        await stay(self.rows_seconds)
        return await super().rows(call, *args)


async def test_a_reader_of_exact_bytes_waits_for_no_silent_connection(tmp_path: Path) -> None:
    bucket, offload = Bucket(), Stuck()
    contents = fill(bucket, 1, MIB)
    async with running_node(bucket, tmp_path / "cache", offload=offload) as user:
        rows = [(0, step * 64 * KIB, 4096, step, 0) for step in range(16)]
        await user.fs.hints.receive("run.plan", plan(1, rows, is_exact=True))
        await fetched_by(user, 3 * 4096)
        offload.network_seconds = 55.0
        began = trio.current_time()
        assert await read(user, name(0), 8 * 64 * KIB, 4096) == contents[0][8 * 64 * KIB :][:4096]
        assert trio.current_time() < began + 15


async def test_hints_that_go_while_somebody_reads_do_not_disturb_him(tmp_path: Path) -> None:
    bucket, offload = Bucket(), Stuck()
    contents = fill(bucket, 2, MIB)
    async with (
        running_node(bucket, tmp_path / "cache", offload=offload) as user,
        trio.open_nursery() as nursery,
    ):
        await user.fs.resolve(name(1))
        await user.fs.hints.receive("run.plan", plan(2, [(0, 0, 4096, 0, 0)], is_exact=True))
        await fetched_by(user, 4096)
        offload.rows_seconds = 2.0
        found: list[bytes] = []

        async def read_other() -> None:
            found.append(await read(user, name(1), 64 * KIB, 4096))

        nursery.start_soon(read_other)
        await trio.sleep(1)
        assert not found
        assert user.fs.hints.forget("run")
        await trio.sleep(10)
        assert found == [contents[1][64 * KIB :][:4096]]
        offload.rows_seconds = 0.0


@pytest.mark.parametrize("message", [b"", b"nonsense", b'{"fusecache": "plan"}\n', encode_cursor(3)])
async def test_a_refused_message_changes_nothing(tmp_path: Path, message: bytes) -> None:
    bucket = Bucket()
    fill(bucket, 2, MIB)
    async with running_node(bucket, tmp_path / "cache") as user:
        await user.fs.hints.receive("run.plan", plan(2, [(0, 0, TO_THE_END, 0, 9)]))
        await fetched_by(user, MIB)
        before = user.fs.hints.statistics()
        with pytest.raises(HintError):
            await user.fs.hints.receive("run.plan", message)
        with pytest.raises(HintError):
            await user.fs.hints.receive("run.txt", message)
        with pytest.raises(NotFound):
            await user.fs.hints.receive("nobody.cursor", encode_cursor(1))
        assert user.fs.hints.statistics()["jobs"] == before["jobs"]


async def test_two_jobs_share_the_room_and_one_that_falls_silent_is_forgotten(tmp_path: Path) -> None:
    bucket = Bucket()
    fill(bucket, 64, MIB)
    async with running_node(bucket, tmp_path / "cache", cache_bytes=16 * MIB) as user:
        for job, shards in (("one", range(32)), ("two", range(32, 64))):
            rows = [(shard, 0, MIB, step, 0) for step, shard in enumerate(shards)]
            await user.fs.hints.receive(f"{job}.plan", plan(64, rows))
        await trio.sleep(5)
        ahead = [job["fetched_bytes"] for job in user.fs.hints.statistics()["jobs"]]
        assert sum(ahead) >= 14 * MIB
        assert max(ahead) - min(ahead) <= MIB
        for second in range(int(SILENT_SECONDS // 60) + 1):
            await user.fs.hints.receive("one.cursor", encode_cursor(second))
            await trio.sleep(60)
        assert user.fs.hints.jobs() == ["one"]
        assert user.fs.hints.forget("one")
        assert user.fs.cache.hints is None


async def test_what_does_not_fit_is_not_fetched_again_and_again(tmp_path: Path) -> None:
    bucket = Bucket()
    contents = fill(bucket, 32, MIB)
    async with running_node(bucket, tmp_path / "cache", cache_bytes=16 * MIB) as user:
        # All of it is in use at once, and half of it fits.
        await user.fs.hints.receive("run.plan", plan(32, [(shard, 0, MIB, 0, 100) for shard in range(32)]))
        await trio.sleep(30)
        assert 12 * MIB <= fetched(user) <= 16 * MIB
        for _ in range(2):
            before = fetched(user)
            for shard in range(32):
                assert await user.read(name(shard)) == contents[shard]
            assert fetched(user) - before <= 20 * MIB


async def test_what_is_pinned_stays_whatever_hints_say(tmp_path: Path) -> None:
    bucket = Bucket()
    fill(bucket, 40, MIB)
    for number in range(4):
        bucket.memory.put_bytes(f"pinned/{number}", random.Random(100 + number).randbytes(MIB))
    async with running_node(bucket, tmp_path / "cache", cache_bytes=16 * MIB, pin=("pinned/",)) as user:
        for number in range(4):
            await user.read(f"pinned/{number}")
        await user.fs.hints.receive("run.plan", plan(40, [(shard, 0, MIB, shard, 0) for shard in range(40)]))
        for step in range(40):
            await user.fs.hints.receive("run.cursor", encode_cursor(step))
            await trio.sleep(1)
        before = fetched(user)
        for number in range(4):
            await user.read(f"pinned/{number}")
        assert fetched(user) == before


async def test_jobs_that_come_change_their_minds_and_go_disturb_no_reader(tmp_path: Path) -> None:
    bucket = Bucket()
    contents = fill(bucket, 12, MIB)
    rng = random.Random(5)

    async def talk(user: User, job: str) -> None:
        for _ in range(60):
            match rng.randrange(5):
                case 0:
                    user.fs.hints.forget(job)
                case 1 if job in user.fs.hints.jobs():
                    await user.fs.hints.receive(f"{job}.cursor", encode_cursor(rng.randrange(20)))
                case _:
                    is_exact = rng.random() < 0.5
                    rows = [
                        (rng.randrange(14), rng.randrange(MIB), 5000 if is_exact else TO_THE_END, step, 3)
                        for step in range(rng.randrange(12))
                    ]
                    window = rng.randrange(4)
                    if rows:
                        await user.fs.hints.receive(
                            f"{job}.plan",
                            plan(14, rows, window=window, step=rng.randrange(5), is_exact=is_exact),
                        )
            await trio.sleep(rng.choice([0, 0, 0.001, 0.3]))

    async with running_node(bucket, tmp_path / "cache", cache_bytes=8 * MIB) as user:
        async with trio.open_nursery() as nursery:
            for job in ("one", "two", "three"):
                nursery.start_soon(talk, user, job)
            for _ in range(150):
                number, start = rng.randrange(12), rng.randrange(MIB - 5000)
                assert await read(user, name(number), start, 5000) == contents[number][start : start + 5000]
                await trio.sleep(rng.choice([0, 0.01, 0.1]))
        for job in ("one", "two", "three"):
            user.fs.hints.forget(job)
        await trio.sleep(1)
        assert user.fs.cache.range_cache.held_bytes == 0
        assert not user.fs.cache.range_cache
        versions = [bucket.memory.head(name(number)).object_id for number in range(12)]
        assert not any(map(user.fs.cache.is_open, versions))


@pytest.mark.parametrize("is_exact", [False, True])
async def test_hints_of_bytes_cached_by_an_earlier_mount(
    tmp_path: Path,
    is_exact: bool,  # noqa: FBT001
) -> None:
    """A plan fetches and counts only what the cache directory lacks."""
    bucket, shards = Bucket(), 4
    contents = fill(bucket, shards, 2 * MIB)
    async with running_node(bucket, tmp_path / "cache") as user:
        for shard in range(shards - 1):
            assert await user.read(name(shard)) == contents[shard]
        await trio.sleep(5)
    bucket.gets.clear()
    length = 64 * KIB if is_exact else TO_THE_END
    rows = [(shard, 0, length, 0, 100) for shard in range(shards)]
    async with running_node(bucket, tmp_path / "cache") as user:
        await user.fs.hints.receive("run.plan", plan(shards, rows, is_exact=is_exact))
        await trio.sleep(60)
        lacking = length if is_exact else 2 * MIB
        assert set(bucket.gets) == {name(shards - 1)}
        assert fetched(user) == lacking
        for shard in range(shards):
            assert await read(user, name(shard), 0, 64 * KIB) == contents[shard][: 64 * KIB]
        assert fetched(user) == lacking
