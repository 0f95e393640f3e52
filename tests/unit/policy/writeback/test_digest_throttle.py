"""Uploads beside reads: never more than their share of the processors, and never much less."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fusecache.policy.writeback.digest_throttle import SHARE, DigestThrottle


@given(st.integers(1, SHARE), st.lists(st.floats(0.001, 10), min_size=20, max_size=40))
def test_few_processors_work_for_uploads_for_their_share_of_the_time(
    processors: int, seconds: list[float]
) -> None:
    pace, now, worked = DigestThrottle(processors), 0.0, 0.0
    for each in seconds:
        now += pace.delay(now) + each
        worked += each
        pace.on_digested(now, each)
    now += pace.delay(now)
    assert pace.at_once == 1
    assert worked / now == pytest.approx(processors / SHARE)


@pytest.mark.parametrize(("processors", "at_once"), [(12, 1), (23, 1), (24, 2), (64, 5), (256, 21)])
def test_many_processors_work_for_uploads_without_a_rest(processors: int, at_once: int) -> None:
    pace = DigestThrottle(processors)
    pace.on_digested(10.0, 3.0)
    assert (pace.at_once, pace.delay(10.0)) == (at_once, 0.0)


def test_no_rest_outlasts_what_the_longest_work_asks_for() -> None:
    pace = DigestThrottle(1)
    pace.on_digested(10.0, 1.0)
    pace.on_digested(10.0, 0.1)
    assert pace.delay(10.0) == SHARE - 1
    assert pace.delay(10.0 + SHARE) == 0
