"""PUTs of objects and parts, and DELETEs of objects.

A small body is sent with its request in one call, and a large one straight from the page cache.

The body of a PUT: a slice of a local file. A large body is never in memory as a whole.
"""

import base64
import errno
import hashlib
import os
from collections.abc import Callable, Iterator
from functools import partial
from typing import Self
from urllib.parse import quote

from fusecache.model.errors import LocalDiskError, TooManyFiles
from fusecache.model.objects import KIB, MIB
from fusecache.remote.http.connection_pool import Connection, FileRange, ShortFile
from fusecache.remote.http.signed_requests import (
    SLOWEST_BYTES_PER_SECOND,
    SUCCESS,
    HttpRequest,
    SignedHttp,
    error_of,
    parse_head,
)
from fusecache.remote.protocol.signing import UNSIGNED
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


# Bodies up to this size are read, hashed and sent in one call each. For larger ones the extra copy costs more.
SMALL_BYTES = 64 * KIB


def part_query(upload_id: str, number: int) -> str:
    """Return the query that makes a PUT the upload of a part; number: from 1."""
    return f"partNumber={number}&uploadId={quote(upload_id, safe='-_.~')}"


def send_body(http: SignedHttp, put: HttpRequest, stream: SliceBody) -> dict[str, str]:
    """Send a body; return the headers of the response. Its length, MD5 and payload are added to the request.

    Raises LocalDiskError, and the error of the response. After Unavailable the object may be stored or not.
    """
    body, file, md5 = b"", None, stream.known_md5
    if len(stream) <= SMALL_BYTES:
        body = stream.whole()
        md5 = md5 or hashlib.md5(body, usedforsecurity=False).digest()
    else:
        md5 = md5 or stream.md5()
        file = stream.file_range(http.read_timeout + len(stream) / SLOWEST_BYTES_PER_SECOND)
    headers = {
        **put.headers,
        "content-length": str(len(stream)),
        "content-md5": base64.b64encode(md5).decode("ascii"),
    }
    request = HttpRequest(put.what, "PUT", put.key, headers, put.query, UNSIGNED)
    try:
        return http.exchange(request, partial(_ask, http, put.what, body, file))
    except ShortFile as exc:
        raise LocalDiskError(f"{stream.path}: {exc}: it was truncated during the upload") from exc


def delete(http: SignedHttp, what: str, key: str) -> None:
    """Delete an object. Raises the error of the response."""
    http.exchange(HttpRequest(what, "DELETE", key), partial(_ask, http, what, b"", None))


def _ask(
    http: SignedHttp, what: str, body: bytes, file: FileRange | None, connection: Connection, head: bytes
) -> dict[str, str]:
    """Exchange a request; return the headers of a response whose body does not matter."""
    head, rest = connection.exchange(head + body, file)
    status, headers = parse_head(head)
    if status not in SUCCESS:
        raise error_of(what, connection, head, rest, http.read_timeout)
    is_empty = status == 204 or headers.get("content-length") == "0"
    connection.is_clean = is_empty and not rest and headers.get("connection", "").lower() != "close"
    return headers
