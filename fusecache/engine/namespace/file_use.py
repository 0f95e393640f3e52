"""Threads that work on a staging file: it is neither removed while one reads it, nor sealed while one writes."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import trio


@dataclass(eq=False, slots=True)
class FileUse:
    """Counts the reads and writes in progress."""

    readers: int = 0
    writers: int = 0
    _unread: trio.Event | None = None
    _unwritten: trio.Event | None = None

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Keep the file while a thread reads it, even if its bytes become cache at the same time."""
        self.readers += 1
        try:
            yield
        finally:
            self.readers -= 1
            if self.readers == 0 and self._unread is not None:
                self._unread.set()
                self._unread = None

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Keep the content from being sealed while a thread writes into it."""
        self.writers += 1
        try:
            yield
        finally:
            self.writers -= 1
            if self.writers == 0 and self._unwritten is not None:
                self._unwritten.set()
                self._unwritten = None

    async def wait_unread(self) -> None:
        """Return when no thread reads the file."""
        while self.readers:
            if self._unread is None:
                self._unread = trio.Event()
            await self._unread.wait()

    async def wait_written(self) -> None:
        """Return at the end of a moment without writes: others may have begun since."""
        if self.writers:
            if self._unwritten is None:
                self._unwritten = trio.Event()
            await self._unwritten.wait()
