"""The session of one mount: tasks that read the kernel's requests, run their handlers and answer.

Leader and followers: one task, the leader, waits for requests and answers them one after the other. Most handlers never
wait, and cost no switch of tasks. When one does, another task takes the lead, and the first answers its request later.
While a program makes one call after the other, the leader looks for the next one for a moment, instead of sleeping.

Invariants:
1. A request is answered exactly once; with ENOTCONN if `serve` is cancelled while its handler runs. After the first
   such answer no request is read.
2. Whatever the kernel sends, and whatever a handler raises, the session goes on until the mount is gone.
3. Only requests that change nothing are interrupted (`KernelRequest.changes_nothing`).
"""

import errno
import fcntl
import logging
import os
import struct
from collections.abc import Awaitable, Callable, Coroutine, Generator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from time import perf_counter
from types import coroutine
from typing import Any

import trio

from fusecache.fuse import mounting
from fusecache.fuse.device import RELEASE_BYTES, Device, RequestBuffer
from fusecache.fuse.handlers import RequestHandlers
from fusecache.fuse.kept_mount import KeptMount
from fusecache.fuse.kept_requests import KeptBuffer, KeptRequests
from fusecache.fuse.negotiation import Negotiated, negotiate
from fusecache.fuse.notifier import Notifier
from fusecache.fuse.protocol import (
    BACKING_MAP,
    FUSE_DEV_IOC_BACKING_CLOSE,
    FUSE_DEV_IOC_BACKING_OPEN,
    IN_HEADER,
    INTERRUPT_IN,
    Opcode,
)
from fusecache.fuse.requests import SILENT, KernelRequest, Malformed, Payload, Requests
from fusecache.fuse.self_test import pass_self_test
from fusecache.fuse.signals import is_ending
from fusecache.fuse.values import FUSEError, MountPlan, MountRefused

log = logging.getLogger(__name__)

# How long the leader answers requests before other tasks of the loop get their turn.
_TURN_SECONDS = 0.001
# A processor that sleeps takes 0.1 ms to wake in a virtual machine, longer than the request itself. So after some
# requests that came within this time of the last answer, the leader looks that long for the next one. Not if a handler
# waits, as the loop would learn late that it may go on; nor if there is no other processor for the program.
_SOON_SECONDS = 0.0002
_SOON_IN_A_ROW = 8
# Idle tasks and buffers that are kept for the next burst.
_IDLE_TASKS = 64
_IDLE_BUFFERS = 8
# The kernel interrupts a request once: a second signal, such as SIGKILL, sends no event.
_LOOK_SECONDS = 0.25


@dataclass(slots=True)
class _Waiting:
    """A request whose handler waits, and the scope that ends it. is_interrupted: by a signal."""

    request: KernelRequest
    scope: trio.CancelScope
    is_interrupted: bool = False


class OwnSession:
    """One mount, served through /dev/fuse without libfuse. Its methods belong to the loop's thread.

    library: which implementation this is. negotiated: what the kernel agreed to.
    """

    library = "own"

    def __init__(
        self, operations: RequestHandlers, fd: int, mountpoint: str = "", kept: KeptMount | None = None
    ) -> None:
        """Agree with the kernel on features, and test the mount, unless a predecessor has done that.

        fd: the mount's; mountpoint: "" if it has none. kept: what outlives this process, if a keeper holds it. close()
        closes the descriptor, and unmounts. Raises MountRefused, and then leaves both to the caller.
        """
        self._device = Device(fd)
        self._mountpoint = mountpoint
        self._kept = kept
        self._has_served = False
        self._buffers: list[RequestBuffer] = []
        agreed = kept.negotiated() if kept is not None else None
        self.negotiated: Negotiated = agreed or negotiate(self._device, operations)
        # Requests that came before `serve`.
        self._early: list[tuple[RequestBuffer, int]] = []
        if agreed is None and mountpoint:
            self._early = self._tested(mountpoint)
        self._places: KeptRequests | None = None
        # Numbers of the requests that a predecessor had begun.
        self._begun: set[int] = set()
        if kept is not None:
            self._places = kept.requests(self.negotiated.buffer_bytes)
            self._begin_kept(kept)
        self._notifier = Notifier(fd)
        self._on_unmounted = operations.on_unmounted
        self._table: dict[int, Callable[[KernelRequest], Awaitable[Payload]]] = Requests(operations).table
        self._waiting: dict[int, _Waiting] = {}
        self._followers = trio.lowlevel.ParkingLot()
        self._has_leader = False
        self._has_ended = False
        self._tasks = 0
        self._max_tasks = 0
        self._expects_large = False
        self._answered_at = 0.0
        # Requests that came soon after the answer to the one before.
        self._soon_in_a_row = 0
        self._has_processors = len(os.sched_getaffinity(0)) > 1
        self._nursery: trio.Nursery | None = None

    def _tested(self, mountpoint: str) -> list[tuple[RequestBuffer, int]]:
        try:
            return pass_self_test(self._device, mountpoint, self.negotiated.buffer_bytes)
        except OSError as exc:
            raise MountRefused(f"the self-test failed: {exc.strerror}") from exc

    def _begin_kept(self, kept: KeptMount) -> None:
        """Keep what a successor needs, or take over what a predecessor left."""
        if not kept.is_resumed:
            kept.keep_negotiated(self.negotiated)
            kept.keep(self._mountpoint, self._device.fd)
        for left in kept.take_left():
            unique = IN_HEADER.unpack_from(left.buffer.view)[2]
            if left.reply is None:
                self._begun.add(unique)
                self._early.append((left.buffer, left.size))
            else:
                with suppress(OSError):
                    self._device.send(unique, left.reply[0], error=left.reply[1])
                self._give_back(left.buffer)

    @classmethod
    def mount(
        cls, operations: RequestHandlers, plan: MountPlan, kept: KeptMount | None = None
    ) -> "OwnSession":
        """Mount a file system, or go on with a predecessor's mount.

        kept: what outlives this process. Raises MountRefused, and leaves nothing mounted then.
        """
        if kept is not None and kept.is_resumed:
            return cls(operations, kept.device_fd, plan.mountpoint, kept)
        fd = mounting.mount(plan)
        try:
            return cls(operations, fd, plan.mountpoint, kept)
        except BaseException:
            os.close(fd)
            mounting.unmount(plan.mountpoint)
            raise

    async def serve(self, max_tasks: int = 4096) -> None:
        """Answer requests until the mount is gone, or this is cancelled. max_tasks: requests in handlers at once."""
        self._max_tasks = max_tasks
        self._has_served = True
        if self._kept is not None:
            self._kept.keep(self._mountpoint, self._device.fd)
        try:
            async with trio.open_nursery() as self._nursery:
                self._start_leader()
        finally:
            self._end()

    def invalidate_entry(self, parent_inode: int, name: bytes) -> None:
        """Make the kernel look a name up again. Returns at once, before it happens."""
        self._notifier.invalidate_entry(parent_inode, name)

    def invalidate_inode(self, inode: int) -> None:
        """Make the kernel drop an inode's attributes and clean pages.

        Blocks, perhaps until a read of such a page is answered: call it in a thread. Raises OSError, ENOENT if the
        kernel does not know the inode.
        """
        self._notifier.invalidate_inode(inode)

    @property
    def can_pass_through(self) -> bool:
        """Whether the kernel may read files itself that `open_backing` has given a number."""
        return "PASSTHROUGH" in self.negotiated.features

    def open_backing(self, fd: int) -> int:
        """Return the kernel's number for an open regular file. `open` may answer with it: the kernel reads that file.

        Raises OSError: EPERM without CAP_SYS_ADMIN, ELOOP for a file on a stacked file system, EOPNOTSUPP.
        """
        number: int = fcntl.ioctl(
            self._device.fd, FUSE_DEV_IOC_BACKING_OPEN, bytearray(BACKING_MAP.pack(fd, 0, 0))
        )
        return number

    def close_backing(self, backing_id: int) -> None:
        """Give a number back. Files that are open with it stay readable."""
        if self._device.fd >= 0:  # else the kernel has freed all of them
            fcntl.ioctl(self._device.fd, FUSE_DEV_IOC_BACKING_CLOSE, struct.pack("<I", backing_id))

    def close(self) -> None:
        """Unmount, unless that has happened. `serve` must have ended."""
        fd = self._device.fd
        if fd < 0:
            return
        is_mounted = bool(self._mountpoint) and mounting.is_connected(fd)
        if self._kept is not None and self._kept.is_resumed and not self._has_served:
            is_mounted = False  # another successor may have more luck
        elif self._kept is not None:
            self._kept.end()
        self._notifier.close()
        # First: else the unmount would wait for answers.
        self._device.close()
        if is_mounted:
            mounting.unmount(self._mountpoint)

    # ---- leader and followers

    def _start_leader(self) -> None:
        assert self._nursery is not None
        self._has_leader = True
        self._tasks += 1
        self._nursery.start_soon(self._work, name=f"fuse-{self._tasks}")

    def _hand_over(self) -> None:
        """Give the lead to another task, as this one's handler waits."""
        if len(self._followers):
            self._followers.unpark()
        elif self._tasks < self._max_tasks:
            self._start_leader()
        else:
            self._has_leader = False  # the first task that is done takes it

    async def _work(self) -> None:
        """Lead, answer a request whose handler waits, lead or follow. Begins as the leader."""
        try:
            while not self._has_ended:
                # A signal cancels it, to end the handler that waits.
                with trio.CancelScope() as scope:
                    await self._lead(scope)
                if not await self._follow():
                    return
        finally:
            self._tasks -= 1

    async def _follow(self) -> bool:
        """Wait to be the leader; return False if this task is not needed any more."""
        if self._has_ended:
            return False
        if not self._has_leader:
            self._has_leader = True
            return True
        if len(self._followers) >= _IDLE_TASKS:
            return False
        await self._followers.park()
        return not self._has_ended

    def _end(self) -> None:
        self._has_ended = True
        self._on_unmounted()
        self._followers.unpark_all()

    async def _lead(self, scope: trio.CancelScope) -> None:
        """Answer requests until a handler waited, or the mount is gone."""
        turn_began = perf_counter()
        while not self._has_ended:
            if self._early:
                buffer, count = self._early.pop(0)
            else:
                buffer = self._buffers.pop() if self._buffers else self._new_buffer()
                count = self._receive(buffer)
            if count <= 0:
                self._buffers.append(buffer)
                if count < 0:
                    self._end()
                    return
                self._expects_large = False
                await trio.lowlevel.wait_readable(self._device.fd)
                turn_began = perf_counter()
                continue
            self._expects_large = count >= RELEASE_BYTES
            if await self._serve_one(buffer, count, scope):
                return
            self._answered_at = perf_counter()
            if self._answered_at - turn_began >= _TURN_SECONDS:
                await trio.lowlevel.checkpoint()
                turn_began = perf_counter()

    def _receive(self, buffer: RequestBuffer) -> int:
        """Read the next request as `Device.receive` does; if more come soon after each other, wait a moment for it."""
        count = self._device.receive(buffer, release=self._expects_large)
        if not count and self._soon_in_a_row >= _SOON_IN_A_ROW and self._may_look():
            end = self._answered_at + _SOON_SECONDS
            while not count and perf_counter() < end:
                count = self._device.receive(buffer, release=self._expects_large)
        if count:
            is_soon = perf_counter() - self._answered_at < _SOON_SECONDS
            self._soon_in_a_row = self._soon_in_a_row + 1 if is_soon else 0
        return count

    def _may_look(self) -> bool:
        return self._tasks == len(self._followers) + 1 and self._has_processors

    # ---- one request

    async def _serve_one(self, buffer: RequestBuffer, count: int, scope: trio.CancelScope) -> bool:
        """Answer the request in a buffer, and give the buffer back; return whether another task leads now."""
        try:
            request = KernelRequest(buffer.view[:count])
        except Malformed:
            log.warning("a message of the kernel is too short bytes=%d", count)
            self._give_back(buffer)
            return False
        if request.opcode == Opcode.INTERRUPT:
            self._interrupt(request)
            self._give_back(buffer)
            return False
        if isinstance(buffer, KeptBuffer):
            request.place = buffer
            request.is_redone = request.unique in self._begun
        handler = self._answer(request)
        has_waited = is_held = False
        # Of a write, the bytes are used until its end.
        needs_buffer = request.opcode == Opcode.WRITE

        def on_wait() -> None:
            nonlocal has_waited, is_held
            has_waited = True
            if request.changes_nothing():
                self._let_signals_end(request, scope)
            is_held = needs_buffer or not self._move_out(request, buffer, count)
            if not is_held:
                self._give_back(buffer)
            self._hand_over()

        try:
            await _watched(handler, on_wait)
        finally:
            if has_waited:
                self._waiting.pop(request.unique, None)
            if is_held or not has_waited:
                self._give_back(buffer)
            elif request.place is not None and self._places is not None:
                self._places.give_back(request.place)
        return has_waited

    def _move_out(self, request: KernelRequest, buffer: RequestBuffer, count: int) -> bool:
        """Return whether a buffer may be used again while its request is not answered."""
        if request.place is None or self._places is None:
            return True
        place = self._places.copy_of(buffer, count)
        if place is not None:
            request.place = place
        return place is not None

    def _new_buffer(self) -> RequestBuffer:
        if self._places is not None:
            return self._places.new()
        return RequestBuffer(self.negotiated.buffer_bytes)

    def _give_back(self, buffer: RequestBuffer) -> None:
        if self._places is None:
            if len(self._buffers) < _IDLE_BUFFERS:
                self._buffers.append(buffer)
        elif isinstance(buffer, KeptBuffer):  # else of the self-test, before anything was kept
            if buffer.is_small or len(self._buffers) >= _IDLE_BUFFERS:
                self._places.give_back(buffer)
            else:
                buffer.clear()
                self._buffers.append(buffer)

    async def _answer(self, request: KernelRequest) -> None:
        payload: Payload = b""
        error = 0
        try:
            handler = self._table.get(request.opcode)
            if handler is None:
                error = errno.ENOSYS
            else:
                payload = await handler(request)
        except Malformed:
            log.warning("a request is malformed opcode=%d bytes=%d", request.opcode, len(request.body))
            error = errno.EINVAL
        except FUSEError as exc:
            error = exc.errno
        except Exception:
            log.exception("a handler failed opcode=%d", request.opcode)
            error = errno.EIO
        except (trio.Cancelled, BaseExceptionGroup) as exc:  # the group: of a nursery in a handler
            self._fail(request, self._error_of_cancelled(request))
            failures = exc.split(trio.Cancelled)[1] if isinstance(exc, BaseExceptionGroup) else None
            if not isinstance(failures, Exception):
                raise
            # Raised, it would end the session. The next wait of the task is cancelled too.
            log.error("a handler failed opcode=%d", request.opcode, exc_info=failures)
            return
        if error:
            self._fail(request, error)
        elif request.opcode not in SILENT:
            self._reply(request, payload, 0)

    def _fail(self, request: KernelRequest, error: int) -> None:
        """Answer a request whose handler failed."""
        # Each entry that was added holds a reference of the kernel, so it is sent, and not the error. The kernel gets
        # the error when it asks for more.
        listed = request.token.payload() if request.token is not None else b""
        if request.opcode not in SILENT:
            self._reply(request, listed, 0 if listed else error)

    def _reply(self, request: KernelRequest, payload: Payload, error: int) -> None:
        request.keep_reply(payload, error)
        try:
            self._device.send(request.unique, payload, error=error)
        except OSError as exc:
            log.error("the kernel refused a reply opcode=%d error=%s", request.opcode, exc)
            if not error:
                self._reply(request, b"", errno.EIO)

    # ---- interrupts

    def _let_signals_end(self, request: KernelRequest, scope: trio.CancelScope) -> None:
        waiting = self._waiting[request.unique] = _Waiting(request, scope)
        if request.is_redone:  # the kernel may have told the predecessor of a signal
            self._watch(waiting)

    def _error_of_cancelled(self, request: KernelRequest) -> int:
        """Return the error of a request whose handler was cancelled: by a signal, or as `serve` ends."""
        waiting = self._waiting.get(request.unique)
        if waiting is not None and waiting.is_interrupted:
            return errno.EINTR
        # The mount is going away. Without an answer, pages of the request would stay locked. The program may end now:
        # nothing that it sends later is served, else its files would look closed.
        self._end()
        return errno.ENOTCONN

    def _interrupt(self, message: KernelRequest) -> None:
        try:
            (unique,) = message.fields(INTERRUPT_IN)
        except Malformed:
            return
        waiting = self._waiting.get(unique)
        if waiting is not None and not self._ends(waiting):
            self._watch(waiting)

    def _watch(self, waiting: _Waiting) -> None:
        """End a request when a signal ends its process, of which the kernel does not tell any more."""
        if self._nursery is not None:
            self._nursery.start_soon(self._look_again, waiting, name="fuse-signals")

    async def _look_again(self, waiting: _Waiting) -> None:
        unique = waiting.request.unique
        while True:
            await trio.sleep(_LOOK_SECONDS)
            if self._has_ended or self._waiting.get(unique) is not waiting or self._ends(waiting):
                return

    def _ends(self, waiting: _Waiting) -> bool:
        """Cancel a request's handler if a signal ends it; return whether that is so."""
        request = waiting.request
        # A read may be the page fault of a mapping: EINTR would end a program that handles Ctrl-C.
        is_ended = is_ending(request.pid, by_hand=request.opcode != Opcode.READ)
        if is_ended:
            waiting.is_interrupted = True
            waiting.scope.cancel()
        return is_ended


@coroutine
def _watched(task: Coroutine[Any, Any, None], on_wait: Callable[[], None]) -> Generator[Any, Any, None]:
    """Run a coroutine; call `on_wait` once, before its first wait."""
    try:
        trap = task.send(None)
    except StopIteration:
        return
    on_wait()
    while True:
        try:
            answer = yield trap
        except BaseException as exc:  # noqa: BLE001  # the coroutine's to handle
            resume: Callable[[], Any] = partial(task.throw, exc)
        else:
            resume = partial(task.send, answer)
        try:
            trap = resume()
        except StopIteration:
            return
