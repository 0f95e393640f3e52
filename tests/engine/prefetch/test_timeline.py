"""Merged hints: when is what read next, compared with a list of everything that was said."""

import random
import tracemalloc
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from fusecache.engine.prefetch import timeline as module
from fusecache.engine.prefetch.plan_index import index_plan
from fusecache.engine.prefetch.timeline import Timeline
from fusecache.model.errors import NotPermitted
from fusecache.model.hints import TO_THE_END, decode_plan, encode_plan
from fusecache.model.objects import MIB
from fusecache.policy.cache.prefetch_horizon import SILENT_SECONDS

FILES = ["a", "b/c", "b/d", "e"]
PLACES = st.integers(0, 9)


@dataclass(frozen=True)
class Said:
    window: int
    path: str
    start: int
    stop: int
    first: int
    last: int


def plan(window: int, step: int, rows: list[Said], *, is_exact: bool = False) -> bytes:
    rows = sorted(rows, key=lambda row: row.first)
    return encode_plan(
        window=window,
        step=step,
        paths=FILES,
        path=[FILES.index(row.path) for row in rows],
        start=[row.start for row in rows],
        length=[row.stop - row.start for row in rows],
        first=[row.first for row in rows],
        span=[row.last - row.first for row in rows],
        is_exact=is_exact,
    )


def take(timeline: Timeline, job: str, message: bytes, now: float) -> None:
    timeline.add(job, index_plan(decode_plan(message)), now)


class Jobs(RuleBasedStateMachine):
    """Two jobs say things; a list remembers all of it."""

    @initialize()
    def begin(self) -> None:
        self.timeline = Timeline()
        self.said: dict[str, list[Said]] = {}
        self.steps: dict[str, int] = {}
        self.with_cursor: set[str] = set()
        self.now = 0.0

    @rule(
        job=st.sampled_from("xy"),
        window=st.integers(0, 3),
        step=st.integers(0, 30),
        rows=st.lists(
            st.tuples(st.sampled_from(FILES), PLACES, PLACES, st.integers(0, 40), st.integers(0, 5))
        ),
    )
    def plan(self, job: str, window: int, step: int, rows: list[tuple[str, int, int, int, int]]) -> None:
        new = [
            Said(window, path, start, start + size + 1, first, first + span)
            for path, start, size, first, span in rows
        ]
        take(self.timeline, job, plan(window, step, new), self.now)
        self.said[job] = [each for each in self.said.get(job, []) if each.window < window] + new
        self._come_to(job, step)

    @rule(job=st.sampled_from("xy"), step=st.integers(0, 50), seconds=st.floats(0, 10))
    def cursor(self, job: str, step: int, seconds: float) -> None:
        self.now += seconds
        assert self.timeline.move(job, step, self.now) == (job in self.said)
        if job in self.said:
            self.with_cursor.add(job)
            self._come_to(job, step)

    def _come_to(self, job: str, step: int) -> None:
        # Windows behind a job that has said its step are gone, also if it goes back later.
        has_said = job in self.with_cursor or step > self.steps.get(job, step)
        self.steps[job] = step
        if not has_said:
            return
        windows = {each.window for each in self.said[job]}
        dead = {w for w in windows if max(e.last for e in self.said[job] if e.window == w) < step}
        self.said[job] = [each for each in self.said[job] if each.window not in dead]

    @rule(job=st.sampled_from("xy"))
    def forget(self, job: str) -> None:
        assert self.timeline.forget(job) == (job in self.said)
        self.said.pop(job, None)
        self.with_cursor.discard(job)
        self.steps.pop(job, None)

    @invariant()
    def next_uses_are_those_that_were_said(self) -> None:
        for path in [*FILES, "nobody's"]:
            for start in range(0, 20, 3):
                expected = [
                    max(0, each.first - self.steps[job]) * self.timeline.jobs[job].step_rate.seconds
                    for job, rows in self.said.items()
                    for each in rows
                    if each.path == path
                    and each.last >= self.steps[job]
                    and each.start < start + 3
                    and start < each.stop
                ]
                assert self.timeline.next_use(path, start, start + 3) == min(expected, default=None)

    @invariant()
    def fronts_go_through_what_is_not_over(self) -> None:
        for job, rows in self.said.items():
            left = sorted((each.window, each.first) for each in rows if each.last >= self.steps[job])
            front = self.timeline.jobs[job].front(is_exact=False)
            assert (front is None) == (not left)
            if front is not None:
                assert (front.index.plan.window, front.first) == left[0]


Jobs.TestCase.settings = settings(max_examples=40, stateful_step_count=20, deadline=None)
TestJobs = Jobs.TestCase


def encode_order(order: Sequence[int], *, step: int = 1) -> bytes:
    """A plan of files of `whole` in an order, one each so many steps."""
    return encode_plan(
        window=0,
        step=0,
        paths=[f"train/shard.{number:07d}.mds" for number in range(len(order))],
        path=order,
        start=[0] * len(order),
        length=[TO_THE_END] * len(order),
        first=range(0, len(order) * step, step),
        span=[0] * len(order),
    )


def whole(count: int, window: int = 0) -> bytes:
    """A plan that reads so many files, one a step."""
    return encode_plan(
        window=window,
        step=0,
        paths=[f"train/shard.{number:07d}.mds" for number in range(count)],
        path=range(count),
        start=[0] * count,
        length=[TO_THE_END] * count,
        first=range(count),
        span=[0] * count,
    )


def test_a_million_extents_take_less_than_200_mb(monkeypatch: pytest.MonkeyPatch) -> None:
    assert module.MOST_EXTENTS == 1_000_000
    timeline, count = Timeline(), 50_000
    message = whole(count)
    tracemalloc.start()
    take(timeline, "job", message, 0.0)
    current, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert current * module.MOST_EXTENTS / count < 200e6
    monkeypatch.setattr(module, "MOST_EXTENTS", count)
    with pytest.raises(NotPermitted, match="too many"):
        take(timeline, "other", whole(1), 0.0)
    assert list(timeline.jobs) == ["job"]
    take(timeline, "job", message, 0.0)  # the same window again
    with pytest.raises(NotPermitted, match="too many"):
        take(timeline, "job", whole(1, window=1), 0.0)


@pytest.mark.parametrize("length", [20, 200, 4000])
def test_paths_that_no_extent_names_take_no_more_memory_than_extents(length: int) -> None:
    """Nor do windows that name nothing at all: memory is bounded whatever is said."""
    timeline = Timeline()
    paths = [f"{number:0{length}d}" for number in range(200_000 // length)]
    message = encode_plan(window=0, step=0, paths=paths, path=[], start=[], length=[], first=[], span=[])
    tracemalloc.start()
    plan = decode_plan(message)
    indexed = index_plan(plan)
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    timeline.add("job", indexed, 0.0)
    share = timeline.jobs["job"].weight / module.MOST_EXTENTS
    assert share >= len(paths) / module.MOST_EXTENTS
    assert held <= 250e6 * share
    fitting = min(module.MOST_PLANS, int(1 / share))
    for window in range(1, fitting):
        timeline.add("job", replace(indexed, plan=replace(plan, window=window)), 0.0)
    with pytest.raises(NotPermitted, match="all jobs together"):
        timeline.add("job", replace(indexed, plan=replace(plan, window=fitting)), 0.0)


def test_windows_are_bounded_over_all_jobs() -> None:
    """Whoever reads a file asks each of them, be it named there or not."""
    timeline = Timeline()
    for window in range(module.MOST_PLANS // 2):
        for job in ("one", "two"):
            take(timeline, job, plan(window, 0, [Said(window, "a", 0, 1, 10 + window, 10 + window)]), 0.0)
    with pytest.raises(NotPermitted, match="all jobs together"):
        take(timeline, "one", plan(window + 1, 0, []), 0.0)
    with pytest.raises(NotPermitted, match="all jobs together"):
        take(timeline, "three", plan(0, 0, []), 0.0)
    assert list(timeline.jobs) == ["one", "two"]
    take(timeline, "one", plan(window, 0, []), 0.0)  # in the place of another
    timeline.move("two", 12, 1.0)
    take(timeline, "three", plan(0, 0, []), 1.0)


def test_a_plan_takes_the_place_of_its_window_and_of_later_ones() -> None:
    timeline = Timeline()
    for window in range(3):
        take(timeline, "job", plan(window, 0, [Said(window, "a", 0, 1, 10 * window, 10 * window)]), 0.0)
    take(timeline, "job", plan(1, 0, [Said(1, "e", 0, 1, 15, 15)]), 0.0)
    assert [window.plan.window for window in timeline.jobs["job"].plans] == [0, 1]
    assert timeline.next_use("a", 0, 1) == 0.0
    timeline.move("job", 1, 1.0)
    assert timeline.next_use("a", 0, 1) is None


def test_the_soonest_of_all_jobs_counts_each_at_its_pace() -> None:
    timeline = Timeline()
    take(timeline, "fast", plan(0, 0, [Said(0, "a", 0, 1, 100, 100)]), 0.0)
    take(timeline, "slow", plan(0, 0, [Said(0, "a", 0, 1, 20, 20), Said(0, "e", 0, 1, 30, 30)]), 0.0)
    for second in range(1, 11):
        timeline.move("fast", second * 8, float(second))
        timeline.move("slow", second, float(second))
    assert timeline.next_use("a", 0, 1) == pytest.approx((100 - 80) / 8)
    assert timeline.next_use("e", 0, 1) == pytest.approx(20)


def test_a_job_without_a_cursor_moves_by_its_reads_and_lags_rather_than_leads() -> None:
    timeline = Timeline()
    take(timeline, "job", whole(100), 0.0)
    for number in (0, 1, 2, 3, 60, 4, 5, 6, 7, 8, 9):
        timeline.on_read(f"train/shard.{number:07d}.mds", 5, 1, 10.0 + number, has_waited=False)
    assert timeline.jobs["job"].step == 2  # the smallest of the last 8 near it
    assert timeline.follows("train/shard.0000050.mds")
    assert not timeline.follows("of no job")
    timeline.move("job", 20, 30.0)
    assert not timeline.follows("train/shard.0000050.mds")
    for number in range(50, 60):
        timeline.on_read(f"train/shard.{number:07d}.mds", 5, 1, 31.0, has_waited=False)
    assert timeline.jobs["job"].step == 20  # it says itself where it is


def read(timeline: Timeline, numbers: Iterable[int], *, times: int = 8) -> None:
    """Read files of `whole`, each in so many parts."""
    for number in numbers:
        for part in range(times):
            timeline.on_read(f"train/shard.{number:07d}.mds", part * MIB, MIB, 1.0, has_waited=False)


def test_a_file_that_another_program_reads_moves_no_job() -> None:
    timeline = Timeline()
    take(timeline, "job", whole(100), 0.0)
    job = timeline.jobs["job"]
    for own in range(90):
        read(timeline, [own])
        assert job.step == own
        read(timeline, [95 if own < 80 else 5], times=100)
        assert job.step == own
    assert timeline.names("train/shard.0000089.mds")


def test_a_look_into_each_file_before_the_first_epoch_moves_a_job_for_a_few_files_only() -> None:
    timeline = Timeline()
    take(timeline, "job", whole(60), 0.0)
    job = timeline.jobs["job"]
    read(timeline, range(60), times=1)
    assert job.step > 50
    read(timeline, range(3))
    assert timeline.follows("train/shard.0000003.mds")  # its reads are still wanted
    read(timeline, [3])
    front = job.front(is_exact=False)
    assert (front and front.first) == job.step == 0
    for own in range(4, 60):
        read(timeline, [own])
        assert job.step == own


def test_two_runs_that_read_the_same_files_in_orders_of_their_own_are_both_followed() -> None:
    timeline, choice = Timeline(), random.Random(3)
    orders = {f"run{seed}": random.Random(seed).sample(range(1000), 1000) for seed in (1, 2)}
    for job, order in orders.items():
        take(timeline, job, encode_order(order), 0.0)
    done = dict.fromkeys(orders, 0)
    while max(done.values()) < 60 * 64:
        job = choice.choice(list(orders))
        read(timeline, [orders[job][done[job] // 64]], times=1)
        done[job] += 1
        assert abs(timeline.jobs[job].step - done[job] // 64) <= 2


def test_a_job_that_begins_elsewhere_or_again_is_followed() -> None:
    timeline = Timeline()
    take(timeline, "job", whole(2000), 0.0)
    job = timeline.jobs["job"]
    read(timeline, range(1000, 1010))
    assert job.step == 1009
    read(timeline, range(300, 310), times=1)  # small files, so that it lags
    assert 300 <= job.step < 310
    read(timeline, range(1990, 2000))
    read(timeline, range(10))  # a replay whose program reads another epoch
    assert job.step == 9
    read(timeline, range(0, 2000, 3))  # it skips files
    assert job.step == 1998


def test_a_job_of_whose_steps_few_lie_on_a_mount_is_followed_closely() -> None:
    timeline, count = Timeline(), 200
    take(timeline, "job", encode_order(range(count), step=100), 0.0)
    for number in range(count):
        read(timeline, [number])
        assert timeline.jobs["job"].step == number * 100


def test_a_job_goes_back_four_windows_at_most_and_their_room_is_for_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "MOST_PLANS", 7)
    timeline = Timeline()
    for window in range(7):
        rows = [Said(window, "a", at, at + 1, at, at) for at in range(window * 20, window * 20 + 20)]
        take(timeline, "job", plan(window, 0, rows), 0.0)
    job = timeline.jobs["job"]

    def go(start: int) -> list[int]:
        for at in range(start, start + 20):
            timeline.on_read("a", at, 1, 1.0, has_waited=False)
        return [index.plan.window for index in job.plans]

    assert go(120) == [2, 3, 4, 5, 6]
    assert go(40) == [2, 3, 4, 5, 6]
    assert 40 <= job.step < 60
    assert go(0) == [2, 3, 4, 5, 6]  # no longer known
    assert 40 <= job.step < 60
    go(120)
    take(timeline, "other", plan(0, 0, []), 2.0)
    take(timeline, "other", plan(1, 0, []), 2.0)
    assert len(job.plans) == 5
    take(timeline, "other", plan(2, 0, []), 2.0)
    assert [index.plan.window for index in job.plans] == [6]


def test_a_job_that_says_where_it_is_does_not_go_back_by_reads() -> None:
    timeline = Timeline()
    take(timeline, "job", whole(100), 0.0)
    timeline.move("job", 50, -10.0)
    read(timeline, range(20))
    assert timeline.jobs["job"].step == 50
    read(timeline, range(60, 70))  # it has not said so for a while
    assert timeline.jobs["job"].step == 69


def test_a_silent_job_is_forgotten_and_one_that_reads_is_not() -> None:
    timeline = Timeline()
    for job in ("silent", "reading"):
        take(timeline, job, plan(0, 0, [Said(0, "a" if job == "reading" else "e", 0, 1, 1, 1)]), 0.0)
    timeline.on_read("a", 0, 1, SILENT_SECONDS - 1, has_waited=True)
    assert timeline.forget_silent(SILENT_SECONDS) == ["silent"]
    assert list(timeline.jobs) == ["reading"]
    assert timeline.next_use("e", 0, 1) is None
    assert timeline.jobs["reading"].missed_bytes == 1


def test_a_job_without_a_cursor_lives_while_anything_is_fetched_for_it() -> None:
    """A replay of a large recording takes longer than ten minutes, and its program may begin after that."""
    timeline = Timeline()
    for job in ("replay", "loader"):
        take(timeline, job, whole(100), 0.0)
    timeline.move("loader", 0, 0.0)
    for job in timeline.running():
        front = job.front(is_exact=False)
        assert front is not None
        job.on_fetched(front, MIB, SILENT_SECONDS - 1)
    assert timeline.forget_silent(SILENT_SECONDS) == ["loader"]
    assert timeline.forget_silent(2 * SILENT_SECONDS - 1) == ["replay"]


def test_a_job_that_says_where_it_is_is_not_kept_by_what_others_read_of_the_same_files() -> None:
    timeline = Timeline()
    for job in ("killed", "alive"):
        take(timeline, job, whole(100), 0.0)
        timeline.move(job, 0, 1.0)
    for number in range(50):
        now = 1.0 + 20 * number
        timeline.move("alive", number, now)
        timeline.on_read(f"train/shard.{number:07d}.mds", 0, 4096, now, has_waited=False)
        if (now - 1.0) < SILENT_SECONDS:
            assert timeline.forget_silent(now) == []
        elif "killed" in timeline.jobs:
            assert timeline.forget_silent(now) == ["killed"]
    assert list(timeline.jobs) == ["alive"]
    # A new plan is a word of its own.
    take(timeline, "alive", whole(100, window=1), 2000.0)
    assert timeline.forget_silent(2000.0 + SILENT_SECONDS - 1) == []


def test_a_job_that_has_ended_is_moved_by_nobody_and_goes_on_when_it_speaks_again() -> None:
    timeline = Timeline()
    take(timeline, "job", plan(0, 0, [Said(0, "a", 0, 10, step, step) for step in range(20)]), 0.0)
    timeline.move("job", 1, 1.0)
    timeline.end("job", 2.0)
    for now in range(10, 30):
        assert not timeline.on_read("a", 0, 10, float(now), has_waited=False)
    assert timeline.jobs["job"].step == 1
    assert not timeline.running()
    assert not timeline.names("a")
    assert timeline.next_use("a", 0, 10) is not None  # it may be started again
    assert timeline.move("job", 2, 40.0)
    assert [job.step for job in timeline.running()] == [2]
    timeline.end("job", 41.0)
    take(timeline, "job", plan(0, 0, [Said(0, "a", 0, 10, 0, 0)]), 42.0)
    assert len(timeline.running()) == 1


def test_jobs_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_JOBS", 2)
    timeline = Timeline()
    for job in ("a", "b"):
        take(timeline, job, whole(1), 0.0)
    with pytest.raises(NotPermitted):
        take(timeline, "c", whole(1), 0.0)
    take(timeline, "a", whole(2), 0.0)
    assert timeline.jobs["a"].extents == 2


@pytest.mark.parametrize("limit", ["MOST_JOBS", "MOST_PLANS", "MOST_EXTENTS"])
def test_jobs_that_ended_make_room_for_others(monkeypatch: pytest.MonkeyPatch, limit: str) -> None:
    """Workers that end with each epoch are jobs, too: they would be all that a mount takes hints for."""
    monkeypatch.setattr(module, limit, 3)
    timeline = Timeline()
    for job in ("a", "b", "c"):
        take(timeline, job, whole(1), 0.0)
    timeline.end("b", 1.0)
    timeline.end("a", 2.0)
    take(timeline, "d", whole(1), 3.0)
    assert list(timeline.jobs) == ["a", "c", "d"]
    take(timeline, "e", whole(1), 4.0)
    assert list(timeline.jobs) == ["c", "d", "e"]
    with pytest.raises(NotPermitted, match="all jobs together may"):
        take(timeline, "f", whole(1), 5.0)
    assert list(timeline.jobs) == ["c", "d", "e"]


def test_of_many_small_extents_of_one_file_the_next_is_found() -> None:
    timeline, count = Timeline(), 5000
    take(
        timeline,
        "job",
        encode_plan(
            window=0,
            step=0,
            paths=["a"],
            path=[0] * count,
            start=[number * 10 for number in range(count)],
            length=[10] * count,
            first=range(count),
            span=[0] * count,
        ),
        0.0,
    )
    timeline.move("job", 4000, 0.0)
    assert timeline.next_use("a", 40_000, 40_010) == 0.0
    assert timeline.next_use("a", 41_000, 41_010) == pytest.approx(10.0)
    assert timeline.next_use("a", 0, 10) is None


def exact(rows: list[tuple[int, int]], *, first: list[int] | None = None) -> module.PlanIndex:
    """An exact plan of (start, length) in one file, one a step."""
    return index_plan(
        decode_plan(
            encode_plan(
                window=0,
                step=0,
                is_exact=True,
                paths=["a"],
                path=[0] * len(rows),
                start=[start for start, _ in rows],
                length=[length for _, length in rows],
                first=range(len(rows)) if first is None else first,
                span=[0] * len(rows),
            )
        )
    )


def parts(steps: range, window: int) -> bytes:
    """A plan of parts of one file, in a random order that its steps make."""
    return encode_plan(
        window=window,
        step=0,
        paths=["text.bin"],
        path=[0] * len(steps),
        start=[place_of(step) for step in steps],
        length=[4096] * len(steps),
        first=steps,
        span=[0] * len(steps),
    )


def place_of(step: int) -> int:
    """Return where the part of a step lies."""
    return step * 7919 % 16384 * 4096


def parallel(workers: int, batch: int, count: int) -> list[int]:
    """Return steps as workers read them side by side: worker w reads batches w, w + workers, …"""
    return [
        (first + worker) * batch + place
        for first in range(0, count // batch, workers)
        for place in range(batch)
        for worker in range(workers)
    ]


@pytest.mark.parametrize(("workers", "batch"), [(1, 512), (4, 128), (8, 64), (4, 512), (8, 256)])
def test_workers_that_read_parts_of_one_file_far_ahead_of_each_other_are_followed(
    workers: int, batch: int
) -> None:
    timeline, count = Timeline(), 16_384
    take(timeline, "job", parts(range(512), 0), 0.0)
    take(timeline, "job", parts(range(512, count), 1), 0.0)
    for now, step in enumerate(parallel(workers, batch, count)):
        timeline.on_read("text.bin", place_of(step), 4096, now / 1000, has_waited=True)
        behind = now - timeline.jobs["job"].step
        assert behind <= 2 * workers * batch
    assert timeline.jobs["job"].other_bytes == 0


def test_the_next_use_of_a_file_of_many_parts_is_found_whatever_bytes_are_looked_at() -> None:
    timeline = Timeline()
    take(timeline, "job", parts(range(16_384), 0), 0.0)
    assert timeline.next_use("text.bin", 0, 64 * MIB) == 0.0
    late = place_of(9000)
    assert timeline.next_use("text.bin", late, late + 4096) == pytest.approx(900.0)


def test_extents_that_lie_over_each_other_cost_a_reader_little() -> None:
    window = exact([(number, 1 << 40) for number in range(5000)])
    for start in (0, 2500, 1 << 30):
        found = list(window.steps_of("a", 0, start, start + 4096))
        assert 0 < len(found) <= 1000


@pytest.mark.parametrize("place", [0, 2500, 4999])
def test_small_extents_beside_a_large_one_are_found(place: int) -> None:
    window = exact([(0, 1 << 20), *((number * 100, 100) for number in range(5000))])
    assert 1 + place in window.steps_of("a", 0, place * 100 + 10, place * 100 + 20)


def test_what_lies_behind_a_job_is_gone_through_by_and_by() -> None:
    timeline, count = Timeline(), 5000
    timeline.add("job", exact([(0, 1)] * count, first=[0] * (count - 1) + [9]), 0.0)
    timeline.move("job", 5, 1.0)
    job = timeline.jobs["job"]
    (window,) = job.plans
    calls = 0
    while (front := job.front(is_exact=True)) is not None and front.last < job.step:
        window.front += 1
        calls += 1
        assert window.front <= calls * 1000
    assert calls > 0
    assert front is None  # the last one's turn has not come
    window.read_to = 9
    front = job.front(is_exact=True)
    assert front is not None
    assert front.row == count - 1


EXTENTS = st.builds(
    lambda path, start, length, first, span: Said(0, path, start, start + length, first, first + span),
    st.sampled_from(FILES),
    st.integers(0, 40),
    st.integers(1, 12),
    st.integers(0, 6),
    st.integers(0, 3),
)


@given(
    said=st.lists(EXTENTS, min_size=1, max_size=30),
    is_exact=st.booleans(),
    step=st.integers(0, 10),
    start=st.integers(0, 50),
    length=st.integers(1, 20),
)
def test_all_extents_that_hold_a_read_are_found_and_no_others(
    said: list[Said], *, is_exact: bool, step: int, start: int, length: int
) -> None:
    window = index_plan(decode_plan(plan(0, 0, said, is_exact=is_exact)))
    stop = start + length
    for path in [*FILES, "none"]:
        wanted = [
            row.first
            for row in said
            if row.path == path and row.start < stop and start < row.stop and row.last >= step
        ]
        assert sorted(window.steps_of(path, step, start, stop)) == sorted(wanted)


def test_of_samples_in_the_same_pages_the_soonest_is_meant() -> None:
    """Who reads pages at the borders of a sample reads a bit of its neighbours, too, whose turn may be far off."""
    timeline = Timeline()
    rows = [Said(0, "a", 0, 5000, 40, 40), Said(0, "a", 5000, 9000, 3, 3), Said(0, "a", 9000, 14000, 60, 60)]
    take(timeline, "job", plan(0, 0, rows, is_exact=True), 0.0)
    job = timeline.jobs["job"]
    assert timeline.exact_use("a", 4096, 12288) == (job, 3)
    timeline.on_read("a", 4096, 8192, 1.0, has_waited=True)
    assert job.plans[0].read_to == 3
    assert timeline.exact_use("a", 14000, 15000) is None
    assert timeline.exact_use("b/c", 0, 15000) is None


def test_who_reads_whole_files_is_not_taken_for_who_reads_samples() -> None:
    """Else the exact bytes of all steps would be near, and come before the files that hold them."""
    timeline, sample = Timeline(), 4096
    rows = [Said(0, "a", step * MIB, step * MIB + sample, step, step) for step in range(64)]
    take(timeline, "job", plan(0, 0, rows, is_exact=True), 0.0)
    window = timeline.jobs["job"].plans[0]
    timeline.move("job", 0, 0.5)
    for step in reversed(range(64)):
        timeline.on_read("a", step * MIB, MIB, 1.0, has_waited=False)
    timeline.on_read("a", 63 * MIB, sample, 1.0, has_waited=False)  # its last piece
    assert window.read_to == -1
    for step in (2, 4, 15):  # by several workers
        timeline.on_read("a", step * MIB, 32 * sample, 1.0, has_waited=False)
        assert window.read_to == step
    timeline.move("job", 30, 2.0)  # pages had all until there
    timeline.on_read("a", 46 * MIB, sample, 3.0, has_waited=False)
    assert window.read_to == 46


def test_a_sign_of_life_leaves_the_step_to_the_reads() -> None:
    timeline = Timeline()
    take(timeline, "job", whole(100), 0.0)
    assert not timeline.move("other", None, 0.0)
    for number in range(10):
        timeline.on_read(f"train/shard.{number:07d}.mds", 5, 1, 1.0, has_waited=False)
        assert timeline.move("job", None, 1.0)
    job = timeline.jobs["job"]
    assert (job.step, job.last_message_at) == (2, 1.0)
    # Nor does it end the job's life by its reads.
    timeline.on_read("train/shard.0000010.mds", 5, 1, 500.0, has_waited=False)
    assert timeline.forget_silent(1000.0) == []


def test_an_order_that_never_happens_is_astray_until_one_of_its_files_is_read() -> None:
    timeline = Timeline()
    take(timeline, "wrong", whole(100), 0.0)
    take(timeline, "exact", whole(100), 0.0)
    timeline.move("exact", 0, 0.0)
    wrong, exact = timeline.jobs["wrong"], timeline.jobs["exact"]
    wrong.fetched_bytes = exact.fetched_bytes = module.ASTRAY_BYTES
    timeline.on_read("train/shard.0000000.mds", 5, 1, 0.5, has_waited=True)
    for _ in range(2):
        assert not wrong.is_astray
        for _ in range(2):
            timeline.on_read("elsewhere", 0, module.ASTRAY_BYTES // 2, 1.0, has_waited=True)
        assert wrong.is_astray
        assert not exact.is_astray  # it says itself where it is
        assert timeline.on_read("train/shard.0000000.mds", 5, 1, 2.0, has_waited=True)  # fetching goes on
    wrong.fetched_bytes -= 1
    timeline.on_read("elsewhere", 0, module.ASTRAY_BYTES, 3.0, has_waited=True)
    assert not wrong.is_astray  # it has cost too little


def test_a_program_may_load_a_checkpoint_before_it_reads_what_it_planned() -> None:
    timeline = Timeline()
    take(timeline, "job", whole(100), 0.0)
    job = timeline.jobs["job"]
    for _ in range(2):
        job.fetched_bytes = 20 << 30
        timeline.on_read("checkpoint", 0, 7 << 30, 1.0, has_waited=True)
        assert not job.is_astray
        assert timeline.on_read("train/shard.0000000.mds", 5, 1, 2.0, has_waited=True) is job.is_astray
        timeline.on_read("elsewhere", 0, module.ASTRAY_BYTES, 3.0, has_waited=True)
        assert job.is_astray
        take(timeline, "job", whole(100), 4.0)  # another pass, or the run is started again


def test_an_order_of_which_nothing_is_ever_read_stops_to_cost() -> None:
    timeline = Timeline()
    take(timeline, "job", whole(100), 0.0)
    job = timeline.jobs["job"]
    job.fetched_bytes = module.UNBEGUN_BYTES
    timeline.on_read("elsewhere", 0, module.UNBEGUN_BYTES - 1, 1.0, has_waited=True)
    assert not job.is_astray
    timeline.on_read("elsewhere", 0, 1, 1.0, has_waited=True)
    assert job.is_astray
    take(timeline, "job", whole(100, window=1), 2.0)  # more of the same order
    assert job.is_astray
    assert timeline.on_read("train/shard.0000000.mds", 5, 1, 3.0, has_waited=True)  # fetching goes on
    assert not job.is_astray
