"""A file system with one file that lies in memory: what FUSE and pyfuse3 cost when the daemon does nothing.

`python -m benchmarks.emptyfs MOUNTPOINT BYTES` serves `object` with the daemon's kernel settings until unmounted.
"""

import errno
import os
import stat
import sys

import pyfuse3
import trio

from fusecache.config.node_limits import request_memory
from fusecache.fs.kernel import tune

FILE_INODE = 2
NAME = b"object"
MEMORY_BYTES = 2 * 2**20


class EmptyFileSystem(pyfuse3.Operations):
    """Answers every read with a piece of the same memory."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self._size = size
        self._memory = memoryview(os.urandom(MEMORY_BYTES))

    async def getattr(self, inode: int, ctx: object = None) -> pyfuse3.EntryAttributes:
        """Return a directory's or the file's attributes."""
        entry = pyfuse3.EntryAttributes()
        entry.st_ino = inode
        entry.st_mode = (stat.S_IFREG | 0o444) if inode == FILE_INODE else (stat.S_IFDIR | 0o755)
        entry.st_size = self._size if inode == FILE_INODE else 0
        entry.st_nlink = 1
        entry.entry_timeout = entry.attr_timeout = 60
        return entry

    async def lookup(self, parent_inode: int, name: bytes, ctx: object = None) -> pyfuse3.EntryAttributes:
        """Find the file."""
        if name != NAME:
            raise pyfuse3.FUSEError(errno.ENOENT)
        return await self.getattr(FILE_INODE)

    async def open(self, inode: int, flags: int, ctx: object) -> pyfuse3.FileInfo:
        """Open the file; the kernel keeps its pages, as with an unchanged object."""
        return pyfuse3.FileInfo(fh=inode, keep_cache=True)

    async def read(  # type: ignore[override]  # whatever has a buffer will do, and is not copied
        self, fh: int, off: int, size: int
    ) -> memoryview:
        """Return bytes of the memory."""
        return self._memory[: max(0, min(size, self._size - off))]

    async def statfs(self, ctx: object) -> pyfuse3.StatvfsData:
        """Return zeros."""
        return pyfuse3.StatvfsData()


async def _run(mountpoint: str) -> None:
    async with trio.open_nursery() as nursery:
        nursery.start_soon(pyfuse3.main, 1, 99)
        await trio.to_thread.run_sync(os.stat, mountpoint)
        await trio.to_thread.run_sync(tune, mountpoint, request_memory())
        sys.stderr.write("ready\n")
        sys.stderr.flush()


def serve(file_system: pyfuse3.Operations, mountpoint: str, name: str) -> None:
    """Serve a file system, with the daemon's kernel settings, until unmounted."""
    pyfuse3.init(file_system, mountpoint, {*pyfuse3.default_options, f"fsname={name}"})
    try:
        trio.run(_run, mountpoint)
    finally:
        pyfuse3.close(unmount=True)


def main() -> None:
    """Serve until unmounted."""
    serve(EmptyFileSystem(int(sys.argv[2])), sys.argv[1], "empty")


if __name__ == "__main__":
    main()
