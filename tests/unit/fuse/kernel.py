"""A kernel that the tests play: the other end of a socket pair, in place of /dev/fuse."""

import os
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial

import trio

from fusecache.fuse.handlers import RequestHandlers
from fusecache.fuse.kept_mount import KeptMount
from fusecache.fuse.protocol import IN_HEADER, INIT_IN, INIT_OUT, OUT_HEADER, Opcode
from fusecache.fuse.session import OwnSession

EVERYTHING = 0xFFFFFFFF


class PlayedKernel:
    """Sends requests and takes replies. agreed: the fields of the session's FUSE_INIT reply."""

    def __init__(self) -> None:
        self._socket, self.theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        for each in (self._socket, self.theirs):
            each.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 200 * 1024)
        self._unique = 0

    def send_init(self, *, major: int = 7, minor: int = 45, flags: int = EVERYTHING, more: int = 0) -> None:
        body = INIT_IN.pack(major, minor, 131072, flags, more, *[0] * 11)
        # From 7.36 on there is a second word of flags.
        self.send(Opcode.INIT, body if minor >= 36 else body[:16])

    def read_init(self) -> tuple[int, ...]:
        _, error, payload = self.receive()
        assert error == 0
        return INIT_OUT.unpack(payload)

    def send(
        self, opcode: int, body: bytes = b"", *, nodeid: int = 1, length: int | None = None, pid: int = 0
    ) -> int:
        """Send a request; return its number. length: what its header says, if not the truth.

        pid: of another process than this one.
        """
        self._unique += 2
        size = IN_HEADER.size + len(body) if length is None else length
        header = IN_HEADER.pack(size, opcode, self._unique, nodeid, 1000, 1000, pid or os.getpid(), 0, 0)
        self._socket.send(header + body)
        return self._unique

    def send_raw(self, message: bytes) -> None:
        self._socket.send(message)

    def receive(self) -> tuple[int, int, bytes]:
        """Return the next reply: the request's number, the errno, the payload."""
        message = self._socket.recv(2**21)
        size, error, unique = OUT_HEADER.unpack_from(message)
        assert size == len(message)
        return unique, -error, message[OUT_HEADER.size :]

    async def reply(self, unique: int) -> tuple[int, bytes]:
        """Return the reply to a request; others must not come before it."""
        number, error, payload = await self.any_reply()
        assert number == unique
        return error, payload

    async def any_reply(self, about: str = "") -> tuple[int, int, bytes]:
        """Return the next reply, as `receive` does."""
        with trio.move_on_after(30):
            await trio.lowlevel.wait_readable(self._socket)
            return self.receive()
        raise AssertionError(f"no reply; {about}")

    async def ask(
        self, opcode: int, body: bytes = b"", *, nodeid: int = 1, pid: int = 0
    ) -> tuple[int, bytes]:
        """Send a request, and return its reply."""
        return await self.reply(self.send(opcode, body, nodeid=nodeid, pid=pid))

    def has_reply(self) -> bool:
        try:
            self._socket.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return False
        return True

    def close(self) -> None:
        self._socket.close()


@asynccontextmanager
async def served(
    operations: RequestHandlers, *, flags: int = EVERYTHING, kept: KeptMount | None = None, **limits: int
) -> AsyncIterator[PlayedKernel]:
    """Serve a file system to a played kernel, until the kernel goes away. kept: memory for the requests.

    limits: of `OwnSession.serve`.
    """
    kernel = PlayedKernel()
    kernel.send_init(flags=flags)
    session = OwnSession(operations, kernel.theirs.detach(), kept=kept)
    kernel.read_init()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(partial(session.serve, **limits))
        try:
            yield kernel
        finally:
            kernel.close()
    session.close()
