"""The one place where the engine crosses from the loop to threads.

Invariants:
1. Every call has a bound: each kind of work has its own limiter, so that slow uploads never starve reads.
2. A call in a thread cannot be cancelled: a cancelled caller waits until the thread is done (so that the
memory and files which the thread uses stay its own), but of `ask`, and at the process's end; every remote call ends
by its own time-out.
"""

import logging
import math
import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import ParamSpec, Protocol, TypeVar

import trio

from fusecache.disk.direct_reads import REFUSED, DirectReads

log = logging.getLogger(__name__)

# More than the fetcher ever has under way.
_DIRECT_READS = 64

P = ParamSpec("P")
T = TypeVar("T")


class Offload(Protocol):
    """Runs blocking calls for the loop."""

    async def network(self, call: Callable[..., T], *args: object) -> T:
        """Run a request that reads bytes from the bucket."""
        ...

    async def metadata(self, call: Callable[..., T], ended: Callable[[], None]) -> T:
        """Run a request for names and facts, which fills no memory of ours: a cancelled caller leaves it behind.

        ended: called on the loop once it has ended, or is not begun.
        """
        ...

    async def upload(self, call: Callable[..., T], *args: object) -> T:
        """Run a request that changes the bucket."""
        ...

    async def publish(self, call: Callable[..., T], *args: object) -> T:
        """Run a request that makes something visible and sends few bytes: it never waits behind large uploads."""
        ...

    async def disk(self, call: Callable[..., T], *args: object) -> T:
        """Run file I/O on the node's disk."""
        ...

    async def read_disk(self, path: bytes, offset: int, memory: memoryview) -> int | None:
        """Fill a little page-aligned memory by direct I/O without a thread; return the bytes that were there.

        None: it did not work, or would have waited; nothing is said of why. `disk` is to try again.
        """
        ...

    async def rows(self, call: Callable[..., T], *args: object) -> T:
        """Run an LMDB transaction that may wait for the disk (a synced commit)."""
        ...

    def call_soon(self, call: Callable[..., object], *args: object) -> None:
        """Run `call` on the loop soon; the only method that other threads may use."""
        ...


class ThreadOffload:
    """The real thing: trio's worker threads behind one limiter a kind of work."""

    def __init__(self, *, network_threads: int, upload_threads: int, publish_threads: int = 4) -> None:
        self._network = trio.CapacityLimiter(network_threads)
        self._upload = trio.CapacityLimiter(upload_threads)
        self._publish = trio.CapacityLimiter(publish_threads)
        # 8 in flight saturate a local disk by direct I/O (1.6 GB/s there); more only wait in the kernel.
        self._disk = trio.CapacityLimiter(16)
        # LMDB has one writer at a time; the others are readers.
        self._rows = trio.CapacityLimiter(4)
        # Who asks has slots of his own.
        self._metadata = trio.CapacityLimiter(math.inf)
        self._token = trio.lowlevel.current_trio_token()
        self._reads: set[trio.CancelScope] = set()
        self._writes: set[trio.CancelScope] = set()
        self._reads_end = self._writes_end = False
        self._direct = _DirectReader()

    async def network(self, call: Callable[..., T], *args: object) -> T:
        """Run a request that reads bytes from the bucket."""
        if self._reads_end:
            await trio.sleep_forever()
        return await self._run(self._network, self._reads, call, *args)

    async def _run(
        self,
        limiter: trio.CapacityLimiter,
        scopes: set[trio.CancelScope],
        call: Callable[..., T],
        *args: object,
    ) -> T:
        """Run what can be left behind at the process's end, and not before."""
        with trio.CancelScope(shield=True) as scope:
            scopes.add(scope)
            try:
                return await trio.to_thread.run_sync(call, *args, limiter=limiter, abandon_on_cancel=True)
            finally:
                scopes.discard(scope)
        await trio.sleep_forever()  # abandoned: our own cancellation is about to come

    async def metadata(self, call: Callable[..., T], ended: Callable[[], None]) -> T:
        """Run a request for names and facts."""

        def run() -> T:
            try:
                return call()
            finally:
                with suppress(trio.RunFinishedError):  # nobody is left who could wait for it
                    self._token.run_sync_soon(ended)

        try:
            await trio.lowlevel.checkpoint_if_cancelled()
        except trio.Cancelled:
            ended()
            raise
        return await trio.to_thread.run_sync(run, limiter=self._metadata, abandon_on_cancel=True)

    def abandon_reads(self) -> None:
        """At the process's end: do not wait for answers that nobody wants any more, and ask for none.

        What is read ahead, or asked again on another connection, is cancelled only when the mount is gone.
        """
        self._reads_end = True
        for scope in self._reads:
            scope.cancel()

    def abandon_writes(self) -> None:
        """At the process's end: do not wait for what changes the bucket either, and begin nothing of the kind.

        Every such request has its record in the journal, or does no harm done twice.
        """
        self._writes_end = True
        for scope in self._writes:
            scope.cancel()

    async def upload(self, call: Callable[..., T], *args: object) -> T:
        """Run a request that changes the bucket."""
        return await self._write(self._upload, call, *args)

    async def publish(self, call: Callable[..., T], *args: object) -> T:
        """Run a request that makes something visible and sends few bytes."""
        return await self._write(self._publish, call, *args)

    async def _write(self, limiter: trio.CapacityLimiter, call: Callable[..., T], *args: object) -> T:
        if self._writes_end:
            await trio.sleep_forever()
        return await self._run(limiter, self._writes, call, *args)

    async def disk(self, call: Callable[..., T], *args: object) -> T:
        """Run file I/O on the node's disk."""
        return await trio.to_thread.run_sync(call, *args, limiter=self._disk)

    async def read_disk(self, path: bytes, offset: int, memory: memoryview) -> int | None:
        """Fill memory by the kernel's asynchronous I/O."""
        return await self._direct.read(path, offset, memory)

    async def rows(self, call: Callable[..., T], *args: object) -> T:
        """Run an LMDB transaction."""
        return await trio.to_thread.run_sync(call, *args, limiter=self._rows)

    def call_soon(self, call: Callable[..., object], *args: object) -> None:
        """Run `call` on the loop soon, from any thread."""
        self._token.run_sync_soon(call, *args)


@dataclass(eq=False, slots=True)
class _DirectRead:
    """A read under way: who waits for it, and what came of it."""

    task: trio.lowlevel.Task
    result: int = 0


class _DirectReader:
    """Reads that the kernel does while the loop goes on; begun with the first one, over with the loop."""

    def __init__(self) -> None:
        self._reads: DirectReads | None = None
        self._is_tried = False

    async def read(self, path: bytes, offset: int, memory: memoryview) -> int | None:
        """Fill memory; return the bytes that were there, None if a thread is to do it."""
        read = _DirectRead(trio.lowlevel.current_task())
        try:
            if not self._is_tried:
                self._begin()
            if self._reads is None or not self._reads.begin(path, offset, memory, read):
                return None
        except OSError as exc:
            log.info("small reads of the cache go through threads: %s", exc)
            self._reads = None
            return None
        # As with a thread, the memory is the kernel's until it is done, whoever is cancelled.
        await trio.lowlevel.wait_task_rescheduled(lambda _: trio.lowlevel.Abort.FAILED)
        if -read.result in REFUSED and self._reads is not None:
            log.info("small reads of the cache go through threads: %s", os.strerror(-read.result))
            self._reads = None
        return None if read.result < 0 else read.result

    def _begin(self) -> None:
        self._is_tried = True
        self._reads = DirectReads(_DIRECT_READS)
        # The loop ends it after all other tasks: nobody waits for a read then.
        trio.lowlevel.spawn_system_task(self._wake, self._reads, name="direct-reads")

    async def _wake(self, reads: DirectReads) -> None:
        """Wake those whose reads have ended."""
        try:
            while True:
                await trio.lowlevel.wait_readable(reads.events)
                for read, result in reads.ended():
                    assert isinstance(read, _DirectRead)
                    read.result = result
                    trio.lowlevel.reschedule(read.task)
        finally:
            self._reads = None
            reads.close()


class InlineOffload:
    """For tests under a virtual clock, which does not see threads: runs each call inline, with one checkpoint."""

    async def network(self, call: Callable[..., T], *args: object) -> T:
        """Run the call inline."""
        await trio.lowlevel.checkpoint()
        return call(*args)

    upload = disk = rows = network

    async def metadata(self, call: Callable[..., T], ended: Callable[[], None]) -> T:
        """Run the call as any other that reads from the bucket."""
        try:
            return await self.network(call)
        finally:
            ended()

    async def read_disk(self, path: bytes, offset: int, memory: memoryview) -> int | None:
        """Leave it to `disk`: the kernel's end of a read is not seen by a virtual clock either."""
        return None

    async def publish(self, call: Callable[..., T], *args: object) -> T:
        """Run the call inline, as any other that changes the bucket."""
        return await self.upload(call, *args)

    def call_soon(self, call: Callable[..., object], *args: object) -> None:
        """Run the call now."""
        call(*args)
