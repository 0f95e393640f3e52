"""Ranged GETs of one version. The kernel copies the body straight into the caller's buffer."""

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal, NamedTuple, Self

from fusecache.model.errors import Unavailable
from fusecache.model.objects import KIB, MIB, Extent, ObjectId
from fusecache.remote.http.connection_pool import Connection, Peer
from fusecache.remote.http.signed_requests import (
    SLOWEST_BYTES_PER_SECOND,
    HttpRequest,
    SignedHttp,
    error_of,
    parse_head,
)
from fusecache.remote.protocol.headers import quoted_etag
from fusecache.remote.protocol.responses import GetResponse, check_get_response
from fusecache.remote.store import Interruption

# A body is received and reported in pieces. The first ones are small, so that progress shows on a slow link. Then they
# grow to what arrives in PIECE_SECONDS: each piece takes the interpreter's lock, and switches threads.
FIRST_PIECE_BYTES = 64 * KIB
# Received within 1.5 s, the shortest limit for silence, also by a link that slows down to 1.4 MB/s at once.
LARGEST_PIECE_BYTES = 2 * MIB
# A reader that begins to wait for bytes of a piece gets them this much later.
PIECE_SECONDS = 0.040
_GROWTH = 4
# No object has a longer size. The limit keeps int() from its ValueError for thousands of digits.
LENGTH_DIGITS = 19


class PeerTerms(NamedTuple):
    """What another node must keep to: the size of the object, and the bytes a second below which it is given up."""

    object_bytes: int
    slowest: float


class ReceiverEnded(Unavailable):
    """The process that received a body ended. That says nothing about the server."""


@dataclass(frozen=True, slots=True)
class GetRequest:
    """One GET: its name in errors, its byte range, the target buffer, the progress callback, the cancellation.

    terms: None if the bucket is asked.
    """

    what: str
    object_id: ObjectId
    extent: Extent
    target: memoryview
    progress: Callable[[int], None]
    interruption: Interruption
    terms: PeerTerms | None = None

    @classmethod
    def into(
        cls,
        buffer: memoryview,
        what: str,
        object_id: ObjectId,
        extent: Extent,
        progress: Callable[[int], None],
        interruption: Interruption | None,
        terms: PeerTerms | None = None,
    ) -> Self:
        """Return a GET that fills the front of `buffer`. Raises ValueError if the buffer cannot hold the extent."""
        target = buffer[: extent.size]
        if target.nbytes != extent.size:
            raise ValueError(f"a buffer of {buffer.nbytes} bytes cannot hold {extent.size}")
        return cls(what, object_id, extent, target, progress, interruption or Interruption(), terms)


# Has another process send a signed GET and receive the body; returns None if the caller must. Raises RemoteError,
# Redirected.
Carry = Callable[[GetRequest, Peer, bytes], Literal[True] | None]


def fill(http: SignedHttp, get: GetRequest, count_bytes: Callable[[int], None]) -> None:
    """Fill the target, as `Store.get_into` specifies. count_bytes: called with the number of body bytes received."""
    asked = {
        "if-match": quoted_etag(get.object_id.etag),
        "range": f"bytes={get.extent.start}-{get.extent.stop - 1}",
    }
    request = HttpRequest(get.what, "GET", get.object_id.key, asked)
    received = 0

    def progress(count: int) -> None:
        nonlocal received
        received = count
        get.progress(count)

    counted = replace(get, progress=progress)
    carry = partial(http.carry, counted) if http.carry is not None else None
    try:
        http.exchange(request, partial(ask, counted, http.read_timeout), carry)
    finally:
        count_bytes(received)


def ask(get: GetRequest, read_timeout: float, connection: Connection, request: bytes) -> Literal[True]:
    """Send a GET and receive its body. Raises OSError, HTTPException, RemoteError, Redirected."""
    with get.interruption.by(connection.interrupt):
        head, rest = connection.exchange(request)
        status, headers = parse_head(head)
        if status not in (200, 206):
            raise error_of(get.what, connection, head, rest, read_timeout)
        length = headers.get("content-length", "")
        is_sized = (
            length.isascii()
            and length.isdigit()
            and len(length) <= LENGTH_DIGITS
            and "transfer-encoding" not in headers
        )
        facts = GetResponse(
            status=status,
            etag=headers.get("etag", ""),
            content_range=headers.get("content-range", ""),
            content_length=int(length) if is_sized else None,
        )
        check_get_response(get.what, get.object_id, get.extent, facts)
        _receive(get, read_timeout, connection, rest)
        connection.is_clean = (
            len(rest) <= get.extent.size and headers.get("connection", "").lower() != "close"
        )
    return True


def _receive(get: GetRequest, read_timeout: float, connection: Connection, rest: bytes) -> None:
    """Receive the body. rest: the bytes that came with the head, possibly more than the body."""
    target, size = get.target, get.extent.size
    deadline = time.monotonic() + read_timeout + size / SLOWEST_BYTES_PER_SECOND
    filled = min(len(rest), size)
    target[:filled] = rest[:filled]
    if filled:
        get.progress(filled)
    piece, asked = FIRST_PIECE_BYTES, time.monotonic()
    while filled < size:
        count = connection.receive_all_into(target[filled : filled + piece])
        if count == 0:
            raise Unavailable(f"{get.what}: the body ended after {filled} of {size} bytes")
        filled += count
        get.progress(filled)
        now = time.monotonic()
        piece, asked = next_piece_bytes(count, now - asked), now
        if filled < size and now > deadline:
            raise Unavailable(f"{get.what}: timeout after {filled} of {size} bytes")


def next_piece_bytes(count: int, seconds: float) -> int:
    """Return the size of the next piece, after `count` bytes that took `seconds`."""
    arriving = int(count * PIECE_SECONDS / max(seconds, 1e-6))
    return max(FIRST_PIECE_BYTES, min(arriving, _GROWTH * count, LARGEST_PIECE_BYTES))
