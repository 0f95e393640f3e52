"""Reads rows of JSON lines, CSV, Parquet and Arrow files as samples. Each source can be pickled for other processes.

The encoding of a column comes from the file (Parquet, Arrow), from its first rows (JSON lines, CSV), or from the user.

Converts the values of a row for the writer of a column. A value is stored as it is, or refused.

Exception: a float may lose digits in a column of shorter floats, but never becomes infinite.
"""

import csv
import gzip
import io
import json
import math
import os
import re
import reprlib
import stat
import sys
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from itertools import chain, islice
from numbers import Number
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from loader.base.packages import optional_module
from loader.errors import EncodingError, LoaderError, cause_text
from loader.mds.encodings import DTYPE_CODES

EXACT_INTS = 1 << 53  # from here on, float64 lacks some whole numbers
WHOLE_NUMBER = re.compile(rb"\s*[+-]?\d+\s*")
# Fields of CSV that are numbers by themselves: as such they keep all that they say. 007 may be a code.
PLAIN_NUMBERS = {
    "int": re.compile(r"-?(0|[1-9]\d{0,17})"),
    "float64": re.compile(r"-?(0|[1-9]\d{0,14})(\.\d+)?([eE][+-]?\d{1,2})?"),
}

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


def text_converter(name: str, encoding: str) -> Convert:
    """Return the function from the bytes of a tar's member, or of a field of CSV, to the value of its column.

    Raises LoaderError for its encoding.
    """
    if encoding in ("bytes", "jpeg", "png"):
        return bytes
    convert = value_converter(encoding)
    parse = _parser(name, encoding)
    return lambda data: convert(parse(data))


def _parser(name: str, encoding: str) -> Callable[[bytes], Any]:
    kind = encoding.partition(":")[0]
    if kind == "ndarray":
        return _array_of_npy if name.endswith("npy") else json.loads
    if kind in ("str", "str_decimal"):
        return lambda data: data.decode()
    if kind == "json":
        return json.loads
    if kind.startswith(("int", "uint")) or kind == "str_int":
        return _whole_of_text
    if kind.startswith("float") or kind == "str_float":
        return _float_of_text
    raise LoaderError(
        f"--columns {name}:{encoding}: a member of a tar, or a field of CSV, has bytes, an image, text, JSON or a "
        f"number: choose bytes, jpeg, png, str, json, int, float64 or ndarray"
    )


def _whole_of_text(data: bytes) -> int:
    if not WHOLE_NUMBER.fullmatch(data):
        raise EncodingError(f"{data[:40]!r} is not a whole number")
    return int(data)


def _float_of_text(data: bytes) -> float:
    if b"_" in data:  # Python reads 1_0 as 10
        raise EncodingError(f"{data[:40]!r} is not a number")
    return float(data)


def _array_of_npy(data: bytes) -> Any:
    file = io.BytesIO(data)
    major, _ = np.lib.format.read_magic(file)  # type: ignore[no-untyped-call]
    read = np.lib.format.read_array_header_1_0 if major == 1 else np.lib.format.read_array_header_2_0
    shape, _, dtype = read(file)  # type: ignore[no-untyped-call]
    claimed, there = math.prod(shape) * dtype.itemsize, len(data) - file.tell()
    if claimed != there and not dtype.hasobject:  # numpy allocates what the header claims
        raise EncodingError(f"its header claims {claimed} bytes, and {there} follow")
    return np.load(io.BytesIO(data), allow_pickle=False)


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


ROWS_LOOKED_AT = 1000  # rows that determine the columns of JSON lines or CSV
BATCH_ROWS = 1024  # rows of Parquet in memory at a time
# The end of Arrow's stream format. Without it, Arrow takes a file that is cut between two batches for a whole one.
ARROW_END = b"\xff\xff\xff\xff\0\0\0\0"
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
class CsvRows:
    """The rows of one CSV file, or TSV by its name: plain, `.gz` or `.zst`. Its first line has the columns' names.

    columns: name -> encoding. all_names: all columns of the file are wanted, with encodings that its first rows told;
    else other columns are left out.
    """

    path: str
    columns: Mapping[str, str]
    all_names: bool = False

    def __call__(self) -> Iterator[dict[str, Any]]:
        """Yield the samples. Raises LoaderError, naming file and line, for a row that does not fit the columns."""
        converts = {name: text_converter(name, encoding) for name, encoding in self.columns.items()}
        for number, row in csv_rows(self.path):
            where = f"{self.path}, line {number}"
            if self.all_names and row.keys() != converts.keys():
                raise LoaderError(
                    f"{where}: it has other columns than the first file: choose some with --columns"
                )
            sample: dict[str, Any] = {}
            for name, convert in converts.items():
                if name not in row:
                    raise LoaderError(f"{self.path} has no column {name}: name columns of {', '.join(row)}")
                try:
                    plain = PLAIN_NUMBERS.get(self.columns[name]) if self.all_names else None
                    if plain is not None and not plain.fullmatch(row[name]):
                        raise EncodingError(f"{row[name]!r} is no plain number, as the first rows have")
                    sample[name] = convert(row[name].encode())
                except (EncodingError, TypeError, ValueError, ArithmeticError, RecursionError) as problem:
                    raise LoaderError(
                        f"{where}: {name}: {cause_text(problem)}; mend it, or keep it with --columns {name}:str, "
                        f"with the other columns, if any"
                    ) from None
            yield sample


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
        names, batches = self._opened()
        missing = sorted(set(self.columns) - set(names))
        if missing:
            raise LoaderError(
                f"{self.path} has no column {', '.join(missing)}: name columns of {', '.join(names)}"
            )
        more = set(names) - set(self.columns)
        if self.all_names and more:
            raise _no_column(more, self.path)
        nullable = _nullable(self.columns)
        for number, row in enumerate(chain.from_iterable(self._rows(batches)), start=1):
            yield _converted(row, converts, nullable, f"{self.path}, row {number}")

    def _opened(self) -> tuple[Sequence[str], Iterator[Any]]:
        """Return the names of all columns, and what reads the wanted ones, in pieces."""
        file = _parquet_file(self.path)
        return file.schema_arrow.names, file.iter_batches(BATCH_ROWS, columns=list(self.columns))

    def _rows(self, batches: Iterator[Any]) -> Iterator[list[dict[str, Any]]]:
        arrow = optional_module("pyarrow", why="Parquet")
        number = 1
        try:
            for batch in batches:
                rows: list[dict[str, Any]] = batch.to_pylist()
                yield rows
                number += len(rows)
        except (arrow.ArrowException, OSError, ValueError, OverflowError) as problem:
            raise LoaderError(
                f"{self.path}, row {number}: {cause_text(problem)}; the file is damaged, or has a value that Python "
                f"cannot represent: fetch or write it again, or leave its column out of --columns"
            ) from problem


@dataclass(frozen=True, slots=True)
class ArrowRows(ParquetRows):
    """The rows of one Arrow file of Hugging Face's `save_to_disk`, as of a Parquet file."""

    def _opened(self) -> tuple[Sequence[str], Iterator[Any]]:
        file = _arrow_file(self.path)
        if len(set(file.schema.names)) < len(file.schema.names):
            raise LoaderError(f"{self.path} has two columns of one name: give each column one of its own")
        return file.schema.names, (batch.select(list(self.columns)) for batch in file)


def text_lines(path: str, newline: str | None = None) -> Iterator[str]:
    """Yield the lines of a text file; decompresses `.gz` and `.zst`. newline: as of `open`.

    Raises LoaderError, naming the file, the line and a remedy, if it is damaged, truncated, or not UTF-8.
    """
    number = 0
    try:
        # Bytes that are not UTF-8 become surrogates, so that the error can name the line: decoding covers more.
        with io.TextIOWrapper(open_unpacked(path), "utf-8", "surrogateescape", newline) as file:
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


def csv_rows(path: str) -> Iterator[tuple[int, dict[str, str]]]:
    """Yield the rows of a CSV file, each with the number of its last line. Raises LoaderError that names the line."""
    csv.field_size_limit(sys.maxsize)
    is_tabbed = re.search(r"\.tsv(\.\w+)?$", path.lower()) is not None
    lines = text_lines(path, newline="")  # a field may have line ends, which stay as they are
    first = next(lines, "").removeprefix("\ufeff")  # Excel's byte order mark
    lines = chain([first] if first else (), lines)
    rows = csv.reader(lines, delimiter="\t" if is_tabbed else ",", strict=True)
    names: list[str] = []
    try:
        for row in rows:
            where = f"{path}, line {rows.line_num}"
            if not names:
                names = row
                if not all(names) or len(set(names)) < len(names):
                    raise LoaderError(
                        f"{where}: it is the names of the columns: give each column one of its own"
                    )
            elif not row and len(names) > 1:
                continue  # an empty line
            elif len(row) != len(names):
                raise LoaderError(
                    f"{where} has {len(row)} fields, and the first line {len(names)}: mend it, or quote the field"
                )
            else:
                yield rows.line_num, dict(zip(names, row, strict=True))
    except csv.Error as problem:
        raise LoaderError(
            f"{path}, line {rows.line_num}: {problem}; mend it, or write the file again"
        ) from None


def csv_columns(paths: Sequence[str]) -> dict[str, str]:
    """Return the columns by the first rows of the first file: numbers where all are plain ones, else text."""
    rows = [row for _, row in islice(csv_rows(paths[0]), ROWS_LOOKED_AT)]
    if not rows:
        raise LoaderError(f"{paths[0]} has no row to determine the columns from: name them with --columns")
    return {
        name: next(
            (
                kind
                for kind, number in PLAIN_NUMBERS.items()
                if all(number.fullmatch(row[name]) for row in rows)
            ),
            "str",
        )
        for name in rows[0]
    }


def saved_files(folder: str) -> list[str]:
    """Return the Arrow files of a folder that Hugging Face's `save_to_disk` wrote. Raises LoaderError for others."""
    splits, state = (Path(folder) / name for name in ("dataset_dict.json", "state.json"))
    try:
        if splits.exists():
            names = ", ".join(
                os.path.join(folder, name) for name in json.loads(splits.read_bytes())["splits"]
            )
            raise LoaderError(f"{folder} holds several datasets: name one of {names}")
        rows = json.loads(state.read_bytes())["_data_files"]
        if not rows:
            raise LoaderError(f"{folder} holds no rows: leave it out")
        return [os.path.join(folder, row["filename"]) for row in rows]
    except (OSError, ValueError, KeyError, TypeError) as problem:
        raise LoaderError(
            f"{folder} is no folder of save_to_disk: {cause_text(problem)}: name a folder with state.json"
        ) from None


def arrow_columns(paths: Sequence[str]) -> dict[str, str]:
    """Return the columns by the schema of the first file, as `parquet_columns` does."""
    return {field.name: _arrow_encoding(field, paths[0]) for field in _arrow_file(paths[0]).schema}


def _arrow_file(path: str) -> Any:
    arrow = optional_module("pyarrow", why="Arrow")
    try:
        with open(path, "rb") as file:
            file.seek(-min(len(ARROW_END), os.fstat(file.fileno()).st_size), os.SEEK_END)
            is_whole = file.read() == ARROW_END
        if not is_whole:
            raise LoaderError(f"{path} is cut short, or not an Arrow file: fetch it again")
        return arrow.ipc.open_stream(arrow.memory_map(path))
    except (arrow.ArrowException, OSError) as problem:
        raise LoaderError(f"{path} is not an Arrow file: {cause_text(problem)}; fetch it again") from None


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
