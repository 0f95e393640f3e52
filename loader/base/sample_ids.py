"""Normalises the ids, slices and arrays that a dataset is indexed with."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

_INT64, _UINT64 = np.dtype(np.int64), np.dtype(np.uint64)

Several = slice | Sequence[int] | NDArray[np.integer[Any]]


def several(
    which: int | np.integer[Any] | Several, total: int
) -> Sequence[int] | NDArray[np.integer[Any]] | None:
    """Return the ids that a slice, list or array selects from `total` samples; None for a single id."""
    if isinstance(which, slice):
        return range(*which.indices(total))
    if isinstance(which, (list, tuple, range)) or (isinstance(which, np.ndarray) and which.ndim):
        return which
    return None


def checked_ids(which: Sequence[int] | NDArray[np.integer[Any]], total: int, where: str) -> NDArray[np.int64]:
    """Return (ids,) int64, negative ids resolved. Raises IndexError for an id outside of `total`; names `where`."""
    ids = np.asarray(which)
    # The usual ids need one comparison: as an unsigned number, a negative id is larger than any total.
    if ids.dtype == _INT64 and ids.ndim == 1 and ids.size and np.maximum.reduce(ids.view(_UINT64)) < total:
        return ids
    if ids.size == 0:
        return np.empty(0, np.int64)
    if ids.ndim > 1 and ids.dtype.kind in "iu":
        raise IndexError(
            "lists of ids came where ids are asked for: give a batch sampler to the DataLoader as batch_sampler=, not "
            "as sampler="
        )
    if ids.ndim != 1 or ids.dtype.kind not in "iu":
        raise IndexError(f"ids are a list of numbers, not an array of {ids.dtype} with {ids.ndim} axes")
    lowest = ids.min()
    if lowest < -total or ids.max() >= total:
        wrong = ids[(ids < -total) | (ids >= total)][0]
        raise IndexError(f"sample {wrong} is not among the {total} of {where}")
    ids = ids.astype(np.int64, copy=False)
    return np.where(ids < 0, ids + total, ids) if lowest < 0 else ids
