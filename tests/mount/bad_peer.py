"""A peer that does not what it should: it sends other bytes, stops, is slow, or speaks no HTTP. Or a good one."""

import base64
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from fusecache.disk.cache_files import granule_checksums

MODES = (
    "other-bytes",
    "other-length",
    "other-etag",
    "other-range",
    "odd-checksums",
    "redirects",
    "hangs-in-body",
    "hangs-at-once",
    "slow",
    "garbage",
    "closes",
)
# Not bad: the bucket does not have the version any more.
GONE = "gone"
# Not bad: it has too much to do.
FULL = "full"
# Refuses, with a long text that is not UTF-8.
LONG = "long-error"
# Sends right bytes, each an x: all, half of them, or slowly.
GOOD, HALF, TRICKLE = "good", "half", "trickle"
_SLOW_DOWN = b"<Error><Code>SlowDown</Code><Message>512 connections are open here</Message></Error>"
_TEXT = b"<Error><Code>InternalError</Code><Message>%b</Message></Error>" % (b"\xff" * 40_000)
_WITHOUT_BODY = {
    LONG: b"HTTP/1.1 500 Oops\r\ncontent-length: %d\r\n\r\n%b" % (len(_TEXT), _TEXT),
    FULL: b"HTTP/1.1 503 Slow Down\r\nconnection: close\r\ncontent-length: %d\r\n\r\n%b"
    % (len(_SLOW_DOWN), _SLOW_DOWN),
    GONE: b"HTTP/1.1 412 Precondition Failed\r\ncontent-length: 0\r\n\r\n",
    "redirects": b"HTTP/1.1 301 Moved\r\nx-amz-bucket-region: eu-west-1\r\ncontent-length: 0\r\n\r\n",
    "garbage": b"hello\r\n\r\n",
}
_RANGE = re.compile(rb"range: bytes=(\d+)-(\d+)")
_SIZE = re.compile(rb"x-fusecache-size: (\d+)")
_ETAG = re.compile(rb'if-match: ("[^"]+")')


@contextmanager
def node_that(answers: Callable[[socket.socket, bytes], None], port: int = 0) -> Iterator[str]:
    """Answer at a port of loopback; yield HOST:PORT. answers: called with each request, in its connection's thread."""
    held: list[socket.socket] = []

    def serve(connection: socket.socket) -> None:
        with suppress(OSError), connection:
            while head := connection.recv(16384):
                answers(connection, head)

    def accept() -> None:
        with suppress(OSError):
            while True:
                connection, _ = listener.accept()
                held.append(connection)
                threads.append(threading.Thread(target=serve, args=(connection,)))
                threads[-1].start()

    listener = socket.create_server(("127.0.0.1", port))
    threads = [threading.Thread(target=accept)]
    threads[0].start()
    try:
        yield f"127.0.0.1:{listener.getsockname()[1]}"
    finally:
        for each in (listener, *held):
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()
        for thread in threads:
            thread.join(10)


@contextmanager
def bad_peer(port: int, mode: str) -> Iterator[list[bytes]]:
    """Answer at a port of loopback; yield the requests that came."""
    asked: list[bytes] = []
    ended = threading.Event()

    def answer(connection: socket.socket, head: bytes) -> None:
        asked.append(head)
        _answer(connection, head, mode, ended)

    with node_that(answer, port):
        try:
            yield asked
        finally:
            ended.set()


def _answer(connection: socket.socket, head: bytes, mode: str, ended: threading.Event) -> None:
    found, etag, whole = _RANGE.search(head), _ETAG.search(head), _SIZE.search(head)
    assert found is not None
    assert etag is not None
    assert whole is not None
    size = int(found[2]) - int(found[1]) + 1
    true_looking = bytearray(b"x" * size)
    checksums = base64.b64encode(granule_checksums(memoryview(true_looking))).decode()
    if mode == "odd-checksums":
        checksums = "abc"
    length = size - 1 if mode == "other-length" else size
    first, last = int(found[1]), int(found[2])
    if mode == "other-range":
        first, last = first + size, last + size
    shown = '"another"' if mode == "other-etag" else etag[1].decode()
    if mode == "closes":
        connection.close()
        return
    if mode in _WITHOUT_BODY:
        connection.sendall(_WITHOUT_BODY[mode])
        return
    if mode == "hangs-at-once":
        ended.wait(30)
        return
    connection.sendall(
        f"HTTP/1.1 206 Partial Content\r\netag: {shown}\r\ncontent-length: {length}\r\n"
        f"content-range: bytes {first}-{last}/{int(whole[1])}\r\n"
        f"x-fusecache-checksums: {checksums}\r\n\r\n".encode()
    )
    # The bytes of another range have their checksums.
    body = (b"x" if mode in ("other-range", GOOD, HALF, TRICKLE) else b"y") * length
    if mode in ("hangs-in-body", HALF):
        connection.sendall(body[: size // 2])
        ended.wait(30)
    elif mode in ("slow", TRICKLE):
        until = time.monotonic() + 30
        for at in range(0, size, 1000):
            if ended.is_set() or time.monotonic() > until:
                return
            connection.sendall(body[at : at + 1000])
            ended.wait(0.01)
    else:
        connection.sendall(body)
