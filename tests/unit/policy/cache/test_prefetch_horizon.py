"""How far ahead, whose turn, at what pace."""

import random
from collections.abc import Iterable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fusecache.model.objects import GIB, MIB
from fusecache.policy.cache import prefetch_horizon as module
from fusecache.policy.cache.eviction import EvictionCandidate, choose_victims
from fusecache.policy.cache.prefetch_horizon import (
    DEFAULT_SECONDS_PER_STEP,
    LEAD_BYTES_MAX,
    LEAD_SHARE_MOST,
    LOST_STEPS,
    NEAR_STEPS,
    JobFront,
    ReadSteps,
    StepRate,
    choose_front,
    first_of_run,
    lead_bytes,
    may_replace,
    observe_step,
)

fronts = st.lists(
    st.builds(JobFront, st.floats(0, 1e6), st.integers(1, 8 * MIB), st.integers(0, GIB)), max_size=6
)


@given(fronts, st.integers(0, GIB), st.integers(-GIB, GIB))
def test_the_soonest_of_those_with_room_is_fetched(fronts: list[JobFront], lead: int, free: int) -> None:
    chosen = choose_front(fronts, lead=lead, free_bytes=free)
    allowed = [front for front in fronts if front.nbytes <= free or may_replace(front, lead)]
    if chosen is None:
        assert not allowed
    else:
        assert fronts[chosen] in allowed
        assert fronts[chosen].seconds == min(front.seconds for front in allowed)


def test_a_job_that_is_far_ahead_holds_up_no_other() -> None:
    ahead, behind = JobFront(1.0, MIB, 100 * MIB), JobFront(50.0, MIB, 0)
    assert choose_front([ahead, behind], lead=10 * MIB, free_bytes=0) == 1


def test_something_is_fetched_however_small_the_lead_is() -> None:
    assert choose_front([JobFront(5.0, 8 * MIB, 0)], lead=0, free_bytes=0) == 0
    assert choose_front([JobFront(5.0, 8 * MIB, 1)], lead=0, free_bytes=0) is None


@given(st.integers(0, 1 << 50), st.floats(0, 1e12), st.integers(0, 64))
def test_the_lead_is_a_bounded_part_of_the_room_shared_by_all(room: int, rate: float, jobs: int) -> None:
    lead = lead_bytes(room, rate, jobs)
    assert 0 <= lead * max(1, jobs) <= min(room // LEAD_SHARE_MOST, LEAD_BYTES_MAX)
    assert lead_bytes(room, rate, jobs) >= lead_bytes(room, 0, jobs)


@given(
    st.lists(st.tuples(st.integers(0, 30), st.none() | st.floats(0, 100)), min_size=1, max_size=30),
    st.floats(0, 100),
    st.integers(1, 40 * MIB),
    st.randoms(use_true_random=False),
)
def test_what_is_used_sooner_never_goes_for_what_is_fetched(
    cached: list[tuple[int, float | None]], incoming: float, need: int, rng: random.Random
) -> None:
    uses = {(number, block): use for block, (number, use) in enumerate(cached)}
    sample = [EvictionCandidate(number, block, MIB, rng.randrange(1000)) for number, block in uses]
    victims = choose_victims(
        sample,
        need,
        clock=1000,
        next_use=lambda each: uses[each.file_number, each.block],
        used_no_later_than=incoming,
    )
    gone = [uses[each.file_number, each.block] for each in victims]
    assert all(use is None or use > incoming for use in gone)
    # The farthest goes first, and blocks without a known use before them.
    left = [uses[each.file_number, each.block] for each in sample if each not in victims]
    if any(use is not None for use in gone):
        assert None not in left
        worst = max(use for use in left if use is not None) if left else 0.0
        assert worst <= min(use for use in gone if use is not None) or worst <= incoming


def test_a_pace_is_learned_and_a_pause_is_no_pace() -> None:
    pace = StepRate()
    assert pace.seconds == DEFAULT_SECONDS_PER_STEP
    for step in range(20):
        pace = observe_step(pace, step * 10, step * 5.0)
    assert abs(pace.seconds - 0.5) < 1e-6
    after_pause = observe_step(pace, 191, 95.0 + 600)
    assert after_pause.seconds < 0.7
    slower = after_pause
    for step in range(40):
        slower = observe_step(slower, 192 + step, 700.0 + step * 10)
    assert abs(slower.seconds - 10) < 1


def test_a_job_that_goes_back_keeps_its_pace() -> None:
    pace = observe_step(observe_step(StepRate(), 100, 10.0), 40, 11.0)
    assert pace.seconds == 0.1
    assert (pace.step, pace.since) == (40, 11.0)


def follow(reads: Iterable[int], *, step: int = 0) -> int:
    """Return the step of a job that was at a step, after reads of these steps, each of one step only."""
    followed = ReadSteps()
    for read in reads:
        is_near = step <= read <= step + NEAR_STEPS
        step = followed.add_near(step, read) if is_near else followed.add_away(step, [read])
    return step


@given(st.lists(st.integers(0, 1000), min_size=1), st.integers(0, 1000))
def test_reads_never_put_a_job_at_a_step_that_was_not_read(steps: list[int], step: int) -> None:
    assert follow(steps, step=step) in {step, *steps}


@given(st.integers(NEAR_STEPS + 1, 1000), st.integers(1, 1000))
def test_one_file_read_far_away_moves_no_job_however_often(away: int, times: int) -> None:
    assert follow([away] * times) == 0
    assert follow([0] * times, step=away) == away


def test_reads_far_away_between_those_near_a_job_move_it_nowhere() -> None:
    reads = [step for place in range(100) for step in (place, 500 + place)]
    assert 90 <= follow(reads) < 100


@pytest.mark.parametrize("start", [0, 20, 900])
def test_a_run_elsewhere_moves_a_job_there_and_back(start: int) -> None:
    assert follow([start, start + 1, start + 2], step=300) == 300
    assert follow([start, start + 1, start + 2, start + 3], step=300) == start
    assert follow([start + 3, start + 2, start + 1, start], step=300) == 300


def test_runs_of_workers_side_by_side_begin_at_the_smallest_step() -> None:
    assert follow([step * 64 + place for place in range(8) for step in range(7, 15)]) == 448


def test_a_job_that_skips_or_mixes_files_is_followed_and_does_not_go_back() -> None:
    skipping = follow(range(0, 10_000, 100))
    assert 9000 - LOST_STEPS * 200 <= skipping < 10_000
    mixed = [step for step in random.Random(1).sample(range(4000), 4000) if step < 3900]
    assert follow(mixed, step=3990) == 3990


def test_many_reads_of_one_file_far_away_cost_little(monkeypatch: pytest.MonkeyPatch) -> None:
    """A foreign copy of a large file is thousands of reads, on the path of all of them."""
    searches: list[int] = []

    def count(reads: Sequence[int]) -> int | None:
        searches.append(len(reads))
        return first_of_run(reads)

    monkeypatch.setattr(module, "first_of_run", count)
    follow([500] * 1000 + [600] * 1000)
    assert searches == [1, 2]
