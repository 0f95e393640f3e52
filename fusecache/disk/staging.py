"""Staging files: files written on the mount live here until the bucket has them.

There is one file per version, named by its number. I/O is buffered: the page cache absorbs a checkpoint at memory
speed. This is not the cache: a staging file is never evicted.

The descriptors of staging files: bounded, the least recently used idle ones are closed.

Any number of files may be open for writing, or wait for their upload. A file without a descriptor is opened again when
it is used.
"""

import errno
import hashlib
import os
import resource
import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import xxhash

from fusecache.disk.cache_files import granule_checksums
from fusecache.disk.native import sync_folder
from fusecache.model.errors import Damaged, LocalDiskError, NoSpace, TooManyFiles
from fusecache.model.objects import GRANULE_BYTES

# Of the limit of open files, the share that staging files may use, and the most that helps.
_SHARE = 4
_DESCRIPTORS_MAX = 1024
_LIMIT_WANTED = 1 << 20
NO_DESCRIPTORS = {errno.EMFILE, errno.ENFILE}


class DescriptorPool:
    """The files that have a descriptor, in the order of their last use. Thread-safe."""

    def __init__(self, limit: int | None = None) -> None:
        """limit: of descriptors. More are open only while calls use all of them."""
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        self.limit = min(_DESCRIPTORS_MAX, max(8, soft // _SHARE)) if limit is None else limit
        self._lock = threading.Lock()
        self._files: OrderedDict[StagingFile, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._files)

    def add(self, file: "StagingFile") -> None:
        """Record that a file has a descriptor now, and close others above the limit."""
        with self._lock:
            self._files[file] = None
        if len(self._files) > self.limit:
            self.close_idle(len(self._files) - self.limit)

    def use(self, file: "StagingFile") -> None:
        """Record that a file is used."""
        with self._lock, suppress(KeyError):
            self._files.move_to_end(file)

    def discard(self, file: "StagingFile") -> None:
        """Record that a file has no descriptor any more."""
        with self._lock:
            self._files.pop(file, None)

    def close_idle(self, count: int) -> None:
        """Close up to `count` descriptors that no call uses, least recently used first."""
        with self._lock:
            files = list(self._files)
        for file in files:
            if count <= 0:
                return
            count -= file.close_if_idle()

    def close_all(self) -> None:
        """Close all descriptors that no call uses."""
        self.close_idle(len(self._files))


def raise_limit() -> int:
    """Raise this process's limit of open files as far as it may; return the limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _LIMIT_WANTED if hard == resource.RLIM_INFINITY else min(hard, _LIMIT_WANTED)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with suppress(OSError, ValueError):  # the system's own maximum may be lower
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


_CHECK_BYTES = 64 * GRANULE_BYTES
# Each piece is read twice, by two digests, so it must stay in the L2 cache in between.
_DIGEST_BYTES = 16 * GRANULE_BYTES


class StagingFile:
    """One staging file. Several threads may write concurrently to different ranges.

    After `close`, or when the pool needs its descriptor, the next use opens it again.
    """

    def __init__(
        self, path: Path | str, *, create: bool, opens: bool = True, pool: DescriptorPool | None = None
    ) -> None:
        """Open the file, or create it; creating fails if it exists. Raises NoSpace or LocalDiskError.

        opens: open now; otherwise at the first use. pool: bounds the descriptors of all files.
        """
        self._path = os.fspath(path)
        self._lock = threading.Lock()
        self._pool = pool
        self._opened = -1
        self._users = 0
        if opens:
            self._open(os.O_CREAT | os.O_EXCL if create else 0)

    @property
    def path(self) -> Path:
        """The file's path. Built on demand: a start meets many files whose path it does not need."""
        return Path(self._path)

    @contextmanager
    def _descriptor(self) -> Iterator[int]:
        """Keep the file open during a call."""
        with self._lock:
            if self._opened < 0:
                self._open(0)
            elif self._pool is not None:
                self._pool.use(self)
            self._users += 1
        try:
            yield self._opened
        finally:
            with self._lock:
                self._users -= 1

    def _open(self, flags: int) -> None:
        try:
            self._opened = _open(self._path, flags)
        except TooManyFiles:
            if self._pool is None:
                raise
            self._pool.close_all()
            self._opened = _open(self._path, flags)
        if self._pool is not None:
            self._pool.add(self)

    def size(self) -> int:
        """Size of the file, in bytes."""
        with self._descriptor() as descriptor:
            return os.fstat(descriptor).st_size

    def write(self, offset: int, data: bytes | memoryview) -> None:
        """Write all of `data`. Raises NoSpace or LocalDiskError."""
        view = memoryview(data)
        try:
            with self._descriptor() as descriptor:
                while view:
                    count = os.pwrite(descriptor, view, offset)
                    view, offset = view[count:], offset + count
        except OSError as exc:
            raise model_error(exc, self.path) from exc

    def read(self, offset: int, size: int) -> bytes:
        """Return up to `size` bytes; fewer only at the end of the file."""
        try:
            with self._descriptor() as descriptor:
                return os.pread(descriptor, size, offset)
        except OSError as exc:
            raise model_error(exc, self.path) from exc

    def read_nowait(self, offset: int, size: int) -> bytes | None:
        """Return bytes from the page cache, or None if the read would wait for the disk."""
        buffer = bytearray(size)
        try:
            with self._descriptor() as descriptor:
                count = os.preadv(descriptor, [buffer], offset, os.RWF_NOWAIT)
        except OSError as exc:
            if exc.errno in {errno.EAGAIN, errno.EOPNOTSUPP}:
                return None
            raise model_error(exc, self.path) from exc
        # A short count means the end of the file or of the cached part. `read` tells them apart.
        return bytes(buffer) if count == size else None

    def truncate(self, size: int) -> None:
        """Truncate the file, or extend it with zeros."""
        try:
            with self._descriptor() as descriptor:
                os.ftruncate(descriptor, size)
        except OSError as exc:
            raise model_error(exc, self.path) from exc

    def copy_from(self, source: "StagingFile", size: int) -> None:
        """Copy the first `size` bytes of another staging file, sharing blocks where the file system can."""
        offset = 0
        try:
            with source._descriptor() as there, self._descriptor() as here:
                while offset < size:
                    count = os.copy_file_range(there, here, size - offset, offset, offset)
                    if count == 0:
                        raise Damaged(
                            f"{source.path}: the staging file ends at byte {offset}, {size} bytes were expected"
                        )
                    offset += count
        except OSError as exc:
            raise model_error(exc, self.path) from exc

    def sync(self) -> None:
        """Return when data, size and the folder's entry are on disk."""
        self.sync_data()
        try:
            sync_folder(self.path.parent)
        except OSError as exc:
            raise model_error(exc, self.path) from exc

    def sync_data(self) -> None:
        """Return when data and size are on disk; the folder's entry may not be."""
        try:
            with self._descriptor() as descriptor:
                os.fdatasync(descriptor)
        except OSError as exc:
            raise model_error(exc, self.path) from exc

    def checksums(self, offset: int = 0, size: int = 1 << 62) -> bytes:
        """Return xxh3_64 of each granule of [offset, offset + size), in order, 8 bytes little-endian each.

        offset: the start of a granule. Bytes beyond the end of the file are ignored.
        """
        sums = bytearray()
        stop = offset + size
        while chunk := self.read(offset, min(_CHECK_BYTES, stop - offset)):
            sums += granule_checksums(memoryview(chunk))
            offset += len(chunk)
        return bytes(sums)

    def close(self) -> None:
        """Close the descriptor; the file stays on disk. No other call may be in progress."""
        with self._lock:
            self._close()

    def close_if_idle(self) -> bool:
        """Close the descriptor if no call uses it; return whether it is closed. Never waits."""
        if not self._lock.acquire(blocking=False):
            return False
        try:
            if self._users == 0:
                self._close()
            return self._opened < 0
        finally:
            self._lock.release()

    def _close(self) -> None:
        if self._opened >= 0:
            os.close(self._opened)
            self._opened = -1
            if self._pool is not None:
                self._pool.discard(self)

    def delete(self) -> None:
        """Close and remove the file."""
        self.close()
        try:
            self.path.unlink(missing_ok=True)
        except OSError as exc:
            raise model_error(exc, self.path) from exc


def sync_all(files: Sequence[StagingFile]) -> list[bytes | Exception]:
    """Sync files to the disk, and their folder once for all of them.

    Return each file's granule checksums, or the error because of which its bytes are not durable. A full disk is such
    an error too: the kernel had accepted the bytes, and the file no longer holds what was written. After TooManyFiles
    the sync may be repeated.
    """
    found: list[bytes | Exception] = []
    for file in files:
        try:
            file.sync_data()
            found.append(file.checksums())
        except TooManyFiles as exc:
            found.append(exc)
        except (NoSpace, LocalDiskError) as exc:
            found.append(LocalDiskError(str(exc)))
        except Exception as exc:  # noqa: BLE001  # the kernel reports the other files' errors only once
            found.append(exc)
    try:
        for folder in {file.path.parent for file in files}:
            sync_folder(folder)
    except OSError as exc:
        error = model_error(exc, files[0].path)
        return [error if isinstance(error, TooManyFiles) else LocalDiskError(str(error)) for _ in files]
    return found


def digests(path: Path, offset: int, size: int) -> tuple[bytes, bytes]:
    """Return MD5 and granule checksums of [offset, offset + size) of a staging file, in one pass.

    If the file is written concurrently the result is useless but harmless. Raises LocalDiskError, or Damaged if the
    file ends too early.
    """
    md5 = hashlib.md5(usedforsecurity=False)
    sums = bytearray()
    buffer = memoryview(bytearray(min(_DIGEST_BYTES, size)))
    # A descriptor of its own: other tasks may close or quarantine the file concurrently.
    descriptor = _open(str(path), 0)
    try:
        stop = offset + size
        while offset < stop:
            # Fill whole granules: a short read would split one.
            piece = buffer[: stop - offset]
            filled = 0
            while filled < len(piece):
                count = os.preadv(descriptor, [piece[filled:]], offset + filled)
                if count == 0:
                    raise Damaged(
                        f"{path}: the staging file ends at byte {offset + filled}, {stop} bytes were expected"
                    )
                filled += count
            md5.update(piece)
            sums += granule_checksums(piece)
            offset += filled
    except OSError as exc:
        raise model_error(exc, path) from exc
    finally:
        os.close(descriptor)
    return md5.digest(), bytes(sums)


def checksum_of_checksums(granule_checksums: bytes) -> str:
    """Return the file checksum that the journal stores: xxh3_128 hex over the checksums of its granules."""
    return xxhash.xxh3_128_hexdigest(granule_checksums)


class StagingDirectory:
    """The folders `staging/`, `orphans/` and `suspect/` of a cache directory; the last two are the quarantine."""

    def __init__(self, directory: Path) -> None:
        self._pool = DescriptorPool()
        self._staging = directory / "staging"
        self._folder = str(self._staging)
        self._quarantine = {"orphans": directory / "orphans", "suspect": directory / "suspect"}
        for folder in (self._staging, *self._quarantine.values()):
            folder.mkdir(parents=True, exist_ok=True)

    def close(self) -> None:
        """Close every open file, at the end of the mount. Files stay on disk. No other call may be in progress."""
        self._pool.close_all()

    def create(self, generation: int) -> StagingFile:
        """Create the file of a new version."""
        return StagingFile(self._path_text(generation), create=True, pool=self._pool)

    def open(self, generation: int) -> StagingFile:
        """Open the file of a journaled version. Raises LocalDiskError if it is missing."""
        return StagingFile(self._path_text(generation), create=False, pool=self._pool)

    def known(self, generation: int) -> StagingFile:
        """Return the file of a version that is in `staging/`. It is opened at first use."""
        return StagingFile(self._path_text(generation), create=False, opens=False, pool=self._pool)

    def quarantine(self, generation: int, folder: str) -> Path:
        """Move a version's file to the quarantine folder `orphans` or `suspect`; return where it is then.

        If the disk fails, it stays in `staging/`, and the next mount moves it. Raises FileNotFoundError.
        """
        path = self._path(generation)
        target = self._quarantine[folder] / path.name
        try:
            os.rename(path, target)
        except FileNotFoundError:
            raise
        except OSError:
            return path
        return target

    def restore(self, generation: int) -> StagingFile:
        """Move a version's file out of the quarantine, durably, and open it.

        Raises LocalDiskError if it is not there.
        """
        source = self.path_of(generation)
        if source is None:
            raise LocalDiskError(f"generation {generation}: its quarantined file is gone")
        try:
            source.rename(self._path(generation))
            # Durable before any row refers to it: after a power cut the file must be where the row says.
            for folder in (self._staging, source.parent):
                sync_folder(folder)
        except OSError as exc:
            raise model_error(exc, source) from exc
        return self.open(generation)

    def delete(self, generation: int) -> None:
        """Remove a version's file from `staging/`, if it is there."""
        self._path(generation).unlink(missing_ok=True)

    def delete_quarantined(self, generation: int) -> None:
        """Remove a version's file from the quarantine, if it is there. Raises LocalDiskError."""
        for folder in self._quarantine.values():
            path = folder / self._path(generation).name
            try:
                path.unlink(missing_ok=True)
            except OSError as exc:
                raise model_error(exc, path) from exc

    def path_of(self, generation: int) -> Path | None:
        """Return the path of a version's quarantined file, or None."""
        paths = (folder / self._path(generation).name for folder in self._quarantine.values())
        return next((path for path in paths if path.exists()), None)

    def quarantined(self) -> dict[int, Path]:
        """Return the quarantined files, by generation."""
        return {
            int(path.name): path
            for folder in self._quarantine.values()
            for path in folder.iterdir()
            if path.name.isdigit()
        }

    def sizes(self) -> dict[int, int]:
        """Return the sizes of the files in `staging/` in bytes, by generation."""
        with os.scandir(self._staging) as entries:
            return {int(entry.name): entry.stat().st_size for entry in entries if entry.name.isdigit()}

    def staged(self) -> dict[int, Path]:
        """Return the files in `staging/`, by generation."""
        return {int(path.name): path for path in self._staging.iterdir() if path.name.isdigit()}

    def highest_number(self) -> int:
        """Return the highest generation in any file name here; 0 if there is none."""
        folders = (self._staging, *self._quarantine.values())
        return max(
            (int(name) for folder in folders for name in os.listdir(folder) if name.isdigit()), default=0
        )

    def _path(self, generation: int) -> Path:
        return Path(self._path_text(generation))

    def _path_text(self, generation: int) -> str:
        return f"{self._folder}/{generation:016d}"


def _open(path: str, flags: int) -> int:
    try:
        return os.open(path, os.O_RDWR | os.O_CLOEXEC | flags, 0o600)
    except OSError as exc:
        raise model_error(exc, path) from exc


def model_error(exc: OSError, path: Path | str) -> NoSpace | LocalDiskError | TooManyFiles:
    """Return the model's error for an error of a file."""
    if exc.errno in NO_DESCRIPTORS:
        return TooManyFiles.at(path)
    if exc.errno in {errno.ENOSPC, errno.EDQUOT}:
        return NoSpace(f"{path}: the cache disk is full; free space or unmount other caches on it")
    return LocalDiskError(f"{path}: {exc.strerror or exc}")
