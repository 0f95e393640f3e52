"""The one place where the engine crosses from the loop to threads.

Invariants:
1. Every call has a bound: each kind of work has its own limiter, so that slow uploads never starve reads.
2. A call in a thread cannot be cancelled: a cancelled caller waits until the thread is done (so that the
memory and files which the thread uses stay its own), and every remote call ends by its own time-out.
"""

from collections.abc import Callable
from typing import ParamSpec, Protocol, TypeVar

import trio

P = ParamSpec("P")
T = TypeVar("T")


class Offload(Protocol):
    """Runs blocking calls for the loop."""

    async def network(self, call: Callable[..., T], *args: object) -> T:
        """Run a request that reads from the bucket."""
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

    async def rows(self, call: Callable[..., T], *args: object) -> T:
        """Run an LMDB transaction that may wait for the disk (a synced commit)."""
        ...

    def soon(self, call: Callable[..., object], *args: object) -> None:
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
        self._token = trio.lowlevel.current_trio_token()
        self._reads: set[trio.CancelScope] = set()

    async def network(self, call: Callable[..., T], *args: object) -> T:
        """Run a request that reads from the bucket."""
        with trio.CancelScope(shield=True) as scope:
            self._reads.add(scope)
            try:
                return await trio.to_thread.run_sync(
                    call, *args, limiter=self._network, abandon_on_cancel=True
                )
            finally:
                self._reads.discard(scope)
        await trio.sleep_forever()  # abandoned: our own cancellation is about to come

    def abandon_reads(self) -> None:
        """At the process's end: do not wait for answers that nobody wants any more."""
        for scope in self._reads:
            scope.cancel()

    async def upload(self, call: Callable[..., T], *args: object) -> T:
        """Run a request that changes the bucket."""
        return await trio.to_thread.run_sync(call, *args, limiter=self._upload)

    async def publish(self, call: Callable[..., T], *args: object) -> T:
        """Run a request that makes something visible and sends few bytes."""
        return await trio.to_thread.run_sync(call, *args, limiter=self._publish)

    async def disk(self, call: Callable[..., T], *args: object) -> T:
        """Run file I/O on the node's disk."""
        return await trio.to_thread.run_sync(call, *args, limiter=self._disk)

    async def rows(self, call: Callable[..., T], *args: object) -> T:
        """Run an LMDB transaction."""
        return await trio.to_thread.run_sync(call, *args, limiter=self._rows)

    def soon(self, call: Callable[..., object], *args: object) -> None:
        """Run `call` on the loop soon, from any thread."""
        self._token.run_sync_soon(call, *args)


class InlineOffload:
    """For tests under a virtual clock, which does not see threads: runs each call inline, with one checkpoint."""

    async def network(self, call: Callable[..., T], *args: object) -> T:
        """Run the call inline."""
        await trio.lowlevel.checkpoint()
        return call(*args)

    upload = disk = rows = network

    async def publish(self, call: Callable[..., T], *args: object) -> T:
        """Run the call inline, as any other that changes the bucket."""
        return await self.upload(call, *args)

    def soon(self, call: Callable[..., object], *args: object) -> None:
        """Run the call now."""
        call(*args)
