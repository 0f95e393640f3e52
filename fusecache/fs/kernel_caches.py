"""Has the kernel drop what it caches and this node knows to be stale: names, and pages of evicted files."""

import os
from contextlib import suppress

import pyfuse3
import trio

from fusecache.engine.events import KernelListener
from fusecache.engine.namespace.nodes import Node


class KernelCaches(KernelListener):
    """The kernel's caches of the mount in this process."""

    def on_name_lost(self, parent: Node, name: str) -> None:
        """Have the kernel forget a name. Returns at once."""
        pyfuse3.invalidate_entry_async(
            pyfuse3.InodeT(parent.number), pyfuse3.FileNameT(os.fsencode(name)), ignore_enoent=True
        )

    async def on_evicted(self, inodes: list[int]) -> None:
        """Have the kernel drop its cached pages of clean files."""

        def drop() -> None:
            for inode in inodes:
                with suppress(OSError):  # ENOENT: the kernel has already forgotten the inode
                    pyfuse3.invalidate_inode(pyfuse3.InodeT(inode))

        # In a thread: the kernel may wait for a read of such a page, which the loop must answer.
        await trio.to_thread.run_sync(drop)
