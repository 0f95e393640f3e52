"""Which requests are taken, and which of them begin."""

from collections import deque

from hypothesis import given
from hypothesis import strategies as st

from fusecache.fuse.admission import Admission

LARGEST = 100


def admission(requests: int = 5, request_bytes: int = 1000, of_a_process: int = 2) -> Admission[str]:
    return Admission(
        requests=requests, request_bytes=request_bytes, largest=LARGEST, of_a_process=of_a_process
    )


def test_no_request_is_taken_beyond_the_count() -> None:
    limited = admission(requests=3)
    for _ in range(2):
        limited.hold(0)
        assert limited.may_take
    limited.hold(0)
    assert not limited.may_take
    limited.let_go(0)
    assert limited.may_take


def test_a_request_is_taken_only_if_the_largest_would_fit() -> None:
    limited = admission(request_bytes=300)
    limited.hold(200)
    assert limited.may_take
    limited.hold(1)
    assert not limited.may_take
    limited.let_go(1)
    assert limited.may_take


def test_one_request_is_taken_however_little_memory_there_is() -> None:
    limited = admission(request_bytes=LARGEST - 1)
    assert limited.may_take
    limited.hold(LARGEST)
    assert not limited.may_take
    limited.let_go(LARGEST)
    assert limited.may_take


def test_a_process_has_its_share_and_others_theirs() -> None:
    limited = admission(of_a_process=2)
    for process in (7, 7, 8):
        limited.begin(process)
    assert limited.full == {7}
    assert limited.end(7) is None
    assert limited.full == set()


def test_processes_that_cannot_be_told_apart_have_no_share() -> None:
    """In a container of its own, the daemon sees no process of the others."""
    limited = admission(of_a_process=2)
    for _ in range(10):
        limited.begin(0)
    assert limited.full == set()
    assert limited.end(0) is None


def test_a_request_that_was_answered_while_it_was_parked_does_not_begin() -> None:
    limited = admission(of_a_process=1)
    limited.begin(7)
    for number, name in enumerate("abc"):
        limited.park(7, number, name)
    limited.drop(7, 0)
    limited.drop(8, 0)
    assert [limited.end(7), limited.end(7), limited.end(7)] == ["b", "c", None]


@given(st.lists(st.tuples(st.sampled_from(["arrive", "end", "drop"]), st.integers(0, 3))), st.integers(1, 3))
def test_requests_of_a_process_begin_in_their_order_and_none_is_forgotten(
    steps: list[tuple[str, int]], share: int
) -> None:
    limited = admission(of_a_process=share)
    waiting = dict.fromkeys(range(4), 0)
    parked: dict[int, deque[str]] = {process: deque() for process in range(4)}
    for number, (step, process) in enumerate(steps):
        if step == "arrive":
            if process in limited.full:
                limited.park(process, number, str(number))
                parked[process].append(str(number))
            else:
                limited.begin(process)
                waiting[process] += 1
        elif step == "drop" and parked[process]:
            limited.drop(process, int(parked[process].pop()))
        elif step == "end" and waiting[process]:
            begins = limited.end(process)
            assert begins == (parked[process].popleft() if parked[process] else None)
            waiting[process] -= begins is None
        assert waiting[0] == max(waiting[0], 0)
        assert all(waiting[each] <= share for each in (1, 2, 3))
        assert limited.full == {each for each in (1, 2, 3) if waiting[each] == share}
    left = [request for each in parked.values() for request in each]
    assert sorted(limited.all_parked()) == sorted(left)
    assert limited.all_parked() == []
