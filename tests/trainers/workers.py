"""Trainers in processes of their own, which import their libraries once and then do what tests ask.

The test's side is `Worker`: `worker.call("train", steps=4)` returns what the function `train` of the worker's module
returned. The other side is `serve`, at the end of each `jobs_*.py`. Its warnings and prints go to a log.
"""

import os
import socket
import subprocess
import sys
import traceback
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Client, Connection
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from tests.support import ROOT

# Importing transformers takes 10 s where two other tests run beside it; minutes where three processes of a new
# environment compile torch and lightning first, on a machine that is busy otherwise.
START_SECONDS = 400.0
CALL_SECONDS = 200.0
STOP_SECONDS = 20.0
# Sums in one thread are the same sums each time, and nothing is asked of a hub.
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_OFFLINE": "1",
    "PYTHONWARNINGS": "ignore",
}


class Worker:
    """A process that runs functions of a `tests.trainers.jobs_*` module: `with Worker(…) as worker`."""

    def __init__(
        self,
        module: str,
        directory: Path,
        *,
        launcher: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """directory: for its log and socket. launcher: words after `python -m` that start the module's ranks."""
        self._module = module
        self._log_path = directory / f"{module}.log"
        self._address = str(directory / f"{module}.socket")
        self._words = [sys.executable, "-m", *launcher, f"tests.trainers.{module}", self._address]
        self._environment = {**os.environ, **ENVIRONMENT, **(environment or {})}
        self._process: subprocess.Popen[bytes] | None = None
        self._listener: socket.socket | None = None
        self._connection: Connection | None = None

    def __enter__(self) -> Self:
        """Start it; its imports go on in the background until the first call."""
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(self._address)
        self._listener.listen(1)
        with open(self._log_path, "wb") as log:
            self._process = subprocess.Popen(
                self._words, cwd=ROOT, env=self._environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._process is not None
        assert self._listener is not None
        if self._connection is not None:
            self._connection.close()  # the worker ends when it reads the end
        elif kind is None:
            self._process.terminate()  # never called
        self._listener.close()
        try:
            self._process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def call(self, function: str, **arguments: Any) -> Any:
        """Return what a function of the module returns. Fails the test with the worker's traceback."""
        self.begin(function, **arguments)
        return self.result()

    def begin(self, function: str, **arguments: Any) -> None:
        """Let a function run; `result` waits for its end."""
        if self._connection is None:
            self._connection = self._accept()
        self._connection.send((function, arguments))

    def result(self) -> Any:
        """Return what the function that was begun returned."""
        assert self._connection is not None
        assert self._connection.poll(CALL_SECONDS), f"no answer; log:\n{self.log()}"
        try:
            failure, value = self._connection.recv()
        except EOFError as exc:
            raise AssertionError(f"the worker ended; log:\n{self.log()}") from exc
        assert failure is None, f"{failure}\nlog:\n{self.log()}"
        return value

    def log(self) -> str:
        """Return the end of what it printed."""
        return self._log_path.read_text(errors="replace")[-3000:]

    def _accept(self) -> Connection:
        assert self._process is not None
        assert self._listener is not None
        self._listener.settimeout(1.0)
        waited = 0.0
        while True:
            try:
                found, _ = self._listener.accept()
            except TimeoutError:
                waited += 1.0
                assert self._process.poll() is None, f"the worker did not start; log:\n{self.log()}"
                assert waited < START_SECONDS, f"the worker does not answer; log:\n{self.log()}"
                continue
            found.settimeout(None)
            return Connection(found.detach())


class Calls:
    """The worker's end: what is asked of it."""

    def __init__(self, address: str) -> None:
        self._connection = Client(address, "AF_UNIX")

    def receive(self) -> tuple[str, dict[str, Any]] | None:
        """Return a function's name and arguments; None at the end."""
        try:
            name, arguments = self._connection.recv()
        except (EOFError, ConnectionResetError):
            return None
        return name, arguments

    def answer(self, failure: str | None, value: Any) -> None:
        """Send a result, or a traceback."""
        self._connection.send((failure, value))


def carry_out(
    functions: Mapping[str, Any], name: str, arguments: Mapping[str, Any]
) -> tuple[str | None, Any]:
    """Return the traceback, if the function raised, and what it returned."""
    try:
        return None, functions[name](**arguments)
    except Exception:  # noqa: BLE001  # whatever a trainer raises is the test's to see
        return traceback.format_exc(), None


def serve(functions: Mapping[str, Any]) -> None:
    """Do what is asked at the socket that the command line names, until its other end is closed."""
    calls = Calls(sys.argv[1])
    while (call := calls.receive()) is not None:
        calls.answer(*carry_out(functions, *call))
