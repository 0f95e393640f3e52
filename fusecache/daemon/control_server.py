"""Server of the control socket: JSON lines, one command per connection. The client is `fusecache.mount.control_client`.

Request: `{"command": …, "path": …, "paths": […], "timeout_seconds": …, "wait": …, "id": …}`; a command ignores the
fields that it does not need. Answers: progress twice a second, then a final one with `done`, `result` and `message`.
Every list in an answer is bounded; a count covers the entries left out.

`{"command": "hint", "file": …, "bytes": …}` is followed by that number of bytes: the content that a job would write
to this file of the hints directory, for jobs that see the mount read-only. 0 bytes withdraw the job's hints.

`{"command": "open", "device": …, "inode": …, "unless_open": …}` asks for a descriptor of a file in the cache
(`fs/passthrough.py`). It comes with the answer (unix(7), SCM_RIGHTS) if `opened` is true.

`object`, `objects` and `piece` are those of `fusecache serve` (`daemon/serving.py`).

`{"command": "record"}` reports the reads of all files, until the client shuts down its side of the connection.

Who may send which command over the control socket, and how much may be on its way at once.

Owners are root, the user who mounted, and the user whom the files belong to. They may do everything. Other users get in
with `allow_other` only. They may ask and wait, and send hints. That costs requests, as reading does; it ends nothing.

Judges the mount's status. Remembers which counters grew lately: an old error is no news.
"""

import functools
import json
import logging
import os
import socket
import struct
import sys
from collections import Counter, deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import trio

from fusecache.daemon import serving
from fusecache.daemon.control_socket import ControlSocket, ReservingListener
from fusecache.engine.admin.inspector import ScrubProgress
from fusecache.engine.admin.warmup import WarmupState
from fusecache.engine.durability.status import KeysInUse
from fusecache.engine.durability.sync import Durability
from fusecache.engine.file_system import FileSystem
from fusecache.engine.runtime.supervisor import unwrap_single_error
from fusecache.fs.hint_files import OwnedHints
from fusecache.model.errors import FusecacheError, MountError, NotPermitted
from fusecache.model.hints import LONGEST_MESSAGE_BYTES, HintError
from fusecache.model.objects import MIB
from fusecache.model.verdict import RECENT_COUNTS, RECENT_SECONDS, judge

log = logging.getLogger(__name__)

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


# Counts are remembered at this interval, so RECENT_SECONDS takes a bounded number of them.
_SAMPLE_SECONDS = 5.0


class Verdicts:
    """Adds `verdict` and `reasons` to a status."""

    def __init__(self) -> None:
        # Loop time and counts, the oldest first. All counts begin with 0.
        self._samples: deque[tuple[float, dict[str, int]]] = deque()

    def judged(self, status: Mapping[str, Any]) -> dict[str, Any]:
        """Return the status, with its verdict and the reasons in front."""
        counts = _counts(status)
        now = trio.current_time()
        if not self._samples:
            self._samples.append((now, dict.fromkeys(counts, 0)))
        if now >= self._samples[-1][0] + _SAMPLE_SECONDS:
            self._samples.append((now, counts))
        while len(self._samples) > 1 and self._samples[1][0] <= now - RECENT_SECONDS:
            self._samples.popleft()
        before = self._samples[0][1]
        return {**judge(status, {name: counts[name] - before[name] for name in counts}), **status}


def _counts(status: Mapping[str, Any]) -> dict[str, int]:
    tasks = sum(task["failures"] for task in status.get("failed_tasks", {}).values())
    return {name: tasks if name == "failed_tasks" else status["cache"][name] for name in RECENT_COUNTS}


# Interval of progress reports: smooth enough for a progress bar.
REPORT_SECONDS = 0.5
# A slow report, of 100 000 changes for example, comes less often. The client times out after 30 s of silence.
_PAUSE_FACTOR = 20
_MAX_PAUSE_SECONDS = 10.0
# A client that does not read its answer for this long is gone.
_SEND_SECONDS = 30.0
# An unmount waits this long for a client that records.
_LAST_SEND_SECONDS = 1.0
# How often the daemon looks whether its socket is still where clients find it: nothing reports its removal.
WATCH_SECONDS = 2.0
# Without --wait, the client still waits this long for the count that tells whether the cache can hold the files.
_COUNT_SECONDS = 3.0


@dataclass(frozen=True, slots=True)
class Endings:
    """What commands do to the end of the daemon.

    abandon, carry_on: as the commands. upgrade: gets the user's id, and the path of the Python for the successor;
    returns what ends this daemon, or raises MountError or NotPermitted.
    """

    abandon: Callable[[], None]
    carry_on: Callable[[], None]
    upgrade: Callable[[int, str], Awaitable[Callable[[], None]]]


class ControlServer:
    """Serves the commands of `fusecache` on a unix socket.

    `in-use` says which of the keys of `bucket`, in `keys`, the mount still needs, and how the bucket is reached. Two
    commands are internal: `abandon` makes the shutdown leave uploads to the next mount, `carry-on` reverts that.
    """

    def __init__(
        self,
        filesystem: FileSystem,
        control_socket: ControlSocket,
        hints: OwnedHints,
        facts: Callable[[], dict[str, Any]],
        open_cached: Callable[[Mapping[str, Any], int], Awaitable[int | None]],
        *,
        owners: frozenset[int],
        access: Mapping[str, Any],
        endings: Endings,
    ) -> None:
        """facts: returns the current status fields that are not part of the file system's statistics.

        open_cached: answers the command "open" of a user, as `HandedFiles.open`.

        owners: the ids of the users who may send every command. access: how the bucket is reached, for owners alone.
        """
        self._fs = filesystem
        self._socket = control_socket
        self._hints = hints
        self._facts = facts
        self._open_cached = open_cached
        self._verdicts = Verdicts()
        self._visitors = Visitors(owners, shared=control_socket.shared)
        self._access = access
        self._endings = endings

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Serve until cancelled; the socket is removed at the end. Raises MountError if there is no first socket."""
        listener = self._socket.listen()
        task_status.started()
        try:
            async with trio.open_nursery() as connections:
                while True:
                    await self._serve_listener(listener, connections)
                    listener = await self._listen_again()
        finally:
            self._socket.remove()

    async def _serve_listener(self, listener: socket.socket, connections: trio.Nursery) -> None:
        """Accept connections until the socket's path is gone. Commands under way go on."""
        listeners = [ReservingListener(trio.socket.from_stdlib_socket(listener))]
        async with trio.open_nursery() as nursery:
            serve = functools.partial(
                trio.serve_listeners, self._serve, listeners, handler_nursery=connections
            )
            nursery.start_soon(serve, name="control-listener")
            while self._socket.is_there():  # noqa: ASYNC110  # no event tells of a removed file
                await trio.sleep(WATCH_SECONDS)
            nursery.cancel_scope.cancel()

    async def _listen_again(self) -> socket.socket:
        lost = self._socket.path
        while True:
            try:
                listener = self._socket.listen()
            except MountError as exc:
                log.warning(
                    "control socket lost; commands fail until there is one path=%s error=%s", lost, exc
                )
                await trio.sleep(WATCH_SECONDS)
            else:
                log.warning("control socket was removed path=%s now=%s", lost, self._socket.path)
                return listener

    def status(self) -> dict[str, Any]:
        """Return the full status as plain values."""
        return self._with_facts(self._fs.statistics())

    def _with_facts(self, statistics: dict[str, Any]) -> dict[str, Any]:
        status = {**self._facts(), **statistics}
        # The graver state: nothing can be written, whatever the bucket says.
        if status["journal_error"]:
            status["state"] = "journal-failed"
        return self._verdicts.judged(status)

    async def _serve(self, stream: trio.SocketStream) -> None:
        async with stream:
            user = user_of(stream)
            try:
                await self._serve_user(stream, user)
            except* NotPermitted as group:
                log.info("control request refused user=%d error=%s", user, group.exceptions[0])
            except* (trio.BrokenResourceError, trio.ClosedResourceError):
                pass  # the client disconnected
            except* trio.TooSlowError:
                log.info("control connection closed: its client is too slow user=%d", user)
            except* (ValueError, TypeError, AttributeError, RecursionError) as group:
                log.info("control request malformed error=%s", group.exceptions[0])
            except* Exception:
                # No request may end the mount.
                log.exception("control request failed")

    async def _serve_user(self, stream: trio.SocketStream, user: int) -> None:
        try:
            with self._visitors.connection(user), self._visitors.request(stream, user) as received:
                line = await received.line()
                if line:
                    await self._answer(stream, user, json.loads(line), received)
        except NotPermitted as exc:
            await self._send(stream, _done("error", str(exc)))
            raise

    async def _answer(
        self, stream: trio.SocketStream, user: int, request: dict[str, Any], received: Request
    ) -> None:
        command, path = request.get("command"), _path(request.get("path") or "")
        timeout = request.get("timeout_seconds")
        self._visitors.check(user, command)
        try:
            match command:
                case "status":
                    await self._status(stream, path)
                case "sync":
                    await self._wait(stream, path, timeout)
                case "drain":
                    await self._wait(stream, "", timeout, drains=True)
                case "abandon" | "carry-on":
                    (self._endings.abandon if command == "abandon" else self._endings.carry_on)()
                    await self._send(stream, {**await self._pending(""), **_done("ok")})
                case "upgrade":
                    await self._upgrade(stream, user, str(request.get("program") or ""))
                case "in-use":
                    await self._send(stream, {**_done("ok"), **await self._in_use(request)})
                case "hint" | "open" | "record":
                    await self._reader_command(stream, user, request, received)
                case "object" | "objects" | "piece":
                    send = partial(self._send_with, stream)
                    await serving.answer(self._fs.served, request, stream, send)
                case _:
                    await self._cache_command(stream, request)
        except FusecacheError as exc:
            await self._send(stream, _done("error", str(exc)))

    async def _reader_command(
        self, stream: trio.SocketStream, user: int, request: dict[str, Any], received: Request
    ) -> None:
        """Serve what programs that read the mount's files send."""
        match request["command"]:
            case "hint":
                await self._hint(stream, user, request, received)
            case "open":
                await self._open(stream, user, request)
            case _:
                await self._record(stream)

    async def _upgrade(self, stream: trio.SocketStream, user: int, program: str) -> None:
        if not is_of_this_system(stream):
            raise NotPermitted("the daemon is replaced from its own system, not from a container")
        end = await self._endings.upgrade(user, program)
        try:
            await self._send(stream, _done("ok"))
        finally:  # the successor waits, even if the command does not any more
            end()

    async def _cache_command(self, stream: trio.SocketStream, request: dict[str, Any]) -> None:
        command, paths = request.get("command"), [_path(each) for each in request.get("paths") or [""]]
        match command:
            case "warm":
                await self._warm(stream, paths, waits=bool(request.get("wait")))
            case "evict":
                await self._evict(stream, paths)
            case "check":
                await self._check(stream, paths[0])
            case "uploads":
                await self._uploads(stream, paths[0], request)
            case "uploads-in-use":
                used = await self._fs.uploads.in_use()
                ids = {"upload_ids": list(used.upload_ids), "keys": list(used.keys)}
                await self._send(stream, {**_done("ok"), **ids})
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

    async def _in_use(self, request: dict[str, Any]) -> dict[str, Any]:
        """Return which keys of the bucket the mount needs, and how the bucket is reached."""
        in_use = KeysInUse(self._fs.tree, self._fs.queue)
        return {"in_use": await in_use.find([str(each) for each in request["keys"]]), **self._access}

    async def _hint(
        self, stream: trio.SocketStream, user: int, request: dict[str, Any], received: Request
    ) -> None:
        """Receive a job's plan or cursor, or withdraw the job's hints."""
        file, size = str(request.get("file")), int(request.get("bytes") or 0)
        if not 0 <= size <= LONGEST_MESSAGE_BYTES:
            raise HintError(f"{file}: a message may have at most {LONGEST_MESSAGE_BYTES} bytes, not {size}")
        data = await received.message(size)
        if size:
            await self._hints.receive(file, data, user=user)
        else:
            self._hints.forget(file, user=user)
        await self._send(stream, _done("ok"))

    async def _open(self, stream: trio.SocketStream, user: int, request: dict[str, Any]) -> None:
        """Send the descriptor of a file in the cache, or that there is none."""
        fd = await self._open_cached(request, user)
        try:
            await self._send_with(stream, {"opened": fd is not None}, fd)
        finally:
            if fd is not None:
                os.close(fd)

    async def _send_with(self, stream: trio.SocketStream, row: dict[str, Any], fd: int | None) -> None:
        """Send a final answer, and with it a descriptor."""
        line = _line({**_done("ok"), **row})
        rights = [] if fd is None else [(socket.SOL_SOCKET, socket.SCM_RIGHTS, fd.to_bytes(4, sys.byteorder))]
        with trio.fail_after(_SEND_SECONDS):
            try:
                sent = await stream.socket.sendmsg([line], rights)
            except OSError as exc:  # the client has gone
                raise trio.BrokenResourceError from exc
            await stream.send_all(line[sent:])

    async def _record(self, stream: trio.SocketStream) -> None:
        """Report the reads of all files until the client closes its side of the connection."""
        is_wanted = True
        with self._fs.hints.recording() as reads:
            try:
                while is_wanted:
                    await self._send(stream, reads.take())
                    with trio.move_on_after(REPORT_SECONDS):
                        is_wanted = bool(await stream.receive_some(1))
            finally:
                # Also when the mount ends.
                with trio.move_on_after(_LAST_SEND_SECONDS, shield=True):
                    await self._send(stream, {**reads.take(), **_done("ok")})

    async def _status(self, stream: trio.SocketStream, path: str) -> None:
        pending = await self._fs.status.count()
        status = self._with_facts(self._fs.statistics(pending))
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
            # Raises for a mistyped name, which must not count as durable.
            await self._fs.paths.lookup_path(path)
        async with self._reporting(stream, lambda: self._pending(path)):
            if drains:
                ended = await self._fs.drain(seconds, until_empty=False)
            else:
                ended = await self._fs.wait_durable(path, seconds)
                held = self._facts()["writes_held"] if ended.result == "durable" else ""
                ended = Durability("error", f"nothing can be uploaded: {held}") if held else ended
        result = "durable" if drains and ended.result == "conflict" else ended.result
        missing = {} if result == "durable" else {"missing": await self._fs.status.missing_at(path)}
        await self._send(stream, {**await self._pending(path), **_done(result, ended.message), **missing})

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

    async def _uploads(self, stream: trio.SocketStream, path: str, request: dict[str, Any]) -> None:
        older_than_seconds, aborts = float(request["older_than_seconds"]), bool(request.get("abort"))
        async with self._reporting(stream, _as_async(dict)):
            survey = await self._fs.uploads.survey(path, older_than_seconds, aborts=aborts)
        await self._send(stream, {**_done("ok"), "uploads": survey.as_dict()})

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
        with trio.fail_after(_SEND_SECONDS):
            await stream.send_all(_line(row))


def _as_async(report: Callable[[], dict[str, Any]]) -> Callable[[], Awaitable[dict[str, Any]]]:
    """Wrap a synchronous report as an asynchronous one."""

    async def call() -> dict[str, Any]:
        return report()

    return call


def _line(row: dict[str, Any]) -> bytes:
    return json.dumps(row).encode() + b"\n"


def _done(result: str, message: str = "") -> dict[str, Any]:
    return {"done": True, "result": result, "message": message}


def _path(text: str) -> str:
    return str(text).strip("/")
