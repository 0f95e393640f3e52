"""How many requests are taken at once."""

from fusecache.fuse.waiting import Room

LARGEST = 100


def test_no_request_is_taken_beyond_the_count() -> None:
    room = Room(3, 1000, LARGEST)
    for _ in range(2):
        room.take(0)
        assert room.may_take
    room.take(0)
    assert not room.may_take
    room.give_back(0)
    assert room.may_take


def test_a_request_is_taken_only_if_the_largest_would_fit() -> None:
    room = Room(5, 300, LARGEST)
    room.take(200)
    assert room.may_take
    room.take(1)
    assert not room.may_take
    room.give_back(1)
    assert room.may_take


def test_one_request_is_taken_however_little_memory_there_is() -> None:
    room = Room(5, LARGEST - 1, LARGEST)
    assert room.may_take
    room.take(LARGEST)
    assert not room.may_take
    room.give_back(LARGEST)
    assert room.may_take
