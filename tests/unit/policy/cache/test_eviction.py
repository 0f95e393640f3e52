"""Which blocks go."""

import math
import random
from collections.abc import Iterable

from hypothesis import given
from hypothesis import strategies as st

from fusecache.policy.cache.eviction import (
    ADMIT_ONE_IN,
    ELSEWHERE,
    STALE_AGE,
    STAMPS_PER_LIMIT,
    EvictionCandidate,
    choose_victims,
    is_admitted,
)

candidates = st.lists(
    st.builds(
        EvictionCandidate, st.integers(1, 5), st.integers(0, 99), st.integers(1, 16), st.integers(0, 1000)
    ),
    max_size=40,
    unique_by=lambda candidate: (candidate.file_number, candidate.block),
)


@given(candidates, st.integers(0, 400))
def test_enough_is_freed_if_there_is_enough_and_no_more_than_needed(
    found: list[EvictionCandidate], need: int
) -> None:
    victims = choose_victims(found, need, clock=1000, next_use=lambda candidate: None)
    freed = sum(victim.size for victim in victims)
    assert freed >= min(need, sum(candidate.size for candidate in found))
    assert not victims or freed - victims[-1].size < need
    assert len({id(victim) for victim in victims}) == len(victims)


@given(candidates, st.integers(1, 400), st.randoms(use_true_random=False))
def test_what_is_never_used_again_goes_before_what_is_and_the_farthest_first(
    found: list[EvictionCandidate], need: int, rng: random.Random
) -> None:
    uses = {candidate: rng.choice((None, rng.random())) for candidate in found}
    victims = choose_victims(found, need, clock=1000, next_use=uses.__getitem__)
    kept = [uses[candidate] for candidate in found if candidate not in victims]
    gone = [uses[victim] for victim in victims]
    if any(use is not None for use in gone):
        assert None not in kept
        assert all(use <= min(u for u in gone if u is not None) for use in kept if use is not None)


def test_a_block_needed_sooner_than_the_newcomer_stays() -> None:
    found = [EvictionCandidate(1, block, 1, 0) for block in range(10)]
    victims = choose_victims(
        found, 10, clock=0, next_use=lambda candidate: candidate.block, used_no_later_than=6
    )
    assert [victim.block for victim in victims] == [9, 8, 7]


def test_long_unread_blocks_go_first() -> None:
    old = EvictionCandidate(1, 0, 1, 0)
    young = [EvictionCandidate(1, block, 1, STALE_AGE) for block in range(1, 50)]
    assert choose_victims([*young, old], 1, clock=STALE_AGE, next_use=lambda candidate: None) == [old]


class _Cache:
    """A cache of equal blocks that does what the engine does: sample, admit, evict one for one."""

    def __init__(self, blocks: int) -> None:
        self.rng = random.Random(1)
        self.blocks = blocks
        self.stamps: dict[int, int] = {}
        self.order: list[int] = []
        self.traffic = 0

    def read(self, block: int) -> bool:
        """Read a block; return whether it was there."""
        clock = self.traffic * STAMPS_PER_LIMIT // self.blocks
        self.traffic += 1
        is_hit = block in self.stamps
        if is_hit or self._has_room(clock):
            if not is_hit:
                self.order.append(block)
            self.stamps[block] = clock
        return is_hit

    def _has_room(self, clock: int) -> bool:
        if len(self.order) < self.blocks:
            return True
        places = [self.rng.randrange(len(self.order)) for _ in range(16)]
        sample = [EvictionCandidate(1, place, 1, self.stamps[self.order[place]]) for place in places]
        if not is_admitted(
            sample,
            clock=clock,
            next_use=lambda candidate: None,
            chance=self.rng.random(),
        ):
            return False
        (victim,) = choose_victims(sample, 1, clock=clock, next_use=lambda candidate: None)
        del self.stamps[self.order[victim.block]]
        self.order[victim.block] = self.order[-1]
        self.order.pop()
        return True


def _share(cache_blocks: int, reads: Iterable[int], *, of_last: int) -> float:
    """Return the share of hits among the last reads."""
    cache = _Cache(cache_blocks)
    return sum([cache.read(block) for block in reads][-of_last:]) / of_last


def _epochs(datasets: list[range]) -> list[int]:
    rng = random.Random(2)
    return [block for dataset in datasets for block in rng.sample(dataset, len(dataset))]


def test_reshuffled_epochs_hit_nearly_the_share_that_is_cached() -> None:
    # The ceiling is 0.5; LRU hits 0.15 of them.
    for epochs in (2, 3, 6):
        assert _share(1000, _epochs([range(2000)] * epochs), of_last=2000) >= 0.45


def test_epochs_in_the_same_order_hit_nearly_the_share_that_is_cached() -> None:
    # LRU hits none of them: each block goes just before its turn.
    assert _share(1000, list(range(2000)) * 5, of_last=2000) >= 0.45


def test_another_dataset_replaces_the_first_within_a_few_epochs() -> None:
    reads = _epochs([range(2000)] * 3 + [range(5000, 5900)] * 6)
    assert _share(1000, reads, of_last=900) > 0.9


def test_what_suits_lru_is_served_nearly_as_well() -> None:
    rng = random.Random(3)
    # A few blocks are read most: LRU hits 0.75.
    popular = rng.choices(range(5000), [1 / (rank + 1) for rank in range(5000)], k=30_000)
    assert _share(1000, popular, of_last=15_000) > 0.7
    # A working set of 0.8 of the cache that moves on: LRU hits 0.95.
    moving = [turn // 20 + rng.randrange(800) for turn in range(40_000)]
    assert _share(1000, moving, of_last=20_000) > 0.8


@given(candidates, st.integers(0, 2000), st.floats(0, 1, exclude_max=True))
def test_a_newcomer_of_unknown_use_takes_no_room_of_what_will_be_used(
    found: list[EvictionCandidate], clock: int, chance: float
) -> None:
    if found:
        assert not is_admitted(found, clock=clock, next_use=lambda candidate: 1.0, chance=chance)


@given(candidates, st.integers(0, 2000), st.floats(0, 1, exclude_max=True))
def test_where_much_is_stale_every_newcomer_is_admitted(
    found: list[EvictionCandidate], clock: int, chance: float
) -> None:
    stale = sum(clock - candidate.stamp >= STALE_AGE for candidate in found)
    admitted = is_admitted(found, clock=clock, next_use=lambda candidate: None, chance=chance)
    assert admitted or 4 * stale < len(found)
    assert not admitted or 4 * stale >= len(found) or chance < 1 / ADMIT_ONE_IN


@given(candidates, st.integers(1, 400), st.floats(0, 1), st.randoms(use_true_random=False))
def test_nothing_needed_as_soon_as_the_newcomer_goes(
    found: list[EvictionCandidate], need: int, incoming_use: float, rng: random.Random
) -> None:
    uses = {candidate: rng.choice((None, rng.random())) for candidate in found}
    victims = choose_victims(
        found, need, clock=1000, next_use=uses.__getitem__, used_no_later_than=incoming_use
    )
    for victim in victims:
        use = uses[victim]
        assert use is None or use > incoming_use


def _blocks(count: int) -> list[EvictionCandidate]:
    return [EvictionCandidate(number, 0, 1, 0) for number in range(count)]


def test_what_another_node_keeps_goes_before_all_others() -> None:
    uses = {0: None, 1: 5.0, 2: ELSEWHERE, 3: 1e9}
    victims = choose_victims(_blocks(4), 2, clock=1000, next_use=lambda each: uses[each.file_number])
    assert [each.file_number for each in victims] == [2, 0]


def test_newcomer_that_another_node_keeps_evicts_only_its_like() -> None:
    uses = {0: None, 1: 5.0, 2: ELSEWHERE, 3: ELSEWHERE}
    victims = choose_victims(
        _blocks(4), 4, clock=1000, next_use=lambda each: uses[each.file_number], used_no_later_than=ELSEWHERE
    )
    assert {each.file_number for each in victims} == {2, 3}


def test_newcomer_of_this_node_is_admitted_where_there_is_something_of_others() -> None:
    uses = {0: ELSEWHERE, 1: 1.0, 2: 1.0, 3: 1.0}
    assert is_admitted(_blocks(4), clock=0, next_use=lambda each: uses[each.file_number], chance=1.0)
    victims = choose_victims(
        _blocks(4), 1, clock=0, next_use=lambda each: uses[each.file_number], used_no_later_than=math.inf
    )
    assert [each.file_number for each in victims] == [0]
