"""HTTP/1.1 over one blocking socket: heads, bodies and answers, all at a scripted pace.

Not a general HTTP server: no chunked bodies (R2 refuses them), never "100 Continue" (Cloudflare sends none).
Invariants:
1. Nothing of the next request is read before the current one was answered.
2. Every byte of a body passes `checkpoint`, so an outage stops transfers in progress.
"""

import contextlib
import os
import select
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Protocol
from urllib.parse import parse_qsl

from tests.s3server.errors import ConnectionEnded, S3Error
from tests.s3server.rules import Settings
from tests.s3server.synthetic import fill_synthetic

MAX_HEAD_BYTES = 65_536
# Pieces of this size keep the GIL free for milliseconds at a time, and fit the processor's cache.
PIECE_BYTES = 262_144
# A paced transfer moves this much time at once: short against any time-out, long against a sleep's error.
PACE_SECONDS = 0.01


@dataclass(slots=True)
class Request:
    """One request's head. `headers` names are in lower case; path and query are as sent (latin-1)."""

    method: str
    path: str
    query_text: str
    headers: dict[str, str]
    content_length: int | None
    chunked: bool
    query: dict[str, str] = field(default_factory=dict)

    def header(self, name: str) -> str | None:
        """Return a header's value by its lower-case name."""
        return self.headers.get(name)


class Body(Protocol):
    """What an answer sends."""

    def send(self, connection: "Connection", start: int, count: int) -> None:
        """Send bytes [start, start + count)."""
        ...

    def close(self) -> None:
        """Give back what the body holds open."""
        ...


@dataclass(slots=True)
class Answer:
    """What goes back. `length` is the Content-Length; the body's bytes sent are [start, start + length)."""

    status: int
    headers: list[tuple[str, str]]
    length: int = 0
    start: int = 0
    body: Body | None = None


class BytesBody:
    """A body in memory."""

    def __init__(self, data: bytes) -> None:
        self._data = memoryview(data)

    def send(self, connection: "Connection", start: int, count: int) -> None:
        """Send bytes [start, start + count)."""
        connection.send_bytes(self._data[start : start + count])

    def close(self) -> None:
        """Nothing is held open."""


class Pacer:
    """Spreads bytes over time: at most `rate` bytes a second, without a burst after silence. For many threads."""

    def __init__(self, wait: Callable[[float], None], *, shortest_seconds: float = 0.0) -> None:
        """shortest_seconds: shorter waits are added up first, as each costs a sleep."""
        self._wait = wait
        self._shortest_seconds = shortest_seconds
        self._free_at = 0.0
        self._lock = threading.Lock()

    def pass_bytes(self, count: int, rate: float | None) -> None:
        """Block for as long as `count` bytes take."""
        if rate is None:
            return
        with self._lock:
            now = time.monotonic()
            self._free_at = max(self._free_at, now) + count / rate
            seconds = self._free_at - now
        if seconds >= self._shortest_seconds:
            self._wait(seconds)


def piece_bytes(rate: float | None) -> int:
    """Return how much to transfer at once."""
    return PIECE_BYTES if rate is None else max(1, min(PIECE_BYTES, int(rate * PACE_SECONDS)))


class Connection:
    """One client's socket, used by one thread."""

    def __init__(
        self,
        sock: socket.socket,
        number: int,
        *,
        settings: Callable[[], Settings],
        checkpoint: Callable[[], None],
        wait: Callable[[float], None],
        shared: Pacer,
    ) -> None:
        """checkpoint: raises ConnectionEnded during an outage. wait(seconds): sleeps, interruptibly.

        shared: paces all connections together.
        """
        self.number = number
        self.bytes_in = 0
        self.bytes_out = 0
        self._sock = sock
        self._secure = isinstance(sock, ssl.SSLSocket)
        self._settings = settings
        self._outage = checkpoint
        self._cut = threading.Event()
        self._down = Pacer(wait)
        self._up = Pacer(wait)
        self._shared = shared
        self._early = bytearray()  # received behind the head
        self._body_left = 0
        self._scratch = memoryview(bytearray(PIECE_BYTES))

    @property
    def body_left(self) -> int:
        """Bytes of the current request's body that were not received yet."""
        return self._body_left

    def shake_hands(self) -> None:
        """Do the TLS handshake, if there is TLS. ConnectionEnded if it fails."""
        if isinstance(self._sock, ssl.SSLSocket):
            with _ending():
                self._sock.do_handshake()

    def read_request(self) -> Request | None:
        """Return the next request's head; None when the client closed before. Raises ConnectionEnded."""
        while (end := self._early.find(b"\r\n\r\n")) < 0:
            if len(self._early) > MAX_HEAD_BYTES:
                raise ConnectionEnded("endless head")
            with _ending():
                data = self._sock.recv(MAX_HEAD_BYTES)
            self._checkpoint()
            if not data:
                if self._early:
                    raise ConnectionEnded("closed inside a head")
                return None
            self._early += data
        request = _parse_head(bytes(self._early[:end]))
        del self._early[: end + 4]
        self._body_left = request.content_length or 0
        self.bytes_in = self.bytes_out = 0
        return request

    def receive(self, sink: Callable[[memoryview], None]) -> None:
        """Pass the rest of the body to `sink`, piece by piece. ConnectionEnded if it ends early."""
        while self._body_left:
            self._checkpoint()
            rate = self._settings().upload_bandwidth
            wanted = min(self._body_left, piece_bytes(rate))
            if self._early:
                count = min(wanted, len(self._early))
                self._scratch[:count] = self._early[:count]
                del self._early[:count]
            else:
                count = self._receive_into(self._scratch[:wanted])
                if not count:
                    raise ConnectionEnded(f"{self._body_left} bytes of the body never came")
            self._body_left -= count
            self.bytes_in += count
            self._up.pass_bytes(count, rate)
            sink(self._scratch[:count])

    def _receive_into(self, piece: memoryview) -> int:
        """Receive some of a piece; with TLS, which hands over 16 KiB at most, all of it if it comes.

        A sleep of the pacer for each 16 KiB would take more of the processors than all else.
        """
        count = 0
        with _ending():
            while received := self._sock.recv_into(piece[count:]):
                count += received
                if count == len(piece) or not self._secure:
                    break
                self._checkpoint()
        return count

    def receive_all(self, limit: int) -> bytes:
        """Return the whole body. S3Error MalformedXML if it is longer than `limit` bytes."""
        if self._body_left > limit:
            raise S3Error("MalformedXML", f"a body of more than {limit} bytes")
        data = bytearray()
        self.receive(data.extend)
        return bytes(data)

    def discard_body(self) -> None:
        """Receive the rest of the body for nobody."""
        self.receive(lambda _: None)

    def send_head(self, answer: Answer, extra: Sequence[tuple[str, str]]) -> None:
        """Send status line and headers."""
        try:
            phrase = HTTPStatus(answer.status).phrase
        except ValueError:
            phrase = "Scripted"
        lines = [f"HTTP/1.1 {answer.status} {phrase}"]
        lines += [f"{name}: {value}" for name, value in (*answer.headers, *extra)]
        if answer.status not in (204, 304):
            lines.append(f"Content-Length: {answer.length}")
        self._checkpoint()
        with _ending():
            self._sock.sendall(("\r\n".join(lines) + "\r\n\r\n").encode("utf-8"))

    def send_bytes(self, data: memoryview) -> None:
        """Send bytes at the scripted pace."""
        done = 0
        while done < len(data):
            count = self._next_piece(len(data) - done)
            with _ending():
                self._sock.sendall(data[done : done + count])
            self.bytes_out += count
            done += count

    def send_file(self, descriptor: int, offset: int, size: int) -> None:
        """Send part of an open file; inside the kernel where there is no TLS."""
        stop = offset + size
        while offset < stop:
            count = self._next_piece(stop - offset)
            with _ending():
                if self._secure:
                    count = os.preadv(descriptor, [self._scratch[:count]], offset)
                    self._sock.sendall(self._scratch[:count])
                else:
                    count = os.sendfile(self._sock.fileno(), descriptor, offset, count)
            if not count:
                raise ConnectionEnded("a body file is shorter than its sidecar says")
            self.bytes_out += count
            offset += count

    def send_synthetic(self, seed: int, offset: int, size: int) -> None:
        """Send part of a synthetic stream."""
        stop = offset + size
        while offset < stop:
            count = self._next_piece(stop - offset)
            piece = self._scratch[:count]
            fill_synthetic(piece, seed, offset)
            with _ending():
                self._sock.sendall(piece)
            self.bytes_out += count
            offset += count

    def close(self, *, linger_seconds: float = 0.0) -> None:
        """Close; with `linger_seconds`, first wait that long for the client to read what was sent.

        Closing with unread data makes the kernel send a reset, and a reset destroys an answer on its way.
        """
        with contextlib.closing(self._sock), contextlib.suppress(OSError):  # the client may have been faster
            if linger_seconds and not self._secure:
                self._sock.shutdown(socket.SHUT_WR)  # under TLS a client would take this for an attack
            deadline = time.monotonic() + linger_seconds
            while linger_seconds and self._readable(deadline - time.monotonic()):
                if not socket.socket.recv(self._sock, PIECE_BYTES):  # cipher text will do
                    break

    def stand_still(self, seconds: float) -> None:
        """Say nothing for a while. Raises ConnectionEnded once the connection is cut."""
        if seconds > 0 and self._cut.wait(seconds):
            raise ConnectionEnded("cut")

    def cut(self) -> None:
        """End the connection from another thread: its own thread wakes up with ConnectionEnded."""
        self._cut.set()  # what lies in the socket's buffer could still be read
        with contextlib.suppress(OSError):  # it may have ended by itself
            # SSLSocket.shutdown would drop the TLS state under the other thread's feet
            socket.socket.shutdown(self._sock, socket.SHUT_RDWR)

    def _readable(self, seconds: float) -> bool:
        poll = select.poll()  # select would refuse descriptors from 1024 on
        poll.register(self._sock, select.POLLIN)
        return bool(poll.poll(max(0.0, seconds) * 1000))

    def _checkpoint(self) -> None:
        self._outage()
        if self._cut.is_set():
            raise ConnectionEnded("cut")

    def _next_piece(self, left: int) -> int:
        self._checkpoint()
        settings = self._settings()
        count = min(left, piece_bytes(settings.bandwidth))
        self._down.pass_bytes(count, settings.bandwidth)
        self._shared.pass_bytes(count, settings.total_bandwidth)
        return count


@contextlib.contextmanager
def _ending() -> Iterator[None]:
    """Turn what sockets raise into ConnectionEnded."""
    try:
        yield
    except OSError as exc:
        raise ConnectionEnded(str(exc)) from exc


def _parse_head(head: bytes) -> Request:
    lines = head.decode("latin-1").split("\r\n")
    try:
        method, target, version = lines[0].split(" ")
    except ValueError as exc:
        raise ConnectionEnded(f"not a request line: {lines[0]!r}") from exc
    if version != "HTTP/1.1":
        raise ConnectionEnded(f"{version} is not spoken here")
    headers: dict[str, str] = {}
    for line in lines[1:]:
        name, _, value = line.partition(":")
        name, value = name.strip().lower(), value.strip()
        headers[name] = f"{headers[name]},{value}" if name in headers else value
    # A client that takes this server for a proxy sends a whole URL.
    path, _, query_text = target.removeprefix(f"http://{headers.get('host')}").partition("?")
    length = headers.get("content-length")
    if length is not None and not length.isdecimal():
        raise ConnectionEnded(f"not a Content-Length: {length!r}")
    return Request(
        method=method,
        path=path,
        query_text=query_text,
        headers=headers,
        content_length=None if length is None else int(length),
        chunked="transfer-encoding" in headers,
        query=dict(parse_qsl(query_text, keep_blank_values=True)),
    )
