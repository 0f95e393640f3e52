"""Samples of one fixed size in a block of memory, which is read as columns without touching single samples.

Plain numpy, no torch. Sample dicts are made on demand.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, overload

import numpy as np
from numpy.typing import NDArray

from loader.mds.encodings import SCALARS, array_details
from loader.mds.index_parser import Schema

Sample = dict[str, Any]


@dataclass(frozen=True, slots=True)
class TableSchema:
    """The layout of a sample. columns: (name, first byte, end, dtype, shape of one value)."""

    columns: tuple[tuple[str, int, int, np.dtype[Any], tuple[int, ...]], ...]
    record_bytes: int
    plain: frozenset[str]  # columns whose values are Python ints

    @classmethod
    def of(cls, schema: Schema) -> "TableSchema | None":
        """Return the layout of a schema; None if sizes vary between samples, or a column is not numeric."""
        if not schema.record_bytes:
            return None
        columns = []
        stops = accumulate(schema.sizes)
        for name, encoding, size, stop in zip(
            schema.names, schema.encodings, schema.sizes, stops, strict=True
        ):
            found = _details(encoding)
            if found is None or found[0].itemsize * int(np.prod(found[1])) != size:
                return None
            columns.append((name, stop - size, stop, *found))
        plain = frozenset(
            name for name, encoding in zip(schema.names, schema.encodings, strict=True) if encoding == "int"
        )
        return cls(tuple(columns), schema.record_bytes, plain)

    def columns_of(self, block: NDArray[np.uint8]) -> dict[str, NDArray[Any]]:
        """Return each column as a contiguous array (samples, ...). block: (samples, record_bytes) uint8.

        A single column is a view of the block; several columns are copies.
        """
        if len(self.columns) == 1:
            name, _, _, dtype, shape = self.columns[0]
            return {name: block.view(dtype).reshape(len(block), *shape)}
        return {
            name: np.ascontiguousarray(block[:, start:stop]).view(dtype).reshape(len(block), *shape)
            for name, start, stop, dtype, shape in self.columns
        }


def _details(encoding: str) -> tuple[np.dtype[Any], tuple[int, ...]] | None:
    if encoding == "int":
        return np.dtype(np.int64).newbyteorder("<"), ()
    if encoding in SCALARS:
        return np.dtype(encoding).newbyteorder("<"), ()
    dtype, shape = array_details(encoding) if encoding.startswith("ndarray") else (None, None)
    return None if dtype is None or shape is None else (dtype, shape)


class RecordTable(Sequence[Sample]):
    """Samples in one shared block of memory.

    columns: name -> array (samples, ...). As a sequence it has dicts, made on access.
    """

    def __init__(self, columns: dict[str, NDArray[Any]], samples: int, plain: frozenset[str]) -> None:
        self.columns = columns
        self._samples, self._plain = samples, plain

    @classmethod
    def joined(cls, parts: "Sequence[RecordTable]") -> "RecordTable | list[Sample]":
        """Return several tables as one; a list of samples if their columns differ."""
        first = parts[0]
        shapes = {tuple((name, a.dtype, a.shape[1:]) for name, a in part.columns.items()) for part in parts}
        if len(shapes) > 1 or any(part._plain != first._plain for part in parts):
            return [sample for part in parts for sample in part]
        columns = {name: np.concatenate([part.columns[name] for part in parts]) for name in first.columns}
        return cls(columns, sum(map(len, parts)), first._plain)

    def __len__(self) -> int:
        return self._samples

    @overload
    def __getitem__(self, which: int) -> Sample: ...
    @overload
    def __getitem__(self, which: slice) -> list[Sample]: ...

    def __getitem__(self, which: int | slice) -> Sample | list[Sample]:
        """Return one sample, or several."""
        if isinstance(which, slice):
            return [self[number] for number in range(*which.indices(self._samples))]
        return {
            name: int(column[which]) if name in self._plain else column[which]
            for name, column in self.columns.items()
        }

    def __iter__(self) -> Iterator[Sample]:
        names = list(self.columns)
        values = [column.tolist() if name in self._plain else column for name, column in self.columns.items()]
        return (dict(zip(names, row, strict=True)) for row in zip(*values, strict=True))

    def __repr__(self) -> str:
        return f"RecordTable({self._samples} samples: {', '.join(self.columns)})"
