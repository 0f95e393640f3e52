"""Opens LMDB environments, and says what to do about a file in a data format that the installed lmdb cannot read.

LMDB 0.9 has data format 1, LMDB 1.0 has 3, and neither reads the other's files. The package lmdb brings both from its
version 3.0 on and takes the one that a file needs. New files get format 1, which every version that is allowed reads.
"""

import struct
from pathlib import Path
from typing import Any

import lmdb

from fusecache.model.errors import StateError

# `struct MDB_meta` in LMDB's mdb.c: a magic number and the format, after a page header of 16 bytes; of 24 in LMDB 1.0.
_MAGIC = 0xBEEFC0DE
_META_OFFSETS = (16, 24)
_META = struct.Struct("=II")
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
