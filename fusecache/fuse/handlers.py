"""The request handlers of a file system. Every one that a file system does not override answers ENOSYS."""

import errno
from collections.abc import Sequence

from fusecache.fuse.values import (
    EntryAttributes,
    FileInfo,
    FUSEError,
    ReaddirToken,
    RequestContext,
    SetattrFields,
    StatvfsData,
)


class RequestHandlers:
    """Base of a file system: override what it can do.

    A handler fails by raising FUSEError. Any other exception is logged and answered with EIO; the session goes on.
    Handlers run concurrently, as trio tasks. A handler of lookup, getattr, open, opendir, read, readdir, fsync,
    fsyncdir, readlink or statfs is cancelled when a signal ends the process that waits for it. Others are not.

    enable_writeback_cache: the kernel keeps written pages, and sends them later and in larger pieces.
    enable_passthrough: where the kernel can, it reads files itself that `open` answers with a `backing_id`. It excludes
    the writeback cache, which is off then.
    supports_dot_lookup: `lookup` knows `.` and `..`, for an export by NFS.
    """

    enable_writeback_cache: bool = False
    enable_passthrough: bool = False
    supports_dot_lookup: bool = False

    async def lookup(self, parent_inode: int, name: bytes, ctx: RequestContext) -> EntryAttributes:
        """Return the attributes of a name; the kernel then holds one more reference to the inode."""
        raise FUSEError(errno.ENOSYS)

    async def forget(self, inode_list: Sequence[tuple[int, int]]) -> None:
        """Drop references: pairs of an inode and how many lookups of it the kernel forgets. Has no reply."""

    async def getattr(self, inode: int, ctx: RequestContext) -> EntryAttributes:
        """Return an inode's attributes."""
        raise FUSEError(errno.ENOSYS)

    async def setattr(
        self, inode: int, attr: EntryAttributes, fields: SetattrFields, fh: int | None, ctx: RequestContext
    ) -> EntryAttributes:
        """Change the attributes that `fields` names to their values in `attr`; return all.

        fh: the open file of an ftruncate(2) or fchmod(2), else None.
        """
        raise FUSEError(errno.ENOSYS)

    async def readlink(self, inode: int, ctx: RequestContext) -> bytes:
        """Return a symlink's target."""
        raise FUSEError(errno.ENOSYS)

    async def mknod(
        self, parent_inode: int, name: bytes, mode: int, rdev: int, ctx: RequestContext
    ) -> EntryAttributes:
        """Make a file, pipe, socket or device; as with lookup, the kernel holds a reference."""
        raise FUSEError(errno.ENOSYS)

    async def mkdir(self, parent_inode: int, name: bytes, mode: int, ctx: RequestContext) -> EntryAttributes:
        """Make a directory; as with lookup, the kernel holds a reference."""
        raise FUSEError(errno.ENOSYS)

    async def unlink(self, parent_inode: int, name: bytes, ctx: RequestContext) -> None:
        """Remove a name that is not a directory's."""
        raise FUSEError(errno.ENOSYS)

    async def rmdir(self, parent_inode: int, name: bytes, ctx: RequestContext) -> None:
        """Remove an empty directory."""
        raise FUSEError(errno.ENOSYS)

    async def symlink(
        self, parent_inode: int, name: bytes, target: bytes, ctx: RequestContext
    ) -> EntryAttributes:
        """Make a symlink; as with lookup, the kernel holds a reference."""
        raise FUSEError(errno.ENOSYS)

    async def rename(
        self,
        parent_inode_old: int,
        name_old: bytes,
        parent_inode_new: int,
        name_new: bytes,
        flags: int,
        ctx: RequestContext,
    ) -> None:
        """Rename; flags as of renameat2(2)."""
        raise FUSEError(errno.ENOSYS)

    async def link(
        self, inode: int, new_parent_inode: int, new_name: bytes, ctx: RequestContext
    ) -> EntryAttributes:
        """Make a hard link; as with lookup, the kernel holds a reference."""
        raise FUSEError(errno.ENOSYS)

    async def open(self, inode: int, flags: int, ctx: RequestContext) -> FileInfo:
        """Open a file; flags as of open(2), with O_TRUNC, without O_CREAT and O_EXCL."""
        raise FUSEError(errno.ENOSYS)

    async def create(
        self, parent_inode: int, name: bytes, mode: int, flags: int, ctx: RequestContext
    ) -> tuple[FileInfo, EntryAttributes]:
        """Make a file and open it; as with lookup, the kernel holds a reference."""
        raise FUSEError(errno.ENOSYS)

    async def read(self, fh: int, off: int, size: int) -> bytes | memoryview:
        """Return at most `size` bytes; fewer only at the end of the file.

        The reply is written before any other task runs: a view need not stay valid longer.
        """
        raise FUSEError(errno.ENOSYS)

    async def write(self, fh: int, off: int, buf: bytes) -> int:
        """Write; return how many bytes. buf: bytes or a view of memory that is reused after the handler's end."""
        raise FUSEError(errno.ENOSYS)

    async def flush(self, fh: int) -> None:
        """Handle the close of one of the file's descriptors."""
        raise FUSEError(errno.ENOSYS)

    async def release(self, fh: int) -> None:
        """Handle the close of the file's last descriptor. The program does not see an error."""
        raise FUSEError(errno.ENOSYS)

    async def fsync(self, fh: int, datasync: bool) -> None:  # noqa: FBT001  # called by position
        """Make written data durable."""
        raise FUSEError(errno.ENOSYS)

    async def opendir(self, inode: int, ctx: RequestContext) -> int:
        """Open a directory; return its number `fh`."""
        raise FUSEError(errno.ENOSYS)

    async def readdir(self, fh: int, start_id: int, token: ReaddirToken) -> None:
        """Add entries to the token until it is full. start_id: 0, or the `next_id` of an earlier entry."""
        raise FUSEError(errno.ENOSYS)

    async def releasedir(self, fh: int) -> None:
        """Close a directory."""
        raise FUSEError(errno.ENOSYS)

    async def fsyncdir(self, fh: int, datasync: bool) -> None:  # noqa: FBT001  # called by position
        """Make changes of a directory durable."""
        raise FUSEError(errno.ENOSYS)

    async def statfs(self, ctx: RequestContext) -> StatvfsData:
        """Return the file system's space."""
        raise FUSEError(errno.ENOSYS)

    def on_unmounted(self) -> None:
        """No request follows: the mount is gone, or is no longer served. May be called again."""
