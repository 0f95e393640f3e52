"""The body of a PUT: a slice of a local file. A large body is never in memory as a whole."""

import errno
import hashlib
import os
from collections.abc import Callable, Iterator
from typing import Self

from fusecache.model.errors import LocalDiskError, TooManyFiles
from fusecache.model.objects import MIB
from fusecache.remote.http.connection_pool import FileRange
from fusecache.remote.store import FileSlice

HASH_BYTES = MIB  # hashlib releases the GIL above 2 KiB; a larger piece would not fit into the L2 cache


class SliceBody:
    """One slice. It owns a file descriptor: use it in a `with` block.

    Raises TooManyFiles, and LocalDiskError if the file cannot be read or is shorter than the slice.
    """

    def __init__(self, file_slice: FileSlice, on_sent: Callable[[int], None] = lambda _count: None) -> None:
        """on_sent: called with the change in bytes that the kernel has taken; negative if the body is sent again."""
        self._slice = file_slice
        self._sent = 0
        self._on_sent = on_sent
        try:
            self._descriptor = os.open(file_slice.path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as exc:
            if exc.errno in {errno.EMFILE, errno.ENFILE}:
                raise TooManyFiles.at(file_slice.path) from exc
            raise LocalDiskError(f"cannot open the bytes to upload: {exc}") from exc

    def __enter__(self) -> Self:
        """Return the body."""
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Close the file. After an error none of its bytes count as sent, else all."""
        os.close(self._descriptor)
        self._record_sent(self._slice.size if kind is None else 0)

    def __len__(self) -> int:
        """Return the size of the whole slice in bytes: the Content-Length."""
        return self._slice.size

    def whole(self) -> bytes:
        """Return all bytes of the slice; for small slices only."""
        return b"".join(self._pieces())

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

    def md5(self) -> bytes:
        """Return the MD5 of the slice, reading it once if needed."""
        if self._slice.md5:
            return self._slice.md5
        digest = hashlib.md5(usedforsecurity=False)
        for piece in self._pieces():
            digest.update(piece)
        return digest.digest()

    def _pieces(self) -> Iterator[bytes]:
        position, stop = self._slice.offset, self._slice.offset + self._slice.size
        while position < stop:
            try:
                piece = os.pread(self._descriptor, min(stop - position, HASH_BYTES), position)
            except OSError as exc:
                raise LocalDiskError(f"cannot read the bytes to upload: {self._slice.path}: {exc}") from exc
            if not piece:
                raise LocalDiskError(
                    f"{self._slice.path} ends before byte {stop}: it was truncated during the upload"
                )
            position += len(piece)
            yield piece
