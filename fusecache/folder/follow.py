"""The socket of `pull --follow`: takes the loader's hints, and requests of readers for a file that is not there yet.

Requests are lines of JSON, as on the control socket of a mount:

    {"command": "hint", "file": "<job>.plan", "bytes": N}     then N bytes (docs/hints.md)
    {"command": "fetch", "path": "shard.00007.mds"}           answered when the file is there, or never will be

It lies in the folder, as a socket cannot come out of a bucket. Only the folder's owner and root reach it.
"""

import json
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import trio

from fusecache.folder.pull import Pull
from fusecache.model.errors import FolderError
from fusecache.model.hints import LONGEST_MESSAGE_BYTES, HintError
from fusecache.mount.runtime_folder import listen_at

SOCKET_NAME = "socket"
_LONGEST_LINE_BYTES = 8192


@asynccontextmanager
async def followed(pull: Pull, own: Path) -> AsyncIterator[None]:
    """Serve readers while the body runs. Raises FolderError."""
    path = own / SOCKET_NAME
    listener = trio.SocketListener(trio.socket.from_stdlib_socket(_listen(path)))
    try:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(trio.serve_listeners, _Readers(pull).serve, [listener], name="follow")
            yield
            nursery.cancel_scope.cancel()
    finally:
        path.unlink(missing_ok=True)


def _listen(path: Path) -> socket.socket:
    try:
        return listen_at(path, mode=0o600)  # in place of a killed pull's: the folder's lock is ours
    except OSError as exc:
        raise FolderError(
            f"{path}: no socket can be made there ({exc.strerror}), which --follow needs; pull without it, or choose a "
            "folder on a local disk"
        ) from exc


class _Readers:
    def __init__(self, pull: Pull) -> None:
        self._pull = pull

    async def serve(self, stream: trio.SocketStream) -> None:
        """Answer one connection."""
        with suppress(trio.BrokenResourceError, trio.ClosedResourceError):
            async with stream:
                answer = await self._answer(stream)
                if answer is not None:
                    await stream.send_all(json.dumps(answer).encode() + b"\n")

    async def _answer(self, stream: trio.SocketStream) -> dict[str, Any] | None:
        data = bytearray()
        while b"\n" not in data:
            received = await stream.receive_some(_LONGEST_LINE_BYTES)
            if not received:
                return None
            data += received
            if len(data) > _LONGEST_LINE_BYTES and b"\n" not in data[:_LONGEST_LINE_BYTES]:
                return _error("the request is too long")
        line, _, rest = bytes(data).partition(b"\n")
        try:
            match json.loads(line):
                case {"command": "fetch", "path": str(path)}:
                    why = await self._pull.wait_for(path)
                    return _error(why) if why else {"result": "ok"}
                case {"command": "hint", "file": str(file), "bytes": int(count)} if (
                    count <= LONGEST_MESSAGE_BYTES
                ):
                    message = await _receive(stream, rest, count)
                    self._pull.order.take(file, message)
                    return {"result": "ok"}
        except (ValueError, RecursionError, HintError) as exc:
            return _error(str(exc))
        return _error("unknown request")


async def _receive(stream: trio.SocketStream, begun: bytes, count: int) -> bytes:
    message = bytearray(begun)
    while len(message) < count:
        received = await stream.receive_some(1 << 20)
        if not received:
            raise HintError(f"the message ends after {len(message)} of {count} bytes")
        message += received
    return bytes(message[:count])


def _error(message: str) -> dict[str, Any]:
    return {"result": "error", "message": message}
