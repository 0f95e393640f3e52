"""A limit of bytes a second."""

from hypothesis import given
from hypothesis import strategies as st

from fusecache.policy.backoff import Pace

MIB = 1 << 20


@given(
    st.floats(1e6, 1e9),
    st.lists(st.tuples(st.floats(0, 5), st.integers(1, 8 * MIB)), min_size=1, max_size=30),
)
def test_no_span_of_time_lets_more_through_than_the_rate_and_one_piece(
    rate: float, steps: list[tuple[float, int]]
) -> None:
    pace, now, sent = Pace(rate), 100.0, []
    for idle, nbytes in steps:
        now = max(now + idle, pace.free_at)
        sent.append((now, nbytes))
        pace.charge(now, nbytes)
    for first in range(len(sent)):
        for last in range(first, len(sent)):
            before = sum(nbytes for _, nbytes in sent[first:last])
            assert before <= rate * (sent[last][0] - sent[first][0]) * (1 + 1e-9) + 1


def test_without_a_rate_nothing_waits() -> None:
    pace = Pace(None)
    assert pace.charge(1.0, 1 << 40) == 0
    assert pace.free_at == float("-inf")
