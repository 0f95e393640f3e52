"""A peer that says exactly what it is told, for what no server would say."""

import re
import socket
import ssl
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from fusecache.remote.endpoints import Transport
from fusecache.remote.http.signed_requests import SignedHttp, Site
from fusecache.remote.http.tls import TlsContext, library
from fusecache.remote.protocol.signing import SigningKeys, sign_by_v4

Script = list[list[bytes]]
Trust = TlsContext | ssl.SSLContext | None

HANG_UP = b""
# What follows it is sent a moment later.
PAUSE = b"<pause>"
# What follows it is sent once the test has set `Peer.may_go_on`.
HELD = b"<held>"
# A test that never sets it is to fail by itself, before its client gives up.
_HELD_SECONDS = 10.0


class Peer:
    """Accepts connections; on the nth, answers its requests with the nth list of answers.

    Behind the last answer it waits for one more request, then closes; with HANG_UP it closes without waiting.
    """

    def __init__(self, script: Script, context: ssl.SSLContext | None, tls: Trust) -> None:
        """context: to speak TLS by; tls: how a client trusts it."""
        self._context = context
        self.tls = tls
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self.requests: list[bytes] = []
        self.may_go_on = threading.Event()
        self._connection: socket.socket | None = None
        self._thread = threading.Thread(target=self._serve, args=(script,), daemon=True)
        self._thread.start()

    def wire(self, transport: Transport) -> SignedHttp:
        """Return a client's wire to it."""
        scheme = "http" if self.tls is None else "https"
        sign = sign_by_v4("auto", lambda: SigningKeys("key", "secret"))
        site = Site(f"{scheme}://127.0.0.1:{self.port}", "/bucket/", sign, "auto", self.tls)
        return SignedHttp(site, transport)

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread
        self._listener.close()
        if self._connection is not None:
            with suppress(OSError):  # a client that keeps its connection would let the thread wait for long
                socket.socket.shutdown(self._connection, socket.SHUT_RDWR)
        self._thread.join(10)

    def _serve(self, script: Script) -> None:
        for answers in script:
            with suppress(OSError):
                connection, _ = self._listener.accept()
                if self._context is not None:
                    connection = self._context.wrap_socket(connection, server_side=True)
                self._connection = connection
                with connection:
                    self._answer(connection, answers)

    def _answer(self, connection: socket.socket, answers: list[bytes]) -> None:
        connection.settimeout(10)
        for answer in answers:
            if answer == HANG_UP or not self._receive(connection):
                return
            for part in re.split(b"(%b|%b)" % (PAUSE, HELD), answer):
                if part == PAUSE:
                    threading.Event().wait(0.1)
                elif part == HELD:
                    self.may_go_on.wait(_HELD_SECONDS)
                else:
                    connection.sendall(part)
        self._receive(connection)

    def _receive(self, connection: socket.socket) -> bool:
        request = b""
        while not _is_whole(request) and (piece := connection.recv(65536)):
            request += piece
        if request:
            self.requests.append(request)
        return bool(request)


def _is_whole(request: bytes) -> bool:
    head, blank, body = request.partition(b"\r\n\r\n")
    length = re.search(rb"\r\ncontent-length: (\d+)", head)
    return bool(blank) and len(body) >= (int(length[1]) if length else 0)


def openssl_trust(certificate: Path) -> TlsContext:
    openssl = library()
    assert openssl is not None, "the tests' machine has OpenSSL as a shared library"
    return TlsContext(openssl, cafile=str(certificate), capath=None)


MakePeer = Callable[[Script], Peer]
