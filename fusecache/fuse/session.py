"""The session of one mount: tasks that read the kernel's requests, run their handlers and answer.

Leader and followers: one task, the leader, waits for requests and answers them one after the other. Most handlers never
wait, and cost no switch of tasks. When one does, another task takes the lead, and the first answers its request later.
While a program makes one call after the other, the leader looks for the next one for a moment, instead of sleeping.
Which requests are taken, and which of their handlers begin, `WaitingRequests` decides.

Invariants:
1. A request is answered exactly once; with ENOTCONN if `serve` is cancelled before its handler has ended. After the
   first such answer no request is read.
2. Whatever the kernel sends, and whatever a handler raises, the session goes on until the mount is gone.
3. Only requests that change nothing are interrupted (`KernelRequest.changes_nothing`).
"""

import errno
import fcntl
import logging
import os
import struct
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Generator
from contextlib import suppress
from functools import partial
from time import perf_counter
from types import coroutine
from typing import Any

import trio

from fusecache.fuse import mounting
from fusecache.fuse.device import RELEASE_BYTES, Device, RequestBuffer
from fusecache.fuse.handlers import RequestHandlers
from fusecache.fuse.kept_mount import KeptMount
from fusecache.fuse.kept_requests import HELD_BYTES_MAX, SMALL_PLACES, KeptBuffer, KeptRequests
from fusecache.fuse.movers import MoverPlan, Movers
from fusecache.fuse.negotiation import Negotiated, negotiate, pass_self_test
from fusecache.fuse.notifier import Notifier
from fusecache.fuse.protocol import (
    BACKING_MAP,
    FUSE_DEV_IOC_BACKING_CLOSE,
    FUSE_DEV_IOC_BACKING_OPEN,
    IN_HEADER,
    Opcode,
)
from fusecache.fuse.requests import SILENT, KernelRequest, Malformed, Payload, Requests
from fusecache.fuse.values import FUSEError, MountPlan, MountRefused
from fusecache.fuse.waiting import Share, WaitingRequests

log = logging.getLogger(__name__)

# How long the leader answers requests before other tasks of the loop get their turn.
_TURN_SECONDS = 0.001
# A processor that sleeps takes 0.1 ms to wake in a virtual machine, longer than the request itself. So after some
# requests that came within this time of the last answer, the leader looks that long for the next one. Not if a handler
# waits, as the loop would learn late that it may go on; nor if there is no other processor for the program.
_SOON_SECONDS = 0.0002
_SOON_IN_A_ROW = 8
# Idle tasks that are kept for the next burst.
_IDLE_TASKS = 64


class OwnSession:
    """One mount, served through /dev/fuse without libfuse. Its methods belong to the loop's thread.

    library: which implementation this is. negotiated: what the kernel agreed to.
    """

    library = "own"

    def __init__(
        self,
        operations: RequestHandlers,
        fd: int,
        mountpoint: str = "",
        kept: KeptMount | None = None,
        movers: MoverPlan | None = None,
    ) -> None:
        """Agree with the kernel on features, and test the mount, unless a predecessor has done that.

        fd: the mount's; mountpoint: "" if it has none. kept: what outlives this process, if a keeper holds it. movers:
        processes that send large replies. close() closes the descriptor, and unmounts. Raises MountRefused, and then
        leaves both to the caller.
        """
        self._device = Device(fd)
        self._mountpoint = mountpoint
        self._kept = kept
        self._has_served = False
        agreed = kept.negotiated() if kept is not None else None
        self.negotiated: Negotiated = agreed or negotiate(self._device, operations)
        early = self._tested(mountpoint) if agreed is None and mountpoint else []
        largest = self.negotiated.buffer_bytes
        self._places = KeptRequests(-1, largest) if kept is None else kept.requests(largest)
        # Requests that came before `serve`.
        self._early: deque[tuple[KeptBuffer, int]] = deque()
        # Numbers of the requests that a predecessor had begun.
        self._begun: set[int] = set()
        if kept is not None:
            self._begin_kept(kept)
        for buffer, count in early:
            place = self._places.take()
            place.view[:count] = buffer.view[:count]
            self._early.append((place, count))
        self._notifier = Notifier(fd)
        self._on_unmounted = operations.on_unmounted
        self._table: dict[int, Callable[[KernelRequest], Awaitable[Payload]]] = Requests(operations).table
        self._waiting = WaitingRequests(self._places)
        self._followers = trio.lowlevel.ParkingLot()
        self._has_ended = False
        self._tasks = 0
        self._expects_large = False
        self._answered_at = 0.0
        # Requests that came soon after the answer to the one before.
        self._soon_in_a_row = 0
        self._has_processors = len(os.sched_getaffinity(0)) > 1
        self._nursery: trio.Nursery | None = None
        self._movers = Movers(movers, fd, self._send_large) if movers is not None and movers.count else None

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
                self._places.give_back(left.buffer)

    @classmethod
    def mount(
        cls,
        operations: RequestHandlers,
        plan: MountPlan,
        kept: KeptMount | None = None,
        movers: MoverPlan | None = None,
    ) -> "OwnSession":
        """Mount a file system, or go on with a predecessor's mount.

        kept, movers: as for the session. Raises MountRefused, and leaves nothing mounted then.
        """
        if kept is not None and kept.is_resumed:
            return cls(operations, kept.device_fd, plan.mountpoint, kept, movers)
        fd = mounting.mount(plan)
        try:
            return cls(operations, fd, plan.mountpoint, kept, movers)
        except BaseException:
            os.close(fd)
            mounting.unmount(plan.mountpoint)
            raise

    async def serve(self, max_bytes: int = HELD_BYTES_MAX, max_requests: int = SMALL_PLACES) -> None:
        """Answer requests until the mount is gone, or this is cancelled.

        max_bytes, max_requests: of requests that wait at once. These are also the highest values.
        """
        self._waiting.limit(max_requests, max_bytes)
        self._has_served = True
        if self._kept is not None:
            self._kept.keep(self._mountpoint, self._device.fd)
        try:
            async with trio.open_nursery() as self._nursery:
                self._waiting.attach(self._nursery)
                if self._movers is not None:
                    self._nursery.start_soon(self._movers.run, name="movers")
                self._start_leader()
        finally:
            self._end()
            if self._movers is not None:
                self._movers.close()

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
        self._tasks += 1
        self._nursery.start_soon(self._work, name=f"fuse-{self._tasks}")

    def _hand_over(self) -> None:
        """Give the lead to another task, as this one's handler waits."""
        if len(self._followers):
            self._followers.unpark()
        else:
            self._start_leader()

    async def _work(self) -> None:
        """Lead, answer a request whose handler waits, lead or follow.

        Begins as the leader.
        """
        try:
            while not self._has_ended:
                # A signal cancels it, to end the handler that waits.
                with trio.CancelScope() as scope:
                    await self._lead(scope)
                if not await self._follow():
                    return
        finally:
            self._tasks -= 1
            # Not before: a handler may wait for a buffer, or for bytes, that a mover has. One that stands is killed.
            if self._has_ended and not self._tasks and self._movers is not None:
                self._movers.end()

    async def _follow(self) -> bool:
        """Wait to be the leader; return False if this task is not needed any more."""
        if self._has_ended or len(self._followers) >= _IDLE_TASKS:
            return False
        await self._followers.park()
        return not self._has_ended

    def _end(self) -> None:
        self._has_ended = True
        self._on_unmounted()
        self._followers.unpark_all()
        self._waiting.end()

    async def _lead(self, scope: trio.CancelScope) -> None:
        """Answer requests until a handler waited, or the mount is gone."""
        turn_began = perf_counter()
        while not self._has_ended:
            if not self._waiting.has_room:
                await self._waiting.wait_for_room()
                turn_began = perf_counter()
                continue
            if self._early:
                buffer, count = self._early.popleft()
            else:
                buffer = self._places.take()
                count = self._receive(buffer)
            if count <= 0:
                self._places.give_back(buffer)
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

    async def _serve_one(self, place: KeptBuffer, count: int, scope: trio.CancelScope) -> bool:
        """Answer the request in a place, and give the place back; return whether another task leads now."""
        try:
            request = KernelRequest(place.view[:count])
        except Malformed:
            log.warning("a message of the kernel is too short bytes=%d", count)
            self._places.give_back(place)
            return False
        if request.opcode == Opcode.INTERRUPT:
            self._waiting.on_interrupt(request)
            self._places.give_back(place)
            return False
        request.place = place
        request.is_redone = request.unique in self._begun
        full = self._waiting.full_share(request)
        has_waited = False

        def on_wait() -> None:
            nonlocal has_waited
            has_waited = True
            # Of a write, the bytes are used until its end.
            self._waiting.add(request, count, scope, full, stays=request.opcode == Opcode.WRITE)
            self._hand_over()

        try:
            await _watched(self._answer(request, full), on_wait)
        finally:
            if has_waited:
                self._waiting.remove(request)
            elif request.is_carried:
                request.place = self._places.hold(place, count, stays=False)
            else:
                self._places.give_back(place)
        return has_waited

    async def _answer(self, request: KernelRequest, full: Share | None) -> None:
        payload: Payload = b""
        error = 0
        try:
            if full is not None:
                await self._waiting.turn(request, full)
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
        if len(payload) >= RELEASE_BYTES and self._movers is not None:
            # A successor answers the request again, if this process dies before a mover has answered it.
            answered = partial(self._on_carried, request)
            request.is_carried = self._movers.carry(request.unique, payload, answered)
            if request.is_carried:
                return
        try:
            self._device.send(request.unique, payload, error=error)
        except OSError as exc:
            log.error("the kernel refused a reply opcode=%d error=%s", request.opcode, exc)
            if not error:
                self._reply(request, b"", errno.EIO)

    def _on_carried(self, request: KernelRequest) -> None:
        self._places.give_back(request.place)

    def _send_large(self, unique: int, payload: memoryview) -> None:
        """Answer a request that a mover did not."""
        try:
            self._device.send(unique, payload)
        except OSError as exc:
            log.error("the kernel refused a reply error=%s", exc)
            with suppress(OSError):
                self._device.send(unique, error=errno.EIO)

    def _error_of_cancelled(self, request: KernelRequest) -> int:
        """Return the error of a request whose handler was cancelled: by a signal, or as `serve` ends."""
        if self._waiting.is_interrupted(request):
            return errno.EINTR
        # The mount is going away. Without an answer, pages of the request would stay locked. The program may end now:
        # nothing that it sends later is served, else its files would look closed.
        self._end()
        return errno.ENOTCONN


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
