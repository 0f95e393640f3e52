"""Waits grow, stay within bounds; a struggling bucket gets fewer requests."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fusecache.policy.backoff import (
    LONGEST_SECONDS,
    OUTAGE_ITEMS,
    PROBE_SECONDS,
    WELL_SECONDS,
    Outage,
    RequestLimit,
    backoff_seconds,
)

chances = st.floats(0, 1, exclude_max=True)


@given(st.integers(1, 10_000), chances)
def test_waits_are_between_half_a_second_and_a_minute(attempt: int, chance: float) -> None:
    assert 0.5 <= backoff_seconds(attempt, chance) <= 60


@given(st.integers(1, 100), chances)
def test_waits_never_shrink(attempt: int, chance: float) -> None:
    assert backoff_seconds(attempt + 1, chance) >= backoff_seconds(attempt, chance)


@given(st.integers(1, 64), st.lists(st.tuples(st.booleans(), st.floats(0, 5)), max_size=200))
def test_the_limit_stays_between_one_and_its_ceiling(ceiling: int, events: list[tuple[bool, float]]) -> None:
    limit, now = RequestLimit(ceiling), 0.0
    for is_throttled, seconds in events:
        now += seconds
        before = limit.limit
        if is_throttled:
            limit.on_throttled(now)
            assert limit.limit <= before
        else:
            limit.on_success(now)
            assert before <= limit.limit <= before + 1
        assert 1 <= limit.limit <= ceiling


def test_a_storm_of_answers_halves_once_and_successes_bring_all_back() -> None:
    limit = RequestLimit(32)
    for _ in range(100):
        limit.on_throttled(10.0)
    assert limit.limit == 16
    for _ in range(32 * 32):
        limit.on_success(11.0)
    assert limit.limit == 32


def test_a_bucket_that_is_well_again_gets_its_requests_back_by_doubling() -> None:
    limit = RequestLimit(64)
    for second in range(10):
        limit.on_throttled(float(second))
    assert limit.limit == 1
    for _ in range(63):
        limit.on_success(9.0 + WELL_SECONDS)
    assert limit.limit == 64


@given(st.lists(st.tuples(st.floats(0, 100), st.none() | st.floats(0, 1e6)), min_size=1))
def test_silence_lasts_as_long_as_the_bucket_asked_but_a_minute_at_most(
    signals: list[tuple[float, float | None]],
) -> None:
    limit, now, until = RequestLimit(8), 0.0, float("-inf")
    for wait, retry_after in signals:
        now += wait
        limit.on_throttled(now, retry_after)
        if retry_after is not None:
            until = max(until, now + min(LONGEST_SECONDS, retry_after))
        assert limit.silent_until == until


# ---- the bucket, or one item


def test_one_item_that_fails_again_and_again_is_no_outage() -> None:
    outage = Outage()
    for second in range(100):
        outage.on_failure(7, float(second), 0.5)
        assert not outage.is_on


@given(st.lists(st.tuples(st.integers(0, 9), st.floats(0, 30), chances), min_size=3, max_size=100))
def test_in_an_outage_a_try_is_never_farther_than_ten_seconds(events: list[tuple[int, float, float]]) -> None:
    outage, now = Outage(), 0.0
    for item, wait, chance in events:
        now += wait
        outage.on_failure(item, now, chance)
        assert outage.quiet_until <= now + PROBE_SECONDS


@pytest.mark.parametrize(("tries", "has_lasted"), [(0, False), (1, False), (6, True)])
def test_the_first_success_ends_an_outage_and_tells_one_that_lasted_from_a_few_keys(
    *, tries: int, has_lasted: bool
) -> None:
    outage = Outage()
    for item in range(OUTAGE_ITEMS):
        assert not outage.is_on
        outage.on_failure(item, 1.0, 0.5)
    assert outage.is_on
    assert outage.quiet_until > 1.0
    for _ in range(tries):
        outage.on_failure(1, outage.quiet_until, 0.5)
    assert outage.on_success(60.0) is has_lasted
    assert not outage.is_on
    assert outage.quiet_until < 60.0
    assert not outage.on_success(61.0)
