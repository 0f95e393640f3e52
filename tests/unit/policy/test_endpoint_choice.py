"""Which endpoint serves a read: shares, weights, failures, slowness, and the way back."""

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fusecache.policy.backoff import LONGEST_SECONDS
from fusecache.policy.endpoint_choice import (
    AVERAGED_GETS,
    REMEMBERED_SECONDS,
    EndpointChoice,
    EndpointState,
    GetTimes,
)

OBJECTS = [f"shard-{index:05}" for index in range(4000)]
QUICK = GetTimes(0.02, 1 << 20, 0.02)
SLOW = GetTimes(0.3, 1 << 20, 0.4)
CRAWLING = GetTimes(0.02, 1 << 20, 5.0)


def choice(*weights: float) -> EndpointChoice:
    """Return a choice among endpoints with these weights."""
    return EndpointChoice([(f"endpoint-{index}", weight) for index, weight in enumerate(weights)])


def shares(of: EndpointChoice, now: float = 0.0) -> list[float]:
    """Return which share of many objects each endpoint serves."""
    firsts = Counter(of.order(each, now)[0] for each in OBJECTS)
    return [firsts[index] / len(OBJECTS) for index in range(len(of.health))]


def measure(of: EndpointChoice, index: int, times: GetTimes, now: float, count: int = AVERAGED_GETS) -> None:
    """Let some GETs of an endpoint succeed."""
    for _ in range(count):
        of.on_success(index, times, now)


def fail(of: EndpointChoice, index: int, now: float, *, is_probe: bool = False) -> int:
    """Let a request of an endpoint fail that began just now."""
    return of.on_failure(index, began=now, now=now, chance=1.0, is_probe=is_probe)


@given(st.lists(st.floats(0.25, 4), min_size=1, max_size=4))
@settings(deadline=None, max_examples=25)
def test_objects_spread_by_weight(weights: list[float]) -> None:
    for share, weight in zip(shares(choice(*weights)), weights, strict=True):
        assert share == pytest.approx(weight / sum(weights), abs=0.04)


@settings(deadline=None)
@given(st.text(), st.lists(st.floats(0.01, 100), min_size=1, max_size=6))
def test_each_order_names_every_endpoint_once(what: str, weights: list[float]) -> None:
    assert sorted(choice(*weights).order(what, 0.0)) == list(range(len(weights)))


def test_an_object_stays_with_its_endpoint() -> None:
    first = choice(1, 1, 1)
    before = {each: first.order(each, 0.0) for each in OBJECTS}
    measure(first, 1, QUICK, now=5.0)
    assert {each: choice(1, 1, 1).order(each, 9.0) for each in OBJECTS} == before
    assert {each: first.order(each, 9.0) for each in OBJECTS} == before


def test_only_the_objects_of_a_failing_endpoint_move() -> None:
    of = choice(1, 1, 1)
    before = {each: of.order(each, 0.0)[0] for each in OBJECTS}
    fail(of, 1, 0.0)
    after = {each: of.order(each, 0.0) for each in OBJECTS}
    assert all(after[each][0] == first for each, first in before.items() if first != 1)
    assert {after[each][0] for each, first in before.items() if first == 1} == {0, 2}
    assert all(order[-1] == 1 for order in after.values())


def test_probes_come_ever_later_and_one_at_a_time() -> None:
    of, now, pauses = choice(1, 1), 0.0, []
    fail(of, 0, now)
    for _ in range(8):
        begin = now
        while not of.begin_probes(now):
            now += 0.25
        assert of.begin_probes(now) == []
        pauses.append(now - begin)
        fail(of, 0, now, is_probe=True)
    assert pauses == sorted(pauses)
    assert 0 < pauses[0] <= 1
    assert pauses[-1] <= LONGEST_SECONDS
    assert pauses[3] >= 4 * pauses[0]


def test_an_answered_probe_gives_the_share_back() -> None:
    of = choice(1, 1)
    before = shares(of)
    fail(of, 0, 0.0)
    assert shares(of) == [0, 1]
    assert of.begin_probes(2.0) == [0]
    assert of.on_probed(0)
    assert shares(of) == before
    assert of.state(0, 2.0) is EndpointState.OK


def test_a_pause_grows_until_a_read_succeeds() -> None:
    """A probe may be answered by an endpoint whose reads fail."""
    of = choice(1, 1)
    assert fail(of, 0, 0.0) == 1
    of.begin_probes(2.0)
    of.on_probed(0)
    assert fail(of, 0, 2.0) == 2
    of.on_success(0, QUICK, 5.0)
    assert fail(of, 0, 6.0) == 1


def test_requests_in_flight_together_fail_once() -> None:
    of = choice(1, 1)
    assert of.on_failure(0, began=1.0, now=5.0, chance=0.0) == 1
    assert of.on_failure(0, began=2.0, now=6.0, chance=0.0) == 0
    of.begin_probes(9.0)
    of.on_probed(0)
    assert of.on_failure(0, began=3.0, now=9.5, chance=0.0) == 0
    assert of.state(0, 9.5) is EndpointState.OK


def test_an_endpoint_may_ask_for_a_longer_pause() -> None:
    of = choice(1, 1)
    of.on_failure(0, began=0.0, now=0.0, chance=0.0, retry_after_seconds=30.0)
    assert of.begin_probes(29.0) == []
    assert of.begin_probes(30.0) == [0]


def test_if_all_fail_the_first_to_be_back_is_first() -> None:
    of = choice(1, 1)
    fail(of, 0, 0.0)
    fail(of, 0, 1.5)
    fail(of, 1, 1.5)
    assert {tuple(of.order(each, 2.0)) for each in OBJECTS} == {(1, 0)}


@pytest.mark.parametrize(("times", "share"), [(QUICK, 0.5), (SLOW, 0.2), (CRAWLING, 1 / 17)])
def test_a_slow_endpoint_serves_fewer_objects(times: GetTimes, share: float) -> None:
    of = choice(1, 1)
    measure(of, 0, QUICK, now=1.0)
    measure(of, 1, times, now=1.0)
    assert shares(of, 2.0)[1] == pytest.approx(share, abs=0.03)
    assert of.state(1, 2.0) is (EndpointState.OK if times is QUICK else EndpointState.SLOW)


def test_slowness_is_forgotten_and_measured_again() -> None:
    of = choice(1, 1)
    measure(of, 0, QUICK, now=1.0)
    measure(of, 1, CRAWLING, now=1.0)
    later = 2.0 + REMEMBERED_SECONDS
    assert shares(of, later)[1] == pytest.approx(0.5, abs=0.03)
    measure(of, 1, QUICK, now=later)
    measure(of, 0, QUICK, now=later)
    assert of.state(1, later) is EndpointState.OK


def test_what_comes_back_after_a_failure_is_measured_again() -> None:
    of = choice(1, 1)
    measure(of, 0, QUICK, 0.0)
    measure(of, 1, CRAWLING, 0.0)
    assert of.state(1, 1.0) is EndpointState.SLOW
    fail(of, 1, 1.0)
    of.on_probed(1)
    assert of.state(1, 2.0) is EndpointState.OK


def test_small_reads_do_not_look_slow() -> None:
    """Few bytes say little about the rate: only the time to the first byte counts."""
    of = choice(1, 1)
    measure(of, 0, GetTimes(0.02, 8 << 20, 0.1), now=1.0)
    measure(of, 1, GetTimes(0.025, 0, 0.0), now=1.0)
    assert of.state(1, 1.0) is EndpointState.OK


def test_names_keep_to_the_given_order() -> None:
    of = choice(1, 8, 1)
    assert of.order_by_rank() == [0, 1, 2]
    fail(of, 0, 0.0)
    assert of.order_by_rank() == [1, 2, 0]
