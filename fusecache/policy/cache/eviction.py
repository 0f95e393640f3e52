"""Which cached blocks go when room is needed. Pure: it ranks a sample, it touches nothing.

The farthest known next use goes first; blocks whose next use is unknown go before those that will be read.
Among the unknown the longest unread goes first, but only out of a random sample, and blocks read within the
last two limits of traffic are spared in favour of random ones: plain LRU would throw out each block of a
repeated scan just before its turn.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

# Stamps count traffic in units of limit/64, so that age 64 is one whole cache of traffic ago.
STAMPS_PER_LIMIT = 64
STALE_AGE = 3 * STAMPS_PER_LIMIT
# While nothing cached is stale, one newcomer in so many is admitted all the same: what is cached changes
# slowly.
ADMIT_ONE_IN = 32
# Each victim is the worst of about this many sampled at random.
CANDIDATES_PER_VICTIM = 16


@dataclass(frozen=True, slots=True)
class EvictionCandidate:
    """A block that could go. stamp: the traffic clock when it was last read; size in bytes on disk."""

    file_number: int
    block: int
    size: int
    stamp: int


def is_admitted(
    candidates: Sequence[EvictionCandidate],
    *,
    clock: int,
    next_use: Callable[[EvictionCandidate], float | None],
    incoming_use: float | None,
    chance: float,
) -> bool:
    """Say whether a newcomer may take the room of cached blocks, of which `candidates` are a small random
    sample.

    Known order: only if something is needed later than it, or never. Unknown order: if a quarter of the
    sample has gone unread
    for three caches of traffic, else by chance. To keep what one has beats replacing it where everything is
    read
    once an epoch: of reshuffled epochs over twice the cache it hits near 0.5, random replacement 0.22, LRU
    0.15.
    chance: a random number in [0, 1).
    """
    uses = [next_use(candidate) for candidate in candidates]
    if incoming_use is not None:
        return any(use is None or use > incoming_use for use in uses)
    stale = sum(
        use is None and clock - candidate.stamp >= STALE_AGE
        for use, candidate in zip(uses, candidates, strict=True)
    )
    if 4 * stale >= len(candidates):
        return True
    return any(use is None for use in uses) and chance < 1 / ADMIT_ONE_IN


def choose_victims(
    candidates: Sequence[EvictionCandidate],
    need_bytes: int,
    *,
    clock: int,
    next_use: Callable[[EvictionCandidate], float | None],
    used_no_later_than: float | None = None,
) -> list[EvictionCandidate]:
    """Return blocks to evict, the most useless first, until `need_bytes` are freed or the candidates end.

    candidates: a random sample in random order. next_use: when a block is read next, None if nobody said.
    used_no_later_than: the next use of what shall take the room; blocks needed sooner than that are kept,
    so that the incoming block is the one that is not admitted.
    """

    def uselessness(candidate: EvictionCandidate) -> tuple[int, float]:
        use = next_use(candidate)
        if use is not None:
            return (0, use)
        age = clock - candidate.stamp
        # Equal keys keep the sample's random order: young blocks are a lottery, not a queue.
        return (1, age if age >= STALE_AGE else 0.0)

    victims: list[EvictionCandidate] = []
    freed = 0
    for candidate in sorted(candidates, key=uselessness, reverse=True):
        if freed >= need_bytes:
            break
        use = next_use(candidate)
        if use is not None and used_no_later_than is not None and use <= used_no_later_than:
            continue
        victims.append(candidate)
        freed += candidate.size
    return victims
