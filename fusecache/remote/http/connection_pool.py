"""HTTP/1.1 connections and their pool, with the standard library only.

Invariants:
1. A connection belongs to one thread at a time. Only `interrupt` may come from another thread.
2. A connection is reused only if its response was read to the end, and the peer has since sent nothing and not closed.

The HTTP proxy that the environment names: HTTP_PROXY, HTTPS_PROXY and NO_PROXY, also in lower case.
"""

import base64
import http.client
import os
import re
import resource
import select
import socket
import ssl
import struct
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TypeVar
from urllib.parse import unquote, urlsplit
from urllib.request import getproxies, proxy_bypass

from fusecache.model.errors import ConfigError, Unavailable
from fusecache.remote.http.tls import TlsContext, TlsSocket

T = TypeVar("T")
_HEAD_BYTES = 16384


@dataclass(frozen=True, slots=True)
class Proxy:
    """A proxy. authorization: the value of its header, from the user name and the password in its URL, or empty."""

    host: str
    port: int
    authorization: str = field(default="", repr=False)


def proxy_for(url: str) -> Proxy | None:
    """Return the proxy for requests to a URL; None if they go straight there. Raises ConfigError."""
    target = urlsplit(url)
    chosen = getproxies().get(target.scheme)
    if not chosen or proxy_bypass(target.netloc):
        return None
    parts = urlsplit(chosen if "://" in chosen else f"http://{chosen}")
    variable = f"{target.scheme.upper()}_PROXY"
    try:
        port = parts.port or 80
    except ValueError:
        port = 0
    if parts.scheme != "http" or not parts.hostname or not port:
        shown = f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}"
        raise ConfigError(
            f"{variable} = {shown}: a proxy must be like http://HOST:PORT; change it, or add {target.hostname} to "
            "NO_PROXY"
        )
    authorization = ""
    if parts.username is not None:
        keys = f"{unquote(parts.username)}:{unquote(parts.password or '')}"
        authorization = f"Basic {base64.b64encode(keys.encode()).decode('ascii')}"
    return Proxy(parts.hostname, port, authorization)


def open_tunnel(sock: socket.socket, proxy: Proxy, host: str, port: int, seconds: float) -> None:
    """Have the proxy at the other end of `sock` connect to a server: what is sent then goes there.

    Raises ConnectionError if the proxy refuses, OSError.
    """
    host = host if host.isascii() else host.encode("idna").decode("ascii")
    name = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    request = f"CONNECT {name} HTTP/1.1\r\nhost: {name}\r\n"
    if proxy.authorization:
        request += f"proxy-authorization: {proxy.authorization}\r\n"
    sock.sendall(f"{request}\r\n".encode("ascii"))
    head, deadline = b"", time.monotonic() + seconds
    while b"\r\n\r\n" not in head:
        piece = sock.recv(_HEAD_BYTES)
        head += piece
        if not piece or len(head) > _HEAD_BYTES:
            raise ConnectionError(f"the proxy {proxy.host}:{proxy.port} ended its response too early")
        if time.monotonic() > deadline:
            raise TimeoutError(f"timed out: the proxy {proxy.host}:{proxy.port}")
    line = head.partition(b"\r\n")[0].decode("latin-1")
    if line.split(" ")[1:2] != ["200"]:
        hint = "; put USER:PASSWORD@ before its host in HTTPS_PROXY" if " 407 " in f"{line} " else ""
        raise ConnectionError(f"the proxy {proxy.host}:{proxy.port} connects to no {name}: {line}{hint}")


# Routers and NATs drop idle connections after some minutes without notifying either end.
IDLE_SECONDS = 60.0
# Of the limit of open files, the part that the idle connections of a pool may keep: nothing else closes them.
_SHARE = 8
# A response's head is about 500 bytes. Body bytes that arrive with it are copied an extra time.
HEAD_BYTES = 16384
END_OF_HEAD = b"\r\n\r\n"
# An interim response may come unasked before the final one (RFC 9110, 15.2). 101 is not interim.
_INTERIM = re.compile(rb"HTTP/1\.[01] 1(?!01)\d\d")
# Maximum time that received bytes wait for the rest of a buffer before the reader gets them.
MAX_RECEIVE_WAIT_SECONDS = 0.2
# Largest amount that one sendfile call sends from the page cache.
LARGEST_SEND_BYTES = 8 * 1024 * 1024
# A call returns when the kernel has taken all its bytes. On a slow link, smaller calls report progress in between.
FIRST_SEND_BYTES, SMALLEST_SEND_BYTES = 1024 * 1024, 128 * 1024
QUICK_SEND_SECONDS, SLOW_SEND_SECONDS = 0.1, 0.5
# Buffer for bodies over TLS; small enough for the L2 cache.
PIECE_BYTES = 512 * 1024


# Interim responses extend the time for the final one up to this; an endless row of them must not hold a thread.
_LONGEST_INTERIMS_SECONDS = 60.0


class StaleConnection(Exception):
    """The peer has closed a pooled connection; no byte of a response came."""


@dataclass(frozen=True, slots=True)
class Peer:
    """The server to connect to. tls: the trusted CAs; None for plain HTTP. Timeouts in seconds.

    proxy: connects to the server in its place: by a tunnel with TLS, and for each request without.
    """

    host: str
    port: int
    tls: TlsContext | ssl.SSLContext | None
    connect_timeout: float
    read_timeout: float
    proxy: Proxy | None = None


class ShortFile(Exception):
    """A file is shorter than the body that it should provide."""


@dataclass(frozen=True, slots=True)
class FileRange:
    """The body of a PUT: bytes [offset, offset + size) of an open file, to be sent within `seconds`.

    on_sent: called from time to time with the number of bytes, counted from the first, that the kernel has taken.
    """

    descriptor: int
    offset: int
    size: int
    seconds: float
    on_sent: Callable[[int], None] = lambda _total: None


class Connection:
    """One connection, opened by the first request. Its calls raise OSError (TimeoutError, SSLError, …)."""

    def __init__(self, peer: Peer) -> None:
        self.peer = peer
        self._lock = threading.Lock()
        self._socket: socket.socket | None = None
        self._tls: TlsSocket | None = None
        self._interrupted = False
        self._used = False
        self._head = bytearray(HEAD_BYTES)
        self.idle_since = 0.0
        self.is_clean = False

    def interrupt(self) -> None:
        """Abort the call of the owning thread, from any thread: that call raises or sees the end of the stream."""
        with self._lock:
            self._interrupted = True
            if self._socket is not None:
                with suppress(OSError):
                    # Not SSLSocket.shutdown: after it the reader would take encrypted bytes for the body.
                    socket.socket.shutdown(self._socket, socket.SHUT_RDWR)

    def exchange(self, request: bytes, body: "FileRange | None" = None) -> tuple[bytes, bytes]:
        """Send a request; return the response's head, without its final blank line, and the bytes received after it.

        Also returns a response that came before the whole body was sent. Raises StaleConnection; OSError;
        ConnectionError also if the connection ends within the head; ShortFile if the body's file is too short.
        """
        sock = self._socket or self._connect()
        was_used, self._used, self.is_clean = self._used, True, False
        try:
            self._send(sock, request, body)
            count = self.receive_into(memoryview(self._head))
        except (ConnectionError, ssl.SSLError) as exc:
            if was_used and not self._interrupted:
                raise StaleConnection from exc
            raise
        if count == 0 and was_used and not self._interrupted:
            raise StaleConnection
        view, filled = memoryview(self._head), count
        deadline = time.monotonic() + self.peer.read_timeout
        latest = max(deadline, time.monotonic() + _LONGEST_INTERIMS_SECONDS)
        while True:
            end = self._head.find(END_OF_HEAD, 0, filled)
            rest = end + len(END_OF_HEAD)
            if end >= 0 and not _INTERIM.match(self._head):
                return bytes(view[:end]), bytes(view[rest:filled])
            if end >= 0:
                filled -= rest
                view[:filled] = bytes(view[rest : rest + filled])
                # A sign of life: the final response may come that much later.
                deadline = min(latest, time.monotonic() + self.peer.read_timeout)
                continue
            if count == 0:
                raise ConnectionError("the connection ended before a response")
            if filled == HEAD_BYTES:
                raise ConnectionError(f"the response's head is longer than {HEAD_BYTES} bytes")
            if time.monotonic() > deadline:
                raise TimeoutError("timed out: the response's head does not end")
            count = self.receive_into(view[filled:])
            filled += count

    def _send(self, sock: socket.socket, request: bytes, body: FileRange | None) -> None:
        if self._interrupted:
            raise ConnectionAbortedError("interrupted")
        try:
            (self._tls or sock).sendall(request)
            if body is None:
                return
            if self._tls is None and not isinstance(sock, ssl.SSLSocket):
                _send_pages(sock, body)
            else:
                _send_pieces(self._tls or sock, body)
        except (BrokenPipeError, ConnectionResetError):
            # The peer may have rejected the request without reading it all, and sent a response with the reason.
            if not self.has_answer():
                raise

    def has_answer(self) -> bool:
        """Return whether a receive would not block: bytes, or the end of the connection, are there."""
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)  # type: ignore[arg-type]
        return bool(poll.poll(0))

    def receive_into(self, buffer: memoryview) -> int:
        """Receive some bytes; return their count, 0 at the end."""
        return self._receive(buffer, whole=False)

    def receive_all_into(self, buffer: memoryview) -> int:
        """Receive until the buffer is full, or for MAX_RECEIVE_WAIT_SECONDS; with `ssl`, some bytes. 0 at the end."""
        # One call per piece: each return to Python costs several thread switches.
        return self._receive(buffer, whole=not isinstance(self._socket, ssl.SSLSocket))

    def _receive(self, buffer: memoryview, *, whole: bool) -> int:
        assert self._socket is not None
        flags = socket.MSG_WAITALL if whole else 0
        deadline = time.monotonic() + self.peer.read_timeout
        while True:
            try:
                if self._tls is not None:
                    return self._tls.recv_into(buffer) if whole else self._tls.recv_some_into(buffer)
                return self._socket.recv_into(buffer, 0, flags)
            except BlockingIOError:  # SO_RCVTIMEO: nothing came for MAX_RECEIVE_WAIT_SECONDS
                if time.monotonic() >= deadline:
                    raise TimeoutError(f"timed out: nothing came for {self.peer.read_timeout:g} s") from None

    def close(self) -> None:
        """Close the connection. A second call does nothing."""
        with self._lock:
            sock, self._socket = self._socket, None
        if self._tls is not None:
            self._tls.close()
            self._tls = None
        if sock is not None:
            sock.close()

    def is_quiet(self) -> bool:
        """Return whether nothing has come since the last response: neither bytes nor the end."""
        if self._socket is None or (isinstance(self._socket, ssl.SSLSocket) and self._socket.pending()):
            return False
        if self._tls is not None and self._tls.has_pending():
            return False
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        return not poll.poll(0)

    def _connect(self) -> socket.socket:
        """Connect to the first address that answers."""
        peer = self.peer
        failure: OSError | None = None
        host, port = (peer.host, peer.port) if peer.proxy is None else (peer.proxy.host, peer.proxy.port)
        for family, kind, protocol, _, address in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM):
            sock = socket.socket(family, kind, protocol)
            sock.settimeout(peer.connect_timeout)
            try:
                self._watch(sock)
                sock.connect(address)
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
                if peer.proxy is not None and peer.tls is not None:
                    open_tunnel(sock, peer.proxy, peer.host, peer.port, peer.connect_timeout)
                if isinstance(peer.tls, ssl.SSLContext):
                    sock = self._wrapped(sock, peer.tls)
                elif peer.tls is not None:
                    _set_timeouts(sock, peer.connect_timeout, peer.connect_timeout)
                    self._tls = peer.tls.connect(sock, peer.host)
                _set_timeout(sock, peer.read_timeout)
                return sock
            except OSError as exc:
                failure = exc
                self.close()
                if self._interrupted:
                    break
        try:
            raise failure or ConnectionError(f"no address of {host}")
        finally:
            failure = None  # its traceback has this frame, and would live with it until a collection

    def _wrapped(self, sock: socket.socket, tls: ssl.SSLContext) -> socket.socket:
        with self._lock:  # no `interrupt` while the plain socket hands its descriptor over
            secure = tls.wrap_socket(sock, server_hostname=self.peer.host, do_handshake_on_connect=False)
            self._socket = secure
        secure.do_handshake()
        return secure

    def _watch(self, sock: socket.socket) -> None:
        """Make a new socket visible to `interrupt`."""
        with self._lock:
            self._socket = sock
            if self._interrupted:
                raise ConnectionAbortedError("interrupted")


def most_idle_of(most: int, share: int) -> int:
    """Return how many idle descriptors to keep: `most`, but no more than 1 / `share` of the limit of open files."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return most if soft == resource.RLIM_INFINITY else min(most, soft // share)


class ConnectionPool:
    """Idle connections to one peer, the last used first. Thread-safe."""

    def __init__(self, peer: Peer, most_idle: int) -> None:
        self._peer = peer
        self._most_idle = most_idle_of(most_idle, _SHARE)
        self._lock = threading.Lock()
        self._idle: list[Connection] = []
        weakref.finalize(self, _close_all, self._idle)

    def take(self) -> Connection:
        """Return an idle connection that is still alive, or a new one."""
        oldest = time.monotonic() - IDLE_SECONDS
        while True:
            with self._lock:
                if not self._idle:
                    break
                connection = self._idle.pop()
            if connection.idle_since > oldest and connection.is_quiet():
                return connection
            connection.close()
        return self.new()

    def new(self) -> Connection:
        """Return a new connection."""
        return Connection(self._peer)

    def give_back(self, connection: Connection) -> None:
        """Return a connection to the pool if its response was read to the end; else close it."""
        if connection.is_clean:
            connection.idle_since = time.monotonic()
            with self._lock:
                if len(self._idle) < self._most_idle:
                    self._idle.append(connection)
                    return
        connection.close()

    def lend(self, what: str, exchange: Callable[[Connection], T]) -> T:
        """Call `exchange` with a connection; return its result. If a pooled connection is stale, retry on a new one.

        Raises Unavailable, with the name `what`, if the connection fails.
        """
        connection = self.take()
        try:
            try:
                return exchange(connection)
            except StaleConnection:
                connection.close()
                connection = self.new()
                return exchange(connection)
        except (OSError, http.client.HTTPException) as exc:
            raise Unavailable(f"{what}: {str(exc) or type(exc).__name__}") from exc
        finally:
            self.give_back(connection)

    def close(self) -> None:
        """Close all idle connections."""
        with self._lock:
            _close_all(self._idle)


def _send_pages(sock: socket.socket, body: FileRange) -> None:
    """Send a body from the page cache with sendfile(2), without a copy through this process."""
    offset, stop, began = body.offset, body.offset + body.size, time.monotonic()
    deadline, most = began + body.seconds, FIRST_SEND_BYTES
    while offset < stop:
        try:
            count = os.sendfile(sock.fileno(), body.descriptor, offset, min(stop - offset, most))
        except BlockingIOError:
            raise TimeoutError("timed out: the peer accepts no bytes") from None
        if count == 0:
            raise ShortFile(f"the file ends at {offset}, not at {stop}")
        offset += count
        body.on_sent(offset - body.offset)
        now = time.monotonic()
        if offset < stop and now > deadline:
            raise TimeoutError(f"timed out: {stop - offset} bytes of the body are left")
        most = _next_send_bytes(most, now - began)
        began = now


def _next_send_bytes(last: int, seconds: float) -> int:
    """Return the size of the next call: larger after a quick one, smaller after a slow one, to report progress."""
    if seconds < QUICK_SEND_SECONDS:
        return min(2 * last, LARGEST_SEND_BYTES)
    return max(last // 2, SMALLEST_SEND_BYTES) if seconds > SLOW_SEND_SECONDS else last


def _send_pieces(sock: "TlsSocket | socket.socket", body: FileRange) -> None:
    """Send a body through a buffer. Not through mmap: if the file were truncated, SIGBUS would kill the process."""
    offset, stop, deadline = body.offset, body.offset + body.size, time.monotonic() + body.seconds
    buffer = bytearray(min(PIECE_BYTES, body.size))
    while offset < stop:
        view = memoryview(buffer)[: stop - offset]
        count = os.preadv(body.descriptor, [view], offset)
        if count == 0:
            raise ShortFile(f"the file ends at {offset}, not at {stop}")
        sock.sendall(view[:count])
        offset += count
        body.on_sent(offset - body.offset)
        if offset < stop and time.monotonic() > deadline:
            raise TimeoutError(f"timed out: {stop - offset} bytes of the body are left")


def _set_timeout(sock: socket.socket, seconds: float) -> None:
    """Bound each call. Except for `ssl`, in the kernel: Python's own timeouts do not work with MSG_WAITALL."""
    if isinstance(sock, ssl.SSLSocket):
        sock.settimeout(seconds)
        return
    _set_timeouts(sock, min(seconds, MAX_RECEIVE_WAIT_SECONDS), seconds)


def _set_timeouts(sock: socket.socket, receive_seconds: float, send_seconds: float) -> None:
    sock.settimeout(None)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _timeval(receive_seconds))
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _timeval(send_seconds))


def _timeval(seconds: float) -> bytes:
    whole = int(seconds)
    return struct.pack("ll", whole, int((seconds - whole) * 1e6))


def _close_all(idle: list[Connection]) -> None:
    while idle:
        idle.pop().close()
