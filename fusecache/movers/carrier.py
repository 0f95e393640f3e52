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
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Literal

from fusecache.movers.orders import (
    COUNT,
    DONE,
    FAILED,
    ORDER_BYTES,
    PROGRESS,
    BodyOrder,
    CloseOrder,
    InterruptOrder,
    Order,
    StoreOrder,
    packed,
    unpacked,
)
from fusecache.remote.http.connection_pool import Peer, most_idle_of
from fusecache.remote.http.ranged_get import GetRequest, ReceiverEnded
from fusecache.remote.http.tls import TlsContext

# A longer request goes with the daemon's own connection.
_HEAD_BYTES = ORDER_BYTES // 2
# Sockets for answers that are kept for the next orders, those to all movers together: each is a descriptor here and in
# its mover. Of 2 100 orders of the case `loop` (benchmarks/node.py) 157 found none, and 437 with a limit of 4.
IDLE_MAX = 8
# They keep this part of the limit of open files at most.
_SHARE = 16


@dataclass(slots=True, eq=False)
class AnswerSocket:
    """Where the answers to one order come, and later those to others: a thread reads the last one before it returns.

    theirs: the mover's end, until it has got it with the first order.
    """

    number: int
    ours: socket.socket
    theirs: socket.socket | None
    is_open: bool = True

    def receive(self) -> bytes:
        """Return the next answer; b"" once the mover has ended."""
        try:
            message = self.ours.recv(ORDER_BYTES)
        except OSError:
            message = b""
        self.is_open = bool(message)
        return message


class OrderLine:
    """The way to one mover. busy: orders that have not ended. is_over: it takes none any more. idle: no order has them.

    A new socket for each order would take six more system calls. Each may pass the interpreter's lock on.
    """

    def __init__(self, orders: socket.socket) -> None:
        self.socket = orders
        self.busy = 0
        self.is_over = False
        self.idle: list[AnswerSocket] = []

    def close_if_idle(self) -> None:
        """Close the sockets of a mover that takes no orders, once no thread uses them: their numbers are used again."""
        if self.is_over and not self.busy:
            self.socket.close()
            for each in self.idle:
                each.ours.close()
            self.idle.clear()

    def send(self, order: Order, answers: AnswerSocket, fds: list[int]) -> bool:
        """Send an order; return False if the mover has ended."""
        message, theirs = packed(order), answers.theirs
        try:
            if theirs is not None:
                socket.send_fds(self.socket, [message], [theirs.fileno(), *fds])
            elif fds:
                socket.send_fds(self.socket, [message], fds)
            else:
                self.socket.send(message)
        except OSError:
            answers.is_open = False
        finally:
            if theirs is not None:
                theirs.close()
                answers.theirs = None
        return answers.is_open

    def close(self, answers: AnswerSocket) -> None:
        """Close a socket for answers on both sides."""
        answers.ours.close()
        with suppress(OSError):  # the mover has ended
            self.socket.send(packed(CloseOrder(answers.number)))

    def interrupt(self, number: int) -> None:
        """End a fetch early. Never blocks the loop."""
        message = packed(InterruptOrder(number))
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
        self._most_idle = most_idle_of(IDLE_MAX, _SHARE)
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
        answers = self._answers(line)
        try:
            if answers is None:
                return None
            number, asked, extent = next(self._numbers), get.object_id, get.extent
            order = BodyOrder(
                number, answers.number, get.what, asked.key, asked.etag, extent.start, extent.stop,
                offset, place, head, tuple(get.terms or ()),
            )  # fmt: skip
            return self._await_body(line, number, get, answers) if line.send(order, answers, []) else None
        finally:
            self._end(line, answers)

    def store(self, fd: int, memory: memoryview, size: int, offset: int) -> bytes | None:
        """Have a mover write memory to a file, as `checksummed_and_written` does; return its checksums.

        None: the caller must. Raises OSError.
        """
        place = self._offset_of(memory)
        line = self._begin() if place is not None else None
        if line is None or place is None:
            return None
        answers = self._answers(line)
        try:
            if answers is None:
                return None
            order = StoreOrder(answers.number, place, size, len(memory), offset)
            message = answers.receive() if line.send(order, answers, [fd]) else b""
        finally:
            self._end(line, answers)
        if message[:1] == DONE:
            return message[1:]
        if message[:1] == FAILED:
            raise unpacked(message[1:])
        return None

    # ---- inside

    def _begin(self) -> OrderLine | None:
        with self._lock:
            line = min(self._lines, key=lambda each: each.busy, default=None)
            if line is not None:
                line.busy += 1
            return line

    def _answers(self, line: OrderLine) -> AnswerSocket | None:
        """Return where the answers to the next order come; None without another descriptor."""
        with suppress(IndexError):
            return line.idle.pop()
        try:
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        except OSError:
            return None
        return AnswerSocket(next(self._numbers), ours, theirs)

    def _end(self, line: OrderLine, answers: AnswerSocket | None) -> None:
        with self._lock:
            kept = sum(len(each.idle) for each in self._lines)
            if answers is not None and answers.is_open and kept < self._most_idle:
                line.idle.append(answers)
                answers = None
        if answers is not None:
            line.close(answers)
        with self._lock:
            line.busy -= 1
            line.close_if_idle()

    def _await_body(
        self, line: OrderLine, number: int, get: GetRequest, answers: AnswerSocket
    ) -> Literal[True] | None:
        received = 0
        has_ended = False
        try:
            with get.interruption.by(partial(line.interrupt, number)):
                while (message := answers.receive())[:1] == PROGRESS:
                    _, received = COUNT.unpack(message)
                    get.progress(received)
                has_ended = True
                if message[:1] == DONE:
                    get.progress(get.extent.size)
                    return True
                if message[:1] == FAILED:
                    raise unpacked(message[1:])
                if received:
                    raise ReceiverEnded(f"{get.what}: the process that received it ended")
                return None  # it died, or lacks something
        finally:
            if not has_ended:
                # Until the last answer, the mover may write to the buffer.
                line.interrupt(number)
                while answers.receive()[:1] == PROGRESS:
                    pass


@lru_cache(maxsize=1024)
def _place(peer: Peer) -> bytes | None:
    """Return a place as an order has it; None with TLS by `ssl`. Kept: all orders to a server have it."""
    if peer.tls is None:
        return pickle.dumps((peer, None))
    if not isinstance(peer.tls, TlsContext):
        return None
    return pickle.dumps((replace(peer, tls=None), peer.tls.trusted))
