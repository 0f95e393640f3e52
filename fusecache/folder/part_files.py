"""Objects that are being fetched: their pieces come in any order, and an interrupted pull goes on with the rest.

A part file has the bytes of its object, then the id of the boot, then one byte for each piece: 1 if it is there. Pieces
are not synced one by one. After a power cut the boot id differs, and the pieces do not count.
"""

import hashlib
import os
from collections import deque
from collections.abc import Iterable
from pathlib import Path

from fusecache.model.objects import MIB, Extent, ObjectId

# Large enough for a high rate on a far connection; small enough that an interruption costs little.
PIECE_BYTES = 8 * MIB
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_BOOT_ID_BYTES = 36


class PartFile:
    """One object's part file. Blocking.

    missing: the numbers of pieces that no request was made for. in_flight: requests for others; the caller counts.
    """

    def __init__(self, folder: Path, object_id: ObjectId, size: int) -> None:
        self.path = folder / part_name(object_id)
        self._size = size
        self._map_at = size + _BOOT_ID_BYTES
        count = -(-size // PIECE_BYTES)
        boot_id = _BOOT_ID.read_bytes()[:_BOOT_ID_BYTES]
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        self._file = os.open(self.path, flags, 0o666)
        there = b""
        try:
            if os.fstat(self._file).st_size == self._map_at + count:
                found = os.pread(self._file, _BOOT_ID_BYTES + count, size)
                there = found[_BOOT_ID_BYTES:] if found[:_BOOT_ID_BYTES] == boot_id else b""
            if len(there) != count or not count:
                os.ftruncate(self._file, 0)
                os.ftruncate(self._file, self._map_at + count)
                os.pwrite(self._file, boot_id, size)
                there = bytes(count)
        except OSError:
            self.close()
            raise
        self.missing = deque(number for number, mark in enumerate(there) if not mark)
        self.in_flight = 0

    def extent(self, piece: int) -> Extent:
        """Return the bytes of a piece."""
        return Extent(piece * PIECE_BYTES, min((piece + 1) * PIECE_BYTES, self._size))

    def write(self, piece: int, data: memoryview) -> None:
        """Store a piece."""
        offset = piece * PIECE_BYTES
        while data:
            count = os.pwrite(self._file, data, offset)
            data, offset = data[count:], offset + count
        os.pwrite(self._file, b"\1", self._map_at + piece)

    def finish(self, mtime_ns: int) -> int:
        """Make it the object, on the disk, with a time; return the time as the file system keeps it. Then close it."""
        os.ftruncate(self._file, self._size)
        os.utime(self._file, ns=(mtime_ns, mtime_ns))
        os.fdatasync(self._file)
        found = os.fstat(self._file).st_mtime_ns
        self.close()
        return found

    def close(self) -> None:
        """Close it; what is there stays."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


def part_name(object_id: ObjectId) -> str:
    """Return the name of an object's part file: another version of the object has another."""
    return hashlib.blake2b(f"{object_id.key}\0{object_id.etag}".encode(), digest_size=16).hexdigest()


def held_bytes(folder: Path, object_id: ObjectId) -> int:
    """Return the disk space that a part file takes already."""
    try:
        return (folder / part_name(object_id)).stat().st_blocks * 512
    except FileNotFoundError:
        return 0


def remove_stale(folder: Path, wanted: Iterable[ObjectId]) -> None:
    """Remove the part files of other objects."""
    names = set(map(part_name, wanted))
    for path in folder.iterdir():
        if path.name not in names:
            path.unlink()
