"""System calls that Python's library lacks, through ctypes. Linux only."""

import ctypes
import errno
import os

# linux/falloc.h
_KEEP_SIZE = 0x01
_PUNCH_HOLE = 0x02
# asm-generic/mman-common.h; Linux 5.14.
_POPULATE_WRITE = 23
# While the kernel populates one such piece, no other thread can map a file.
_POPULATE_BYTES = 1 << 21

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
