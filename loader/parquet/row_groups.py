"""Reads Parquet footers, which are checked again at every open, and the bytes of single row groups.

All reads are pread calls on an open file, because a mapped file answers an I/O error with SIGBUS. pyarrow decodes from
memory, on the calling thread. So this module has no threads that a fork could lose, and a failed read is an OSError. A
file that is opened again must have the same footer as before; otherwise it was replaced.
"""

import contextlib
import errno
import hashlib
import io
import os
import stat
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from loader.base.packages import optional_module
from loader.base.paths import check_is_local, mount_advice, natural_key
from loader.errors import DatasetError

# Nearly all footers are shorter, so one read a file suffices.
TAIL_BYTES = 64 << 10
# Concurrent reads of footers: each waits for a round trip to a remote bucket.
FOOTERS_AT_ONCE = 32
# Column chunks with a smaller gap are read as one: a separate request to a remote bucket costs more than these bytes.
GAP_BYTES = 256 << 10
ENDING = ".parquet"
_END = b"PAR1"
_END_ENCRYPTED = b"PARE"
# The length of the footer, and the magic letters.
_LAST_BYTES = 8


@dataclass(frozen=True, slots=True)
class Footer:
    """The stored part of a file's footer. rows: (row groups,). schema: pyarrow's. digest: of the footer's bytes."""

    size: int
    rows: NDArray[np.int64]
    schema: Any
    digest: bytes


class OpenParquetFile:
    """An open file with its parsed footer; closed with its last reference.

    expected: the digest that its footer must have. Raises DatasetError, naming the file and the cause, if it is not a
    Parquet file or not the expected one; OSError if it cannot be read.
    """

    def __init__(self, path: str, expected: bytes = b"") -> None:
        self.fd = -1
        parquet = _parquet(path)
        # O_NONBLOCK: a FIFO in place of the file is an error rather than a wait for its writer.
        self.fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            self._parse(path, parquet, expected)
        except BaseException:
            self.close()  # now, not when the error, which refers to this frame, is released
            raise

    def __del__(self) -> None:
        self.close()

    def close(self) -> None:
        """Close the file; nothing can be read afterwards."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            # Only reads happened, so a close that fails (the mount is gone) loses nothing.
            with contextlib.suppress(OSError):
                os.close(fd)

    @property
    def footer(self) -> Footer:
        """The part of the footer that is kept after the file is closed."""
        groups = self.metadata.num_row_groups
        rows = np.fromiter(
            (self.metadata.row_group(group).num_rows for group in range(groups)), np.int64, groups
        )
        return Footer(self.size, rows, self.schema, self.digest)

    def read(self, group: int, columns: list[str]) -> Any:
        """Return columns of one row group as a pyarrow.Table.

        Raises OSError if it cannot be read, ArrowException or OSError without an errno if it does not decode.
        """
        arrow, parquet = optional_module("pyarrow", why="Parquet"), _parquet("Parquet")
        extents = self.extents(group, columns)
        for start, stop in extents:
            os.posix_fadvise(self.fd, start, stop - start, os.POSIX_FADV_WILLNEED)  # all of it at a time
        source = _FileSource(self.fd, self.size, [self._read_range(*extent) for extent in extents])
        file = parquet.ParquetFile(
            arrow.PythonFile(source, mode="r"), metadata=self.metadata, page_checksum_verification=True
        )
        return file.read_row_group(group, columns=columns, use_threads=False).select(columns)

    def extents(self, group: int, columns: list[str]) -> list[tuple[int, int]]:
        """Return the byte ranges of the columns' chunks; ranges with a small gap are joined."""
        row_group = self.metadata.row_group(group)
        found: list[tuple[int, int]] = []
        for number in range(row_group.num_columns):
            chunk = row_group.column(number)
            path = chunk.path_in_schema
            if any(path == name or path.startswith(f"{name}.") for name in columns):
                start = chunk.data_page_offset
                if chunk.dictionary_page_offset:
                    start = min(start, chunk.dictionary_page_offset)
                found.append((start, start + chunk.total_compressed_size))
        found.sort()
        joined = found[:1]
        for start, stop in found[1:]:
            if start - joined[-1][1] <= GAP_BYTES:
                joined[-1] = joined[-1][0], max(stop, joined[-1][1])
            else:
                joined.append((start, stop))
        return joined

    def _parse(self, path: str, parquet: Any, expected: bytes) -> None:
        found = os.fstat(self.fd)
        if not stat.S_ISREG(found.st_mode):
            kind = "a directory" if stat.S_ISDIR(found.st_mode) else "something else"
            raise DatasetError(f"{path} is {kind}, not a Parquet file")
        # The kernel's read-ahead past a row group would make its reader wait for bytes that no hint has named.
        os.posix_fadvise(self.fd, 0, 0, os.POSIX_FADV_RANDOM)
        self.size = found.st_size
        footer = self._footer(path)
        self.digest = hashlib.blake2b(footer + self.size.to_bytes(8, "little"), digest_size=16).digest()
        if expected and self.digest != expected:
            raise DatasetError(f"{path} was replaced: it has another footer than when the dataset was opened")
        try:
            self.metadata = parquet.ParquetFile(io.BytesIO(footer)).metadata
            self.schema = self.metadata.schema.to_arrow_schema()
        except (_arrow_error(), OSError) as problem:
            raise DatasetError(f"{path} has a damaged footer: {_first_line(problem)}") from None

    def _footer(self, path: str) -> bytes:
        """Return the footer with its length and magic letters."""
        tail = self._read_range(max(0, self.size - TAIL_BYTES), self.size)[1]
        if tail[-4:] == _END_ENCRYPTED:
            raise DatasetError(f"{path} has an encrypted footer, which the loader cannot read")
        length = int.from_bytes(tail[-_LAST_BYTES:-4], "little") + _LAST_BYTES
        if tail[-4:] != _END or length > self.size - len(_END):
            raise DatasetError(
                f"{path} does not end as a Parquet file does ({self.size} bytes): it was truncated, its writer has "
                f"not finished, or it is another kind of file"
            )
        if length > len(tail):
            tail = self._read_range(self.size - length, self.size)[1]
        return tail[-length:]

    def _read_range(self, start: int, stop: int) -> tuple[int, bytes]:
        """Return (start, the bytes); fewer bytes only if the file ends."""
        parts = []
        at = start
        while at < stop:
            part = os.pread(self.fd, stop - at, at)
            if not part:
                break
            parts.append(part)
            at += len(part)
        return start, parts[0] if len(parts) == 1 else b"".join(parts)


class _FileSource(io.RawIOBase):
    """A file for pyarrow that serves the prefetched ranges from memory, and reads everything else."""

    def __init__(self, fd: int, size: int, ranges: list[tuple[int, bytes]]) -> None:
        self._fd, self._size, self._ranges, self._at = fd, size, ranges, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._at = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._size}[whence]
        return self._at

    def tell(self) -> int:
        return self._at

    def read(self, size: int = -1) -> bytes:
        stop = self._size if size < 0 else min(self._size, self._at + size)
        start, self._at = self._at, max(self._at, stop)
        for first, content in self._ranges:
            if first <= start and stop <= first + len(content):
                return content[start - first : stop - first]
        return os.pread(self._fd, max(0, stop - start), start)


def cause_of(problem: BaseException) -> str:
    """Return an error's text without the path, which the message names already."""
    if isinstance(problem, FileNotFoundError):
        return "the file is missing"
    if isinstance(problem, OSError) and problem.errno:
        return f"{problem.strerror}{'; it was replaced' if problem.errno == errno.ESTALE else ''}"
    if isinstance(problem, NotImplementedError):
        version = optional_module("pyarrow", why="Parquet").__version__
        return f"pyarrow {version} has no way to read it ({_first_line(problem)})"
    return f"it is damaged ({_first_line(problem)})"


def _first_line(problem: BaseException) -> str:
    return (str(problem) or type(problem).__name__).splitlines()[0]


def _parquet(why: str) -> Any:
    return optional_module("pyarrow.parquet", why=why)


def _arrow_error() -> Any:
    return optional_module("pyarrow", why="Parquet").ArrowException


def parquet_files(path: str | Path | Sequence[str | Path]) -> tuple[list[str], list[str]]:
    """Return the files, and names of them that do not depend on where the dataset lies."""
    several = [path] if isinstance(path, (str, Path)) else list(path)
    paths: list[str] = []
    names: list[str] = []
    for place in several:
        check_is_local(place)
    for one in [os.fspath(place) for place in several]:
        if os.path.isdir(one):
            below = _below(one)
            if not below:
                raise DatasetError(f"{one} has no {ENDING} file")
            paths += [os.path.join(one, name) for name in below]
            names += below
        else:
            paths.append(one)
            names.append(os.path.basename(one))
    if not paths:
        raise DatasetError("no path was given: a dataset has at least one file")
    return paths, names


def _below(folder: str) -> list[str]:
    def fail(problem: OSError) -> None:
        raise DatasetError(f"{problem.filename} cannot be listed: {problem.strerror}")

    found: list[str] = []
    for here, folders, files in os.walk(folder, onerror=fail):
        folders[:] = [name for name in folders if not name.startswith((".", "_"))]
        inner = os.path.relpath(here, folder)
        wanted = [name for name in files if name.endswith(ENDING) and not name.startswith((".", "_"))]
        found += wanted if inner == "." else [os.path.join(inner, name) for name in wanted]
    return sorted(found, key=natural_key)


def read_footers(paths: list[str]) -> list[Footer]:
    def read(path: str) -> Footer:
        try:
            return OpenParquetFile(path).footer
        except OSError as problem:
            remedy = mount_advice(problem, path)
            if isinstance(problem, FileNotFoundError) and any(sign in path for sign in "*?["):
                remedy = "Patterns are not expanded: give the directory, or a list of files."
            raise DatasetError(f"{path}: {cause_of(problem)}{'. ' if remedy else ''}{remedy}") from problem

    if len(paths) == 1:
        return [read(paths[0])]
    with ThreadPoolExecutor(min(FOOTERS_AT_ONCE, len(paths)), "parquet-footers") as pool:
        return list(pool.map(read, paths))


def chosen_columns(path: str, schema: Any, columns: Sequence[str] | None) -> list[str]:
    if isinstance(columns, str):
        raise DatasetError(f"columns is a list of names: [{columns!r}]")
    chosen = list(schema.names if columns is None else columns)
    missing = [name for name in chosen if name not in schema.names]
    if missing or not chosen:
        raise DatasetError(f"{path} has no column {', '.join(missing)}; it has {', '.join(schema.names)}")
    twice = {name for name in chosen if chosen.count(name) > 1 or schema.names.count(name) > 1}
    if twice:
        raise DatasetError(f"{path}: column {', '.join(sorted(twice))} is there twice")
    return chosen


def check_schemas(paths: list[str], footers: list[Footer], columns: list[str], *, all_of_them: bool) -> None:
    """Raise DatasetError if a file lacks a column of the first, or has it with another type."""
    first = footers[0].schema
    for path, footer in zip(paths[1:], footers[1:], strict=True):
        schema = footer.schema
        extra = sorted(set(schema.names) - set(columns)) if all_of_them else []
        for name in [*columns, *extra]:
            here = schema.field(name).type if name in schema.names else "missing"
            there = first.field(name).type if name in first.names else "missing"
            if here != there:
                raise DatasetError(
                    f"{path}: column {name} is {here}, and {there} in {paths[0]}: the files of a dataset have the "
                    f"same columns; name the shared ones with `columns`, or write the file again"
                )
