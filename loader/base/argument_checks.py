"""Converts a caller's numbers to plain int and float: numpy numbers in a saved state would fail to load elsewhere."""

import operator
import reprlib
from numbers import Integral, Real

from loader.base.sizes import parse_size
from loader.errors import ArgumentError, LoaderError, OrderError

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
    except ValueError as problem:
        raise ArgumentError(f"{name}: {problem}") from None


def _refusal(value: object, name: str, wanted: str) -> str:
    return f"{name} must be {wanted}, not {reprlib.repr(value)} ({type(value).__name__})"
