"""A server for HTTP clients under measurement: `python -m benchmarks.http_origin FOLDER` prints its URLs as JSON.

It does as little as it can, so that it bounds no client: no signature is checked, no body kept, no digest computed.
Each connection has a process of its own, so that two connections never share an interpreter's lock. Every range of
an object has the same bytes: `BLOCK` from its start. It ends when its standard input closes.

Not for tests: `tests/s3server` is the server that behaves like a bucket.
"""

import json
import os
import random
import re
import signal
import socket
import socketserver
import ssl
import sys
import threading
from contextlib import suppress
from pathlib import Path

from tests.s3server.certificate import make_certificate

MIB = 2**20
BLOCK = random.Random(1).randbytes(8 * MIB)
ETAG = "0123456789abcdef0123456789abcdef"
# Of all ranges' objects; a client may ask for any range below it.
OBJECT_BYTES = 2**40
# socket(7); Python has no name for it. The kernel sends some packets each millisecond, as a distant sender would.
SO_MAX_PACING_RATE = 47
# 32 connections at this rate come to 640 MB/s: a network that is slower than two processors.
PACED_BYTES_PER_SECOND = 20_000_000
_RANGE = re.compile(rb"\r\nrange: *bytes=(\d+)-(\d+)", re.IGNORECASE)
_LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)", re.IGNORECASE)


class _Server(socketserver.ForkingTCPServer):
    allow_reuse_address = True
    request_queue_size = 256
    max_children = 10_000  # one for each connection
    block_on_close = False

    def __init__(self, tls: ssl.SSLContext | None, pages: int, rate: int | None) -> None:
        """pages: a descriptor of a file with the bytes of BLOCK. rate: bytes a second down each connection."""
        super().__init__(("127.0.0.1", 0), _Handler)
        self.tls, self.pages, self.rate = tls, pages, rate


class _Handler(socketserver.BaseRequestHandler):
    server: _Server

    def handle(self) -> None:
        sock: socket.socket = self.request
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if self.server.rate is not None:
            sock.setsockopt(socket.SOL_SOCKET, SO_MAX_PACING_RATE, self.server.rate)
        with suppress(OSError):
            if self.server.tls is not None:
                sock = self.server.tls.wrap_socket(sock, server_side=True)
            received = bytearray()
            while _answer(sock, received, self.server.pages):
                pass
            sock.close()


def _answer(sock: socket.socket, received: bytearray, pages: int) -> bool:
    """Answer one request; return False at the end. received: bytes of it that came already, empty afterwards."""
    while (end := received.find(b"\r\n\r\n")) < 0:
        more = sock.recv(65_536)
        if not more:
            return False
        received += more
    head = bytes(received[: end + 2])
    length = _LENGTH.search(head)
    _discard(sock, (int(length[1]) if length else 0) - (len(received) - end - 4))
    received.clear()
    lines = f'ETag: "{ETAG}"\r\nLast-Modified: Mon, 05 Jan 2026 00:00:00 GMT\r\n'
    asked = _RANGE.search(head)
    if not head.startswith(b"GET") or asked is None:
        size = OBJECT_BYTES if head.startswith(b"HEAD") else 0
        sock.sendall(f"HTTP/1.1 200 OK\r\n{lines}Content-Length: {size}\r\n\r\n".encode())
        return True
    start, last = int(asked[1]), int(asked[2])
    size = last - start + 1
    lines += f"Content-Range: bytes {start}-{last}/{OBJECT_BYTES}\r\nContent-Length: {size}\r\n"
    sock.sendall(f"HTTP/1.1 206 Partial Content\r\n{lines}\r\n".encode(), *_more(sock))
    sent = 0
    while sent < size:
        if isinstance(sock, ssl.SSLSocket):
            sock.sendall(memoryview(BLOCK)[sent : min(size, sent + MIB)])
            sent = min(size, sent + MIB)
        else:
            sent += os.sendfile(sock.fileno(), pages, sent, size - sent)
    return True


def _more(sock: socket.socket) -> tuple[int, ...]:
    """Return the flag that joins head and body into one packet, where there is no TLS."""
    return () if isinstance(sock, ssl.SSLSocket) else (socket.MSG_MORE,)


def _discard(sock: socket.socket, left: int) -> None:
    """Receive and drop `left` bytes. With MSG_TRUNC the kernel does not copy them: tcp(7)."""
    piece = bytearray(MIB)
    flags = 0 if isinstance(sock, ssl.SSLSocket) else socket.MSG_TRUNC
    while left > 0:
        count = sock.recv_into(piece, min(left, len(piece)), flags)
        if not count:
            raise ConnectionError("the body ended early")
        left -= count


def main() -> None:
    """Serve without TLS, with TLS, and with TLS at a limited rate, until standard input closes."""
    os.setpgid(0, 0)
    pages = os.memfd_create("block")
    os.write(pages, BLOCK)
    certificate, context = make_certificate(Path(sys.argv[1]))
    urls = {}
    for name, tls, rate in (
        ("http", None, None),
        ("https", context, None),
        ("https, paced", context, PACED_BYTES_PER_SECOND),
    ):
        server = _Server(tls, pages, rate)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        urls[name] = f"{'https' if tls else 'http'}://127.0.0.1:{server.server_address[1]}"
    sys.stdout.write(json.dumps({**urls, "ca_path": str(certificate)}) + "\n")
    sys.stdout.flush()
    sys.stdin.read()
    os.killpg(0, signal.SIGKILL)  # the connections' processes too


if __name__ == "__main__":
    main()
