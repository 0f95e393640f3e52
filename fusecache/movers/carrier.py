"""Has movers fetch and store, for the daemon's threads. Thread-safe.

The thread that asks waits for the answers, as it would for the network or the disk: retries, signatures, limits and
errors stay where they are. If no mover takes an order, or its mover dies before the first byte of a fetch, the thread
does the work itself. A mover that dies later is a lost connection; within a store, the thread stores the bytes again.
"""

import itertools
import pickle
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Literal

from fusecache.model.errors import Unavailable
from fusecache.movers.orders import (
    COUNT,
    DONE,
    ORDER_BYTES,
    PROGRESS,
    BodyOrder,
    InterruptOrder,
    PeerPlace,
    StoreOrder,
    unpacked,
)
from fusecache.remote.http.connection_pool import Peer
from fusecache.remote.http.ranged_get import GetRequest
from fusecache.remote.http.tls import TlsContext

# A longer request goes with the daemon's own connection.
_HEAD_BYTES = ORDER_BYTES // 2


class OrderLine:
    """The way to one mover. busy: orders that have not ended. is_over: it takes none any more."""

    def __init__(self, orders: socket.socket) -> None:
        self.socket = orders
        self.busy = 0
        self.is_over = False

    def close_if_idle(self) -> None:
        """Close the socket of a mover that takes no orders, once no thread uses it: its number may be used again."""
        if self.is_over and not self.busy:
            self.socket.close()

    def interrupt(self, number: int) -> None:
        """End a fetch early. Never blocks the loop."""
        message = pickle.dumps(InterruptOrder(number))
        try:
            self.socket.send(message, socket.MSG_DONTWAIT)
        except BlockingIOError:  # many orders wait; a mover that takes none stands still, and is killed
            threading.Thread(target=self._send, args=(message,), daemon=True).start()
        except OSError:  # it has ended
            pass

    def _send(self, message: bytes) -> None:
        with suppress(OSError):
            self.socket.send(message)


class Carrier:
    """The movers of one mount, for all threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lines: list[OrderLine] = []
        self._numbers = itertools.count(1)
        self._offset_of: Callable[[memoryview], int | None] = lambda _: None

    def attach(self, offset_of: Callable[[memoryview], int | None]) -> None:
        """From now on, the shared buffers are known. offset_of: where a view begins in them."""
        self._offset_of = offset_of

    def add(self, orders: socket.socket) -> OrderLine:
        """A mover takes orders on this socket, which is this object's from now on."""
        line = OrderLine(orders)
        with self._lock:
            self._lines.append(line)
        return line

    def remove(self, line: OrderLine) -> None:
        """It takes none any more."""
        with self._lock:
            self._lines.remove(line)
            line.is_over = True
            line.close_if_idle()

    def fetch(self, get: GetRequest, peer: Peer, head: bytes) -> Literal[True] | None:
        """Have a mover send a signed GET and receive the body into its target.

        None: the caller must. Raises RemoteError, Redirected.
        """
        place = _place(peer)
        offset = self._offset_of(get.target)
        line = (
            self._begin() if offset is not None and place is not None and len(head) <= _HEAD_BYTES else None
        )
        if line is None or offset is None or place is None:
            return None
        number = next(self._numbers)
        order = BodyOrder(number, get.what, get.object_id, get.extent, offset, place, head)
        try:
            answers = self._send(line, order, [])
            if answers is None:
                return None
            with answers:
                return self._await_body(line, number, get, answers)
        finally:
            self._end(line)

    def store(self, fd: int, memory: memoryview, size: int, offset: int) -> bytes | None:
        """Have a mover write memory to a file, as `checksummed_and_written` does; return its checksums.

        None: the caller must. Raises OSError.
        """
        place = self._offset_of(memory)
        line = self._begin() if place is not None else None
        if line is None or place is None:
            return None
        try:
            answers = self._send(
                line, StoreOrder(next(self._numbers), place, size, len(memory), offset), [fd]
            )
            if answers is None:
                return None
            with answers:
                try:
                    message = answers.recv(ORDER_BYTES)
                except ConnectionError:
                    message = b""
        finally:
            self._end(line)
        if not message:
            return None  # it died
        if message[:1] == DONE:
            return message[1:]
        raise unpacked(message[1:])

    # ---- inside

    def _begin(self) -> OrderLine | None:
        with self._lock:
            line = min(self._lines, key=lambda each: each.busy, default=None)
            if line is not None:
                line.busy += 1
            return line

    def _end(self, line: OrderLine) -> None:
        with self._lock:
            line.busy -= 1
            line.close_if_idle()

    def _send(self, line: OrderLine, order: object, fds: list[int]) -> socket.socket | None:
        """Send an order; return where its answers come. None: the mover has ended."""
        try:
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        except OSError:
            return None
        with theirs:
            try:
                socket.send_fds(line.socket, [pickle.dumps(order)], [theirs.fileno(), *fds])
            except OSError:
                ours.close()
                return None
        return ours

    def _await_body(
        self, line: OrderLine, number: int, get: GetRequest, answers: socket.socket
    ) -> Literal[True] | None:
        received = 0
        has_ended = False
        try:
            with get.interruption.by(partial(line.interrupt, number)):
                while (message := answers.recv(ORDER_BYTES))[:1] == PROGRESS:
                    _, received = COUNT.unpack(message)
                    get.progress(received)
                has_ended = True
                if message[:1] == DONE:
                    return True
                if message:
                    raise unpacked(message[1:])
                if received:
                    raise Unavailable(f"{get.what}: the process that received it ended")
                return None  # it died, or had no descriptor left
        finally:
            if not has_ended:
                # Until the last answer, the mover may write to the buffer.
                line.interrupt(number)
                with suppress(OSError):
                    while answers.recv(ORDER_BYTES)[:1] == PROGRESS:
                        pass


def _place(peer: Peer) -> PeerPlace | None:
    if peer.tls is None:
        return PeerPlace(peer, None)
    if not isinstance(peer.tls, TlsContext):
        return None
    plain = Peer(peer.host, peer.port, None, peer.connect_timeout, peer.read_timeout, peer.proxy)
    return PeerPlace(plain, peer.tls.trusted)
