"""Checks a caller's numbers and sizes, and converts them to plain int and float.

A numpy number in a saved state would fail to load in readers without numpy.

Normalises the ids, slices and arrays that a dataset is indexed with.
"""

import operator
import reprlib
from collections.abc import Sequence
from numbers import Integral, Real
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fusecache.config.values import parse_size
from loader.errors import ArgumentError, LoaderError, OrderError

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


_SUFFIXES = {"k": 10**3, "m": 10**6, "b": 10**9, "t": 10**12}


def whole_number(value: object, name: str, unit: str = "", error: type[LoaderError] = OrderError) -> int:
    """Return a whole number as an int; 1e3 counts as whole.

    Raises `error` for anything else; its text names the argument and the value.
    """
    if isinstance(value, Real) and not isinstance(value, Integral) and float(value).is_integer():
        return int(float(value))
    try:
        return operator.index(value)  # type: ignore[arg-type]  # raises TypeError for every other type
    except TypeError:
        raise error(_refusal(value, name, f"a whole number{unit and f' of {unit}'}")) from None


def optional_whole(value: object, name: str, unit: str = "") -> int | None:
    """Return a whole number, or None for None. Raises OrderError."""
    return None if value is None else whole_number(value, name, unit)


def plain_number(value: object, name: str) -> int | float:
    """Return any real number as an int or a float. Raises OrderError."""
    if isinstance(value, Integral):
        return int(value)
    if isinstance(value, Real):
        return float(value)
    raise OrderError(_refusal(value, name, "a number"))


def sample_count(value: object, name: str) -> int | None:
    """Return a number of samples, given as 100_000, "100,000", "100k" or "1.5m"; None for None.

    Raises OrderError.
    """
    if not isinstance(value, str):
        return optional_whole(value, name, "samples")
    digits, factor = value.strip().lower().replace(",", ""), 1
    if digits and digits[-1] in _SUFFIXES:
        digits, factor = digits[:-1], _SUFFIXES[digits[-1]]
    try:
        return int(float(digits) * factor)
    except (ValueError, OverflowError):
        raise OrderError(f"{name} {value!r} is not a number of samples: write 100000, 100k or 1.5m") from None


def byte_count(value: object, name: str) -> int:
    """Return a number of bytes, given as an int or a text such as "200GB" or "1.5 GiB". Raises ArgumentError."""
    if not isinstance(value, str):
        return whole_number(value, name, "bytes", ArgumentError)
    try:
        return parse_size(value)
    except ValueError:
        raise ArgumentError(
            f"{name} {value} is not a number of bytes: write for example 500GB, 1GiB or 500e9, or 0 for no cache"
        ) from None


def with_article(value: object) -> str:
    """Return the type of a value with its article: an int, a str."""
    kind = type(value).__name__
    return f"{'an' if kind[0] in 'aeioAEIO' or kind == 'ndarray' else 'a'} {kind}"


def _refusal(value: object, name: str, wanted: str) -> str:
    return f"{name} must be {wanted}, not {reprlib.repr(value)} ({type(value).__name__})"
