"""Answers Prometheus on a port of 127.0.0.1, in threads of its own. The option `metrics_port`.

Any user of the node can connect, so connections are few, and short. One that has not asked yet makes room for the next,
so that a few silent or slow ones do not shut the port.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from socket import SHUT_RDWR, socket
from socketserver import ThreadingMixIn
from threading import Thread
from time import monotonic
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

import trio

from fusecache.model.errors import MountError
from fusecache.mount.metrics import StatusCollector

ADDRESS = "127.0.0.1"
MOST_CONNECTIONS = 8
# From the start of a connection to the end of its answer. Prometheus gives up after 10 s, too.
LONGEST_SECONDS = 10.0
# How soon the server notices its end, which the mount waits for, or that a connection lasts too long.
_POLL_SECONDS = 0.05


class _Handler(WSGIRequestHandler):
    timeout = LONGEST_SECONDS
    server: "_Server"

    def parse_request(self) -> bool:
        """Read the headers; from then on the connection keeps its place until it is answered."""
        is_asked = super().parse_request()
        self.server.waiting.pop(self.connection, None)
        return is_asked

    def log_message(self, format: str, *arguments: Any) -> None:
        """A scrape is no news."""


class _Server(ThreadingMixIn, WSGIServer):
    daemon_threads = True

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        # When each connection began; and the same, of connections without a whole request.
        self._began: dict[socket, float] = {}
        self.waiting: dict[socket, float] = {}

    def process_request(self, request: Any, client_address: Any) -> None:
        """Serve a connection in a thread. If there are too many, end the oldest that has not asked, else this one."""
        if len(self._began) >= MOST_CONNECTIONS:
            oldest = next(iter(self.waiting.copy()), None)
            if oldest is None:
                self.shutdown_request(request)
                return
            self._end(oldest)
        self._began[request] = self.waiting[request] = monotonic()
        try:
            super().process_request(request, client_address)
        except RuntimeError:  # the system has no further thread
            self._forget(request)
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Serve a connection to its end."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._forget(request)

    def service_actions(self) -> None:
        """Several times a second: end connections that last too long, however slowly they send or read."""
        since = monotonic() - LONGEST_SECONDS
        for request in [each for each, began in self._began.copy().items() if began < since]:
            self._end(request)

    def _end(self, request: socket) -> None:
        """Have the thread of a connection end: its reads and writes fail from now on."""
        self._forget(request)
        with suppress(OSError):  # it has just ended
            request.shutdown(SHUT_RDWR)

    def _forget(self, request: socket) -> None:
        self._began.pop(request, None)
        self.waiting.pop(request, None)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that went away, or that came while the mount ended, is no news."""


@contextmanager
def metrics_served(port: int | None, read_status: Callable[[], Mapping[str, Any]]) -> Iterator[None]:
    """Serve while the body runs; port None: nowhere. Raises MountError if the port cannot be used.

    read_status: returns the status of now; called on the loop of the caller.
    """
    if port is None:
        yield
        return
    from prometheus_client import CollectorRegistry, make_wsgi_app

    token = trio.lowlevel.current_trio_token()
    registry = CollectorRegistry()
    registry.register(StatusCollector(lambda: trio.from_thread.run_sync(read_status, trio_token=token)))
    try:
        server = make_server(ADDRESS, port, make_wsgi_app(registry), _Server, _Handler)
    except OSError as exc:
        raise MountError(
            f"{ADDRESS}:{port} cannot be used for metrics: {exc.strerror}; choose another --metrics-port"
        ) from exc
    thread = Thread(target=server.serve_forever, args=(_POLL_SECONDS,), name="metrics-port", daemon=True)
    thread.start()
    try:
        yield
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
