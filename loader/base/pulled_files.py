"""Files of a folder that `fusecache pull --follow` is filling: opening one that is not there yet waits for it.

The pull has a socket in the folder (`fusecache/folder/follow.py`). A reader asks there for its file, which is fetched
next. Only a file that is missing costs a look for the socket.
"""

import contextlib
import errno
import json
import logging
import os
import socket
import stat
from collections.abc import Iterator, Mapping
from typing import Any

log = logging.getLogger(__name__)

_OWN_FOLDER = ".fusecache"
_SOCKET_NAME = "socket"


def open_pulled(path: str, flags: int) -> int:
    """Open a file as os.open does. If a pull is going to fetch it, wait for that, however long it takes.

    Raises OSError with EIO, and the reason, if the pull cannot fetch it.
    """
    try:
        return os.open(path, flags)
    except FileNotFoundError:
        _wait_until_pulled(path)
        return os.open(path, flags)


def pulled_folder(path: str) -> str | None:
    """Return the folder above a path that a pull fills at the moment, or was filling when it was killed; else None."""
    while True:
        with contextlib.suppress(OSError):
            # A socket, so it is a pull's: what comes out of a bucket is a file.
            if stat.S_ISSOCK(os.lstat(os.path.join(path, _OWN_FOLDER, _SOCKET_NAME)).st_mode):
                return path
        above = os.path.dirname(path)
        if above == path:
            return None
        path = above


@contextlib.contextmanager
def pull_connection(folder: str) -> Iterator[socket.socket]:
    """Connect to the pull that fills a folder. Raises OSError if there is none."""
    # An address has 108 bytes at most, a path more.
    own = os.open(os.path.join(folder, _OWN_FOLDER), os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(f"/proc/self/fd/{own}/{_SOCKET_NAME}")
            yield connection
    finally:
        os.close(own)


def ask(connection: socket.socket, request: Mapping[str, object], body: bytes = b"") -> dict[str, Any]:
    """Send a request to a pull or a daemon, and return its answer.

    Raises OSError: EPROTO if that is not JSON, ECONNRESET if there is none. body: the bytes that follow the request's
    line.
    """
    send_request(connection, request, body)
    with connection.makefile("rb") as lines:
        line = lines.readline()
    if not line:
        raise ConnectionResetError(errno.ECONNRESET, "it has exited")
    return parsed_answer(line)


def send_request(connection: socket.socket, request: Mapping[str, object], body: bytes = b"") -> None:
    """Send a request as `ask` does, for a caller that reads the answer in its own way."""
    connection.sendall(json.dumps(request).encode() + b"\n" + body)


def parsed_answer(line: bytes) -> dict[str, Any]:
    """Return an answer from its line. Raises OSError with EPROTO."""
    try:
        answer: dict[str, Any] = json.loads(line)
    except ValueError as problem:
        raise OSError(errno.EPROTO, f"the daemon's answer is not JSON: {problem}") from problem
    return answer


def _wait_until_pulled(path: str) -> None:
    where = os.path.join(os.path.realpath(os.path.dirname(path)), os.path.basename(path))
    folder = pulled_folder(os.path.dirname(where))
    if folder is None:
        return
    request = {"command": "fetch", "path": os.path.relpath(where, folder)}
    try:
        with pull_connection(folder) as connection:
            answer = ask(connection, request)
    except OSError:  # no pull, or one that has ended
        if not os.path.exists(path):
            log.warning(
                "%s is not there, and the pull of its folder has ended too early: run `fusecache pull` again",
                path,
            )
        return
    if answer.get("result") != "ok":
        raise OSError(errno.EIO, f"`fusecache pull` cannot fetch it: {answer.get('message')}", path)
