"""Asks the daemon of a mount for objects and for pieces of them, over its control socket. Used on the trio loop.

Each request has a connection of its own. The daemon holds a piece until its connection is closed.
"""

import base64
import json
import os
import select
import socket
import struct
from collections import OrderedDict
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import trio

from fusecache.disk.cache_files import CHECKSUM_BYTES, granule_checksums
from fusecache.model.errors import MountError
from fusecache.model.objects import GRANULE_BYTES, MIB
from fusecache.mount.control_client import LONGEST_LINE_BYTES, Mount
from fusecache.mount.launch import resolve_in_mount
from fusecache.serve.errors import S3Error, unavailable

# The daemon reports nothing while it fetches; a reader of the mount has as much patience.
ANSWER_SECONDS = 90.0
# Pieces whose checksums were compared; each entry is some 200 bytes.
_VERIFIED_MOST = 65536
_RECEIVE_BYTES = 65536
# Names and listings that are asked for at once: the daemon takes 256 connections, for pieces and for commands too.
_MOST_QUESTIONS = 64
_CREDENTIALS = struct.Struct("3i")


@dataclass(frozen=True, slots=True)
class Found:
    """One version: its ETag without quotes, its size in bytes, its time in seconds since 1970."""

    etag: str
    size: int
    modified: float


@dataclass(eq=False, slots=True)
class HeldPiece:
    """Bytes [start, stop) of a version, at the same place of the file `fd`. Empty, with fd -1: there are none."""

    found: Found
    start: int
    stop: int
    checksums: bytes = b""
    fd: int = -1
    _connection: trio.SocketStream | None = field(default=None, repr=False)

    @property
    def hold_fd(self) -> int:
        """A descriptor that is readable once the daemon does not hold the piece any more: it has ended."""
        assert self._connection is not None
        return self._connection.socket.fileno()

    @property
    def is_held(self) -> bool:
        """Whether the daemon still holds the piece."""
        poll = select.poll()
        poll.register(self.hold_fd, select.POLLIN)
        return not poll.poll(0)

    @property
    def is_closed(self) -> bool:
        """Whether `close` was called."""
        return self._connection is None

    def close(self) -> None:
        """Let the daemon evict the piece."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
        if self._connection is not None:
            self._connection.socket.close()
            self._connection = None


class DaemonObjects:
    """The objects of one mount."""

    def __init__(self, mount: Mount) -> None:
        self._mount = mount
        # Set once another daemon serves the mount: with another cache directory, and perhaps another source.
        self.is_replaced = trio.Event()
        self._looking = trio.Lock()
        self._questions = trio.Semaphore(_MOST_QUESTIONS)
        self._verified: OrderedDict[tuple[int, int, int, int, int], None] = OrderedDict()

    async def find(self, key: str) -> Found:
        """Return the version of a key that the mount shows. Raises S3Error."""
        return _found(await self._ask({"command": "object", "key": key}))

    async def list_page(self, asked: Mapping[str, Any]) -> dict[str, Any]:
        """Return a page of a listing: `objects` (key, ETag, size, time), `prefixes`, `token`. Raises S3Error."""
        return await self._ask({"command": "objects", **asked})

    async def piece(
        self, key: str, start: int, stop: int, found: Found | None = None, *, for_peer: bool = False
    ) -> HeldPiece:
        """Return a piece that begins at or before `start`; it may end before `stop`. Its bytes have their checksums.

        found: the version; None for the one that the mount shows. start: negative, from the end. for_peer: another node
        asks.
        Raises S3Error.
        """
        request = {"command": "piece", "key": key, "start": start, "stop": stop, "peer": for_peer}
        if found is not None:
            request |= {"etag": found.etag, "size": found.size}
        piece = await self._held(request)
        if await self._is_intact(piece):
            return piece
        piece.close()
        piece = await self._held({**request, "doubted": True})
        if await self._is_intact(piece):
            return piece
        piece.close()
        raise unavailable(f"{key}: the cache disk returns other bytes than were written: check it")

    async def _held(self, request: Mapping[str, Any]) -> HeldPiece:
        connection, row, fd = await self._exchange(request)
        if fd < 0:
            connection.socket.close()
        return HeldPiece(
            _found(row),
            int(row["start"]),
            int(row["stop"]),
            base64.b64decode(row.get("checksums", "")),
            fd,
            connection,
        )

    async def _is_intact(self, piece: HeldPiece) -> bool:
        """Compare a piece with its checksums, if its file changed since the last time. Reads it into the page cache."""
        if piece.fd < 0:
            return True
        file = os.fstat(piece.fd)
        name = (file.st_ino, file.st_mtime_ns, piece.start, piece.stop, hash(piece.checksums))
        if name in self._verified:
            self._verified.move_to_end(name)
            return True
        try:
            is_good = await trio.to_thread.run_sync(_has_checksums, piece)
        except BaseException:
            piece.close()
            raise
        if is_good:
            self._verified[name] = None
            if len(self._verified) > _VERIFIED_MOST:
                self._verified.popitem(last=False)
        return is_good

    async def _ask(self, request: Mapping[str, Any]) -> dict[str, Any]:
        async with self._questions:
            connection, row, _ = await self._exchange(request)
            connection.socket.close()
        return row

    async def _exchange(self, request: Mapping[str, Any]) -> tuple[trio.SocketStream, dict[str, Any], int]:
        """Return an open connection, the answer on it and the descriptor that came with it, -1 for none."""
        fds: list[int] = []
        connection = None
        try:
            with trio.fail_after(ANSWER_SECONDS):
                connection = await trio.open_unix_socket(os.fspath(self._mount.socket_path))
                self._check_user(connection)
                await connection.send_all(json.dumps(request).encode() + b"\n")
                row = json.loads(await _receive_line(connection, fds))
            if row["result"] != "ok":
                raise S3Error.of_status(int(row.get("http", 503)), str(row["message"]))
        except BaseException as exc:
            for fd in fds:
                os.close(fd)
            if connection is not None:
                connection.socket.close()
            if isinstance(exc, (OSError, ValueError, KeyError, trio.BrokenResourceError, trio.TooSlowError)):
                await self._look()
                root = self._mount.root
                raise unavailable(
                    f"{root}: its daemon does not answer: see `fusecache status {root}`, or mount it again"
                ) from exc
            raise
        return connection, row, fds[0] if fds else -1

    async def _look(self) -> None:
        """The daemon does not answer: look whether another one serves the mount."""
        async with self._looking:
            with suppress(MountError):
                found, _ = await trio.to_thread.run_sync(resolve_in_mount, self._mount.root)
                if found.socket_path != self._mount.socket_path:
                    self.is_replaced.set()

    def _check_user(self, connection: trio.SocketStream) -> None:
        facts = connection.socket.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        _, user, _ = _CREDENTIALS.unpack(facts)
        if user not in self._mount.trusted_users:
            raise unavailable(f"{self._mount.root}: a process of user {user} answers, not the daemon")


def _found(row: Mapping[str, Any]) -> Found:
    return Found(str(row["etag"]), int(row["size"]), float(row["modified"]))


async def _receive_line(connection: trio.SocketStream, fds: list[int]) -> bytes:
    """Receive one line; put the descriptors that come with it into `fds`. Raises OSError."""
    line = bytearray()
    while not line.endswith(b"\n"):
        data, rights, _, _ = await connection.socket.recvmsg(_RECEIVE_BYTES, socket.CMSG_SPACE(4))
        for _, kind, content in rights:
            if kind == socket.SCM_RIGHTS:
                fds.append(struct.unpack("i", content[:4])[0])
        if not data or len(line) > LONGEST_LINE_BYTES:
            raise OSError("the daemon closed the connection")
        line += data
    return bytes(line)


def _has_checksums(piece: HeldPiece) -> bool:
    """Run in a thread: return whether the bytes of a piece have its checksums."""
    buffer = memoryview(bytearray(min(MIB, piece.stop - piece.start)))
    for at in range(piece.start, piece.stop, len(buffer)):
        view = buffer[: piece.stop - at]
        if os.preadv(piece.fd, [view], at) != len(view):
            return False
        first = (at - piece.start) // GRANULE_BYTES * CHECKSUM_BYTES
        found = granule_checksums(view)
        if found != piece.checksums[first : first + len(found)]:
            return False
    return True
