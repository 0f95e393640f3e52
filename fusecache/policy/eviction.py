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
STALE_AGE = 2 * STAMPS_PER_LIMIT
# Each victim is the worst of about this many sampled at random.
CANDIDATES_PER_VICTIM = 16


@dataclass(frozen=True, slots=True)
class Candidate:
    """A block that could go. stamp: the traffic clock when it was last read; size in bytes on disk."""

    file_number: int
    block: int
    size: int
    stamp: int


def choose_victims(
    candidates: Sequence[Candidate],
    need_bytes: int,
    *,
    clock: int,
    next_use: Callable[[Candidate], float | None],
    used_no_later_than: float | None = None,
) -> list[Candidate]:
    """Return blocks to evict, the most useless first, until `need_bytes` are freed or the candidates end.

    candidates: a random sample in random order. next_use: when a block is read next, None if nobody said.
    used_no_later_than: the next use of what shall take the room; blocks needed sooner than that are kept,
    so that the incoming block is the one that is not admitted.
    """

    def uselessness(candidate: Candidate) -> tuple[int, float]:
        use = next_use(candidate)
        if use is not None:
            return (0, use)
        age = clock - candidate.stamp
        # Equal keys keep the sample's random order: young blocks are a lottery, not a queue.
        return (1, age if age >= STALE_AGE else 0.0)

    victims: list[Candidate] = []
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
