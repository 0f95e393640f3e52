"""Who may send which command over the control socket, and how much may be on its way at once.

Owners are root, the user who mounted, and the user whom the files belong to. They may do everything. Other users get in
with `allow_other` only. They may ask and wait, and send hints. That costs requests, as reading does; it ends nothing.
"""

import struct
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import trio

from fusecache.model.errors import NotPermitted
from fusecache.model.hints import LONGEST_MESSAGE_BYTES
from fusecache.model.objects import MIB

# `stats.json` in the mount tells other users as much as `status`.
COMMANDS_FOR_ALL = frozenset({"status", "sync", "hint"})
# Room for some ten thousand paths, which a glob of the shell can produce.
LONGEST_REQUEST_BYTES = MIB
# A client of this node sends its request at once. On a loaded node the largest message takes seconds.
REQUEST_SECONDS = 30.0
_PIECE_BYTES = 4096
# A waiting command holds its connection: room for every rank of a node, and for a person beside them.
MOST_CONNECTIONS = 256
MOST_CONNECTIONS_OF_OTHERS = 64
# Requests that are being received, together. Of other users: as much as for hint files.
MOST_BYTES = 16 * LONGEST_MESSAGE_BYTES
MOST_BYTES_OF_OTHERS = 4 * LONGEST_MESSAGE_BYTES


class Visitors:
    """The connections of the moment, and the bytes that are being sent, of owners and of other users."""

    def __init__(self, owners: frozenset[int], *, shared: bool) -> None:
        """owners: user ids, root's included. shared: whether other users may send commands at all."""
        self._owners = owners
        self._shared = shared
        self._connections: Counter[bool] = Counter()
        self._bytes: Counter[bool] = Counter()

    def is_owner(self, user: int) -> bool:
        """Return whether a user may do everything."""
        return user in self._owners

    def check(self, user: int, command: object) -> None:
        """Raise NotPermitted unless a user may send a command."""
        if not (self.is_owner(user) or (self._shared and command in COMMANDS_FOR_ALL)):
            raise NotPermitted(
                f"`{command}` is allowed only for root, the user who mounted and the owner of the files"
            )

    @contextmanager
    def connection(self, user: int) -> Iterator[None]:
        """Count a connection while the body runs. Raises NotPermitted above the limits."""
        is_owner = self.is_owner(user)
        most = MOST_CONNECTIONS if is_owner else MOST_CONNECTIONS_OF_OTHERS
        if self._connections[is_owner] >= most:
            raise NotPermitted(f"the daemon serves {most} commands already; try again later")
        self._connections[is_owner] += 1
        try:
            yield
        finally:
            self._connections[is_owner] -= 1

    @contextmanager
    def request(self, stream: trio.SocketStream, user: int) -> Iterator["Request"]:
        """Account the bytes of one request while the body runs."""
        is_owner = self.is_owner(user)
        request = Request(stream, partial(self._count, is_owner=is_owner))
        try:
            yield request
        finally:
            self._bytes[is_owner] -= request.counted_bytes

    def _count(self, nbytes: int, *, is_owner: bool) -> None:
        most = MOST_BYTES if is_owner else MOST_BYTES_OF_OTHERS
        if self._bytes[is_owner] + nbytes > most:
            raise NotPermitted(f"all users together may be sending {most} bytes; try again later")
        self._bytes[is_owner] += nbytes


class Request:
    """A request that is being received, in limited time: trio.TooSlowError after REQUEST_SECONDS."""

    def __init__(self, stream: trio.SocketStream, count: Callable[[int], None]) -> None:
        """count: accounts bytes before they are kept; it may raise NotPermitted."""
        self.counted_bytes = 0
        self._stream = stream
        self._count = count
        self._deadline = trio.current_time() + REQUEST_SECONDS
        self._rest = b""

    async def line(self) -> bytes:
        """Return the request's line; b"" if the client sent no full line. Raises ValueError if it is too long."""
        found = bytearray()
        with trio.fail_at(self._deadline):
            while b"\n" not in found[-_PIECE_BYTES:]:
                piece = await self._receive()
                if not piece:
                    return b""
                if len(found) > LONGEST_REQUEST_BYTES:
                    raise ValueError("the request is too long")
                found += piece
        end = found.index(b"\n") + 1
        self._rest = bytes(found[end:])
        return bytes(found[:end])

    async def message(self, nbytes: int) -> bytearray:
        """Return the bytes after the line: fewer if the client ends before, more if it has sent more."""
        data = bytearray(self._rest)
        with trio.fail_at(self._deadline):
            while len(data) < nbytes and (piece := await self._receive(MIB)):
                data += piece
        return data

    async def _receive(self, limit: int = _PIECE_BYTES) -> bytes | bytearray:
        piece = await self._stream.receive_some(limit)
        self._count(len(piece))
        self.counted_bytes += len(piece)
        return piece


def is_of_this_system(stream: trio.SocketStream) -> bool:
    """Return whether the process that connected sees the same files and processes as this one: it is in no container.

    By files of /proc that need no rights over that process: the service has few. Each namespace has mounts of its own.
    """
    process, _ = _peer(stream)
    try:
        return _process_numbers(process) == 1 and _root_mount(process) == _root_mount("self") != ""
    except OSError:
        return False


def _process_numbers(process: int) -> int:
    """Return how many numbers a process has: one for each process namespace from this one's to its own."""
    facts = dict(line.split(":", 1) for line in Path(f"/proc/{process}/status").read_text().splitlines())
    return len(facts["NSpid"].split())


def _root_mount(process: int | str) -> str:
    """Return the number of the mount at a process's `/`; "" if none is there."""
    lines = Path(f"/proc/{process}/mountinfo").read_text(errors="replace").splitlines()
    return next((line.split()[0] for line in reversed(lines) if line.split()[4] == "/"), "")


def user_of(stream: trio.SocketStream) -> int:
    """Return the user id of the process that connected (unix(7), SO_PEERCRED)."""
    return _peer(stream)[1]


def _peer(stream: trio.SocketStream) -> tuple[int, int]:
    """Return the process and the user at the other end."""
    facts = stream.socket.getsockopt(trio.socket.SOL_SOCKET, trio.socket.SO_PEERCRED, struct.calcsize("3i"))
    process, user, _ = struct.unpack("3i", facts)
    return process, user
