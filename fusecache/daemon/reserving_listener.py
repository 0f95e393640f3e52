"""Accepts connections to the control socket when the daemon has no file descriptor left."""

import os
from contextlib import suppress

import trio

from fusecache.disk.descriptors import NO_DESCRIPTORS


class ReservingListener(trio.abc.Listener[trio.SocketStream]):
    """Accepts connections also when the daemon's descriptors are used up: it holds one back for that.

    So `status` can say what is wrong. One connection is served at a time.
    """

    def __init__(self, listener: trio.socket.SocketType) -> None:
        self._inner = trio.SocketListener(listener)
        self._reserve: int | None = None
        self._take_reserve()

    def _take_reserve(self) -> None:
        with suppress(OSError):
            self._reserve = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)

    async def accept(self) -> trio.SocketStream:
        """Return the next connection."""
        if self._reserve is None:
            self._take_reserve()
        try:
            return await self._inner.accept()
        except OSError as exc:
            if exc.errno not in NO_DESCRIPTORS or self._reserve is None:
                raise  # trio tries again after a pause
            os.close(self._reserve)
            self._reserve = None
            return await self._inner.accept()

    async def aclose(self) -> None:
        """Close."""
        if self._reserve is not None:
            os.close(self._reserve)
        await self._inner.aclose()
