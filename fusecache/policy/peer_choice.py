"""Which node keeps which group of granules: the one with the highest random weight (rendezvous hashing).

A node that joins or leaves moves only its own share. Nodes whose lists differ agree wherever both know the winner.
Where they do not, a group is fetched twice: nothing depends on it but cost.

The weight is the product of two hashes modulo a prime. One hash for each node and group would take four times as long.
"""

from collections.abc import Sequence
from functools import lru_cache
from hashlib import blake2b

_PRIME = (1 << 61) - 1


# Reads ask again and again for the groups of a few files, evictions for a sample of all.
@lru_cache(65536)
def choose_owner(nodes: Sequence[str], key: str, etag: str, group: int) -> str:
    """Return the node that keeps a group of one object version. nodes: a tuple of addresses, not empty."""
    piece = _number(f"{key}\n{etag}\n{group}")
    weights = [number * piece % _PRIME for number in _numbers(nodes)]
    return nodes[weights.index(max(weights))]


# A list, and the same without the nodes that rest.
@lru_cache(64)
def _numbers(nodes: Sequence[str]) -> list[int]:
    return [_number(node) for node in nodes]


def _number(text: str) -> int:
    """Return a number below the prime, and not 0."""
    digest = blake2b(text.encode(errors="surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest) % (_PRIME - 1) + 1
