"""Client of a daemon's control socket. The server is `fusecache.daemon.control_server`.

`<mount>/.fusecache/socket` holds the path of the unix socket. The client sends one JSON line. The daemon answers with
JSON lines, about two a second, the last with `"done": true`. Silence therefore means that the daemon hangs.

Invariant: a request outlives the daemon that it was sent to. If the connection breaks and the mount is still there, the
request is sent again to the next daemon, until its time limit ends. The requests of `_SENT_ONCE` are not sent again.
"""

import errno
import json
import os
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Any

from fusecache.model.errors import MountError
from fusecache.model.format_text import at_mount, size_text
from fusecache.mount.mount_table import (
    TableEntry,
    mountpoints_in,
    our_entries,
    real_name,
    real_path,
    root_of,
    wait_statfs,
)
from fusecache.mount.runtime_folder import check_socket_folder, peer_of

CONTROL_FILE = Path(".fusecache") / "socket"
SOCKET_VARIABLE = "FUSECACHE_SOCKET"
# The daemon reports twice a second. On a loaded node a report may be late; a hung daemon never reports.
SILENCE_SECONDS = 30.0
# How long a request without a time limit waits for the next daemon. A long journal takes as long to replay.
SUCCESSOR_SECONDS = 120.0
# A daemon that dies may have carried out what it did not answer, and a second time would be an error or do harm.
_SENT_ONCE = frozenset({"bring-back", "delete"})
LONGEST_LINE_BYTES = 64 << 20  # bounds the memory that a malformed answer can take
LONGEST_REQUEST_BYTES = 1 << 20  # the daemon accepts no longer request


@dataclass(frozen=True, slots=True)
class Mount:
    """A live mount: its root directory and its daemon's socket. owner: the daemon's user id; None if unknown.

    is_named: the user named the socket, with FUSECACHE_SOCKET.
    """

    root: Path
    socket_path: Path
    owner: int | None = None
    is_named: bool = False

    @property
    def trusted_users(self) -> frozenset[int]:
        """The users whose answers count: root, and the daemon's user."""
        return frozenset({0, os.geteuid() if self.owner is None else self.owner})


@dataclass(frozen=True, slots=True)
class ServerProgress:
    """The changes that are not in the bucket yet. pending_files counts changes, deferred deletions included.

    pending_contents: changes that carry file content; None if unknown. deferred_files: deferred deletions.
    left_bytes: pending bytes not sent yet; seconds_left: the estimate for them; waiting_for: why uploads wait.
    uploading: the daemon's entries about uploads in flight, as they came.
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
    """The final answer to a command. result: `durable`, `ok`, `timeout`, `error` or `conflict`.

    status: of the command `status` only, else empty. missing: name and size of changes that the bucket lacks after
    `sync` or `drain`, at most 50.
    """

    result: str
    message: str
    progress: ServerProgress
    status: dict[str, Any]
    missing: tuple[str, ...] = ()


class _DaemonLost(MountError):
    """The daemon ended, or none listens. was_sent: it may have got the request."""

    def __init__(self, text: str, *, was_sent: bool = False) -> None:
        super().__init__(text)
        self.was_sent = was_sent


def find_mount(
    path: str | os.PathLike[str], environment: Mapping[str, str], *, follows: bool = True
) -> tuple[Mount, str]:
    """Return the mount that `path` belongs to, and the path inside it ("" for its root).

    follows: resolve a symlink at the end of the path; if False, a symlink in a mount stays as it is.
    Raises MountError if no directory above has a control file, or if the daemon of that mount has exited.
    """
    _cache_control_lookup(path)
    resolved = Path(real_path(path) if follows else real_name(path))
    denied = dead = None
    known = root_of(resolved)
    # If the mount table has the mount, look at its root only: each directory below it would cost a request.
    entry = None if known is None else _entry_at(known)
    if entry is not None and entry.root:
        return _find_bound(entry, resolved, environment)
    for root in (resolved, *resolved.parents) if known is None else (Path(known),):
        try:
            text = (root / CONTROL_FILE).read_text(encoding="utf-8").strip()
        except OSError as exc:
            if exc.errno in (errno.ENOTCONN, errno.ECONNABORTED):
                dead = root
            elif dead is not None:
                break
            if exc.errno == errno.EACCES and denied is None:
                denied = root
            continue
        except UnicodeDecodeError:
            continue
        inner = resolved.relative_to(root).as_posix()
        mount = Mount(root, Path(text), None if entry is None else entry.owner)
        return _named_by_variable(mount, environment), "" if inner == "." else inner
    if dead is not None:
        raise MountError(
            f"{dead}: the daemon of this mount has exited; clean up with: fusecache unmount {dead}"
        )
    if denied is not None:
        raise MountError(
            f"{path} is not in a fusecache mount that you can access: permission denied for {denied}; "
            "mount with --allow-other to give other users access"
        )
    raise not_in_a_mount(path)


def not_in_a_mount(path: object) -> MountError:
    """Return the error for a path that no mount of fusecache shows."""
    if several := mountpoints_in(str(path)):
        return MountError(f"{path} is the folder of several mounts: name one of them: {', '.join(several)}")
    return MountError(
        f"{path} is not in a fusecache mount: `findmnt --types fuse.fusecache` lists those of this node"
    )


def _named_by_variable(mount: Mount, environment: Mapping[str, str]) -> Mount:
    """Return the mount with the socket that FUSECACHE_SOCKET names, if its own is not to be seen.

    A container may see the mount but not the daemon's directory.
    """
    named = environment.get(SOCKET_VARIABLE)
    if not named or os.path.exists(mount.socket_path):
        return mount
    return replace(mount, socket_path=Path(named), is_named=True)


def _entry_at(mountpoint: str) -> TableEntry | None:
    """Return the top fusecache mount at a mountpoint, None if it has just gone."""
    return next((entry for entry in reversed(our_entries()) if entry.point == mountpoint), None)


def _find_bound(bound: TableEntry, path: Path, environment: Mapping[str, str]) -> tuple[Mount, str]:
    """Return the mount and the path inside it, for a path in a folder of a mount that is bound elsewhere.

    Such a folder has no control directory: `.fusecache` in it would come from the bucket.
    """
    inner = (PurePosixPath(bound.root) / path.relative_to(bound.point)).as_posix()
    if environment.get(SOCKET_VARIABLE):
        socket_path = Path(environment[SOCKET_VARIABLE])
        return Mount(Path(bound.point), socket_path, bound.owner, is_named=True), inner
    for entry in our_entries():
        if entry.device == bound.device and not entry.root:
            return find_mount(entry.point, environment)[0], inner
    raise MountError(
        f"{bound.point} shows only the folder {bound.root} of a fusecache mount; "
        f"set {SOCKET_VARIABLE} to the daemon's socket, or name a path in the whole mount"
    )


def _cache_control_lookup(path: str | os.PathLike[str]) -> None:
    """Make the kernel cache the control file of the path's mount, for the next minute.

    The kernel looks up the names of a directory one after the other, and the lookup of the path may wait for the
    bucket.
    """
    mountpoint = root_of(path)
    entry = None if mountpoint is None else _entry_at(mountpoint)
    if mountpoint is not None and entry is not None and not entry.root:
        with suppress(OSError):
            (Path(mountpoint) / CONTROL_FILE).stat()


@contextmanager
def connect(mount: Mount) -> Iterator[socket.socket]:
    """Open the control connection. Raises MountError if no daemon listens, or another user's process does."""
    if not mount.is_named:
        check_socket_folder(mount.socket_path, mount.trusted_users)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(SILENCE_SECONDS)
        try:
            connection.connect(os.fspath(mount.socket_path))
        except OSError as exc:
            raise _DaemonLost(
                f"{mount.root}: cannot reach the daemon at {mount.socket_path}: {exc.strerror or exc}"
            ) from exc
        _, user, _ = peer_of(connection)
        if user not in mount.trusted_users:
            raise MountError(
                f"{mount.root}: a process of user {user} answers at {mount.socket_path}, not the daemon: "
                "its answers do not count"
            )
        yield connection


def ask(
    mount: Mount,
    command: str,
    path: str = "",
    *,
    timeout_seconds: float | None = None,
    on_progress: Callable[[ServerProgress], None] | None = None,
) -> Answer:
    """Send one command and return its final answer; call `on_progress` for every report before that.

    Raises MountError if the daemon closes the connection, is silent, or violates the protocol.
    """
    request = {"command": command, "path": path, "timeout_seconds": timeout_seconds}
    row = request_stream(
        mount, request, on_report=None if on_progress is None else lambda row: on_progress(_progress(row))
    )
    return Answer(
        str(row.get("result", "error")),
        str(row.get("message", "")),
        _progress(row),
        row.get("status") or {},
        tuple(_missing_text(each) for each in row.get("missing") or ()),
    )


def request_stream(
    mount: Mount,
    request: Mapping[str, Any],
    *,
    body: bytes = b"",
    on_report: Callable[[dict[str, Any]], None] | None = None,
    on_connect: Callable[[socket.socket], None] | None = None,
) -> dict[str, Any]:
    """Send one request and return its final answer; call `on_report` for every answer before. Raises MountError.

    If the daemon ends, the next one of the mount gets the request, with what is left of its `timeout_seconds`.
    body: bytes that follow the request. on_connect: called with each connection before the request is sent.
    """
    limit = request.get("timeout_seconds")
    end = None if limit is None else time.monotonic() + limit
    entry = _entry_at(os.fspath(mount.root))
    while True:
        daemon = _listener_of(mount)
        try:
            return _exchange(mount, request, body, on_report, on_connect)
        except _DaemonLost as lost:
            if lost.was_sent and request["command"] in _SENT_ONCE:
                raise MountError(
                    f"{lost}. It may have carried it out: see `fusecache recover {mount.root}`, and repeat the command "
                    "if it has not"
                ) from lost
            if entry is None:
                raise
            _await_daemon(entry, lost, time.monotonic() + SUCCESSOR_SECONDS if end is None else end)
            if _listener_of(mount) == daemon:
                raise  # the daemon is there, but closed the connection, or this process cannot see its socket
            if end is not None:
                request = {**request, "timeout_seconds": max(0.0, end - time.monotonic())}


def command(mount: Mount, request: Mapping[str, Any], **how: Any) -> dict[str, Any]:
    """Return the final answer to a request, as `request_stream`. Raises MountError also if the command failed."""
    row = request_stream(mount, request, **how)
    if row.get("result") != "ok":
        raise MountError(f"{mount.root}: {row.get('message') or row.get('result')}")
    return row


def _listener_of(mount: Mount) -> tuple[int, int] | None:
    """Return what tells the socket of a daemon from that of the next one, None if there is no socket."""
    try:
        facts = os.stat(mount.socket_path)
    except OSError:
        return None
    return facts.st_ino, facts.st_ctime_ns


def _await_daemon(entry: TableEntry, lost: _DaemonLost, end: float) -> None:
    """Return once a daemon serves a mount. Raises `lost` if the mount is gone or dead, MountError at the end time."""
    seconds = max(0.0, end - time.monotonic())
    now = _entry_at(entry.point)
    if now is None or now.device != entry.device:
        raise lost
    answers = wait_statfs(entry.point, seconds)
    if answers is None:
        raise MountError(
            f"{lost}; no other daemon has taken over within {seconds:.0f} s: see fusecache.log in the cache directory"
        ) from lost
    if not answers:
        raise lost


def _exchange(
    mount: Mount,
    request: Mapping[str, Any],
    body: bytes,
    on_report: Callable[[dict[str, Any]], None] | None,
    on_connect: Callable[[socket.socket], None] | None,
) -> dict[str, Any]:
    """Send one request to the daemon that serves now, and return its final answer. Raises MountError."""
    command = request["command"]
    line = json.dumps(request).encode() + b"\n"
    if len(line) > LONGEST_REQUEST_BYTES:
        raise MountError(f"{command}: too many paths for one request; name their directory instead")
    with connect(mount) as connection:
        if on_connect is not None:
            on_connect(connection)
        try:
            connection.sendall(line + body)
            with connection.makefile("rb") as lines:
                while line := lines.readline(LONGEST_LINE_BYTES):
                    row = _row(mount, line)
                    if row.get("done"):
                        return row
                    if on_report is not None:
                        on_report(row)
        except TimeoutError as exc:
            raise MountError(f"{mount.root}: no answer from the daemon for {SILENCE_SECONDS:g} s") from exc
        except OSError as exc:
            raise _DaemonLost(
                f"{mount.root}: the connection to the daemon failed: {exc.strerror or exc}", was_sent=True
            ) from exc
    raise _DaemonLost(
        f"{mount.root}: the daemon closed the connection before the end of {command}", was_sent=True
    )


def _row(mount: Mount, line: bytes) -> dict[str, Any]:
    try:
        # Commands in messages: the daemon does not know where this process sees the mount.
        row = json.loads(at_mount(line.decode(), mount.root, in_json=True))
    except ValueError as exc:
        raise MountError(f"{mount.root}: the daemon's answer is not JSON: {line[:80]!r}") from exc
    if not isinstance(row, dict):
        raise MountError(f"{mount.root}: the daemon's answer is not a JSON object: {line[:80]!r}")
    return row


def _missing_text(entry: Mapping[str, Any]) -> str:
    nbytes = entry.get("bytes")
    return f"{entry['path']}, {'a change of names' if nbytes is None else size_text(int(nbytes))}"


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
