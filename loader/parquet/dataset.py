"""Parquet files as a map-style dataset: ids in, samples out. Row groups are the shards of every sample order.

    dataset = ParquetDataset("/mnt/bucket/web", columns=["tokens"])       # every .parquet file below
    sampler = ElasticBatchSampler(dataset, global_batch_size=512)

A row group is read and decoded as a whole, and cached while the cache has room. So choose an order that uses no more
row groups at a time than fit into the cache (`block_size`, `canonical_nodes`). The dataset logs a warning if it
decodes the same row groups repeatedly. It writes nothing. No thread or process outlives a call.

Converts Arrow columns to sample values: numbers to numpy arrays, everything else to Python objects.

A column becomes one array (rows, ...) if its values are numbers, or lists of numbers of one length, and none is null;
otherwise a list of values. A value depends on its own content and type only, not on the rows that are read with it.
"""

import hashlib
import operator
import os
import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, overload

import numpy as np
from numpy.typing import NDArray

from loader.base.argument_checks import byte_count, checked_ids, several
from loader.base.packages import optional_module
from loader.base.paths import mount_advice
from loader.base.single_flight import SingleFlight
from loader.errors import DatasetError, ShardError
from loader.mds.index import Index
from loader.mds.index_parser import PackedNames, Schema
from loader.mds.record_table import RecordTable, Sample
from loader.mds.shard_files import ThrashingDetector
from loader.parquet.row_groups import (
    OpenParquetFile,
    cause_of,
    check_schemas,
    chosen_columns,
    parquet_files,
    read_footers,
)

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


CACHE_BYTES = 1 << 30
# An open file has a parsed footer, which takes megabytes if the file has thousands of row groups.
OPEN_FILES = 64

_THRASHING_TEXT = (
    "row groups are decoded again and again: %d times for %d samples, at %d rows each. Raise "
    "cache_bytes (%d), or choose an order with fewer row groups in use at a time: a smaller "
    "block_size, canonical_nodes near the number of nodes"
)
# Attributes of one process: not pickled, and made again after a fork.
_CACHES = ("_process", "_lock", "_open", "_decoded", "_decoded_bytes", "_loading", "_thrashing")


class ParquetDataset:
    """The rows of Parquet files, numbered through the files in natural order (2 before 10), or as listed.

    path: a file, a directory, or a list of them. A directory stands for every .parquet file below it, except where a
    part of the path begins with "." or "_". columns: the columns of the samples; None: all. cache_bytes: limit in bytes
    for decoded row groups in each process; the last one always stays. With 0, repeated decoding is not logged.

    Values: int64 as int, other numbers as numpy scalars, text as str, binary as bytes, null as None. Lists of numbers
    are writable numpy arrays. All other types are as pyarrow's `to_pylist` returns them.
    Raises DatasetError, naming the file, if one is missing, truncated or not Parquet, or has other columns than the
    first. Raises LoaderError if pyarrow is not installed. Pickles without its caches; safe for threads and for fork.
    """

    def __init__(
        self,
        path: str | Path | Sequence[str | Path],
        columns: Sequence[str] | None = None,
        *,
        cache_bytes: int | str = CACHE_BYTES,
    ) -> None:
        optional_module("pyarrow", why="Parquet")
        self._paths, self._names = parquet_files(path)
        self._cache_bytes = byte_count(cache_bytes, "cache_bytes")
        footers = read_footers(self._paths)
        first = footers[0].schema
        self._columns = chosen_columns(self._paths[0], first, columns)
        self._schema = [first.field(name).type for name in self._columns]
        check_schemas(self._paths, footers, self._columns, all_of_them=columns is None)
        self._file_bytes = np.array([footer.size for footer in footers], np.int64)
        self._digests = [footer.digest for footer in footers]
        self._groups = np.array([footer.rows.size for footer in footers], np.int64)
        self._sizes = np.concatenate([footer.rows for footer in footers])
        self._prepare()

    def _prepare(self) -> None:
        self._ends = np.cumsum(self._sizes)
        self._group_ends = np.cumsum(self._groups)
        self._reset()

    def _reset(self) -> None:
        """Start with empty caches in this process."""
        self._process = os.getpid()
        self._lock = threading.Lock()
        self._open: OrderedDict[int, OpenParquetFile] = OrderedDict()
        self._decoded: OrderedDict[int, Any] = OrderedDict()
        self._decoded_bytes = 0
        self._loading: SingleFlight[Any] = SingleFlight()
        rows = int(self._sizes.mean()) if self._sizes.size else 0
        self._thrashing = ThrashingDetector(_THRASHING_TEXT, rows, self._cache_bytes)

    def __getstate__(self) -> dict[str, Any]:
        rebuilt = ("_ends", "_group_ends", *_CACHES)
        return {name: value for name, value in self.__dict__.items() if name not in rebuilt}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._prepare()

    def __len__(self) -> int:
        return int(self._ends[-1]) if self._ends.size else 0

    def __repr__(self) -> str:
        return (
            f"ParquetDataset({self._where!r}: {len(self)} samples in {self._sizes.size} row groups of "
            f"{len(self._paths)} files)"
        )

    def __iter__(self) -> Iterator[Sample]:
        """Iterate over all samples in the order of the files."""
        for start, stop in pairwise([0, *self._ends.tolist()]):
            yield from self.__getitems__(range(start, stop))

    @overload
    def __getitem__(self, which: int | np.integer[Any]) -> Sample: ...
    @overload
    def __getitem__(self, which: slice | Sequence[int] | NDArray[np.integer[Any]]) -> list[Sample]: ...

    def __getitem__(
        self, which: int | np.integer[Any] | slice | Sequence[int] | NDArray[np.integer[Any]]
    ) -> Sample | list[Sample]:
        """Return one sample, or a list of them for a slice, a list or an array of ids. Negative ids count
        from the end.

        Raises IndexError for an id out of range, ShardError for rows that cannot be read or decoded.
        """
        ids = several(which, len(self))
        if ids is not None:
            return list(self.__getitems__(ids))
        return self.__getitems__([operator.index(which)])[0]  # type: ignore[arg-type]  # TypeError for other types

    def __getitems__(self, which: Sequence[int] | NDArray[np.integer[Any]]) -> Sequence[Sample]:
        """Return many samples, in the requested order; each row group is visited once. DataLoader calls this.

        If all columns are numbers, or lists of numbers of one length, the result is a RecordTable, which
        `loader.fast.collate` turns into a batch without touching single samples.
        """
        ids = checked_ids(which, len(self), self._where)
        if ids.size == 0:
            return []
        groups = np.searchsorted(self._ends, ids, side="right")
        within = ids - (self._ends[groups] - self._sizes[groups])
        visits = np.argsort(groups, kind="stable")
        borders = np.flatnonzero(np.diff(groups[visits], prepend=-1, append=-1))
        parts: list[dict[str, Column]] = []
        for start, stop in pairwise(borders.tolist()):
            places = visits[start:stop]
            parts.append(self._rows(int(groups[places[0]]), within[places]))
        self._thrashing.samples_read += ids.size
        back = np.empty(ids.size, np.intp)
        back[visits] = np.arange(ids.size)
        columns = {name: ordered([part[name] for part in parts], back) for name in self._columns}
        arrays = {name: column for name, column in columns.items() if isinstance(column, np.ndarray)}
        plain = frozenset(
            name for name, array in arrays.items() if array.dtype == np.int64 and array.ndim == 1
        )
        if len(arrays) == len(columns):
            return RecordTable(arrays, ids.size, plain)
        values = [column.tolist() if name in plain else column for name, column in columns.items()]  # type: ignore[union-attr]
        return [dict(zip(self._columns, row, strict=True)) for row in zip(*values, strict=True)]

    @property
    def column_names(self) -> tuple[str, ...]:
        """The columns of the samples."""
        return tuple(self._columns)

    @property
    def files(self) -> tuple[str, ...]:
        """The paths of the files, in order."""
        return tuple(self._paths)

    @property
    def shard_sizes(self) -> NDArray[np.int64]:
        """(row groups,) int64, number of samples in each; the input of a sample order."""
        return self._sizes

    @property
    def fingerprint(self) -> str:
        """32 hex digits that identify the dataset: a hash of names, sizes and footers (schemas, row groups)."""
        digest = hashlib.blake2b("\n".join(self._names).encode(), digest_size=16)
        for one in self._digests:
            digest.update(one)
        return digest.hexdigest()

    @property
    def index(self) -> Index:
        """The files, one shard each, for `loader.hints`: the daemon fetches them whole, each before its first use."""
        folders = [os.path.dirname(path) or "." for path in self._paths]
        borders = [number for number in range(1, len(folders)) if folders[number] != folders[number - 1]]
        names = PackedNames(os.path.basename(path) for path in self._paths)
        rows = np.diff(np.concatenate([[0], self._ends])[self._group_ends], prepend=0)
        none = np.zeros(len(folders), np.int32)
        return Index(
            directories=tuple(folders[number] for number in [0, *borders]),
            borders=(0, *borders, len(folders)),
            samples=rows,
            raw_bytes=self._file_bytes,
            zip_bytes=self._file_bytes,
            schema_of=none,
            compression_of=none,
            schemas=(Schema((), (), ()),),
            # Only pyarrow knows where a sample's bytes lie, as in a compressed shard.
            compressions=("parquet",),
            raw_names=names,
            zip_names=names,
        )

    def extents(self, group: int) -> list[tuple[int, int]]:
        """Return the byte ranges (start, stop) of its file that a read of a row group takes.

        Raises OSError if the file cannot be read, DatasetError if it was replaced.
        """
        if self._process != os.getpid():
            self._reset()  # as in `_table`
        file, within = self._place(group)
        return self._file(file).extents(within, self._columns)

    @property
    def _where(self) -> str:
        return self._paths[0] if len(self._paths) == 1 else f"{self._paths[0]} … {self._paths[-1]}"

    # ---- row groups

    def _rows(self, group: int, rows: NDArray[np.int64]) -> dict[str, Column]:
        """Return the columns of some rows of a row group."""
        table = self._table(group)
        arrow = optional_module("pyarrow", why="Parquet")
        try:
            found = table.take(arrow.array(rows))
            return {name: column_values(found[name]) for name in self._columns}
        except (arrow.ArrowException, UnicodeDecodeError) as problem:
            raise self._failed(group, problem) from problem

    def _table(self, group: int) -> Any:
        """Return a decoded row group; threads that ask concurrently share one decoding."""
        if self._process != os.getpid():
            self._reset()  # after a fork: threads of the parent may hold the locks
        table = self._known(group)
        return self._loading.do(group, partial(self._load, group)) if table is None else table

    def _known(self, group: int) -> Any:
        with self._lock:
            table = self._decoded.get(group)
            if table is not None:
                self._decoded.move_to_end(group)
            return table

    def _load(self, group: int) -> Any:
        table = self._known(group)  # another thread may have loaded it just now
        if table is None:
            table = self._read(group)
            with self._lock:
                self._keep(group, table)
        return table

    def _keep(self, group: int, table: Any) -> None:
        self._decoded[group] = table
        self._decoded_bytes += table.nbytes
        while self._decoded_bytes > self._cache_bytes and len(self._decoded) > 1:
            self._decoded_bytes -= self._decoded.popitem(last=False)[1].nbytes
        if self._cache_bytes:
            self._thrashing.count(group)

    def _read(self, group: int) -> Any:
        file, within = self._place(group)
        arrow = optional_module("pyarrow", why="Parquet")
        try:
            found = self._file(file).read(within, self._columns)
            if found.num_rows != self._sizes[group]:
                raise ShardError(f"it has {found.num_rows} rows, not the {self._sizes[group]} of its footer")
            return with_values_in_place(arrow, found)
        except (OSError, DatasetError, ShardError, arrow.ArrowException) as problem:
            raise self._failed(group, problem) from problem

    def _place(self, group: int) -> tuple[int, int]:
        """Return the file of a row group, and its number in the file."""
        file = int(np.searchsorted(self._group_ends, group, side="right"))
        return file, group - int(self._group_ends[file] - self._groups[file])

    def _file(self, number: int) -> OpenParquetFile:
        with self._lock:
            file = self._open.get(number)
            if file is not None:
                self._open.move_to_end(number)
                return file
        file = OpenParquetFile(self._paths[number], self._digests[number])
        with self._lock:
            self._open[number] = file
            while len(self._open) > OPEN_FILES:
                self._open.popitem(last=False)
        return file

    def _failed(self, group: int, problem: BaseException) -> ShardError:
        file, within = self._place(group)
        last = int(self._ends[group])
        cause = str(problem) if isinstance(problem, (DatasetError, ShardError)) else cause_of(problem)
        advice = mount_advice(problem, self._paths[file]) if isinstance(problem, OSError) else ""
        remedy = advice or "Restore the file."
        if isinstance(problem, NotImplementedError):
            remedy = "Leave the column of that type out with `columns`, or write the file again."
        return ShardError(
            f"{self._paths[file]}, row group {within}, samples "
            f"{last - int(self._sizes[group])} to {last - 1}: {cause}. {remedy}"
        )
