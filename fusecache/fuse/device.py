"""Reads requests from /dev/fuse and writes replies to it.

The interpreter's lock (GIL) decides the speed. A system call that releases it must wait for it afterwards: up to the
switch interval, if another thread runs Python. That is many times what a small call takes, so small ones keep the lock.
A large copy would block the other threads too long, so large ones release it.
"""

import ctypes
import errno
import logging
import mmap
import os

from fusecache.fuse.protocol import OUT_HEADER

log = logging.getLogger(__name__)

# Replies and requests of at least this size release the lock, and are not copied into one piece before. Beside a thread
# that wants the lock, keeping it was 1.2 times as fast up to 64 KiB, and releasing it from 128 KiB on.
RELEASE_BYTES = 128 * 1024
# The kernel has gone away: unmounted, or the connection was aborted.
_GONE = frozenset({errno.ENODEV, errno.ECONNABORTED, errno.ENOTCONN, errno.ECONNRESET, errno.EPIPE})
# The request was taken back before it was read (ENOENT), or a signal came.
_AGAIN = frozenset({errno.ENOENT, errno.EINTR})
# The kernel could not copy a request, and has answered it with EIO.
_LOST = frozenset({errno.EFAULT, errno.EIO, errno.ENOMEM})

# PyDLL keeps the interpreter's lock during the call.
_libc = ctypes.PyDLL(None, use_errno=True)
_read = _libc.read
_read.argtypes = (ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t)
_read.restype = ctypes.c_ssize_t
_write = _libc.write
_write.argtypes = (ctypes.c_int, ctypes.c_char_p, ctypes.c_size_t)
_write.restype = ctypes.c_ssize_t


class RequestBuffer:
    """Memory for one request. view: all of it."""

    __slots__ = ("_memory", "address", "size", "view")

    def __init__(self, size: int, memory: mmap.mmap | None = None, offset: int = 0) -> None:
        """memory, offset: where it lies; else it is new memory, in which pages that no request reaches cost nothing."""
        self._memory = memory or mmap.mmap(-1, size)
        self.view = memoryview(self._memory)[offset : offset + size]
        self.size = size
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._memory, offset))


class Device:
    """The descriptor of one mount. Owned by the loop's thread; it never blocks."""

    def __init__(self, fd: int) -> None:
        """fd: of /dev/fuse, or a datagram socket that plays the kernel. It is closed by `close`."""
        os.set_blocking(fd, False)
        self.fd = fd

    def receive(self, buffer: RequestBuffer, *, release: bool) -> int:
        """Read one request into a buffer; return its size, 0 if there is none now, -1 if the mount is gone.

        release: let other threads run during the call, as a large request is expected. Raises OSError.
        """
        while True:
            if release:
                try:
                    count = os.readv(self.fd, [buffer.view])
                except OSError as exc:
                    number = exc.errno or 0
                else:
                    return count or -1
            else:
                count = _read(self.fd, buffer.address, buffer.size)
                if count >= 0:
                    return count or -1
                number = ctypes.get_errno()
            if number == errno.EAGAIN:
                return 0
            if number in _GONE:
                return -1
            if number in _LOST:
                log.error(
                    "the kernel failed a request that it could not hand over error=%s", os.strerror(number)
                )
            elif number not in _AGAIN:
                raise OSError(number, os.strerror(number))

    def send(self, unique: int, payload: bytes | memoryview = b"", *, error: int = 0) -> None:
        """Answer a request, unless it has been taken back. error: an errno, 0 for success. Raises OSError."""
        size = OUT_HEADER.size + len(payload)
        header = OUT_HEADER.pack(size, -error, unique)
        if size >= RELEASE_BYTES:
            try:
                os.writev(self.fd, [header, payload])
            except OSError as exc:
                self._check(exc.errno or 0)
            return
        message = b"".join((header, payload)) if payload else header
        while _write(self.fd, message, size) < 0:
            number = ctypes.get_errno()
            if number != errno.EINTR:
                self._check(number)
                return

    def close(self) -> None:
        """Close the descriptor, once."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    @staticmethod
    def _check(number: int) -> None:
        if number not in _GONE and number != errno.ENOENT:
            raise OSError(number, os.strerror(number))
