"""Results of LIST, stored on disk, so that a directory of a million objects costs no memory.

The rows are not kept across restarts: the environment is recreated for each mount, and never synced.

A directory is a number chosen by the caller, and each listing of it has an epoch. Rows sort by sort name, in the
bucket's own order, where a subdirectory's sort name ends with '/'. So "everything up to here is known" is a single
comparison. A key that is also a prefix has two rows.

One record holds a pack of rows, usually one page of LIST: a million records would take ten times as long as their LIST.
A record's key is (directory, epoch, its last sort name). Single rows are buffered in memory and written a few
hundred at a time. Otherwise each published file would cost the rewriting of a pack.

Invariants:
1. The packs of one epoch do not overlap.
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
PACK_ROWS_MAX = 2000
# Limits of single rows in memory: at LATE_ROWS a directory's rows are written, above LATE_ROWS_IN_ALL by each `put`.
LATE_ROWS = 256
LATE_ROWS_IN_ALL = 32_768
# Packs of a discarded listing that are removed in one transaction.
_PACKS_DROPPED_AT_ONCE = 100
# Decoded packs kept, about 0.4 MB each for 1 000 rows: enough for this many directories written concurrently.
_PACKS_KEPT = 16
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
        self._packs: OrderedDict[bytes, RowPack] = OrderedDict()
        self._lock = threading.Lock()
        # (directory, epoch) -> sort name -> row; changed by the loop's thread only.
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

    # ---- reading

    def get(self, directory: int, epoch: int, sort_name: str) -> ListedEntry | None:
        """Return one row, or None."""
        late = self._late.get((directory, epoch))
        if late is not None and sort_name in late:
            return late[sort_name]
        for pack in self._packs_from(directory, epoch, sort_name):
            index = pack.find(sort_name)
            return None if index is None else pack.row(index)
        return None

    def named(self, directory: int, epoch: int, name: str) -> list[ListedEntry]:
        """Return the rows of a name: its file's, its directory's, both or none."""
        rows = (self.get(directory, epoch, sort_name) for sort_name in (name, name + "/"))
        return [row for row in rows if row is not None]

    def scan(self, directory: int, epoch: int, after: str, limit: int) -> list[ListedEntry]:
        """Return up to `limit` rows after the sort name `after` ("" for the start), in order."""
        rows: list[ListedEntry] = []
        for pack in self._packs_from(directory, epoch, after):
            start = bisect_right(pack.names, after)
            rows += pack.rows(start, start + limit - len(rows))
            if len(rows) == limit:
                break
        late = self._late.get((directory, epoch))
        if not late:
            return rows
        # If the batch is full, packs after its last row have not been read.
        last = rows[-1].sort_name if len(rows) == limit else None
        merged = {row.sort_name: row for row in rows}
        merged |= {name: row for name, row in late.items() if name > after and (last is None or name <= last)}
        return [merged[name] for name in sorted(merged)][:limit]

    def iterate(self, directory: int, epoch: int, batch: int = 1000) -> Iterator[ListedEntry]:
        """Yield all rows, read in batches, so that rows may change between batches."""
        after = ""
        while rows := self.scan(directory, epoch, after, batch):
            yield from rows
            after = rows[-1].sort_name

    def find_number(
        self, directory: int, epoch: int, number: int, first: str, last: str
    ) -> ListedEntry | None:
        """Return the row with an inode number, if it is among those from `first` to `last`."""
        for row in self._late.get((directory, epoch), {}).values():
            if row.number == number:
                return row
        text = str(number)
        for pack in self._packs_from(directory, epoch, first):
            numbers = pack.fields[FIELDS - 1 :: FIELDS]
            if text in numbers:
                row = pack.row(numbers.index(text))
                return row if self.get(directory, epoch, row.sort_name) == row else None
            if pack.names[-1] >= last:
                break
        return None

    # ---- writing

    def put_page(
        self, directory: int, epoch: int, rows: Sequence[ListedEntry], older: int, first_number: int
    ) -> set[int]:
        """Write a page after all rows of the epoch, and return the inode numbers of its rows.

        A row keeps the number that the same version has in the epoch `older`, else it gets the next one from
        `first_number` on. Raises LocalDiskError if the disk rejects them.
        """
        if not rows:
            return set()
        known = self._numbers(directory, older, rows[0].sort_name, rows[-1].sort_name) if older else {}
        fields = page_fields(rows, known, first_number)
        with self._writing() as txn:
            self._write(txn, directory, epoch, fields)
        return numbers_in(fields)

    def put(self, directory: int, epoch: int, entries: Iterable[ListedEntry]) -> None:
        """Add single rows. Raises LocalDiskError if a write was due and the disk rejects it."""
        with self._lock:
            late = self._late.setdefault((directory, epoch), {})
            before = len(late)
            for entry in entries:
                late[entry.sort_name] = entry
            self._late_count += len(late) - before
            is_full = len(late) >= LATE_ROWS or self._late_count > LATE_ROWS_IN_ALL
        if is_full:
            self._write_late(directory, epoch)

    def remove(self, directory: int, epoch: int, sort_name: str) -> None:
        """Remove one row. Raises LocalDiskError."""
        self._forget_late(directory, epoch, [sort_name])
        if self.get(directory, epoch, sort_name) is None:
            return
        with self._writing() as txn:
            pack, _ = self._take_pack(txn, directory, epoch, sort_name)
            pack.remove(sort_name)
            self._write(txn, directory, epoch, pack.fields)

    def replace(
        self,
        directory: int,
        epoch: int,
        after: str,
        end: str,
        rows: Sequence[ListedEntry],
        first_number: int,
    ) -> set[int]:
        """Replace all rows after `after` up to `end` by a page; return the inode numbers of its rows.

        A row keeps the number that the same version had, else it gets the next one from `first_number` on. Raises
        LocalDiskError.
        """
        new = page_fields(rows, self._numbers(directory, epoch, after, end), first_number)
        late = self._late.get((directory, epoch), {})
        self._forget_late(directory, epoch, [name for name in late if after < name <= end])
        if new != self._fields_between(directory, epoch, after, end):
            with self._writing() as txn:
                before: list[str] = []
                behind: list[str] = []
                for pack in self._take_overlapping(txn, directory, epoch, after, end):
                    before += pack.fields[: bisect_right(pack.names, after) * FIELDS]
                    behind += pack.fields[bisect_right(pack.names, end) * FIELDS :]
                self._write(txn, directory, epoch, before + new + behind)
        return numbers_in(new)

    def drop(self, directory: int, epoch: int) -> bool:
        """Remove some packs of a discarded listing; return whether there are more.

        Raises LocalDiskError.
        """
        self._take_late(directory, epoch)
        prefix = _PREFIX.pack(directory, epoch)
        with self._writing() as txn, txn.cursor() as cursor:
            found = cursor.set_range(prefix)
            for _ in range(_PACKS_DROPPED_AT_ONCE):
                if not found or not bytes(cursor.key()).startswith(prefix):
                    return False
                self._forget_pack(bytes(cursor.key()))
                found = cursor.delete()
        return True

    # ---- private

    def _packs_from(self, directory: int, epoch: int, sort_name: str) -> Iterator[RowPack]:
        """Yield the pack that holds, or would hold, a sort name, and all packs after it."""
        prefix = _PREFIX.pack(directory, epoch)
        with self._env.begin() as txn, txn.cursor() as cursor:
            found = cursor.set_range(_key(directory, epoch, sort_name))
            while found and (key := bytes(cursor.key())).startswith(prefix):
                yield self._pack(key, cursor.value)
                found = cursor.next()

    def _pack(self, key: bytes, value: Any) -> RowPack:
        with self._lock:
            pack = self._packs.get(key)
            if pack is not None:
                self._packs.move_to_end(key)
                return pack
        pack = RowPack(value())
        with self._lock:
            self._packs[key] = pack
            if len(self._packs) > _PACKS_KEPT:
                self._packs.popitem(last=False)
        return pack

    def _forget_pack(self, key: bytes) -> None:
        with self._lock:
            self._packs.pop(key, None)

    def _numbers(self, directory: int, epoch: int, first: str, last: str) -> dict[str, tuple[str, str]]:
        """Return sort name -> (etag, number) of the rows from `first` to `last`, and of some around them."""
        known: dict[str, tuple[str, str]] = {}
        for pack in self._packs_from(directory, epoch, first):
            numbers = pack.fields[FIELDS - 1 :: FIELDS]
            known.update(zip(pack.names, zip(pack.fields[1::FIELDS], numbers, strict=True), strict=True))
            if pack.names[-1] >= last:
                break
        with self._lock:
            late = dict(self._late.get((directory, epoch), {}))
        known.update((name, (row.etag, str(row.number))) for name, row in late.items())
        return known

    def _fields_between(self, directory: int, epoch: int, after: str, end: str) -> list[str]:
        fields: list[str] = []
        for pack in self._packs_from(directory, epoch, after + "\0"):
            start, stop = bisect_right(pack.names, after), bisect_right(pack.names, end)
            fields += pack.fields[start * FIELDS : stop * FIELDS]
            if stop < len(pack):
                break
        return fields

    # ---- rows in memory

    def _take_late(self, directory: int, epoch: int) -> dict[str, ListedEntry]:
        with self._lock:
            late = self._late.pop((directory, epoch), {})
            self._late_count -= len(late)
        return late

    def _forget_late(self, directory: int, epoch: int, names: Iterable[str]) -> None:
        with self._lock:
            late = self._late.get((directory, epoch), {})
            for name in names:
                self._late_count -= late.pop(name, None) is not None

    def _write_late(self, directory: int, epoch: int) -> None:
        """Write the rows of a directory that are in memory, rewriting each affected pack once."""
        late = self._take_late(directory, epoch)
        names = deque(sorted(late))
        with self._writing() as txn:
            while names:
                pack, end = self._take_pack(txn, directory, epoch, names[0])
                while names and (end is None or names[0] <= end):
                    pack.put(late[names.popleft()])
                self._write(txn, directory, epoch, pack.fields)

    # ---- packs

    def _take_pack(
        self, txn: lmdb.Transaction, directory: int, epoch: int, sort_name: str
    ) -> tuple[RowPack, str | None]:
        """Remove and return the pack that a sort name belongs to, and the last name that does; None: no upper bound."""
        prefix = _PREFIX.pack(directory, epoch)
        with txn.cursor() as cursor:
            end: str | None = None
            found = cursor.set_range(_key(directory, epoch, sort_name))
            if found and bytes(cursor.key()).startswith(prefix):
                end = bytes(cursor.key())[len(prefix) :].decode()
            else:
                # After all others: append to the last pack, unless it is full.
                found = cursor.prev() if found else cursor.last()
                found = found and bytes(cursor.key()).startswith(prefix)
                found = found and bytes(cursor.value()).count(b"\0") < (PACK_ROWS_MAX // 2) * FIELDS
            if not found:
                return RowPack(b""), None
            pack = RowPack(bytes(cursor.value()))
            self._forget_pack(bytes(cursor.key()))
            cursor.delete()
            return pack, end

    def _take_overlapping(
        self, txn: lmdb.Transaction, directory: int, epoch: int, after: str, end: str
    ) -> Iterator[RowPack]:
        """Remove and yield, one by one, the packs that have rows after `after` up to `end`."""
        prefix = _PREFIX.pack(directory, epoch)
        with txn.cursor() as cursor:
            found = cursor.set_range(_key(directory, epoch, after + "\0"))
            while found and bytes(cursor.key()).startswith(prefix):
                key = bytes(cursor.key())
                pack = self._pack(key, cursor.value)
                if pack.names[0] > end:
                    return
                self._forget_pack(key)
                found = cursor.delete()
                yield pack

    def _write(self, txn: lmdb.Transaction, directory: int, epoch: int, fields: list[str]) -> None:
        """Write rows that lie between other packs as one pack, or as several if there are many."""
        half = PACK_ROWS_MAX // 2 * FIELDS
        step = len(fields) if len(fields) <= PACK_ROWS_MAX * FIELDS else half
        for start in range(0, len(fields), step or 1):
            some = fields[start : start + step]
            key = _key(directory, epoch, some[-FIELDS])
            txn.put(key, joined(some))
            self._forget_pack(key)

    @contextmanager
    def _writing(self) -> Iterator[lmdb.Transaction]:
        try:
            with self._env.begin(write=True) as txn:
                yield txn
        except lmdb.Error as exc:
            with self._lock:
                self._packs.clear()
            raise LocalDiskError(
                f"{self._directory}: listings cannot be stored ({exc}); is the disk full?"
            ) from exc


def _open(path: str, **options: Any) -> lmdb.Environment:
    try:
        return lmdb.open(path, **options)
    except lmdb.Error as exc:
        raise LocalDiskError(f"{path}: cannot be opened ({exc}); is the disk full?") from exc


def _key(directory: int, epoch: int, sort_name: str) -> bytes:
    return _PREFIX.pack(directory, epoch) + sort_name.encode()
