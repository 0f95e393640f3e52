"""Requests to the bucket without botocore on the way: what the short GETs, PUTs and DELETEs have in common.

botocore takes over 1 ms of CPU a request, most of it under the interpreter's lock (`benchmarks/get_cost.py`).
Not here: which URL, region and certificates are right. botocore shows them with the first request of a client
(`Form`), and takes over again where an answer sends elsewhere.
"""

import html
import http.client
import io
import re
import ssl
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeVar
from urllib.parse import quote, urlsplit

from fusecache.model.errors import RemoteError, Unavailable
from fusecache.model.objects import KIB
from fusecache.remote.endpoints import Transport
from fusecache.remote.http.connection_pool import (
    END_OF_HEAD,
    Connection,
    ConnectionPool,
    Peer,
    StaleConnection,
)
from fusecache.remote.http.tls import TlsContext
from fusecache.remote.protocol.responses import error_of_response, retry_after_seconds
from fusecache.remote.protocol.signing import ALGORITHM, EMPTY_SHA256, Signer, SigningKeys
from fusecache.remote.protocol.user_metadata import METADATA_PREFIX

T = TypeVar("T")

# A body slower than this is given up, so that a trickle of bytes cannot hold a thread and a buffer for ever.
SLOWEST_BYTES_PER_SECOND = 32 * KIB
ERROR_BYTES = 64 * KIB
# Headers that botocore may have signed for a plain bucket. Any other: a request that only it can make.
KNOWN_SIGNED = frozenset(
    [
        "amz-sdk-invocation-id",
        "amz-sdk-request",
        "content-length",
        "content-md5",
        "host",
        "if-match",
        "if-none-match",
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
_VISIBLE = re.compile(r"[!-~]*")


@dataclass(frozen=True, slots=True)
class RequestTemplate:
    """What the requests for a bucket's objects have in common. base_path: before the key, with its slash at the end."""

    scheme: str
    host: str
    port: int
    host_header: str
    base_path: str
    region: str
    user_agent: str


def request_template(url: str, key: str, authorization: str, user_agent: str) -> RequestTemplate | None:
    """Return the form of a request for an object that botocore sent; None if it is none that can be repeated here."""
    match = _AUTHORIZATION.fullmatch(authorization)
    parts = urlsplit(url)
    path = quoted_key(key)
    signed = match["signed"].split(";") if match is not None else []
    if (
        match is None
        or not {name for name in signed if not name.startswith(METADATA_PREFIX)} <= KNOWN_SIGNED
        or parts.scheme not in ("http", "https")
        or parts.query
        or not parts.hostname
        or not parts.path.endswith(f"/{path}")
    ):
        return None
    default = 443 if parts.scheme == "https" else 80
    host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
    port = parts.port or default
    return RequestTemplate(
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


def is_plain(value: str) -> bool:
    """Return whether a value, such as an ETag, can stand in a header as it is: visible ASCII, or nothing."""
    return _VISIBLE.fullmatch(value) is not None


class RedirectedRequest(Exception):
    """The answer names another place or region."""


class SignedHttp:
    """Signed requests of one form, over one pool of connections. Safe for many threads.

    tls: with the certificates to trust; None for plain HTTP.
    """

    def __init__(
        self, form: RequestTemplate, tls: TlsContext | ssl.SSLContext | None, transport: Transport
    ) -> None:
        self._template = form
        self.read_timeout = transport.read_timeout_seconds
        self._signer = Signer(form.host_header, form.region)
        peer = Peer(form.host, form.port, tls, transport.connect_timeout_seconds, self.read_timeout)
        self._pool = ConnectionPool(peer, transport.max_connections)

    def request(
        self,
        method: str,
        key: str,
        headers: Mapping[str, str],
        keys: SigningKeys,
        *,
        query: str = "",
        payload: str = EMPTY_SHA256,
    ) -> bytes:
        """Return a request's head. key: not empty. headers, query, payload: as `Signer` takes them."""
        assert key, "a request for the bucket itself"
        path = self._template.base_path + quoted_key(key)
        signed = self._signer.headers(
            path, headers, keys, time.time(), method=method, query=query, payload=payload
        )
        lines = "".join([f"{name}: {value}\r\n" for name, value in signed.items()])
        # Not signed: a proxy on the way may rewrite these two.
        lines += f"accept-encoding: identity\r\nuser-agent: {self._template.user_agent}\r\n"
        target = f"{path}?{query}" if query else path
        return f"{method} {target} HTTP/1.1\r\n{lines}\r\n".encode("ascii")

    def lend(self, what: str, exchange: Callable[[Connection], T]) -> T:
        """Return what `exchange` makes of a connection: of a second, new one if a kept one turns out to be closed.

        Raises Unavailable, for `what`, where the connection fails.
        """
        connection = self._pool.take()
        try:
            try:
                return exchange(connection)
            except StaleConnection:
                connection.close()
                connection = self._pool.new()
                return exchange(connection)
        except (OSError, http.client.HTTPException) as exc:
            raise Unavailable(f"{what}: {str(exc) or type(exc).__name__}") from exc
        finally:
            self._pool.give_back(connection)

    def close(self) -> None:
        """Close idle connections; requests under way go on."""
        self._pool.close()


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
) -> RemoteError | RedirectedRequest:
    """Read an error answer to its end, however it is framed, for so long; return what it means."""
    answer = http.client.HTTPResponse(_Replay(head + END_OF_HEAD + rest, connection, seconds))  # type: ignore[arg-type]
    answer.begin()
    text = answer.read(ERROR_BYTES).decode("utf-8", "replace")
    code, message = _element("Code", text), _element("Message", text)
    if 300 <= answer.status < 400 or code == "AuthorizationHeaderMalformed":
        return RedirectedRequest(f"{what}: {answer.status} {code}")
    return error_of_response(
        what,
        code=code or str(answer.status),
        status=answer.status,
        message=message if code else answer.reason,
        retry_after_seconds=retry_after_seconds(answer.getheader("retry-after")),
    )


def _element(name: str, text: str) -> str:
    match = re.search(rf"<{name}>([^<]*)</{name}>", text)
    return html.unescape(match[1]) if match else ""
