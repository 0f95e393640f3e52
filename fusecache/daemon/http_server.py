"""Serves a page about the mount, and /metrics for Prometheus, in threads of its own. The option `http_address`.

Any user of the node can connect, so connections are few, and short. One that has not asked yet makes room for the next,
so that a few silent or slow ones do not shut the port.

With a token every request needs it: as a password of HTTP's Basic scheme, for which browsers ask, or as a Bearer token.
Without one, a request must name this node's loopback as its host: else a page of another site, whose name leads to
127.0.0.1 for a moment, could read this one in the browser of a user (DNS rebinding).
"""

import base64
import binascii
import hmac
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from http import HTTPStatus
from importlib.util import find_spec
from ipaddress import ip_address
from socket import AF_INET, AF_INET6, SHUT_RDWR, socket
from socketserver import TCPServer, ThreadingMixIn
from threading import BoundedSemaphore, Thread
from time import monotonic, sleep
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

import trio

from fusecache.config.option_groups import MonitoringOptions
from fusecache.config.values import split_http_address
from fusecache.installation import extra_command
from fusecache.model.errors import FusecacheError, MountError
from fusecache.mount.metrics import StatusCollector
from fusecache.page.history import RateHistory, Sample
from fusecache.page.view import HEADERS, page
from fusecache.remote.endpoints import read_secret

if TYPE_CHECKING:
    from wsgiref.types import StartResponse, WSGIApplication, WSGIEnvironment

log = logging.getLogger(__name__)

MOST_CONNECTIONS = 8
# From the start of a connection to the end of its answer. Prometheus gives up after 10 s, too.
LONGEST_SECONDS = 10.0
_HTML = ("Content-Type", "text/html; charset=utf-8")
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
    address_family = AF_INET

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        # When each connection began; and the same, of connections without a whole request.
        self._began: dict[socket, float] = {}
        self.waiting: dict[socket, float] = {}

    def server_bind(self) -> None:
        """Bind, without the question to a name server that HTTPServer asks."""
        TCPServer.server_bind(self)
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])
        self.setup_environ()

    def get_request(self) -> Any:
        """Take a connection. Without a free descriptor it stays where it is, and would be offered again at once."""
        try:
            return super().get_request()
        except OSError:
            sleep(_POLL_SECONDS)
            raise

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


class _ServerOfIPv6(_Server):
    address_family = AF_INET6


class _Answers:
    """What the server answers to each request: a WSGI application."""

    def __init__(
        self,
        read_status: Callable[[], Mapping[str, Any]],
        read_history: Callable[[], Sequence[Sample]],
        token: str,
    ) -> None:
        """token: what each request needs; "" if none does."""
        self._read_status = read_status
        self._read_history = read_history
        self._token = token.encode()
        self._metrics = _metrics_app(read_status)
        self._places = BoundedSemaphore(MOST_CONNECTIONS)

    def __call__(self, request: "WSGIEnvironment", start: "StartResponse") -> Iterable[bytes]:
        """Answer a request."""
        # While the loop hangs, threads wait for it that the end of their connections does not end.
        if not self._places.acquire(blocking=False):
            return _text(start, HTTPStatus.SERVICE_UNAVAILABLE, "too many requests wait for the daemon")
        try:
            body = self._answer(request, start)
        except trio.RunFinishedError:
            return _text(start, HTTPStatus.SERVICE_UNAVAILABLE, "the daemon ends")
        finally:
            self._places.release()
        return [] if request["REQUEST_METHOD"] == "HEAD" else body

    def _answer(self, request: "WSGIEnvironment", start: "StartResponse") -> Iterable[bytes]:
        if self._token and not self._has_token(request.get("HTTP_AUTHORIZATION", "")):
            challenge = ("WWW-Authenticate", 'Basic realm="fusecache: any user name, the token as password"')
            return _text(
                start, HTTPStatus.UNAUTHORIZED, "this page needs the token of http_token_file", challenge
            )
        if not self._token and not _names_loopback(request.get("HTTP_HOST", "")):
            return _text(
                start, HTTPStatus.FORBIDDEN, "open this page as 127.0.0.1 or localhost: `fusecache page`"
            )
        if request["REQUEST_METHOD"] not in ("GET", "HEAD"):
            return _text(start, HTTPStatus.METHOD_NOT_ALLOWED, "this page only shows", ("Allow", "GET, HEAD"))
        path = request.get("PATH_INFO", "/")
        if path == "/metrics":
            return self._metrics(request, start)
        if path != "/":
            return _text(start, HTTPStatus.NOT_FOUND, "here are / and /metrics")
        return _answer(start, HTTPStatus.OK, page(self._read_status(), self._read_history()), _HTML)

    def _has_token(self, authorization: str) -> bool:
        scheme, _, value = authorization.partition(" ")
        given = value.strip().encode()
        if scheme.lower() == "basic":
            try:
                given = base64.b64decode(given, validate=True).partition(b":")[2]
            except binascii.Error:
                return False
        return hmac.compare_digest(given, self._token)


def _metrics_app(read_status: Callable[[], Mapping[str, Any]]) -> "WSGIApplication":
    """Return what answers Prometheus: without the extra that writes its format, how to install that."""
    if find_spec("prometheus_client") is None:
        words = f"metrics need prometheus_client: {extra_command('metrics')}"
        return lambda _, start: _text(start, HTTPStatus.NOT_IMPLEMENTED, words)
    from prometheus_client import CollectorRegistry, make_wsgi_app

    registry = CollectorRegistry()
    registry.register(StatusCollector(read_status))
    app: WSGIApplication = make_wsgi_app(registry)
    return app


def _names_loopback(host: str) -> bool:
    """Return whether a Host header names this node's loopback; the port may be another one, of a tunnel."""
    with suppress(ValueError):
        name = urlsplit(f"//{host}").hostname or ""
        return name == "localhost" or ip_address(name).is_loopback
    return False


def _text(start: "StartResponse", status: HTTPStatus, words: str, *headers: tuple[str, str]) -> list[bytes]:
    return _answer(start, status, f"{words}\n", ("Content-Type", "text/plain; charset=utf-8"), *headers)


def _answer(start: "StartResponse", status: HTTPStatus, text: str, *headers: tuple[str, str]) -> list[bytes]:
    body = text.encode()
    start(f"{status.value} {status.phrase}", [*headers, *HEADERS, ("Content-Length", str(len(body)))])
    return [body]


@contextmanager
def http_served(
    options: MonitoringOptions,
    read_status: Callable[[], Mapping[str, Any]],
    history: RateHistory,
    *,
    is_resumed: bool = False,
) -> Iterator[None]:
    """Serve while the body runs, if there is an address. Raises MountError if that cannot be used, ConfigError.

    read_status: returns the status of now; called on the loop of the caller, as the history's samples are.
    is_resumed: programs wait for this daemon, so an error is only logged.
    """
    try:
        server = _server(options, read_status, history)
    except FusecacheError as exc:
        if not is_resumed:
            raise
        log.warning("no web page and metrics until the next start: %s", exc)
        server = None
    if server is None:
        yield
        return
    thread = Thread(target=server.serve_forever, args=(_POLL_SECONDS,), name="http", daemon=True)
    thread.start()
    try:
        yield
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def _server(
    options: MonitoringOptions, read_status: Callable[[], Mapping[str, Any]], history: RateHistory
) -> WSGIServer | None:
    if options.http_address is None:
        return None
    host, port = split_http_address(options.http_address)
    loop = trio.lowlevel.current_trio_token()
    answers = _Answers(
        lambda: trio.from_thread.run_sync(read_status, trio_token=loop),
        lambda: trio.from_thread.run_sync(history.samples, trio_token=loop),
        _token(options),
    )
    try:
        return make_server(host, port, answers, _ServerOfIPv6 if ":" in host else _Server, _Handler)
    except OSError as exc:
        raise MountError(
            f"{options.http_address} cannot be used for the page and metrics: {exc.strerror}; choose another "
            "--http-address"
        ) from exc


def _token(options: MonitoringOptions) -> str:
    """Return the token of the option's file; "" without one. Raises ConfigError."""
    path = options.http_token_file
    return "" if path is None else read_secret("http_token_file", path)
