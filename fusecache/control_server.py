"""The daemon's side of the control socket: JSON lines, one command a connection.

Request: `{"command": …, "path": …, "timeout_seconds": …}`. Answers: progress twice a second, then one with `done`.
"""

import json
import logging
import os
import struct
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import trio

from fusecache.engine.filesystem import Durability, FileSystem
from fusecache.engine.groups import one_failure
from fusecache.model.errors import FusecacheError, NotPermitted

log = logging.getLogger(__name__)

REPORT_SECONDS = 0.5
_LONGEST_REQUEST = 65536
# They change what the daemon does at its end.
_OWNERS_COMMANDS = {"drain", "abandon"}


class ControlServer:
    """Answers `status`, `sync`, `drain` and `abandon` (end without draining) on a unix socket."""

    def __init__(
        self, filesystem: FileSystem, path: str, facts: dict[str, Any], *, on_abandon: Callable[[], None]
    ) -> None:
        self._fs = filesystem
        self._path = path
        self._facts = facts
        self._on_abandon = on_abandon

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Serve until cancelled; the socket is removed at the end."""
        listener = trio.socket.socket(trio.socket.AF_UNIX, trio.socket.SOCK_STREAM)
        with suppress(FileNotFoundError):
            os.unlink(self._path)
        await listener.bind(self._path)
        # Whoever sees the mount may ask; the commands change nothing.
        os.chmod(self._path, 0o666)
        listener.listen(16)
        try:
            task_status.started()
            await trio.serve_listeners(self._serve, [trio.SocketListener(listener)])
        finally:
            os.unlink(self._path)

    def status(self) -> dict[str, Any]:
        """Return everything that is known, as plain values."""
        return {**self._facts, **self._fs.statistics()}

    async def _serve(self, stream: trio.SocketStream) -> None:
        async with stream:
            try:
                line = await _read_line(stream)
                if line:
                    await self._answer(stream, json.loads(line))
            except* (trio.BrokenResourceError, trio.ClosedResourceError):
                pass  # the asker is gone
            except* (ValueError, TypeError, AttributeError, RecursionError) as group:
                log.info("control request refused error=%s", group.exceptions[0])
            except* Exception:
                # Nothing that somebody may ask ends the mount.
                log.exception("control request failed")

    async def _answer(self, stream: trio.SocketStream, request: dict[str, Any]) -> None:
        command, path = request.get("command"), str(request.get("path") or "").strip("/")
        timeout = request.get("timeout_seconds")
        try:
            if command in _OWNERS_COMMANDS:
                _check_owner(stream)
            match command:
                case "status":
                    status = self.status()
                    if path:
                        status = {"path": path, "state": await self._fs.path_state(path), **status}
                    await self._send(stream, path, {"done": True, "result": "ok", "status": status})
                case "sync":
                    await self._wait(stream, path, timeout)
                case "drain":
                    with self._fs.publisher.draining():
                        await self._wait(stream, "", timeout)
                case "abandon":
                    self._on_abandon()
                    await self._send(stream, "", {"done": True, "result": "ok"})
                case _:
                    await self._send(
                        stream,
                        "",
                        {"done": True, "result": "error", "message": f"unknown command {command!r}"},
                    )
        except FusecacheError as exc:
            await self._send(stream, "", {"done": True, "result": "error", "message": str(exc)})

    async def _wait(self, stream: trio.SocketStream, path: str, seconds: float | None) -> None:
        """Report progress until everything below `path` is in the bucket."""
        ended = Durability("error", "the daemon is ending")

        async def report() -> None:
            while True:
                await self._send(stream, path, {})
                await trio.sleep(REPORT_SECONDS)

        with one_failure():
            async with trio.open_nursery() as nursery:
                nursery.start_soon(report, name="control-report")
                ended = await self._fs.wait_durable(path, seconds)
                nursery.cancel_scope.cancel()
        await self._send(stream, path, {"done": True, "result": ended.result, "message": ended.message})

    async def _send(self, stream: trio.SocketStream, path: str, row: dict[str, Any]) -> None:
        pending = self._fs.pending(path)
        common = {
            "pending_files": pending.files,
            "pending_bytes": pending.bytes,
            "uploading": [f"{item['path']} {item['sent']}/{item['bytes']}" for item in pending.uploading],
        }
        await stream.send_all(json.dumps({**common, **row}).encode() + b"\n")


def _check_owner(stream: trio.SocketStream) -> None:
    """Raise NotPermitted unless the asker is root or the daemon's own user (unix(7), SO_PEERCRED)."""
    facts = stream.socket.getsockopt(trio.socket.SOL_SOCKET, trio.socket.SO_PEERCRED, struct.calcsize("3i"))
    _, user, _ = struct.unpack("3i", facts)
    if user not in {0, os.geteuid()}:
        raise NotPermitted("only root and the user who mounted may end this mount")


async def _read_line(stream: trio.SocketStream) -> bytes:
    """Return the request's line, or b"" if the other side only connected."""
    line = bytearray()
    while not line.endswith(b"\n"):
        piece = await stream.receive_some(4096)
        if not piece:
            return b""
        if len(line) > _LONGEST_REQUEST:
            raise ValueError("the request is too long")
        line += piece
    return bytes(line)
