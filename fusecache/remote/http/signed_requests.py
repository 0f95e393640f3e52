"""Signed HTTP requests for the objects of one bucket, over one connection pool: the base of all stores.

What is sent again, and how often:

| request | sent again |
|---|---|
| every request | once on a new connection, if a kept one ends before a byte of the response |
| every request | once in another region, if the response names it |
| `call`: LIST, HEAD, uploads, copies, bulk deletes | `attempts` in all, without a response or after a 5xx or 429 |
| GET, PUT and DELETE of an object | not: the engine retries them |
"""

import hashlib
import html
import http.client
import io
import random
import re
import ssl
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar
from urllib.parse import quote, urlencode, urlsplit

from fusecache.model.errors import Refused, RemoteError, Unavailable
from fusecache.model.objects import KIB, MIB
from fusecache.remote.endpoints import Transport
from fusecache.remote.http.connection_pool import (
    END_OF_HEAD,
    Connection,
    ConnectionPool,
    Peer,
    proxy_for,
)
from fusecache.remote.http.tls import TlsContext
from fusecache.remote.protocol.responses import error_of_response, retry_after_seconds
from fusecache.remote.protocol.signing import EMPTY_SHA256, Sign

T = TypeVar("T")

# A slower body times out, so that a trickle of bytes cannot hold a thread and a buffer forever.
SLOWEST_BYTES_PER_SECOND = 32 * KIB
# Maximum bytes read of an error response, which is a short XML document.
ERROR_BYTES = 64 * KIB
# Largest response read into memory: a page of 1 000 names of 1 KiB, each character escaped.
RESPONSE_BYTES = 16 * MIB
# Azure answers 201 to a PUT, and 202 to a DELETE.
SUCCESS = (200, 201, 202, 204)
# S3 begins a response before the end of a long copy is known: the error follows a status of 200.
_LATE_ERROR = re.compile(rb"\s*(<\?xml[^>]*>)?\s*<Error[ >]")
# A HEAD has no body that says so: 400 is the answer to a signature for another region.
_ELSEWHERE = (301, 302, 307, 400)
# It becomes a part of the host's name.
_REGION = re.compile(r"[a-z0-9-]+")
# Answers to be retried by the engine alone: another write is in flight, or the store does not know the request.
_FINAL = (409, 501)
_NO_VALUE = re.compile("[^\t -~\x80-\xff]")


@dataclass(frozen=True, slots=True)
class HttpRequest:
    """One request. what: its name in errors. key: None is the bucket. headers: names in lower case.

    query: percent-encoded, sorted by name (`query_of`). payload: as for `Sign`.
    """

    what: str
    method: str
    key: str | None
    headers: Mapping[str, str] = field(default_factory=dict)
    query: str = ""
    payload: str = EMPTY_SHA256


@dataclass(frozen=True, slots=True)
class Reply:
    """A successful response. headers: names in lower case."""

    headers: Mapping[str, str]
    body: bytes


class Redirected(Exception):
    """The response names another region. error: what to raise if it is not followed."""

    def __init__(self, error: RemoteError, region: str) -> None:
        super().__init__(str(error))
        self.error = error
        self.region = region


@dataclass(frozen=True, slots=True)
class Site:
    """Where requests go and how they are signed. url: scheme, host and port. base_path: ends in a slash.

    region: "" if requests name none. tls: the trusted CAs; not used without TLS.
    """

    url: str
    base_path: str
    sign: Sign
    region: str = ""
    tls: TlsContext | ssl.SSLContext | None = None


class SignedHttp:
    """Sends requests to a `Site`. Thread-safe."""

    def __init__(
        self,
        site: Site,
        transport: Transport,
        *,
        options: Callable[[HttpRequest], Mapping[str, str]] = lambda _: {},
        move: Callable[[str], Site] | None = None,
    ) -> None:
        """options: headers that a request carries unless it has its own. move: returns the site in another region.

        Raises ConfigError for a proxy that cannot be used.
        """
        self._transport = transport
        self.read_timeout = transport.read_timeout_seconds
        self.upload_pace = transport.upload_pace
        self.carry = transport.carry
        self._options = options
        self._move = move
        self._route = _Route(site, transport)

    def exchange(
        self,
        request: HttpRequest,
        ask: Callable[[Connection, bytes], T],
        carry: Callable[[Peer, bytes], T | None] | None = None,
    ) -> T:
        """Call `ask` with a connection and the request's head; return its result.

        carry: may do it without a connection of this process. It returns None if it does not, and raises as this does.
        Raises Unavailable if the connection fails, Refused for a request that HTTP cannot carry.
        """
        route = self._route
        try:
            return self._lend(route, request, ask, carry)
        except Redirected as exc:
            moved = self._moved(route, exc)
        try:
            return self._lend(moved, request, ask, carry)
        except Redirected as exc:
            raise exc.error from None

    def call(
        self,
        what: str,
        method: str,
        key: str | None,
        headers: Mapping[str, str] | None = None,
        *,
        query: str = "",
        body: bytes = b"",
    ) -> Reply:
        """Send a request without a body, or with a small one. Raises the error of the response, and Unavailable."""
        headers = headers or {}
        if method not in ("GET", "HEAD"):
            headers = {**headers, "content-length": str(len(body))}
        payload = hashlib.sha256(body).hexdigest() if body else EMPTY_SHA256
        request = HttpRequest(what, method, key, headers, query, payload)
        for attempt in range(1, self._transport.attempts):
            try:
                return self.exchange(request, partial(self._reply, request, body))
            except Unavailable as exc:
                if exc.status in _FINAL:
                    raise
                time.sleep(random.random() * 2 ** (attempt - 1))
        return self.exchange(request, partial(self._reply, request, body))

    def path(self, key: str | None) -> str:
        """Return the path of an object in a URL; of the bucket for None."""
        return self._route.path(key)

    def url(self, key: str) -> str:
        """Return the URL of an object, as a copy names its source."""
        path = self.path(key)
        query, _ = self._route.site.sign("GET", path, "", {}, EMPTY_SHA256)
        return f"{self._route.origin}{path}" + (f"?{query}" if query else "")

    def close(self) -> None:
        """Close idle connections; requests in flight continue."""
        self._route.pool.close()

    # ---- private

    def _lend(
        self,
        route: "_Route",
        request: HttpRequest,
        ask: Callable[[Connection, bytes], T],
        carry: Callable[[Peer, bytes], T | None] | None,
    ) -> T:
        head = route.head(request, {**self._options(request), **request.headers})
        carried = carry(route.peer, head) if carry is not None else None
        if carried is not None:
            return carried
        return route.pool.lend(request.what, lambda connection: ask(connection, head))

    def _moved(self, used: "_Route", redirect: Redirected) -> "_Route":
        """Return the route to the region that a response names, for all later requests too."""
        if self._move is None or redirect.region == used.site.region:
            raise redirect.error
        if redirect.region != self._route.site.region:  # else another thread has moved already
            self._route = _Route(self._move(redirect.region), self._transport)
            used.pool.close()
        return self._route

    def _reply(self, request: HttpRequest, body: bytes, connection: Connection, head: bytes) -> Reply:
        head, rest = connection.exchange(head + body)
        status, headers = parse_head(head)
        answer = response_of(connection, head, rest, self.read_timeout, request.method)
        received = answer.read(RESPONSE_BYTES)
        if answer.length or not answer.isclosed():
            raise Unavailable(
                f"{request.what}: the response is incomplete, or longer than {RESPONSE_BYTES} bytes"
            )
        is_exact = len(rest) <= len(received) or "transfer-encoding" in headers
        connection.is_clean = is_exact and not answer.will_close
        if status not in SUCCESS or _LATE_ERROR.match(received):
            raise error_of_body(request.what, answer, received)
        return Reply(headers, received)


class _Route:
    """A site and the connections to it."""

    def __init__(self, site: Site, transport: Transport) -> None:
        parts = urlsplit(site.url)
        name, is_tls = parts.hostname or "", parts.scheme == "https"
        default = 443 if is_tls else 80
        port = parts.port or default
        host = f"[{name}]" if ":" in name else name
        self.site = site
        self._host = host if port == default else f"{host}:{port}"
        self.origin = f"{parts.scheme}://{self._host}"
        proxy = None if transport.is_direct else proxy_for(self.origin)
        # A proxy without TLS is asked for whole URLs, with TLS for a tunnel.
        self._before_path = self.origin if proxy is not None and not is_tls else ""
        self._unsigned = "accept-encoding: identity\r\nuser-agent: fusecache\r\n"
        if self._before_path and proxy is not None and proxy.authorization:
            self._unsigned += f"proxy-authorization: {proxy.authorization}\r\n"
        self.peer = Peer(
            name,
            port,
            site.tls if is_tls else None,
            transport.connect_timeout_seconds,
            transport.read_timeout_seconds,
            proxy,
        )
        self.pool = ConnectionPool(self.peer, transport.max_connections)

    def path(self, key: str | None) -> str:
        base = self.site.base_path
        return base.removesuffix("/") if key is None else base + quoted_key(key)

    def head(self, request: HttpRequest, headers: Mapping[str, str]) -> bytes:
        """Return a request's head, signed now. Raises Refused."""
        if request.key == "":
            raise Refused(f"{request.what}: an empty key names no object")
        if _NO_VALUE.search("".join(headers.values())):
            raise Refused(f"{request.what}: HTTP cannot carry one of these headers: {dict(request.headers)}")
        path, method = self.path(request.key), request.method
        query, signed = self.site.sign(
            method, path, request.query, {"host": self._host, **headers}, request.payload
        )
        lines = "".join([f"{name}: {value}\r\n" for name, value in signed.items()])
        # Not signed: a proxy may rewrite the last ones.
        target = f"{self._before_path}{path}?{query}" if query else self._before_path + path
        return f"{method} {target} HTTP/1.1\r\n{lines}{self._unsigned}\r\n".encode("latin-1")


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


def error_of(what: str, connection: Connection, head: bytes, rest: bytes, seconds: float) -> Exception:
    """Read an error response to its end, whatever its framing, for at most `seconds`; return the error."""
    answer = response_of(connection, head, rest, seconds)
    return error_of_body(what, answer, answer.read(ERROR_BYTES))


def error_of_body(what: str, answer: http.client.HTTPResponse, body: bytes) -> Exception:
    """Return the error of a response whose body was read: a RemoteError, or Redirected."""
    text = body.decode("utf-8", "replace")
    # Azure names the error of a response without a body in a header.
    code = xml_element("Code", text) or answer.getheader("x-ms-error-code", "")
    message = xml_element("Message", text).partition("\n")[0]
    status = 500 if answer.status in SUCCESS else answer.status
    error = error_of_response(
        what,
        code=code or str(status),
        status=status,
        message=message if code else answer.reason,
        retry_after_seconds=retry_after_seconds(answer.getheader("retry-after")),
        storage_class=xml_element("StorageClass", text),
    )
    region = answer.getheader("x-amz-bucket-region", "") or xml_element("Region", text)
    is_elsewhere = status in _ELSEWHERE and _REGION.fullmatch(region) is not None
    return Redirected(error, region) if is_elsewhere else error


def xml_element(name: str, text: str) -> str:
    """Return the text of the first element of that name in a short XML document; "" if it has none."""
    match = re.search(rf"<{name}>([^<]*)</{name}>", text)
    return html.unescape(match[1]) if match else ""


def query_of(chosen: Mapping[str, str]) -> str:
    """Return a query, percent-encoded and sorted by name."""
    return urlencode(sorted(chosen.items()), quote_via=quote)


def quoted_key(key: str) -> str:
    """Return a key as it appears in a URL's path and in the signature."""
    return quote(key, safe="/~")
