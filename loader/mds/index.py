"""Reads the index.json of an MDS dataset into compact arrays, and checks it before anything relies on it.

An index may come from MosaicML's writer, from a merge (basenames are then relative paths), or from a hand-written
script. Required are only `samples`, a basename, and the columns' names, encodings and sizes. Missing byte counts,
hashes and compression become 0 or None here, and are not checked. This module opens no shard.
"""

import hashlib
import json
import re
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from loader.base.paths import check_is_local, mount_advice
from loader.base.pulled_files import open_pulled
from loader.errors import DatasetError, NoDatasetError
from loader.mds.index_parser import VERSION, Columns, IndexRows, PackedNames, Schema

INDEX_NAME = "index.json"
# Bytes parsed at a time. An index of 10**6 shards is 300 MB of text, which is never in memory as a whole.
CHUNK_BYTES = 1 << 20
# The number of folders that an error names.
NEARBY = 5
# The beginning of an index that can be read in pieces: at most the version precedes the shards.
_HEAD = re.compile(rb'\s*\{\s*(?:"version"\s*:\s*2\s*,\s*)?"shards"\s*:\s*\[\s*')
_BETWEEN = re.compile(rb"\}\s*,\s*\{")


@dataclass(frozen=True, slots=True, kw_only=True)
class Index(Columns):
    """The content of one index.json, or of several joined ones, as far as the loader needs it.

    compressions: families, "" for none. directories: one a stream; borders: (streams + 1,) the first shard of each
    stream, then the number of shards.
    """

    directories: tuple[str, ...]
    borders: tuple[int, ...]
    schemas: tuple[Schema, ...]
    compressions: tuple[str, ...]
    fingerprints: tuple[str, ...] = ()

    @property
    def shards(self) -> int:
        """The number of shards."""
        return int(self.samples.size)

    @property
    def streams(self) -> int:
        """The number of joined datasets."""
        return len(self.directories)

    def directory(self, shard: int) -> str:
        """Return the directory that a shard's name is relative to."""
        if len(self.directories) == 1:
            return self.directories[0]
        return self.directories[bisect_right(self.borders, shard) - 1]

    def schema_number(self, shard: int) -> int:
        """Return the number of a shard's schema."""
        # Called for each sample, and there is nearly always one schema.
        return int(self.schema_of[shard]) if len(self.schemas) > 1 else 0

    def schema(self, shard: int) -> Schema:
        """Return the columns of a shard."""
        return self.schemas[self.schema_number(shard)]

    def fixed_offsets(self, shard: int) -> range | None:
        """Return the offsets of all samples and of the end, if all have one size: no table need be read. Else None."""
        count, record = int(self.samples[shard]), self.schema(shard).record_bytes
        size = int(self.raw_bytes[shard])
        first = size - count * record
        return range(first, size + 1, record) if record and size and first >= 4 * (count + 2) else None

    def compression(self, shard: int) -> str:
        """Return the compression family of a shard, "" for none."""
        return self.compressions[int(self.compression_of[shard])]

    def hashes_of(self, shard: int) -> tuple[dict[str, str], dict[str, str]]:
        """Return ({hash: value} of the raw file, of the compressed one); empty if not requested or not given."""
        if self.hashes is None:
            return {}, {}
        raw, packed = json.loads(self.hashes[shard])
        return raw, packed

    def fingerprint(self) -> str:
        """Return 32 hex digits that differ between datasets: a hash of names, sample counts, sizes and columns."""
        digest = hashlib.blake2b(digest_size=16)
        if self.streams > 1:
            digest.update("\n".join(self.fingerprints).encode())
            return digest.hexdigest()
        digest.update(repr(self.schemas).encode())
        for numbers in (self.samples, self.raw_bytes, self.schema_of.astype(np.int64)):
            digest.update(numbers.astype("<i8").tobytes())
        digest.update(self.raw_names.zero_separated())
        return digest.hexdigest()


def read_index(directory: str | Path, *, with_hashes: bool = False) -> Index:
    """Read and check `<directory>/index.json`.

    Raises DatasetError, naming the file, the shard and the cause, if it is missing, damaged, of another format, or
    refers to files outside its directory. Raises ArgumentError for a URL.
    """
    check_is_local(directory)
    path = Path(directory) / INDEX_NAME
    rows = IndexRows(str(path), with_hashes)
    try:
        with open(path, "rb", opener=open_pulled) as file:
            try:
                _read_in_pieces(file, rows)
            except DatasetError:
                raise
            except (ValueError, RecursionError):
                # Not JSON; or JSON in which the border of two shards also occurs within a text. Parse it as a whole.
                file.seek(0)
                rows = IndexRows(str(path), with_hashes)
                rows.add(_document(file.read(), rows.path)["shards"])
    except FileNotFoundError:
        raise NoDatasetError(
            f"{path} does not exist: this is not an MDS dataset, its writer has not finished, or the split has a "
            f"directory of its own ({_splits_nearby(path.parent)}){_parquet_nearby(path.parent)}"
        ) from None
    except NotADirectoryError:
        raise DatasetError(
            f"{path.parent} is a file: give the directory that contains {INDEX_NAME}"
        ) from None
    except OSError as problem:
        remedy = mount_advice(problem, path)
        raise DatasetError(
            f"{path} cannot be read: {problem.strerror}{'. ' if remedy else ''}{remedy}"
        ) from problem
    except DatasetError:
        raise
    except (ValueError, RecursionError) as problem:
        raise DatasetError(f"{path} is damaged (not JSON: {problem}); copy or write it again") from None
    columns = rows.columns()
    return Index(
        directories=(str(directory),),
        borders=(0, rows.count),
        schemas=tuple(rows.schemas),
        compressions=tuple(rows.compressions),
        **{each.name: getattr(columns, each.name) for each in fields(columns)},
    )


def join_indices(parts: Sequence[Index]) -> Index:
    """Return several indices as one; the shards of the first come before those of the second."""
    if len(parts) == 1:
        return parts[0]
    schemas = {schema: None for part in parts for schema in part.schemas}
    compressions = {family: None for part in parts for family in part.compressions}
    schema_numbers = {schema: number for number, schema in enumerate(schemas)}
    family_numbers = {family: number for number, family in enumerate(compressions)}
    return Index(
        directories=tuple(directory for part in parts for directory in part.directories),
        borders=tuple(np.cumsum([0, *(part.shards for part in parts)]).tolist()),
        samples=np.concatenate([part.samples for part in parts]),
        raw_bytes=np.concatenate([part.raw_bytes for part in parts]),
        zip_bytes=np.concatenate([part.zip_bytes for part in parts]),
        schema_of=_renumbered(
            [part.schema_of for part in parts], [part.schemas for part in parts], schema_numbers
        ),
        compression_of=_renumbered(
            [part.compression_of for part in parts], [part.compressions for part in parts], family_numbers
        ),
        schemas=tuple(schemas),
        compressions=tuple(compressions),
        raw_names=PackedNames.joined([part.raw_names for part in parts]),
        zip_names=PackedNames.joined([part.zip_names for part in parts]),
        hashes=_joined_hashes(parts),
        fingerprints=tuple(part.fingerprint() for part in parts),
    )


def _joined_hashes(parts: Sequence[Index]) -> PackedNames | None:
    """Return the hashes of all shards, empty for parts read without hashes; None if no part has any."""
    if all(part.hashes is None for part in parts):
        return None
    none = json.dumps([{}, {}])
    return PackedNames.joined(
        [PackedNames([none] * p.shards) if p.hashes is None else p.hashes for p in parts]
    )


def _renumbered(
    columns: Sequence[NDArray[np.int32]], values: Sequence[tuple[Any, ...]], numbers: dict[Any, int]
) -> NDArray[np.int32]:
    """Concatenate columns that index their own values, renumbered to index the common values."""
    tables = [np.array([numbers[value] for value in own], np.int32) for own in values]
    return np.concatenate([table[column] for table, column in zip(tables, columns, strict=True)])


def _read_in_pieces(file: BinaryIO, rows: IndexRows) -> None:
    """Parse a text of any length, a piece at a time.

    The text is cut between two shards, "}, {". If both sides of a cut are complete JSON, the cut was between shards,
    because no other reading of the text exists. Otherwise raises ValueError.
    """
    text = file.read(CHUNK_BYTES)
    head = _HEAD.match(text)
    if head is None:
        raise ValueError("the index does not begin with its shards")
    text = text[head.end() :]
    while more := file.read(CHUNK_BYTES):
        cut = text.rfind(b"}, {")
        if cut < 0:
            cut = max((found.start() for found in _BETWEEN.finditer(text)), default=-1)
        if cut >= 0:
            rows.add_text(b"[" + text[: cut + 1] + b"]")
            text = text[text.index(b"{", cut + 1) :]
        text += more
    document = _document(b'{"shards": [' + text, rows.path)
    rows.add(document["shards"])


def _document(text: bytes, path: str) -> dict[str, Any]:
    document = json.loads(text)
    if not isinstance(document, dict) or not isinstance(document.get("shards"), list):
        raise DatasetError(f'{path} is not an MDS index: it has no list "shards"')
    if document.get("version", VERSION) != VERSION:
        raise DatasetError(f"{path} is version {document['version']!r}; this loader reads version {VERSION}")
    return document


def _splits_nearby(directory: Path) -> str:
    try:
        found = sorted(entry.parent.name for entry in directory.glob(f"*/{INDEX_NAME}"))
    except OSError:
        found = []
    if not found:
        return "none is there either"
    shown = ", ".join([*found[:NEARBY], *(["…"] if len(found) > NEARBY else [])])
    return (
        f"there is {shown}; if these are parts, `fusecache dataset merge {directory}` makes one index of them"
    )


def _parquet_nearby(directory: Path) -> str:
    try:
        found = next((entry for entry in directory.glob("*.parquet")), None)
    except OSError:
        found = None
    return f"; it has Parquet files, which ParquetDataset({str(directory)!r}) reads" if found else ""
