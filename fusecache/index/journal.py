"""The journal: durable rows from which a restarted daemon resumes the write-back.

This is not the cache index: the index may be lost, the journal must not be. Every `apply` is one LMDB transaction,
synced before it returns. So after a crash a batch of changes is there as a whole or not at all.

Invariants:
1. A row is written before the effect that it announces, and removed after the effect that ends it.
2. Numbers (generations, sequences) never go backwards, not even across restarts.
3. An unreadable row is never deleted: opening fails and says where the journal is.
"""

import errno
import hashlib
import json
import os
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import lmdb

from fusecache.index.lmdb_format import DiskReserve, open_environment
from fusecache.model.errors import JournalMapFull, NoSpace, StateError, StateLost
from fusecache.model.records import (
    ConflictRecord,
    FileRecord,
    OperationRecord,
    PosixAttributes,
    conflict_from_row,
    file_from_row,
    operation_from_row,
    to_row,
)

FORMAT_VERSION = 1
# Address space, not disk: LMDB grows the file with its rows. 8 GiB hold about ten million rows; `grow` doubles it.
MAP_BYTES = 8 << 30
# Disk space that the file has ahead of its rows, so that they can be written while the disk is full. A file that waits
# for its upload takes about 2 KiB with all its states; freed pages are used again.
RESERVE_BYTES = 32 << 20
# Versions with attributes, about 100 bytes each. Above it, the rows with the oldest modification times go.
ATTRIBUTES_MAX = 1_000_000
_ROWS_COMPARED = 16
_MTIME = 3
_DIGEST_BYTES = 32
_STARTED = b"started"
# A disk with less free space is full.
_FULL_BYTES = 1 << 20
_TABLES = ("files", "operations", "attributes", "meta", "conflicts", "aborts")
# Built once: rows are encoded several times for each file.
_encode = json.JSONEncoder(separators=(",", ":")).encode


@dataclass(frozen=True, slots=True)
class PutFile:
    """Write the row of a version."""

    record: FileRecord


@dataclass(frozen=True, slots=True)
class DropFile:
    """Remove the row of a version."""

    generation: int


@dataclass(frozen=True, slots=True)
class PutOperation:
    """Write the row of an operation."""

    record: OperationRecord


@dataclass(frozen=True, slots=True)
class DropOperation:
    """Remove the row of an operation."""

    sequence: int


@dataclass(frozen=True, slots=True)
class PutAttributes:
    """Store mode, owner and times of a version whose object does not hold them. etag: "" for a directory."""

    key: str
    etag: str
    attributes: PosixAttributes


@dataclass(frozen=True, slots=True)
class DropAttributes:
    """Remove the attributes of a version that the bucket no longer has."""

    key: str
    etag: str


@dataclass(frozen=True, slots=True)
class PutConflict:
    """Write the row of a conflict."""

    record: ConflictRecord


@dataclass(frozen=True, slots=True)
class DropConflict:
    """Remove the row of a conflict."""

    number: int


@dataclass(frozen=True, slots=True)
class PutAbort:
    """Record a multipart upload that is no longer needed and must still be aborted in the bucket."""

    key: str
    upload_id: str


@dataclass(frozen=True, slots=True)
class DropAbort:
    """Remove the record: the bucket has aborted the upload."""

    key: str
    upload_id: str


@dataclass(frozen=True, slots=True)
class PutStart:
    """Record when this daemon started: the modification time of the file that each start touches."""

    time_ns: int


Change = (
    PutFile
    | DropFile
    | PutOperation
    | DropOperation
    | PutAttributes
    | DropAttributes
    | PutConflict
    | DropConflict
    | PutAbort
    | DropAbort
    | PutStart
)


class Journal:
    """An open journal. `apply` and `close` may be called from any one thread at a time; reads from any."""

    def __init__(self, directory: Path) -> None:
        """Open or create the journal. Raises StateError if it is damaged or of a newer format."""
        directory.mkdir(parents=True, exist_ok=True)
        self._directory = directory
        self._map_bytes = MAP_BYTES
        self.is_open = False
        try:
            self._open()
        except (lmdb.Error, OSError) as exc:
            raise StateError(
                f"{directory}: the journal cannot be opened ({exc}); it may hold writes that the bucket does not "
                f"have yet. Move the cache directory aside and mount again; keep it until they are recovered"
            ) from exc
        self._check_format()
        self._reserve.top_up()

    def _open(self) -> None:
        data = self._directory / "data.mdb"
        # A journal with more rows than the map had room for has grown.
        size = data.stat().st_size if data.exists() else 0
        while self._map_bytes < 2 * size:
            self._map_bytes *= 2
        _read_whole(data)
        self._env = open_environment(self._directory, map_size=self._map_bytes, max_dbs=8)
        self._tables = {name: self._env.open_db(name.encode()) for name in _TABLES}
        self._attributes = self._tables["attributes"]
        self._meta = self._tables["meta"]
        self._reserve = DiskReserve(self._env, self._directory, RESERVE_BYTES)
        self._opened = self._inode()
        self.is_open = True

    def reopen(self) -> None:
        """Open the journal again after an `apply` that closed it. Raises StateError if the disk still fails."""
        self._env.close()
        try:
            self._open()
        except (lmdb.Error, OSError) as exc:
            raise StateError(
                f"{self._directory}: the journal cannot be read ({exc}); repair or replace that disk"
            ) from exc

    def grow(self) -> None:
        """Double the address space, after JournalMapFull. No other thread may use the journal then."""
        self._map_bytes *= 2
        self._env.set_mapsize(self._map_bytes)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the journal. Everything applied is already on disk."""
        self.is_open = False
        self._env.close()

    def apply(self, changes: Iterable[Change], commit: int = 0) -> None:
        """Write all changes in one synced transaction. Raises NoSpace or StateError, and then writes none of them.

        commit: the number that `last_commit` returns from then on; 0: as before.

        JournalMapFull asks for `grow`. After an error of the disk itself the journal is closed: LMDB would not go on,
        and a page fault on such a disk is a SIGBUS. It needs `reopen`.
        """
        self.check_there()
        try:
            with self._env.begin(write=True) as txn:
                highest = 0
                last: dict[tuple[str, bytes], bytes | None] = {}
                for change in changes:
                    table, key, value, number = encoded(change)
                    highest = max(highest, number)
                    last[table, key] = value  # earlier changes of the same row would never be visible
                for (table, key), value in last.items():
                    self._apply_one(txn, table, key, value)
                if highest > self._number(txn, b"highest"):
                    txn.put(b"highest", str(highest).encode(), db=self._meta)
                if commit:
                    txn.put(b"commit", str(commit).encode(), db=self._meta)
        except lmdb.MapFullError as exc:
            raise JournalMapFull(
                f"{self._directory}: the journal has {self._map_bytes >> 30} GiB of rows, more than its address space"
            ) from exc
        except lmdb.Error as exc:
            # Later calls do not touch the map. It stays until `reopen`, as another thread may be reading it.
            self.is_open = isinstance(exc, lmdb.DiskError)
            if self._is_full(exc):
                raise NoSpace(
                    f"{self._directory}: the journal cannot grow, the disk is full ({exc}); free space on that disk"
                ) from exc
            raise StateError(
                f"{self._directory}: the journal cannot be written ({exc}); repair or replace that disk"
            ) from exc
        self._reserve.top_up()

    def _inode(self) -> int:
        """Return the inode number of the journal's file; 0: it is gone."""
        with suppress(FileNotFoundError, NotADirectoryError):
            return (self._directory / "data.mdb").stat().st_ino
        return 0

    def check_there(self) -> None:
        """Raise StateLost if the journal is no longer in its directory: rows would be lost with this process."""
        if self.is_open and self._inode() != self._opened:
            raise StateLost(
                f"the cache directory {self._directory.parent} was emptied, removed or replaced while the mount uses "
                "it. What was not uploaded is lost, unless you put the directory back. To go on: "
                "`fusecache unmount --force`, then mount again"
            )

    def _is_full(self, error: lmdb.Error) -> bool:
        """Whether the disk is full. LMDB reports a write that fitted only in part as an I/O error."""
        if isinstance(error, lmdb.DiskError) or os.strerror(errno.EDQUOT) in str(error):
            return True
        with suppress(OSError):
            facts = os.statvfs(self._directory)
            return facts.f_bavail * facts.f_frsize < _FULL_BYTES
        return False

    def files(self) -> list[FileRecord]:
        """Return all version records, oldest first. Raises StateError if a row is unreadable."""
        return [self._parse(file_from_row, raw) for raw in self._values(self._tables["files"])]

    def operations(self) -> list[OperationRecord]:
        """Return all operations in order. Raises StateError if a row is unreadable."""
        return [self._parse(operation_from_row, raw) for raw in self._values(self._tables["operations"])]

    def conflicts(self) -> list[ConflictRecord]:
        """Return all conflicts, oldest first. Raises StateError if a row is unreadable."""
        return [self._parse(conflict_from_row, raw) for raw in self._values(self._tables["conflicts"])]

    def aborts(self) -> list[tuple[str, str]]:
        """Return key and UploadId of each upload that must still be aborted."""
        return [self._parse(_abort_from_row, raw) for raw in self._values(self._tables["aborts"])]

    @property
    def has_attributes(self) -> bool:
        """Whether local attributes are stored for any version."""
        if not self.is_open:
            return False
        with self._env.begin(db=self._attributes) as txn:
            return bool(txn.stat()["entries"])

    def attributes(self, key: str, etag: str) -> PosixAttributes | None:
        """Return the local attributes of a version, or None. None for all while the disk fails."""
        if not self.is_open:
            return None
        with self._env.begin(db=self._attributes) as txn:
            raw = txn.get(_version_key(key, etag))
        return PosixAttributes(*json.loads(raw)) if raw else None

    def highest_number(self) -> int:
        """Return the highest generation or sequence ever written; new ones start above it."""
        with self._env.begin() as txn:
            return self._number(txn, b"highest")

    def last_commit(self) -> int:
        """Return the number of the last numbered `apply`; 0: there was none."""
        with self._env.begin() as txn:
            return self._number(txn, b"commit")

    def last_start_ns(self) -> int:
        """Return when the last daemon of a version that records this started; 0: there was none."""
        with self._env.begin() as txn:
            return self._number(txn, _STARTED)

    def _apply_one(self, txn: Any, table: str, key: bytes, value: bytes | None) -> None:
        database = self._tables[table]
        if value is None:
            txn.delete(key, db=database)
            return
        txn.put(key, value, db=database)
        if table == "attributes" and txn.stat(database)["entries"] > ATTRIBUTES_MAX:
            self._drop_old_attributes(txn)

    def _drop_old_attributes(self, txn: Any) -> None:
        """Remove the two oldest of some rows at a random place; keys are digests, so their order is random too."""
        with txn.cursor(db=self._attributes) as cursor:
            if not cursor.set_range(os.urandom(_DIGEST_BYTES)):
                cursor.first()
            rows = [(json.loads(value)[_MTIME], key) for key, value in islice(cursor, _ROWS_COMPARED)]
        for _, key in sorted(rows)[:2]:
            txn.delete(key, db=self._attributes)

    def _check_format(self) -> None:
        with self._env.begin(write=True, db=self._meta) as txn:
            version = self._number(txn, b"format")
            if version == 0:
                txn.put(b"format", str(FORMAT_VERSION).encode())
            elif version != FORMAT_VERSION:
                self._env.close()
                raise StateError(
                    f"{self._directory}: the journal has format {version}, this fusecache supports {FORMAT_VERSION}; "
                    f"mount with the version that wrote it, or use another --cache-dir"
                )

    def _number(self, txn: Any, name: bytes) -> int:
        raw = txn.get(name, db=self._meta)
        return int(raw) if raw else 0

    def _values(self, database: Any) -> list[bytes]:
        with self._env.begin(db=database) as txn:
            return [bytes(value) for _, value in txn.cursor()]

    def _parse(self, parse: Any, raw: bytes) -> Any:
        try:
            return parse(json.loads(raw))
        except (ValueError, TypeError, KeyError) as exc:
            raise StateError(
                f"{self._directory}: a journal row is unreadable ({exc}: {raw[:200]!r}); nothing was changed. "
                f"Move the cache directory aside and mount again; keep it until its files are recovered"
            ) from exc


def _read_whole(path: Path) -> None:
    """Read a file that LMDB is about to map: an error is then no SIGBUS. Raises OSError."""
    if not path.exists():
        return
    with open(path, "rb", buffering=0) as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_WILLNEED)
        piece = bytearray(1 << 20)
        while file.readinto(piece):
            pass


def encoded(change: Change) -> tuple[str, bytes, bytes | None, int]:  # noqa: C901  # one case for each kind of row
    """Return table, key and value (None: the row is removed) of a change, and the highest number in it.

    What it raises does not pass: such a change can never be written.
    """
    match change:
        case PutFile(record):
            key, number = _number_key(record.generation), max(record.generation, record.sequence)
            return "files", key, _dump(to_row(record)), number
        case DropFile(generation):
            return "files", _number_key(generation), None, generation
        case PutOperation(operation):
            return "operations", _number_key(operation.sequence), _dump(to_row(operation)), operation.sequence
        case DropOperation(sequence):
            return "operations", _number_key(sequence), None, sequence
        case PutAttributes(name, etag, attributes):
            row = [attributes.mode, attributes.uid, attributes.gid, attributes.mtime_ns]
            return "attributes", _version_key(name, etag), _dump(row), 0
        case DropAttributes(name, etag):
            return "attributes", _version_key(name, etag), None, 0
        case PutConflict(conflict):
            return "conflicts", _number_key(conflict.number), _dump(to_row(conflict)), conflict.number
        case DropConflict(number):
            return "conflicts", _number_key(number), None, number
        case PutAbort(name, upload_id):
            return "aborts", _version_key(name, upload_id), _dump([name, upload_id]), 0
        case DropAbort(name, upload_id):
            return "aborts", _version_key(name, upload_id), None, 0
        case PutStart(time_ns):
            return "meta", _STARTED, str(time_ns).encode(), 0


def _abort_from_row(row: list[str]) -> tuple[str, str]:
    key, upload_id = row
    return key, upload_id


def _number_key(number: int) -> bytes:
    return number.to_bytes(8, "big")


def _version_key(key: str, etag: str) -> bytes:
    # LMDB keys are limited to 511 bytes, S3 keys to 1 024.
    return hashlib.blake2b(f"{etag}\0{key}".encode(), digest_size=_DIGEST_BYTES).digest()


def _dump(value: object) -> bytes:
    return _encode(value).encode()
