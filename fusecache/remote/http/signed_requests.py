"""Signed HTTP requests to the bucket without botocore: the shared base of GETs, PUTs and DELETEs.

botocore needs over 1 ms of CPU per request, most of it with the GIL held (`benchmarks/http_clients.py`).
Not here: the choice of URL, region and certificates. The first request through botocore determines them
(`RequestTemplate`), and botocore takes over again after a redirect.
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
from fusecache.remote.protocol.user_metadata import METADATA_PREFIX, STANDARD_HEADERS
from fusecache.remote.request_settings import HEADER_NAMES, RequestSettings

T = TypeVar("T")

# A slower body times out, so that a trickle of bytes cannot hold a thread and a buffer forever.
SLOWEST_BYTES_PER_SECOND = 32 * KIB
# Maximum bytes read of an error response, which is a short XML document.
ERROR_BYTES = 64 * KIB
# Headers that botocore signs for a plain bucket, besides user metadata. With any other, only botocore can make the
# request.
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
        *HEADER_NAMES,
        *STANDARD_HEADERS,
    ]
)
_AUTHORIZATION = re.compile(
    rf"{ALGORITHM} Credential=[^/,]+/\d{{8}}/(?P<region>[^/,]+)/s3/aws4_request, "
    r"SignedHeaders=(?P<signed>[^,]+), Signature=[0-9a-f]{64}"
)
NO_SETTINGS = RequestSettings()
# Names in the S3 API, by method and whether there is a query.
_OPERATIONS = {
    ("GET", False): "GetObject",
    ("PUT", False): "PutObject",
    ("PUT", True): "UploadPart",
    ("DELETE", False): "DeleteObject",
}
_VISIBLE = re.compile(r"[!-~]*")


@dataclass(frozen=True, slots=True)
class RequestTemplate:
    """The common part of all requests for a bucket's objects. base_path: the path before the key, ending in a slash."""

    scheme: str
    host: str
    port: int
    host_header: str
    base_path: str
    region: str
    user_agent: str


def request_template(
    url: str, key: str, authorization: str, user_agent: str, *, is_unsigned: bool = False
) -> RequestTemplate | None:
    """Return the template of an object request that botocore sent; None if this module cannot make such requests."""
    match = _AUTHORIZATION.fullmatch(authorization)
    parts = urlsplit(url)
    path = quoted_key(key)
    signed = match["signed"].split(";") if match is not None else []
    if (
        (match is None and not is_unsigned)
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
        region=match["region"] if match is not None else "",
        user_agent=user_agent,
    )


def quoted_key(key: str) -> str:
    """Return a key as it appears in a URL's path and in the signature."""
    return quote(key, safe="/~")


def is_plain(value: str) -> bool:
    """Return whether a value, such as an ETag, is valid in a header as it is: visible ASCII, or empty."""
    return _VISIBLE.fullmatch(value) is not None


class RedirectedRequest(Exception):
    """The response redirects to another endpoint or region."""


class SignedHttp:
    """Signed requests from one template, over one connection pool. Thread-safe.

    tls: holds the trusted certificates; None for plain HTTP.
    """

    def __init__(
        self,
        template: RequestTemplate,
        tls: TlsContext | ssl.SSLContext | None,
        transport: Transport,
        settings: RequestSettings = NO_SETTINGS,
    ) -> None:
        self._template = template
        self._settings = settings
        self.read_timeout = transport.read_timeout_seconds
        self.upload_pace = transport.upload_pace
        self._signer = Signer(template.host_header, template.region)
        peer = Peer(template.host, template.port, tls, transport.connect_timeout_seconds, self.read_timeout)
        self._pool = ConnectionPool(peer, transport.max_connections)

    def request(
        self,
        method: str,
        key: str,
        headers: Mapping[str, str],
        keys: SigningKeys | None,
        *,
        query: str = "",
        payload: str = EMPTY_SHA256,
    ) -> bytes:
        """Return a request's head. key: not empty. headers, query, payload: as for `Signer.headers`.

        keys: None sends the request unsigned.
        """
        assert key, "a request for the bucket itself"
        path = self._template.base_path + quoted_key(key)
        headers = {**headers, **self._settings.headers(_OPERATIONS[method, bool(query)])}
        if keys is None:
            signed = {**headers, "host": self._template.host_header}
        else:
            signed = self._signer.headers(
                path, headers, keys, time.time(), method=method, query=query, payload=payload
            )
        return self._head(method, path, query, signed)

    def _head(self, method: str, path: str, query: str, signed: Mapping[str, str]) -> bytes:
        lines = "".join([f"{name}: {value}\r\n" for name, value in signed.items()])
        # Not signed: a proxy may rewrite these two.
        lines += f"accept-encoding: identity\r\nuser-agent: {self._template.user_agent}\r\n"
        target = f"{path}?{query}" if query else path
        return f"{method} {target} HTTP/1.1\r\n{lines}\r\n".encode("ascii")

    def lend(self, what: str, exchange: Callable[[Connection], T]) -> T:
        """Call `exchange` with a connection; return its result. If a pooled connection is stale, retry on a new one.

        Raises Unavailable, with the name `what`, if the connection fails.
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
        """Close idle connections; requests in flight continue."""
        self._pool.close()


def parse_head(head: bytes) -> tuple[int, dict[str, str]]:
    """Return the status and the headers of a response's head; header names in lower case.

    Raises HTTPException if it is not HTTP/1.
    """
    first, *lines = head.decode("latin-1").split("\r\n")
    version, _, rest = first.partition(" ")
    if not version.startswith("HTTP/1.") or not (rest[:3].isascii() and rest[:3].isdigit()):
        raise http.client.BadStatusLine(first[:80])
    headers: dict[str, str] = {}
    for line in lines:
        name, _, value = line.partition(":")
        name, value = name.lower(), value.strip()
        # A repeated header is joined: it is then no valid number or ETag, and the check of the response rejects it.
        headers[name] = f"{headers[name]}, {value}" if name in headers else value
    return int(rest[:3]), headers


class _Replay(io.RawIOBase):
    """A response as a file: first the bytes received already, then those from the connection."""

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
                raise TimeoutError("timed out: the response does not end")
            return self._connection.receive_into(view)
        count = min(len(view), len(self._received))
        view[:count], self._received = self._received[:count], self._received[count:]
        return count

    def makefile(self, *_: object) -> io.BufferedReader:
        """Act as the socket that HTTPResponse expects."""
        return io.BufferedReader(self)


def response_of(
    connection: Connection, head: bytes, rest: bytes, seconds: float, method: str = "GET"
) -> http.client.HTTPResponse:
    """Return a response to be read, whatever its framing, for at most `seconds`. head, rest: received already."""
    replay = _Replay(head + END_OF_HEAD + rest, connection, seconds)
    answer = http.client.HTTPResponse(replay, method=method)  # type: ignore[arg-type]
    answer.begin()
    return answer


def error_of(
    what: str, connection: Connection, head: bytes, rest: bytes, seconds: float
) -> RemoteError | RedirectedRequest:
    """Read an error response to its end, whatever its framing, for at most `seconds`; return the error."""
    answer = response_of(connection, head, rest, seconds)
    return error_of_body(what, answer, answer.read(ERROR_BYTES))


def error_of_body(
    what: str, answer: http.client.HTTPResponse, body: bytes
) -> RemoteError | RedirectedRequest:
    """Return the error of a response whose body was read."""
    text = body.decode("utf-8", "replace")
    # Azure names the error of a response without a body in a header.
    code = xml_element("Code", text) or answer.getheader("x-ms-error-code", "")
    message = xml_element("Message", text).partition("\n")[0]
    if 300 <= answer.status < 400 or code == "AuthorizationHeaderMalformed":
        return RedirectedRequest(f"{what}: {answer.status} {code}")
    return error_of_response(
        what,
        code=code or str(answer.status),
        status=answer.status,
        message=message if code else answer.reason,
        retry_after_seconds=retry_after_seconds(answer.getheader("retry-after")),
        storage_class=xml_element("StorageClass", text),
    )


def xml_element(name: str, text: str) -> str:
    """Return the text of the first element of that name in a short XML document; "" if it has none."""
    match = re.search(rf"<{name}>([^<]*)</{name}>", text)
    return html.unescape(match[1]) if match else ""
