"""Requests that are taken and not answered: their memory, whose handlers go on, and signals that end them.

All requests of a mount come through one queue of the kernel, in the order in which programs made them. A request that
waits in that queue costs nothing, but everything behind it waits too, so requests stay there only when memory ends. As
many handlers wait for one process as is its share. Its next request that only reads is taken, and its handler begins
when one of these ends. Requests of other processes begin at once.

The kernel sends FUSE_INTERRUPT for every signal, harmless ones as well. Only a process that is about to end may be told
EINTR: a page fault of a mapping would become SIGBUS, and few programs expect EINTR from stat(2). So the pending signals
are looked at (proc(5): SigPnd and others).
"""

import errno
import os
import signal
import sys
import time
from dataclasses import dataclass

import trio

from fusecache.fuse.kept_requests import HELD_BYTES_MAX, SMALL_PLACES, KeptRequests
from fusecache.fuse.protocol import IN_HEADER, INTERRUPT_IN, Opcode
from fusecache.fuse.requests import KernelRequest, Malformed
from fusecache.fuse.values import FUSEError

# Handlers that may wait for one process. More would not read faster: the bucket is asked 64 times at once. They would
# only stand in line before those of other processes.
OF_A_PROCESS = 1024
# The kernel interrupts a request once: a second signal, such as SIGKILL, sends no event.
_LOOK_SECONDS = 0.25


class Room:
    """How many requests may be taken at once, and of how many bytes. may_take: whether the next one may be."""

    def __init__(self, requests: int, request_bytes: int, largest: int) -> None:
        """Limits. largest: bytes of the largest request. The next one may be as large."""
        self.may_take = True
        self._requests_max, self._bytes_max, self._largest = requests, request_bytes, largest
        self._requests = self._bytes = 0

    def take(self, size: int) -> None:
        """A request waits. size: its bytes, as far as they count."""
        self._count(1, size)

    def give_back(self, size: int) -> None:
        """Such a request was answered."""
        self._count(-1, -size)

    def _count(self, requests: int, size: int) -> None:
        self._requests += requests
        self._bytes += size
        # One request is always taken: else none could ever be.
        self.may_take = not self._requests or (
            self._requests < self._requests_max and self._bytes + self._largest <= self._bytes_max
        )


class Share:
    """Of one process; 0 is any that is not known, and has no limit. requests: that a signal may end.

    handlers: how many of them have begun; queue: of the others, as these are too many.
    """

    def __init__(self, process: int) -> None:
        self.process = process
        self.limit = OF_A_PROCESS if process else sys.maxsize
        self.requests: set[WaitingRequest] = set()
        self.handlers = 0
        self.queue = trio.lowlevel.ParkingLot()

    @property
    def is_full(self) -> bool:
        """Whether the next handler must not begin."""
        return self.handlers >= self.limit


@dataclass(slots=True, eq=False)
class WaitingRequest:
    """One that a signal may end. share: of its process; scope: ends its handler. is_interrupted: by a signal."""

    request: KernelRequest
    share: Share
    scope: trio.CancelScope
    has_begun: bool
    is_interrupted: bool = False


class WaitingRequests:
    """Those of one mount. Belongs to the loop's thread."""

    def __init__(self, places: KeptRequests) -> None:
        self._places = places
        self._nursery: trio.Nursery | None = None
        self.limit(SMALL_PLACES, HELD_BYTES_MAX)
        # Requests that a signal may end, by the kernel's number.
        self._killable: dict[int, WaitingRequest] = {}
        # Of these, the ones that are looked at again.
        self._watched: dict[int, WaitingRequest] = {}
        self._shares: dict[int, Share] = {}
        # How many of them are full.
        self._full = 0
        self._has_ended = False
        self._no_room = trio.lowlevel.ParkingLot()

    def limit(self, requests: int, request_bytes: int) -> None:
        """Set how many requests may be taken at once, and their bytes; before the first one is."""
        self._room = Room(
            min(requests, SMALL_PLACES), min(request_bytes, HELD_BYTES_MAX), self._places.buffer_bytes
        )

    def attach(self, nursery: trio.Nursery) -> None:
        """Signals are looked for in a task of this nursery."""
        self._nursery = nursery

    @property
    def has_room(self) -> bool:
        """Whether another request may be taken."""
        return self._room.may_take

    async def wait_for_room(self) -> None:
        """Return when another request may be taken, or `end` was called."""
        # While nothing is read, the kernel cannot tell of signals.
        for waiting in self._killable.values():
            self._watch(waiting)
        await self._no_room.park()

    # ---- requests

    def full_share(self, request: KernelRequest) -> Share | None:
        """Return the share of which a handler must wait for its `turn`; None: it may begin."""
        share = (
            self._shares.get(process_of(request.pid)) if self._full and request.changes_nothing() else None
        )
        return share if share is not None and share.is_full else None

    async def turn(self, request: KernelRequest, share: Share) -> None:
        """Return when the handler of a request may begin. Raises FUSEError if `end` is called before."""
        await share.queue.park()
        if self._has_ended:
            raise FUSEError(errno.ENOTCONN)
        self._killable[request.unique].has_begun = True

    def add(
        self, request: KernelRequest, count: int, scope: trio.CancelScope, full: Share | None, *, stays: bool
    ) -> None:
        """The handler of a request waits, in a scope. count: its bytes; stays: they are in use where they are.

        full: the share in which it waits for its turn.
        """
        if request.changes_nothing():
            share = full
            if share is None:
                process = process_of(request.pid)
                share = self._shares.setdefault(process, Share(process))
                share.handlers += 1
                self._full += share.is_full
            waiting = WaitingRequest(request, share, scope, has_begun=full is None)
            self._killable[request.unique] = waiting
            share.requests.add(waiting)
            if request.is_redone:  # the kernel may have told the predecessor of a signal
                self._watch(waiting)
        request.place = self._places.hold(request.place, count, stays=stays)
        request.body = request.place.view[IN_HEADER.size : count]
        self._room.take(request.place.counts_as)

    def remove(self, request: KernelRequest) -> None:
        """The handler of such a request has ended."""
        self._room.give_back(request.place.counts_as)
        if not request.is_carried:
            self._places.give_back(request.place)
        if self._room.may_take:
            self._no_room.unpark_all()
        waiting = self._killable.pop(request.unique, None)
        if waiting is None:
            return
        share = waiting.share
        share.requests.remove(waiting)
        if waiting.has_begun and not share.queue.unpark():  # else the next one counts in its place
            self._full -= share.is_full
            share.handlers -= 1
        if not share.requests:
            del self._shares[share.process]

    def end(self) -> None:
        """No request is taken any more, and no handler begins that waits for its turn."""
        self._has_ended = True
        self._no_room.unpark_all()
        for share in self._shares.values():
            share.queue.unpark_all()

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
                    looks.setdefault((waiting.share.process or -unique, is_read), waiting)
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
        ends_all = waiting.share.process and (not by_hand or is_ending(request.pid))
        for each in list(waiting.share.requests) if ends_all else [waiting]:
            each.is_interrupted = True
            each.scope.cancel()
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
