"""What a handle's reads say about its next ones."""

import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fusecache.model.objects import GIB, GRANULE_BYTES, KIB, MIB
from fusecache.policy.cache.granules import CHUNK_BYTES
from fusecache.policy.cache.readahead import (
    FIRST_WINDOW_BYTES,
    MAX_WINDOW_BYTES,
    WASTE_FACTOR,
    WHOLE_BYTES,
    Phase,
    ReadPattern,
    ahead,
    choose_stream,
    demand_stop,
    fair_bound_bytes,
    grow,
    observe,
    request_bytes,
    shrink,
    side_stream,
)

reads = st.lists(st.tuples(st.integers(0, GIB), st.integers(1, 4 * MIB), st.booleans()), max_size=30)


def _after(*extents: tuple[int, int]) -> ReadPattern:
    pattern = ReadPattern()
    for start, stop in extents:
        pattern = observe(pattern, start, stop)
    return pattern


def test_a_reader_from_the_start_is_sequential_and_begins_small() -> None:
    pattern = _after((0, 128 * KIB))
    assert pattern.phase is Phase.SEQUENTIAL
    assert demand_stop(pattern, 0, 128 * KIB, GIB) == MIB
    assert ahead(pattern, GIB, GIB) is None


@pytest.mark.parametrize("size", [1, 100 * KIB, 2 * MIB, WHOLE_BYTES])
def test_a_small_object_is_fetched_whole_by_the_first_request(size: int) -> None:
    stop = min(size, 128 * KIB)
    assert demand_stop(_after((0, stop)), 0, stop, size) == size


def test_of_a_small_object_that_is_read_in_the_middle_only_that_is_fetched() -> None:
    pattern = _after((MIB, MIB + 10))
    assert demand_stop(pattern, MIB, MIB + 10, WHOLE_BYTES) == MIB + GRANULE_BYTES


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
    pattern = ReadPattern()
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


windows = st.integers(0, 10).map(lambda doublings: FIRST_WINDOW_BYTES << doublings)


@given(windows, st.lists(st.tuples(st.integers(0, GIB), st.integers(0, 3)), max_size=50))
def test_missing_buffers_halve_a_window_once_a_window_down_to_a_chunk(
    window: int, events: list[tuple[int, int]]
) -> None:
    pattern = ReadPattern(Phase.SEQUENTIAL, window_bytes=min(window, MAX_WINDOW_BYTES))
    shrunk_at = None
    for step, refusals in events:
        pattern = replace(pattern, position=pattern.position + step)
        for _ in range(refusals):
            before, pattern = pattern, shrink(pattern)
            assert pattern.window_bytes in (before.window_bytes, max(CHUNK_BYTES, before.window_bytes // 2))
            if pattern.window_bytes < before.window_bytes:
                assert shrunk_at is None or pattern.position >= shrunk_at + before.window_bytes
                shrunk_at = pattern.position
    assert pattern.window_bytes >= min(window, CHUNK_BYTES)


def test_a_shrunken_window_grows_again_when_its_reader_starves() -> None:
    pattern = replace(_after((0, MIB), (MIB, 64 * MIB)), window_bytes=8 * CHUNK_BYTES)
    shrunken = shrink(pattern)
    assert shrunken.window_bytes == 4 * CHUNK_BYTES
    assert grow(shrunken).window_bytes == 8 * CHUNK_BYTES


@given(st.lists(st.integers(0, GIB), max_size=8), st.integers(0, GIB))
def test_a_read_goes_to_the_nearest_stream_that_it_can_continue(positions: list[int], start: int) -> None:
    patterns = [ReadPattern(Phase.SEQUENTIAL, position=position) for position in positions]
    index = choose_stream(patterns, start)
    able = [position for position in positions if -MIB <= start - position <= 16 * MIB]
    if index is None:
        assert not able
    else:
        assert abs(start - positions[index]) == min(abs(start - position) for position in able)


@given(st.permutations([0, 1, 2, 3] * 30))
def test_threads_that_share_a_file_are_each_sequential_whatever_their_turns(turns: list[int]) -> None:
    at = [number * 100 * MIB for number in range(4)]
    patterns: list[ReadPattern] = []
    for number in turns:
        start, stop = at[number], at[number] + 128 * KIB
        at[number] = stop
        index = choose_stream(patterns, start)
        if index is None:
            patterns.append(side_stream(stop) if patterns else observe(ReadPattern(), start, stop))
        else:
            patterns[index] = observe(patterns[index], start, stop)
    assert len(patterns) == 4
    assert all(pattern.phase is Phase.SEQUENTIAL for pattern in patterns)


@given(st.integers())
def test_random_reads_ask_for_at_most_twice_what_they_read(seed: int) -> None:
    """With eight streams a file remembered, chance must not make a random reader sequential."""
    size, length, asked = GIB, 128 * KIB, 0
    numbers = random.Random(seed)
    patterns = [ReadPattern(Phase.RANDOM, position=0)]
    for _ in range(200):
        start = numbers.randrange(0, size - length, 4 * KIB)
        index = choose_stream(patterns, start)
        pattern = (
            side_stream(start + length)
            if index is None
            else observe(patterns.pop(index), start, start + length)
        )
        patterns = [pattern, *patterns][:8]
        asked += demand_stop(pattern, start, start + length, size) - start // GRANULE_BYTES * GRANULE_BYTES
    assert asked <= 2 * 200 * length


def test_what_is_read_first_comes_in_one_request_and_what_follows_in_several() -> None:
    pattern = observe(ReadPattern(), 0, MIB)
    assert request_bytes(pattern) == CHUNK_BYTES
    sizes = []
    for number in range(1, 40):
        pattern = grow(observe(pattern, number * MIB, (number + 1) * MIB))
        sizes.append(request_bytes(pattern))
    assert sizes[0] == CHUNK_BYTES // 4
    assert sizes == sorted(sizes)
    assert sizes[-1] == CHUNK_BYTES
    assert request_bytes(observe(pattern, GIB, GIB + MIB)) == CHUNK_BYTES  # random: one request a read
