"""Asks a mount's daemon over its unix socket. Not the daemon's side.

`<mount>/.fusecache/socket` holds the socket's path. One JSON line goes there; JSON lines come back, the last
with `"done": true`. The daemon speaks about twice a second, so silence means that it is stuck.
"""

import errno
import json
import os
import socket
import struct
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fusecache.model.errors import MountError
from fusecache.mount.mount_table import real_name, real_path, root_of

CONTROL_FILE = Path(".fusecache") / "socket"
SOCKET_VARIABLE = "FUSECACHE_SOCKET"
# The daemon reports twice a second; a loaded node may be late, a stuck daemon is silent for ever.
SILENCE_SECONDS = 30.0
LONGEST_LINE_BYTES = 64 << 20  # a bound, so that garbage cannot fill the memory
LONGEST_REQUEST_BYTES = 1 << 20  # the daemon takes no longer one


@dataclass(frozen=True, slots=True)
class Mount:
    """A live mount: its root directory and its daemon's socket."""

    root: Path
    socket_path: Path


@dataclass(frozen=True, slots=True)
class ServerProgress:
    """What is not in the bucket yet: pending_files changes. uploading: names, or whatever else the daemon calls them.

    pending_contents: how many of them are files with their bytes; deferred_files: removals that wait on purpose.
    left_bytes: those that were not even sent; seconds_left: how long they will take; waiting_for: what holds them up.
    """

    pending_files: int
    pending_bytes: int
    uploading: tuple[object, ...] = ()
    left_bytes: int | None = None
    seconds_left: float | None = None
    waiting_for: str = ""
    pending_contents: int | None = None
    deferred_files: int = 0


@dataclass(frozen=True, slots=True)
class Answer:
    """How a command ended: `durable`, `ok`, `timeout`, `error` or `conflict`. status is for that command."""

    result: str
    message: str
    progress: ServerProgress
    status: dict[str, Any]


def find_mount(
    path: str | os.PathLike[str], environment: Mapping[str, str], *, follows: bool = True
) -> tuple[Mount, str]:
    """Return the mount that `path` belongs to, and the path inside it ("" for its root).

    follows: else a symlink in a mount that is the path's last name is meant itself.
    Raises MountError if no directory above has a control file, or its mount is dead.
    """
    _look_up_control(path)
    resolved = Path(real_path(path) if follows else real_name(path))
    closed = dead = None
    known = root_of(resolved)
    # Where the table knows it, no directory in it is looked into: the bucket would be asked for each.
    for root in (resolved, *resolved.parents) if known is None else (Path(known),):
        try:
            text = (root / CONTROL_FILE).read_text(encoding="utf-8").strip()
        except OSError as exc:
            if exc.errno in (errno.ENOTCONN, errno.ECONNABORTED):
                dead = root
            elif dead is not None:
                break
            if exc.errno == errno.EACCES and closed is None:
                closed = root
            continue
        except UnicodeDecodeError:
            continue
        socket_path = Path(text)
        # A container may see the mount but not the daemon's directory: then the variable names the socket.
        if not socket_path.exists() and environment.get(SOCKET_VARIABLE):
            socket_path = Path(environment[SOCKET_VARIABLE])
        inner = resolved.relative_to(root).as_posix()
        return Mount(root, socket_path), "" if inner == "." else inner
    if dead is not None:
        raise MountError(
            f"{dead}: the mount is dead, its daemon is gone; clean it with: fusecache unmount {dead}"
        )
    if closed is not None:
        raise MountError(
            f"{path} is not in a fusecache mount that you may see: {closed} refuses you; "
            "mounts show themselves to other users with --allow-other"
        )
    raise MountError(f"{path} is not in a fusecache mount")


def _look_up_control(path: str | os.PathLike[str]) -> None:
    """Have the kernel know the control file of the mount that a path leads into, for the next minute.

    It looks the names of a directory up one after the other, and that of the path may wait for the bucket.
    """
    mountpoint = root_of(path)
    if mountpoint is not None:
        with suppress(OSError):
            (Path(mountpoint) / CONTROL_FILE).stat()


@contextmanager
def connect(mount: Mount) -> Iterator[socket.socket]:
    """Open the control connection. Raises MountError if nobody listens."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(SILENCE_SECONDS)
        try:
            connection.connect(os.fspath(mount.socket_path))
        except OSError as exc:
            raise MountError(
                f"{mount.root}: cannot reach the daemon at {mount.socket_path}: {exc.strerror or exc}"
            ) from exc
        yield connection


def daemon_pid(mount: Mount) -> int | None:
    """Return the daemon's process id, or None if it is not of our pid namespace."""
    with connect(mount) as connection:
        facts = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    pid: int = struct.unpack("3i", facts)[0]
    return pid if pid > 0 else None


def ask(
    mount: Mount,
    command: str,
    path: str = "",
    *,
    timeout_seconds: float | None = None,
    on_progress: Callable[[ServerProgress], None] | None = None,
) -> Answer:
    """Send one command about the bucket and return its end; `on_progress` hears every report on the way.

    Raises MountError if the daemon hangs up, is silent, or says something that is not the protocol.
    """
    request = {"command": command, "path": path, "timeout_seconds": timeout_seconds}
    row = request_stream(
        mount, request, on_report=None if on_progress is None else lambda row: on_progress(_progress(row))
    )
    return Answer(
        str(row.get("result", "error")), str(row.get("message", "")), _progress(row), row.get("status") or {}
    )


def request_stream(
    mount: Mount,
    request: Mapping[str, Any],
    *,
    on_report: Callable[[dict[str, Any]], None] | None = None,
) -> dict[str, Any]:
    """Send one request and return the answer that ends it; `on_report` hears those before. Raises MountError."""
    command = request["command"]
    line = json.dumps(request).encode() + b"\n"
    if len(line) > LONGEST_REQUEST_BYTES:
        raise MountError(f"{command}: these are too many paths at once; name their directory instead")
    with connect(mount) as connection:
        try:
            connection.sendall(line)
            with connection.makefile("rb") as lines:
                while line := lines.readline(LONGEST_LINE_BYTES):
                    row = _row(mount, line)
                    if row.get("done"):
                        return row
                    if on_report is not None:
                        on_report(row)
        except TimeoutError as exc:
            raise MountError(f"{mount.root}: the daemon was silent for {SILENCE_SECONDS:g} s") from exc
        except OSError as exc:
            raise MountError(f"{mount.root}: the daemon broke off: {exc.strerror or exc}") from exc
    raise MountError(f"{mount.root}: the daemon hung up before it was done with {command}")


def _row(mount: Mount, line: bytes) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except ValueError as exc:
        raise MountError(f"{mount.root}: the daemon's answer is not JSON: {line[:80]!r}") from exc
    if not isinstance(row, dict):
        raise MountError(f"{mount.root}: the daemon's answer is not an object: {line[:80]!r}")
    return row


def _progress(row: Mapping[str, Any]) -> ServerProgress:
    return ServerProgress(
        int(row.get("pending_files", 0)),
        int(row.get("pending_bytes", 0)),
        tuple(row.get("uploading") or ()),
        row.get("left_bytes"),
        row.get("seconds_left"),
        str(row.get("waiting_for") or ""),
        row.get("pending_contents"),
        int(row.get("deferred_files", 0)),
    )
