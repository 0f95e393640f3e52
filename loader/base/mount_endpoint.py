"""Finds the daemon of the mount that a directory lies on, or the pull that fills it, and sends messages to it."""

import errno
import json
import os
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from fusecache.model.hints import FOLDER
from loader.base.pulled_files import ask, parsed_answer, pull_connection, pulled_folder, send_request

T = TypeVar("T")

_SOCKET_VARIABLE = "FUSECACHE_SOCKET"
_SOCKET_FILE = ".fusecache/socket"
_ANSWER_SECONDS = 30.0
# Longer than the daemon checks a file before it gives it. A reader waits that could read through the mount.
_OPEN_SECONDS = 3.0
# The errno for texts in the socket's answer. Writing the hint file instead reports its errno directly.
_REJECTIONS = {"no plan": errno.ENOENT, "all jobs together": errno.EPERM, "try again later": errno.EPERM}
_BUSY = "try again later"
# The inode number of a mount's root (linux/fuse.h).
_FUSE_ROOT_ID = 1


@dataclass(frozen=True, slots=True)
class MountEndpoint:
    """Where a mount accepts hints: files in its directory, or its daemon's socket on a read-only mount.

    is_folder: no mount, but a folder that `fusecache pull --follow` fills; it has a socket only.
    """

    root: Path
    is_folder: bool = False

    def send(self, file: str, message: bytes) -> None:
        """Send a message for a hint file; b"" withdraws what the job has sent.

        Raises OSError: EINVAL if the daemon rejects it, EPERM if it rejects it until other jobs end.
        """
        if self.is_folder:
            with pull_connection(str(self.root)) as connection:
                return _send(connection, file, message)
        path = self.root / ".fusecache" / FOLDER / file
        try:
            if message:
                path.write_bytes(message)
            else:
                path.unlink()
        except OSError as problem:
            if problem.errno not in (errno.EROFS, errno.EACCES):
                raise
            self._until_answered(lambda connection: _send(connection, file, message))

    def wait_durable(self, path: str) -> str:
        """Return "" once the bucket has all that was closed at or below a path, or why it will not have it.

        path: below the root. Raises OSError, TimeoutError included; ValueError if the answer is not JSON.
        """
        return self._until_answered(lambda connection: _sync(connection, path))

    def open_cached(self, file: os.stat_result, *, unless_open: bool = False) -> int:
        """Return a descriptor of the daemon's copy of a whole file, to read without the mount; -1 if it gives none.

        file: what stat(2) says of it. unless_open: not if a program has it open through the mount. Raises OSError.
        EPERM: the daemon gives no files, or not to this user, or is another mount's; EAGAIN: it has too much to do.
        """
        request = {
            "command": "open", "device": file.st_dev, "inode": file.st_ino, "unless_open": unless_open,
        }  # fmt: skip
        with self._connection() as connection:
            connection.settimeout(_OPEN_SECONDS)
            send_request(connection, request)
            line, fds, _, _ = socket.recv_fds(connection, 4096, 1, socket.MSG_CMSG_CLOEXEC)
        if fds:
            return fds[0]
        if not line:
            raise OSError(errno.EAGAIN, "the daemon has exited")
        answer = parsed_answer(line)
        if answer.get("opened") is False:
            return -1
        reason = str(answer.get("message"))
        raise OSError(errno.EAGAIN if _BUSY in reason else errno.EPERM, reason)

    def _until_answered(self, exchange: Callable[[socket.socket], T]) -> T:
        """Return what a daemon answers. If it dies, the next one of the mount is asked. Raises OSError."""
        while True:
            daemon = self._listener()
            try:
                with self._connection() as connection:
                    return exchange(connection)
            except ConnectionError:
                os.statvfs(self.root)  # waits for the next daemon; fails if none comes
                if self._listener() == daemon:
                    raise

    def _listener(self) -> tuple[int, int]:
        """Return what tells the socket of a daemon from that of the next one. Raises OSError."""
        facts = os.stat(self._address())
        return facts.st_ino, facts.st_ctime_ns

    def _address(self) -> str:
        return os.environ.get(_SOCKET_VARIABLE) or (self.root / _SOCKET_FILE).read_text().strip()

    @contextmanager
    def _connection(self) -> Iterator[socket.socket]:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(_ANSWER_SECONDS)
            connection.connect(self._address())
            yield connection


def _sync(connection: socket.socket, path: str) -> str:
    send_request(connection, {"command": "sync", "path": path})
    with connection.makefile("rb") as lines:
        for line in lines:  # the daemon reports twice a second
            answer = json.loads(line)
            if answer.get("done"):
                is_durable = answer.get("result") == "durable"
                return "" if is_durable else str(answer.get("message") or answer.get("result"))
    raise ConnectionResetError(errno.ECONNRESET, "the daemon has exited")


def _send(connection: socket.socket, file: str, message: bytes) -> None:
    connection.settimeout(_ANSWER_SECONDS)
    answer = ask(connection, {"command": "hint", "file": file, "bytes": len(message)}, message)
    if answer.get("result") != "ok":
        reason = str(answer.get("message"))
        known = (number for words, number in _REJECTIONS.items() if words in reason)
        raise OSError(next(known, errno.EINVAL), reason)


def find_endpoint(directory: str | Path) -> tuple[MountEndpoint, str] | None:
    """Return the endpoint of the mount that a directory lies in, and its path there; None if it is in no mount.

    The root must be a real mount point: the loader never writes hint files into a plain directory. A folder that a pull
    fills is an endpoint, too, by its socket.
    """
    path = Path(os.path.realpath(directory))
    for root in (path, *path.parents):
        if os.path.ismount(root):
            try:
                # A folder of a mount that is bound elsewhere: its `.fusecache` would come from the bucket.
                if root.stat().st_ino != _FUSE_ROOT_ID:
                    return _folder_endpoint(path)
                if not (root / ".fusecache" / FOLDER).is_dir() or not (root / _SOCKET_FILE).is_file():
                    return _folder_endpoint(path)
            except OSError:  # another kind of mount, or its daemon is gone
                return None
            return MountEndpoint(root), _inner(path, root)
    return None


def _folder_endpoint(path: Path) -> tuple[MountEndpoint, str] | None:
    folder = pulled_folder(str(path))
    if folder is None:
        return None
    return MountEndpoint(Path(folder), is_folder=True), _inner(path, Path(folder))


def _inner(path: Path, root: Path) -> str:
    inner = path.relative_to(root).as_posix()
    return "" if inner == "." else inner + "/"
