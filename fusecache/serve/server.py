"""Serves a mount's objects over HTTP/1.1. h11 parses; bodies go from the cache file to the socket by sendfile(2).

Invariants:
1. Bytes are sent only while their piece is held: a send that would outlast the hold ends the connection before.
2. Connections, pieces and the requests that wait for one are bounded; what exceeds the bound is answered 503.
"""

import base64
import logging
import os
import select
import ssl
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, NoReturn

import h11
import trio

from fusecache.disk.cache_files import CHECKSUM_BYTES
from fusecache.model.objects import GRANULE_BYTES, MIB
from fusecache.remote.protocol.headers import CHECKSUMS_HEADER
from fusecache.remote.protocol.signing import PEER_KEY
from fusecache.serve.errors import S3Error, too_much, unavailable
from fusecache.serve.objects import DaemonObjects, Found, HeldPiece
from fusecache.serve.s3_requests import S3Request, listing_document, location_document, object_headers
from fusecache.serve.signature import SignatureCheck

log = logging.getLogger(__name__)

MOST_CONNECTIONS = 512
# Each piece has a connection to the daemon, which takes 256 of its owner's. By whether they are for other nodes: a
# piece for a program may wait for another node, and none for a node may wait for that.
_MOST_PIECES = {True: 48, False: 96}
_MOST_WAITING = 384
_PLACE_SECONDS = 30.0
# A piece is larger the longer the body is: its first byte comes soon, and few requests go to the daemon.
_FIRST_PIECE_BYTES, _LARGEST_PIECE_BYTES = 8 * MIB, 64 * MIB
# A piece that took longer to send is followed by none that is larger.
_QUICK_SECONDS = 2.0
# Below the daemon's HOLD_SECONDS, by far.
_PIECE_SECONDS = 120.0
_HEAD_SECONDS, _IDLE_SECONDS, _SEND_SECONDS = 30.0, 75.0, 60.0
_HEAD_BYTES = 32768
# Well below what another node waits for one.
_LIFE_SECONDS = 0.5
_RECEIVE_BYTES = 16384
_SEND_BYTES = MIB
# The loop would be called for each part that the socket takes; a thread sends that long, while the client keeps up.
_TURN_SECONDS = 0.1
_THREAD_WAIT_MILLISECONDS = 20
# By whether they send to other nodes: slow programs must not keep those waiting, which would count this node as failed.
_SENDERS = {for_peer: trio.CapacityLimiter(16) for for_peer in (True, False)}
_TLS_SEND_BYTES = 256 * 1024


@dataclass(frozen=True, slots=True)
class Response:
    """An answer with a body in memory."""

    status: int
    headers: list[tuple[str, str]]
    body: bytes = b""


class ObjectServer:
    """Answers the requests of all connections."""

    def __init__(
        self, bucket: str, objects: DaemonObjects, check: SignatureCheck, tls: ssl.SSLContext | None = None
    ) -> None:
        """tls: None for plain HTTP."""
        self._bucket = bucket
        self._objects = objects
        self._check = check
        self._tls = tls
        self._connections = 0
        self._pieces = {for_peer: trio.Semaphore(most) for for_peer, most in _MOST_PIECES.items()}

    async def run(self, listeners: list[trio.SocketListener]) -> NoReturn:
        """Serve until cancelled."""
        await trio.serve_listeners(self._serve, listeners)

    async def _serve(self, stream: trio.SocketStream) -> None:
        if self._connections >= MOST_CONNECTIONS:
            body = too_much(
                f"{MOST_CONNECTIONS} connections are open here, and no more are taken: use fewer, or try again"
            ).body()
            head = f"connection: close\r\ncontent-type: application/xml\r\ncontent-length: {len(body)}"
            async with stream:
                with trio.move_on_after(1), suppress(trio.BrokenResourceError, trio.ClosedResourceError):
                    await stream.send_all(f"HTTP/1.1 503 Slow Down\r\n{head}\r\n\r\n".encode() + body)
                    await stream.send_eof()
                    while await stream.receive_some(_RECEIVE_BYTES):  # a reset would destroy the answer
                        pass
            return
        self._connections += 1
        try:
            async with stream:
                await _Conversation(stream, self._tls, self._answer).run()
        except* (OSError, trio.BrokenResourceError, trio.ClosedResourceError, trio.TooSlowError):
            pass  # the client has gone, or is too slow
        except* S3Error as group:
            log.info("body ended early error=%s", group.exceptions[0])
        except* Exception:
            log.exception("request failed")
        finally:
            self._connections -= 1

    async def _answer(self, conversation: "_Conversation", request: S3Request) -> Response | None:
        """Answer a request. None: the answer was sent. Raises S3Error."""
        user = self._check.user_of(request.method, request.path, request.query, request.headers, time.time())
        if not user:
            request.check_host(self._bucket)
        key = request.place(self._bucket, by_host=user != PEER_KEY)
        if key and user == PEER_KEY:
            await self._piece_for_peer(conversation, request, key)
            return None
        if key:
            request.check_object()
            return await self._object(conversation, request, key)
        if request.is_head and not request.query:
            return Response(200, [("x-amz-bucket-region", "us-east-1")])
        if request.method == "GET" and ("location", "") in request.query:
            return _xml(location_document())
        asked = request.listing()
        page: dict[str, Any] = {"objects": [], "prefixes": [], "token": None}
        if asked["limit"]:
            page = await self._objects.list_page(asked)
            # A store may send an empty page that is not the last one. It has no name to go on from.
            while page["token"] and not (page["objects"] or page["prefixes"]):
                page = await self._objects.list_page({**asked, "token": page["token"]})
        return _xml(listing_document(self._bucket, request, page))

    async def _object(self, conversation: "_Conversation", request: S3Request, key: str) -> Response | None:
        asked = request.asked()
        start, stop = asked or (0, 1 << 62)
        found: Found | None = None
        if request.is_head or request.is_conditional:
            found = await self._objects.find(key)
            if request.check_version(found):
                return Response(304, object_headers(found))
            if request.is_head:
                return _head(found, *_within(found, start, stop), is_part=asked is not None)
        piece = await self._take(key, start, min(stop, start + _FIRST_PIECE_BYTES), found)
        try:
            start, stop = _within(piece.found, start, stop)
            head = _head(found or piece.found, start, stop, is_part=asked is not None)
            if start == stop:
                return head
            await conversation.send_head(head)
            size = _FIRST_PIECE_BYTES
            while piece.stop < stop:
                began = trio.current_time()
                following = await self._send_and_take(
                    conversation, key, piece, start, min(stop, piece.stop + size)
                )
                start, piece = piece.stop, following
                if trio.current_time() < began + _QUICK_SECONDS:
                    size = min(2 * size, _LARGEST_PIECE_BYTES)
            await conversation.send_piece(piece, start, stop)
            await conversation.end()
        finally:
            self._give_back(piece)
        return None

    async def _piece_for_peer(self, conversation: "_Conversation", request: S3Request, key: str) -> None:
        """Send one piece of the version that another node names, with its checksums."""
        found, start, stop = request.asked_by_peer()
        piece: HeldPiece | None = None
        try:
            async with conversation.signs_of_life():  # which fails if the other node has gone
                piece = await self._take(key, start, stop, found, for_peer=True)
            if piece.start != start or piece.stop < stop:
                raise unavailable(f"{key}: the cache cannot hold so much now")
            count = -(-(stop - start) // GRANULE_BYTES) * CHECKSUM_BYTES
            checksums = base64.b64encode(piece.checksums[:count]).decode("ascii")
            head = _head(found, start, stop, is_part=True)
            head.headers.append((CHECKSUMS_HEADER, checksums))
            await conversation.send_head(head)
            await conversation.send_piece(piece, start, stop, for_peer=True)
            await conversation.end()
        finally:
            if piece is not None:
                self._give_back(piece, for_peer=True)

    async def _send_and_take(
        self, conversation: "_Conversation", key: str, piece: HeldPiece, start: int, stop: int
    ) -> HeldPiece:
        """Send a piece from `start` on, and give it back; return the next one, which ends at `stop`.

        That is fetched during the send.
        """
        taken: list[HeldPiece] = []

        async def take() -> None:
            taken.append(await self._take(key, piece.stop, stop, piece.found))

        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(take, name="next-piece")
                await conversation.send_piece(piece, start, piece.stop)
                # Before the next one has come: bodies that each keep a piece all wait for one.
                self._give_back(piece)
        except BaseException:
            for each in taken:
                self._give_back(each)
            raise
        return taken[0]

    async def _take(
        self, key: str, start: int, stop: int, found: Found | None, *, for_peer: bool = False
    ) -> HeldPiece:
        """Return a piece, once there is a place for it. `_give_back` ends it. Raises S3Error."""
        places = self._pieces[for_peer]
        if places.statistics().tasks_waiting >= _MOST_WAITING:
            raise too_much(f"{_MOST_WAITING} requests wait here already: try again")
        with trio.move_on_after(_PLACE_SECONDS) as scope:
            await places.acquire()
        if scope.cancelled_caught:
            raise too_much(f"no place to send from for {_PLACE_SECONDS:.0f} s: try again")
        try:
            return await self._objects.piece(key, start, stop, found, for_peer=for_peer)
        except BaseException:
            places.release()
            raise

    def _give_back(self, piece: HeldPiece, *, for_peer: bool = False) -> None:
        if not piece.is_closed:
            piece.close()
            self._pieces[for_peer].release()


def _within(found: Found, start: int, stop: int) -> tuple[int, int]:
    """Return a range within an object; its start is its stop if none of it is."""
    start = max(0, found.size + start) if start < 0 else start
    stop = min(stop, found.size)
    return min(start, stop), stop


def _head(found: Found, start: int, stop: int, *, is_part: bool) -> Response:
    """Return the head of an answer with a range of an object. Raises S3Error if there is none."""
    headers = [*object_headers(found), ("Content-Length", str(stop - start))]
    if not is_part:
        return Response(200, headers)
    if start == stop:
        raise S3Error(
            416, "InvalidRange", f"the range is not within the object, which has {found.size} bytes"
        )
    return Response(206, [*headers, ("Content-Range", f"bytes {start}-{stop - 1}/{found.size}")])


def _xml(body: bytes) -> Response:
    return Response(200, [("Content-Type", "application/xml")], body)


def _send_pages(target: int, piece: HeldPiece, start: int, stop: int) -> int:
    """Run in a thread: send bytes of a piece while the socket takes them, and the daemon holds it; return how many."""
    poll = select.poll()
    poll.register(target, select.POLLOUT)
    poll.register(piece.hold_fd, select.POLLIN)
    until = time.monotonic() + _TURN_SECONDS
    at = start
    # A slow client waits on the loop: it must not hold a thread.
    while at < stop and [fd for fd, _ in poll.poll(_THREAD_WAIT_MILLISECONDS)] == [target]:
        try:
            sent = os.sendfile(target, piece.fd, at, min(stop - at, _SEND_BYTES))
        except BlockingIOError:  # the kernel lacks memory for sockets
            break
        at += sent
        if not sent or time.monotonic() > until:
            break
    return at - start


class _FileBody:
    """Stands for bytes that h11 counts and does not see."""

    def __init__(self, size: int) -> None:
        self._size = size

    def __len__(self) -> int:
        return self._size


class _Conversation:
    """One connection."""

    def __init__(
        self,
        stream: trio.SocketStream,
        tls: ssl.SSLContext | None,
        answer: Callable[["_Conversation", S3Request], Awaitable[Response | None]],
    ) -> None:
        self._socket = stream.socket
        self._secure = tls is not None
        self._stream: trio.SocketStream | trio.SSLStream[trio.SocketStream] = stream
        if tls is not None:
            self._stream = trio.SSLStream(stream, tls, server_side=True, https_compatible=True)
        self._answer = answer
        self._http = h11.Connection(h11.SERVER, max_incomplete_event_size=_HEAD_BYTES)
        self._has_begun = False

    async def run(self) -> None:
        """Answer requests until the connection ends."""
        seconds = _HEAD_SECONDS
        while (event := await self._next_request(seconds)) is not None:
            seconds = _IDLE_SECONDS
            if not await self._answer_event(event):
                return

    async def _next_request(self, seconds: float) -> h11.Request | S3Error | None:
        """Return the next request, or why it is none; None at the end of the connection."""
        try:
            with trio.fail_after(seconds):
                while (event := self._http.next_event()) is h11.NEED_DATA:
                    self._http.receive_data(bytes(await self._stream.receive_some(_RECEIVE_BYTES)))
        except h11.RemoteProtocolError as exc:
            return S3Error(400, "InvalidRequest", f"not HTTP/1.1: {exc}")
        return event if isinstance(event, h11.Request) else None

    async def _answer_event(self, event: h11.Request | S3Error) -> bool:
        """Answer; return whether the connection stays open."""
        self._has_begun = False
        response: Response | None
        try:
            if isinstance(event, S3Error):
                raise event
            request = S3Request.of(event.method, event.target, list(event.headers))
            response = await self._answer(self, request)
        except S3Error as exc:
            if self._has_begun:
                raise
            response = Response(exc.status, [("Content-Type", "application/xml")], exc.body())
        if response is not None:
            is_sized = response.status == 304 or any(name == "Content-Length" for name, _ in response.headers)
            own = [] if is_sized else [("Content-Length", str(len(response.body)))]
            await self.send_head(Response(response.status, [*response.headers, *own]))
            if response.body and not (isinstance(event, h11.Request) and event.method == b"HEAD"):
                await self._send(self._http.send(h11.Data(data=response.body)))
            await self.end()
        # What the client still sends of a body is not read.
        with suppress(h11.RemoteProtocolError):
            while self._http.their_state is h11.SEND_BODY and self._http.next_event() is not h11.NEED_DATA:
                pass
        if self._http.our_state is not h11.DONE or self._http.their_state is not h11.DONE:
            await self._drain()
            return False
        self._http.start_next_cycle()
        return True

    @asynccontextmanager
    async def signs_of_life(self) -> AsyncIterator[None]:
        """Send interim responses while the body runs: the other node sees that this one works for it."""

        async def run() -> None:
            while True:
                await trio.sleep(_LIFE_SECONDS)
                with trio.CancelScope(shield=True):  # never a part of one
                    await self._send(self._http.send(h11.InformationalResponse(status_code=102, headers=[])))

        failure: S3Error | None = None
        async with trio.open_nursery() as nursery:
            nursery.start_soon(run, name="signs-of-life")
            try:
                yield
            except S3Error as exc:  # not as a group
                failure = exc
            nursery.cancel_scope.cancel()
        if failure is not None:
            raise failure

    async def send_head(self, response: Response) -> None:
        """Send the head of an answer."""
        self._has_begun = True
        reason = HTTPStatus(response.status).phrase.encode()
        headers = [*response.headers, ("Server", "fusecache")]
        await self._send(
            self._http.send(h11.Response(status_code=response.status, headers=headers, reason=reason))
        )

    async def send_piece(self, piece: HeldPiece, start: int, stop: int, *, for_peer: bool = False) -> None:
        """Send bytes [start, stop) of a piece. Raises trio.TooSlowError."""
        body = _FileBody(stop - start)
        self._http.send_with_data_passthrough(h11.Data(data=body))  # type: ignore[arg-type]  # h11 asks for no more
        with trio.fail_after(_PIECE_SECONDS):
            while start < stop:
                if not piece.is_held:
                    raise unavailable("the daemon has ended, and its successor may evict what is being sent")
                sent = await self._send_some(piece, start, stop, _SENDERS[for_peer])
                if not sent and os.fstat(piece.fd).st_size < stop:
                    raise S3Error(500, "InternalError", f"the cache file ends before {stop}")
                start += sent

    async def end(self) -> None:
        """End the answer."""
        await self._send(self._http.send(h11.EndOfMessage()))

    async def _send_some(self, piece: HeldPiece, start: int, stop: int, senders: trio.CapacityLimiter) -> int:
        """Send some bytes of a piece; return how many, 0 at the file's end, or if it is not held any more."""
        if self._secure:
            data = os.pread(piece.fd, min(stop - start, _TLS_SEND_BYTES), start)
            await self._stream.send_all(data)
            return len(data)
        with trio.fail_after(_SEND_SECONDS):
            await trio.lowlevel.wait_writable(self._socket)
        # Not abandoned when cancelled: its descriptors would be closed, and may become others.
        return await trio.to_thread.run_sync(
            _send_pages,
            self._socket.fileno(),
            piece,
            start,
            stop,
            limiter=senders,
        )

    async def _send(self, data: bytes | None) -> None:
        if data:
            with trio.fail_after(_SEND_SECONDS):
                await self._stream.send_all(data)

    async def _drain(self) -> None:
        """Take what a client sends that has not read its answer: a reset would destroy that."""
        with trio.move_on_after(1):
            if not self._secure:
                self._socket.shutdown(trio.socket.SHUT_WR)
            while await self._stream.receive_some(_RECEIVE_BYTES):
                pass
