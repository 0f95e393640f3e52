"""Requests that are taken and not answered: their memory, which of them begin, and signals that end them.

A request waits because its handler does, or is parked: its handler has not begun. `Admission` decides that.

The kernel sends FUSE_INTERRUPT for every signal, harmless ones as well. Only a process that is about to end may be told
EINTR: a page fault of a mapping would become SIGBUS, and few programs expect EINTR from stat(2). So the pending signals
are looked at (proc(5): SigPnd and others).
"""

import errno
import os
import signal
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import trio

from fusecache.fuse.admission import Admission
from fusecache.fuse.kept_requests import HELD_BYTES_MAX, SMALL_PLACES, KeptRequests
from fusecache.fuse.protocol import IN_HEADER, INTERRUPT_IN, Opcode
from fusecache.fuse.requests import KernelRequest, Malformed

# Handlers that may wait for one process. More would not read faster: the bucket is asked 64 times at once. They would
# only stand in line before those of other processes.
OF_A_PROCESS = 1024
# The kernel interrupts a request once: a second signal, such as SIGKILL, sends no event.
_LOOK_SECONDS = 0.25


@dataclass(slots=True, eq=False)
class WaitingRequest:
    """One that a signal may end. scope: ends its handler; None: that has not begun. is_interrupted: by a signal."""

    request: KernelRequest
    process: int
    scope: trio.CancelScope | None = None
    is_interrupted: bool = False


class WaitingRequests:
    """Those of one mount. Belongs to the loop's thread."""

    def __init__(self, places: KeptRequests, answer: Callable[[KernelRequest, int], None]) -> None:
        """answer: sends an errno for a request whose handler has not begun."""
        self._places = places
        self._send_error = answer
        self._nursery: trio.Nursery | None = None
        self.limit(SMALL_PLACES, HELD_BYTES_MAX)
        # Requests that a signal may end, by the kernel's number.
        self._killable: dict[int, WaitingRequest] = {}
        self._of_process: dict[int, set[WaitingRequest]] = {}
        # Of these, the ones that are looked at again.
        self._watched: dict[int, WaitingRequest] = {}
        # Requests that were parked, and begin now.
        self._ready: deque[WaitingRequest] = deque()
        self._full = trio.lowlevel.ParkingLot()

    def limit(self, requests: int, request_bytes: int) -> None:
        """Set how many requests may be taken at once, and their bytes; before the first one is."""
        self._admission: Admission[WaitingRequest] = Admission(
            requests=min(requests, SMALL_PLACES),
            request_bytes=min(request_bytes, HELD_BYTES_MAX),
            largest=self._places.buffer_bytes,
            of_a_process=OF_A_PROCESS,
        )

    def attach(self, nursery: trio.Nursery) -> None:
        """Signals are looked for in a task of this nursery."""
        self._nursery = nursery

    @property
    def has_room(self) -> bool:
        """Whether another request may be taken."""
        return self._admission.may_take

    async def wait_for_room(self) -> None:
        """Return when another request may be taken, or `end` was called."""
        # While nothing is read, the kernel cannot tell of signals.
        for waiting in self._killable.values():
            self._watch(waiting)
        await self._full.park()

    # ---- requests

    def parks(self, request: KernelRequest, count: int) -> bool:
        """Park a request, if its handler must not begin yet; return whether that is so. count: its bytes."""
        if not self._admission.full or not request.changes_nothing():
            return False
        process = process_of(request.pid)
        if process not in self._admission.full:
            return False
        waiting = WaitingRequest(request, process)
        self._admission.park(process, request.unique, waiting)
        self._let_signals_end(waiting)
        self._hold(request, count, stays=False)
        return True

    def add(self, request: KernelRequest, count: int, scope: trio.CancelScope, *, stays: bool) -> None:
        """The handler of a request waits, in a scope. stays: its bytes are in use where they are."""
        if request.changes_nothing():
            waiting = WaitingRequest(request, process_of(request.pid), scope)
            self._admission.begin(waiting.process)
            self._let_signals_end(waiting)
        self._hold(request, count, stays=stays)

    def remove(self, request: KernelRequest) -> None:
        """The handler of such a request has ended."""
        self._let_go(request)
        waiting = self._killable.get(request.unique)
        if waiting is not None:
            self._forget(waiting)
            self._begin_next(waiting.process)

    def next_ready(self) -> WaitingRequest | None:
        """Return a request that was parked, and begins now. `remove` takes it back."""
        while self._ready:
            waiting = self._ready.popleft()
            if not waiting.is_interrupted:
                return waiting
            self._begin_next(waiting.process)
        return None

    def end(self) -> None:
        """No request is taken any more, and no parked one begins."""
        for waiting in (*self._admission.all_parked(), *self._ready):
            if not waiting.is_interrupted:
                self._refuse(waiting, errno.ENOTCONN)
        self._ready.clear()
        self._full.unpark_all()

    def _begin_next(self, process: int) -> None:
        waiting = self._admission.end(process)
        if waiting is not None:
            self._ready.append(waiting)

    def _refuse(self, waiting: WaitingRequest, error: int) -> None:
        """Answer a request whose handler has not begun."""
        self._forget(waiting)
        self._send_error(waiting.request, error)
        self._let_go(waiting.request)

    def _hold(self, request: KernelRequest, count: int, *, stays: bool) -> None:
        request.place = self._places.hold(request.place, count, stays=stays)
        request.body = request.place.view[IN_HEADER.size : count]
        self._admission.hold(request.place.counts_as)

    def _let_go(self, request: KernelRequest) -> None:
        self._admission.let_go(request.place.counts_as)
        self._places.give_back(request.place)
        if self._admission.may_take:
            self._full.unpark_all()

    # ---- signals

    def is_interrupted(self, request: KernelRequest) -> bool:
        """Return whether a signal ends the handler of a request."""
        waiting = self._killable.get(request.unique)
        return waiting is not None and waiting.is_interrupted

    def on_interrupt(self, message: KernelRequest) -> None:
        """The kernel tells that a signal came for the process of a request."""
        try:
            (unique,) = message.fields(INTERRUPT_IN)
        except Malformed:
            return
        waiting = self._killable.get(unique)
        if waiting is not None and not self._ends(waiting):
            self._watch(waiting)

    def _let_signals_end(self, waiting: WaitingRequest) -> None:
        self._killable[waiting.request.unique] = waiting
        self._of_process.setdefault(waiting.process, set()).add(waiting)
        if waiting.request.is_redone:  # the kernel may have told the predecessor of a signal
            self._watch(waiting)

    def _forget(self, waiting: WaitingRequest) -> None:
        del self._killable[waiting.request.unique]
        others = self._of_process[waiting.process]
        others.remove(waiting)
        if not others:
            del self._of_process[waiting.process]

    def _watch(self, waiting: WaitingRequest) -> None:
        """End a request when a signal ends its process, of which the kernel does not tell any more."""
        if self._nursery is not None and not self._watched:
            self._nursery.start_soon(self._look_again, name="fuse-signals")
        self._watched[waiting.request.unique] = waiting

    async def _look_again(self) -> None:
        while self._watched:
            await trio.sleep(_LOOK_SECONDS)
            # One of each process, and of each answer that `is_ending` has for it.
            looks: dict[tuple[int, bool], WaitingRequest] = {}
            for unique, waiting in list(self._watched.items()):
                if self._killable.get(unique) is waiting:
                    is_read = waiting.request.opcode == Opcode.READ
                    looks.setdefault((waiting.process or -unique, is_read), waiting)
                else:
                    del self._watched[unique]
            for waiting in looks.values():
                self._ends(waiting)
                await trio.lowlevel.checkpoint()

    def _ends(self, waiting: WaitingRequest) -> bool:
        """End a request if a signal ends its process; return whether that is so, or it was answered."""
        request = waiting.request
        if self._killable.get(request.unique) is not waiting:
            return True
        # A read may be the page fault of a mapping: EINTR would end a program that handles Ctrl-C.
        by_hand = request.opcode != Opcode.READ
        if not is_ending(request.pid, by_hand=by_hand):
            return False
        # A fatal signal ends all threads of a process. To look at each takes seconds if they are thousands.
        ends_all = waiting.process and (not by_hand or is_ending(request.pid))
        for each in list(self._of_process[waiting.process]) if ends_all else [waiting]:
            each.is_interrupted = True
            if each.scope is not None:
                each.scope.cancel()
            else:
                self._admission.drop(each.process, each.request.unique)
                self._refuse(each, errno.EINTR)
        return True


# ---- processes


def _mask(*numbers: int) -> int:
    return sum(1 << (number - 1) for number in numbers)


# Signals that by default do not end a process.
_HARMLESS = _mask(
    signal.SIGCHLD, signal.SIGURG, signal.SIGWINCH, signal.SIGCONT,
    signal.SIGSTOP, signal.SIGTSTP, signal.SIGTTIN, signal.SIGTTOU,
)  # fmt: skip
_BY_HAND = _mask(signal.SIGINT)
_FIELDS = ("SigPnd", "ShdPnd", "SigBlk", "SigIgn", "SigCgt")
# The processes of threads, and when they are forgotten: the kernel uses numbers again.
_processes: dict[int, int] = {}
_PROCESSES_SECONDS = 1.0
_PROCESSES_MAX = 32 * 1024
_forgotten_at = 0.0


def is_ending(thread: int, *, by_hand: bool = False) -> bool:
    """Return whether a pending signal ends a thread's process. One that is not visible here counts as alive.

    by_hand: also if a SIGINT is pending that the program handles, as of Ctrl-C in Python.
    """
    return shows_end(_status(thread), by_hand=by_hand)


def process_of(thread: int) -> int:
    """Return the process of a thread, 0 if it is not visible here."""
    global _forgotten_at  # a cache
    now = time.monotonic()
    if now >= _forgotten_at or len(_processes) >= _PROCESSES_MAX:
        _processes.clear()
        _forgotten_at = now + _PROCESSES_SECONDS
    found = _processes.get(thread)
    if found is None:
        _, _, rest = _status(thread).partition("\nTgid:")
        found = _processes[thread] = int(rest.partition("\n")[0] or 0)
    return found


def _status(thread: int) -> str:
    """Return the text of /proc/PID/status (proc(5)), "" if it is not visible here."""
    try:
        fd = os.open(f"/proc/{thread}/status", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return ""
    try:
        return os.read(fd, 8192).decode("ascii", "replace")
    except OSError:  # it ended just now
        return ""
    finally:
        os.close(fd)


def shows_end(status: str, *, by_hand: bool) -> bool:
    """Return the same from the text of a thread's /proc/PID/status."""
    masks = dict.fromkeys(_FIELDS, 0)
    for line in status.splitlines():
        name, _, value = line.partition(":")
        if name in masks:
            masks[name] = int(value, 16)
    pending = (masks["SigPnd"] | masks["ShdPnd"]) & ~masks["SigBlk"]
    fatal = pending & ~masks["SigIgn"] & ~masks["SigCgt"] & ~_HARMLESS
    return bool(fatal or (by_hand and pending & _BY_HAND))
