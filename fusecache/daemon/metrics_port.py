"""Answers Prometheus on a port of 127.0.0.1, in threads of its own. The option `metrics_port`.

Any user of the node can connect, so connections are few, and short.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from socketserver import ThreadingMixIn
from threading import BoundedSemaphore, Thread
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

import trio

from fusecache.model.errors import MountError
from fusecache.mount.metrics import StatusCollector

ADDRESS = "127.0.0.1"
MOST_CONNECTIONS = 8
# A client that neither sends nor reads for this long is gone.
SILENT_SECONDS = 10.0
# How soon the server notices its end: the mount waits for it.
_POLL_SECONDS = 0.05


class _Handler(WSGIRequestHandler):
    timeout = SILENT_SECONDS

    def log_message(self, format: str, *arguments: Any) -> None:
        """A scrape is no news."""


class _Server(ThreadingMixIn, WSGIServer):
    daemon_threads = True

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._free = BoundedSemaphore(MOST_CONNECTIONS)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Serve a connection in a thread; close it at once if there are too many."""
        if not self._free.acquire(blocking=False):
            self.shutdown_request(request)
            return
        try:
            super().process_request(request, client_address)
        except RuntimeError:  # the system has no further thread
            self._free.release()
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Serve a connection to its end."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._free.release()

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
