"""System calls that Python's library lacks, through ctypes. Linux only."""

import ctypes
import errno
import os

# linux/falloc.h
_KEEP_SIZE = 0x01
_PUNCH_HOLE = 0x02

_libc = ctypes.CDLL(None, use_errno=True)
_libc.fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
_libc.fallocate.restype = ctypes.c_int


def punch_hole(fd: int, offset: int, length: int) -> None:
    """Give the bytes [offset, offset + length) back to the file system; they then read as zeros.

    Raises OSError (EOPNOTSUPP where the file system cannot).
    """
    while _libc.fallocate(fd, _PUNCH_HOLE | _KEEP_SIZE, offset, length) != 0:
        code = ctypes.get_errno()
        if code != errno.EINTR:
            raise OSError(code, os.strerror(code))
