"""Copies large replies to the kernel for a daemon, in a process of its own (`movers.py` starts it). It decides nothing.

Invariants:
1. A job counts as done after its system call has returned: from then on nothing here looks at its bytes.
2. It holds no keys. Besides the descriptors of `main` and the standard ones it has those of its orders: files that it
   writes, connections to the bucket.
"""

import errno
import mmap
import os
import socket
import struct
import sys
import threading
from contextlib import suppress

# Of a job: the kernel's number of the request, where the bytes are in the pool, how many there are.
JOB = struct.Struct("<QQQ")
OUT_HEADER = struct.Struct("<IiQ")
# In the memory for the state: how many jobs are done, and whether the daemon wants to hear of the next one.
STATE_BYTES = 4096
DONE, IS_AWAITED = 0, 1
# What it tells the daemon.
READY, WAKE, TAKES_ORDERS = b"ready", b"wake", b"orders"
# Linux 5.14; asm-generic/mman-common.h
_POPULATE_READ = 22
_REGION_BYTES = 8 << 20
_SWITCH_SECONDS = 0.0005
# The request was answered or taken back, or the mount is gone.
_OVER = frozenset(
    {errno.ENOENT, errno.ENODEV, errno.ECONNABORTED, errno.ENOTCONN, errno.ECONNRESET, errno.EPIPE}
)


class Pool:
    """The memory that replies lie in."""

    def __init__(self, fd: int) -> None:
        self._map = mmap.mmap(fd, 0)
        self._view = memoryview(self._map)
        self._mapped: set[int] = set()

    def all(self) -> memoryview:
        """Return all of it, writable."""
        return self._view

    def view(self, offset: int, size: int) -> memoryview:
        """Return bytes of it, whose pages this process has mapped.

        If a page were missing while this process is killed within the copy, the kernel would answer with EIO.
        """
        for region in range(offset // _REGION_BYTES, (offset + size - 1) // _REGION_BYTES + 1):
            if region not in self._mapped:
                self._mapped.add(region)
                start = region * _REGION_BYTES
                length = min(_REGION_BYTES, len(self._map) - start)
                try:
                    self._map.madvise(_POPULATE_READ, start, length)
                except OSError:  # an older kernel
                    self._view[start : start + length : mmap.PAGESIZE].tobytes()
        return self._view[offset : offset + size]


def run(device: int, pool: Pool, state: memoryview, jobs: socket.socket) -> None:
    """Carry out jobs until the daemon closes its end of the socket."""
    jobs.send(READY)
    while message := jobs.recv(JOB.size):
        unique, offset, size = JOB.unpack(message)
        if size:  # else it is asked whether it goes on
            _answer(device, unique, pool.view(offset, size))
        state[DONE] += 1
        if state[IS_AWAITED]:
            state[IS_AWAITED] = 0
            jobs.send(WAKE)


def _answer(device: int, unique: int, payload: memoryview) -> None:
    try:
        os.writev(device, [OUT_HEADER.pack(OUT_HEADER.size + len(payload), 0, unique), payload])
    except OSError as exc:
        if exc.errno in _OVER:
            return
        sys.stderr.write(f"mover: the kernel refused a reply error={exc}\n")
        with suppress(OSError):
            os.write(device, OUT_HEADER.pack(OUT_HEADER.size, -errno.EIO, unique))


def take_orders(pool: Pool, jobs: socket.socket, orders: socket.socket) -> None:
    """Carry out other orders until the daemon closes their socket. If that is not possible, only replies are copied."""
    from fusecache.movers.orders import Orders  # takes longer than all else here

    taker = Orders(pool.all())
    jobs.send(TAKES_ORDERS)
    try:
        taker.run(orders)
    except ConnectionError:
        pass  # the daemon has ended
    except Exception:  # noqa: BLE001  # without memory, say
        sys.excepthook(*sys.exc_info())
        os._exit(1)  # orders would wait for this thread


def main(jobs: int, device: int, pool: int, state: int, orders: int) -> None:
    """Work until the daemon closes its sockets.

    The descriptors: of a socket with the jobs, in their order, of the mount, of the memory that replies lie in, of the
    memory that tells how many jobs are done, and of a socket with other orders (`movers/orders.py`).
    """
    # As in the daemon: a thread that computes would else hold up the copies for 5 ms.
    sys.setswitchinterval(_SWITCH_SECONDS)
    words = memoryview(mmap.mmap(state, STATE_BYTES)).cast("Q")
    shared, told = Pool(pool), socket.socket(fileno=jobs)
    taken = socket.socket(fileno=orders)
    threading.Thread(target=take_orders, args=(shared, told, taken), daemon=True).start()
    run(device, shared, words, told)
