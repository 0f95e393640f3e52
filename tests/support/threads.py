"""Threads under a virtual clock: calls that take time, and that nobody can call back.

`InlineOffload` has one checkpoint before each call and none after it, so that with it nothing happens between a call's
effect and the caller's next line, and a cancelled caller never makes the call.
"""

import random
from collections.abc import Callable
from typing import TypeVar

import trio

T = TypeVar("T")

# Seconds of a call, before its effect and after it: most are quick, some take longer than files rest.
DURATIONS = (0.0, 0.0, 0.0, 0.001, 0.004, 0.03, 0.3, 2.0)


async def stay(seconds: float) -> None:
    """Take so long as a thread does: whoever is cancelled meanwhile."""
    with trio.CancelScope(shield=True):
        await trio.sleep(seconds)


class SlowThreads:
    """Runs each call as a thread does: once begun it goes on, and a cancelled caller hears its answer."""

    def __init__(self, seed: int, durations: tuple[float, ...] = DURATIONS) -> None:
        self._random = random.Random(seed)
        self._durations = durations

    async def disk(self, call: Callable[..., T], *args: object) -> T:
        """Run the call, of any kind."""
        await trio.lowlevel.checkpoint()
        with trio.CancelScope(shield=True):
            await trio.sleep(self._random.choice(self._durations))
            try:
                return call(*args)
            finally:
                await trio.sleep(self._random.choice(self._durations))

    network = upload = publish = rows = disk

    async def metadata(self, call: Callable[..., T], ended: Callable[[], None]) -> T:
        """Run a call that a cancelled caller leaves behind: it changes nothing."""
        try:
            await trio.sleep(self._random.choice(self._durations))
            answer = call()
            await trio.sleep(self._random.choice(self._durations))
            return answer
        finally:
            ended()

    async def read_disk(self, _path: bytes, _offset: int, _memory: memoryview) -> int | None:
        """Leave it to `disk`."""
        return None

    def call_soon(self, call: Callable[..., object], *args: object) -> None:
        """Run the call now."""
        call(*args)
