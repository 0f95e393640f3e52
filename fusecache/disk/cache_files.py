"""The cache's files: one sparse file per object version, named by a number that is never reused.

Layout: `<directory>/files/<number % 256 in hex>/<number in hex>`; byte n of the object is always byte n of the file. A
file may be up to 4 095 bytes longer than its object, because direct I/O writes whole pages. Which parts of a file are
valid is recorded in the index, not here.

Blocking and thread-safe: no file stays open between calls. Opening takes 10 microseconds; a table of open files would
need a limit, a lock and a rule for evicted files.
"""

import contextlib
import ctypes
import errno
import fcntl
import os
import re
import shutil
import signal
import struct
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import xxhash

from fusecache.disk.native import punch_hole
from fusecache.model.errors import LocalDiskError, NoSpace
from fusecache.model.objects import GRANULE_BYTES

CHECKSUM_BYTES = 8
_PAGE_BYTES = 4096
# Up to this size, to let other threads run takes longer than the checksums. The loop computes such ones itself.
_SHORT_BYTES = 2 * GRANULE_BYTES
FOLDERS = 256
_NUMBER = re.compile("[0-9a-f]{1,16}")


def _xxh3_without_lock() -> "Callable[[int, int], int] | None":
    """Return xxHash's own function of an address and a size, called without the interpreter's lock; None if hidden.

    The package keeps the lock for pieces as small as a granule: 0.1 s for each GiB.
    """
    try:
        function = ctypes.CDLL(sys.modules["xxhash._xxhash"].__file__).XXH3_64bits
    except (AttributeError, KeyError, OSError):
        return None
    function.restype, function.argtypes = ctypes.c_uint64, (ctypes.c_void_p, ctypes.c_size_t)
    sample = ctypes.create_string_buffer(_PAGE_BYTES)
    is_same = function(ctypes.addressof(sample), _PAGE_BYTES) == xxhash.xxh3_64_intdigest(sample.raw)
    return function if is_same else None


_xxh3 = _xxh3_without_lock()


def granule_checksums(memory: memoryview) -> bytes:
    """Return xxh3_64 (little-endian, 8 bytes) of each 64 KiB of `memory`; the last granule may be shorter."""
    size = len(memory)
    if _xxh3 is not None and size > _SHORT_BYTES and not memory.readonly:
        front = ctypes.c_char.from_buffer(memory)  # keeps the memory in place
        address = ctypes.addressof(front)
        sums = [_xxh3(address + at, min(GRANULE_BYTES, size - at)) for at in range(0, size, GRANULE_BYTES)]
        return struct.pack(f"<{len(sums)}Q", *sums)
    return b"".join(
        xxhash.xxh3_64_intdigest(memory[start : start + GRANULE_BYTES]).to_bytes(CHECKSUM_BYTES, "little")
        for start in range(0, len(memory), GRANULE_BYTES)
    )


def bad_granules(memory: memoryview, size: int, got: int, checksums: bytes) -> list[int]:
    """Return the granules of `memory[:size]`, of which `got` bytes were read, that do not match their checksums."""
    granules = -(-size // GRANULE_BYTES)
    whole = granules if got >= size else got // GRANULE_BYTES
    bad = list(range(whole, granules))
    if whole:
        found = granule_checksums(memory[: min(size, whole * GRANULE_BYTES)])
        if found != checksums[: len(found)]:
            pieces = range(0, len(found), CHECKSUM_BYTES)
            bad[:0] = [
                at // CHECKSUM_BYTES
                for at in pieces
                if found[at : at + CHECKSUM_BYTES] != checksums[at : at + CHECKSUM_BYTES]
            ]
    return bad


# Does what `checksummed_and_written` does; None: the caller must.
Carry = Callable[[int, memoryview, int, int], bytes | None]


class CacheFiles:
    """Stores, loads and punches ranges of numbered files, by direct I/O where the file system supports it."""

    def __init__(self, directory: Path, carry: Carry = lambda *_: None) -> None:
        """Use `directory`, creating it if needed. carry: may have another process store. Raises LocalDiskError."""
        self._carry = carry
        self._directory = directory
        self._prefix = f"{directory}{os.sep}"
        self._in_use_path = directory / "passed-through"
        self._recorded: set[int] = set()
        try:
            directory.mkdir(parents=True, exist_ok=True)
            self._direct = os.O_DIRECT if _direct_io_works(directory) else 0
        except OSError as exc:
            raise LocalDiskError(f"the cache folder {directory} cannot be used: {exc}") from exc

    def store(self, number: int, offset: int, memory: memoryview, size: int, floor_bytes: int = 0) -> bytes:
        """Write `memory[:size]` at `offset` and return its granules' checksums.

        offset: a multiple of 64 KiB. memory: page-aligned, at least `size` rounded up to 4 KiB; bytes beyond `size` are
        written as padding. Raises NoSpace if less than `floor_bytes` would be left free, or LocalDiskError. After an
        error none of it stays on the disk.
        """
        padded = -(-size // _PAGE_BYTES) * _PAGE_BYTES
        # Checked at each write: other programs fill the disk too, at gigabytes a second.
        if self.free_bytes() - padded < floor_bytes:
            raise NoSpace(f"less than {floor_bytes} bytes would be left free on the cache's disk")
        try:
            with self._opened(number, os.O_WRONLY | os.O_CREAT) as fd:
                checksums = self._carry(fd, memory[:padded], size, offset)
                if checksums is None:
                    checksums = checksummed_and_written(fd, memory[:padded], size, offset)
                if not self._direct:
                    os.posix_fadvise(fd, offset, padded, os.POSIX_FADV_DONTNEED)
        except OSError as exc:
            raise LocalDiskError(f"cache file {number:x} cannot be written at {offset}: {exc}") from exc
        return checksums

    def load(self, number: int, offset: int, memory: memoryview, size: int, checksums: bytes) -> list[int]:
        """Fill `memory[:size]` from `offset`; return the bad granules, counted from `offset`.

        checksums: the expected ones. Bytes missing from the file count as bad granules; they are never invented.
        memory: as in `store`. Raises LocalDiskError.
        """
        padded = -(-size // _PAGE_BYTES) * _PAGE_BYTES
        got = 0
        try:
            with self._opened(number, os.O_RDONLY) as fd:
                while got < size:
                    count = os.preadv(fd, [memory[got:padded]], offset + got)
                    got += count
                    # A direct read ends unaligned only at the end of the file.
                    if count == 0 or got % _PAGE_BYTES:
                        break
                if not self._direct:
                    os.posix_fadvise(fd, offset, padded, os.POSIX_FADV_DONTNEED)
        except FileNotFoundError:
            got = 0
        except OSError as exc:
            raise LocalDiskError(f"cache file {number:x} cannot be read at {offset}: {exc}") from exc
        return bad_granules(memory, size, got, checksums)

    def path_for_direct_reads(self, number: int) -> bytes | None:
        """Return a file's path; None where files are read through the page cache."""
        return os.fsencode(self._name(number)) if self._direct else None

    def open_probe(self) -> int:
        """Return a descriptor of an unnamed, empty file. Raises OSError: EINVAL where `open_whole` cannot be used.

        That is, where files are not read directly, or have no leases.
        """
        if not self._direct:
            raise OSError(errno.EINVAL, "the file system has no direct I/O")
        fd = os.open(self._directory, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
        try:
            _is_open_elsewhere(fd)
        except OSError:
            os.close(fd)
            raise
        return fd

    def open_whole(self, number: int, size: int) -> int | None:
        """Return a descriptor of a file with exactly `size` bytes, for a program that reads it by itself.

        Cuts padding off, and records the number for `in_use_before`. None if bytes are missing. Raises LocalDiskError.
        """
        path = self._name(number)
        try:
            if os.stat(path).st_size > size:
                os.truncate(path, size)
            if number not in self._recorded:
                with open(self._in_use_path, "a", encoding="ascii") as file:
                    file.write(f"{number:x}\n")
                self._recorded.add(number)
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            if os.fstat(fd).st_size == size:
                return fd
            os.close(fd)
        except FileNotFoundError:
            pass
        except OSError as exc:
            raise LocalDiskError(f"cache file {number:x} cannot be opened: {exc}") from exc
        return None

    def open_piece(self, number: int) -> int:
        """Return a descriptor of a file for reading through the page cache. Raises LocalDiskError."""
        try:
            return os.open(self._name(number), os.O_RDONLY | os.O_CLOEXEC)
        except OSError as exc:
            raise LocalDiskError(f"cache file {number:x} cannot be opened: {exc}") from exc

    def was_opened(self, number: int) -> bool:
        """Return whether `open_whole` has opened a file in this run."""
        return number in self._recorded

    def is_in_use(self, number: int) -> bool:
        """Return whether any other open file or mapping refers to a file. Raises OSError, EINVAL without leases."""
        try:
            fd = os.open(self._name(number), os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return False
        try:
            return _is_open_elsewhere(fd)
        finally:
            os.close(fd)

    def in_use_before(self) -> dict[int, int]:
        """Return the files that programs still read, of an earlier run, and their bytes. Call before any `open_whole`.

        Raises LocalDiskError.
        """
        try:
            lines = dict.fromkeys(self._in_use_path.read_text(encoding="ascii", errors="replace").split())
            numbers = [int(line, 16) for line in lines if _NUMBER.fullmatch(line)]
            found = {
                number: os.stat(self._name(number)).st_size for number in numbers if self.is_in_use(number)
            }
            self._in_use_path.write_text("".join(f"{number:x}\n" for number in found), encoding="ascii")
        except FileNotFoundError:
            return {}
        except OSError as exc:
            raise LocalDiskError(f"{self._in_use_path} cannot be used: {exc}") from exc
        return found

    def punch(self, number: int, extents: list[tuple[int, int]]) -> None:
        """Return (offset, length) ranges to the file system. A missing file is success. Raises LocalDiskError."""
        try:
            fd = os.open(self._path(number), os.O_WRONLY)
        except FileNotFoundError:
            return
        except OSError as exc:
            raise LocalDiskError(f"cache file {number:x} cannot be opened: {exc}") from exc
        try:
            for offset, length in extents:
                punch_hole(fd, offset, length)
        except OSError as exc:
            raise LocalDiskError(f"holes in cache file {number:x} cannot be punched: {exc}") from exc
        finally:
            os.close(fd)

    def delete(self, number: int) -> None:
        """Remove a file. A missing file is success. Raises LocalDiskError."""
        try:
            self._path(number).unlink(missing_ok=True)
        except OSError as exc:
            raise LocalDiskError(f"cache file {number:x} cannot be removed: {exc}") from exc

    def adopt(self, path: Path, number: int) -> None:
        """Make the file at `path` cache file `number`: as a link, else by a rename. Raises LocalDiskError."""
        target = self._path(number)
        try:
            try:
                _link(path, target)
            except FileNotFoundError:
                self._make_folder(number)
                _link(path, target)
        except OSError as exc:
            raise LocalDiskError(f"{path} cannot become cache file {number:x}: {exc}") from exc

    def folders(self) -> list[int]:
        """Return which of the FOLDERS are there: each is made for its first file. Raises LocalDiskError."""
        try:
            names = set(os.listdir(self._directory))
        except OSError as exc:
            raise LocalDiskError(f"{self._directory} cannot be listed: {exc}") from exc
        return [folder for folder in range(FOLDERS) if f"{folder:02x}" in names]

    def numbers_in(self, folder: int) -> list[int]:
        """Return the numbers of the files in one of the FOLDERS, unordered, ignoring other names.

        Raises LocalDiskError.
        """
        path = self._directory / f"{folder:02x}"
        found = []
        try:
            with os.scandir(path) as entries:
                for entry in entries:
                    with contextlib.suppress(ValueError):
                        found.append(int(entry.name, 16))
        except FileNotFoundError:
            return []
        except OSError as exc:
            raise LocalDiskError(f"{path} cannot be listed: {exc}") from exc
        return found

    def free_bytes(self) -> int:
        """Return the bytes that the file system has free for this process. Raises LocalDiskError."""
        try:
            facts = os.statvfs(self._directory)
        except OSError as exc:
            raise LocalDiskError(f"the free space of {self._directory} is unknown: {exc}") from exc
        return facts.f_bavail * facts.f_frsize

    def _path(self, number: int) -> Path:
        return Path(self._name(number))

    def _name(self, number: int) -> str:
        return f"{self._prefix}{number % FOLDERS:02x}/{number:x}"

    def _make_folder(self, number: int) -> None:
        # When its first file comes: 256 at once take a quarter of a second on a busy disk.
        self._path(number).parent.mkdir(exist_ok=True)

    @contextlib.contextmanager
    def _opened(self, number: int, flags: int) -> Iterator[int]:
        name, flags = self._name(number), flags | self._direct | os.O_CLOEXEC
        try:
            fd = os.open(name, flags, 0o600)
        except FileNotFoundError:
            if not flags & os.O_CREAT:
                raise
            self._make_folder(number)
            fd = os.open(name, flags, 0o600)
        try:
            yield fd
        finally:
            os.close(fd)


def checksummed_and_written(fd: int, memory: memoryview, size: int, offset: int) -> bytes:
    """Write memory to a file at an offset; return the checksums of its first `size` bytes. Raises OSError."""
    checksums = granule_checksums(memory[:size])
    _write_all(fd, memory, offset)
    return checksums


def _write_all(fd: int, memory: memoryview, offset: int) -> None:
    written = 0
    try:
        while written < len(memory):
            written += os.pwritev(fd, [memory[written:]], offset + written)
    except OSError:
        # A part may have been written, which no account includes.
        with contextlib.suppress(OSError):
            punch_hole(fd, offset, len(memory))
        raise


def _is_open_elsewhere(fd: int) -> bool:
    """Return whether another open file or mapping, of any process, refers to a file. Raises OSError."""
    try:
        # Granted only if there is none. The signal, should one come just now: one that is ignored.
        fcntl.fcntl(fd, fcntl.F_SETSIG, signal.SIGURG)
        fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_WRLCK)
        fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_UNLCK)
    except BlockingIOError:
        return True
    return False


def delete_tree(directory: Path) -> None:
    """Remove a folder and all in it. Entries that cannot be removed stay; the next start tries again."""
    shutil.rmtree(directory, ignore_errors=True)


def _direct_io_works(directory: Path) -> bool:
    """Return whether files in `directory` can be opened for direct I/O; some file systems refuse it."""
    probe = directory / ".direct-io-probe"
    try:
        fd = os.open(probe, os.O_WRONLY | os.O_CREAT | os.O_DIRECT, 0o600)
    except OSError as exc:
        if exc.errno != errno.EINVAL:
            raise
        return False
    else:
        os.close(fd)
        return True
    finally:
        probe.unlink(missing_ok=True)


def _link(path: Path, target: Path) -> None:
    """Link a file under a second path; rename it where there are no links, or where an unknown file is in the way."""
    try:
        target.hardlink_to(path)
    except FileNotFoundError:
        raise
    except OSError:
        path.rename(target)
