"""Rows of JSON lines and Parquet files as samples. Each source is importable, so it goes to other processes.

A column's encoding is told by the file (Parquet) or by its first rows (JSON lines), or given by the user.
"""

import gzip
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from itertools import islice
from pathlib import Path
from typing import IO, Any, cast

import numpy as np

from loader.encodings import DTYPE_CODES
from loader.errors import EncodingError, LoaderError
from loader.optional import optional_module

ROWS_LOOKED_AT = 1000  # to tell the columns of JSON lines
BATCH_ROWS = 1024  # of Parquet, in memory at a time

Convert = Callable[[Any], Any]


@dataclass(frozen=True, slots=True)
class JsonLines:
    """The rows of one file, plain, `.gz` or `.zst`. columns: name -> encoding."""

    path: str
    columns: Mapping[str, str]

    def __call__(self) -> Iterator[dict[str, Any]]:
        """Yield the samples. Raises LoaderError, naming file and line, for what is no row of these columns."""
        converts = {name: value_converter(encoding) for name, encoding in self.columns.items()}
        for number, row in enumerate(json_rows(self.path), start=1):
            yield _converted(row, converts, f"{self.path}, line {number}")


@dataclass(frozen=True, slots=True)
class ParquetRows:
    """The rows of one file. columns: name -> encoding; only these are read."""

    path: str
    columns: Mapping[str, str]

    def __call__(self) -> Iterator[dict[str, Any]]:
        """Yield the samples. Raises LoaderError, naming file and row, for what is no row of these columns."""
        converts = {name: value_converter(encoding) for name, encoding in self.columns.items()}
        file = _parquet_file(self.path)
        missing = sorted(set(self.columns) - set(file.schema_arrow.names))
        if missing:
            raise LoaderError(f"{self.path} has no column {', '.join(missing)}")
        number = 0
        for batch in file.iter_batches(BATCH_ROWS, columns=list(self.columns)):
            for row in batch.to_pylist():
                yield _converted(row, converts, f"{self.path}, row {number}")
                number += 1


def open_text(path: str) -> IO[str]:
    """Open a text, unpacking `.gz` and `.zst`. Raises LoaderError if there is none."""
    try:
        if path.endswith(".gz"):
            return gzip.open(path, "rt", encoding="utf-8")
        if path.endswith((".zst", ".zstd")):
            zstandard = optional_module("zstandard", why=f"{path}")
            return cast("IO[str]", zstandard.open(path, "rt", encoding="utf-8"))
        return open(path, encoding="utf-8")
    except OSError as problem:
        raise LoaderError(f"{path} cannot be read: {problem.strerror}") from problem


def json_rows(path: str) -> Iterator[dict[str, Any]]:
    """Yield the objects of a file, one a line. Raises LoaderError, naming the line, for anything else."""
    with open_text(path) as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                raise LoaderError(f"{path}, line {number} is empty: each line is one JSON object")
            try:
                row = json.loads(line)
            except ValueError as problem:
                raise LoaderError(f"{path}, line {number} is not JSON: {problem}") from None
            if not isinstance(row, dict):
                raise LoaderError(f"{path}, line {number} is no JSON object")
            yield row


def json_columns(paths: Sequence[str]) -> dict[str, str]:
    """Tell the columns from the first rows of the first file. Raises LoaderError if they do not agree."""
    rows = list(islice(json_rows(paths[0]), ROWS_LOOKED_AT))
    if not rows:
        raise LoaderError(f"{paths[0]} has no row to tell the columns from: name them with --columns")
    columns: dict[str, str] = {}
    for name in rows[0]:
        kinds = {type(row.get(name)) for row in rows}
        if type(None) in kinds:
            raise LoaderError(
                f"{paths[0]}: {name} is null or missing in some rows: use --columns {name}:json"
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
    """Tell the columns from the schema of the first file.

    Raises LoaderError, naming the column, for a type that no encoding fits by itself.
    """
    schema = _parquet_file(paths[0]).schema_arrow
    return {field.name: _arrow_encoding(field, paths[0]) for field in schema}


def value_converter(encoding: str) -> Convert:
    """Return what makes of a value of JSON or Parquet one that a writer takes for this encoding."""
    name, _, rest = encoding.partition(":")
    if name == "ndarray":
        dtype = rest.partition(":")[0]
        dimensions = [int(axis) for axis in rest.partition(":")[2].split(",") if axis]
        return lambda value: _array(value, dtype or None, dimensions)
    if encoding in ("jpeg", "png", "bytes"):
        # Data sets of images in Parquet hold {"bytes": ..., "path": ...}.
        return lambda value: value["bytes"] if isinstance(value, dict) and "bytes" in value else value
    if encoding == "str_decimal":
        return lambda value: Decimal(str(value))
    if encoding.startswith("float"):
        return float
    return _as_it_is


def _as_it_is(value: Any) -> Any:
    return value


def _array(value: Any, dtype: str | None, dimensions: list[int]) -> Any:
    found = np.asarray(value)
    if dtype is not None and found.dtype.name != dtype:
        exact = found.astype(dtype)
        if found.dtype.kind in "iu" and not np.array_equal(exact, found):
            raise EncodingError(f"numbers from {found.min()} to {found.max()} do not fit {dtype}")
        found = exact
    return found.reshape(dimensions) if dimensions else found


def _converted(row: Mapping[str, Any], converts: Mapping[str, Convert], where: str) -> dict[str, Any]:
    sample: dict[str, Any] = {}
    for name, convert in converts.items():
        if row.get(name) is None:
            raise LoaderError(f"{where}: {name} is null or missing, and a sample needs all its columns")
        try:
            sample[name] = convert(row[name])
        except (EncodingError, TypeError, ValueError, ArithmeticError) as problem:
            raise LoaderError(f"{where}: {name}: {problem}") from None
    return sample


def _parquet_file(path: str) -> Any:
    parquet = optional_module("pyarrow.parquet", why="Parquet")
    arrow = optional_module("pyarrow", why="Parquet")
    if not Path(path).is_file():
        raise LoaderError(f"{path} is no file")
    try:
        return parquet.ParquetFile(path)
    except (arrow.ArrowException, OSError) as problem:
        raise LoaderError(f"{path} is no Parquet file: {problem}") from None


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
        f"{path}: column {field.name} is {kind}, for which no encoding is certain: name one with --columns "
        f"{field.name}:json, say, or leave the column out of --columns"
    )
