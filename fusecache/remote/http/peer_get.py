"""Ranged GETs from another node. Bytes count only if ETag, length and the checksum of each granule are right."""

import base64
import time
from collections.abc import Callable
from typing import Literal

from fusecache.model.errors import Unavailable
from fusecache.model.objects import GRANULE_BYTES, MIB
from fusecache.remote.http.connection_pool import Connection
from fusecache.remote.http.ranged_get import GetRequest
from fusecache.remote.http.signed_requests import error_of, parse_head
from fusecache.remote.protocol.headers import CHECKSUMS_HEADER, bare_etag

# How long a body may take before its rate is judged.
_JUDGED_SECONDS = 0.5
_PIECE_BYTES = MIB
_CHECKSUM_BYTES = 8
# Returns the checksums of the granules of some bytes.
Checksums = Callable[[memoryview], bytes]


class TooSlow(Unavailable):
    """A body came at less than the slowest rate."""


def ask_peer(
    get: GetRequest, checksums_of: Checksums, connection: Connection, request: bytes
) -> Literal[True]:
    """Send a GET with terms to a node, and receive its body. Raises OSError, HTTPException, RemoteError, Redirected.

    `get.progress` is called with 0 when the body begins.
    """
    assert get.terms is not None
    with get.interruption.by(connection.interrupt):
        head, rest = connection.exchange(request)
        status, headers = parse_head(head)
        if status != 206:
            raise error_of(get.what, connection, head, rest, connection.peer.read_timeout)
        checksums = _decoded(headers.get(CHECKSUMS_HEADER, ""))
        granules = -(-get.extent.size // GRANULE_BYTES)
        sent = f"bytes {get.extent.start}-{get.extent.stop - 1}/{get.terms.object_bytes}"
        if (
            bare_etag(headers.get("etag", "")) != get.object_id.etag
            or headers.get("content-length") != str(get.extent.size)
            or headers.get("content-range") != sent
            or len(checksums) != _CHECKSUM_BYTES * granules
        ):
            raise Unavailable(f"{get.what}: it answers with other bytes than were asked for")
        _receive(get, get.terms.slowest, checksums_of, checksums, connection, rest)
        connection.is_clean = len(rest) <= get.extent.size
    return True


def _receive(
    get: GetRequest,
    slowest: float,
    checksums_of: Checksums,
    checksums: bytes,
    connection: Connection,
    rest: bytes,
) -> None:
    """Receive the body; check each granule before `progress` counts it."""
    target, size = get.target, get.extent.size
    filled = min(len(rest), size)
    target[:filled] = rest[:filled]
    checked, began = 0, time.monotonic()
    if filled:
        get.progress(0)
    while checked < size:
        is_drained = False
        if filled < size:
            piece = target[filled : min(size, filled + _PIECE_BYTES)]
            count = connection.receive_all_into(piece)
            is_drained = count < len(piece)  # else more may be there: this node is slow to take it
            if not count:
                raise Unavailable(f"{get.what}: the body ended after {filled} of {size} bytes")
            if not filled:
                began = time.monotonic()  # a busy peer may need a while between the head and its body
                get.progress(0)
            filled += count
        whole = size if filled == size else filled // GRANULE_BYTES * GRANULE_BYTES
        if whole > checked:
            at = checked // GRANULE_BYTES * _CHECKSUM_BYTES
            found = checksums_of(target[checked:whole])
            if found != checksums[at : at + len(found)]:
                raise Unavailable(f"{get.what}: it sent bytes that do not have its checksums")
            checked = whole
            get.progress(checked)
        seconds = time.monotonic() - began
        is_slow = seconds > _JUDGED_SECONDS and filled < seconds * slowest
        if is_drained and filled < size and is_slow:
            raise TooSlow(f"{get.what}: slow: {filled} of {size} bytes in {seconds:.1f} s")


def _decoded(text: str) -> bytes:
    """Return what is in base64; b"" if it is not."""
    try:
        return base64.b64decode(text)
    except ValueError:
        return b""
