"""Has the kernel drop what it caches and this node knows to be stale: names, and pages of evicted files."""

import os
from contextlib import suppress

import trio

from fusecache.engine.namespace.events import Events
from fusecache.engine.namespace.nodes import Node
from fusecache.fs.kept_files import KeptFiles
from fusecache.fuse.library import FuseSession


class KernelCaches(Events):
    """The kernel's caches of one mount."""

    def __init__(self, kept: KeptFiles) -> None:
        self._kept = kept
        self._session: FuseSession | None = None

    def on_node_moved(self, node: Node) -> None:
        """Keep what a successor must know of an open file or a directory."""
        self._kept.on_moved(node)

    def on_content_changed(self, node: Node) -> None:
        """Keep what a successor must know of an open file."""
        self._kept.on_changed(node)

    def on_node_dropped(self, node: Node) -> None:
        """A successor need not know of it."""
        self._kept.on_forgotten([node.number])

    def attach(self, session: FuseSession) -> None:
        """Begin with a mount. Until then the kernel caches nothing."""
        self._session = session

    def on_name_lost(self, parent: Node, name: str) -> None:
        """Have the kernel forget a name. Returns at once."""
        if self._session is not None:
            self._session.invalidate_entry(parent.number, os.fsencode(name))

    async def on_evicted(self, inodes: list[int]) -> None:
        """Have the kernel drop its cached pages of clean files."""
        session = self._session
        if session is None:
            return

        def drop() -> None:
            for inode in inodes:
                with suppress(OSError):  # ENOENT: the kernel has already forgotten the inode
                    session.invalidate_inode(inode)

        # In a thread: the kernel may wait for a read of such a page, which the loop must answer.
        await trio.to_thread.run_sync(drop)
