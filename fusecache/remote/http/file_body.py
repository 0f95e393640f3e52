"""The body of a PUT: a slice of a local file as a stream. A large body is never in memory as a whole."""

import base64
import errno
import hashlib
import io
import os
from collections.abc import Callable
from typing import Self

from fusecache.model.errors import LocalDiskError, TooManyFiles
from fusecache.model.objects import MIB
from fusecache.remote.http.connection_pool import FileRange
from fusecache.remote.store import FileSlice

HASH_BYTES = MIB  # hashlib releases the GIL above 2 KiB; a larger piece would not fit into the L2 cache


class SliceBody:
    """A readable, seekable stream over one slice. It owns a file descriptor: use it in a `with` block.

    Raises TooManyFiles, and LocalDiskError if the file cannot be read or is shorter than the slice.
    """

    def __init__(self, file_slice: FileSlice, on_sent: Callable[[int], None] = lambda _count: None) -> None:
        """on_sent: called with the change in bytes that the kernel has taken; negative if the body is sent again."""
        self._slice = file_slice
        self._position = 0
        self._sent = 0
        self._on_sent = on_sent
        try:
            self._descriptor = os.open(file_slice.path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as exc:
            if exc.errno in {errno.EMFILE, errno.ENFILE}:
                raise TooManyFiles.at(file_slice.path) from exc
            raise LocalDiskError(f"cannot open the bytes to upload: {exc}") from exc

    def __enter__(self) -> Self:
        """Return the stream."""
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Close the file. After an error none of its bytes count as sent, else all."""
        os.close(self._descriptor)
        self._record_sent(self._slice.size if kind is None else 0)

    def __len__(self) -> int:
        """Return the size of the whole slice in bytes: the Content-Length."""
        return self._slice.size

    def read(self, size: int = -1) -> bytes:
        """Return up to `size` bytes (all that is left if negative); b"" at the end of the slice."""
        left = self._slice.size - self._position
        wanted = left if size is None or size < 0 else min(size, left)
        if wanted <= 0:
            return b""
        try:
            piece = os.pread(self._descriptor, wanted, self._slice.offset + self._position)
        except OSError as exc:
            raise LocalDiskError(f"cannot read the bytes to upload: {self._slice.path}: {exc}") from exc
        if not piece:
            end = self._slice.offset + self._slice.size
            raise LocalDiskError(
                f"{self._slice.path} ends before byte {end}: it was truncated during the upload"
            )
        self._position += len(piece)
        return piece

    def whole(self) -> bytes:
        """Return all bytes of the slice; for small slices only."""
        self.seek(0)
        return b"".join(iter(self.read, b""))

    def file_range(self, seconds: float) -> FileRange:
        """Return the slice as a range for a connection to send within `seconds`. Valid in the `with` block only."""
        return FileRange(
            self._descriptor, self._slice.offset, self._slice.size, seconds, on_sent=self._record_sent
        )

    def _record_sent(self, total: int) -> None:
        """Record that the first `total` bytes have been sent."""
        more, self._sent = total - self._sent, total
        if self._slice.sent is not None:
            self._slice.sent.bytes = total
        if more:
            self._on_sent(more)

    @property
    def path(self) -> str:
        """The path of the file."""
        return self._slice.path

    @property
    def known_md5(self) -> bytes:
        """The MD5 of the slice if it is known without reading; else empty."""
        return self._slice.md5

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Move inside the slice (a retried request starts again at 0); return the new position."""
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._slice.size}[whence]
        self._position = max(0, start + offset)
        return self._position

    def tell(self) -> int:
        """Return the position inside the slice."""
        return self._position

    def md5(self) -> bytes:
        """Return the MD5 of the slice, reading it once if needed; leaves the position at 0."""
        self.seek(0)
        if self._slice.md5:
            return self._slice.md5
        digest = hashlib.md5(usedforsecurity=False)
        while piece := self.read(HASH_BYTES):
            digest.update(piece)
        self.seek(0)
        return digest.digest()

    def content_md5(self) -> str:
        """Return the value of the Content-MD5 header; reads the slice once if needed."""
        return base64.b64encode(self.md5()).decode("ascii")
