"""Requests that are taken and not answered: their memory, which of them begin, and signals that end them.

A request waits because its handler does, or is parked: its handler has not begun. `Admission` decides that.
"""

import errno
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import trio

from fusecache.fuse.admission import Admission
from fusecache.fuse.kept_requests import HELD_BYTES_MAX, SMALL_PLACES, KeptRequests
from fusecache.fuse.protocol import IN_HEADER, INTERRUPT_IN, Opcode
from fusecache.fuse.requests import KernelRequest, Malformed
from fusecache.fuse.signals import is_ending, process_of

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
        # Those that a signal may end, by the kernel's number.
        self._killable: dict[int, WaitingRequest] = {}
        # Of these, the ones that are looked at again.
        self._watched: dict[int, WaitingRequest] = {}
        # Were parked, and begin now.
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
        # The kernel's word of signals is not heard meanwhile.
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
        waiting = self._killable.pop(request.unique, None)
        if waiting is not None:
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
        del self._killable[waiting.request.unique]
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
        if waiting.request.is_redone:  # the kernel may have told the predecessor of a signal
            self._watch(waiting)

    def _watch(self, waiting: WaitingRequest) -> None:
        """End a request when a signal ends its process, of which the kernel does not tell any more."""
        if self._nursery is not None and not self._watched:
            self._nursery.start_soon(self._look_again, name="fuse-signals")
        self._watched[waiting.request.unique] = waiting

    async def _look_again(self) -> None:
        while self._watched:
            await trio.sleep(_LOOK_SECONDS)
            processes: dict[int, list[WaitingRequest]] = {}
            for unique, waiting in list(self._watched.items()):
                if self._killable.get(unique) is waiting:
                    processes.setdefault(waiting.process or -unique, []).append(waiting)
                else:
                    del self._watched[unique]
            for first, *others in processes.values():
                # What ends a process is pending for all its threads.
                if self._ends(first):
                    for waiting in others:
                        self._ends(waiting)
                await trio.lowlevel.checkpoint()

    def _ends(self, waiting: WaitingRequest) -> bool:
        """End a request if a signal ends its process; return whether that is so, or it was answered."""
        request = waiting.request
        if self._killable.get(request.unique) is not waiting:
            return True
        # A read may be the page fault of a mapping: EINTR would end a program that handles Ctrl-C.
        is_ended = is_ending(request.pid, by_hand=request.opcode != Opcode.READ)
        if is_ended:
            waiting.is_interrupted = True
            if waiting.scope is not None:
                waiting.scope.cancel()
            else:
                self._admission.drop(waiting.process, request.unique)
                self._refuse(waiting, errno.EINTR)
        return is_ended
