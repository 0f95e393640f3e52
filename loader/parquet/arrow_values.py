"""Converts Arrow columns to sample values: numbers to numpy arrays, everything else to Python objects.

A column becomes one array (rows, ...) if its values are numbers, or lists of numbers of one length, and none is null;
otherwise a list of values. A value depends on its own content and type only, not on the rows that are read with it.
"""

from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from loader.base.optional_imports import optional_module

Column = NDArray[Any] | list[Any]


def with_values_in_place(arrow: Any, table: Any) -> Any:
    """Return the table with dictionary indices and views replaced by values: pyarrow cannot take rows of those."""
    for number, field in enumerate(table.schema):
        is_dictionary = arrow.types.is_dictionary(field.type)
        kind = field.type.value_type if is_dictionary else _without_views(arrow, field.type)
        if kind != field.type:
            table = table.set_column(number, field.name, table.column(number).cast(kind))
    return table


def _without_views(arrow: Any, kind: Any) -> Any:
    """Return the type with large text and binary in place of their view types, at any depth.

    Not within list views: pyarrow can take their rows, but pyarrow 26 casts nested ones to wrong values.
    """
    types = arrow.types
    # Pyarrow has predicates for these only from version 16 on.
    if str(kind) in ("string_view", "binary_view"):
        return arrow.large_string() if str(kind) == "string_view" else arrow.large_binary()
    if types.is_struct(kind):
        return arrow.struct([field.with_type(_without_views(arrow, field.type)) for field in kind])
    if types.is_map(kind):
        return arrow.map_(_without_views(arrow, kind.key_type), _without_views(arrow, kind.item_type))
    if not _is_list(types, kind):
        return kind
    within = kind.value_field.with_type(_without_views(arrow, kind.value_type))
    if types.is_fixed_size_list(kind):
        return arrow.list_(within, kind.list_size)
    return arrow.large_list(within) if types.is_large_list(kind) else arrow.list_(within)


def column_values(column: Any) -> Column:
    """Return the values of a ChunkedArray; they own their memory."""
    parts = [_values(chunk) for chunk in column.chunks if len(chunk)]
    return parts[0] if len(parts) == 1 else _joined(parts)


def _values(array: Any) -> Column:
    types = optional_module("pyarrow", why="Parquet").types
    kind = array.type
    if _is_number(types, kind):
        return _numbers(array)
    if not _is_list(types, kind):
        found: list[Any] = array.to_pylist()
        return found
    if array.null_count:
        present = iter(_values(array.drop_null()))
        return [next(present) if is_valid else None for is_valid in array.is_valid().to_pylist()]
    inner = _values(array.flatten())
    lengths = array.value_lengths().to_numpy(zero_copy_only=False)
    within = kind.value_type
    if not (_is_number(types, within) or types.is_fixed_size_list(within)):
        return _cut(inner, lengths)
    if isinstance(inner, np.ndarray):
        if types.is_fixed_size_list(kind):
            return inner.reshape(len(array), kind.list_size, *inner.shape[1:])
        if (lengths == lengths[:1]).all():
            return inner.reshape(len(array), *lengths[:1], *inner.shape[1:])
        return np.split(inner, np.cumsum(lengths)[:-1])
    dtype = np.dtype(within.to_pandas_dtype()) if _is_number(types, within) else None
    rows = _cut(inner, lengths)
    return [
        row if any(one is None or isinstance(one, list) for one in row) else np.array(row, dtype)
        for row in rows
    ]


def _cut(values: Column, lengths: NDArray[np.int64]) -> list[list[Any]]:
    return [list(values[start:stop]) for start, stop in pairwise([0, *np.cumsum(lengths).tolist()])]


def _is_number(types: Any, kind: Any) -> bool:
    return bool(types.is_integer(kind) or types.is_floating(kind) or types.is_boolean(kind))


def _is_list(types: Any, kind: Any) -> bool:
    return bool(types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind))


def _numbers(array: Any) -> Column:
    if not array.null_count:
        return np.array(array.to_numpy(zero_copy_only=False))
    present = iter(_plain(np.array(array.drop_null().to_numpy(zero_copy_only=False))))
    return [next(present) if is_valid else None for is_valid in array.is_valid().to_pylist()]


def _plain(values: NDArray[Any]) -> list[Any]:
    """Return the values of an array one by one, with int64 as Python int."""
    return values.tolist() if values.ndim == 1 and values.dtype == np.int64 else list(values)


def _joined(parts: list[Column]) -> Column:
    """Join parts of a column; a list of values if they are not arrays of one shape."""
    arrays = [part for part in parts if isinstance(part, np.ndarray)]
    if len(arrays) == len(parts) and len({(array.dtype, array.shape[1:]) for array in arrays}) == 1:
        return np.concatenate(arrays)
    values: list[Any] = []
    for part in parts:
        values += _plain(part) if isinstance(part, np.ndarray) else part
    return values


def ordered(parts: list[Column], back: NDArray[np.intp]) -> Column:
    """Return parts of a column in the requested order. back: (samples,) the index of each sample in the parts."""
    column = parts[0] if len(parts) == 1 else _joined(parts)
    if (back[1:] > back[:-1]).all():
        return column
    return column[back] if isinstance(column, np.ndarray) else [column[place] for place in back.tolist()]
