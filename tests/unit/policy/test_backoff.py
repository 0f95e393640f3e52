"""Waits grow, stay within bounds; a struggling bucket gets fewer requests."""

from hypothesis import given
from hypothesis import strategies as st

from fusecache.policy.backoff import RequestLimit, backoff_seconds

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
            limit.on_success()
            assert before <= limit.limit <= before + 1
        assert 1 <= limit.limit <= ceiling


def test_a_storm_of_answers_halves_once_and_successes_bring_all_back() -> None:
    limit = RequestLimit(32)
    for _ in range(100):
        limit.on_throttled(10.0)
    assert limit.limit == 16
    for _ in range(32 * 32):
        limit.on_success()
    assert limit.limit == 32
