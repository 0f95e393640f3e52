"""The unix socket that a daemon listens on: in a folder of its user, made again if it is gone.

A logout removes /run/user/UID, and programs that clean up remove old files; the daemon goes on in both cases.
"""

import os
import socket
from contextlib import suppress
from pathlib import Path

import trio

from fusecache.disk.staging import NO_DESCRIPTORS
from fusecache.model.errors import MountError
from fusecache.mount.runtime_folder import listen_at, runtime_folder


class ControlSocket:
    """The listening socket of one daemon. `path` is where it is now, or where it will be."""

    def __init__(self, name: str, *, shared: bool) -> None:
        """name: unique for the cache directory, short: an address has 108 bytes at most. Raises MountError."""
        self._name = name
        self.shared = shared
        self.path = self._choose_path()
        self._inode = 0

    def listen(self) -> socket.socket:
        """Bind a new socket and listen. Raises MountError if no folder or socket can be made."""
        self.path = self._choose_path()
        try:
            # What another user may ask for is decided for each command.
            listener = listen_at(self.path, mode=0o666 if self.shared else 0o600)
        except OSError as exc:
            raise MountError(f"no control socket at {self.path}: {exc.strerror or exc}") from exc
        with suppress(OSError):  # removed already: another is made
            self._inode = self.path.lstat().st_ino
        return listener

    def is_there(self) -> bool:
        """Return whether the path still leads to the socket."""
        try:
            return self.path.lstat().st_ino == self._inode
        except OSError:
            return False

    def remove(self) -> None:
        """Remove the socket, unless it is gone or another daemon's."""
        if self.is_there():
            with suppress(OSError):
                self.path.unlink()

    def _choose_path(self) -> Path:
        folder = runtime_folder(os.environ, shared=self.shared)
        for path in folder.glob("*.sock"):
            _remove_if_stale(path)
        return folder / f"{self._name}.sock"


def _remove_if_stale(path: Path) -> None:
    """Remove a unix socket that refuses connections: its daemon was killed."""
    try:
        inode = path.lstat().st_ino
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            probe.settimeout(0)  # a full backlog of a busy daemon raises BlockingIOError, not a refusal
            probe.connect(os.fspath(path))
    except ConnectionRefusedError:
        with suppress(OSError):
            if path.lstat().st_ino == inode:  # else another daemon has taken the place
                path.unlink()
    except OSError:
        return


class ReservingListener(trio.abc.Listener[trio.SocketStream]):
    """Accepts connections also when the daemon's descriptors are used up: it holds one back for that.

    So `status` can say what is wrong. One connection is served at a time.
    """

    def __init__(self, listener: trio.socket.SocketType) -> None:
        self._inner = trio.SocketListener(listener)
        self._reserve: int | None = None
        self._take_reserve()

    def _take_reserve(self) -> None:
        with suppress(OSError):
            self._reserve = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)

    async def accept(self) -> trio.SocketStream:
        """Return the next connection."""
        # accept4(2) also fails without descriptors when no one connects: another thread would take the held one.
        await trio.lowlevel.wait_readable(self._inner.socket)
        if self._reserve is None:
            self._take_reserve()
        try:
            return await self._inner.accept()
        except OSError as exc:
            if exc.errno not in NO_DESCRIPTORS or self._reserve is None:
                raise  # trio tries again after a pause
            os.close(self._reserve)
            self._reserve = None
            return await self._inner.accept()

    async def aclose(self) -> None:
        """Close."""
        if self._reserve is not None:
            os.close(self._reserve)
        await self._inner.aclose()
