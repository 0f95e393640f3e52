"""What LIST said of directories: rows on disk, so that a directory of a million objects costs no memory.

Worth nothing after a restart: the environment is made anew for each mount, and never synced.

A directory is a number chosen by the caller. Its rows are sorted by their sort name, where that of a subdirectory ends
with '/', as in the bucket's own order: so that "everything up to here is known" is one comparison. A key that is also a
prefix has two rows. One record holds a block of rows, a page of LIST as a rule: a million records would cost ten times
the time of their LIST. It is keyed by (directory, generation, its last sort name).

Invariant: the blocks of a generation do not overlap.
"""

import json
import shutil
import struct
import threading
from bisect import bisect_left, bisect_right
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import lmdb

from fusecache.model.errors import LocalDiskError

MAP_BYTES = 64 << 30
# Rows of a block that grows by single names; pages have at most 1 000.
BLOCK_ROWS_MAX = 2000
# Of a directory that nobody knows any more so many are removed in one transaction.
_BLOCKS_DROPPED_AT_ONCE = 100
# Decoded ones, about 0.5 MB each.
_BLOCKS_KEPT = 8
_PREFIX = struct.Struct(">QI")
# A name cannot hold it, nor can what JSON writes.
_SEPARATOR = "\0"
_FIELDS = 6


class ListedEntry(NamedTuple):
    """One name as LIST shows it. Directories have size 0 and no etag; metadata only if a HEAD was made.

    number: of the inode that shows it while no node does; 0: none yet.
    """

    name: str
    is_directory: bool
    size: int = 0
    etag: str = ""
    modified: float = 0.0
    metadata: dict[str, str] | None = None
    number: int = 0

    @property
    def sort_name(self) -> str:
        """The name in the bucket's order."""
        return f"{self.name}/" if self.is_directory else self.name


class _Block:
    """The rows of one record, decoded as far as needed: fields in turn, and the sort names among them."""

    def __init__(self, raw: bytes) -> None:
        self.fields = raw.decode().split(_SEPARATOR)
        self.names = self.fields[::_FIELDS]

    def row(self, index: int) -> ListedEntry:
        name, etag, size, modified, metadata, number = self.fields[index * _FIELDS : (index + 1) * _FIELDS]
        facts = json.loads(metadata) if metadata else None
        if name[-1] == "/":
            return ListedEntry(name[:-1], True, 0, "", 0.0, facts, int(number))  # noqa: FBT003 (a million times)
        return ListedEntry(name, False, int(size), etag, float(modified), facts, int(number))  # noqa: FBT003

    def rows(self, start: int, stop: int) -> list[ListedEntry]:
        return [self.row(index) for index in range(start, min(stop, len(self.names)))]

    def find(self, sort_name: str) -> int | None:
        index = bisect_left(self.names, sort_name)
        return index if index < len(self.names) and self.names[index] == sort_name else None


class Listings:
    """Rows of listings. Memory-mapped and unsynced: a call takes 10 to 300 µs.

    Readers and `put`, `remove` belong to the loop's thread; `put_page` and `drop` may run in others at the same time.
    """

    def __init__(self, directory: Path) -> None:
        if directory.exists():
            shutil.rmtree(directory)
        directory.mkdir(parents=True)
        self._directory = directory
        self._blocks: OrderedDict[bytes, _Block] = OrderedDict()
        self._cache_lock = threading.Lock()
        self._env = _open(
            str(directory),
            # A map that is written through would be a SIGBUS on a full disk.
            map_size=MAP_BYTES,
            subdir=True,
            sync=False,
            metasync=False,
            lock=True,
            writemap=False,
        )

    def close(self) -> None:
        """Close; the rows are worth nothing any more."""
        self._env.close()

    # ---- reading

    def get(self, directory: int, generation: int, sort_name: str) -> ListedEntry | None:
        """Return one row, or None."""
        for block in self._from(directory, generation, sort_name):
            index = block.find(sort_name)
            return None if index is None else block.row(index)
        return None

    def scan(self, directory: int, generation: int, after: str, limit: int) -> list[ListedEntry]:
        """Return up to `limit` rows behind the sort name `after` ("" for the first), in order."""
        rows: list[ListedEntry] = []
        for block in self._from(directory, generation, after):
            start = bisect_right(block.names, after)
            rows += block.rows(start, start + limit - len(rows))
            if len(rows) == limit:
                break
        return rows

    def iterate(self, directory: int, generation: int, batch: int = 1000) -> Iterator[ListedEntry]:
        """Yield all rows, reading them in batches, so that rows may change meanwhile."""
        after = ""
        while rows := self.scan(directory, generation, after, batch):
            yield from rows
            after = rows[-1].sort_name

    def find_number(
        self, directory: int, generation: int, number: int, first: str, last: str
    ) -> ListedEntry | None:
        """Return the row of an inode's number, if it is one of those from `first` to `last`."""
        text = str(number)
        for block in self._from(directory, generation, first):
            numbers = block.fields[_FIELDS - 1 :: _FIELDS]
            if text in numbers:
                return block.row(numbers.index(text))
            if block.names[-1] >= last:
                break
        return None

    # ---- writing

    def put_page(
        self, directory: int, generation: int, rows: Sequence[ListedEntry], older: int, first_number: int
    ) -> set[int]:
        """Write a page behind all rows of the generation, and return the numbers of its rows.

        A row gets the number that the same version has in generation `older`, else one from `first_number` on.
        Raises LocalDiskError if the disk does not take them.
        """
        if not rows:
            return set()
        known = self._numbers(directory, older, rows[0].sort_name, rows[-1].sort_name) if older else {}
        numbers: list[int] = []
        for index, row in enumerate(rows, first_number):
            etag, number = known.get(row.sort_name, ("", 0))
            numbers.append(number if number and etag == row.etag else index)
        fields = [_fields(row, number) for row, number in zip(rows, numbers, strict=True)]
        with self._writing() as txn:
            txn.put(_key(directory, generation, rows[-1].sort_name), _SEPARATOR.join(fields).encode())
        return set(numbers)

    def put(self, directory: int, generation: int, entries: Iterable[ListedEntry]) -> None:
        """Write single rows. Raises LocalDiskError if the disk does not take them."""
        for entry in entries:
            with self._changing(directory, generation, entry.sort_name) as block:
                index = bisect_left(block.names, entry.sort_name)
                replaced = int(block.find(entry.sort_name) is not None)
                fields = _fields(entry, entry.number).split(_SEPARATOR)
                block.fields[index * _FIELDS : (index + replaced) * _FIELDS] = fields

    def remove(self, directory: int, generation: int, sort_name: str) -> None:
        """Remove one row. Raises LocalDiskError."""
        if self.get(directory, generation, sort_name) is None:
            return
        with self._changing(directory, generation, sort_name) as block:
            index = bisect_left(block.names, sort_name)
            del block.fields[index * _FIELDS : (index + 1) * _FIELDS]

    def drop(self, directory: int, generation: int) -> bool:
        """Remove some rows of a generation that is not read any more; return whether there are more.

        Raises LocalDiskError.
        """
        prefix = _PREFIX.pack(directory, generation)
        with self._writing() as txn, txn.cursor() as cursor:
            found = cursor.set_range(prefix)
            for _ in range(_BLOCKS_DROPPED_AT_ONCE):
                if not found or not bytes(cursor.key()).startswith(prefix):
                    return False
                self._forget_block(bytes(cursor.key()))
                found = cursor.delete()
        return True

    # ---- private

    def _from(self, directory: int, generation: int, sort_name: str) -> Iterator[_Block]:
        """Yield the block that holds, or would hold, a sort name, and those behind it."""
        prefix = _PREFIX.pack(directory, generation)
        with self._env.begin() as txn, txn.cursor() as cursor:
            found = cursor.set_range(_key(directory, generation, sort_name))
            while found and (key := bytes(cursor.key())).startswith(prefix):
                yield self._block(key, cursor.value)
                found = cursor.next()

    def _block(self, key: bytes, value: Any) -> _Block:
        with self._cache_lock:
            block = self._blocks.get(key)
            if block is not None:
                self._blocks.move_to_end(key)
                return block
        block = _Block(value())
        with self._cache_lock:
            self._blocks[key] = block
            if len(self._blocks) > _BLOCKS_KEPT:
                self._blocks.popitem(last=False)
        return block

    def _forget_block(self, key: bytes) -> None:
        with self._cache_lock:
            self._blocks.pop(key, None)

    def _numbers(self, directory: int, generation: int, first: str, last: str) -> dict[str, tuple[str, int]]:
        """Return sort name -> (etag, number) of the rows from `first` to `last`, and some around them."""
        known: dict[str, tuple[str, int]] = {}
        for block in self._from(directory, generation, first):
            numbers = map(int, block.fields[_FIELDS - 1 :: _FIELDS])
            known.update(zip(block.names, zip(block.fields[1::_FIELDS], numbers, strict=True), strict=True))
            if block.names[-1] >= last:
                break
        return known

    @contextmanager
    def _changing(self, directory: int, generation: int, sort_name: str) -> Iterator[_Block]:
        """Read the block that a sort name belongs to, and write what the body made of its fields."""
        prefix = _PREFIX.pack(directory, generation)
        with self._writing() as txn, txn.cursor() as cursor:
            found = cursor.set_range(_key(directory, generation, sort_name))
            if not (found and bytes(cursor.key()).startswith(prefix)):
                # Behind all others: into the last block, while it has room.
                found = cursor.prev() if found else cursor.last()
                found = found and bytes(cursor.key()).startswith(prefix)
                found = found and bytes(cursor.value()).count(b"\0") < (BLOCK_ROWS_MAX // 2) * _FIELDS
            block = _Block(b"")
            block.fields, block.names = [], []
            if found:
                old_key = bytes(cursor.key())
                block = _Block(bytes(cursor.value()))
                cursor.delete()
                self._forget_block(old_key)
            yield block
            step = (
                BLOCK_ROWS_MAX if len(block.fields) <= BLOCK_ROWS_MAX * _FIELDS else BLOCK_ROWS_MAX // 2
            ) * _FIELDS
            for start in range(0, len(block.fields), step):
                fields = block.fields[start : start + step]
                key = _key(directory, generation, fields[-_FIELDS])
                txn.put(key, _SEPARATOR.join(fields).encode())
                self._forget_block(key)

    @contextmanager
    def _writing(self) -> Iterator[lmdb.Transaction]:
        try:
            with self._env.begin(write=True) as txn:
                yield txn
        except lmdb.Error as exc:
            with self._cache_lock:
                self._blocks.clear()
            raise LocalDiskError(
                f"{self._directory}: listings cannot be kept ({exc}); is the disk full?"
            ) from exc


def _open(path: str, **options: Any) -> lmdb.Environment:
    try:
        return lmdb.open(path, **options)
    except lmdb.Error as exc:
        raise LocalDiskError(f"{path}: cannot be opened ({exc}); is the disk full?") from exc


def _key(directory: int, generation: int, sort_name: str) -> bytes:
    return _PREFIX.pack(directory, generation) + sort_name.encode()


def _fields(row: ListedEntry, number: int) -> str:
    metadata = json.dumps(row.metadata) if row.metadata is not None else ""
    etag = row.etag.replace(_SEPARATOR, "")
    return f"{row.sort_name}\0{etag}\0{row.size}\0{row.modified!r}\0{metadata}\0{number}"
