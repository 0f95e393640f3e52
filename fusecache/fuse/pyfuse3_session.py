"""The same session through pyfuse3 and libfuse. Imported only where it is used, as pyfuse3 may be absent."""

import errno
import os
import re
from typing import Any

import pyfuse3

from fusecache.fuse.handlers import RequestHandlers
from fusecache.fuse.values import (
    EntryAttributes,
    FileInfo,
    FUSEError,
    MountPlan,
    MountRefused,
    RequestContext,
    StatvfsData,
)

# Characters without a meaning for libfuse, fusermount3 and the mount table.
_SPECIAL = re.compile(rb"[^A-Za-z0-9:/._=+@~-]")
# Idle handler tasks that stay alive, so that bursts of requests do not start and end tasks all the time.
_MIN_TASKS = 64
# Requests in handlers. With few, that many waiting reads would block every `ls`.
_MAX_TASKS = 4096
_HANDLERS = (
    "lookup", "forget", "getattr", "setattr", "readlink", "mknod", "mkdir", "unlink", "rmdir", "symlink", "rename",
    "link", "open", "create", "read", "write", "flush", "release", "fsync", "opendir", "releasedir", "fsyncdir",
    "statfs",
)  # fmt: skip
_ENTRY_FIELDS = (
    "st_ino", "generation", "entry_timeout", "attr_timeout", "st_mode", "st_nlink", "st_uid", "st_gid", "st_rdev",
    "st_size", "st_blksize", "st_blocks", "st_atime_ns", "st_mtime_ns", "st_ctime_ns",
)  # fmt: skip


class Pyfuse3Session:
    """One mount of this process, served by pyfuse3, as `OwnSession` does; but signals interrupt nothing."""

    library = "pyfuse3"
    can_pass_through = False

    def __init__(self, operations: RequestHandlers, plan: MountPlan) -> None:
        """Mount a file system. Raises MountRefused. A process can have one."""
        words = {f"fsname={_escaped(plan.source)}", f"subtype={plan.subtype}", "nosuid", "nodev"}
        words |= pyfuse3.default_options
        if plan.allow_other:
            words.add("allow_other")
        try:
            pyfuse3.init(_Adapter(operations), plan.mountpoint, words)
        except RuntimeError as exc:
            raise MountRefused(f"{exc}; see the message of fusermount3 above, or in the log") from exc
        self._is_open = True
        self._on_unmounted = operations.on_unmounted

    async def serve(self, max_bytes: int = 0) -> None:
        """Answer requests until the mount is gone, or this is cancelled. max_bytes: not used."""
        try:
            await pyfuse3.main(min_tasks=_MIN_TASKS, max_tasks=_MAX_TASKS)
        finally:
            self._on_unmounted()

    def invalidate_entry(self, parent_inode: int, name: bytes) -> None:
        """Make the kernel look a name up again. Returns at once, before it happens."""
        pyfuse3.invalidate_entry_async(
            pyfuse3.InodeT(parent_inode), pyfuse3.FileNameT(name), ignore_enoent=True
        )

    def invalidate_inode(self, inode: int) -> None:
        """Make the kernel drop an inode's attributes and clean pages. Blocks. Raises OSError."""
        if not self._is_open:
            raise OSError(errno.ENOTCONN, os.strerror(errno.ENOTCONN))
        pyfuse3.invalidate_inode(pyfuse3.InodeT(inode))

    def open_backing(self, fd: int) -> int:
        """Raise OSError: pyfuse3 has no passthrough."""
        raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))

    def close_backing(self, backing_id: int) -> None:
        """Do nothing: there is none."""

    def close(self) -> None:
        """Unmount, unless that has happened. `serve` must have ended."""
        if self._is_open:
            self._is_open = False
            pyfuse3.close(unmount=True)


class _Adapter(pyfuse3.Operations):
    """Calls the handlers with pyfuse3's values, and returns and raises pyfuse3's."""

    def __init__(self, operations: RequestHandlers) -> None:
        super().__init__()
        self.operations = operations
        self.enable_writeback_cache = operations.enable_writeback_cache
        self.supports_dot_lookup = operations.supports_dot_lookup

    async def readdir(self, fh: int, start_id: int, token: pyfuse3.ReaddirToken) -> None:
        """Reply entries."""
        try:
            await self.operations.readdir(fh, start_id, _Token(token))
        except FUSEError as exc:
            raise pyfuse3.FUSEError(exc.errno) from exc


class _Token:
    """A readdir reply of pyfuse3."""

    def __init__(self, token: pyfuse3.ReaddirToken) -> None:
        self._token = token

    def add(self, name: bytes, entry: EntryAttributes, next_id: int) -> bool:
        """Add an entry; return whether it fitted."""
        return pyfuse3.readdir_reply(self._token, pyfuse3.FileNameT(name), _converted(entry), next_id)


def _adapted(name: str) -> Any:
    async def handler(self: _Adapter, *arguments: Any) -> Any:
        try:
            result = await getattr(self.operations, name)(*map(_ours, arguments))
        except FUSEError as exc:
            raise pyfuse3.FUSEError(exc.errno) from exc
        return _converted(result)

    handler.__name__ = name
    return handler


for _name in _HANDLERS:
    setattr(_Adapter, _name, _adapted(_name))


def _ours(argument: Any) -> Any:
    """Return an argument of pyfuse3 as handlers have it."""
    if isinstance(argument, pyfuse3.RequestContext):
        return RequestContext(argument.uid, argument.gid, argument.pid, argument.umask)
    return argument


def _converted(value: Any) -> Any:
    """Return a handler's result as pyfuse3 has it."""
    if isinstance(value, EntryAttributes):
        entry = pyfuse3.EntryAttributes()
        for field in _ENTRY_FIELDS:
            setattr(entry, field, getattr(value, field))
        return entry
    if isinstance(value, FileInfo):
        return pyfuse3.FileInfo(
            fh=pyfuse3.FileHandleT(value.fh),
            direct_io=value.direct_io,
            keep_cache=value.keep_cache,
            nonseekable=value.nonseekable,
        )
    if isinstance(value, StatvfsData):
        data = pyfuse3.StatvfsData()
        for field in value.__slots__:
            setattr(data, field, getattr(value, field))
        return data
    if isinstance(value, tuple):
        return tuple(_converted(each) for each in value)
    return value


def _escaped(text: str) -> str:
    r"""Return a value of an option as ASCII, with every special byte as \ooo, which libfuse decodes (fuse_opt.c).

    A comma would begin another option. pyfuse3 refuses all but ASCII.
    """
    return _SPECIAL.sub(lambda match: rf"\{match[0][0]:03o}".encode(), text.encode()).decode()
