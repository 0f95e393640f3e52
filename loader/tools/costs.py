"""What a data set costs a node beside the bytes of its samples: its index, and the requests of an epoch.

The constants are measured; docs/how-to/scale.md shows what was measured, and the formulas.
"""

from dataclasses import dataclass

import numpy as np

from fusecache.model.prices import R2_PRICES
from loader.hints.planned_reads import Ids

# A mount fetches this much with one GET; a sequential read begins with smaller ones.
GET_BYTES = 8 << 20
_FIRST_GET_BYTES = 1 << 20
_SMALLER_GETS = 15
# Of a process that has opened an index.
INDEX_MEMORY_BYTES_A_SHARD = 165
INDEX_CPU_SECONDS_A_SHARD = 3e-6


@dataclass(frozen=True, slots=True)
class IndexCosts:
    """What each node pays for its index, at most. gets: once a node; the others: of each process."""

    nbytes: int
    gets: int
    memory_bytes: int
    cpu_seconds: float


def index_costs(nbytes: int, shards: int) -> IndexCosts:
    """Return what it costs to open an index of `nbytes` that names so many shards."""
    smaller = min(_SMALLER_GETS, max(0, -(-nbytes // _FIRST_GET_BYTES) - 1))
    return IndexCosts(
        nbytes,
        max(1, -(-nbytes // GET_BYTES)) + smaller,
        shards * INDEX_MEMORY_BYTES_A_SHARD,
        shards * INDEX_CPU_SECONDS_A_SHARD,
    )


def gets_of(nbytes: int, sizes: Ids) -> int:
    """Return the GETs for so many bytes of shards that are fetched whole; sizes: (shards,) bytes of each."""
    total = int(sizes.sum())
    return round(nbytes * int(np.maximum(1, -(-sizes // GET_BYTES)).sum()) / total) if total else 0


def dollars_of(gets: int) -> float:
    """Return what R2 bills for GETs, before its free tier."""
    return gets * R2_PRICES.class_b / 1e6
