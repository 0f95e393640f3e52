"""The cache index: which granules of which objects are on the local disk, with their checksums.

It is an LMDB environment without syncs. After `kill -9` the kernel still has every committed page. After a power loss
LMDB may be torn, and reading a torn LMDB can crash the process. So a small JSON file beside it records the boot in
which it was opened, and whether it was closed cleanly. After an unclean stop in another boot the index is discarded
unopened, together with the files that it describes.

Tables (integers big-endian, so that keys sort by number):
- `objects`: blake2b-256(key NUL etag) -> number u64, size u64, blocks u32, key length u16, key, etag (UTF-8)
- `files`:   number u64 -> the object's digest
- `blocks`:  number u64, block u32 -> granule mask u16, stamp u32, bytes u32, 16 checksums of 8 bytes
- `lots`:    4 bytes of blake2b(number, lot), number u64, lot u32 -> nothing; a lot is 8 neighbouring blocks of a file,
  of which at least one has a row
- `meta`:    `next_number`, `used_bytes`, `clock` -> u64

Invariants:
1. `used_bytes` is the sum of all block rows, in every committed state.
2. An object has a row exactly as long as one of its blocks has one; `blocks` counts them.
3. A file number is issued only once.

Blocking. Calls must not overlap with each other, but may come from different threads. Once open, every call raises
LocalDiskError for errors of LMDB and of the disk.

The state file beside the cache index: whether the last run closed the index cleanly, and in which boot it was open.

It decides, without opening the index, whether the index can be trusted.
"""

import hashlib
import json
import os
import random
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lmdb

from fusecache.disk.native import replace_synced
from fusecache.index.lmdb_format import DiskReserve, open_environment
from fusecache.model.errors import LocalDiskError, StateError
from fusecache.model.objects import GRANULES_PER_BLOCK, ObjectId

FORMAT = 2
STATE_NAME = "state.json"


@dataclass(frozen=True, slots=True)
class Opening:
    """How the index was found. discarded: folders to be deleted; unclean: unindexed cache files are possible."""

    discarded: tuple[Path, ...]
    unclean: bool


def write_state(path: Path, *, boot_id: str, clean: bool) -> None:
    """Replace the state file, synced: it must never say clean about rows that are not on disk."""
    replace_synced(path, (json.dumps({"format": FORMAT, "boot_id": boot_id, "clean": clean}),))


def prepare(directory: Path, boot_id: str, described: Sequence[Path]) -> Opening:
    """Judge what the last run left, without opening it; rename untrusted folders so that they can be deleted."""
    leftovers = [
        found
        for folder in (directory, *described)
        for found in folder.parent.glob(f"{folder.name}.discarded-*")
    ]
    state_path = directory / STATE_NAME
    try:
        state = json.loads(state_path.read_text())
        found_format, clean, same_boot = state["format"], state["clean"], state["boot_id"] == boot_id
    except FileNotFoundError:
        # No state file: never used, or a start that died at once. Rows without it are from an unknown boot.
        found_format, clean, same_boot = FORMAT, not (directory / "rows").exists(), False
    except (ValueError, KeyError, TypeError) as exc:
        raise StateError(
            f"{state_path} cannot be read ({exc}): move {directory} away to start with an empty cache"
        ) from exc
    if not isinstance(found_format, int) or found_format > FORMAT:
        raise StateError(
            f"{directory} has format {found_format}, but this fusecache supports {FORMAT}: use the newer fusecache"
        )
    if found_format == FORMAT and (clean or same_boot):
        return Opening(tuple(leftovers), unclean=not clean)
    for folder in (*described, directory):  # the index last: while it is there, its stop counts as unclean
        if folder.exists():
            discarded = folder.with_name(f"{folder.name}.discarded-{os.urandom(4).hex()}")
            folder.rename(discarded)
            leftovers.append(discarded)
    return Opening(tuple(leftovers), unclean=False)


_WAY_OUT = (
    "free space on that disk or repair it, or choose another cache_dir; "
    "keep this one: it may hold changes that the bucket does not have"
)
# Address space, not memory: 64 GiB of rows describe about 400 TiB of cache.
_MAP_BYTES = 64 << 30
# Disk space ahead of the rows: a daemon starts while the disk is full, and what it evicts leaves the index.
_RESERVE_BYTES = 128 << 10
_OBJECT = struct.Struct(">QQIH")
_NUMBER = struct.Struct(">Q")
_BLOCK_KEY = struct.Struct(">QI")
_ALL_BLOCKS = 1 << 32
_BLOCK = struct.Struct(">HII")
# Neighbouring blocks are sampled, and so evicted, together: one punched hole, and one GET to fetch them again.
_LOT_BLOCKS = 8
_MIX_BYTES = 4
_STEPS = 8
_LOT_KEY = struct.Struct(f">{_MIX_BYTES}sQI")
_CHECKSUMS_BYTES = GRANULES_PER_BLOCK * 8
_DIGEST_BYTES = 32
_FIRST_NUMBER = 1
# Names that a mount without its bucket keeps in memory: 270 MB.
NAMES_MAX = 500_000


@dataclass(frozen=True, slots=True)
class BlockRow:
    """One cached block. mask: the granules on disk; stamp: traffic clock of the last use.

    size: bytes on disk; checksums: 16 x 8 bytes.
    """

    mask: int
    stamp: int
    size: int
    checksums: bytes


@dataclass(frozen=True, slots=True)
class ObjectRow:
    """One object with cached blocks. size: of the object, in bytes; blocks: how many have rows."""

    object_id: ObjectId
    number: int
    size: int
    blocks: int


@dataclass(frozen=True, slots=True)
class ObjectChange:
    """New rows of one object; None removes a block's row."""

    object_id: ObjectId
    number: int
    size: int
    rows: Mapping[int, BlockRow | None]


@dataclass(frozen=True, slots=True)
class Evicted:
    """The result of an eviction: bytes of the removed rows, and numbers of the files that have no row left."""

    size: int
    emptied: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class CachedBlock:
    """One cached block with the object that it belongs to. block: counted from the object's start."""

    object_id: ObjectId
    object_size: int
    number: int
    block: int
    row: BlockRow


@dataclass(frozen=True, slots=True)
class ScanCursor:
    """The position of a scan of the index: a block of the object with this digest."""

    digest: bytes = b""
    block: int = 0


def read_boot_id() -> str:
    """Return the kernel's id of this boot."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


class CacheIndex:
    """The open index. `opening` says in which state the last run left it."""

    def __init__(self, directory: Path, *, boot_id: str, described: Sequence[Path] = ()) -> None:
        """Open or create the index in `directory`. O(1): nothing is scanned.

        described: folders whose content is useless without this index; they are discarded with it. Raises StateError
        for a newer format, or if the folder cannot be used.
        """
        self._directory = directory
        self._state_path = directory / STATE_NAME
        self._boot_id = boot_id
        self._is_distrusted = False
        try:
            self.opening = prepare(directory, boot_id, described)
            directory.mkdir(parents=True, exist_ok=True)
            if not self.opening.unclean:  # else the file says so, and the disk may be full
                write_state(self._state_path, boot_id=boot_id, clean=False)
            self._env = open_environment(
                directory / "rows",
                map_size=_MAP_BYTES,
                max_dbs=5,
                sync=False,
                metasync=False,
                readahead=False,
            )
        except (OSError, lmdb.Error) as exc:
            raise StateError(f"the cache index in {directory} cannot be opened: {exc}; {_WAY_OUT}") from exc
        self._objects = self._env.open_db(b"objects")
        self._files = self._env.open_db(b"files")
        self._blocks = self._env.open_db(b"blocks")
        self._lots = self._env.open_db(b"lots")
        self._meta = self._env.open_db(b"meta")
        self._reserve = DiskReserve(self._env, directory / "rows", _RESERVE_BYTES)
        self._reserve.top_up()

    def close(self, *, clean: bool = True) -> None:
        """Close. clean: sync everything and record that. Raises LocalDiskError, after closing."""
        try:
            if clean and not self._is_distrusted:
                self._env.sync(force=True)
        except lmdb.Error as exc:
            clean = False
            raise LocalDiskError(f"the cache index cannot be synced: {exc}") from exc
        finally:
            self._env.close()
        if clean and not self._is_distrusted:
            self._mark(clean=True)

    def distrust(self) -> None:
        """The index cannot be read: make the next start discard it unopened. Raises LocalDiskError."""
        self._boot_id, self._is_distrusted = "", True
        self._mark(clean=False)

    def size_bytes(self) -> int:
        """Return the disk usage of the index itself. Raises LocalDiskError."""
        try:
            return (self._directory / "rows" / "data.mdb").stat().st_blocks * 512
        except OSError as exc:
            raise LocalDiskError(f"the cache index is missing or unreadable: {exc}") from exc

    def used_bytes(self) -> int:
        """Return the bytes of all rows."""
        with self._begin() as txn:
            return self._read_meta(txn, b"used_bytes", 0)

    def lease_numbers(self, count: int) -> int:
        """Reserve `count` file numbers for the caller; return the first."""
        with self._begin(write=True) as txn:
            first = self._read_meta(txn, b"next_number", _FIRST_NUMBER)
            txn.put(b"next_number", _NUMBER.pack(first + count), db=self._meta)
        return first

    def find(self, object_id: ObjectId) -> ObjectRow | None:
        """Return the row of an object, None if nothing of it is cached."""
        with self._begin() as txn:
            value = txn.get(_digest(object_id), db=self._objects)
        return _unpack_object(value) if value is not None else None

    def without_rows(self, numbers: Iterable[int]) -> list[int]:
        """Return the file numbers that belong to no object."""
        with self._begin(db=self._files) as txn:
            return [number for number in numbers if txn.get(_NUMBER.pack(number)) is None]

    def block_rows(self, number: int, first: int, stop: int) -> dict[int, BlockRow]:
        """Return the rows of blocks first..stop-1 of a file."""
        rows: dict[int, BlockRow] = {}
        with self._begin(db=self._blocks) as txn, txn.cursor() as cursor:
            found = cursor.set_range(_BLOCK_KEY.pack(number, first))
            while found:
                key_number, block = _BLOCK_KEY.unpack(cursor.key())
                if key_number != number or block >= stop:
                    break
                rows[block] = _unpack_block(cursor.value())
                found = cursor.next()
        return rows

    def sizes(self, blocks: Iterable[tuple[int, int]]) -> dict[tuple[int, int], int]:
        """Return the bytes on disk of each (number, block) pair that has a row."""
        found = {}
        with self._begin(db=self._blocks) as txn:
            for pair in blocks:
                value = txn.get(_BLOCK_KEY.pack(*pair))
                if value is not None:
                    found[pair] = _unpack_block(value).size
        return found

    def walk(
        self, place: ScanCursor, is_wanted: Callable[[str], bool], *, most_objects: int, most_blocks: int
    ) -> tuple[list[CachedBlock], ScanCursor | None]:
        """Return the next blocks of objects whose key is wanted, and the next cursor; None at the end.

        A call is bounded: it examines at most `most_objects` objects and returns at most `most_blocks` blocks. Objects
        added or removed between two calls may be missed; all others are returned once.
        """
        found: list[CachedBlock] = []
        with self._begin() as txn, txn.cursor(self._objects) as objects, txn.cursor(self._blocks) as blocks:
            there = objects.set_range(place.digest) if place.digest else objects.first()
            for _ in range(most_objects):
                if not there:
                    return found, None
                digest = bytes(objects.key())
                row = _unpack_object(objects.value())
                if is_wanted(row.object_id.key):
                    first = place.block if digest == place.digest else 0
                    more = blocks.set_range(_BLOCK_KEY.pack(row.number, first))
                    while more:
                        number, block = _BLOCK_KEY.unpack(blocks.key())
                        if number != row.number:
                            break
                        if len(found) >= most_blocks:
                            return found, ScanCursor(digest, block)
                        found.append(
                            CachedBlock(row.object_id, row.size, number, block, _unpack_block(blocks.value()))
                        )
                        more = blocks.next()
                there = objects.next()
            return found, ScanCursor(bytes(objects.key())) if there else None

    def clock(self) -> int:
        """Return the traffic clock of the last `apply`."""
        with self._begin() as txn:
            return self._read_meta(txn, b"clock", 0)

    def apply(self, changes: Iterable[ObjectChange], clock: int) -> None:
        """Write many rows, and the traffic clock of their stamps, in one transaction."""
        with self._begin(write=True) as txn:
            used = self._read_meta(txn, b"used_bytes", 0)
            for change in changes:
                used += self._apply_one(txn, change)
            txn.put(b"used_bytes", _NUMBER.pack(used), db=self._meta)
            txn.put(b"clock", _NUMBER.pack(clock), db=self._meta)

    def evict(self, blocks: Iterable[tuple[int, int]]) -> Evicted:
        """Remove the rows of (number, block) pairs in one transaction. Pairs without a row are ignored."""
        by_number: dict[int, list[int]] = {}
        for number, block in blocks:
            by_number.setdefault(number, []).append(block)
        freed = 0
        emptied: list[int] = []
        with self._begin(write=True) as txn:
            for number, file_blocks in by_number.items():
                digest = txn.get(_NUMBER.pack(number), db=self._files)
                value = txn.get(digest, db=self._objects) if digest is not None else None
                if value is None:
                    continue
                row = _unpack_object(value)
                change = ObjectChange(row.object_id, number, row.size, dict.fromkeys(file_blocks))
                freed -= self._apply_one(txn, change)
                if txn.get(_NUMBER.pack(number), db=self._files) is None:
                    emptied.append(number)
            used = self._read_meta(txn, b"used_bytes", 0)
            txn.put(b"used_bytes", _NUMBER.pack(used - freed), db=self._meta)
        return Evicted(freed, tuple(emptied))

    def remove_object(self, object_id: ObjectId) -> Evicted:
        """Remove an object with all its rows. A missing object is ignored."""
        row = self.find(object_id)
        if row is None:
            return Evicted(0, ())
        return self.evict([(row.number, block) for block in self.block_rows(row.number, 0, _ALL_BLOCKS)])

    def rename_object(self, old: ObjectId, new: ObjectId) -> None:
        """Let the rows of an object be those of a copy of it. A missing object is ignored, as is one that is there."""
        with self._begin(write=True) as txn:
            value = txn.get(_digest(old), db=self._objects)
            if value is None or txn.get(_digest(new), db=self._objects) is not None:
                return
            row = _unpack_object(value)
            txn.delete(_digest(old), db=self._objects)
            change = ObjectChange(new, row.number, row.size, {})
            txn.put(_digest(new), _pack_object(change, row.blocks), db=self._objects)
            txn.put(_NUMBER.pack(row.number), _digest(new), db=self._files)

    def objects_of(self, numbers: Iterable[int]) -> dict[int, ObjectId]:
        """Return the object of each file number that has a row."""
        found: dict[int, ObjectId] = {}
        with self._begin() as txn:
            for number in numbers:
                digest = txn.get(_NUMBER.pack(number), db=self._files)
                value = txn.get(digest, db=self._objects) if digest is not None else None
                if value is not None:
                    found[number] = _unpack_object(value).object_id
        return found

    def newest_objects(self) -> dict[str, ObjectRow]:
        """Return the row of each key that has cached blocks; of several versions the one cached last.

        At most NAMES_MAX keys: the ones cached last.
        """
        found: dict[str, ObjectRow] = {}
        with self._begin(db=self._objects) as txn, txn.cursor() as cursor:
            for value in cursor.iternext(keys=False, values=True):
                row = _unpack_object(value)
                other = found.get(row.object_id.key)
                if other is None or other.number < row.number:
                    found[row.object_id.key] = row
                if len(found) > NAMES_MAX * 5 // 4:
                    found = _newest(found)
        return _newest(found)

    def sample(self, rng: random.Random, seeks: int, run: int) -> list[tuple[int, int, BlockRow]]:
        """Return rows from random places, in random order and without repeats: (number, block, row).

        seeks: number of random places; run: minimum rows from each, in whole lots, so that neighbours are evicted
        together. Every block is equally likely, whatever the size of its object.
        """
        found: dict[tuple[int, int], BlockRow] = {}
        with self._begin() as txn, txn.cursor(self._lots) as lots, txn.cursor(self._blocks) as blocks:
            for _ in range(seeks):
                there, rows = _seek_lot(lots, rng), 0
                while there and rows < run:
                    _, number, lot = _LOT_KEY.unpack(lots.key())
                    for block, row in _lot_rows(blocks, number, lot):
                        found[number, block] = row
                        rows += 1
                    there = lots.next()
        rows_found = [(number, block, row) for (number, block), row in found.items()]
        rng.shuffle(rows_found)
        return rows_found

    def _apply_one(self, txn: lmdb.Transaction, change: ObjectChange) -> int:
        """Write one object's rows; return the growth of the used bytes."""
        digest = _digest(change.object_id)
        value = txn.get(digest, db=self._objects)
        count = _unpack_object(value).blocks if value is not None else 0
        grown = 0
        for block, row in change.rows.items():
            key = _BLOCK_KEY.pack(change.number, block)
            old = txn.get(key, db=self._blocks)
            if old is not None:
                grown -= _unpack_block(old).size
                count -= 1
            if row is not None:
                txn.put(key, _BLOCK.pack(row.mask, row.stamp, row.size) + row.checksums, db=self._blocks)
                grown += row.size
                count += 1
            elif old is not None:
                txn.delete(key, db=self._blocks)
        self._update_lots(txn, change)
        if count:
            txn.put(digest, _pack_object(change, count), db=self._objects)
            txn.put(_NUMBER.pack(change.number), digest, db=self._files)
        else:
            txn.delete(digest, db=self._objects)
            txn.delete(_NUMBER.pack(change.number), db=self._files)
        return grown

    def _update_lots(self, txn: lmdb.Transaction, change: ObjectChange) -> None:
        """Make a lot exist exactly where there are rows."""
        lots: dict[int, bool] = {}
        for block, row in change.rows.items():
            lots[block // _LOT_BLOCKS] = lots.get(block // _LOT_BLOCKS, False) or row is not None
        with txn.cursor(self._blocks) as blocks:
            for lot, is_filled in lots.items():
                if is_filled or _lot_rows(blocks, change.number, lot):
                    txn.put(_lot_key(change.number, lot), b"", db=self._lots, overwrite=False)
                else:
                    txn.delete(_lot_key(change.number, lot), db=self._lots)

    @contextmanager
    def _begin(self, *, write: bool = False, db: Any = None) -> Iterator[lmdb.Transaction]:
        """Run one transaction. A full disk, a full map and damaged pages all raise LocalDiskError."""
        try:
            with self._env.begin(write=write, db=db) as txn:
                yield txn
            if write:
                self._reserve.top_up()
        except lmdb.Error as exc:
            raise LocalDiskError(f"the cache index in {self._directory} fails: {exc}; {_WAY_OUT}") from exc

    def _mark(self, *, clean: bool) -> None:
        try:
            write_state(self._state_path, boot_id=self._boot_id, clean=clean)
        except OSError as exc:
            raise LocalDiskError(f"{self._state_path} cannot be written: {exc}") from exc

    def _read_meta(self, txn: lmdb.Transaction, name: bytes, default: int) -> int:
        value = txn.get(name, db=self._meta)
        return int(_NUMBER.unpack(value)[0]) if value is not None else default


def _lot_key(number: int, lot: int) -> bytes:
    """Return a lot's key. It begins with a hash, so the order is unrelated to files and random places are fair."""
    mixed = hashlib.blake2b(_BLOCK_KEY.pack(number, lot), digest_size=_MIX_BYTES).digest()
    return _LOT_KEY.pack(mixed, number, lot)


def _seek_lot(lots: lmdb.Cursor, rng: random.Random) -> bool:
    """Put the cursor on a random lot; return whether there is any."""
    there = bool(lots.set_range(rng.randbytes(_MIX_BYTES)) or lots.first())
    # A few random steps from there. Without them, a lot whose hash is close behind another's is hardly ever hit.
    for _ in range(rng.randrange(_STEPS) if there else 0):
        there = lots.next() or lots.first()
    return there


def _lot_rows(blocks: lmdb.Cursor, number: int, lot: int) -> list[tuple[int, BlockRow]]:
    rows = []
    there = blocks.set_range(_BLOCK_KEY.pack(number, lot * _LOT_BLOCKS))
    while there:
        key_number, block = _BLOCK_KEY.unpack(blocks.key())
        if key_number != number or block >= (lot + 1) * _LOT_BLOCKS:
            break
        rows.append((block, _unpack_block(blocks.value())))
        there = blocks.next()
    return rows


def _newest(rows: dict[str, ObjectRow]) -> dict[str, ObjectRow]:
    if len(rows) <= NAMES_MAX:
        return rows
    last = sorted(rows.values(), key=lambda row: row.number)[-NAMES_MAX:]
    return {row.object_id.key: row for row in last}


def _digest(object_id: ObjectId) -> bytes:
    return hashlib.blake2b(f"{object_id.key}\0{object_id.etag}".encode(), digest_size=_DIGEST_BYTES).digest()


def _pack_object(change: ObjectChange, blocks: int) -> bytes:
    key = change.object_id.key.encode()
    return _OBJECT.pack(change.number, change.size, blocks, len(key)) + key + change.object_id.etag.encode()


def _unpack_object(value: bytes | memoryview) -> ObjectRow:
    value = bytes(value)
    number, size, blocks, key_length = _OBJECT.unpack_from(value)
    key = value[_OBJECT.size : _OBJECT.size + key_length].decode()
    etag = value[_OBJECT.size + key_length :].decode()
    return ObjectRow(ObjectId(key, etag), number, size, blocks)


def _unpack_block(value: bytes | memoryview) -> BlockRow:
    mask, stamp, size = _BLOCK.unpack_from(value)
    return BlockRow(mask, stamp, size, bytes(value[_BLOCK.size : _BLOCK.size + _CHECKSUMS_BYTES]))
