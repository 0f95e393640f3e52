"""The server as a child process, and `Control` across the border.

The child ends when its standard input closes: also when the parent is killed. It has a session of its own: a
Ctrl-C at the terminal is its parent's, which may need it for the clean-up.
"""

import json
import shutil
import subprocess
import sys
import tempfile
import threading
import weakref
from collections.abc import Callable
from multiprocessing.connection import Client, Connection
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from tests.s3server.control import Control
from tests.s3server.ports import reserve
from tests.s3server.server import DEFAULT_ACCESS_KEY, DEFAULT_SECRET_KEY
from tests.support import ROOT

STOP_SECONDS = 10.0


class RemoteControl(Control):
    """Every public method of `Control`, carried out in the server's process. For many threads."""

    def __init__(self, address: tuple[str, int], secret: bytes) -> None:
        self._address = address
        self._secret = secret
        self._lock = threading.Lock()
        self._idle: list[Connection[Any, Any]] = []

    def call(self, name: str, arguments: tuple[Any, ...], options: dict[str, Any]) -> Any:
        """Run one method over there; return what it returns, raise what it raises."""
        with self._lock:
            connection = self._idle.pop() if self._idle else None
        if connection is None:
            connection = Client(self._address, authkey=self._secret)
        try:
            connection.send((name, arguments, options))
            succeeded, value = connection.recv()
        except BaseException:
            connection.close()
            raise
        with self._lock:
            self._idle.append(connection)
        if not succeeded:
            raise value
        return value

    def close(self) -> None:
        """Close the connections."""
        with self._lock:
            for connection in self._idle:
                connection.close()
            self._idle.clear()


def _forward(name: str) -> Callable[..., Any]:
    def forwarded(self: RemoteControl, *arguments: Any, **options: Any) -> Any:
        return self.call(name, arguments, options)

    return forwarded


CONTROL_METHODS = frozenset(name for name in vars(Control) if not name.startswith("_"))
for _name in CONTROL_METHODS:
    setattr(RemoteControl, _name, _forward(_name))


class ServerProcess:
    """A server in its own process: `with ServerProcess() as server`, or `start` and `stop`.

    After `stop` or `kill`, `start` runs it again on the same directory, port and keys. What `control` changed
    (rules, settings, accounts, faults, log, clock) is forgotten by then; objects and uploads are not.
    """

    control: Control

    def __init__(
        self,
        directory: str | Path | None = None,
        *,
        bucket: str = "bucket",
        tls: bool = False,
        port: int = 0,
        access_key: str = DEFAULT_ACCESS_KEY,
        secret_key: str = DEFAULT_SECRET_KEY,
    ) -> None:
        """directory None: a temporary one, removed on leaving the `with` block or by `close`."""
        self._temporary = directory is None
        self.directory = Path(tempfile.mkdtemp(prefix="s3server-") if directory is None else directory)
        self.bucket = bucket
        self.access_key = access_key
        self.secret_key = secret_key
        self.port = port
        self.endpoint_url = ""
        self.ca_path: str | None = None
        self._tls = tls
        # Another address of this machine, if set before the start.
        self.host = "127.0.0.1"
        # Closes what holds the port while no child runs.
        self._release_port: Callable[[], object] | None = None
        self._child: subprocess.Popen[str] | None = None
        self._remote: RemoteControl | None = None

    @property
    def pid(self) -> int:
        """The child's process id."""
        if self._child is None:
            raise RuntimeError("not running")
        return self._child.pid

    def start(self) -> Self:
        """Start the child; return when it listens. RuntimeError if it ends before, OSError if the port is taken."""
        if self._release_port is None:
            held = reserve(self.port)
            self.port = held.getsockname()[1]
            self._release_port = weakref.finalize(self, held.close)
        command = [sys.executable, "-m", "tests.s3server", "--exit-with-stdin", "--with-control"]
        command += ["--bucket", self.bucket, "--directory", str(self.directory), "--port", str(self.port)]
        command += ["--host", self.host]
        command += ["--access-key", self.access_key, "--secret-key", self.secret_key]
        if self._tls:
            command.append("--tls")
        child = self._child = subprocess.Popen(
            command,
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        assert child.stdout is not None
        try:
            line = child.stdout.readline()
        except BaseException:  # a Ctrl-C: nobody else would end the child
            self._end()
            raise
        if not line:
            self._end()
            raise RuntimeError("the server did not start; its standard error says why")
        facts = json.loads(line)
        self.endpoint_url, self.port, self.ca_path = facts["endpoint_url"], facts["port"], facts["ca_path"]
        address, secret = facts["control"]
        self._remote = RemoteControl((address[0], address[1]), bytes.fromhex(secret))
        self.control = self._remote
        return self

    def stop(self) -> None:
        """End the child in good order. Twice is fine."""
        self._end()

    def kill(self) -> None:
        """End the child with SIGKILL."""
        if self._child is not None:
            self._child.kill()
        self._end()

    def close(self) -> None:
        """Stop, and remove a temporary directory."""
        self._end()
        if self._release_port is not None:
            self._release_port()
            self._release_port = None
        if self._temporary:
            shutil.rmtree(self.directory, ignore_errors=True)

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _end(self) -> None:
        child, remote = self._child, self._remote
        self._child = self._remote = None
        if remote is not None:
            remote.close()
        if child is None:
            return
        assert child.stdin is not None
        assert child.stdout is not None
        child.stdin.close()
        try:
            child.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()
        child.stdout.close()
