"""Which node keeps which group of granules: the one with the highest random weight (rendezvous hashing).

A node that joins or leaves moves only its own share. Nodes whose lists differ agree wherever both know the winner.
Where they do not, a group is fetched twice: nothing depends on it but cost.
"""

from collections.abc import Sequence
from functools import lru_cache
from hashlib import blake2b


# Reads ask again and again for the groups of a few files, evictions for a sample of all.
@lru_cache(65536)
def choose_owner(nodes: Sequence[str], key: str, etag: str, group: int) -> str:
    """Return the node that keeps a group of one object version. nodes: a tuple of addresses, not empty."""
    piece = f"{key}\n{etag}\n{group}\n".encode(errors="surrogatepass")
    return max(nodes, key=lambda node: blake2b(piece + node.encode(), digest_size=8).digest())
