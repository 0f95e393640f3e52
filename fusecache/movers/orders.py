"""Carries out the orders of a daemon, in a mover: fetches bodies into the shared buffers, and stores them.

Each order names a socket for its answers: progress, then the last one, of its end or an error. No other order has that
socket until then; the first one that does brings it. The daemon signs requests, so the keys for that do not come here.
Connections stay open for the next order.

Invariant: after the last answer of an order, nothing here touches its part of the buffers. A mover that dies gives no
last answer, and its ends of the sockets close once all its threads have ended.
"""

import errno
import os
import pickle
import socket
import struct
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any, Literal, NamedTuple

from fusecache.disk.cache_files import checksummed_and_written, granule_checksums
from fusecache.model.errors import RemoteError
from fusecache.model.objects import Extent, ObjectId
from fusecache.remote.http.connection_pool import Connection, ConnectionPool
from fusecache.remote.http.peer_get import ask_peer
from fusecache.remote.http.ranged_get import GetRequest, PeerTerms, ask
from fusecache.remote.http.signed_requests import Redirected
from fusecache.remote.http.tls import TlsContext, library
from fusecache.remote.store import Interruption

# As many as the daemon has threads for GETs and for the disk.
_THREADS = 96
# Nodes, and addresses of buckets, whose connections are kept: those used last. Idle connections to another node: its
# `serve` takes 512 in all. Each of up to 4 movers keeps 2, and in a cluster of more nodes than places, most keep none.
POOLS_MAX, _IDLE_TO_NODE_MAX = 40, 2
ORDER_BYTES = 64 * 1024
# Descriptors, of this process or of the system; memory of the kernel.
_LACKS = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS})
# The first byte of an answer.
PROGRESS, DONE, FAILED, DECLINED = b"p", b"d", b"f", b"n"
COUNT = struct.Struct("<cQ")


class BodyOrder(NamedTuple):
    """One signed GET of an object's extent into the buffers, from `offset` on. answers: the number of their socket.

    place: where the peer is, as `pickle` has it: a `Peer` without TLS, and file and folder of the trusted CAs or None.
    terms: of `PeerTerms` for another node, else empty.
    """

    number: int
    answers: int
    what: str
    key: str
    etag: str
    start: int
    stop: int
    offset: int
    place: bytes
    head: bytes
    terms: tuple[Any, ...]


class StoreOrder(NamedTuple):
    """Bytes of the buffers, from `offset` on, for the file that comes with the order. padded: bytes to write.

    answers: the number of their socket.
    """

    answers: int
    offset: int
    size: int
    padded: int
    file_offset: int


class InterruptOrder(NamedTuple):
    """Ends the order with this number early."""

    number: int


class CloseOrder(NamedTuple):
    """Closes the socket for answers with this number: no order has it any more."""

    answers: int


Order = BodyOrder | StoreOrder | InterruptOrder | CloseOrder
_KINDS = (BodyOrder, StoreOrder, InterruptOrder, CloseOrder)


def packed(order: Order) -> bytes:
    """Return an order as a message, of plain values alone: a dataclass takes `pickle` five times as long."""
    return pickle.dumps((_KINDS.index(type(order)), *order))


class Orders:
    """The orders of one daemon."""

    def __init__(self, buffers: memoryview) -> None:
        """Raises RuntimeError if there is not even one thread."""
        self._buffers = buffers
        self._threads = ThreadPoolExecutor(_THREADS, "order")
        self._threads.submit(int)
        self._lock = threading.Lock()
        self._fetching: dict[int, Interruption] = {}
        # By whether they are to other nodes: many of these must not take the bucket's place.
        self._pools: dict[bool, OrderedDict[bytes, ConnectionPool]] = {
            is_node: OrderedDict() for is_node in (False, True)
        }
        # Belongs to the thread of `run`.
        self._answers: dict[int, socket.socket] = {}

    def run(self, orders: socket.socket) -> None:
        """Carry out orders until the daemon closes its end of the socket."""
        while True:
            message, fds, _, _ = socket.recv_fds(orders, ORDER_BYTES, 2)
            if not message:
                return
            kind, *values = pickle.loads(message)
            self._begin(_KINDS[kind](*values), fds)

    def _begin(self, order: Order, fds: list[int]) -> None:
        if isinstance(order, InterruptOrder):
            with self._lock:
                fetch = self._fetching.get(order.number)
            if fetch is not None:
                fetch.interrupt()
            return
        if isinstance(order, CloseOrder):
            if order.answers in self._answers:  # else it never came
                self._answers.pop(order.answers).close()
            return
        if order.answers not in self._answers and fds:
            self._answers[order.answers] = socket.socket(fileno=fds.pop(0))
        answers = self._answers.get(order.answers)
        if answers is None:
            # No descriptor was left for it: the daemon hears its end, and does the work itself.
            sys.stderr.write("mover: an order was not carried out: its descriptors did not come\n")
        elif isinstance(order, BodyOrder):
            with self._lock:
                self._fetching[order.number] = Interruption()
            fetch_body = partial(self._fetch, order, answers)
            self._submit(self._carry_out, answers, fetch_body, (RemoteError, Redirected))
        else:
            store = partial(self._store, order, fds[0]) if fds else _decline
            self._submit(self._carry_out, answers, store, (OSError,))

    def _submit(self, work: Callable[..., None], *arguments: object) -> None:
        # If the system has no further thread, `submit` has queued the order before it fails: a thread that exists
        # carries it out later. So its descriptors must stay open.
        with suppress(RuntimeError):
            self._threads.submit(work, *arguments)

    def _carry_out(
        self, answers: socket.socket, work: Callable[[], bytes], told: tuple[type[Exception], ...]
    ) -> None:
        """Do the work of an order, and give the last answer, whatever happens. told: as for `_failure`."""
        answer = DECLINED
        try:
            answer = DONE + work()
        except Exception as exc:  # noqa: BLE001
            answer = _failure(exc, told)
        finally:
            try:
                answers.send(answer)
            except OSError:  # the daemon died; or it hears the end of the socket instead
                with suppress(OSError):
                    answers.shutdown(socket.SHUT_RDWR)

    def _fetch(self, order: BodyOrder, answers: socket.socket) -> bytes:
        def progress(received: int) -> None:
            if received < extent.size:  # else the last answer tells it
                answers.send(COUNT.pack(PROGRESS, received))

        extent, object_id = Extent(order.start, order.stop), ObjectId(order.key, order.etag)
        try:
            target = self._buffers[order.offset : order.offset + extent.size]
            ended = self._fetching[order.number]
            terms = PeerTerms(*order.terms) if order.terms else None
            get = GetRequest(order.what, object_id, extent, target, progress, ended, terms)

            def send(connection: Connection) -> Literal[True]:
                if terms is None:
                    return ask(get, connection.peer.read_timeout, connection, order.head)
                return ask_peer(get, granule_checksums, connection, order.head)

            self._pool(order.place, is_node=terms is not None).lend(order.what, send)
        finally:
            with self._lock:
                del self._fetching[order.number]
        return b""

    def _store(self, order: StoreOrder, fd: int) -> bytes:
        try:
            memory = self._buffers[order.offset : order.offset + order.padded]
            return checksummed_and_written(fd, memory, order.size, order.file_offset)
        finally:
            os.close(fd)

    def _pool(self, place: bytes, *, is_node: bool) -> ConnectionPool:
        pools = self._pools[is_node]
        with self._lock:
            if place in pools:
                pools.move_to_end(place)
            else:
                peer, ca = pickle.loads(place)
                if ca is not None:
                    openssl = library()
                    assert openssl is not None, "the daemon has found it"
                    peer = replace(peer, tls=TlsContext(openssl, cafile=ca[0], capath=ca[1]))
                pools[place] = ConnectionPool(peer, _IDLE_TO_NODE_MAX if is_node else _THREADS)
                if len(pools) > POOLS_MAX:
                    pools.popitem(last=False)[1].close()
            return pools[place]


def _decline() -> bytes:
    raise LookupError("its descriptor did not come")


def _failure(error: Exception, told: tuple[type[Exception], ...]) -> bytes:
    """Return the answer that has the daemon raise an error of the bucket or the disk. told: the kinds of these.

    After another one, as this process lacks memory or descriptors, or finds no trusted certificates, and if the text is
    too long for an answer, the order is declined: the daemon does the work itself.
    """
    # The daemon looks at the cause too: of a certificate that is not trusted.
    errors = [each for each in (error, error.__cause__) if each]
    is_own = any(isinstance(each, OSError) and each.errno in _LACKS for each in errors)
    if is_own or not isinstance(error, told):
        sys.stderr.write(f"mover: an order was not carried out error={error!r}\n")
        return DECLINED
    answer = FAILED + pickle.dumps([(type(each), each.args, {**vars(each)}) for each in errors])
    return answer if len(answer) <= ORDER_BYTES else DECLINED


def unpacked(data: bytes) -> Exception:
    """Return an error that a mover sent."""
    found: list[Any] = []
    for kind, arguments, fields in pickle.loads(data):
        error = kind.__new__(kind, *arguments)
        error.args = arguments
        vars(error).update(fields)
        found.append(error)
    found[0].__cause__ = found[1] if found[1:] else None
    return found[0]  # type: ignore[no-any-return]
