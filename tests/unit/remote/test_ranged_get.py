"""Pieces in which a body is received: small on a slow link, large on a quick one."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fusecache.remote.http.ranged_get import (
    FIRST_PIECE_BYTES,
    LARGEST_PIECE_BYTES,
    PIECE_SECONDS,
    next_piece_bytes,
)


def pieces(bytes_per_second: float, count: int) -> list[int]:
    """Return the sizes of the first pieces of a body that comes at a steady rate."""
    sizes = [FIRST_PIECE_BYTES]
    for _ in range(count):
        sizes.append(next_piece_bytes(sizes[-1], sizes[-1] / bytes_per_second))
    return sizes


@given(st.floats(1e3, 1e11))
def test_pieces_of_a_steady_link_settle_within_their_bounds(rate: float) -> None:
    sizes = pieces(rate, 12)
    assert all(FIRST_PIECE_BYTES <= size <= LARGEST_PIECE_BYTES for size in sizes)
    if FIRST_PIECE_BYTES < sizes[-1] < LARGEST_PIECE_BYTES:
        assert sizes[-1] / rate == pytest.approx(PIECE_SECONDS, rel=0.01)


def test_a_slow_link_is_heard_of_as_often_as_possible_and_a_quick_one_as_seldom() -> None:
    assert set(pieces(1e5, 12)) == {FIRST_PIECE_BYTES}
    assert pieces(1e9, 12)[-1] == LARGEST_PIECE_BYTES


def test_a_link_that_slows_down_gets_small_pieces_again() -> None:
    size = LARGEST_PIECE_BYTES
    for _ in range(8):
        size = next_piece_bytes(size, 1.0)
    assert size == FIRST_PIECE_BYTES
