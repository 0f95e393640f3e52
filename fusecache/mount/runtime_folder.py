"""The folder of control sockets: made by the daemon for its user alone, and checked again by each client. Who listens.

A private folder has mode 0700. Mounts with allow_other use another one, 0711: other users may reach a socket whose name
the mount tells them, but not list, add or replace any.

Makes a unix socket that listens from the moment it can be seen.

bind(2) makes the file, but the socket refuses connections until listen(2). So it is bound under another name and then
renamed: a program that waits for the file may connect at once, and only the socket of a killed process refuses.
"""

import os
import socket
import stat
import struct
import tempfile
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path

from fusecache.model.errors import MountError

_BACKLOG = 128


def listen_at(path: Path, *, mode: int) -> socket.socket:
    """Return a socket that listens at a path of any length, in place of one that is there. Raises OSError.

    mode: who may connect. No two processes may do this for one path at a time.
    """
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    new = path.with_name(f"{path.name}.new")
    folder = -1
    try:
        folder = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        new.unlink(missing_ok=True)
        listener.bind(f"/proc/self/fd/{folder}/{new.name}")  # an address has 108 bytes at most
        new.chmod(mode)
        listener.listen(_BACKLOG)
        new.rename(path)
    except BaseException:
        listener.close()
        raise
    finally:
        if folder >= 0:
            os.close(folder)
    return listener


PRIVATE_MODE, SHARED_MODE = 0o700, 0o711
_WRITABLE_BY_OTHERS = stat.S_IWGRP | stat.S_IWOTH
# Of a folder's path: an address has 108 bytes, of which the socket's own name, 16 digits and `.sock`, takes up to 23.
_PATH_BYTES_MAX = 108 - 23


def runtime_folder(environment: Mapping[str, str], *, shared: bool) -> Path:
    """Return the folder for a socket; makes it. shared: other users must reach the socket.

    A folder that another user made is never used. Raises MountError if no folder can be made.
    """
    mode = SHARED_MODE if shared else PRIVATE_MODE
    for folder in _candidates(environment, shared=shared):
        if len(os.fsencode(folder)) <= _PATH_BYTES_MAX and _claim(folder, mode):
            return folder
    try:
        # The usual name is taken by another user. This one cannot be guessed.
        folder = Path(tempfile.mkdtemp(prefix="fusecache-"))
        folder.chmod(mode)
    except OSError as exc:
        raise MountError(
            f"no folder for the control socket: {tempfile.gettempdir()}: {exc.strerror}; set XDG_RUNTIME_DIR or "
            "TMPDIR to a directory that you own, with mode 0700"
        ) from exc
    return folder


def _candidates(environment: Mapping[str, str], *, shared: bool) -> Iterator[Path]:
    suffix = "-shared" if shared else ""
    runtime = environment.get("XDG_RUNTIME_DIR")
    # sudo may pass another user's. Other users cannot reach a socket in it.
    if runtime and not shared and is_private(Path(runtime)):
        yield Path(runtime) / "fusecache"
    if os.geteuid() == 0:
        yield Path(f"/run/fusecache{suffix}")
    yield Path(tempfile.gettempdir()) / f"fusecache-{os.geteuid()}{suffix}"


def is_private(folder: Path) -> bool:
    """Return whether a path is a directory, not a symlink, that this user owns and no other user may enter."""
    try:
        facts = folder.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(facts.st_mode) and facts.st_uid == os.geteuid() and not facts.st_mode & 0o077


def _claim(folder: Path, mode: int) -> bool:
    """Make a folder, or take one that this user made before; return whether it is this user's, with this mode."""
    try:
        folder.mkdir(mode=mode, exist_ok=True)
        # O_NOFOLLOW: a symlink of that name would lead the change of the mode elsewhere.
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        facts = os.fstat(descriptor)
        if facts.st_uid != os.geteuid():
            return False
        if stat.S_IMODE(facts.st_mode) != mode:
            os.fchmod(descriptor, mode)
    except OSError:
        return False
    finally:
        os.close(descriptor)
    return os.access(folder, os.W_OK | os.X_OK)


def check_socket_folder(socket_path: Path, owners: Collection[int]) -> None:
    """Raise MountError if another user than these could have put a socket there."""
    folder = socket_path.parent
    try:
        facts = folder.stat()
    except OSError as exc:
        raise MountError(f"cannot reach the daemon at {socket_path}: {exc.strerror}") from exc
    if facts.st_uid not in owners or facts.st_mode & _WRITABLE_BY_OTHERS:
        raise MountError(
            f"the daemon's socket {socket_path} is not trusted: user {facts.st_uid} owns {folder}, with mode "
            f"{stat.S_IMODE(facts.st_mode):04o}; unmount, remove that folder, and mount again"
        )


def peer_of(connection: socket.socket) -> tuple[int, int, int]:
    """Return process, user and group of the process that listens (unix(7), SO_PEERCRED)."""
    facts = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    process, user, group = struct.unpack("3i", facts)
    return process, user, group
