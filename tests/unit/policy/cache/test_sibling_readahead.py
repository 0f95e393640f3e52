"""What the files of a directory that were read so far say about the next ones."""

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fusecache.model.objects import GIB, KIB, MIB
from fusecache.policy.cache.readahead import WHOLE_BYTES
from fusecache.policy.cache.sibling_readahead import (
    FIRST_WINDOW,
    MAX_WINDOW,
    REACH,
    SPAN,
    ScanPattern,
    bytes_to_ask,
    is_near,
    next_window,
    observe,
)

FILE_BYTES = 100 * KIB


@dataclass
class Reader:
    """A directory with files of `sizes`, and the scan that opening them makes; asked: each position asked for."""

    sizes: Sequence[int]
    scan: ScanPattern = field(default_factory=ScanPattern)
    origin: int = 0
    opened: set[int] = field(default_factory=set)
    asked: set[int] = field(default_factory=set)
    ready: int = 0

    def open(self, place: int) -> int:
        """Open the file at a place of the directory; return how many files that asked for."""
        position = place - self.origin
        # What is neither near the front nor within reach behind it begins a new scan, as for one reader.
        reach = max(REACH, self.scan.requested - self.scan.front + REACH)
        is_in_reach = 0 <= position < self.scan.front + reach and is_near(self.scan, position)
        if not self.opened or not is_in_reach:
            self.scan, self.origin, position = ScanPattern(), place, 0
            self.opened, self.asked = set(), set()
        self.ready += place in self.asked and place not in self.opened
        self.scan = observe(self.scan, position, self.sizes[place])
        self.opened.add(place)
        first = self.scan.requested
        self.scan, count = next_window(self.scan, self.sizes[self.origin + first :])
        new = range(self.origin + first, self.origin + first + count)
        assert self.asked.isdisjoint(new), "asked for twice"
        assert self.opened.isdisjoint(new), "asked for what was opened"
        self.asked |= set(new)
        return count


def _read(order: Iterable[int], sizes: Sequence[int]) -> Reader:
    reader = Reader(sizes)
    for place in order:
        reader.open(place)
    return reader


def _overtaking(count: int, by: int, seed: int = 1) -> list[int]:
    """Return places in order, but for each being up to `by` late: several threads take them from one list."""
    chance = random.Random(seed)
    return sorted(range(count), key=lambda place: place + chance.random() * by)


def test_who_reads_in_order_finds_all_but_the_first_files_ready() -> None:
    reader = _read(range(300), [FILE_BYTES] * 300)
    assert reader.ready == 297
    assert reader.scan.window == MAX_WINDOW


def test_the_window_doubles_while_the_guess_holds() -> None:
    reader = Reader([FILE_BYTES] * 100)
    windows = []
    for place in range(70):
        reader.open(place)
        windows.append(reader.scan.window)
    assert windows[2] == FIRST_WINDOW
    for place in range(4, 16):
        assert windows[2 * place] >= min(MAX_WINDOW, 2 * windows[place] - 2)


def test_nothing_is_asked_for_behind_the_end_of_the_directory() -> None:
    reader = _read(range(50), [FILE_BYTES] * 50)
    assert reader.asked == set(range(3, 50))


@pytest.mark.parametrize("by", [2, 4, 8])
def test_threads_that_share_one_list_are_a_scan(by: int) -> None:
    reader = _read(_overtaking(300, by), [FILE_BYTES] * 300)
    assert reader.ready >= 280


def test_a_scan_goes_on_where_one_file_is_left_out_now_and_then() -> None:
    order = [place for place in range(400) if place % 11]
    assert _read(order, [FILE_BYTES] * 400).ready > 0.9 * len(order)


@pytest.mark.parametrize("step", [2, 3, 10])
def test_who_skips_most_files_gets_none_ahead(step: int) -> None:
    reader = Reader([FILE_BYTES] * 3000)
    assert sum(reader.open(place) for place in range(0, 3000, step)) == 0


@pytest.mark.parametrize("seed", range(10))
def test_a_random_order_asks_for_nothing(seed: int) -> None:
    chance = random.Random(seed)
    reader = Reader([FILE_BYTES] * 10_000)
    assert sum(reader.open(place) for place in chance.sample(range(10_000), 5_000)) == 0


def test_chance_runs_of_a_random_order_in_a_small_directory_ask_for_next_to_nothing() -> None:
    chance = random.Random(1)
    asked = 0
    for _ in range(100):
        reader = Reader([FILE_BYTES] * 300)
        asked += sum(reader.open(place) for place in chance.sample(range(300), 300))
    assert asked <= 0.001 * 100 * 300


def test_a_wrong_guess_halves_the_window() -> None:
    reader = _read(range(100), [FILE_BYTES] * 10_000)
    assert reader.scan.window == MAX_WINDOW
    # One file that was asked for is passed over; it counts as wrong once others of its age are all read.
    for place in range(101, 101 + SPAN):
        reader.open(place)
    assert reader.scan.window < MAX_WINDOW
    assert reader.scan.window >= MAX_WINDOW // 2


def test_a_file_that_is_read_again_changes_nothing() -> None:
    reader = _read(range(20), [FILE_BYTES] * 100)
    scan = reader.scan
    for place in (19, 10, 19):
        assert observe(scan, place, FILE_BYTES) == scan


def test_no_more_is_ahead_than_was_read() -> None:
    sizes = [10 * KIB] * 20 + [4 * MIB] * 20
    reader = _read(range(20), sizes)
    assert max(reader.asked) < 20


def test_of_large_files_only_the_first_window_is_asked_for() -> None:
    assert bytes_to_ask(100 * KIB) == 100 * KIB
    assert bytes_to_ask(WHOLE_BYTES) == WHOLE_BYTES
    assert bytes_to_ask(GIB) == MIB


steps = st.lists(
    st.one_of(st.integers(-SPAN, 3), st.just(1), st.just(1), st.integers(-300, 300)), min_size=1, max_size=120
)


@given(steps, st.lists(st.integers(0, 6 * MIB), min_size=300, max_size=300))
def test_every_scan_keeps_its_bounds(moves: list[int], sizes: list[int]) -> None:
    reader = Reader(sizes)
    place = 0
    for move in moves:
        place = (place + move) % 300
        before = len(reader.asked)
        count = reader.open(place)
        scan = reader.scan
        assert 1 <= scan.window <= MAX_WINDOW
        assert scan.front <= scan.requested
        if count:
            assert scan.is_in_order
            assert scan.requested - scan.front <= scan.window
            assert len(reader.asked) == before + count
        read = sum(bytes_to_ask(sizes[each]) for each in reader.opened)
        unread = sum(bytes_to_ask(sizes[each]) for each in reader.asked - reader.opened)
        assert scan.read_bytes == read
        assert scan.ahead_bytes == unread
        if count:
            assert unread <= read
