"""Batches small pieces of work: items that arrive in quick succession share one thread call."""

from collections.abc import Awaitable, Callable
from functools import partial
from typing import Generic, TypeVar

import trio

from fusecache.engine.runtime.supervisor import TaskNursery
from fusecache.model.errors import InternalError

T = TypeVar("T")


class Batcher(Generic[T]):
    """Gathers items and calls `work` with at most `most` of them, at most once in `seconds`.

    The first item after a pause starts a batch at once. Batches run concurrently, as child tasks.
    """

    def __init__(
        self,
        work: Callable[[list[T]], Awaitable[None]],
        tasks: TaskNursery,
        *,
        seconds: float,
        most: int,
        name: str,
        on_failed: Callable[[list[T], InternalError], object] = lambda _items, _error: None,
    ) -> None:
        """on_failed: tells the waiters of a batch for which `work` failed unexpectedly."""
        self._work = work
        self._tasks = tasks
        self._on_failed = on_failed
        self._seconds = seconds
        self._most = most
        self._name = name
        self._items: list[T] = []
        self._wake = trio.Event()
        self._nap = trio.CancelScope()

    def add(self, item: T) -> None:
        """Add an item to the next batch."""
        self._items.append(item)
        self._wake.set()

    def flush_now(self) -> None:
        """Start the next batch without waiting for more items."""
        self._nap.cancel()

    async def run(self) -> None:
        """Start batches until cancelled."""
        while True:
            while self._items:
                batch = self._items[: self._most]
                del self._items[: self._most]
                self._tasks.start_soon(
                    self._name, self._work, batch, on_failed=partial(self._on_failed, batch)
                )
                with trio.CancelScope(deadline=trio.current_time() + self._seconds) as self._nap:
                    await trio.sleep_forever()
            self._wake = trio.Event()
            await self._wake.wait()
