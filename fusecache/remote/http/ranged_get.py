"""Reads of the bucket without botocore on the way: one signed GET, its answer straight into the buffer.

botocore's get_object copies each body once more.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass

from fusecache.model.errors import Unavailable
from fusecache.model.objects import KIB, MIB, Extent, ObjectId
from fusecache.remote.http.connection_pool import Connection
from fusecache.remote.http.signed_requests import SLOWEST_BYTES_PER_SECOND, SignedHttp, error_of, parse_head
from fusecache.remote.protocol.headers import quoted_etag
from fusecache.remote.protocol.responses import GetResponse, check_get_response
from fusecache.remote.protocol.signing import SigningKeys
from fusecache.remote.store import Interruption

# The pieces in which a body is received and reported: the first small, as a slow link shows no life in between;
# then as large as comes in some milliseconds, as each piece costs switches between threads (at 256 KiB, 80 000 futex
# calls a GiB).
FIRST_PIECE_BYTES = 64 * KIB
LARGEST_PIECE_BYTES = MIB
QUICK_SECONDS = 0.005
SLOW_SECONDS = 0.020
# No object is longer; int() refuses thousands of digits by a ValueError.
LENGTH_DIGITS = 19


@dataclass(frozen=True, slots=True)
class GetRequest:
    """One GET, named `what` in errors: which bytes, where they go, and who hears of them or ends it."""

    what: str
    object_id: ObjectId
    extent: Extent
    target: memoryview
    progress: Callable[[int], None]
    interruption: Interruption


class DirectGets:
    """GETs over a wire. Safe for many threads. count_bytes: told of the bytes of bodies."""

    def __init__(self, http: SignedHttp, count_bytes: Callable[[int], None]) -> None:
        self._http = http
        self._count_bytes = count_bytes

    def fill(self, get: GetRequest, keys: SigningKeys) -> None:
        """Fill the target, as `Store.get_into` promises. Raises SentElsewhere before any byte came."""
        asked = {
            "if-match": quoted_etag(get.object_id.etag),
            "range": f"bytes={get.extent.start}-{get.extent.stop - 1}",
        }
        request = self._http.request("GET", get.object_id.key, asked, keys)
        self._http.lend(get.what, lambda connection: self._ask(get, request, connection))

    # ---- private

    def _ask(self, get: GetRequest, request: bytes, connection: Connection) -> None:
        with get.interruption.by(connection.interrupt):
            head, rest = connection.exchange(request)
            status, headers = parse_head(head)
            if status not in (200, 206):
                raise error_of(get.what, connection, head, rest, self._http.read_timeout)
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
            self._receive(get, connection, rest)
            connection.is_clean = (
                len(rest) <= get.extent.size and headers.get("connection", "").lower() != "close"
            )

    def _receive(self, get: GetRequest, connection: Connection, rest: bytes) -> None:
        """Receive the body, of which `rest` came with the head."""
        target, size = get.target, get.extent.size
        deadline = time.monotonic() + self._http.read_timeout + size / SLOWEST_BYTES_PER_SECOND
        filled = min(len(rest), size)
        target[:filled] = rest[:filled]
        try:
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
                piece, asked = next_piece_bytes(piece, now - asked), now
                if filled < size and now > deadline:
                    raise Unavailable(f"{get.what}: only {filled} of {size} bytes came in time")
        finally:
            self._count_bytes(filled)


def next_piece_bytes(piece: int, seconds: float) -> int:
    """Return the size of the piece after one that took so long."""
    if seconds < QUICK_SECONDS:
        return min(2 * piece, LARGEST_PIECE_BYTES)
    return max(piece // 2, FIRST_PIECE_BYTES) if seconds > SLOW_SECONDS else piece
