"""An Offload for tests under a virtual clock, which cannot see threads: it runs each call inline, on the loop."""

from collections.abc import Callable
from typing import TypeVar

import trio

from fusecache.engine.runtime.offload import Offload

T = TypeVar("T")


class InlineOffload(Offload):
    """Runs each call inline, with one checkpoint before it and none after."""

    def __init__(self) -> None:
        """Start no threads."""

    async def network(self, call: Callable[..., T], *args: object) -> T:
        """Run the call inline."""
        await trio.lowlevel.checkpoint()
        return call(*args)

    upload = disk = rows = compute = network

    async def metadata(self, call: Callable[..., T], ended: Callable[[], None]) -> T:
        """Run the call like any other read from the bucket."""
        try:
            return await self.network(call)
        finally:
            ended()

    async def read_disk(self, path: bytes, offset: int, memory: memoryview) -> int | None:
        """Leave it to `disk`: a virtual clock cannot see the kernel's asynchronous reads either."""
        return None

    async def publish(self, call: Callable[..., T], *args: object) -> T:
        """Run the call inline, like any other that changes the bucket."""
        return await self.upload(call, *args)

    def call_soon(self, call: Callable[..., object], *args: object) -> None:
        """Run the call now."""
        call(*args)
