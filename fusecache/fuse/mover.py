"""Copies large replies to the kernel for a daemon, in a process of its own (`movers.py` starts it). It decides nothing.

    python -I -S mover.py PARENT DEVICE POOL STATE JOBS ORDERS PATH

The numbers are the daemon's process, and descriptors: of the mount, of the memory that replies lie in, of the memory
that tells how many jobs are done, of a socket with the jobs, in their order, and of one with other orders
(`movers/orders.py`). PATH is where the daemon's modules are. The process ends with the daemon.

Invariants:
1. A job counts as done after its system call has returned: from then on nothing here looks at its bytes.
2. It holds no keys. Besides these descriptors and the standard ones it has those of its orders: files that it writes,
   connections to the bucket.
"""

import ctypes
import errno
import json
import mmap
import os
import signal
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
# What it tells the daemon. After an update of the package a daemon may start a newer mover: with the meaning of jobs or
# orders, these words change, and a daemon gives nothing to one whose words it does not know.
READY, WAKE, TAKES_ORDERS = b"ready", b"wake", b"orders"
# linux/prctl.h
_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE = 1, 4
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


def take_orders(path: str, pool: Pool, jobs: socket.socket, orders: socket.socket) -> None:
    """Carry out other orders until the daemon closes their socket. If that is not possible, only replies are copied."""
    sys.path[:] = json.loads(path)
    from fusecache.movers.orders import Orders

    taker = Orders(pool.all())
    jobs.send(TAKES_ORDERS)
    taker.run(orders)


def main() -> None:
    """Begin as the child of a daemon."""
    parent, device, pool, state, jobs, orders = map(int, sys.argv[1:7])
    # Signals for the daemon's group: it says itself when this process is to end.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_IGN)
    prctl = ctypes.CDLL(None).prctl
    prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)
    # A process that is stopped would not see the socket's end.
    prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        return
    # As in the daemon: a thread that computes would else hold up the copies for 5 ms.
    sys.setswitchinterval(_SWITCH_SECONDS)
    words = memoryview(mmap.mmap(state, STATE_BYTES)).cast("Q")
    shared, told = Pool(pool), socket.socket(fileno=jobs)
    with suppress(ConnectionError):
        threading.Thread(
            target=take_orders, args=(sys.argv[7], shared, told, socket.socket(fileno=orders)), daemon=True
        ).start()
        run(device, shared, words, told)


if __name__ == "__main__":
    main()
    os._exit(0)  # without the end of the interpreter: nothing is left to do
