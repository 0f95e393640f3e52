"""Packs encoded samples into the bytes of a shard and its index entry. Touches no file.

The bytes are identical to those of MosaicML's MDSWriter 0.13, unless `align` pads. Invariant: no offset reaches 2**32.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from loader.base.compression import compress, digest, split
from loader.errors import LoaderError, UnknownEncodingError, WriterError
from loader.mds.encodings import Buffer, column_bytes
from loader.mds.index_parser import VERSION, Schema

# MosaicML's default; readers that download shards expect about this size.
# Hashing and writing a shard of small samples in one piece is faster; a larger one is not copied for that.
JOINED_BYTES = 64 << 20
DEFAULT_SIZE_LIMIT = 1 << 26
OFFSET_LIMIT = 1 << 32
_UNITS = {"": 1, "b": 1, "kb": 1 << 10, "mb": 1 << 20, "gb": 1 << 30}
# The names of a writer's files, with the extension of a compression.
SHARD_FILE = re.compile(r"shard\.\d+\.mds(\.\w+)?")
_SIZE = re.compile(r"(\d+|\d*\.\d+|\d+\.\d*) *([kmg]?b?)", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class PackOptions:
    """How shards are stored.

    compression: None or "zstd:7", "gz", .... hashes: names of hashlib or xxhash, or one name, stored in the index.
    size_limit: raw bytes of a shard, or "64mb"; None: all samples in one shard. align: pad each shard so that its
    samples begin at a multiple of this many bytes (64 lets fixed-size arrays be used in place); 1: no padding.
    """

    compression: str | None = None
    hashes: Sequence[str] | str | None = None
    size_limit: int | str | None = DEFAULT_SIZE_LIMIT
    align: int = 1


class ShardPacker:
    """Packs shards of one schema. Raises WriterError for options that cannot work. settings: what each entry says."""

    def __init__(self, schema: Schema, options: PackOptions) -> None:
        self.schema = schema
        self.size_limit = _size_limit(options.size_limit)
        if options.align < 1 or options.align & (options.align - 1) or options.align > 4096:
            raise WriterError(f"align {options.align} is not a power of two up to 4096")
        self._align = options.align
        self._compression = options.compression or None
        hashes = options.hashes or ()
        self._hashes = sorted({hashes} if isinstance(hashes, str) else set(hashes))
        try:
            self.family = split(options.compression)[0]
            for name in self._hashes:
                digest(name)
        except LoaderError as problem:
            raise WriterError(str(problem)) from None
        self.settings: dict[str, Any] = {
            "version": VERSION,
            "format": "mds",
            "compression": self._compression,
            "hashes": self._hashes,
            "size_limit": self.size_limit,
            "column_names": list(schema.names),
            "column_encodings": list(schema.encodings),
            "column_sizes": [size or None for size in schema.sizes],
        }
        self._config = json.dumps(self.settings, sort_keys=True).encode()

    @property
    def empty_bytes(self) -> int:
        """Raw bytes of a shard without samples; each sample adds 4 bytes and its own."""
        return 8 + len(self._config) + self._align - 1

    @property
    def has_hashes(self) -> bool:
        """Whether the index contains hashes of the files."""
        return bool(self._hashes)

    def file_name(self, number: int) -> str:
        """Return the name of the file that contains a shard."""
        return f"shard.{number:05}.mds{'.' + self.family if self.family else ''}"

    def head(self, sizes: Sequence[int] | NDArray[np.int64]) -> bytes:
        """Return the header of a shard with samples of these sizes. Raises WriterError if offsets exceed 2**32."""
        count = len(sizes)
        config = self.config(count)
        ends = np.cumsum([0, *sizes], dtype=np.int64) + 4 * (count + 2) + len(config)
        if int(ends[-1]) >= OFFSET_LIMIT:
            raise WriterError(f"a shard of {ends[-1]} bytes does not fit: offsets have 32 bits")
        return np.array([count, *ends], "<u4").tobytes() + config

    def config(self, count: int) -> bytes:
        """Return the padded settings as a shard of `count` samples contains them."""
        head_bytes = 4 * (count + 2)
        return self._config.ljust(
            -(-(head_bytes + len(self._config)) // self._align) * self._align - head_bytes
        )

    def pack(
        self, number: int, sizes: Sequence[int], pieces: list[Buffer]
    ) -> tuple[dict[str, Any], Sequence[Buffer]]:
        """Return (the shard's entry in the index, the bytes of its file, in pieces).

        sizes: of the samples. pieces: their bytes; they are taken out of the list.
        """
        raw: list[Buffer] = [self.head(sizes), *pieces]
        pieces.clear()
        if self._compression or sum(map(len, raw)) <= JOINED_BYTES:
            raw = [b"".join(raw)]
        packed = [compress(self._compression, bytes(raw[0]))] if self._compression else None
        return self.entry(number, len(sizes), raw, packed), raw if packed is None else packed

    def entry(
        self, number: int, samples: int, raw: Sequence[Buffer] | int, packed: Sequence[Buffer] | None
    ) -> dict[str, Any]:
        """Return the shard's entry in the index. raw: its bytes, in pieces; without hashes only their number."""
        raw_name = f"shard.{number:05}.mds"
        return {
            "samples": samples,
            "raw_data": self._details(raw_name, raw),
            "zip_data": None if packed is None else self._details(self.file_name(number), packed),
            **self.settings,
        }

    def _details(self, name: str, data: Sequence[Buffer] | int) -> dict[str, Any]:
        hashes = {} if isinstance(data, int) else {each: digest(each, *data) for each in self._hashes}
        size = data if isinstance(data, int) else sum(map(len, data))
        return {"basename": name, "bytes": size, "hashes": hashes}


def schema_of(columns: Mapping[str, str]) -> Schema:
    """Return columns (name -> encoding) as a writer stores them. Raises WriterError for invalid columns."""
    if not columns:
        raise WriterError("a dataset needs at least one column")
    names = tuple(sorted(columns))
    try:
        return Schema(
            names,
            tuple(columns[name] for name in names),
            tuple(column_bytes(columns[name]) for name in names),
        )
    except LoaderError as problem:
        raise UnknownEncodingError(str(problem)) from None


def _size_limit(size: int | str | None) -> int | None:
    if size is None:
        return None
    number = size
    if isinstance(size, str):
        found = _SIZE.fullmatch(size.strip())
        if found is None:
            raise WriterError(f"size_limit {size!r} is not a size: write 67108864, 64mb or 1gb")
        unit = found[2].lower()
        number = int(float(found[1]) * _UNITS[unit if unit in _UNITS else unit + "b"])
    if not isinstance(number, int) or not 0 < number < OFFSET_LIMIT:
        raise WriterError(f"size_limit {size} is not between 1 and {OFFSET_LIMIT - 1}: offsets have 32 bits")
    return number


def index_text(shards: Sequence[Mapping[str, Any]]) -> str:
    """Return the text of index.json."""
    return json.dumps({"version": VERSION, "shards": list(shards)}, sort_keys=True)


def packer_of(columns: Mapping[str, str], options: Mapping[str, Any]) -> ShardPacker:
    """Return what packs the shards of an MDSWriter with these columns and options. Raises WriterError as it does."""
    known = {field.name for field in fields(PackOptions)}
    how = {name: value for name, value in options.items() if name in known}
    return ShardPacker(schema_of(columns), PackOptions(**how))
