"""Batches small pieces of work: items that arrive in quick succession share one thread call."""

from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

import trio

T = TypeVar("T")


class Batcher(Generic[T]):
    """Gathers items and calls `work` with at most `most` of them, at most once in `seconds`.

    The first item after a pause starts a batch at once. Batches run concurrently. `work` must handle its own errors:
    one that escapes ends the task that runs `run`.
    """

    def __init__(
        self, work: Callable[[list[T]], Awaitable[None]], *, seconds: float, most: int, name: str
    ) -> None:
        self._work = work
        self._seconds = seconds
        self._most = most
        self._name = name
        self._items: list[T] = []
        self._wake = trio.Event()
        self._nap = trio.CancelScope()

    def add(self, item: T, *, at_once: bool = False) -> None:
        """Add an item to the next batch. at_once: start that batch now."""
        self._items.append(item)
        self._wake.set()
        if at_once:
            self.flush_now()

    def flush_now(self) -> None:
        """Start the next batch without waiting for more items."""
        self._nap.cancel()

    async def run(self) -> None:
        """Start batches until cancelled."""
        async with trio.open_nursery() as nursery:
            while True:
                await self._wake.wait()
                self._wake = trio.Event()
                while self._items:
                    batch = self._items[: self._most]
                    del self._items[: self._most]
                    nursery.start_soon(self._work, batch, name=self._name)
                    with trio.CancelScope(deadline=trio.current_time() + self._seconds) as self._nap:
                        await trio.sleep_forever()
