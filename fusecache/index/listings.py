"""Results of LIST, stored on disk, so that a directory of a million objects costs no memory.

The rows are not kept across restarts: the environment is recreated for each mount, and never synced.

A directory is a number chosen by the caller; `generation` is its listing epoch. Its rows sort by sort name, in the
bucket's own order, where a subdirectory's sort name ends with '/'. So "everything up to here is known" is a single
comparison. A key that is also a prefix has two rows.

One record holds a pack of rows, usually one page of LIST: a million records would take ten times as long as their LIST.
A record's key is (directory, generation, its last sort name). Single rows are buffered in memory and written a few
hundred at a time. Otherwise each published file would cost the rewriting of a pack.

Invariants:
1. The packs of a generation do not overlap.
2. A row in memory takes precedence over a row of its name in a pack. Reads merge both.
"""

import shutil
import struct
import threading
from bisect import bisect_right
from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import lmdb

from fusecache.index.rows import FIELDS, ListedEntry, RowPack, joined, numbers_in, page_fields
from fusecache.model.errors import LocalDiskError

MAP_BYTES = 64 << 30
# Row limit of a pack that grows by single names. Pages have at most 1 000 rows.
BLOCK_ROWS_MAX = 2000
# Limits of single rows in memory: at LATE_ROWS a directory's rows are written, above LATE_ROWS_IN_ALL by each `put`.
LATE_ROWS = 256
LATE_ROWS_IN_ALL = 32_768
# Packs of a discarded listing that are removed in one transaction.
_BLOCKS_DROPPED_AT_ONCE = 100
# Decoded packs kept, about 0.4 MB each for 1 000 rows: enough for this many directories written concurrently.
_BLOCKS_KEPT = 16
_PREFIX = struct.Struct(">QI")


class Listings:
    """Rows of listings. Memory-mapped and unsynced: a call takes 10 to 300 µs.

    Reads and `put`, `remove`, `replace` belong to the loop's thread. `put_page` and `drop` may run concurrently in
    other threads.
    """

    def __init__(self, directory: Path) -> None:
        if directory.exists():
            shutil.rmtree(directory)
        directory.mkdir(parents=True)
        self._directory = directory
        self._blocks: OrderedDict[bytes, RowPack] = OrderedDict()
        self._lock = threading.Lock()
        # (directory, generation) -> sort name -> row; changed by the loop's thread only.
        self._late: dict[tuple[int, int], dict[str, ListedEntry]] = {}
        self._late_count = 0
        self._env = _open(
            str(directory),
            # No writemap: writing to a mapped page on a full disk would be a SIGBUS.
            map_size=MAP_BYTES,
            subdir=True,
            sync=False,
            metasync=False,
            lock=True,
            writemap=False,
        )

    def close(self) -> None:
        """Close. The rows are useless from now on."""
        self._env.close()

    @property
    def rows_in_memory(self) -> int:
        """Number of rows that are not written yet."""
        return self._late_count

    # ---- reading

    def get(self, directory: int, generation: int, sort_name: str) -> ListedEntry | None:
        """Return one row, or None."""
        late = self._late.get((directory, generation))
        if late is not None and sort_name in late:
            return late[sort_name]
        for block in self._from(directory, generation, sort_name):
            index = block.find(sort_name)
            return None if index is None else block.row(index)
        return None

    def named(self, directory: int, generation: int, name: str) -> list[ListedEntry]:
        """Return the rows of a name: its file's, its directory's, both or none."""
        rows = (self.get(directory, generation, sort_name) for sort_name in (name, name + "/"))
        return [row for row in rows if row is not None]

    def scan(self, directory: int, generation: int, after: str, limit: int) -> list[ListedEntry]:
        """Return up to `limit` rows after the sort name `after` ("" for the start), in order."""
        rows: list[ListedEntry] = []
        for block in self._from(directory, generation, after):
            start = bisect_right(block.names, after)
            rows += block.rows(start, start + limit - len(rows))
            if len(rows) == limit:
                break
        late = self._late.get((directory, generation))
        if not late:
            return rows
        # If the batch is full, packs after its last row have not been read.
        last = rows[-1].sort_name if len(rows) == limit else None
        merged = {row.sort_name: row for row in rows}
        merged |= {name: row for name, row in late.items() if name > after and (last is None or name <= last)}
        return [merged[name] for name in sorted(merged)][:limit]

    def iterate(self, directory: int, generation: int, batch: int = 1000) -> Iterator[ListedEntry]:
        """Yield all rows, read in batches, so that rows may change between batches."""
        after = ""
        while rows := self.scan(directory, generation, after, batch):
            yield from rows
            after = rows[-1].sort_name

    def find_number(
        self, directory: int, generation: int, number: int, first: str, last: str
    ) -> ListedEntry | None:
        """Return the row with an inode number, if it is among those from `first` to `last`."""
        for row in self._late.get((directory, generation), {}).values():
            if row.number == number:
                return row
        text = str(number)
        for block in self._from(directory, generation, first):
            numbers = block.fields[FIELDS - 1 :: FIELDS]
            if text in numbers:
                row = block.row(numbers.index(text))
                return row if self.get(directory, generation, row.sort_name) == row else None
            if block.names[-1] >= last:
                break
        return None

    # ---- writing

    def put_page(
        self, directory: int, generation: int, rows: Sequence[ListedEntry], older: int, first_number: int
    ) -> set[int]:
        """Write a page after all rows of the generation, and return the inode numbers of its rows.

        A row keeps the number that the same version has in generation `older`, else it gets the next one from
        `first_number` on. Raises LocalDiskError if the disk rejects them.
        """
        if not rows:
            return set()
        known = self._numbers(directory, older, rows[0].sort_name, rows[-1].sort_name) if older else {}
        fields = page_fields(rows, known, first_number)
        with self._writing() as txn:
            self._write(txn, directory, generation, fields)
        return numbers_in(fields)

    def put(self, directory: int, generation: int, entries: Iterable[ListedEntry]) -> None:
        """Add single rows. Raises LocalDiskError if a write was due and the disk rejects it."""
        with self._lock:
            late = self._late.setdefault((directory, generation), {})
            before = len(late)
            for entry in entries:
                late[entry.sort_name] = entry
            self._late_count += len(late) - before
            is_full = len(late) >= LATE_ROWS or self._late_count > LATE_ROWS_IN_ALL
        if is_full:
            self._write_late(directory, generation)

    def remove(self, directory: int, generation: int, sort_name: str) -> None:
        """Remove one row. Raises LocalDiskError."""
        self._forget_late(directory, generation, [sort_name])
        if self.get(directory, generation, sort_name) is None:
            return
        with self._writing() as txn:
            block, _ = self._taken(txn, directory, generation, sort_name)
            block.remove(sort_name)
            self._write(txn, directory, generation, block.fields)

    def replace(
        self,
        directory: int,
        generation: int,
        after: str,
        end: str,
        rows: Sequence[ListedEntry],
        first_number: int,
    ) -> set[int]:
        """Replace all rows after `after` up to `end` by a page; return the inode numbers of its rows.

        A row keeps the number that the same version had, else it gets the next one from `first_number` on. Raises
        LocalDiskError.
        """
        new = page_fields(rows, self._numbers(directory, generation, after, end), first_number)
        late = self._late.get((directory, generation), {})
        self._forget_late(directory, generation, [name for name in late if after < name <= end])
        if new != self._fields_between(directory, generation, after, end):
            with self._writing() as txn:
                before: list[str] = []
                behind: list[str] = []
                for block in self._overlapping(txn, directory, generation, after, end):
                    before += block.fields[: bisect_right(block.names, after) * FIELDS]
                    behind += block.fields[bisect_right(block.names, end) * FIELDS :]
                self._write(txn, directory, generation, before + new + behind)
        return numbers_in(new)

    def drop(self, directory: int, generation: int) -> bool:
        """Remove some packs of a discarded generation; return whether there are more.

        Raises LocalDiskError.
        """
        self._take_late(directory, generation)
        prefix = _PREFIX.pack(directory, generation)
        with self._writing() as txn, txn.cursor() as cursor:
            found = cursor.set_range(prefix)
            for _ in range(_BLOCKS_DROPPED_AT_ONCE):
                if not found or not bytes(cursor.key()).startswith(prefix):
                    return False
                self._forget_pack(bytes(cursor.key()))
                found = cursor.delete()
        return True

    # ---- private

    def _from(self, directory: int, generation: int, sort_name: str) -> Iterator[RowPack]:
        """Yield the pack that holds, or would hold, a sort name, and all packs after it."""
        prefix = _PREFIX.pack(directory, generation)
        with self._env.begin() as txn, txn.cursor() as cursor:
            found = cursor.set_range(_key(directory, generation, sort_name))
            while found and (key := bytes(cursor.key())).startswith(prefix):
                yield self._block(key, cursor.value)
                found = cursor.next()

    def _block(self, key: bytes, value: Any) -> RowPack:
        with self._lock:
            block = self._blocks.get(key)
            if block is not None:
                self._blocks.move_to_end(key)
                return block
        block = RowPack(value())
        with self._lock:
            self._blocks[key] = block
            if len(self._blocks) > _BLOCKS_KEPT:
                self._blocks.popitem(last=False)
        return block

    def _forget_pack(self, key: bytes) -> None:
        with self._lock:
            self._blocks.pop(key, None)

    def _numbers(self, directory: int, generation: int, first: str, last: str) -> dict[str, tuple[str, str]]:
        """Return sort name -> (etag, number) of the rows from `first` to `last`, and of some around them."""
        known: dict[str, tuple[str, str]] = {}
        for block in self._from(directory, generation, first):
            numbers = block.fields[FIELDS - 1 :: FIELDS]
            known.update(zip(block.names, zip(block.fields[1::FIELDS], numbers, strict=True), strict=True))
            if block.names[-1] >= last:
                break
        with self._lock:
            late = dict(self._late.get((directory, generation), {}))
        known.update((name, (row.etag, str(row.number))) for name, row in late.items())
        return known

    def _fields_between(self, directory: int, generation: int, after: str, end: str) -> list[str]:
        fields: list[str] = []
        for block in self._from(directory, generation, after + "\0"):
            start, stop = bisect_right(block.names, after), bisect_right(block.names, end)
            fields += block.fields[start * FIELDS : stop * FIELDS]
            if stop < len(block):
                break
        return fields

    # ---- rows in memory

    def _take_late(self, directory: int, generation: int) -> dict[str, ListedEntry]:
        with self._lock:
            late = self._late.pop((directory, generation), {})
            self._late_count -= len(late)
        return late

    def _forget_late(self, directory: int, generation: int, names: Iterable[str]) -> None:
        with self._lock:
            late = self._late.get((directory, generation), {})
            for name in names:
                self._late_count -= late.pop(name, None) is not None

    def _write_late(self, directory: int, generation: int) -> None:
        """Write the rows of a directory that are in memory, rewriting each affected pack once."""
        late = self._take_late(directory, generation)
        names = deque(sorted(late))
        with self._writing() as txn:
            while names:
                block, end = self._taken(txn, directory, generation, names[0])
                while names and (end is None or names[0] <= end):
                    block.put(late[names.popleft()])
                self._write(txn, directory, generation, block.fields)

    # ---- packs

    def _taken(
        self, txn: lmdb.Transaction, directory: int, generation: int, sort_name: str
    ) -> tuple[RowPack, str | None]:
        """Remove and return the pack that a sort name belongs to, and the last name that does; None: no upper bound."""
        prefix = _PREFIX.pack(directory, generation)
        with txn.cursor() as cursor:
            end: str | None = None
            found = cursor.set_range(_key(directory, generation, sort_name))
            if found and bytes(cursor.key()).startswith(prefix):
                end = bytes(cursor.key())[len(prefix) :].decode()
            else:
                # After all others: append to the last pack, unless it is full.
                found = cursor.prev() if found else cursor.last()
                found = found and bytes(cursor.key()).startswith(prefix)
                found = found and bytes(cursor.value()).count(b"\0") < (BLOCK_ROWS_MAX // 2) * FIELDS
            if not found:
                return RowPack(b""), None
            block = RowPack(bytes(cursor.value()))
            self._forget_pack(bytes(cursor.key()))
            cursor.delete()
            return block, end

    def _overlapping(
        self, txn: lmdb.Transaction, directory: int, generation: int, after: str, end: str
    ) -> Iterator[RowPack]:
        """Remove and yield, one by one, the packs that have rows after `after` up to `end`."""
        prefix = _PREFIX.pack(directory, generation)
        with txn.cursor() as cursor:
            found = cursor.set_range(_key(directory, generation, after + "\0"))
            while found and bytes(cursor.key()).startswith(prefix):
                key = bytes(cursor.key())
                block = self._block(key, cursor.value)
                if block.names[0] > end:
                    return
                self._forget_pack(key)
                found = cursor.delete()
                yield block

    def _write(self, txn: lmdb.Transaction, directory: int, generation: int, fields: list[str]) -> None:
        """Write rows that lie between other packs as one pack, or as several if there are many."""
        half = BLOCK_ROWS_MAX // 2 * FIELDS
        step = len(fields) if len(fields) <= BLOCK_ROWS_MAX * FIELDS else half
        for start in range(0, len(fields), step or 1):
            some = fields[start : start + step]
            key = _key(directory, generation, some[-FIELDS])
            txn.put(key, joined(some))
            self._forget_pack(key)

    @contextmanager
    def _writing(self) -> Iterator[lmdb.Transaction]:
        try:
            with self._env.begin(write=True) as txn:
                yield txn
        except lmdb.Error as exc:
            with self._lock:
                self._blocks.clear()
            raise LocalDiskError(
                f"{self._directory}: listings cannot be stored ({exc}); is the disk full?"
            ) from exc


def _open(path: str, **options: Any) -> lmdb.Environment:
    try:
        return lmdb.open(path, **options)
    except lmdb.Error as exc:
        raise LocalDiskError(f"{path}: cannot be opened ({exc}); is the disk full?") from exc


def _key(directory: int, generation: int, sort_name: str) -> bytes:
    return _PREFIX.pack(directory, generation) + sort_name.encode()
