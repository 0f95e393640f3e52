"""Parses the shard descriptions of an index, checks them, and collects them in compact columns.

Two entry points: `add` checks descriptions one by one and reports exactly what is wrong. `add_text` takes a JSON list
in a twentieth of the time if all its shards are plain (as writers make them), and passes any other list to `add`.
Both accept the same and give the same result. Reads no file.

A list of file names in one buffer: 10**6 names take 24 MB, where a list of str takes 80.
"""

import json
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

import msgspec
import numpy as np
from numpy.typing import NDArray

from loader.base.compression import family_of
from loader.errors import DatasetError, LoaderError


class PackedNames:
    """A list of names in one buffer, which grows in place; each str is made on access.

    Forked workers would copy a list of str page by page, because each access counts references.
    """

    __slots__ = ("_ends", "_text")

    def __init__(self, names: Iterable[str] = ()) -> None:
        self._text = bytearray()  # a zero byte after each name
        self._ends = array("q")
        self.add(list(names))

    @classmethod
    def joined(cls, parts: Iterable["PackedNames"]) -> "PackedNames":
        """Return several lists as one."""
        whole = cls()
        for part in parts:
            whole._ends.frombytes((np.frombuffer(part._ends, np.int64) + len(whole._text)).tobytes())
            whole._text += part._text
        return whole

    def add(self, names: Sequence[str]) -> None:
        """Add names. Raises UnicodeEncodeError, with nothing added, for an unpaired surrogate: no file has it."""
        encoded = "\0".join([*names, ""]).encode()
        # An ASCII name has as many bytes as characters.
        sized: Sequence[str | bytes] = names if encoded.isascii() else [name.encode() for name in names]
        lengths = np.fromiter(map(len, sized), np.int64, len(names))
        self._ends.frombytes((np.cumsum(lengths + 1) + len(self._text)).tobytes())
        self._text += encoded

    def zero_separated(self) -> memoryview:
        """Return all names, separated by zero bytes."""
        return memoryview(self._text)[:-1]

    def __len__(self) -> int:
        return len(self._ends)

    def __getitem__(self, number: int) -> str:
        stop = self._ends[number]
        start = self._ends[number - 1] if number % len(self) else 0
        return self._text[start : stop - 1].decode()

    def __iter__(self) -> Iterator[str]:
        return map(self.__getitem__, range(len(self)))


VERSION = 2
# A shard begins with its sample count and its offsets, one more than samples, 4 bytes each. No offset reaches 2**32, so
# a shard cannot have more samples.
MOST_SAMPLES = (1 << 30) - 2
MOST_BYTES = 1 << 62
# Searched in the names, one a line: absolute, empty, or with characters that may lead outside the dataset.
_ODD_SIGNS = ("\n/", "\n\n", "\\", "\0", "..")


@dataclass(frozen=True, slots=True)
class Schema:
    """The columns of a shard, in stored order. sizes: bytes, 0 for variable ones."""

    names: tuple[str, ...]
    encodings: tuple[str, ...]
    sizes: tuple[int, ...]

    @property
    def record_bytes(self) -> int:
        """Size of every sample in bytes, or 0 if it varies."""
        return sum(self.sizes) if self.sizes and all(self.sizes) else 0


Numbers = int | NDArray[Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Columns:
    """The columns of an Index, (shards,) each.

    samples, raw_bytes, zip_bytes: counts; bytes are 0 if the index does not give them. schema_of: index into its
    schemas. raw_names, zip_names: relative to the directory; zip_names is "" for a shard that is stored uncompressed.
    compression_of: index into its compressions. hashes: JSON texts [{hash: value} of the raw file, of the compressed
    one], if requested.
    """

    samples: NDArray[np.int64]
    raw_bytes: NDArray[np.int64]
    zip_bytes: NDArray[np.int64]
    schema_of: NDArray[np.int32]
    compression_of: NDArray[np.int32]
    raw_names: PackedNames
    zip_names: PackedNames
    hashes: PackedNames | None = None


class _File(msgspec.Struct, gc=False):
    basename: str
    bytes: int | None = 0


class _HashedFile(_File, gc=False):
    hashes: dict[str, str] | None = None


class _AnyShard(msgspec.Struct, gc=False, kw_only=True):
    samples: int
    column_names: msgspec.Raw
    column_encodings: msgspec.Raw
    column_sizes: msgspec.Raw
    compression: str | None = None
    format: str = "mds"
    version: int = VERSION


class _Shard(_AnyShard, gc=False, kw_only=True):
    raw_data: _File
    zip_data: _File | None = None


class _HashedShard(_AnyShard, gc=False, kw_only=True):
    raw_data: _HashedFile
    zip_data: _HashedFile | None = None


# Measured on one core with 10**5 shards of 300 bytes: 0.44 us a shard. json takes 2.1 us, and makes ten objects for
# each.
_DECODE: Callable[[bytes], list[_Shard]] = msgspec.json.Decoder(list[_Shard]).decode
_DECODE_HASHED: Callable[[bytes], list[_HashedShard]] = msgspec.json.Decoder(list[_HashedShard]).decode


class _NotPlainError(Exception):
    """This list of shards must be parsed one by one."""


@dataclass(slots=True)
class IndexRows:
    """Collects shards in the order of the index. path: names the index in errors."""

    path: str
    with_hashes: bool = False
    count: int = 0
    schemas: dict[Schema, int] = field(default_factory=dict)
    compressions: dict[str, int] = field(default_factory=dict)
    # Bytes that grow in place: joining lists of arrays would need the memory twice.
    _samples: bytearray = field(default_factory=bytearray)
    _raw_bytes: bytearray = field(default_factory=bytearray)
    _zip_bytes: bytearray = field(default_factory=bytearray)
    _schema_of: bytearray = field(default_factory=bytearray)
    _compression_of: bytearray = field(default_factory=bytearray)
    _raw_names: PackedNames = field(default_factory=PackedNames)
    _zip_names: PackedNames = field(default_factory=PackedNames)
    _hashes: PackedNames = field(default_factory=PackedNames)
    _last_columns: list[Any] = field(default_factory=list)
    _last_schema: int = 0

    def add_text(self, text: bytes) -> None:
        """Add the shards of a JSON list. Raises ValueError if it is not JSON, DatasetError like `add`."""
        try:
            self._add_plain(_DECODE_HASHED(text) if self.with_hashes else _DECODE(text))
        except (_NotPlainError, msgspec.DecodeError, OverflowError, UnicodeError):
            self.add(json.loads(text))

    def add(self, found: list[Any]) -> None:
        """Add shards. Raises DatasetError, naming index and shard, for the first invalid one."""
        for shard in found:
            samples, raw, packed, schema, compression, hashes = self._row(shard, self.count)
            try:
                self._raw_names.add([raw[0]])
                self._zip_names.add([packed[0]])
            except UnicodeEncodeError as problem:
                self._refuse(f": shard {self.count} has {problem.object!r}, which is not a file name")
            if self.with_hashes:
                self._hashes.add([hashes])
            self._add_numbers(samples, raw[1], packed[1], schema, compression)
            self.count += 1

    def columns(self) -> Columns:
        """Return the collected columns; add nothing afterwards."""
        return Columns(
            samples=np.frombuffer(self._samples, np.int64),
            raw_bytes=np.frombuffer(self._raw_bytes, np.int64),
            zip_bytes=np.frombuffer(self._zip_bytes, np.int64),
            schema_of=np.frombuffer(self._schema_of, np.int32),
            compression_of=np.frombuffer(self._compression_of, np.int32),
            raw_names=self._raw_names,
            zip_names=self._zip_names,
            hashes=self._hashes if self.with_hashes else None,
        )

    def _add_numbers(
        self,
        samples: Numbers,
        raw_bytes: Numbers,
        zip_bytes: Numbers,
        schema_of: Numbers,
        compression_of: Numbers,
    ) -> None:
        self._samples += np.asarray(samples, np.int64).tobytes()
        self._raw_bytes += np.asarray(raw_bytes, np.int64).tobytes()
        self._zip_bytes += np.asarray(zip_bytes, np.int64).tobytes()
        self._schema_of += np.asarray(schema_of, np.int32).tobytes()
        self._compression_of += np.asarray(compression_of, np.int32).tobytes()

    def _add_plain(self, found: Sequence[_Shard | _HashedShard]) -> None:
        """Add shards that are complete and plain; _NotPlainError, with nothing added, for others."""
        if not found:
            return
        raws = [shard.raw_data for shard in found]
        zips = [shard.zip_data for shard in found]
        packed = [file for file in zips if file is not None]
        raw_names, zip_names = [file.basename for file in raws], [file.basename for file in packed]
        if (
            len(packed) not in (0, len(found))
            or {shard.format for shard in found} != {"mds"}
            or {shard.version for shard in found} != {VERSION}
            or _are_odd(raw_names)
            or (packed and _are_odd(zip_names))
        ):
            raise _NotPlainError
        families = {shard.compression for shard in found} if packed else {None}
        if len(families) != 1 or (packed and families & {None, ""}):
            raise _NotPlainError
        samples = np.array([shard.samples for shard in found], np.int64)
        raw_bytes = np.array([file.bytes or 0 for file in raws], np.int64)
        zip_bytes = np.array([file.bytes or 0 for file in packed] or [0], np.int64)
        if (
            min(samples.min(), raw_bytes.min(), zip_bytes.min()) < 0
            or samples.max() > MOST_SAMPLES
            or max(raw_bytes.max(), zip_bytes.max()) >= MOST_BYTES
            or ((raw_bytes > 0) & (4 * (samples + 2) > raw_bytes)).any()
        ):
            raise _NotPlainError
        compression = self._compression_number(families.pop(), self.count)
        schema_of = self._schemas_of(found)
        self._raw_names.add(raw_names)
        self._zip_names.add(zip_names or [""] * len(found))
        if self.with_hashes:
            self._hashes.add(
                [_hashes_text(*map(_hashes_in, files)) for files in zip(raws, zips, strict=True)]
            )
        self._add_numbers(
            samples,
            raw_bytes,
            np.broadcast_to(zip_bytes, samples.shape),
            schema_of,
            np.full(samples.shape, compression),
        )
        self.count += len(found)

    def _schemas_of(self, found: Sequence[_AnyShard]) -> NDArray[np.int32]:
        schema_of = np.empty(len(found), np.int32)
        names: object = None
        encodings: object = None
        sizes: object = None
        start = number = 0
        for at, shard in enumerate(found):
            if (
                shard.column_sizes == sizes
                and shard.column_names == names
                and shard.column_encodings == encodings
            ):
                continue
            schema_of[start:at] = number
            start = at
            names, encodings, sizes = shard.column_names, shard.column_encodings, shard.column_sizes
            columns = [json.loads(bytes(text)) for text in (names, encodings, sizes)]
            number = self._schema_number(columns, self.count + at)
        schema_of[start:] = number
        return schema_of

    def _row(self, found: object, number: int) -> tuple[int, tuple[str, int], tuple[str, int], int, int, str]:
        """Check one shard. Returns (samples, raw file, compressed file, schema, compression, hashes)."""
        if not isinstance(found, dict) or ("samples" not in found and "column_names" not in found):
            self._refuse(f": shard {number} is not described by an object with samples and columns")
        if found.get("format", "mds") != "mds":
            self._refuse(f": shard {number} has the format {found['format']!r}, not mds")
        if found.get("version", VERSION) != VERSION:
            self._refuse(f": shard {number} is version {found['version']!r}, not {VERSION}")
        raw_name, raw_bytes = self._file(found.get("raw_data"), number, "raw_data")
        zip_name, zip_bytes = self._file(found.get("zip_data"), number, "zip_data")
        if not raw_name and not zip_name:
            self._refuse(f": shard {number} names no file (raw_data.basename is missing)")
        compression = found.get("compression") if zip_name else None
        family = self._family(compression, number)
        if zip_name and not family:
            self._refuse(f": shard {number} has zip_data, but names no compression")
        schema = self._schema_number(
            [found.get(f"column_{part}") for part in ("names", "encodings", "sizes")], number
        )
        samples = self._sample_count(found.get("samples"), raw_bytes, number)
        hashes = (
            [_hashes_of(found.get(which)) for which in ("raw_data", "zip_data")] if self.with_hashes else []
        )
        return (
            samples,
            (raw_name or zip_name.removesuffix("." + family), raw_bytes),
            (zip_name, zip_bytes),
            schema,
            self._compression_number(compression, number),
            _hashes_text(*hashes) if hashes else "",
        )

    def _refuse(self, rest: str) -> NoReturn:
        raise DatasetError(self.path + rest)

    def _compression_number(self, compression: object, number: int) -> int:
        return self.compressions.setdefault(self._family(compression, number), len(self.compressions))

    def _family(self, compression: object, number: int) -> str:
        try:
            return family_of(compression)
        except LoaderError as problem:
            raise DatasetError(f"{self.path}: shard {number}: {problem}") from None

    def _file(self, found: object, number: int, what: str) -> tuple[str, int]:
        if not found:
            return "", 0
        if not isinstance(found, dict) or not isinstance(found.get("basename"), str) or not found["basename"]:
            self._refuse(f": {what} of shard {number} has no basename")
        name = found["basename"]
        # Only a relative path below the index is valid: a merged index has names such as "17/shard.00085.mds".
        if name.startswith("/") or "\0" in name or "\\" in name or ".." in name.split("/"):
            self._refuse(f": shard {number} lies outside the dataset ({name!r}); refused")
        return name, self._count(found.get("bytes") or 0, number, f"{what}.bytes")

    def _count(self, found: object, number: int, what: str) -> int:
        if not isinstance(found, int) or isinstance(found, bool) or not 0 <= found < MOST_BYTES:
            self._refuse(f": {what} of shard {number} is {found!r}, not a count")
        return found

    def _sample_count(self, found: object, raw_bytes: int, number: int) -> int:
        """Return the sample count, after checking that a shard can contain so many samples."""
        count = self._count(found, number, "samples")
        if count > MOST_SAMPLES:
            self._refuse(
                f" is damaged: samples of shard {number} is {count}, but a shard holds {MOST_SAMPLES} "
                f"at most (its offsets have 32 bits); copy or write it again"
            )
        if raw_bytes and 4 * (count + 2) > raw_bytes:
            self._refuse(
                f" is damaged: shard {number} has {raw_bytes} bytes, too few for the offsets of its "
                f"{count} samples; copy or write it again"
            )
        return count

    def _schema_number(self, columns: list[Any], number: int) -> int:
        if columns != self._last_columns:  # nearly all shards have the columns of the previous one
            schema = self._schema(columns, number)
            self._last_columns = columns
            self._last_schema = self.schemas.setdefault(schema, len(self.schemas))
        return self._last_schema

    def _schema(self, columns: list[Any], number: int) -> Schema:
        if not all(isinstance(column, list) for column in columns):
            self._refuse(f": shard {number} lacks column_names, column_encodings or column_sizes")
        names, encodings, sizes = columns
        if not all(isinstance(text, str) for text in names + encodings):
            self._refuse(f": a column name or encoding of shard {number} is not text")
        if not len(names) == len(encodings) == len(sizes) or len(set(names)) != len(names):
            self._refuse(f": the columns of shard {number} differ in number, or a name is twice there")
        return Schema(
            tuple(names),
            tuple(encodings),
            tuple(self._count(size or 0, number, "column_sizes") for size in sizes),
        )


def _are_odd(names: list[str]) -> bool:
    """Return whether `_file` must check one of these names."""
    # One joined text and plain searches: a regular expression takes ten times as long.
    text = "\n".join(["", *names, ""])
    return text.count("\n") != len(names) + 1 or any(sign in text for sign in _ODD_SIGNS)


def _hashes_of(found: object) -> dict[str, str]:
    hashes = found.get("hashes") if isinstance(found, dict) else None
    if not isinstance(hashes, dict):
        return {}
    return {name: value for name, value in hashes.items() if isinstance(value, str)}


def _hashes_in(file: _File | None) -> dict[str, str] | None:
    return file.hashes if isinstance(file, _HashedFile) else None


def _hashes_text(raw: dict[str, str] | None, packed: dict[str, str] | None) -> str:
    return json.dumps([raw or {}, packed or {}])
