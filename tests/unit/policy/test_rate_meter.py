"""A pace and a forecast are never negative, never nonsense, and right for a steady counter."""

from hypothesis import given
from hypothesis import strategies as st

from fusecache.policy.rate_meter import WINDOW_SECONDS, RateMeter, seconds_left

# Of a clock in nanoseconds: finer steps are lost in a float's digits.
seconds = st.integers(0, 100 * 10**9).map(lambda nanoseconds: nanoseconds / 1e9)
steps = st.lists(st.tuples(seconds, st.integers(0, 1 << 40)), max_size=60)


@given(steps)
def test_a_pace_lies_between_nothing_and_the_fastest_step(pairs: list[tuple[float, int]]) -> None:
    rate = RateMeter()
    now, total = 0.0, 0
    fastest = 0.0
    for seconds, amount in pairs:
        now, total = now + seconds, total + amount
        rate.record(now, total)
        fastest = float("inf") if seconds == 0 and amount else max(fastest, amount / (seconds or 1))
        assert 0 <= rate.per_second() <= fastest * 1.000001


@given(st.integers(1, 1000), st.integers(2, 100))
def test_a_steady_counter_has_its_own_pace_however_long_it_runs(pace: int, seconds: int) -> None:
    rate = RateMeter()
    for second in range(seconds):
        rate.record(float(second), pace * second)
    assert abs(rate.per_second() - pace) < 1e-6


def test_what_was_before_the_window_or_the_reset_does_not_count() -> None:
    rate = RateMeter()
    for second in range(100):
        rate.record(float(second), 10**9 if second else 0)
    assert rate.per_second() == 0
    rate.reset(100.0, 10**9)
    assert rate.per_second() == 0
    rate.record(100.0 + WINDOW_SECONDS / 2, 10**9 + 500)
    assert rate.per_second() == 500 / (WINDOW_SECONDS / 2)


@given(st.integers(-5, 1 << 62), st.floats(0, 1e12))
def test_a_forecast_is_positive_or_none(amount: int, per_second: float) -> None:
    left = seconds_left(amount, per_second)
    assert left is None or 0 < left <= 30 * 86400


def test_a_forecast_is_the_rest_by_the_pace() -> None:
    assert seconds_left(100, 20) == 5
