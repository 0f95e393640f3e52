"""Has the kernel read what the cache has of a model, before a program's page faults ask for it one MiB at a time.

`page_reader.py` reads it through the mount, as any program would. While it has a file open, that counts as an open
file here: `reading` is the file's node.
"""

import json
import logging
import os
import socket
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import trio

from fusecache import child
from fusecache.engine.namespace.nodes import Node
from fusecache.engine.namespace.tree import Tree
from fusecache.engine.prefetch import page_reader
from fusecache.engine.runtime.procfs import available_memory
from fusecache.model.objects import MIB, Extent

log = logging.getLogger(__name__)

# Programs need memory themselves: they copy what they load.
_SHARE_OF_MEMORY = 2
# The kernel is asked for its free memory once in so many bytes: that takes several small files of it.
_MEMORY_STEP_BYTES = 64 * MIB
_END_SECONDS = 1.0


class KernelPages:
    """Starts a page reader for each load, once there is a mount."""

    def __init__(self, tree: Tree) -> None:
        self._tree = tree
        self._mountpoint = ""

    def attach(self, mountpoint: str) -> None:
        """Begin with a mount."""
        self._mountpoint = mountpoint

    @asynccontextmanager
    async def reader(self) -> AsyncIterator["PageReader | None"]:
        """Run a reader while the body runs; None if there can be none."""
        if not self._mountpoint:
            yield None
            return
        try:
            process, jobs = child.start(page_reader.__name__)
        except OSError as exc:
            log.debug("no page reader error=%s", exc)
            yield None
            return
        try:
            with jobs:
                yield PageReader(jobs, self._tree, self._mountpoint)
        finally:
            process.kill()
            # It may wait for this daemon's answer, and the mount may have ended: then it ends a moment later.
            with trio.move_on_after(_END_SECONDS, shield=True):
                await trio.to_thread.run_sync(process.wait, abandon_on_cancel=True)


class PageReader:
    """A page reader that runs. jobs: a socket to it. reading: the node that it has open now."""

    def __init__(self, jobs: socket.socket, tree: Tree, mountpoint: str) -> None:
        self._jobs = jobs
        self._tree = tree
        self._mountpoint = mountpoint
        self._read_bytes = 0
        self._granted_bytes = 0
        self.reading: Node | None = None

    def has_memory(self, nbytes: int) -> bool:
        """Return whether there is memory for more bytes now."""
        wanted = self._read_bytes + nbytes
        if wanted > self._granted_bytes:
            most = available_memory() // _SHARE_OF_MEMORY
            self._granted_bytes = min(self._read_bytes + _MEMORY_STEP_BYTES, most)
        return wanted <= self._granted_bytes

    async def read(self, node: Node, parts: Sequence[Extent]) -> bool:
        """Have the kernel read parts of a file. Return whether there are still a reader and the file."""
        if not self._tree.is_linked(node):
            return False
        self._read_bytes += sum(each.size for each in parts)
        path = os.path.join(self._mountpoint, self._tree.path(node))
        self.reading = node
        try:
            self._jobs.send(
                json.dumps([path, node.number, [[each.start, each.stop] for each in parts]]).encode()
            )
            await trio.lowlevel.wait_readable(self._jobs)
            return bool(self._jobs.recv(1))
        except OSError:  # it has ended
            return False
        finally:
            self.reading = None
