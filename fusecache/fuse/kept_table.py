"""A table in shared memory: what a successor must know of a process that was killed.

An append-only log of rows, in a file of memfd_create(2). Every `put` and `remove` is one copy and one store of the
log's end, so a process that is killed at any moment leaves a whole table. Values are small and few: open files,
directories.
"""

import json
import mmap
import os
import struct
from collections.abc import Iterator
from typing import Any

_MAGIC = b"fusekept"
# Changes with the meaning of rows, and with the places of requests (`kept_requests`): a process does not take over the
# memory of another format, but that of the one before.
FORMAT = 2
_HEADER = struct.Struct("<8sQ")  # magic, format
_ACTIVE = 16  # where the index of the region in use is
_REGIONS = (24, 40)  # where each region's start and end are
_REGION = struct.Struct("<QQ")
_NUMBER = struct.Struct("<Q")
_ROW = struct.Struct("<II")  # bytes of the key and of the value, or _REMOVED
_REMOVED = 0xFFFFFFFF
_FIRST = 4096
# Below this size the log is not worth rewriting.
_LEAST_REWRITE_BYTES = 1024 * 1024
_GROWTH_BYTES = 256 * 1024


class FormatUnknown(Exception):  # what is found, not an error of the program
    """The memory holds the table of another version of the program, or none, or is damaged."""


class KeptTable:
    """Rows by key. A value is any JSON value. Owned by one process and one thread at a time.

    format: of what a predecessor wrote, FORMAT or the one before.
    """

    def __init__(self, fd: int) -> None:
        """fd: of an empty memory file, or of a predecessor's. It stays the caller's. Raises FormatUnknown."""
        self._fd = fd
        self._rows: dict[str, bytes] = {}
        self._row_bytes = 0
        size = os.fstat(fd).st_size
        is_new = size == 0
        if is_new:
            size = _FIRST + _GROWTH_BYTES
            os.ftruncate(fd, size)
        self._memory = mmap.mmap(fd, size)
        if is_new:
            _HEADER.pack_into(self._memory, 0, _MAGIC, FORMAT)
            for place in _REGIONS:
                self._store(place, _REGION.pack(_FIRST, _FIRST))
        try:
            magic, self.format = _HEADER.unpack_from(self._memory, 0)
            if magic != _MAGIC or self.format not in {FORMAT, FORMAT - 1}:
                raise FormatUnknown(f"shared memory of another version of the program ({size} bytes)")
            self._region = _REGIONS[_NUMBER.unpack_from(self._memory, _ACTIVE)[0]]
            self._start, self._end = _REGION.unpack_from(self._memory, self._region)
            if not _FIRST <= self._start <= self._end <= size:
                raise FormatUnknown(f"damaged shared memory ({self._start}..{self._end} of {size} bytes)")
            self._read()
        except (struct.error, IndexError, UnicodeDecodeError) as exc:
            raise FormatUnknown(f"damaged shared memory ({exc})") from exc

    def copy_into(self, other: "KeptTable") -> None:
        """Put all rows into another table, as they are."""
        for key, value in self.items(""):
            other.put(key, value)

    def __contains__(self, key: str) -> bool:
        return key in self._rows

    def get(self, key: str) -> Any:
        """Return a row's value, None if there is no such row."""
        value = self._rows.get(key)
        return None if value is None else json.loads(value)

    def items(self, prefix: str) -> Iterator[tuple[str, Any]]:
        """Yield the rows whose keys begin so: the rest of the key, and the value; None if that is damaged."""
        for key, value in list(self._rows.items()):
            if key.startswith(prefix):
                try:
                    yield key[len(prefix) :], json.loads(value)
                except ValueError:
                    yield key[len(prefix) :], None

    def put(self, key: str, value: Any) -> None:
        """Set a row."""
        text = json.dumps(value, separators=(",", ":")).encode()
        if self._rows.get(key) != text:
            self._forget(key)
            self._rows[key] = text
            self._row_bytes += _ROW.size + len(key) + len(text)
            self._append(key, text)

    def remove(self, key: str) -> None:
        """Remove a row, if it is there."""
        if key in self._rows:
            self._forget(key)
            self._append(key, None)

    # ---- inside

    def _forget(self, key: str) -> None:
        old = self._rows.pop(key, None)
        if old is not None:
            self._row_bytes -= _ROW.size + len(key) + len(old)

    def _append(self, key: str, value: bytes | None) -> None:
        row = _packed(key, value)
        if self._end + len(row) > len(self._memory):
            if self._end - self._start > max(_LEAST_REWRITE_BYTES, 4 * self._row_bytes):
                self._rewrite()
                return
            self._grow(self._end + len(row))
        self._memory[self._end : self._end + len(row)] = row
        self._end += len(row)
        # The row counts from this store on.
        self._store(self._region + _NUMBER.size, _NUMBER.pack(self._end))

    def _rewrite(self) -> None:
        """Write all rows into a new log, where they fit: before the log, else behind it."""
        log = b"".join(_packed(key, value) for key, value in self._rows.items())
        start = _FIRST if _FIRST + len(log) <= self._start else self._end
        self._grow(start + len(log))
        self._memory[start : start + len(log)] = log
        other = _REGIONS[self._region == _REGIONS[0]]
        self._store(other, _REGION.pack(start, start + len(log)))
        self._store(_ACTIVE, _NUMBER.pack(_REGIONS.index(other)))
        self._region, self._start, self._end = other, start, start + len(log)

    def _store(self, at: int, number: bytes) -> None:
        # Not `pack_into`: that writes zeros first, then one byte after the other, and may be killed in between.
        self._memory[at : at + len(number)] = number

    def _grow(self, size: int) -> None:
        if size > len(self._memory):
            size += max(_GROWTH_BYTES, size // 4)
            os.ftruncate(self._fd, size)
            self._memory.resize(size)

    def _read(self) -> None:
        at = self._start
        while at < self._end:
            key_bytes, value_bytes = _ROW.unpack_from(self._memory, at)
            at += _ROW.size
            key = self._memory[at : at + key_bytes].decode()
            at += key_bytes
            self._forget(key)
            if value_bytes != _REMOVED:
                self._rows[key] = self._memory[at : at + value_bytes]
                self._row_bytes += _ROW.size + key_bytes + value_bytes
                at += value_bytes


def _packed(key: str, value: bytes | None) -> bytes:
    name = key.encode()
    if value is None:
        return _ROW.pack(len(name), _REMOVED) + name
    return _ROW.pack(len(name), len(value)) + name + value
