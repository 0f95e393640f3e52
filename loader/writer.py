"""Writes MDS datasets: shards one after the other, index.json at the very end.

Every file is written once, front to back, and closed, so a mounted bucket serves as well as a disk. Without
an index.json there is no dataset: a writer that failed leaves shards, never half a dataset. Byte-identical
with MosaicML's MDSWriter 0.13, unless `align` pads.

Invariants: 1. index.json appears whole, after all shards are closed. 2. No offset reaches 2**32.
"""

import hashlib
import importlib
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np

from loader.compression import compress, split
from loader.encodings import column_bytes, encoder
from loader.errors import EncodingError, LoaderError, WriterError
from loader.index import INDEX_NAME, VERSION

# What MDS readers expect to download at once; MosaicML's default.
DEFAULT_SIZE_LIMIT = 1 << 26
OFFSET_LIMIT = 1 << 32
XXHASHES = {
    "xxh32": "xxh32",
    "xxh64": "xxh64",
    "xxh128": "xxh128",
    "xxh3_64": "xxh3_64",
    "xxh3_128": "xxh3_128",
}


class MDSWriter:
    """Writes samples into a new dataset directory. Use it in a `with` block.

    columns: name -> encoding. compression: None or "zstd:7", "gz", .... hashes: names of hashlib or xxhash,
    kept in the index. size_limit: raw bytes of a shard; a larger sample gets a shard of its own. align: pad
    each shard so that its samples begin at a multiple of it (64 lets fixed-size arrays be used where they
    lie); 1 pads nothing. Leaving the block by an exception writes no index.json. Raises WriterError for
    settings that cannot work, and if `out` holds a dataset already.
    """

    def __init__(
        self,
        out: str | Path,
        columns: Mapping[str, str],
        *,
        compression: str | None = None,
        hashes: Sequence[str] | None = None,
        size_limit: int = DEFAULT_SIZE_LIMIT,
        align: int = 1,
    ) -> None:
        if not columns:
            raise WriterError("a dataset needs at least one column")
        if not 0 < size_limit < OFFSET_LIMIT:
            raise WriterError(
                f"size_limit {size_limit} is not between 1 and {OFFSET_LIMIT - 1}: offsets have 32 bits"
            )
        if align < 1 or align & (align - 1) or align > 4096:
            raise WriterError(f"align {align} is not a power of two up to 4096")
        self._names = sorted(columns)
        try:
            self._family = split(compression)[0]
            self._encoders = [encoder(columns[name]) for name in self._names]
            self._sizes = [column_bytes(columns[name]) for name in self._names]
        except LoaderError as problem:
            raise WriterError(str(problem)) from None
        self._hashes = sorted(set(hashes or ()))
        for name in self._hashes:
            digest(name, b"")
        self._directory = Path(out)
        self._directory.mkdir(parents=True, exist_ok=True)
        if (self._directory / INDEX_NAME).exists():
            raise WriterError(
                f"{self._directory} holds a dataset already: choose another directory, or remove it"
            )
        self._compression, self._size_limit, self._align = compression or None, size_limit, align
        self._settings: dict[str, Any] = {
            "version": VERSION,
            "format": "mds",
            "compression": self._compression,
            "hashes": self._hashes,
            "size_limit": size_limit,
            "column_names": self._names,
            "column_encodings": [columns[name] for name in self._names],
            "column_sizes": [size or None for size in self._sizes],
        }
        self._config = json.dumps(self._settings, sort_keys=True).encode()
        self._shards: list[dict[str, Any]] = []
        self._pending: list[bytes] = []
        self._pending_bytes = self._empty_bytes
        self._closed = False

    @property
    def _empty_bytes(self) -> int:
        return 8 + len(self._config) + self._align - 1

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, problem: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
        self._closed = True
        self._pending = []

    def write(self, sample: Mapping[str, Any]) -> None:
        """Add one sample; writes a shard to the directory whenever one is full.

        Raises EncodingError, naming the column, for a value that does not fit: the sample is then not in the
        dataset. Raises WriterError if offsets would pass 2**32, or the writer is closed.
        """
        if self._closed:
            raise WriterError("this writer is closed")
        data = self._encode(sample)
        if self._empty_bytes + 4 + len(data) >= OFFSET_LIMIT:
            raise WriterError(f"a sample of {len(data)} bytes does not fit: offsets in a shard have 32 bits")
        if self._pending and self._pending_bytes + 4 + len(data) > self._size_limit:
            self._write_shard()
        self._pending.append(data)
        self._pending_bytes += 4 + len(data)

    def close(self) -> None:
        """Write the last shard, then the index. The dataset exists from here on."""
        if self._closed:
            return
        if self._pending:
            self._write_shard()
        self._closed = True
        text = json.dumps({"version": VERSION, "shards": self._shards}, sort_keys=True)
        temporary = self._directory / f"{INDEX_NAME}.tmp"
        temporary.write_text(text)
        os.replace(temporary, self._directory / INDEX_NAME)

    def _encode(self, sample: Mapping[str, Any]) -> bytes:
        if len(sample) != len(self._names):
            unknown = ", ".join(sorted(map(str, set(sample) - set(self._names))))
            if unknown:
                raise EncodingError(f"the sample has values for which there is no column: {unknown}")
        head: list[int] = []
        values: list[bytes] = []
        for name, encode, size in zip(self._names, self._encoders, self._sizes, strict=True):
            try:
                value = encode(sample[name])
            except KeyError:
                raise EncodingError(f"the sample has no value for column {name!r}") from None
            except EncodingError as problem:
                raise EncodingError(f"column {name!r}: {problem}") from problem
            if not size:
                if len(value) >= OFFSET_LIMIT:
                    raise EncodingError(f"column {name!r}: {len(value)} bytes are too many for a sample")
                head.append(len(value))
            elif size != len(value):
                raise EncodingError(f"column {name!r}: {len(value)} bytes, but each value has {size}")
            values.append(value)
        return np.array(head, "<u4").tobytes() + b"".join(values)

    def _write_shard(self) -> None:
        count = len(self._pending)
        head_bytes = 4 * (count + 2)
        config = self._config.ljust(
            -(-(head_bytes + len(self._config)) // self._align) * self._align - head_bytes
        )
        ends = np.cumsum([0, *map(len, self._pending)], dtype=np.int64) + head_bytes + len(config)
        if int(ends[-1]) >= OFFSET_LIMIT:
            raise WriterError(f"a shard of {ends[-1]} bytes does not fit: offsets have 32 bits")
        raw = b"".join([np.array([count, *ends], "<u4").tobytes(), config, *self._pending])
        name = f"shard.{len(self._shards):05}.mds"
        shard = {
            "samples": count,
            "raw_data": self._file_details(name, raw),
            "zip_data": None,
            **self._settings,
        }
        if self._compression:
            name = f"{name}.{self._family}"
            raw = compress(self._compression, raw)
            shard["zip_data"] = self._file_details(name, raw)
        # An error on close (no space, a bucket that refuses) comes out of the with statement and ends the
        # writer.
        with open(self._directory / name, "wb") as file:
            file.write(raw)
        self._shards.append(shard)
        self._pending = []
        self._pending_bytes = self._empty_bytes

    def _file_details(self, name: str, data: bytes) -> dict[str, Any]:
        return {
            "basename": name,
            "bytes": len(data),
            "hashes": {each: digest(each, data) for each in self._hashes},
        }


def digest(name: str, data: bytes) -> str:
    """Return the hex digest of data. Raises WriterError for a hash that neither hashlib nor xxhash knows."""
    if name in XXHASHES:
        try:
            xxhash = importlib.import_module("xxhash")
        except ImportError:
            raise WriterError(f"the hash {name} needs the package xxhash: pip install xxhash") from None
        return str(getattr(xxhash, XXHASHES[name])(data).hexdigest())
    if name not in hashlib.algorithms_available or name.startswith("shake_"):
        raise WriterError(f"the hash {name!r} is unknown")
    return hashlib.new(name, data).hexdigest()
