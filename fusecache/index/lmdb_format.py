"""Opens LMDB environments, and keeps disk space for their rows.

It says what to do about a file in a data format that the installed lmdb cannot read.

LMDB 0.9 has data format 1, LMDB 1.0 has 3, and neither reads the other's files. The package lmdb brings both from its
version 3.0 on and takes the one that a file needs. New files get format 1, which every version that is allowed reads.
"""

import os
import struct
import time
from pathlib import Path
from typing import Any

import lmdb

from fusecache.model.errors import StateError

# `struct MDB_meta` in LMDB's mdb.c: a magic number and the format, after a page header of 16 bytes; of 24 in LMDB 1.0.
_MAGIC = 0xBEEFC0DE
_META_OFFSETS = (16, 24)
_META = struct.Struct("=II")
# If the disk has no space for the reserve, that is tried again after this.
_RESERVE_RETRY_SECONDS = 10.0
_HAS_BOTH = hasattr(lmdb.Environment, "lib_version")
_READABLE = frozenset({1, 3} if _HAS_BOTH else {1})


def open_environment(directory: Path, **settings: Any) -> lmdb.Environment:
    """Open or create an environment. Raises lmdb.Error or OSError; StateError for a file of another data format."""
    data = directory / "data.mdb"
    if _HAS_BOTH and not (data.exists() and data.stat().st_size):
        settings["lib_version"] = 0  # whatever the variable LMDB_DEFAULT_LIB_VERSION says
    try:
        return lmdb.open(str(directory), **settings)
    except lmdb.Error as exc:
        data_format = _data_format(data)
        if data_format is None or data_format in _READABLE:
            raise
        raise StateError(
            f"{directory} has LMDB's data format {data_format}, which the installed lmdb {lmdb.__version__} cannot "
            "read. Nothing is damaged, and nothing was changed: install another lmdb (pip install 'lmdb>=3,<4' reads "
            "the formats 1 and 3) and mount again. Keep the cache directory: it may hold files that the bucket does "
            "not have"
        ) from exc


class DiskReserve:
    """Disk space that an environment's file has ahead of its rows: they can be written while the disk is full."""

    def __init__(self, environment: lmdb.Environment, directory: Path, reserve_bytes: int) -> None:
        """directory: of the environment."""
        self._environment = environment
        self._path = directory / "data.mdb"
        self._reserve_bytes = reserve_bytes
        self._page_bytes = environment.stat()["psize"]
        self._reserved_bytes = 0
        self._retry_at = float("-inf")

    def top_up(self) -> None:
        """Allocate the space again if half of it is used, and the disk has it."""
        used_bytes = (self._environment.info()["last_pgno"] + 1) * self._page_bytes
        if used_bytes + self._reserve_bytes // 2 <= self._reserved_bytes or time.monotonic() < self._retry_at:
            return
        try:
            with open(self._path, "r+b") as file:
                os.posix_fallocate(file.fileno(), 0, used_bytes + self._reserve_bytes)
        except OSError:
            self._retry_at = time.monotonic() + _RESERVE_RETRY_SECONDS
        else:
            self._reserved_bytes = used_bytes + self._reserve_bytes


def _data_format(data: Path) -> int | None:
    """Return the data format that a file names; None if it is no file of LMDB's."""
    with data.open("rb") as file:
        head = file.read(_META_OFFSETS[-1] + _META.size)
    for offset in _META_OFFSETS:
        if len(head) >= offset + _META.size:
            magic, data_format = _META.unpack_from(head, offset)
            if magic == _MAGIC:
                return int(data_format)
    return None
