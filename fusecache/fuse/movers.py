"""Processes that copy large replies to the kernel in place of the loop (`mover.py`). The loop decides, they copy.

    loop                                          mover
    carry: lend the buffer, send a job  --------> writev(2) to the mount's descriptor
    collect: give the buffer back  <------------- one more job is done (a number in shared memory)

Without movers, and whenever one cannot take a job, the loop copies the reply itself: `carry` returns False.

Invariants:
1. A buffer is lent until its job is done, or its mover has ended: so no process copies from a buffer with other bytes.
   A mover has ended when its socket has: that closes after all its threads have ended, with their system calls.
2. Each request is answered by its mover or by the loop, or by both. The kernel refuses the second answer (ENOENT), and
   never uses a request's number again, so a late answer harms nothing.
3. No request waits for a mover longer than STALL_SECONDS, plus the delay of the loop.
"""

import ctypes
import logging
import mmap
import os
import socket
import subprocess
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol

import trio

from fusecache import child
from fusecache.fuse import mover
from fusecache.fuse.kept_requests import make_memory

log = logging.getLogger(__name__)

# A mover that has finished nothing for so long, while it has jobs, is killed. A copy of a MiB takes 0.2 ms.
STALL_SECONDS = 1.0
_LOOK_SECONDS = 0.1
# A mover with orders, and without replies, shows that often that it goes on.
_PING_SECONDS = 0.25
# Jobs of one mover that are not done. Beyond, the loop copies: it would only wait.
_JOBS_MAX = 32
# Before the next start of a mover. Longer and longer for one that does not get ready.
_RESTART_SECONDS, _RESTART_SECONDS_MAX = 1.0, 10.0
# How long the end of a mount waits for a mover to finish, and once more after it was killed.
_END_SECONDS = 1.0
# PyDLL keeps the interpreter's lock during the call, which never waits.
_write = ctypes.PyDLL(None).write
_write.argtypes = (ctypes.c_int, ctypes.c_char_p, ctypes.c_size_t)
_write.restype = ctypes.c_ssize_t


class ReplyMemory(Protocol):
    """Memory that other processes can map, and that replies are views of. fd: its descriptor."""

    fd: int

    def lend(self, payload: memoryview) -> tuple[int, Callable[[], None]] | None:
        """Keep the bytes of a reply as they are; return where they begin, and what gives them back.

        None: they lie elsewhere, or will not stay: copy them now.
        """
        ...

    async def lacking(self) -> None:
        """Return when a buffer is wanted, and none is free while some are lent."""
        ...


class BusyLine(Protocol):
    """The way to one mover for orders. busy: how many have not ended."""

    busy: int


class OrderSender(Protocol):
    """What gives movers other orders than replies, from any thread."""

    def add(self, orders: socket.socket) -> BusyLine:
        """A mover takes orders on this socket, which is the sender's from now on."""
        ...

    def remove(self, line: Any) -> None:
        """It takes none any more."""
        ...


@dataclass(frozen=True, slots=True)
class MoverPlan:
    """How many movers a mount has, where the replies lie that they send, and who has other orders for them."""

    count: int
    memory: ReplyMemory
    orders: OrderSender | None = None


@dataclass(slots=True, eq=False)
class _Delivery:
    unique: int
    payload: memoryview
    give_back: Callable[[], None]
    on_answered: Callable[[], None]


class _Mover:
    """One process. jobs: that it has not done, as far as is known, the oldest first."""

    def __init__(self, device_fd: int, pool_fd: int) -> None:
        """Start it; it can take jobs once it says `READY`. Raises OSError."""
        self.jobs: deque[_Delivery] = deque()
        self.stands_since = trio.current_time()
        # It gets no job any more, and the loop has answered what it had not done.
        self.is_retired = False
        # Orders that are not replies, once it takes them.
        self.line: BusyLine | None = None
        self.orders, their_orders = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        state_fd = make_memory("fuse-mover")
        try:
            os.ftruncate(state_fd, mover.STATE_BYTES)
            self._state = memoryview(mmap.mmap(state_fd, mover.STATE_BYTES)).cast("Q")
            passed = (device_fd, pool_fd, state_fd, their_orders.fileno())
            self.process, self.socket = child.start(mover.__name__, passed)
        except BaseException:
            self.orders.close()
            raise
        finally:
            their_orders.close()
            os.close(state_fd)
        self._fd = self.socket.fileno()
        os.set_blocking(self._fd, False)  # takes no keyword
        self._done = 0

    def send(self, job: _Delivery, offset: int) -> bool:
        """Hand a job over; return False if it does not take one now."""
        message = mover.JOB.pack(job.unique, offset, len(job.payload))
        if _write(self._fd, message, len(message)) < 0:
            return False
        if not self.jobs:
            self.stands_since = trio.current_time()
        self.jobs.append(job)
        return True

    def ping(self) -> None:
        """Have it show that it goes on."""
        self.send(_Delivery(0, memoryview(b""), _nothing, _nothing), 0)

    def await_one(self) -> None:
        """Have it wake the loop after its next job."""
        self._state[mover.IS_AWAITED] = 1

    def left(self) -> int:
        """Return how many jobs it has not done."""
        return len(self.jobs) - (self._state[mover.DONE] - self._done)

    def take_done(self) -> list[_Delivery]:
        """Return the jobs that it has done since the last call."""
        count = self._state[mover.DONE] - self._done
        if not count:
            return []
        self._done += count
        self.stands_since = trio.current_time()
        return [self.jobs.popleft() for _ in range(count)]

    def kill(self) -> None:
        """End it now, whatever it does."""
        self.process.kill()

    def close(self) -> None:
        """Collect a process that has ended, or is about to; give up after a second."""
        self.socket.close()
        if self.line is None:  # else the sender of orders closes it
            self.orders.close()
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(_END_SECONDS)


class Movers:
    """The movers of one mount. Belongs to the loop's thread."""

    def __init__(self, plan: MoverPlan, device_fd: int, answer: Callable[[int, memoryview], None]) -> None:
        """answer: sends a reply from the loop. `run` starts them."""
        self._count = plan.count
        self._memory = plan.memory
        self._orders = plan.orders
        self._device_fd = device_fd
        self._answer = answer
        self._all: list[_Mover] = []
        # The ones that take jobs.
        self._ready: list[_Mover] = []
        self._has_jobs = trio.Event()
        self._scope = trio.CancelScope()

    async def run(self) -> None:
        """Start movers, and again when one has ended, until `end`."""
        with self._scope:
            try:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(self._watch, name="mover-watch")
                    nursery.start_soon(self._wake_when_lacking, name="mover-wake")
                    for number in range(self._count):
                        nursery.start_soon(self._keep_one, name=f"mover-{number}")
            except* Exception:  # the mount goes on without them
                log.exception("the processes for large replies failed; the daemon sends these itself")
                self.close()

    def carry(self, unique: int, payload: bytes | memoryview, on_answered: Callable[[], None]) -> bool:
        """Have a mover answer a request; return False if the caller must.

        on_answered: called once the request is answered, not before this returns.
        """
        # Nothing is given back before the payload is lent: a fetch that waits for a buffer might get the payload's. And
        # nothing after the job is sent: it may be done by now, and the caller still uses the request.
        if not self._ready or not isinstance(payload, memoryview):
            return False
        chosen = min(self._ready, key=_Mover.left)
        lent = self._memory.lend(payload) if chosen.left() < _JOBS_MAX else None
        if lent is None:
            return False
        self._collect()
        offset, give_back = lent
        if not chosen.send(_Delivery(unique, payload, give_back, on_answered), offset):
            # Once the caller has answered: a fetch that waits for a buffer would else get the payload's.
            trio.lowlevel.current_trio_token().run_sync_soon(give_back)
            return False
        if not self._has_jobs.is_set():
            self._has_jobs.set()
        return True

    def end(self) -> None:
        """Start no mover any more, and let `run` return."""
        self._scope.cancel()

    def close(self) -> None:
        """Have all requests answered and all movers end. `run` has returned."""
        for each in self._all:
            with suppress(OSError):
                each.socket.shutdown(socket.SHUT_WR)
                each.orders.shutdown(socket.SHUT_WR)
        until = trio.current_time() + _END_SECONDS
        for each in self._all:
            try:
                each.process.wait(max(0.0, until - trio.current_time()))
            except subprocess.TimeoutExpired:
                each.kill()
        for each in list(self._all):
            self._bury(each)

    # ---- inside

    def _collect(self) -> None:
        for each in self._all:
            if each.jobs:
                for job in each.take_done():
                    _finish(job)

    async def _keep_one(self) -> None:
        pause = _RESTART_SECONDS
        while True:
            try:
                each = _Mover(self._device_fd, self._memory.fd)
            except OSError as exc:
                log.warning(
                    "no process for large replies can be started; the daemon sends them error=%s", exc
                )
                pause = min(2 * pause, _RESTART_SECONDS_MAX)
            else:
                self._all.append(each)
                was_ready = await self._hear(each)
                pause = _RESTART_SECONDS if was_ready else min(2 * pause, _RESTART_SECONDS_MAX)
                log.warning(
                    "a process for large replies ended; the daemon sends them until the next one has started pid=%d",
                    each.process.pid,
                )
                self._bury(each)
                if each.process.returncode == child.STATUS_OTHER_VERSION:
                    log.warning(
                        "the package was updated; the daemon fetches, stores and sends all bytes itself until "
                        "`fusecache upgrade`, or the next mount"
                    )
                    return
            await trio.sleep(pause)

    async def _hear(self, each: _Mover) -> bool:
        """Return when a mover has ended: whether it ever took jobs."""
        was_ready = False
        while True:
            await trio.lowlevel.wait_readable(each.socket)
            try:
                message = each.socket.recv(64)
            except BlockingIOError:
                continue
            except OSError:  # it ended with our message unread
                return was_ready
            if not message:
                return was_ready
            if each.is_retired:
                continue
            if message == mover.READY:
                was_ready = True
                self._ready.append(each)
            elif message == mover.TAKES_ORDERS and self._orders is not None:
                each.line = self._orders.add(each.orders)
            self._collect()

    def _bury(self, each: _Mover) -> None:
        """A mover has ended: answer what it left, and give everything back."""
        self._collect()
        self._retire(each)
        for job in each.jobs:
            _finish(job)
        each.jobs.clear()
        self._all.remove(each)
        each.close()

    def _retire(self, each: _Mover) -> None:
        """Send no job to a mover any more, and answer what it has not done."""
        if each.is_retired:
            return
        each.is_retired = True
        if each.line is not None and self._orders is not None:
            self._orders.remove(each.line)
        if each in self._ready:
            self._ready.remove(each)
        for job in each.jobs:
            if job.unique:
                self._answer(job.unique, job.payload)

    async def _watch(self) -> None:
        """While movers have jobs: look for done ones, and for movers that stand still."""
        while True:
            with trio.move_on_after(_PING_SECONDS):
                await self._has_jobs.wait()
            for each in self._all:
                if each.line is not None and each.line.busy and not each.jobs and not each.is_retired:
                    each.ping()
            due = trio.current_time() + _LOOK_SECONDS
            await trio.sleep_until(due)
            late = trio.current_time() - due
            self._collect()
            for each in [busy for busy in self._all if busy.jobs and not busy.is_retired]:
                # While the loop was blocked, the machine and the mover may have been too.
                each.stands_since += late
                if trio.current_time() - each.stands_since > STALL_SECONDS:
                    log.warning(
                        "a process for large replies stands still, and is killed pid=%d", each.process.pid
                    )
                    each.kill()
                    # At once: a process that waits in the kernel may end much later. Its buffers stay lent until then.
                    self._retire(each)
            if self._has_jobs.is_set() and not any(each.jobs for each in self._all):
                self._has_jobs = trio.Event()

    async def _wake_when_lacking(self) -> None:
        while True:
            await self._memory.lacking()
            for each in self._all:
                if each.jobs:
                    each.await_one()
            self._collect()  # what was done just before


def _nothing() -> None:
    """Nothing is lent for a ping."""


def _finish(job: _Delivery) -> None:
    job.give_back()
    job.on_answered()
