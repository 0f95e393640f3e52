"""A file system that keeps sizes and throws bytes away: what FUSE and pyfuse3 cost when the daemon does nothing.

`python -m benchmarks.discardfs MOUNTPOINT` serves one directory, with the daemon's kernel settings, until unmounted.
"""

import errno
import stat
import sys

import pyfuse3

from benchmarks.emptyfs import serve

MIB = 2**20


class DiscardingFileSystem(pyfuse3.Operations):
    """Files in one directory; reading them gives zeros."""

    enable_writeback_cache = True

    def __init__(self) -> None:
        super().__init__()
        self._numbers: dict[bytes, int] = {}
        self._sizes: dict[int, int] = {}

    async def getattr(self, inode: int, ctx: object = None) -> pyfuse3.EntryAttributes:
        """Return the root's or a file's attributes."""
        is_file = inode in self._sizes
        entry = pyfuse3.EntryAttributes()
        entry.st_ino = inode
        entry.st_mode = (stat.S_IFREG | 0o644) if is_file else (stat.S_IFDIR | 0o755)
        entry.st_size = self._sizes.get(inode, 0)
        entry.st_blksize = MIB
        entry.st_nlink = 1
        entry.entry_timeout = entry.attr_timeout = 60
        return entry

    async def setattr(
        self, inode: int, attr: object, fields: object, fh: int | None, ctx: object
    ) -> pyfuse3.EntryAttributes:
        """Change nothing: what the kernel sends at a close are times."""
        return await self.getattr(inode)

    async def lookup(self, parent_inode: int, name: bytes, ctx: object = None) -> pyfuse3.EntryAttributes:
        """Find a file."""
        if name not in self._numbers:
            raise pyfuse3.FUSEError(errno.ENOENT)
        return await self.getattr(self._numbers[name])

    async def create(
        self, parent_inode: int, name: bytes, mode: int, flags: int, ctx: object
    ) -> tuple[pyfuse3.FileInfo, pyfuse3.EntryAttributes]:
        """Make an empty file."""
        inode = pyfuse3.ROOT_INODE + 1 + len(self._numbers)
        self._numbers[name] = inode
        self._sizes[inode] = 0
        return pyfuse3.FileInfo(fh=inode, keep_cache=True), await self.getattr(inode)

    async def open(self, inode: int, flags: int, ctx: object) -> pyfuse3.FileInfo:
        """Open a file."""
        return pyfuse3.FileInfo(fh=inode, keep_cache=True)

    async def write(self, fh: int, off: int, buf: bytes) -> int:
        """Keep the size."""
        self._sizes[fh] = max(self._sizes[fh], off + len(buf))
        return len(buf)

    async def read(self, fh: int, off: int, size: int) -> bytes:
        """Return zeros."""
        return bytes(max(0, min(size, self._sizes[fh] - off)))

    async def flush(self, fh: int) -> None:
        """Nothing is kept."""

    async def release(self, fh: int) -> None:
        """Nothing is held open."""

    async def fsync(self, fh: int, datasync: bool) -> None:  # noqa: FBT001 (pyfuse3 calls it by position)
        """Nothing is kept."""

    async def statfs(self, ctx: object) -> pyfuse3.StatvfsData:
        """Return zeros."""
        return pyfuse3.StatvfsData()


def main() -> None:
    """Serve until unmounted."""
    serve(DiscardingFileSystem(), sys.argv[1], "discard")


if __name__ == "__main__":
    main()
