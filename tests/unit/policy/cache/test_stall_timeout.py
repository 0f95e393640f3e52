"""How long a silent request may wait."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fusecache.policy.cache.stall_timeout import (
    CEILING_SECONDS,
    FIRST_SECONDS,
    FLOOR_SECONDS,
    REMEMBERED,
    WaitHistory,
    deadline_seconds,
)

SECONDS = st.floats(0, 1000)


def waits_of(seconds: list[float]) -> WaitHistory:
    waits = WaitHistory()
    for each in seconds:
        waits.record(each)
    return waits


@given(st.lists(SECONDS))
def test_a_deadline_stays_between_its_bounds(seconds: list[float]) -> None:
    assert FLOOR_SECONDS <= waits_of(seconds).deadline_seconds <= CEILING_SECONDS


@given(st.lists(SECONDS, min_size=1).map(sorted), st.floats(0, 100))
def test_a_slower_link_never_has_a_shorter_deadline(seconds: list[float], more: float) -> None:
    assert deadline_seconds([each + more for each in seconds]) >= deadline_seconds(seconds)


@given(st.floats(0.001, CEILING_SECONDS / 8))
def test_a_steady_link_is_never_shot_at(seconds: float) -> None:
    """Waits that vary by the half, as a distant bucket's do, stay far below the deadline."""
    deadline = waits_of([seconds * (0.5 + n % 11 / 10) for n in range(100)]).deadline_seconds
    assert deadline >= 3 * seconds * 1.5


def test_before_anything_is_known_the_deadline_is_patient() -> None:
    assert WaitHistory().deadline_seconds == FIRST_SECONDS
    assert waits_of([0.05] * 3).deadline_seconds == FIRST_SECONDS
    assert waits_of([4.0]).deadline_seconds == 16.0


def test_a_near_bucket_is_given_little_time() -> None:
    assert waits_of([0.05] * 100).deadline_seconds == FLOOR_SECONDS


def test_a_few_stalls_among_many_answers_change_nothing() -> None:
    assert waits_of([0.05] * 8 + [FLOOR_SECONDS]).deadline_seconds == FLOOR_SECONDS
    assert waits_of(([0.05] * 19 + [FLOOR_SECONDS]) * 10).deadline_seconds == FLOOR_SECONDS


@pytest.mark.parametrize("known", [0, 8, 50, REMEMBERED])
def test_a_link_that_turns_slow_is_learned_within_one_early_retry_each(known: int) -> None:
    """32 requests at once find a link that now takes 5 s: at most two rounds of them are given up."""
    waits = waits_of([0.05] * known)
    rounds = 0
    while waits.deadline_seconds < 5.0:
        rounds += 1
        given_up_after = waits.deadline_seconds
        for _ in range(32):
            waits.record(given_up_after)
    assert rounds <= 2


def test_old_waits_are_forgotten() -> None:
    assert waits_of([19.0] * 500 + [0.05] * REMEMBERED).deadline_seconds == FLOOR_SECONDS
