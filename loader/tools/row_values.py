"""Converts the values of a row for the writer of a column. A value is stored as it is, or refused.

Exception: a float may lose digits in a column of shorter floats, but never becomes infinite.
"""

import math
import reprlib
from collections.abc import Callable, Iterator
from decimal import Decimal, InvalidOperation
from numbers import Number
from typing import Any

import numpy as np

from loader.errors import EncodingError

EXACT_INTS = 1 << 53  # from here on, float64 lacks some whole numbers

Convert = Callable[[Any], Any]


def value_converter(encoding: str) -> Convert:
    """Return the function that converts a JSON or Parquet value for a writer of this encoding.

    It raises EncodingError, naming the value, where the column would store another one.
    """
    name, _, rest = encoding.partition(":")
    if name == "ndarray":
        dtype = rest.partition(":")[0]
        dimensions = [int(axis) for axis in rest.partition(":")[2].split(",") if axis]
        return lambda value: _shaped(_array(value, dtype, encoding), dimensions)
    if encoding in ("jpeg", "png", "bytes"):
        # Image datasets in Parquet have {"bytes": ..., "path": ...}.
        return lambda value: value["bytes"] if isinstance(value, dict) and "bytes" in value else value
    if encoding == "str_decimal":
        return _decimal
    if encoding.startswith("float"):
        return lambda value: _float(value, encoding)
    return _as_it_is


def _as_it_is(value: Any) -> Any:
    return value


def _decimal(value: Any) -> Decimal:
    text = str(value)
    if "_" in text:  # Python reads 1_0 as 10
        raise _no_fit(value, "str_decimal")
    try:
        return Decimal(text)
    except InvalidOperation:
        raise _no_fit(value, "str_decimal") from None


def _float(value: Any, encoding: str) -> float:
    if not isinstance(value, Number):
        raise _no_fit(value, encoding)
    found = float(value)  # type: ignore[arg-type]  # complex numbers come from no file
    if (isinstance(value, int) and found != value) or _overflows(found, encoding):
        raise _no_fit(value, encoding)
    return found


def _array(value: Any, dtype: str, encoding: str) -> Any:
    """Return an array of a dtype, or of the one that numpy chooses for "". Its shape is that of the value."""
    try:
        found = np.asarray(value)
    except ValueError:  # lists of different lengths, or text and lists
        found = np.empty(0, object)
    if found.dtype.kind not in "biuf" or (found.dtype.kind == "f" and (np.abs(found) >= EXACT_INTS).any()):
        usual = found.dtype.name if found.dtype.kind == "f" else "float64"
        return _array_of_leaves(value, dtype or usual, encoding)
    if dtype in ("", found.dtype.name):
        return found
    kinds = "f" if found.dtype.kind == "f" else "i", "f" if dtype.startswith("float") else "i"
    if kinds == ("i", "i"):
        low, high = (int(found.min()), int(found.max())) if found.size else (0, 0)
        range_ = np.iinfo(dtype)
        if low < range_.min or high > range_.max:
            raise _no_fit(low if low < range_.min else high, encoding)
        return found.astype(dtype)
    if kinds == ("f", "f"):
        with np.errstate(over="ignore"):
            short = found.astype(dtype)
        odd = found[np.isinf(short) & np.isfinite(found)]
        if odd.size:
            raise _no_fit(float(odd.flat[0]), encoding)
        return short
    return _array_of_leaves(value, dtype, encoding)


def _array_of_leaves(value: Any, dtype: str, encoding: str) -> Any:
    """Compare each number as Python does, which is exact between int, float and Decimal."""
    leaves = list(_leaves(value))
    for leaf in leaves:
        if not _fits(leaf, dtype):
            raise _no_fit(leaf, encoding)
    try:
        return np.array(value, dtype)
    except ValueError:
        raise EncodingError(
            f"{reprlib.repr(value)} does not fit {encoding}: its lists differ in length"
        ) from None


def _leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, np.ndarray):
        value = value.tolist()
    if isinstance(value, list | tuple):
        for item in value:
            yield from _leaves(item)
    else:
        yield value


def _fits(leaf: Any, dtype: str) -> bool:
    if not isinstance(leaf, Number):
        return False
    if not dtype.startswith("float"):
        range_ = np.iinfo(dtype)
        return bool(range_.min <= leaf <= range_.max and int(leaf) == leaf)  # type: ignore[call-overload, operator]
    try:
        stored = float(np.float64(leaf))  # type: ignore[arg-type]
    except OverflowError:
        return False
    if _overflows(stored, dtype):
        return False
    with np.errstate(over="ignore"):
        return not isinstance(leaf, int) or float(np.dtype(dtype).type(stored)) == leaf


def _overflows(number: float, dtype: str) -> bool:
    """Return whether a finite number becomes infinite in floats of a dtype."""
    with np.errstate(over="ignore"):
        return math.isfinite(number) and math.isinf(np.dtype(dtype).type(number))


def _no_fit(value: Any, encoding: str) -> EncodingError:
    return EncodingError(f"{reprlib.repr(value)} does not fit {encoding}")


def _shaped(found: Any, dimensions: list[int]) -> Any:
    """Return the array in the shape of its column; any shape if the column has none."""
    if not dimensions:
        return found
    if found.size != math.prod(dimensions):
        raise EncodingError(
            f"{found.size} numbers do not fill the shape {','.join(map(str, dimensions))}: name the shape that all "
            f"rows have, or none if they differ (ndarray:{found.dtype.name})"
        )
    return found.reshape(dimensions)
