"""Runs `fusecache` as forks of one process that has imported what a daemon imports.

Python's start and the imports need up to a second of CPU time. The tests start a daemon or a command some thousand
times, so each test process pays for the imports once. A fork runs the command from its first line, with its own words,
variables, working directory and descriptors. A fork cannot be another program, or have other values of variables that
Python or a library reads while it is loaded, or ignore other signals. `can_fork` tells, and else the caller executes
the command.

The starter has one thread and opens nothing. It ends with the test process; daemons stay.
"""

import atexit
import fcntl
import json
import os
import re
import select
import selectors
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from functools import cache
from pathlib import Path
from typing import Any

FUSECACHE = Path(sys.executable).parent / "fusecache"
# Read when Python, the C library or a module is loaded; all others when a command runs.
_READ_EARLY = re.compile(r"(PYTHON|LC_|LD_|LANG|MALLOC|GLIBC|TZ)\w*")
_MESSAGE_BYTES = 128 * 1024
_PIPE_BYTES = 64 * 1024
# One question at a time, also of threads: an answer does not say whose it is.
_ASKING = threading.Lock()
# A received descriptor first gets a number from here on: the command expects it under a smaller number.
_FREE_NUMBERS = 500


class Started:
    """A process of `fusecache`, as far as tests use `subprocess.Popen`."""

    def __init__(self, pid: int, ended: int) -> None:
        """ended: a pipe that gives the wait status once the process has ended."""
        self.pid = pid
        self._ended = ended
        self._status: int | None = None

    def poll(self) -> int | None:
        """Return the exit status, negative for a signal; None while it runs."""
        if self._status is None:
            with suppress(BlockingIOError):
                word = os.read(self._ended, 16)
                os.close(self._ended)
                self._status = os.waitstatus_to_exitcode(int(word))
        return self._status

    def wait(self, timeout: float) -> int:
        """Return the exit status. Raises TimeoutExpired."""
        if self._status is None:
            select.select([self._ended], [], [], timeout)
        status = self.poll()
        if status is None:
            raise subprocess.TimeoutExpired(str(self.pid), timeout)
        return status

    def send_signal(self, number: int) -> None:
        """Send a signal, unless it has ended."""
        if self.poll() is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill(self) -> None:
        """End it with SIGKILL."""
        self.send_signal(signal.SIGKILL)

    def leave(self) -> None:
        """Let the process run on. The caller does not ask for its exit status."""
        os.close(self._ended)


def can_fork(words: Sequence[str | Path], environment: Mapping[str, str]) -> bool:
    """Return whether a fork does the same as this command line with these variables."""
    changed = {name for name, _ in environment.items() ^ os.environ.items()}
    return (
        str(words[0]) == str(FUSECACHE)
        and not any(_READ_EARLY.fullmatch(name) for name in changed)
        and _ignored() == _IGNORED
    )


def _ignored() -> set[int]:
    """Return which signals this process ignores: a program that it executes ignores them too."""
    return {number for number in signal.valid_signals() if signal.getsignal(number) is signal.SIG_IGN}


def start_forked(
    words: Sequence[str | Path],
    environment: Mapping[str, str],
    *,
    stdout: int,
    stderr: int,
    pass_fds: Sequence[int] = (),
    folder: str | Path = "",
) -> Started:
    """Start a command in a session of its own. `can_fork` must be true. The caller waits for its end, or leaves it.

    stdout, stderr: descriptors; stdin is empty. folder: the working directory, if not the caller's.
    """
    ended, writer = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    request = {
        "words": [str(word) for word in words],
        "environment": dict(environment),
        "folder": str(folder) or os.getcwd(),
        "umask": _umask(),
        "numbers": [1, 2, *pass_fds],
    }
    try:
        message = json.dumps(request).encode()
        with _ASKING:
            socket.send_fds(_starter(), [message], [writer, stdout, stderr, *pass_fds])
            pid = int(_starter().recv(64))
    finally:
        os.close(writer)
    return Started(pid, ended)


def run_forked(
    words: Sequence[str | Path], environment: Mapping[str, str], seconds: float, folder: str | Path = ""
) -> "subprocess.CompletedProcess[str]":
    """Run a command to its end, and until no process has its output open, as `subprocess.run` does."""
    deadline = time.monotonic() + seconds
    said: dict[str, bytearray] = {}
    with ExitStack() as stack, selectors.DefaultSelector() as selector:
        writers = []
        for name in ("stdout", "stderr"):
            reader, writer = os.pipe()
            writers.append(stack.enter_context(open(writer, "wb", buffering=0)))
            selector.register(
                stack.enter_context(open(reader, "rb", buffering=0)), selectors.EVENT_READ, name
            )
            said[name] = bytearray()
        process = start_forked(
            words, environment, stdout=writers[0].fileno(), stderr=writers[1].fileno(), folder=folder
        )
        for each in writers:
            each.close()
        while selector.get_map():
            ready = selector.select(max(0, deadline - time.monotonic()))
            if not ready:
                process.kill()
                process.wait(seconds)
                raise subprocess.TimeoutExpired([str(word) for word in words], seconds)
            for key, _ in ready:
                piece = os.read(key.fd, _PIPE_BYTES)
                said[key.data] += piece
                if not piece:
                    selector.unregister(key.fileobj)
        status = process.wait(max(1, deadline - time.monotonic()))
    return subprocess.CompletedProcess(
        [str(word) for word in words], status, said["stdout"].decode(), said["stderr"].decode()
    )


def descriptor() -> int:
    """Return the number of the socket to the starter, -1 without one."""
    return _starter().fileno() if _starter.cache_info().currsize else -1


_IGNORED = _ignored()


@cache
def _starter() -> socket.socket:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-m", __name__, str(theirs.fileno())],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            pass_fds=[theirs.fileno()],
            start_new_session=True,
            cwd=Path(__file__).parents[2],
        )
    atexit.register(process.wait)
    atexit.register(ours.close)  # before it: last in, first out
    return ours


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


# ---- the starter's side


def _await_request(connection: socket.socket) -> dict[str, Any]:
    """Return a request, in the fork that is to become the command; the starter stays here until the tests end."""
    while True:
        message, received, _, _ = socket.recv_fds(connection, _MESSAGE_BYTES, 16)
        if not message:
            os._exit(0)
        if os.fork():
            for fd in received:
                os.close(fd)
            continue
        # A process for each command, which waits for its end.
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        ended, *given = received
        pid = os.fork()
        if pid == 0:
            request: dict[str, Any] = json.loads(message)
            connection.detach()  # its number may get another meaning
            _take_over(request["numbers"], given)
            return request
        for fd in given:
            os.close(fd)
        connection.send(str(pid).encode())
        connection.close()
        status = os.waitpid(pid, 0)[1]
        with suppress(BrokenPipeError):  # the test did not wait
            os.write(ended, str(status).encode())
        os._exit(0)


def _take_over(numbers: Sequence[int], given: Sequence[int]) -> None:
    """Have the given descriptors under these numbers, stdin, and no other."""
    high = [fcntl.fcntl(fd, fcntl.F_DUPFD, _FREE_NUMBERS) for fd in given]
    os.closerange(3, _FREE_NUMBERS)
    for fd, number in zip(high, numbers, strict=True):
        os.dup2(fd, number)
    os.closerange(_FREE_NUMBERS, high[-1] + 1)


def _become(request: dict[str, Any]) -> None:
    """Be as a new process of the command line is."""
    os.setsid()
    os.chdir(request["folder"])
    os.umask(request["umask"])
    os.environ.clear()
    os.environ.update(request["environment"])
    sys.argv = request["words"]
    sys.path[0] = str(FUSECACHE.parent)


def main() -> int:
    """Import what a daemon imports; run the command in each fork."""
    from fusecache.__main__ import main as run_command
    from fusecache.cli import extras, main

    extras._daemon()
    # Building it took 15 of the 200 ms of CPU time of a command. It depends on nothing that differs between commands.
    main.make_parser = cache(main.make_parser)
    main.make_parser()
    assert len(os.listdir("/proc/self/task")) == 1, "a fork has none of the other threads"
    signal.signal(
        signal.SIGCHLD, signal.SIG_IGN
    )  # the kernel removes a process of `_await_request` once it has ended
    _become(_await_request(socket.socket(fileno=int(sys.argv[1]))))
    return run_command()


if __name__ == "__main__":
    sys.exit(main())
