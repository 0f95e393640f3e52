"""Staging files: what is written on the mount lives here until the bucket has it.

One file a generation, named by its number. Buffered I/O: the kernel's page cache absorbs a checkpoint at memory speed.
Not the cache: a staging file is never evicted.
"""

import errno
import hashlib
import os
import shutil
import threading
from collections.abc import Sequence
from pathlib import Path

import xxhash

from fusecache.disk.folders import sync_folder
from fusecache.model.errors import Damaged, LocalDiskError, NoSpace
from fusecache.model.objects import GRANULE_BYTES

_CHECK_BYTES = 64 * GRANULE_BYTES
# Read twice, by two digests: it must stay in the L2 cache meanwhile.
_DIGEST_BYTES = 16 * GRANULE_BYTES


class StagingFile:
    """One staging file. Writes may come from several threads at once, for different ranges.

    After `close` the next use opens it again, so that files which only wait hold no descriptor.
    """

    def __init__(
        self,
        path: Path | str,
        *,
        create: bool,
        opens: bool = True,
        open_files: "set[StagingFile] | None" = None,
    ) -> None:
        """Open, or create, which fails if there is one. Raises NoSpace or LocalDiskError.

        opens: whether now; else with the first use. open_files: holds this file while it has a descriptor.
        """
        self._path = os.fspath(path)
        self._lock = threading.Lock()
        self._open_files = open_files
        self._opened = -1
        if opens:
            self._open(os.O_CREAT | os.O_EXCL if create else 0)

    @property
    def path(self) -> Path:
        """Where it is. Made anew: a start meets many files of which it needs no path."""
        return Path(self._path)

    @property
    def _fd(self) -> int:
        with self._lock:
            if self._opened < 0:
                self._open(0)
            return self._opened

    def _open(self, flags: int) -> None:
        self._opened = _open(self._path, flags)
        if self._open_files is not None:
            self._open_files.add(self)

    def size(self) -> int:
        """Bytes in the file."""
        return os.fstat(self._fd).st_size

    def write(self, offset: int, data: bytes | memoryview) -> None:
        """Write all of `data`. Raises NoSpace or LocalDiskError."""
        view = memoryview(data)
        try:
            while view:
                count = os.pwrite(self._fd, view, offset)
                view, offset = view[count:], offset + count
        except OSError as exc:
            raise _model_error(exc, self.path) from exc

    def read(self, offset: int, size: int) -> bytes:
        """Return up to `size` bytes; fewer only at the end of the file."""
        try:
            return os.pread(self._fd, size, offset)
        except OSError as exc:
            raise _model_error(exc, self.path) from exc

    def read_nowait(self, offset: int, size: int) -> bytes | None:
        """Return bytes that the page cache holds already, or None if reading would wait for the disk."""
        buffer = bytearray(size)
        try:
            count = os.preadv(self._fd, [buffer], offset, os.RWF_NOWAIT)
        except OSError as exc:
            if exc.errno in {errno.EAGAIN, errno.EOPNOTSUPP}:
                return None
            raise _model_error(exc, self.path) from exc
        # A short count may be the end of the file or of what is in memory: `read` knows.
        return bytes(buffer) if count == size else None

    def truncate(self, size: int) -> None:
        """Cut or extend with zeros."""
        try:
            os.ftruncate(self._fd, size)
        except OSError as exc:
            raise _model_error(exc, self.path) from exc

    def copy_from(self, source: "StagingFile", size: int) -> None:
        """Take over the first `size` bytes of another staging file, sharing blocks where the disk can."""
        offset = 0
        try:
            while offset < size:
                count = os.copy_file_range(source._fd, self._fd, size - offset, offset, offset)
                if count == 0:
                    raise Damaged(f"{source.path}: ends at {offset} of {size} bytes")
                offset += count
        except OSError as exc:
            raise _model_error(exc, self.path) from exc

    def sync(self) -> None:
        """Return when data and size, and the folder's entry, are on the disk."""
        self.sync_data()
        try:
            sync_folder(self.path.parent)
        except OSError as exc:
            raise _model_error(exc, self.path) from exc

    def sync_data(self) -> None:
        """Return when data and size are on the disk; the folder's entry need not be."""
        try:
            os.fdatasync(self._fd)
        except OSError as exc:
            raise _model_error(exc, self.path) from exc

    def checksums(self, offset: int = 0, size: int = 1 << 62) -> bytes:
        """Return xxh3_64 of each granule of [offset, offset + size), 8 bytes little-endian each, in order.

        offset: of a granule. What lies behind the file's end is left out.
        """
        sums = bytearray()
        stop = offset + size
        while chunk := self.read(offset, min(_CHECK_BYTES, stop - offset)):
            sums += _granule_checksums(memoryview(chunk))
            offset += len(chunk)
        return bytes(sums)

    def close(self) -> None:
        """Close the file; it stays on disk. No other call may be under way."""
        with self._lock:
            if self._opened >= 0:
                os.close(self._opened)
                self._opened = -1
                if self._open_files is not None:
                    self._open_files.discard(self)

    def delete(self) -> None:
        """Close and remove the file."""
        self.close()
        try:
            self.path.unlink(missing_ok=True)
        except OSError as exc:
            raise _model_error(exc, self.path) from exc


def sync_all(files: Sequence[StagingFile]) -> list[bytes | LocalDiskError]:
    """Bring files to the disk, and their folder once for all.

    Return what each holds, as the checksums of its granules, or why the disk does not hold it for good: also for want
    of room, as it had accepted the bytes, and what is in the file now is not what was written.
    """
    found: list[bytes | LocalDiskError] = []
    for file in files:
        try:
            file.sync_data()
            found.append(file.checksums())
        except (NoSpace, LocalDiskError) as exc:
            found.append(LocalDiskError(str(exc)))
    try:
        for folder in {file.path.parent for file in files}:
            sync_folder(folder)
    except OSError as exc:
        return [LocalDiskError(str(_model_error(exc, file.path))) for file in files]
    return found


def digests(path: Path, offset: int, size: int) -> tuple[bytes, bytes]:
    """Return MD5 and granule checksums of [offset, offset + size) of a staging file, read once.

    Of a file that is written meanwhile they are of no use, and do no harm. Raises LocalDiskError, also for a file that
    ends before.
    """
    md5 = hashlib.md5(usedforsecurity=False)
    sums = bytearray()
    buffer = memoryview(bytearray(min(_DIGEST_BYTES, size)))
    # A descriptor of its own: the file may be closed or moved aside by others meanwhile.
    descriptor = _open(str(path), 0)
    try:
        stop = offset + size
        while offset < stop:
            # Whole granules: a short read would cut one in two.
            piece = buffer[: stop - offset]
            filled = 0
            while filled < len(piece):
                count = os.preadv(descriptor, [piece[filled:]], offset + filled)
                if count == 0:
                    raise Damaged(f"{path}: ends at {offset + filled} of {stop} bytes")
                filled += count
            md5.update(piece)
            sums += _granule_checksums(piece)
            offset += filled
    except OSError as exc:
        raise _model_error(exc, path) from exc
    finally:
        os.close(descriptor)
    return md5.digest(), bytes(sums)


def _granule_checksums(data: memoryview) -> bytes:
    sums = bytearray()
    for start in range(0, len(data), GRANULE_BYTES):
        sums += xxhash.xxh3_64_intdigest(data[start : start + GRANULE_BYTES]).to_bytes(8, "little")
    return bytes(sums)


def checksum_of_checksums(granule_checksums: bytes) -> str:
    """Return the one checksum of a whole file that the journal keeps: xxh3_128 hex over its granules' checksums."""
    return xxhash.xxh3_128_hexdigest(granule_checksums)


class StagingDirectory:
    """The folders `staging/`, `orphans/` and `suspect/` of a cache directory."""

    def __init__(self, directory: Path) -> None:
        # The files that hold a descriptor. Threads add and remove their own.
        self._open_files: set[StagingFile] = set()
        self._staging = directory / "staging"
        self._folder = str(self._staging)
        self._aside = {"orphans": directory / "orphans", "suspect": directory / "suspect"}
        for folder in (self._staging, *self._aside.values()):
            folder.mkdir(parents=True, exist_ok=True)

    def close(self) -> None:
        """Close every open file, at the end of the mount. Files stay on disk. No other call may be under way."""
        for file in list(self._open_files):
            file.close()

    def create(self, generation: int) -> StagingFile:
        """Create the file of a new generation."""
        return StagingFile(self._place(generation), create=True, open_files=self._open_files)

    def open(self, generation: int) -> StagingFile:
        """Open the file of a journaled generation. Raises LocalDiskError if it is missing."""
        return StagingFile(self._place(generation), create=False, open_files=self._open_files)

    def known(self, generation: int) -> StagingFile:
        """Return the file of a generation that is in `staging/`, to be opened with its first use."""
        return StagingFile(self._place(generation), create=False, opens=False, open_files=self._open_files)

    def quarantine(self, generation: int, folder: str) -> Path:
        """Move a generation's file to `orphans` or `suspect`; return where it is now."""
        target = self._aside[folder] / self._path(generation).name
        shutil.move(self._path(generation), target)
        return target

    def restore(self, generation: int) -> StagingFile:
        """Move a generation's file back from where it was kept aside, for good, and open it.

        Raises LocalDiskError if it is not there.
        """
        source = self.path_of(generation)
        if source is None:
            raise LocalDiskError(f"generation {generation}: its bytes are gone")
        try:
            source.rename(self._path(generation))
            # Before any row says so: after a power cut the file must be found where the row has it.
            for folder in (self._staging, source.parent):
                sync_folder(folder)
        except OSError as exc:
            raise _model_error(exc, source) from exc
        return self.open(generation)

    def delete(self, generation: int) -> None:
        """Remove a generation's file, if it is there."""
        self._path(generation).unlink(missing_ok=True)

    def delete_quarantined(self, generation: int) -> None:
        """Remove a generation's file from where it is kept aside, if it is there. Raises LocalDiskError."""
        for folder in self._aside.values():
            path = folder / self._path(generation).name
            try:
                path.unlink(missing_ok=True)
            except OSError as exc:
                raise _model_error(exc, path) from exc

    def path_of(self, generation: int) -> Path | None:
        """Return where a generation's file is kept aside, or None."""
        places = (folder / self._path(generation).name for folder in self._aside.values())
        return next((path for path in places if path.exists()), None)

    def quarantined(self) -> dict[int, Path]:
        """Return the files that are kept aside, by generation."""
        return {
            int(path.name): path
            for folder in self._aside.values()
            for path in folder.iterdir()
            if path.name.isdigit()
        }

    def sizes(self) -> dict[int, int]:
        """Return the bytes of the files in `staging/`, by generation."""
        with os.scandir(self._staging) as entries:
            return {int(entry.name): entry.stat().st_size for entry in entries if entry.name.isdigit()}

    def staged(self) -> dict[int, Path]:
        """Return the files in `staging/`, by generation."""
        return {int(path.name): path for path in self._staging.iterdir() if path.name.isdigit()}

    def highest_number(self) -> int:
        """Return the highest generation that any file here is named after; 0 if there is none."""
        folders = (self._staging, *self._aside.values())
        return max(
            (int(name) for folder in folders for name in os.listdir(folder) if name.isdigit()), default=0
        )

    def quarantined_bytes(self) -> int:
        """Return the bytes that orphans and suspects hold."""
        return sum(path.stat().st_size for folder in self._aside.values() for path in folder.iterdir())

    def _path(self, generation: int) -> Path:
        return Path(self._place(generation))

    def _place(self, generation: int) -> str:
        return f"{self._folder}/{generation:016d}"


def _open(path: str, flags: int) -> int:
    try:
        return os.open(path, os.O_RDWR | os.O_CLOEXEC | flags, 0o600)
    except OSError as exc:
        raise _model_error(exc, path) from exc


def _model_error(exc: OSError, path: Path | str) -> NoSpace | LocalDiskError:
    if exc.errno in {errno.ENOSPC, errno.EDQUOT}:
        return NoSpace(f"{path}: the cache disk is full; free space or unmount other caches on it")
    return LocalDiskError(f"{path}: {exc.strerror or exc}")
