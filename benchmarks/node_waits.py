"""A daemon whose GETs and stores only wait, and whose replies are short: of the case `loop` in `node.py`.

Everything else is as ever: requests are signed and queued, cache files are opened, and with movers these get each
order and wait instead of the daemon.
"""

import sys
import time
from collections.abc import Callable
from typing import Any, Literal

# What a GET and a store take, in seconds.
GET_SECONDS, STORE_SECONDS = 0.020, 0.005
SHORT_BYTES = 4096
_LARGE_BYTES = 128 * 1024
_CHECKSUM_BYTES = 8


def serve(words: list[str]) -> int:
    """Run the command line as such a daemon."""
    from fusecache import child
    from fusecache.__main__ import main as command
    from fusecache.fs.operations import Operations
    from fusecache.fuse import mover
    from fusecache.fuse.device import Device
    from fusecache.fuse.movers import Movers

    _wait_instead()
    start, opened = child.start, Operations.open

    def start_waiting(module: str, fds: tuple[int, ...] = ()) -> Any:
        return start(__name__ if module == mover.__name__ else module, fds)

    async def open_direct(self: Any, *arguments: Any) -> Any:
        # After a short reply to a direct read, the kernel reads the rest through the page cache: a second request for
        # each MiB, and zeros for all its pages. Not of a file that is opened like this.
        info = await opened(self, *arguments)
        info.direct_io = True
        return info

    child.start = start_waiting
    Operations.open = open_direct  # type: ignore[method-assign,assignment]
    Device.send = _shortened(Device.send)  # type: ignore[method-assign]
    Movers.carry = _shortened(Movers.carry)  # type: ignore[method-assign]
    sys.argv = ["fusecache", *words]
    return command()


def main(*descriptors: int) -> None:
    """Be a mover of such a daemon."""
    from fusecache.fuse import mover

    _wait_instead()
    mover.main(*descriptors)


def _wait_instead() -> None:
    """Wait instead of receiving a body and of writing a file, in this process."""
    from fusecache.disk import cache_files
    from fusecache.model.objects import GRANULE_BYTES
    from fusecache.movers import orders
    from fusecache.remote.http import ranged_get

    def ask(get: Any, read_timeout: float, connection: Any, request: bytes) -> Literal[True]:
        with get.interruption.by(connection.interrupt):
            time.sleep(GET_SECONDS)
            get.progress(get.extent.size)
        connection.is_clean = True
        return True

    def written(fd: int, memory: memoryview, size: int, offset: int) -> bytes:
        time.sleep(STORE_SECONDS)
        return bytes(_CHECKSUM_BYTES * -(-size // GRANULE_BYTES))

    ranged_get.ask = orders.ask = ask  # type: ignore[attr-defined]
    cache_files.checksummed_and_written = orders.checksummed_and_written = written  # type: ignore[attr-defined]


def _shortened(send: Callable[..., Any]) -> Callable[..., Any]:
    def send_short(self: Any, unique: int, payload: Any = b"", *more: Any, **named: Any) -> Any:
        if len(payload) >= _LARGE_BYTES:
            payload = payload[:SHORT_BYTES]
        return send(self, unique, payload, *more, **named)

    return send_short
