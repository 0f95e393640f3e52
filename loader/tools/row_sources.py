"""Reads rows of JSON lines and Parquet files as samples. Each source can be pickled for other processes.

The encoding of a column comes from the file (Parquet), from its first rows (JSON lines), or from the user.

Converts the values of a row for the writer of a column. A value is stored as it is, or refused.

Exception: a float may lose digits in a column of shorter floats, but never becomes infinite.
"""

import gzip
import io
import json
import math
import os
import reprlib
import stat
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from itertools import chain, islice
from numbers import Number
from typing import Any, ClassVar

import numpy as np

from loader.base.optional_imports import optional_module
from loader.errors import EncodingError, LoaderError, cause_text
from loader.mds.encodings import DTYPE_CODES

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


ROWS_LOOKED_AT = 1000  # rows that determine the columns of JSON lines
BATCH_ROWS = 1024  # rows of Parquet in memory at a time
PACKED_BYTES = 64 << 10  # bytes of zstd decompressed at a time


@dataclass(frozen=True, slots=True)
class JsonLines:
    """The rows of one JSON lines file: plain, `.gz` or `.zst`.

    columns: name -> encoding. all_names: a row with another name is an error; else its value is left out.
    """

    counted: ClassVar[str] = "line"
    path: str
    columns: Mapping[str, str]
    all_names: bool = False

    def __call__(self) -> Iterator[dict[str, Any]]:
        """Yield the samples. Raises LoaderError, naming file and line, for a line that does not fit the columns."""
        converts = {name: value_converter(encoding) for name, encoding in self.columns.items()}
        nullable = _nullable(self.columns)
        for number, row in enumerate(json_rows(self.path), start=1):
            where = f"{self.path}, line {number}"
            if self.all_names and not row.keys() <= converts.keys():
                raise _no_column(row.keys() - converts.keys(), where)
            yield _converted(row, converts, nullable, where)


@dataclass(frozen=True, slots=True)
class ParquetRows:
    """The rows of one Parquet file.

    columns: name -> encoding; only these are read. all_names: a file with another column is an error.
    """

    counted: ClassVar[str] = "row"
    path: str
    columns: Mapping[str, str]
    all_names: bool = False

    def __call__(self) -> Iterator[dict[str, Any]]:
        """Yield the samples. Raises LoaderError, naming file and row, for a row that does not fit the columns."""
        converts = {name: value_converter(encoding) for name, encoding in self.columns.items()}
        file = _parquet_file(self.path)
        missing = sorted(set(self.columns) - set(file.schema_arrow.names))
        if missing:
            raise LoaderError(
                f"{self.path} has no column {', '.join(missing)}: name columns of {', '.join(file.schema_arrow.names)}"
            )
        more = set(file.schema_arrow.names) - set(self.columns)
        if self.all_names and more:
            raise _no_column(more, self.path)
        nullable = _nullable(self.columns)
        for number, row in enumerate(chain.from_iterable(self._batches(file)), start=1):
            yield _converted(row, converts, nullable, f"{self.path}, row {number}")

    def _batches(self, file: Any) -> Iterator[list[dict[str, Any]]]:
        arrow = optional_module("pyarrow", why="Parquet")
        number = 1
        try:
            for batch in file.iter_batches(BATCH_ROWS, columns=list(self.columns)):
                rows: list[dict[str, Any]] = batch.to_pylist()
                yield rows
                number += len(rows)
        except (arrow.ArrowException, OSError, ValueError, OverflowError) as problem:
            raise LoaderError(
                f"{self.path}, row {number}: {cause_text(problem)}; the file is damaged, or has a value that Python "
                f"cannot represent: fetch or write it again, or leave its column out of --columns"
            ) from problem


def text_lines(path: str) -> Iterator[str]:
    """Yield the lines of a text file; decompresses `.gz` and `.zst`.

    Raises LoaderError, naming the file, the line and a remedy, if it is damaged, truncated, or not UTF-8.
    """
    number = 0
    try:
        with _open_text(path) as file:
            for number, line in enumerate(file, start=1):
                if not line.isascii():
                    _check_utf8(line, f"{path}, line {number}")
                yield line
    except (OSError, EOFError, zlib.error, ValueError) as problem:
        if isinstance(problem, OSError) and problem.errno:
            raise LoaderError(f"{path} cannot be read: {problem.strerror}") from problem
        raise LoaderError(
            f"{path}, line {number + 1}: {cause_text(problem)}; it is damaged, cut short, or not what its name says: "
            f"fetch it again, or rename it to match its format"
        ) from problem


def _open_text(path: str) -> io.TextIOWrapper:
    # Bytes that are not UTF-8 become surrogates, so that the error can name the line: decoding covers larger pieces.
    return io.TextIOWrapper(open_unpacked(path), encoding="utf-8", errors="surrogateescape")


def open_unpacked(path: str) -> Any:
    """Open a file for reading bytes; `.gz`, `.tgz` and `.zst` are decompressed."""
    if path.endswith((".gz", ".tgz")):
        return gzip.open(path)
    if path.endswith((".zst", ".zstd")):
        return io.BufferedReader(_ZstdFile(path), PACKED_BYTES)
    return open(path, "rb")


def _check_utf8(line: str, where: str) -> None:
    try:
        line.encode()
    except UnicodeEncodeError as problem:
        byte = ord(line[problem.start]) & 0xFF
        raise LoaderError(
            f"{where}: the byte {byte:#x} is not UTF-8: write the file again (for example `iconv -f latin1 -t utf-8`)"
        ) from None


class _ZstdFile(io.RawIOBase):
    """The decompressed content of a file's zstd frames.

    Raises ValueError if a frame is damaged or truncated; the library's own reader takes truncation for the end.
    """

    def __init__(self, path: str) -> None:
        self._zstandard = optional_module("zstandard", why=path)
        self._file = open(path, "rb")  # noqa: SIM115 -- closed by close
        self._frame: Any = None
        self._packed = b""
        self._ready = memoryview(b"")

    def close(self) -> None:
        if not self.closed:
            self._file.close()
        super().close()

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._ready:
            self._packed = self._packed or self._file.read(PACKED_BYTES)
            if not self._packed:
                if self._frame is None:
                    return 0
                raise ValueError("its last zstd frame ends early")
            try:
                self._unpack()
            except self._zstandard.ZstdError as problem:
                raise ValueError(cause_text(problem)) from None
        count = min(len(buffer), len(self._ready))
        buffer[:count] = self._ready[:count]
        self._ready = self._ready[count:]
        return count

    def _unpack(self) -> None:
        if self._frame is None:
            self._frame = self._zstandard.ZstdDecompressor().decompressobj()
        self._ready = memoryview(self._frame.decompress(self._packed))
        self._packed = self._frame.unused_data if self._frame.eof else b""
        if self._frame.eof:
            self._frame = None


def json_rows(path: str) -> Iterator[dict[str, Any]]:
    """Yield the objects of a file, one a line. Raises LoaderError, naming the line, for anything else."""
    for number, line in enumerate(text_lines(path), start=1):
        if not line.strip():
            raise LoaderError(f"{path}, line {number} is empty: each line is one JSON object")
        try:
            row = json.loads(line)
        except ValueError as problem:
            raise LoaderError(f"{path}, line {number} is not JSON: {problem}") from None
        except RecursionError as problem:
            raise LoaderError(
                f"{path}, line {number} is nested too deeply: {problem}; leave the line out, or write it flatter"
            ) from None
        if not isinstance(row, dict):
            raise LoaderError(f"{path}, line {number} is not a JSON object")
        yield row


def json_columns(paths: Sequence[str]) -> dict[str, str]:
    """Return the columns by the first rows of the first file. Raises LoaderError if they differ in their names."""
    rows = list(islice(json_rows(paths[0]), ROWS_LOOKED_AT))
    if not rows:
        raise LoaderError(f"{paths[0]} has no row to determine the columns from: name them with --columns")
    columns: dict[str, str] = {}
    for name in dict.fromkeys(chain.from_iterable(rows)):
        if not all(name in row for row in rows):
            raise LoaderError(
                f"{paths[0]}: {name} is missing in some rows: name the columns that all rows have with --columns"
            )
        kinds = {type(row[name]) for row in rows}
        if type(None) in kinds:
            raise LoaderError(
                f"{paths[0]}: {name} is null in some rows: use --columns {name}:json, with the other columns, if any"
            )
        columns[name] = (
            "str"
            if kinds == {str}
            else "int"
            if kinds == {int}
            else "float64"
            if kinds <= {int, float}
            else "json"
        )
    return columns


def parquet_columns(paths: Sequence[str]) -> dict[str, str]:
    """Return the columns by the schema of the first file.

    Raises LoaderError, naming the column, for a type without an obvious encoding.
    """
    schema = _parquet_file(paths[0]).schema_arrow
    return {field.name: _arrow_encoding(field, paths[0]) for field in schema}


def _no_column(names: Collection[str], where: str) -> LoaderError:
    return LoaderError(
        f"{where}: {', '.join(sorted(names))} is no column by the first rows of the first file: name the columns that "
        f"all rows have with --columns, and other values are left out"
    )


def _nullable(columns: Mapping[str, str]) -> frozenset[str]:
    return frozenset(name for name, encoding in columns.items() if encoding == "json")


def _converted(
    row: Mapping[str, Any], converts: Mapping[str, Convert], nullable: frozenset[str], where: str
) -> dict[str, Any]:
    sample: dict[str, Any] = {}
    for name, convert in converts.items():
        if name not in row:
            raise LoaderError(
                f"{where}: {name} is missing, and a sample needs all its columns: leave it out of --columns"
            )
        value = row[name]
        if value is None and name not in nullable:
            raise LoaderError(
                f"{where}: {name} is null, which only json holds: use --columns {name}:json, with the other "
                f"columns, if any"
            )
        try:
            sample[name] = convert(value)
        except (EncodingError, TypeError, ValueError, ArithmeticError) as problem:
            raise LoaderError(
                f"{where}: {name}: {problem}; mend it, choose another encoding, or keep it with --columns {name}:json, "
                f"with the other columns, if any"
            ) from None
    return sample


def _parquet_file(path: str) -> Any:
    parquet = optional_module("pyarrow.parquet", why="Parquet")
    arrow = optional_module("pyarrow", why="Parquet")
    try:
        is_file = stat.S_ISREG(os.stat(path).st_mode)
    except OSError as problem:
        raise LoaderError(f"{path} is not a file that can be read: {problem.strerror}") from problem
    if not is_file:
        raise LoaderError(f"{path} is not a file: name the files, not their directory")
    try:
        return parquet.ParquetFile(path)
    except (arrow.ArrowException, OSError) as problem:
        raise LoaderError(f"{path} is not a Parquet file: {problem}") from None


def _arrow_encoding(field: Any, path: str) -> str:
    kind = str(field.type)
    plain = {
        "string": "str",
        "large_string": "str",
        "string_view": "str",
        "binary": "bytes",
        "large_binary": "bytes",
        "binary_view": "bytes",
        "bool": "uint8",
        "halffloat": "float16",
        "float": "float32",
        "double": "float64",
        **{f"{sign}int{bits}": f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)},
    }
    if kind in plain:
        return plain[kind]
    if kind.startswith("decimal"):
        return "str_decimal"
    inner = plain.get(str(field.type.value_type), "") if hasattr(field.type, "value_type") else ""
    if inner in DTYPE_CODES and kind.startswith(("list", "large_list", "fixed_size_list")):
        size = getattr(field.type, "list_size", None) if kind.startswith("fixed_size_list") else None
        return f"ndarray:{inner}" + (f":{size}" if size else "")
    raise LoaderError(
        f"{path}: column {field.name} is {kind}, for which no encoding is certain: name one with --columns, for "
        f"example {field.name}:json, or leave the column out of --columns"
    )
