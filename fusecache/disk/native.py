"""Small services of the Linux kernel: punched holes, prefaulted memory, synced names, the dirty page limit.

The first two are system calls that Python's library lacks, made through ctypes.
"""

import ctypes
import errno
import os
import resource
from collections.abc import Iterable
from pathlib import Path

# linux/falloc.h
_KEEP_SIZE = 0x01
_PUNCH_HOLE = 0x02
# asm-generic/mman-common.h; Linux 5.14.
_POPULATE_WRITE = 23
# While the kernel populates one such piece, no other thread can map a file.
_POPULATE_BYTES = 1 << 21
# linux/prctl.h
_PR_SET_DUMPABLE = 4
_VM = Path("/proc/sys/vm")

_libc = ctypes.CDLL(None, use_errno=True)
_libc.fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
_libc.fallocate.restype = ctypes.c_int
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_libc.madvise.restype = ctypes.c_int


def punch_hole(fd: int, offset: int, length: int) -> None:
    """Return the bytes [offset, offset + length) to the file system; they then read as zeros.

    Raises OSError (EOPNOTSUPP if the file system does not support it).
    """
    while _libc.fallocate(fd, _PUNCH_HOLE | _KEEP_SIZE, offset, length) != 0:
        code = ctypes.get_errno()
        if code != errno.EINTR:
            raise OSError(code, os.strerror(code))


def populate(memory: memoryview) -> None:
    """Fault in the pages of writable memory now instead of at first use. Their content stays.

    Other threads can run. On a kernel without MADV_POPULATE_WRITE it has no effect.
    """
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    for start in range(0, memory.nbytes, _POPULATE_BYTES):
        _libc.madvise(address + start, min(_POPULATE_BYTES, memory.nbytes - start), _POPULATE_WRITE)


def forbid_core_dumps() -> None:
    """Keep this process's memory, keys included, out of core dumps, and from other processes of the same user.

    RLIMIT_CORE covers children as well; it does not hold for a core_pattern that is a program, so prctl(2) is needed.
    """
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    _libc.prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)


def sync_folder(path: Path) -> None:
    """Sync a folder, so that the names in it are on disk; syncing a file does not do that. Raises OSError."""
    folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def replace_synced(path: Path, pieces: Iterable[str]) -> None:
    """Replace a file by the joined pieces: after a power cut it is the old or the new one, whole. Raises OSError.

    Only the owner may read it. A process that is killed may leave `path` with the suffix `.new`.
    """
    fresh = path.with_suffix(".new")
    with open(fresh, "w", opener=_private) as file:
        file.writelines(pieces)
        file.flush()
        os.fsync(file.fileno())
    fresh.replace(path)
    sync_folder(path.parent)


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def dirty_limit_bytes() -> int:
    """Return the limit of all dirty pages together, in bytes; 0 if the kernel does not report it.

    vm.dirty_bytes, else vm.dirty_ratio percent of the available memory (kernel: Documentation/admin-guide/sysctl/vm).
    """
    try:
        fixed = int((_VM / "dirty_bytes").read_text())
        if fixed:
            return fixed
        ratio = int((_VM / "dirty_ratio").read_text())
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024 * ratio // 100
    except (OSError, ValueError, IndexError):
        pass
    return 0
