"""Which blocks go."""

import random

from hypothesis import given
from hypothesis import strategies as st

from fusecache.policy.eviction import STALE_AGE, STAMPS_PER_LIMIT, Candidate, choose_victims, is_admitted

candidates = st.lists(
    st.builds(Candidate, st.integers(1, 5), st.integers(0, 99), st.integers(1, 16), st.integers(0, 1000)),
    max_size=40,
    unique_by=lambda candidate: (candidate.file_number, candidate.block),
)


@given(candidates, st.integers(0, 400))
def test_enough_is_freed_if_there_is_enough_and_no_more_than_needed(
    found: list[Candidate], need: int
) -> None:
    victims = choose_victims(found, need, clock=1000, next_use=lambda candidate: None)
    freed = sum(victim.size for victim in victims)
    assert freed >= min(need, sum(candidate.size for candidate in found))
    assert not victims or freed - victims[-1].size < need
    assert len({id(victim) for victim in victims}) == len(victims)


@given(candidates, st.integers(1, 400), st.randoms(use_true_random=False))
def test_what_is_never_used_again_goes_before_what_is_and_the_farthest_first(
    found: list[Candidate], need: int, rng: random.Random
) -> None:
    uses = {candidate: rng.choice((None, rng.random())) for candidate in found}
    victims = choose_victims(found, need, clock=1000, next_use=uses.__getitem__)
    kept = [uses[candidate] for candidate in found if candidate not in victims]
    gone = [uses[victim] for victim in victims]
    if any(use is not None for use in gone):
        assert None not in kept
        assert all(use <= min(u for u in gone if u is not None) for use in kept if use is not None)


def test_a_block_needed_sooner_than_the_newcomer_stays() -> None:
    found = [Candidate(1, block, 1, 0) for block in range(10)]
    victims = choose_victims(
        found, 10, clock=0, next_use=lambda candidate: candidate.block, used_no_later_than=6
    )
    assert [victim.block for victim in victims] == [9, 8, 7]


def test_long_unread_blocks_go_first() -> None:
    old = Candidate(1, 0, 1, 0)
    young = [Candidate(1, block, 1, STALE_AGE) for block in range(1, 50)]
    assert choose_victims([*young, old], 1, clock=STALE_AGE, next_use=lambda candidate: None) == [old]


def _hit_share(cache_blocks: int, datasets: list[range]) -> list[float]:
    """Simulate one reshuffled epoch over each of `datasets` in turn; return each epoch's share of hits."""
    rng = random.Random(1)
    stamps: dict[int, int] = {}
    shares = []
    traffic = 0
    for dataset in datasets:
        hits = 0
        for block in rng.sample(dataset, len(dataset)):
            clock = traffic * STAMPS_PER_LIMIT // cache_blocks
            traffic += 1
            if block in stamps:
                hits += 1
                stamps[block] = clock
                continue
            if len(stamps) >= cache_blocks:
                sample = [Candidate(1, b, 1, stamps[b]) for b in rng.sample(list(stamps), 16)]
                if not is_admitted(
                    sample,
                    clock=clock,
                    next_use=lambda candidate: None,
                    incoming_use=None,
                    chance=rng.random(),
                ):
                    continue
                (victim,) = choose_victims(sample, 1, clock=clock, next_use=lambda candidate: None)
                del stamps[victim.block]
            stamps[block] = clock
        shares.append(hits / len(dataset))
    return shares


def test_reshuffled_epochs_hit_nearly_the_share_that_is_cached() -> None:
    # The ceiling is 0.5; LRU hits 0.15 of them.
    shares = _hit_share(1000, [range(2000)] * 6)
    assert min(shares[1:]) > 0.4


def test_another_dataset_replaces_the_first_within_a_few_epochs() -> None:
    shares = _hit_share(1000, [range(2000)] * 3 + [range(5000, 5900)] * 6)
    assert shares[-1] > 0.9


def test_a_newcomer_needed_later_than_all_is_not_admitted() -> None:
    found = [Candidate(1, block, 1, 0) for block in range(10)]

    def admitted(incoming_use: float) -> bool:
        return is_admitted(
            found, clock=0, next_use=lambda candidate: candidate.block, incoming_use=incoming_use, chance=0.0
        )

    assert [admitted(use) for use in (8, 9, 10)] == [True, False, False]
