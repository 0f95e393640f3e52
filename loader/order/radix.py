"""Sorts by 32-bit keys, several times faster than numpy's general argsort, and stable on every machine."""

import numpy as np
from numpy.typing import NDArray

# Below this size, the passes cost more than they save.
FEW = 4096
_KEYS = 2.0**32 - 2**10  # a little less than the number of keys, because products are rounded


def order_of_keys(keys: NDArray[np.uint32]) -> NDArray[np.intp]:
    """Return the order that sorts the keys; equal keys by index.

    numpy sorts 16-bit keys by counting, which is stable. Two such passes, low half first, make a radix sort.
    """
    by_low = np.argsort(keys.astype(np.uint16), kind="stable")
    found: NDArray[np.intp] = by_low[np.argsort((keys >> 16).astype(np.uint16)[by_low], kind="stable")]
    return found


def order_of_positions(places: NDArray[np.float64]) -> NDArray[np.intp]:
    """Return the order that sorts the places, equal ones by index. places: (n,) finite float64, n > 0.

    Sorts by 32 bits of each value's position between minimum and maximum, then sorts the few runs with equal bits.
    Fast for evenly spread values, correct for all.
    """
    if places.size < FEW:
        return np.argsort(places, kind="stable")
    least, most = float(places.min()), float(places.max())
    scale = _KEYS / (most - least) if most > least else 0.0
    keys = ((places - least) * scale).astype(np.uint32)
    order = order_of_keys(keys)
    ordered = places[order]
    wrong = np.flatnonzero(ordered[1:] < ordered[:-1])
    if wrong.size > places.size // 64:
        return np.argsort(places, kind="stable")
    if wrong.size:
        keys = keys[order]
        doubtful = np.unique(keys[wrong])
        firsts, stops = (np.searchsorted(keys, doubtful, side=side).tolist() for side in ("left", "right"))
        for first, stop in zip(firsts, stops, strict=True):
            order[first:stop] = order[first:stop][np.argsort(ordered[first:stop], kind="stable")]
    return order
