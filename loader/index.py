"""index.json of an MDS dataset, read into compact arrays and checked before anything trusts it.

An index may come from MosaicML's writer, from a merge (basenames are then relative paths), or from somebody's
script: only `samples`, a basename, and the columns' names, encodings and sizes are needed. What a hand-made
index leaves out (byte counts, hashes, compression) is 0 or None here, and is then not checked. Knows nothing
of shards' contents and opens none.
"""

import hashlib
import json
from array import array
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from loader.compression import family_of
from loader.errors import DatasetError, LoaderError

INDEX_NAME = "index.json"
VERSION = 2
# A shard begins with its sample count and one offset more than samples, each 4 bytes, and no offset reaches
# 2**32: more samples than that cannot be.
MOST_SAMPLES = (1 << 30) - 2


@dataclass(frozen=True, slots=True)
class Schema:
    """The columns of a shard, in stored order. sizes: bytes, 0 for variable ones."""

    names: tuple[str, ...]
    encodings: tuple[str, ...]
    sizes: tuple[int, ...]

    @property
    def record_bytes(self) -> int:
        """Bytes of every sample, or 0 where that differs from sample to sample."""
        return sum(self.sizes) if self.sizes and all(self.sizes) else 0


@dataclass(frozen=True, slots=True)
class Index:
    """All that the loader keeps of an index.json.

    samples, raw_bytes, zip_bytes: (shards,) counts; bytes are 0 where the index does not say. schema_of:
    (shards,) index into schemas. raw_names, zip_names: relative to `directory`; zip_names is "" for a shard
    that is stored raw. compressions: families, "" for none, that compression_of indexes.
    """

    directory: str
    samples: NDArray[np.int64]
    raw_bytes: NDArray[np.int64]
    zip_bytes: NDArray[np.int64]
    schema_of: NDArray[np.int32]
    compression_of: NDArray[np.int32]
    schemas: tuple[Schema, ...]
    compressions: tuple[str, ...]
    raw_names: list[str]
    zip_names: list[str]

    @property
    def shards(self) -> int:
        """How many shards."""
        return int(self.samples.size)

    def schema(self, shard: int) -> Schema:
        """The columns of one shard."""
        return self.schemas[int(self.schema_of[shard])]

    def compression(self, shard: int) -> str:
        """The compression family of one shard, "" for none."""
        return self.compressions[int(self.compression_of[shard])]

    def fingerprint(self) -> str:
        """Return 32 hex digits that differ between datasets: names, sample counts, sizes and columns."""
        digest = hashlib.blake2b(digest_size=16)
        digest.update(repr(self.schemas).encode())
        for numbers in (self.samples, self.raw_bytes, self.schema_of.astype(np.int64)):
            digest.update(numbers.astype("<i8").tobytes())
        digest.update("\0".join(self.raw_names).encode())
        return digest.hexdigest()


def read_index(directory: str | Path) -> Index:
    """Read and check `<directory>/index.json`.

    Raises DatasetError, naming the file, the shard and the cause, if it is missing, damaged, of another
    format, or points outside its directory.
    """
    path = Path(directory) / INDEX_NAME
    try:
        text = path.read_bytes()
    except FileNotFoundError:
        raise DatasetError(
            f"{path} does not exist: this is no MDS dataset, its writer has not finished, or the split has a "
            f"directory of its own ({_splits_nearby(path.parent)})"
        ) from None
    except OSError as problem:
        raise DatasetError(f"{path} cannot be read: {problem.strerror}") from problem
    return parse_index(text, str(directory), str(path))


def parse_index(text: bytes, directory: str, path: str) -> Index:
    """Like read_index, of a text at hand. path: how errors shall call it."""
    rows = _Rows(path)
    try:
        # The hook turns each shard into one row of the arrays as it is parsed: a dict a shard would be
        # gigabytes.
        document = json.loads(text, object_hook=rows.take)
    except (ValueError, RecursionError) as problem:
        raise DatasetError(f"{path} is damaged (not JSON: {problem}); copy or write it again") from None
    if not isinstance(document, dict) or not isinstance(document.get("shards"), list):
        raise DatasetError(f'{path} is no MDS index: it has no list "shards"')
    if document.get("version", VERSION) != VERSION:
        raise DatasetError(f"{path} is version {document['version']!r}; this loader reads version {VERSION}")
    if document["shards"] != list(range(len(rows.samples))):
        first = next((i for i, row in enumerate(document["shards"]) if row != i), len(document["shards"]))
        raise DatasetError(f"{path}: shard {first} is not described by an object with samples and columns")
    return rows.index(directory)


@dataclass(slots=True)
class _Rows:
    """Collects shards while the JSON is parsed."""

    path: str
    samples: "array[int]" = field(default_factory=lambda: array("q"))
    raw_bytes: "array[int]" = field(default_factory=lambda: array("q"))
    zip_bytes: "array[int]" = field(default_factory=lambda: array("q"))
    schema_of: "array[int]" = field(default_factory=lambda: array("i"))
    compression_of: "array[int]" = field(default_factory=lambda: array("i"))
    schemas: dict[Schema, int] = field(default_factory=dict)
    compressions: dict[str, int] = field(default_factory=dict)
    raw_names: list[str] = field(default_factory=list)
    zip_names: list[str] = field(default_factory=list)
    last_columns: list[Any] = field(default_factory=list)
    last_schema: int = 0

    def take(self, found: dict[str, Any]) -> Any:
        """Turn an object that describes a shard into its number; leave all others as they are."""
        if ("samples" not in found and "column_names" not in found) or "shards" in found:
            return found
        number = len(self.samples)
        if found.get("format", "mds") != "mds":
            raise DatasetError(f"{self.path}: shard {number} has the format {found['format']!r}, not mds")
        if found.get("version", VERSION) != VERSION:
            raise DatasetError(f"{self.path}: shard {number} is version {found['version']!r}, not {VERSION}")
        raw_name, raw_bytes = self._file(found.get("raw_data"), number, "raw_data")
        zip_name, zip_bytes = self._file(found.get("zip_data"), number, "zip_data")
        if not raw_name and not zip_name:
            raise DatasetError(f"{self.path}: shard {number} names no file (raw_data.basename is missing)")
        try:
            family = family_of(found.get("compression")) if zip_name else ""
        except LoaderError as problem:
            raise DatasetError(f"{self.path}: shard {number}: {problem}") from None
        if zip_name and not family:
            raise DatasetError(f"{self.path}: shard {number} has zip_data, but names no compression")
        columns = [found.get(f"column_{part}") for part in ("names", "encodings", "sizes")]
        if columns != self.last_columns:  # nearly all shards have those of the shard before
            schema = self._schema(columns, number)
            self.last_columns, self.last_schema = columns, self.schemas.setdefault(schema, len(self.schemas))
        self.samples.append(self._sample_count(found.get("samples"), raw_bytes, number))
        self.raw_bytes.append(raw_bytes)
        self.zip_bytes.append(zip_bytes)
        self.schema_of.append(self.last_schema)
        self.compression_of.append(self.compressions.setdefault(family, len(self.compressions)))
        self.raw_names.append(raw_name or zip_name.removesuffix("." + family))
        self.zip_names.append(zip_name)
        return number

    def index(self, directory: str) -> Index:
        """The finished arrays."""
        return Index(
            directory,
            np.array(self.samples, np.int64),
            np.array(self.raw_bytes, np.int64),
            np.array(self.zip_bytes, np.int64),
            np.array(self.schema_of, np.int32),
            np.array(self.compression_of, np.int32),
            tuple(self.schemas),
            tuple(self.compressions),
            self.raw_names,
            self.zip_names,
        )

    def _file(self, found: object, number: int, what: str) -> tuple[str, int]:
        if not found:
            return "", 0
        if not isinstance(found, dict) or not isinstance(found.get("basename"), str) or not found["basename"]:
            raise DatasetError(f"{self.path}: {what} of shard {number} has no basename")
        name = found["basename"]
        # Only a relative path below the index: a merged index holds "17/shard.00085.mds", never more.
        if name.startswith("/") or "\0" in name or "\\" in name or ".." in name.split("/"):
            raise DatasetError(f"{self.path}: shard {number} lies outside the dataset ({name!r}); refused")
        return name, self._count(found.get("bytes") or 0, number, f"{what}.bytes")

    def _count(self, found: object, number: int, what: str) -> int:
        if not isinstance(found, int) or isinstance(found, bool) or not 0 <= found < 1 << 62:
            raise DatasetError(f"{self.path}: {what} of shard {number} is {found!r}, not a count")
        return found

    def _sample_count(self, found: object, raw_bytes: int, number: int) -> int:
        """Return the count, once it is known that a shard can hold so many."""
        count = self._count(found, number, "samples")
        if count > MOST_SAMPLES:
            raise DatasetError(
                f"{self.path} is damaged: samples of shard {number} is {count}, but a shard holds {MOST_SAMPLES} "
                f"at most (its offsets have 32 bits); copy or write it again"
            )
        if raw_bytes and 4 * (count + 2) > raw_bytes:
            raise DatasetError(
                f"{self.path} is damaged: shard {number} has {raw_bytes} bytes, too few for the offsets of its "
                f"{count} samples; copy or write it again"
            )
        return count

    def _schema(self, columns: list[Any], number: int) -> Schema:
        if not all(isinstance(column, list) for column in columns):
            raise DatasetError(
                f"{self.path}: shard {number} lacks column_names, column_encodings or column_sizes"
            )
        names, encodings, sizes = columns
        if not len(names) == len(encodings) == len(sizes) or len(set(names)) != len(names):
            raise DatasetError(
                f"{self.path}: the columns of shard {number} differ in number, or a name is twice there"
            )
        if not all(isinstance(text, str) for text in names + encodings):
            raise DatasetError(f"{self.path}: a column name or encoding of shard {number} is not text")
        return Schema(
            tuple(names),
            tuple(encodings),
            tuple(self._count(size or 0, number, "column_sizes") for size in sizes),
        )


def _splits_nearby(directory: Path) -> str:
    try:
        found = sorted(entry.parent.name for entry in directory.glob(f"*/{INDEX_NAME}"))
    except OSError:
        found = []
    return f"there is {', '.join(found)}" if found else "none is there either"
