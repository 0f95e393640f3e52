"""Server of the control socket: JSON lines, one command per connection. The client is `fusecache.mount.control_client`.

Request: `{"command": …, "path": …, "paths": […], "timeout_seconds": …, "wait": …, "id": …}`; a command ignores the
fields that it does not need. Answers: progress twice a second, then a final one with `done`, `result` and `message`.
Every list in an answer is bounded; a count covers the entries left out.

`{"command": "hint", "file": …, "bytes": …}` is followed by that number of bytes: the content that a job would write
to this file of the hints directory, for jobs that see the mount read-only. 0 bytes withdraw the job's hints.
"""

import json
import logging
import os
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import asdict
from typing import Any

import trio

from fusecache.engine.admin.inspector import ScrubProgress
from fusecache.engine.admin.warmup import WarmupState
from fusecache.engine.file_system import FileSystem
from fusecache.engine.prefetch.hint_service import job_of
from fusecache.engine.runtime.exception_groups import unwrap_single_error
from fusecache.model.errors import FusecacheError, NotPermitted
from fusecache.model.hints import LONGEST_MESSAGE_BYTES, HintError
from fusecache.model.objects import MIB

log = logging.getLogger(__name__)

# Interval of progress reports: smooth enough for a progress bar.
REPORT_SECONDS = 0.5
# A slow report, of 100 000 changes for example, comes less often. The client times out after 30 s of silence.
_PAUSE_FACTOR = 20
_MAX_PAUSE_SECONDS = 10.0
# Room for some ten thousand paths, which a glob of the shell can produce.
_MAX_REQUEST_BYTES = MIB
# Commands for root and the owner of the mount only. The first three change how the daemon shuts down. Eviction costs
# other users the time to fetch again: every user may fill the cache, but only the owner may evict.
_OWNER_COMMANDS = {"drain", "abandon", "carry-on", "evict", "bring-back", "delete"}
# Without --wait, the client still waits this long for the count that tells whether the cache can hold the files.
_COUNT_SECONDS = 3.0


class ControlServer:
    """Serves the commands of `fusecache` on a unix socket.

    Two of them are internal: `abandon` makes the shutdown leave uploads to the next mount, `carry-on` reverts that.
    """

    def __init__(
        self,
        filesystem: FileSystem,
        path: str,
        facts: Callable[[], dict[str, Any]],
        *,
        on_abandon: Callable[[], None],
        on_carry_on: Callable[[], None],
    ) -> None:
        """facts: returns the current status fields that are not part of the file system's statistics."""
        self._fs = filesystem
        self._path = path
        self._facts = facts
        self._on_abandon = on_abandon
        self._on_resume = on_carry_on

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Serve until cancelled; the socket is removed at the end."""
        listener = trio.socket.socket(trio.socket.AF_UNIX, trio.socket.SOCK_STREAM)
        with suppress(FileNotFoundError):
            os.unlink(self._path)
        await listener.bind(self._path)
        # Every user who sees the mount may send commands; _OWNER_COMMANDS lists the exceptions.
        os.chmod(self._path, 0o666)
        listener.listen(16)
        try:
            task_status.started()
            await trio.serve_listeners(self._serve, [trio.SocketListener(listener)])
        finally:
            os.unlink(self._path)

    def status(self) -> dict[str, Any]:
        """Return the full status as plain values."""
        return {**self._facts(), **self._fs.statistics()}

    async def _serve(self, stream: trio.SocketStream) -> None:
        async with stream:
            try:
                line, rest = await _read_line(stream)
                if line:
                    await self._answer(stream, json.loads(line), rest)
            except* (trio.BrokenResourceError, trio.ClosedResourceError):
                pass  # the client disconnected
            except* (ValueError, TypeError, AttributeError, RecursionError) as group:
                log.info("control request malformed error=%s", group.exceptions[0])
            except* Exception:
                # No request may end the mount.
                log.exception("control request failed")

    async def _answer(self, stream: trio.SocketStream, request: dict[str, Any], rest: bytes) -> None:
        command, path = request.get("command"), _path(request.get("path") or "")
        timeout = request.get("timeout_seconds")
        try:
            if command in _OWNER_COMMANDS:
                _check_owner(stream, str(command))
            match command:
                case "status":
                    await self._status(stream, path)
                case "sync":
                    await self._wait(stream, path, timeout)
                case "drain":
                    with self._fs.publisher.draining():
                        await self._wait(stream, "", timeout, drains=True)
                case "abandon" | "carry-on":
                    (self._on_abandon if command == "abandon" else self._on_resume)()
                    await self._send(stream, {**await self._pending(""), **_done("ok")})
                case "hint":
                    await self._hint(stream, request, rest)
                case _:
                    await self._cache_command(stream, request)
        except FusecacheError as exc:
            await self._send(stream, _done("error", str(exc)))

    async def _cache_command(self, stream: trio.SocketStream, request: dict[str, Any]) -> None:
        command, paths = request.get("command"), [_path(each) for each in request.get("paths") or [""]]
        match command:
            case "warm":
                await self._warm(stream, paths, waits=bool(request.get("wait")))
            case "evict":
                await self._evict(stream, paths)
            case "check":
                await self._check(stream, paths[0])
            case "recover":
                await self._send(stream, {**_done("ok"), "recover": await self._fs.quarantine.listing()})
            case "bring-back" | "delete" if self._fs.options.read_only:
                raise NotPermitted(
                    f"{request['id']}: this mount is read-only: mount again without --read-only, or copy the file to "
                    "a path outside the mount with --restore ID --to PATH"
                )
            case "bring-back":
                path = await self._fs.quarantine.restore(int(request["id"]), paths[0])
                await self._send(stream, {**_done("ok"), "path": path})
            case "delete":
                freed = await self._fs.quarantine.delete(int(request["id"]))
                await self._send(stream, {**_done("ok"), "freed_bytes": freed})
            case _:
                await self._send(stream, _done("error", f"unknown command {command!r}"))

    async def _hint(self, stream: trio.SocketStream, request: dict[str, Any], message: bytes) -> None:
        """Receive a job's plan or cursor, or withdraw the job's hints."""
        file, size = str(request.get("file")), int(request.get("bytes") or 0)
        if not 0 <= size <= LONGEST_MESSAGE_BYTES:
            raise HintError(f"{file}: a message may have at most {LONGEST_MESSAGE_BYTES} bytes, not {size}")
        data = bytearray(message)
        while len(data) < size and (piece := await stream.receive_some(MIB)):
            data += piece
        if size:
            await self._fs.hints.receive(file, data)
        else:
            self._fs.hints.forget(job_of(file)[0])
        await self._send(stream, _done("ok"))

    async def _status(self, stream: trio.SocketStream, path: str) -> None:
        pending = await self._fs.status.count()
        status = {**self._facts(), **self._fs.statistics(pending)}
        if path:
            # An unknown name costs a request, and the bucket may not answer: report progress while waiting.
            async with self._reporting(stream, lambda: self._pending(path)):
                there = await self._fs.status.path_status(path)
            # With a path, `state` is the path's; without one, the mount's.
            status = {**status, "path": path, "state": there["state"], "there": there}
        await self._send(stream, {**await self._pending(path), **_done("ok"), "status": status})

    async def _wait(
        self, stream: trio.SocketStream, path: str, seconds: float | None, *, drains: bool = False
    ) -> None:
        """Report progress until all changes at or below `path` are in the bucket.

        drains: before an unmount a conflict counts as success, because both versions are in the bucket.
        """
        if path and not drains and not (await self._fs.status.count(path)).files:
            await self._fs.lookup_path(path)  # raises for a mistyped name, which must not count as durable
        async with self._reporting(stream, lambda: self._pending(path)):
            ended = await self._fs.wait_durable(path, seconds)
        result = "durable" if drains and ended.result == "conflict" else ended.result
        await self._send(stream, {**await self._pending(path), **_done(result, ended.message)})

    async def _warm(self, stream: trio.SocketStream, paths: list[str], *, waits: bool) -> None:
        """Start a warm-up. waits: report until its end; if the client disconnects before that, cancel the warm-up."""
        job = self._fs.warmup.start(paths)
        try:
            async with self._reporting(stream, _as_async(lambda: {"warm": job.as_dict()})):
                if waits:
                    await job.ended.wait()
                else:
                    with trio.move_on_after(_COUNT_SECONDS):
                        await job.counted.wait()
        except BaseException:
            if waits:
                job.scope.cancel()
            raise
        failed = job.state in (WarmupState.FAILED, WarmupState.STOPPED)
        message = job.message or ("the warm-up was stopped" if job.state is WarmupState.STOPPED else "")
        await self._send(stream, {**_done("error" if failed else "ok", message), "warm": job.as_dict()})

    async def _evict(self, stream: trio.SocketStream, paths: list[str]) -> None:
        async with self._reporting(stream, _as_async(dict)):
            dropped = await self._fs.inspector.evict(paths)
        await self._send(stream, {**_done("ok"), "evict": asdict(dropped)})

    async def _check(self, stream: trio.SocketStream, path: str) -> None:
        check = ScrubProgress()
        async with self._reporting(stream, _as_async(lambda: {"check": check.as_dict()})):
            await self._fs.inspector.check(path, check)
        await self._send(stream, {**_done("ok"), "check": check.as_dict()})

    @asynccontextmanager
    async def _reporting(
        self, stream: trio.SocketStream, report: Callable[[], Awaitable[dict[str, Any]]]
    ) -> AsyncIterator[None]:
        """Send a report twice a second while the body runs; cancel the body if the client disconnects."""

        async def run() -> None:
            while True:
                began = trio.current_time()
                row = await report()
                spent = trio.current_time() - began
                await self._send(stream, row)
                await trio.sleep(min(max(REPORT_SECONDS, spent * _PAUSE_FACTOR), _MAX_PAUSE_SECONDS))

        with unwrap_single_error():
            async with trio.open_nursery() as nursery:
                nursery.start_soon(run, name="control-report")
                yield
                nursery.cancel_scope.cancel()

    async def _pending(self, path: str) -> dict[str, Any]:
        """Return the pending changes at or below a path, the time left, and why uploads wait."""
        return self._fs.status.progress(await self._fs.status.count(path))

    async def _send(self, stream: trio.SocketStream, row: dict[str, Any]) -> None:
        await stream.send_all(json.dumps(row).encode() + b"\n")


def _as_async(report: Callable[[], dict[str, Any]]) -> Callable[[], Awaitable[dict[str, Any]]]:
    """Wrap a synchronous report as an asynchronous one."""

    async def call() -> dict[str, Any]:
        return report()

    return call


def _done(result: str, message: str = "") -> dict[str, Any]:
    return {"done": True, "result": result, "message": message}


def _path(text: str) -> str:
    return str(text).strip("/")


def _check_owner(stream: trio.SocketStream, command: str) -> None:
    """Raise NotPermitted unless the client is root or the daemon's user (unix(7), SO_PEERCRED)."""
    facts = stream.socket.getsockopt(trio.socket.SOL_SOCKET, trio.socket.SO_PEERCRED, struct.calcsize("3i"))
    _, user, _ = struct.unpack("3i", facts)
    if user not in {0, os.geteuid()}:
        raise NotPermitted(f"`{command}` is allowed for root and the user who mounted only")


async def _read_line(stream: trio.SocketStream) -> tuple[bytes, bytes]:
    """Return the request's line and the bytes that follow it; b"" twice if the client sent no full line."""
    found = bytearray()
    while b"\n" not in found[-4096:]:
        piece = await stream.receive_some(4096)
        if not piece:
            return b"", b""
        if len(found) > _MAX_REQUEST_BYTES:
            raise ValueError("the request is too long")
        found += piece
    end = found.index(b"\n") + 1
    return bytes(found[:end]), bytes(found[end:])
