"""The server in this process: a listening socket, one thread a connection, and outages on demand.

Invariant: a request that arrived during an outage never takes effect; its connection ends with the outage.
"""

import enum
import random
import shutil
import socket
import tempfile
import threading
import time
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self

from tests.s3server.accounts import Account
from tests.s3server.certificate import make_certificate
from tests.s3server.control import Control, OutageKind
from tests.s3server.errors import ConnectionEnded
from tests.s3server.ports import reserve
from tests.s3server.rules import Rules, Settings
from tests.s3server.serving import Surroundings, serve_connection
from tests.s3server.state import State
from tests.s3server.wire import PACE_SECONDS, Connection, Pacer

if TYPE_CHECKING:
    import ssl

DEFAULT_ACCESS_KEY = "test-access-key"
DEFAULT_SECRET_KEY = "test-secret-key"
BACKLOG = 512


class Outage(enum.Enum):
    """Whether the bucket can be reached."""

    NONE = "none"
    REFUSE = "refuse"  # nothing listens
    BLACKHOLE = "blackhole"  # connections are accepted, nothing is answered


class S3Server:
    """One S3 endpoint on loopback. Not restartable: make another one on the same directory.

    host: another address of this machine, if set before the start.
    """

    host = "127.0.0.1"

    def __init__(
        self,
        directory: str | Path | None = None,
        *,
        bucket: str = "bucket",
        tls: bool = False,
        port: int = 0,
        access_key: str = DEFAULT_ACCESS_KEY,
        secret_key: str = DEFAULT_SECRET_KEY,
        rules: Rules = Rules(),  # noqa: B008 (frozen)
        settings: Settings = Settings(),  # noqa: B008 (frozen)
    ) -> None:
        """directory None: a temporary one that `stop` removes. port 0: any free one."""
        self._temporary = directory is None
        self.directory = Path(tempfile.mkdtemp(prefix="s3server-") if directory is None else directory)
        self.bucket = bucket
        self.access_key = access_key
        self.secret_key = secret_key
        self.port = port
        self.endpoint_url = ""
        self.ca_path: str | None = None
        self._tls: ssl.SSLContext | None = None
        if tls:
            certificate, self._tls = make_certificate(self.directory / ".tls")
            self.ca_path = str(certificate)
        self._state = State(self.directory, Account(access_key, secret_key), rules, settings)
        if bucket not in {known.name for known in self._state.buckets()}:
            self._state.add_bucket(bucket)
        self.control = Control(self._state, self, bucket)
        self._random = random.Random(0)
        self._lock = threading.Lock()
        self._outage = Outage.NONE
        self._reachable = threading.Event()
        self._reachable.set()
        self._stopping = threading.Event()
        # Holds the port in an outage, too.
        self._reservation: socket.socket | None = None
        self._listener: socket.socket | None = None
        self._acceptor: threading.Thread | None = None
        self._connections: dict[int, tuple[Connection, threading.Thread]] = {}
        self._accepted = 0
        self._shared = Pacer(self._wait, shortest_seconds=PACE_SECONDS)

    def start(self) -> Self:
        """Listen. OSError if the port is taken."""
        self._reservation = reserve(self.port)
        self.port = self._reservation.getsockname()[1]
        self._listen()
        scheme = "http" if self._tls is None else "https"
        self.endpoint_url = f"{scheme}://{self.host}:{self.port}"
        return self

    def stop(self) -> None:
        """End every connection and thread; remove a temporary directory. Twice is fine."""
        self._stopping.set()
        self._reachable.set()
        self._close_listener()
        while self._connections:
            self.drop_connections()
        if self._reservation is not None:
            self._reservation.close()
        if self._temporary:
            shutil.rmtree(self.directory, ignore_errors=True)

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()

    def pause(self, outage: OutageKind) -> None:
        """Begin an outage. In a blackhole, open connections stay and go silent."""
        with self._lock:
            if self._outage is not Outage.NONE:
                raise RuntimeError(f"already in an outage: {self._outage.value}")
            self._reachable.clear()
            self._outage = Outage(outage)
        if self._outage is Outage.REFUSE:
            self._close_listener()
            self.drop_connections()

    def resume(self) -> None:
        """End an outage. Connections of a blackhole end: what they carry must not take effect now."""
        with self._lock:
            outage, self._outage = self._outage, Outage.NONE
            if outage is Outage.BLACKHOLE:
                for connection, _ in self._connections.values():
                    connection.cut()
        self._reachable.set()
        if outage is Outage.REFUSE:
            self._listen()

    def drop_connections(self) -> None:
        """End every open connection; return when their threads have."""
        with self._lock:
            open_now = list(self._connections.values())
        for connection, _ in open_now:
            connection.cut()
        for _, thread in open_now:
            thread.join()

    def _listen(self) -> None:
        listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind((self.host, self.port))
            listener.listen(BACKLOG)
        except BaseException:
            listener.close()
            raise
        self._listener = listener
        self._acceptor = threading.Thread(
            target=self._accept, args=(listener,), name="s3-accept", daemon=True
        )
        self._acceptor.start()

    def _close_listener(self) -> None:
        listener, acceptor = self._listener, self._acceptor
        self._listener = self._acceptor = None
        if listener is None or acceptor is None:
            return
        listener.shutdown(socket.SHUT_RDWR)  # wakes accept; close alone would not
        acceptor.join()
        listener.close()

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                sock, _ = listener.accept()
            except OSError:
                return  # shut down
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            with self._lock:
                self._accepted += 1
                number = self._accepted
            if self._tls is not None:
                try:
                    sock = self._tls.wrap_socket(sock, server_side=True, do_handshake_on_connect=False)
                except OSError:  # the client has gone already
                    sock.close()
                    continue
            connection = Connection(
                sock,
                number,
                settings=lambda: self._state.settings,
                checkpoint=self._checkpoint,
                wait=self._wait,
                shared=self._shared,
            )
            thread = threading.Thread(
                target=self._serve, args=(connection,), name=f"s3-{number}", daemon=True
            )
            with self._lock:
                self._connections[number] = (connection, thread)
                thread.start()

    def _serve(self, connection: Connection) -> None:
        around = Surroundings(self.endpoint_url, self._checkpoint, self._wait, self._latency, self._clock)
        linger = 0.0
        try:
            self._checkpoint()
            connection.shake_hands()
            linger = serve_connection(connection, self._state, around)
        except ConnectionEnded:
            pass  # in the handshake: nothing was asked yet
        finally:
            connection.close(linger_seconds=0.0 if self._stopping.is_set() else linger)
            with self._lock:
                del self._connections[connection.number]

    def _checkpoint(self) -> None:
        """Raise ConnectionEnded if connections are refused, after the blackhole that was met here, or at the stop."""
        outage = self._outage
        if outage is Outage.BLACKHOLE:
            self._reachable.wait()
        if outage is not Outage.NONE:
            raise ConnectionEnded("outage")
        if self._stopping.is_set():
            raise ConnectionEnded("stopping")

    def _wait(self, seconds: float) -> None:
        if self._stopping.wait(seconds) if seconds > 0 else self._stopping.is_set():
            raise ConnectionEnded("stopping")

    def _clock(self) -> float:
        return time.time() + self._state.settings.clock_skew

    def _latency(self) -> float:
        settings = self._state.settings
        return settings.latency * (1 + settings.jitter * self._random.uniform(-1, 1))
