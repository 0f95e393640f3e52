"""Reads of the bucket without botocore on the way: one signed GET, its answer straight into the buffer.

botocore's get_object takes over 1 ms of CPU a request and copies each body once more (`benchmarks/get_cost.py`).
Not here: which URL, region and certificates are right. botocore shows them with the first GET of a client
(`Form`), and takes over again where an answer sends elsewhere.
"""

import html
import http.client
import io
import re
import ssl
import time
from collections.abc import Callable
from dataclasses import dataclass
from urllib.parse import quote, urlsplit

from fusecache.model.errors import RemoteError, Unavailable
from fusecache.model.nouns import KIB, MIB, Extent, ObjectId
from fusecache.remote.answers import GetFacts, check_get_answer, error_of_answer, retry_after_seconds
from fusecache.remote.connections import (
    END_OF_HEAD,
    Connection,
    ConnectionPool,
    Peer,
    StaleConnection,
)
from fusecache.remote.endpoints import Transport
from fusecache.remote.headers import quoted_etag
from fusecache.remote.openssl import TlsContext
from fusecache.remote.signing import ALGORITHM, Keys, Signer
from fusecache.remote.store import Interruption

# The pieces in which a body is received and reported: the first small, as a slow link shows no life in between;
# then as large as comes in some milliseconds, as each piece costs switches between threads (at 256 KiB, 80 000 futex
# calls a GiB).
FIRST_PIECE_BYTES = 64 * KIB
LARGEST_PIECE_BYTES = MIB
QUICK_SECONDS = 0.005
SLOW_SECONDS = 0.020
# A body slower than this is given up, so that a trickle of bytes cannot hold a thread and a buffer for ever.
SLOWEST_BYTES_PER_SECOND = 32 * KIB
ERROR_BYTES = 64 * KIB
# No object is longer; int() refuses thousands of digits by a ValueError.
LENGTH_DIGITS = 19
# Headers that botocore may have signed in a GET of a plain bucket. Any other: a request that only it can make.
KNOWN_SIGNED = frozenset(
    [
        "amz-sdk-invocation-id",
        "amz-sdk-request",
        "host",
        "if-match",
        "range",
        "x-amz-content-sha256",
        "x-amz-date",
        "x-amz-security-token",
    ]
)
_AUTHORIZATION = re.compile(
    rf"{ALGORITHM} Credential=[^/,]+/\d{{8}}/(?P<region>[^/,]+)/s3/aws4_request, "
    r"SignedHeaders=(?P<signed>[^,]+), Signature=[0-9a-f]{64}"
)
_VISIBLE = re.compile(r"[!-~]+")


@dataclass(frozen=True, slots=True)
class Form:
    """What all GETs of a bucket have in common. base_path: before the key, with its slash at the end."""

    scheme: str
    host: str
    port: int
    host_header: str
    base_path: str
    region: str
    user_agent: str


def form_of(url: str, key: str, authorization: str, user_agent: str) -> Form | None:
    """Return the form of a GET that botocore sent; None if it is none that can be repeated here."""
    match = _AUTHORIZATION.fullmatch(authorization)
    parts = urlsplit(url)
    path = quoted_key(key)
    if (
        match is None
        or not set(match["signed"].split(";")) <= KNOWN_SIGNED
        or parts.scheme not in ("http", "https")
        or parts.query
        or not parts.hostname
        or not parts.path.endswith(f"/{path}")
    ):
        return None
    default = 443 if parts.scheme == "https" else 80
    host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
    port = parts.port or default
    return Form(
        scheme=parts.scheme,
        host=parts.hostname,
        port=port,
        host_header=host if port == default else f"{host}:{port}",
        base_path=parts.path[: -len(path)],
        region=match["region"],
        user_agent=user_agent,
    )


def quoted_key(key: str) -> str:
    """Return a key as it stands in a URL's path, and in what is signed."""
    return quote(key, safe="/~")


class SentElsewhere(Exception):
    """The answer names another place or region."""


@dataclass(frozen=True, slots=True)
class Get:
    """One GET, named `what` in errors: which bytes, where they go, and who hears of them or ends it."""

    what: str
    object_id: ObjectId
    extent: Extent
    target: memoryview
    progress: Callable[[int], None]
    interruption: Interruption


class RangedGets:
    """GETs of one form. Safe for many threads.

    tls: with the certificates to trust; None for plain HTTP. count_bytes: told of the bytes of bodies.
    """

    def __init__(
        self,
        form: Form,
        tls: TlsContext | ssl.SSLContext | None,
        transport: Transport,
        count_bytes: Callable[[int], None],
    ) -> None:
        self._form = form
        self._read_timeout = transport.read_timeout_seconds
        self._count_bytes = count_bytes
        self._signer = Signer(form.host_header, form.region)
        peer = Peer(form.host, form.port, tls, transport.connect_timeout_seconds, self._read_timeout)
        self._pool = ConnectionPool(peer, transport.max_connections)

    def can_ask_for(self, object_id: ObjectId) -> bool:
        """Return whether the version can stand in a header as it is."""
        return _VISIBLE.fullmatch(object_id.etag) is not None

    def fill(self, get: Get, keys: Keys) -> None:
        """Fill the target, as `Store.get_into` promises. Raises SentElsewhere before any byte came."""
        request = self._request(get, keys)
        connection = self._pool.take()
        try:
            self._ask(get, request, connection)
        except StaleConnection:
            connection.close()
            connection = self._pool.new()
            self._ask(get, request, connection)
        finally:
            self._pool.give_back(connection)

    def close(self) -> None:
        """Close idle connections; reads under way go on."""
        self._pool.close()

    # ---- private

    def _request(self, get: Get, keys: Keys) -> bytes:
        path = self._form.base_path + quoted_key(get.object_id.key)
        asked = {
            "if-match": quoted_etag(get.object_id.etag),
            "range": f"bytes={get.extent.start}-{get.extent.stop - 1}",
        }
        headers = self._signer.headers(path, asked, keys, time.time())
        lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        # Not signed: a proxy on the way may rewrite these two.
        lines += f"accept-encoding: identity\r\nuser-agent: {self._form.user_agent}\r\n"
        return f"GET {path} HTTP/1.1\r\n{lines}\r\n".encode("ascii")

    def _ask(self, get: Get, request: bytes, connection: Connection) -> None:
        try:
            with get.interruption.by(connection.interrupt):
                head, rest = connection.exchange(request)
                status, headers = parse_head(head)
                if status not in (200, 206):
                    raise error_of(get.what, connection, head, rest, self._read_timeout)
                length = headers.get("content-length", "")
                is_sized = (
                    length.isascii()
                    and length.isdigit()
                    and len(length) <= LENGTH_DIGITS
                    and "transfer-encoding" not in headers
                )
                facts = GetFacts(
                    status=status,
                    etag=headers.get("etag", ""),
                    content_range=headers.get("content-range", ""),
                    content_length=int(length) if is_sized else None,
                )
                check_get_answer(get.what, get.object_id, get.extent, facts)
                self._receive(get, connection, rest)
                connection.is_clean = (
                    len(rest) <= get.extent.size and headers.get("connection", "").lower() != "close"
                )
        except (OSError, http.client.HTTPException) as exc:
            raise Unavailable(f"{get.what}: {str(exc) or type(exc).__name__}") from exc

    def _receive(self, get: Get, connection: Connection, rest: bytes) -> None:
        """Receive the body, of which `rest` came with the head."""
        target, size = get.target, get.extent.size
        deadline = time.monotonic() + self._read_timeout + size / SLOWEST_BYTES_PER_SECOND
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


def parse_head(head: bytes) -> tuple[int, dict[str, str]]:
    """Return the status and the headers, names in lower case, of an answer's head.

    Raises HTTPException for what is no HTTP/1.
    """
    first, *lines = head.decode("latin-1").split("\r\n")
    version, _, rest = first.partition(" ")
    if not version.startswith("HTTP/1.") or not (rest[:3].isascii() and rest[:3].isdigit()):
        raise http.client.BadStatusLine(first[:80])
    headers: dict[str, str] = {}
    for line in lines:
        name, _, value = line.partition(":")
        name, value = name.lower(), value.strip()
        # A header that came twice is no number and no ETag any more: the check of the answer refuses it.
        headers[name] = f"{headers[name]}, {value}" if name in headers else value
    return int(rest[:3]), headers


class _Replay(io.RawIOBase):
    """An answer as a file: what was received of it already, then the connection."""

    def __init__(self, received: bytes, connection: Connection, seconds: float) -> None:
        self._received = memoryview(received)
        self._connection = connection
        self._deadline = time.monotonic() + seconds

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: object) -> int:
        view = memoryview(buffer)  # type: ignore[arg-type]  # typeshed has no name for what io passes here
        if not self._received:
            if time.monotonic() > self._deadline:
                raise TimeoutError("timed out: the answer does not end")
            return self._connection.receive_into(view)
        count = min(len(view), len(self._received))
        view[:count], self._received = self._received[:count], self._received[count:]
        return count

    def makefile(self, *_: object) -> io.BufferedReader:
        """Stand for the socket that HTTPResponse asks for."""
        return io.BufferedReader(self)


def error_of(
    what: str, connection: Connection, head: bytes, rest: bytes, seconds: float
) -> RemoteError | SentElsewhere:
    """Read an error answer to its end, however it is framed, for so long; return what it means."""
    answer = http.client.HTTPResponse(_Replay(head + END_OF_HEAD + rest, connection, seconds))  # type: ignore[arg-type]
    answer.begin()
    text = answer.read(ERROR_BYTES).decode("utf-8", "replace")
    code, message = _element("Code", text), _element("Message", text)
    if 300 <= answer.status < 400 or code == "AuthorizationHeaderMalformed":
        return SentElsewhere(f"{what}: {answer.status} {code}")
    return error_of_answer(
        what,
        code=code or str(answer.status),
        status=answer.status,
        message=message if code else answer.reason,
        retry_after_seconds=retry_after_seconds(answer.getheader("retry-after")),
    )


def _element(name: str, text: str) -> str:
    match = re.search(rf"<{name}>([^<]*)</{name}>", text)
    return html.unescape(match[1]) if match else ""
