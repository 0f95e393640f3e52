"""An HTTP proxy that leads every tunnel to one server, and remembers whom it was asked for."""

import socket
import threading
from contextlib import suppress
from typing import Self


class TunnelProxy:
    """Answers CONNECT. Use it in a `with` block.

    asked: the head of each request, in order.
    """

    def __init__(self, port: int, authorization: str = "") -> None:
        """port: of the server on this machine. authorization: header that a request must have."""
        self.asked: list[str] = []
        self._port = port
        self._authorization = authorization
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._sockets: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._serve)]

    def __enter__(self) -> Self:
        """Begin to serve."""
        self._threads[0].start()
        return self

    def __exit__(self, *_: object) -> None:
        """End all connections."""
        for each in [self._listener, *self._sockets]:
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()
        for thread in self._threads:
            thread.join(10)

    @property
    def address(self) -> str:
        """Its host and port."""
        return f"127.0.0.1:{self._listener.getsockname()[1]}"

    @property
    def targets(self) -> list[str]:
        """The servers that tunnels were asked for."""
        return [head.split(" ")[1] for head in self.asked]

    def _serve(self) -> None:
        with suppress(OSError):
            while True:
                client = self._listener.accept()[0]
                self._sockets.append(client)
                self._start(self._answer, client)

    def _answer(self, client: socket.socket) -> None:
        head = b""
        while not head.endswith(b"\r\n\r\n") and (piece := client.recv(1)):
            head += piece
        self.asked.append(head.decode())
        if self._authorization and f"proxy-authorization: {self._authorization}\r\n" not in self.asked[-1]:
            client.sendall(b"HTTP/1.1 407 Proxy Authentication Required\r\n\r\n")
            return
        server = socket.create_connection(("127.0.0.1", self._port))
        self._sockets.append(server)
        client.sendall(b"HTTP/1.1 200 Connection established\r\n\r\n")
        self._start(_copy, client, server)
        _copy(server, client)

    def _start(self, run: object, *arguments: socket.socket) -> None:
        thread = threading.Thread(target=run, args=arguments)  # type: ignore[arg-type]
        self._threads.append(thread)
        thread.start()


def _copy(source: socket.socket, target: socket.socket) -> None:
    with suppress(OSError):
        while data := source.recv(65536):
            target.sendall(data)
    with suppress(OSError):
        target.shutdown(socket.SHUT_WR)
