"""Stores packs of listing rows: in one file, or in memory while the disk refuses them. Blocking, thread-safe.

The file is scratch space: never synced, and emptied by each mount. It is read with pread, not mapped: a page fault on a
disk that has failed would be a SIGBUS, which ends the daemon.

Invariants:
1. What `read` returns is what was stored. A pack that the disk lost or changed is an error.
2. `_lock` owns all that may change: the descriptor, the free space, the counts, and where each pack is. Bytes are read
   and written without it, at offsets that no other thread has.
"""

import os
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from zlib import crc32

from fusecache.model.errors import LocalDiskError

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
