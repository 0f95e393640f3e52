"""What a handle's reads say about its next ones."""

from hypothesis import given
from hypothesis import strategies as st

from fusecache.model.nouns import GIB, GRANULE_BYTES, KIB, MIB
from fusecache.policy.granules import CHUNK_BYTES
from fusecache.policy.readahead import (
    MAX_WINDOW_BYTES,
    WASTE_FACTOR,
    Pattern,
    Phase,
    ahead,
    demand_stop,
    fair_bound_bytes,
    grow,
    observe,
)

reads = st.lists(st.tuples(st.integers(0, GIB), st.integers(1, 4 * MIB), st.booleans()), max_size=30)


def _after(*extents: tuple[int, int]) -> Pattern:
    pattern = Pattern()
    for start, stop in extents:
        pattern = observe(pattern, start, stop)
    return pattern


def test_a_reader_from_the_start_is_sequential_and_begins_small() -> None:
    pattern = _after((0, 128 * KIB))
    assert pattern.phase is Phase.SEQUENTIAL
    assert demand_stop(pattern, 0, 128 * KIB, GIB) == MIB
    assert ahead(pattern, GIB, GIB) is None


def test_a_starving_reader_s_window_doubles_up_to_the_bound() -> None:
    pattern = _after((0, MIB), (MIB, 2 * MIB))
    windows = []
    for start in range(2 * MIB, 100 * MIB, MIB):
        pattern = grow(observe(pattern, start, start + MIB))
        windows.append(pattern.window_bytes)
    assert windows[:2] == [12 * MIB, 16 * MIB] or windows[0] == 8 * MIB
    assert windows == sorted(windows)
    assert windows[-1] == MAX_WINDOW_BYTES


def test_a_first_read_in_the_middle_gets_its_granules_only() -> None:
    pattern = _after((5 * MIB, 5 * MIB + 10))
    assert demand_stop(pattern, 5 * MIB, 5 * MIB + 10, GIB) == 5 * MIB + GRANULE_BYTES


def test_small_seeks_keep_the_stream_and_large_ones_end_it() -> None:
    assert _after((0, MIB), (10 * MIB, 11 * MIB)).phase is Phase.SEQUENTIAL
    assert _after((0, 2 * MIB), (MIB, 2 * MIB)).phase is Phase.SEQUENTIAL
    assert _after((0, MIB), (18 * MIB, 19 * MIB)).phase is Phase.RANDOM
    assert _after((0, 4 * MIB), (MIB, 2 * MIB)).phase is Phase.RANDOM


def test_a_strided_reader_is_found_out() -> None:
    stride = 10 * MIB
    assert _after(*[(n * stride, n * stride + 8 * KIB) for n in range(5)]).phase is Phase.RANDOM


def test_a_random_reader_that_reads_on_becomes_sequential_again() -> None:
    start = 50 * MIB
    assert _after((start, start + MIB), (start + MIB, start + 2 * MIB)).phase is Phase.RANDOM
    pattern = _after(*[(start + n * MIB, start + (n + 1) * MIB) for n in range(3)])
    assert pattern.phase is Phase.SEQUENTIAL


@given(reads, st.integers(1, GIB), st.integers(CHUNK_BYTES, GIB))
def test_what_is_asked_for_lies_in_the_object_and_within_bounds(
    steps: list[tuple[int, int, bool]], size: int, bound: int
) -> None:
    pattern = Pattern()
    read_bytes = 0
    for start, length, starved in steps:
        start %= size
        stop = min(size, start + length)
        read_bytes += stop - start
        pattern = observe(pattern, start, stop)
        if starved:
            pattern = grow(pattern)
        end = demand_stop(pattern, start, stop, size)
        assert stop <= end <= size
        assert end - stop < CHUNK_BYTES + GRANULE_BYTES
        extent = ahead(pattern, size, bound)
        if extent is not None:
            assert extent.start == pattern.position
            assert extent.stop <= size
            assert extent.size <= min(bound, MAX_WINDOW_BYTES) + CHUNK_BYTES
            assert extent.size <= max(CHUNK_BYTES, WASTE_FACTOR * read_bytes) + CHUNK_BYTES
            assert pattern.phase is Phase.SEQUENTIAL


@given(st.integers(1, 1000), st.integers(0, 100))
def test_readers_share_the_buffers(buffers: int, readers: int) -> None:
    bound = fair_bound_bytes(buffers, readers)
    assert bound >= CHUNK_BYTES
    if readers and buffers * 3 // 4 >= readers:
        assert bound * readers <= buffers * CHUNK_BYTES * 3 // 4
