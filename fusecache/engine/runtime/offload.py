"""Runs blocking calls in worker threads: the only place where the engine leaves the event loop.

Invariants:
1. Each kind of work has its own limit, so that slow uploads never starve reads. Callers of `metadata` bring their
   own limit.
2. A call in a thread cannot be cancelled. A cancelled caller waits until the thread is done, so that the memory and
   the files that it uses stay its own. The exceptions are `metadata`, and the end of the process.
3. Every remote call ends by its own timeout.
"""

import logging
import math
import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import trio

from fusecache.disk.direct_reads import REFUSED, DirectReads
from fusecache.engine.runtime.supervisor import Supervisor

log = logging.getLogger(__name__)

# Concurrent direct reads; the fetcher never has more in flight.
_DIRECT_READS = 64

T = TypeVar("T")


@dataclass(eq=False, slots=True)
class _Abandonable:
    """Calls that may be abandoned at the end of the process. is_over: none may start any more."""

    scopes: set[trio.CancelScope] = field(default_factory=set)
    is_over: bool = False

    def end(self) -> None:
        """Abandon the calls that run, and start none."""
        self.is_over = True
        for scope in self.scopes:
            scope.cancel()


class _Threads:
    """trio's worker threads, for a limited number of calls at once.

    `trio.to_thread` does the same with a context and a name for each call, which takes half as much time again.
    """

    def __init__(self, most: int) -> None:
        self._slots = trio.Semaphore(most)
        self._token = trio.lowlevel.current_trio_token()

    async def run(self, call: Callable[..., T], *args: object, may_abandon: bool = False) -> T:
        """Return a call's result, or raise its error.

        may_abandon: a cancelled caller leaves a running call behind. Without it, the caller waits for the call.
        """
        await trio.lowlevel.checkpoint_if_cancelled()
        try:
            self._slots.acquire_nowait()
        except trio.WouldBlock:
            await self._slots.acquire()
        task: trio.lowlevel.Task | None = trio.lowlevel.current_task()

        def end(result: Any) -> None:
            self._slots.release()
            if task is not None:
                trio.lowlevel.reschedule(task, result)

        def end_soon(result: Any) -> None:
            """Run in the thread."""
            with suppress(trio.RunFinishedError):  # the loop has ended: no caller waits
                self._token.run_sync_soon(end, result)

        def abort(_: object) -> trio.lowlevel.Abort:
            nonlocal task
            if not may_abandon:
                return trio.lowlevel.Abort.FAILED
            task = None
            return trio.lowlevel.Abort.SUCCEEDED

        try:
            trio.lowlevel.start_thread_soon(partial(call, *args), end_soon)
        except BaseException:  # the system has no further thread
            self._slots.release()
            raise
        result: T = await trio.lowlevel.wait_task_rescheduled(abort)
        return result


class Offload:
    """Runs blocking calls for the loop: in trio's worker threads, with a limit for each kind of work."""

    def __init__(
        self, supervisor: Supervisor, *, network_threads: int, upload_threads: int, publish_threads: int = 4
    ) -> None:
        self._network, self._upload = _Threads(network_threads), _Threads(upload_threads)
        self._publish = _Threads(publish_threads)
        # 8 direct I/O calls in flight saturate a local disk (1.6 GB/s); more only wait in the kernel.
        self._disk = _Threads(16)
        # LMDB has one writer at a time; the other threads read.
        self._rows = _Threads(4)
        # No limit here: MetadataClient has its own slots.
        self._metadata = trio.CapacityLimiter(math.inf)
        self._token = trio.lowlevel.current_trio_token()
        self._reads, self._writes = _Abandonable(), _Abandonable()
        self._direct = _DirectReader(supervisor)

    async def network(self, call: Callable[..., T], *args: object) -> T:
        """Run a request that reads bytes from the bucket."""
        return await self._run(self._network, self._reads, call, *args)

    async def _run(self, threads: _Threads, calls: _Abandonable, call: Callable[..., T], *args: object) -> T:
        """Run a call that may be abandoned at the end of the process, and not before."""
        if calls.is_over:
            await trio.sleep_forever()
        with trio.CancelScope(shield=True) as scope:
            calls.scopes.add(scope)
            try:
                return await threads.run(call, *args, may_abandon=True)
            finally:
                calls.scopes.discard(scope)
        await trio.sleep_forever()  # abandoned: the caller's own cancellation follows

    async def metadata(self, call: Callable[..., T], ended: Callable[[], None]) -> T:
        """Run a LIST or HEAD, which fills no memory of the caller: a cancelled caller abandons its thread.

        ended: called on the loop once the call has ended, or if it never began.
        """

        def run() -> T:
            try:
                return call()
            finally:
                with suppress(trio.RunFinishedError):  # the loop has ended: no caller waits
                    self._token.run_sync_soon(ended)

        try:
            await trio.lowlevel.checkpoint_if_cancelled()
        except trio.Cancelled:
            ended()
            raise
        return await trio.to_thread.run_sync(run, limiter=self._metadata, abandon_on_cancel=True)

    def abandon_reads(self) -> None:
        """At the end of the process: abandon running reads, and start none.

        Read-aheads and hedged GETs still run at that time: they are cancelled only when the mount is gone.
        """
        self._reads.end()

    def abandon_writes(self) -> None:
        """At the end of the process: abandon requests that change the bucket, too, and start none.

        Each of them has a row in the journal, or is idempotent.
        """
        self._writes.end()

    async def upload(self, call: Callable[..., T], *args: object) -> T:
        """Run a request that changes the bucket."""
        return await self._run(self._upload, self._writes, call, *args)

    async def publish(self, call: Callable[..., T], *args: object) -> T:
        """Run a request that makes something visible and sends few bytes: it never waits behind large uploads."""
        return await self._run(self._publish, self._writes, call, *args)

    async def disk(self, call: Callable[..., T], *args: object) -> T:
        """Run file I/O on the node's disk."""
        return await self._disk.run(call, *args)

    async def read_disk(self, path: bytes, offset: int, memory: memoryview) -> int | None:
        """Fill a small page-aligned buffer by the kernel's asynchronous I/O, without a thread; return the bytes read.

        None: it failed, or would have blocked. The caller repeats the read with `disk`, which raises the cause.
        """
        return await self._direct.read(path, offset, memory)

    async def rows(self, call: Callable[..., T], *args: object) -> T:
        """Run an LMDB transaction that may wait for the disk (a synced commit)."""
        return await self._rows.run(call, *args)

    async def compute(self, call: Callable[..., T], *args: object) -> T:
        """Run code that would hold up the loop, as of a large JSON."""
        return await trio.to_thread.run_sync(call, *args)

    def call_soon(self, call: Callable[..., object], *args: object) -> None:
        """Run `call` on the loop soon; the only method that other threads may use."""
        self._token.run_sync_soon(call, *args)


@dataclass(eq=False, slots=True)
class _DirectRead:
    """A read in flight: the waiting task, and the result (bytes, or a negative errno)."""

    task: trio.lowlevel.Task
    result: int = 0


class _DirectReader:
    """Reads by the kernel's asynchronous I/O. It is set up by the first read, and closed with the loop."""

    def __init__(self, supervisor: Supervisor) -> None:
        self._supervisor = supervisor
        self._reads: DirectReads | None = None
        self._is_tried = False

    async def read(self, path: bytes, offset: int, memory: memoryview) -> int | None:
        """Fill memory; return the bytes read, None if a thread must do it."""
        read = _DirectRead(trio.lowlevel.current_task())
        try:
            if not self._is_tried:
                self._begin()
            if self._reads is None or not self._reads.begin(path, offset, memory, read):
                return None
        except OSError as exc:
            log.info("asynchronous direct reads unavailable, using threads error=%s", exc)
            self._reads = None
            return None
        # As with a thread, the memory is the kernel's until the read is done, even if the caller is cancelled.
        await trio.lowlevel.wait_task_rescheduled(lambda _: trio.lowlevel.Abort.FAILED)
        if -read.result in REFUSED and self._reads is not None:
            log.info(
                "asynchronous direct reads unavailable, using threads error=%s", os.strerror(-read.result)
            )
            self._reads = None
        return None if read.result < 0 else read.result

    def _begin(self) -> None:
        self._is_tried = True
        self._reads = DirectReads(_DIRECT_READS)
        # The loop ends system tasks after all others: no task waits for a read then.
        trio.lowlevel.spawn_system_task(self._own, self._reads, name="direct-reads")

    async def _own(self, reads: DirectReads) -> None:
        try:
            await self._supervisor.run("direct-reads", partial(_wake, reads))
        finally:
            self._reads = None
            reads.close()


async def _wake(reads: DirectReads) -> None:
    """Wake tasks whose reads have ended."""
    while True:
        for read, result in reads.ended():
            assert isinstance(read, _DirectRead)
            read.result = result
            trio.lowlevel.reschedule(read.task)
        await trio.lowlevel.wait_readable(reads.events)
