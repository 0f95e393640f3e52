"""Results of LIST, stored on disk, so that a directory of a million objects costs no memory.

The rows are not kept across restarts: their file is emptied by each mount, and never synced. While the disk refuses
rows they are kept in memory, up to MEMORY_BYTES. Above that, the listing that was used least recently is dropped.

A directory is a number chosen by the caller, and each listing of it has an epoch. Rows sort by sort name, in the
bucket's own order, where a subdirectory's sort name ends with '/'. So "everything up to here is known" is a single
comparison. A key that is also a prefix has two rows.

One record holds a pack of rows, usually one page of LIST: a million records would take ten times as long as their LIST.
The last sort name of each pack is in memory. Single rows are buffered in memory and written a few hundred at a time.
Otherwise each published file would cost the rewriting of a pack.

Invariants:
1. The packs of one epoch do not overlap.
2. A row in memory takes precedence over a row of its name in a pack. Reads merge both.
3. A listing of which a pack is lost has no rows: each access raises ListingLost until it is dropped.
4. `_lock` owns all listings. Rows that are taken out to be written again come back before it is released.

Stores packs of listing rows: in one file, or in memory while the disk refuses them. Blocking, thread-safe.

The file is scratch space: never synced, and emptied by each mount. It is read with pread, not mapped: a page fault on a
disk that has failed would be a SIGBUS, which ends the daemon.

Invariants:
1. What `read` returns is what was stored. A pack that the disk lost or changed is an error.
2. `_lock` owns all that may change: the descriptor, the free space, the counts, and where each pack is. Bytes are read
   and written without it, at offsets that no other thread has.

Rows of listings: one name as LIST shows it, and packs of such rows as stored on disk.
"""

import json
import logging
import os
import shutil
import threading
import time
from bisect import bisect_left, bisect_right
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import NamedTuple
from zlib import crc32

from fusecache.model.errors import ListingLost, LocalDiskError

log = logging.getLogger(__name__)

# Space is given out in steps of an eighth of the next lower power of two, so that freed space fits later packs.
_BLOCK_BYTES = 4096
_BLOCKS_PER_STEP_MIN = 8
# After a refused write, the disk is not tried again for this long.
RETRY_SECONDS = 5.0


@dataclass(eq=False, slots=True)
class StoredPack:
    """Where one pack is. data: its bytes, if it is in memory; else it is in the file at `offset`."""

    size: int
    checksum: int = 0
    offset: int = 0
    data: bytes | None = None


class RowFile:
    """The file, and what it could not take. memory_bytes: of packs in memory. refused: writes that the disk refused."""

    def __init__(self, path: Path) -> None:
        """Create or empty the file. A disk that refuses that is tried again later."""
        self._path = path
        self._lock = threading.Lock()
        self._descriptor = -1
        self._end = 0
        # Size -> offsets.
        self._free: dict[int, list[int]] = {}
        self._retry_at = 0.0
        self.memory_bytes = 0
        self.refused = 0
        self.last_error = ""

    def close(self) -> None:
        """Close the file, which no call uses any more. All packs are gone."""
        with self._lock:
            if self._descriptor >= 0:
                os.close(self._descriptor)
                self._descriptor = -1

    @property
    def is_refused(self) -> bool:
        """Whether the disk refused the last write, or lost a pack since."""
        return self._retry_at > 0

    def store(self, data: bytes) -> StoredPack:
        """Store a pack: in the file, or in memory if the disk refuses it."""
        pack = StoredPack(len(data), data=data)
        with self._lock:
            self.memory_bytes += pack.size
        self.move_to_disk(pack)
        return pack

    def move_to_disk(self, pack: StoredPack) -> bool:
        """Write a pack that is in memory into the file, unless the disk refused one just now; return whether it is."""
        size = _size(pack.size)
        with self._lock:
            data, known_refusals = pack.data, self.refused
            if data is None or (self._retry_at and time.monotonic() < self._retry_at):
                return data is None
            try:
                descriptor = self._opened()
            except OSError as exc:
                self._on_refused(exc.strerror or str(exc))
                return False
            offset = self._take(size)
        try:
            _write(descriptor, offset, data)
        except OSError as exc:
            with self._lock:
                self._free.setdefault(size, []).append(offset)
                self._on_refused(exc.strerror or str(exc))
            return False
        with self._lock:
            if pack.data is None:  # freed by another thread
                self._free.setdefault(size, []).append(offset)
                return True
            pack.checksum, pack.offset, pack.data = crc32(data), offset, None
            self.memory_bytes -= pack.size
            if self.refused == known_refusals:  # else the disk failed during this write
                self._retry_at = 0.0
        return True

    def read(self, pack: StoredPack) -> bytes:
        """Return a pack's bytes. Raises LocalDiskError if the disk no longer has them."""
        with self._lock:
            in_memory, descriptor, offset = pack.data, self._descriptor, pack.offset
        if in_memory is not None:
            return in_memory
        try:
            data = os.pread(descriptor, pack.size, offset)
        except OSError as exc:
            with self._lock:
                self._on_refused(exc.strerror or str(exc))
            raise LocalDiskError(f"{self._path}: {exc.strerror}; its directory is listed again") from exc
        if len(data) != pack.size or crc32(data) != pack.checksum:
            with self._lock:
                self._on_refused("written rows are damaged")
            raise LocalDiskError(
                f"{self._path}: the disk lost what was written; the directory is listed again"
            )
        return data

    def free(self, pack: StoredPack) -> None:
        """Give a pack's space back."""
        with self._lock:
            if pack.data is not None:
                self.memory_bytes -= pack.size
                pack.data = None
            else:
                self._free.setdefault(_size(pack.size), []).append(pack.offset)

    # ---- private: the caller holds the lock

    def _take(self, size: int) -> int:
        offsets = self._free.get(size)
        if offsets:
            return offsets.pop()
        self._end += size
        return self._end - size

    def _opened(self) -> int:
        if self._descriptor < 0:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            flags = os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
            self._descriptor = os.open(self._path, flags, 0o600)
        return self._descriptor

    def _on_refused(self, error: str) -> None:
        self.refused += 1
        self.last_error = error
        self._retry_at = time.monotonic() + RETRY_SECONDS


def _write(descriptor: int, offset: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        written = os.pwrite(descriptor, view, offset)
        view, offset = view[written:], offset + written


def _size(count: int) -> int:
    """Return the space that a pack of so many bytes gets."""
    blocks = -(-count // _BLOCK_BYTES)
    step = max(1, (1 << max(0, blocks.bit_length() - 1)) // _BLOCKS_PER_STEP_MIN)
    return -(-blocks // step) * step * _BLOCK_BYTES


# Cannot occur in a name, nor in JSON text.
_SEPARATOR = "\0"
FIELDS = 6
_UNKNOWN = "", "", "0"


class ListedEntry(NamedTuple):
    """One name as LIST shows it. Directories have size 0 and no etag. metadata is known only after a HEAD.

    number: the inode number shown for it while it has no node; 0: none assigned.
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
        """The name as it sorts in the bucket."""
        return f"{self.name}/" if self.is_directory else self.name


class RowPack:
    """The rows of one record, decoded on demand: their fields one after the other, and the list of sort names.

    It is only changed before it is written, as other threads may read it afterwards.
    """

    def __init__(self, raw: bytes) -> None:
        self.fields = raw.decode().split(_SEPARATOR) if raw else []
        self.names = self.fields[::FIELDS]

    def __len__(self) -> int:
        return len(self.names)

    def row(self, index: int) -> ListedEntry:
        """Return the row at an index."""
        name, etag, size, modified, metadata, number = self.fields[index * FIELDS : (index + 1) * FIELDS]
        facts = json.loads(metadata) if metadata else None
        if name[-1] == "/":
            return ListedEntry(name[:-1], True, 0, "", 0.0, facts, int(number))  # noqa: FBT003 -- hot path
        return ListedEntry(name, False, int(size), etag, float(modified), facts, int(number))  # noqa: FBT003 -- hot path

    def rows(self, start: int, stop: int) -> list[ListedEntry]:
        """Return the rows at these indices."""
        return [self.row(index) for index in range(start, min(stop, len(self.names)))]

    def find(self, sort_name: str) -> int | None:
        """Return the index of a row, or None."""
        index = bisect_left(self.names, sort_name)
        return index if index < len(self.names) and self.names[index] == sort_name else None

    def put(self, row: ListedEntry) -> None:
        """Insert or replace a row."""
        sort_name = row.sort_name
        index = bisect_left(self.names, sort_name)
        stop = index + (self.find(sort_name) is not None)
        self.fields[index * FIELDS : stop * FIELDS] = fields_of(row)
        self.names[index:stop] = [sort_name]

    def remove(self, sort_name: str) -> None:
        """Remove a row, which must be there."""
        index = bisect_left(self.names, sort_name)
        del self.fields[index * FIELDS : (index + 1) * FIELDS]
        del self.names[index]


def joined(fields: Sequence[str]) -> bytes:
    """Return the record of a pack's fields."""
    return _SEPARATOR.join(fields).encode()


def fields_of(row: ListedEntry) -> tuple[str, ...]:
    """Return the FIELDS fields of a row."""
    metadata = json.dumps(row.metadata) if row.metadata is not None else ""
    etag = row.etag.replace(_SEPARATOR, "")
    return row.sort_name, etag, str(row.size), repr(row.modified), metadata, str(row.number)


def page_fields(
    rows: Sequence[ListedEntry], known: Mapping[str, tuple[str, str, str]], first_number: int
) -> list[str]:
    """Return the fields of a page's rows. A row keeps the number that the same version has, or gets a new one.

    known: sort name -> (etag, time, number). Built column by column, for speed: listings bring over a thousand rows a
    second.
    """
    fields = [""] * (len(rows) * FIELDS)
    names = [f"{row.name}/" if row.is_directory else row.name for row in rows]
    etags = [row.etag.replace(_SEPARATOR, "") for row in rows]
    numbers = []
    times = [repr(row.modified) for row in rows]
    for number, name, etag, modified in zip(count(first_number), names, etags, times, strict=False):
        old_etag, old_time, old_number = known.get(name, _UNKNOWN)
        is_same = old_etag == etag and old_time == modified and old_number != "0"
        numbers.append(old_number if is_same else str(number))
    fields[0::FIELDS], fields[1::FIELDS] = names, etags
    fields[2::FIELDS] = [str(row.size) for row in rows]
    fields[3::FIELDS] = times
    fields[4::FIELDS] = ["" if row.metadata is None else json.dumps(row.metadata) for row in rows]
    fields[5::FIELDS] = numbers
    return fields


def numbers_in(fields: Sequence[str]) -> set[int]:
    """Return the inode numbers in a pack's fields."""
    return set(map(int, fields[FIELDS - 1 :: FIELDS]))


# Row limit of a pack that grows by single names. Pages have at most 1 000 rows.
PACK_ROWS_MAX = 2000
# Limits of single rows in memory: at LATE_ROWS a directory's rows are written, above LATE_ROWS_IN_ALL by each `put`.
LATE_ROWS = 256
LATE_ROWS_IN_ALL = 32_768
# Packs of a discarded listing that are removed at once, and packs in memory that follow one written to the disk.
_PACKS_DROPPED_AT_ONCE = 100
_PACKS_MOVED_AT_ONCE = 16
# Decoded packs kept, about 0.4 MB each for 1 000 rows: enough for this many directories written concurrently.
_PACKS_KEPT = 16
# Packs in memory while the disk refuses them: about 1.3 million rows of 100 bytes.
MEMORY_BYTES = 128 << 20


@dataclass(eq=False, slots=True)
class _Listing:
    """The packs of one epoch, by the last sort name of each, and its single rows in memory."""

    lasts: list[str] = field(default_factory=list)
    packs: list[StoredPack] = field(default_factory=list)
    late: dict[str, ListedEntry] = field(default_factory=dict)
    is_lost: bool = False


class Listings:
    """Rows of listings. A call takes 10 to 300 µs.

    Reads and `put`, `remove`, `replace` belong to the loop's thread. `put_page` and `drop` may run concurrently in
    other threads. Reads raise ListingLost, after the call that `watch_lost` asks for.
    """

    def __init__(self, directory: Path) -> None:
        try:
            if directory.exists():
                shutil.rmtree(directory)
        except OSError as exc:
            log.warning("old listings cannot be removed directory=%s error=%s", directory, exc)
        self._file = RowFile(directory / "rows")
        # In the order of their last use.
        self._listings: OrderedDict[tuple[int, int], _Listing] = OrderedDict()
        self._decoded: OrderedDict[StoredPack, RowPack] = OrderedDict()
        self._lock = threading.RLock()
        self._late_count = 0
        self._is_warned = False
        self._owner = threading.get_ident()
        self._on_lost: Callable[[int, int], None] = lambda _directory, _epoch: None

    def close(self) -> None:
        """Close. The rows are useless from now on."""
        self._file.close()

    def watch_lost(self, call: Callable[[int, int], None]) -> None:
        """Have `call(directory, epoch)` called before a method raises ListingLost, on the thread that made this."""
        self._on_lost = call

    @property
    def memory_bytes(self) -> int:
        """Bytes of rows that are in memory because the disk refused them."""
        return self._file.memory_bytes

    # ---- reading

    def get(self, directory: int, epoch: int, sort_name: str) -> ListedEntry | None:
        """Return one row, or None. Raises ListingLost."""
        late = self._late_rows(directory, epoch)
        if sort_name in late:
            return late[sort_name]
        for pack in self._packs_from(directory, epoch, sort_name):
            index = pack.find(sort_name)
            return None if index is None else pack.row(index)
        return None

    def named(self, directory: int, epoch: int, name: str) -> list[ListedEntry]:
        """Return the rows of a name: its file's, its directory's, both or none. Raises ListingLost."""
        rows = (self.get(directory, epoch, sort_name) for sort_name in (name, name + "/"))
        return [row for row in rows if row is not None]

    def scan(self, directory: int, epoch: int, after: str, limit: int) -> list[ListedEntry]:
        """Return up to `limit` rows after the sort name `after` ("" for the start), in order. Raises ListingLost."""
        rows: list[ListedEntry] = []
        for pack in self._packs_from(directory, epoch, after):
            start = bisect_right(pack.names, after)
            rows += pack.rows(start, start + limit - len(rows))
            if len(rows) == limit:
                break
        late = self._late_rows(directory, epoch)
        if not late:
            return rows
        # If the batch is full, packs after its last row have not been read.
        last = rows[-1].sort_name if len(rows) == limit else None
        merged = {row.sort_name: row for row in rows}
        merged |= {name: row for name, row in late.items() if name > after and (last is None or name <= last)}
        return [merged[name] for name in sorted(merged)][:limit]

    def iterate(self, directory: int, epoch: int, batch: int = 1000) -> Iterator[ListedEntry]:
        """Yield all rows, read in batches, so that rows may change between batches. Raises ListingLost."""
        after = ""
        while rows := self.scan(directory, epoch, after, batch):
            yield from rows
            after = rows[-1].sort_name

    def find_number(
        self, directory: int, epoch: int, number: int, first: str, last: str
    ) -> ListedEntry | None:
        """Return the row with an inode number, if it is among those from `first` to `last`. Raises ListingLost."""
        for row in self._late_rows(directory, epoch).values():
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
        `first_number` on. Raises ListingLost, and LocalDiskError if the disk refuses rows and memory holds too many.
        """
        if not rows:
            return set()
        known: dict[str, tuple[str, str, str]] = {}
        if older:
            try:
                known = self._numbers(directory, older, rows[0].sort_name, rows[-1].sort_name)
            except ListingLost:
                log.debug("older rows are lost directory=%d", directory)
        fields = page_fields(rows, known, first_number)
        self._write(directory, epoch, fields)
        return numbers_in(fields)

    def put(self, directory: int, epoch: int, entries: Iterable[ListedEntry]) -> None:
        """Add single rows. Raises what `put_page` raises, if a write was due."""
        with self._lock:
            listing = self._listing(directory, epoch)
            before = len(listing.late)
            for entry in entries:
                listing.late[entry.sort_name] = entry
            self._late_count += len(listing.late) - before
            is_full = len(listing.late) >= LATE_ROWS or self._late_count > LATE_ROWS_IN_ALL
        if is_full:
            self._write_late(directory, epoch)

    def remove(self, directory: int, epoch: int, sort_name: str) -> None:
        """Remove one row. Raises what `put_page` raises."""
        with self._lock:
            self._forget_late(directory, epoch, [sort_name])
            if self.get(directory, epoch, sort_name) is None:
                return
            pack, _ = self._take_pack(directory, epoch, sort_name)
            pack.remove(sort_name)
            self._write(directory, epoch, pack.fields)

    def replace(
        self, directory: int, epoch: int, after: str, end: str, rows: Sequence[ListedEntry], first_number: int
    ) -> set[int]:
        """Replace all rows after `after` up to `end` by a page; return the inode numbers of its rows.

        A row keeps the number that the same version had, else it gets the next one from `first_number` on. Raises what
        `put_page` raises.
        """
        with self._lock:
            new = page_fields(rows, self._numbers(directory, epoch, after, end), first_number)
            late = self._late_rows(directory, epoch)
            self._forget_late(directory, epoch, [name for name in late if after < name <= end])
            if new != self._fields_between(directory, epoch, after, end):
                before: list[str] = []
                behind: list[str] = []
                for pack in self._take_overlapping(directory, epoch, after, end):
                    before += pack.fields[: bisect_right(pack.names, after) * FIELDS]
                    behind += pack.fields[bisect_right(pack.names, end) * FIELDS :]
                self._write(directory, epoch, before + new + behind)
        return numbers_in(new)

    def drop(self, directory: int, epoch: int) -> bool:
        """Remove some packs of a discarded listing; return whether there are more."""
        with self._lock:
            listing = self._listings.get((directory, epoch))
            if listing is None:
                return False
            self._late_count -= len(listing.late)
            listing.late.clear()
            self._free(listing, _PACKS_DROPPED_AT_ONCE)
            if listing.packs:
                return True
            del self._listings[directory, epoch]
            return False

    # ---- private

    def _listing(self, directory: int, epoch: int) -> _Listing:
        """Return a listing, made if it is new; the caller holds the lock. Raises ListingLost."""
        listing = self._listings.setdefault((directory, epoch), _Listing())
        self._listings.move_to_end((directory, epoch))
        if listing.is_lost:
            raise self._lost(directory, epoch)
        return listing

    def _lost(self, directory: int, epoch: int) -> ListingLost:
        if threading.get_ident() == self._owner:
            self._on_lost(directory, epoch)
        return ListingLost("the rows of this directory were dropped; it is listed again")

    def _late_rows(self, directory: int, epoch: int) -> dict[str, ListedEntry]:
        """Return the single rows in memory; for the loop's thread, which alone changes them. Raises ListingLost."""
        listing = self._listings.get((directory, epoch))
        if listing is None:
            return {}
        if listing.is_lost:
            raise self._lost(directory, epoch)
        return listing.late

    def _packs_from(self, directory: int, epoch: int, sort_name: str) -> Iterator[RowPack]:
        """Yield the pack that holds, or would hold, a sort name, and all packs after it. Raises ListingLost."""
        while True:
            with self._lock:
                listing = self._listings.get((directory, epoch))
                if listing is None:
                    return
                self._listings.move_to_end((directory, epoch))
                index = bisect_left(listing.lasts, sort_name)
                if index == len(listing.lasts):
                    return
                last = listing.lasts[index]
                pack = self._decode((directory, epoch), listing, listing.packs[index])
            yield pack
            sort_name = last + "\0"

    def _decode(self, key: tuple[int, int], listing: _Listing, stored: StoredPack) -> RowPack:
        """Return a pack's rows; the caller holds the lock. If the disk lost them, the whole listing is lost."""
        pack = self._decoded.get(stored)
        if pack is not None:
            self._decoded.move_to_end(stored)
            return pack
        try:
            pack = RowPack(self._file.read(stored))
        except LocalDiskError as exc:
            self._lose(listing)
            self._warn()
            raise self._lost(*key) from exc
        self._decoded[stored] = pack
        if len(self._decoded) > _PACKS_KEPT:
            self._decoded.popitem(last=False)
        return pack

    def _lose(self, listing: _Listing) -> None:
        listing.is_lost = True
        self._late_count -= len(listing.late)
        listing.late.clear()
        self._free(listing, len(listing.packs))

    def _free(self, listing: _Listing, count: int) -> None:
        for stored in listing.packs[:count]:
            self._decoded.pop(stored, None)
            self._file.free(stored)
        del listing.packs[:count], listing.lasts[:count]

    def _numbers(self, directory: int, epoch: int, first: str, last: str) -> dict[str, tuple[str, str, str]]:
        """Return sort name -> (etag, time, number) of the rows from `first` to `last`, and of some around them."""
        known: dict[str, tuple[str, str, str]] = {}
        with self._lock:
            for pack in self._packs_from(directory, epoch, first):
                facts = (pack.fields[place::FIELDS] for place in (1, 3, FIELDS - 1))
                known.update(zip(pack.names, zip(*facts, strict=True), strict=True))
                if pack.names[-1] >= last:
                    break
            listing = self._listings.get((directory, epoch))
            late = dict(listing.late) if listing is not None else {}
        known.update((name, (row.etag, repr(row.modified), str(row.number))) for name, row in late.items())
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

    def _forget_late(self, directory: int, epoch: int, names: Iterable[str]) -> None:
        late = self._late_rows(directory, epoch)
        with self._lock:
            for name in names:
                self._late_count -= late.pop(name, None) is not None

    def _write_late(self, directory: int, epoch: int) -> None:
        """Write the rows of a directory that are in memory, rewriting each affected pack once."""
        with self._lock:
            listing = self._listing(directory, epoch)
            late, listing.late = listing.late, {}
            self._late_count -= len(late)
            names = deque(sorted(late))
            while names:
                pack, end = self._take_pack(directory, epoch, names[0])
                while names and (end is None or names[0] <= end):
                    pack.put(late[names.popleft()])
                self._write(directory, epoch, pack.fields)

    # ---- packs

    def _take_pack(self, directory: int, epoch: int, sort_name: str) -> tuple[RowPack, str | None]:
        """Remove and return the pack that a sort name belongs to, and the last name that does; None: no upper bound."""
        with self._lock:
            listing = self._listing(directory, epoch)
            index = bisect_left(listing.lasts, sort_name)
            end: str | None = None
            if index < len(listing.lasts):
                end = listing.lasts[index]
            elif index == 0:
                return RowPack(b""), None
            else:
                # After all others: append to the last pack, unless it is full.
                index -= 1
                if len(self._decode((directory, epoch), listing, listing.packs[index])) >= PACK_ROWS_MAX // 2:
                    return RowPack(b""), None
            return self._take((directory, epoch), index), end

    def _take(self, key: tuple[int, int], index: int) -> RowPack:
        """Remove and return a pack; the caller holds the lock."""
        listing = self._listings[key]
        stored = listing.packs[index]
        pack = self._decode(key, listing, stored)
        del listing.packs[index], listing.lasts[index], self._decoded[stored]
        self._file.free(stored)
        return pack

    def _take_overlapping(self, directory: int, epoch: int, after: str, end: str) -> Iterator[RowPack]:
        """Remove and yield, one by one, the packs that have rows after `after` up to `end`."""
        with self._lock:
            listing = self._listing(directory, epoch)
            index = bisect_right(listing.lasts, after)
            while index < len(listing.lasts):
                if self._decode((directory, epoch), listing, listing.packs[index]).names[0] > end:
                    return
                yield self._take((directory, epoch), index)

    def _write(self, directory: int, epoch: int, fields: list[str]) -> None:
        """Write rows that lie between other packs as one pack, or as several if there are many."""
        half = PACK_ROWS_MAX // 2 * FIELDS
        step = len(fields) if len(fields) <= PACK_ROWS_MAX * FIELDS else half
        for start in range(0, len(fields), step or 1):
            some = fields[start : start + step]
            stored = self._file.store(joined(some))
            with self._lock:
                try:
                    listing = self._listing(directory, epoch)
                except ListingLost:
                    self._file.free(stored)
                    raise
                index = bisect_left(listing.lasts, some[-FIELDS])
                listing.lasts.insert(index, some[-FIELDS])
                listing.packs.insert(index, stored)
        if self._file.memory_bytes:
            self._shrink_memory(directory, epoch)

    def _shrink_memory(self, directory: int, epoch: int) -> None:
        """Move packs to the disk if it works again; else drop listings while they exceed MEMORY_BYTES."""
        with self._lock:
            if not self._file.is_refused:
                self._is_warned = False
                packs = (pack for listing in self._listings.values() for pack in listing.packs)
                for pack in [each for each in packs if each.data is not None][:_PACKS_MOVED_AT_ONCE]:
                    self._file.move_to_disk(pack)
                return
            self._warn()
            for key, listing in list(self._listings.items()):
                if self._file.memory_bytes <= MEMORY_BYTES:
                    return
                if any(pack.data is not None for pack in listing.packs):
                    self._lose(listing)
                    if key == (directory, epoch):
                        self._lost(*key)
                        raise LocalDiskError(
                            f"{self._file.last_error}: this directory has too many names to list it in memory "
                            f"({MEMORY_BYTES >> 20} MiB); free or replace the cache disk"
                        )

    def _warn(self) -> None:
        if not self._is_warned:
            self._is_warned = True
            log.warning(
                "the cache disk refuses listings, keeping them in memory error=%s; free space or replace the disk",
                self._file.last_error,
            )
