"""Small pieces of work done together: what comes in quick succession crosses to a thread once, not once each."""

from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

import trio

T = TypeVar("T")


class Batcher(Generic[T]):
    """Gathers items; a batch begins at most once in `seconds`, the first after a pause at once, of at most `most`.

    Batches do not wait for each other. `work` handles what may fail in it: an error ends the task that runs this.
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
        """Have it worked on soon; at once: with what has gathered by now."""
        self._items.append(item)
        self._wake.set()
        if at_once:
            self.flush_now()

    def flush_now(self) -> None:
        """Do not gather for now."""
        self._nap.cancel()

    async def run(self) -> None:
        """Begin batches until cancelled."""
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
