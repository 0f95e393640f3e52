"""Translates the kernel's requests into engine calls, and results and errors back. It decides nothing.

Handlers that make, move and remove names are in `name_operations.py`.

Invariants:
1. Every handler goes through `guarded`. With pyfuse3, any other exception would end the mount under every process.
2. No handler waits for the bucket to accept a write: the kernel holds locks during the request.
"""

import errno
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from fusecache.engine.file_system import FileSystem
from fusecache.engine.namespace.nodes import FileHandle, Kind, Node, attributes_of, in_use
from fusecache.fs import control, hint_files
from fusecache.fs.control import FIRST_HANDLE, ControlDirectory
from fusecache.fs.handlers import errno_of, guarded, killable, timed
from fusecache.fs.kept_files import HANDLES_OF_START, KeptFiles
from fusecache.fs.mapped_reads import MappedReads
from fusecache.fs.name_operations import NameOperations
from fusecache.fs.open_directories import EntryBuilder, OpenDirectories
from fusecache.fs.passthrough import HandedFiles, Passthrough
from fusecache.fuse.values import (
    EntryAttributes,
    FileInfo,
    FUSEError,
    ReaddirToken,
    RequestContext,
    SetattrFields,
    StatvfsData,
)
from fusecache.model.errors import (
    FusecacheError,
    NotFound,
    ObjectChanged,
)
from fusecache.model.names import decode_name
from fusecache.model.records import PosixAttributes

_BLOCK = 4096
_PERMISSIONS = 0o7777
# The arguments of handlers that say which file a call is for.
_INODES = ("parent_inode", "parent_inode_old", "inode")
_NAMES = ("name", "name_old")


class Operations(NameOperations):
    """The request handlers of one mount."""

    supports_dot_lookup = False
    enable_writeback_cache = True
    enable_acl = False

    def __init__(
        self,
        filesystem: FileSystem,
        control_directory: ControlDirectory,
        record_failure: Callable[[str, Exception, str], object],
        kept: KeptFiles,
        *,
        read_only: bool,
    ) -> None:
        """record_failure: logs and counts an unexpected exception: the call, the exception, the path.

        kept: what a successor must know, and what a predecessor left.
        """
        super().__init__()
        self._record_failure = record_failure
        self._fs = filesystem
        self._control = control_directory
        self._read_only = self.enable_passthrough = read_only
        self._files: dict[int, FileHandle] = {}
        self._entries = EntryBuilder(filesystem, read_only=read_only)
        self._mapped_reads = MappedReads(filesystem)
        self.passthrough = Passthrough(filesystem)
        self.handed_files = HandedFiles(filesystem, self.passthrough, self._revalidate)
        self._directories = OpenDirectories(filesystem, self._entries, kept)
        self._kept = kept
        self._next_handle = 1 + kept.start * HANDLES_OF_START

    def adopt(self) -> None:
        """Take over the files and directories that programs have open from the daemon before."""
        left = self._kept.predecessor
        for each in [] if left is None else left.handles:
            if each.is_directory:
                node = self._fs.tree.nodes.get(each.inode)
                if node is not None:
                    self._directories.adopt(each, node)
                continue
            handle = self._fs.replayed.handles.get(each.number)
            if handle is not None:  # else its calls get EIO
                self._files[each.number] = handle
                if each.backing_id:
                    self.passthrough.adopt(handle, each.backing_id)

    def on_unmounted(self) -> None:
        """The kernel sends no releases any more."""
        self._fs.on_unmounted()

    # ---- names

    @guarded
    async def lookup(self, parent_inode: int, name: bytes, ctx: RequestContext) -> EntryAttributes:
        """Look up a name. The kernel caches a missing name for the TTL (`fresh_seconds`)."""
        if self._control.owns(parent_inode):
            inode = self._control.lookup(parent_inode, os.fsdecode(name))
            if inode is None:
                raise FUSEError(errno.ENOENT)
            return self._control.attributes(inode)
        parent = self._directory(parent_inode)
        text = decode_name(name)
        if parent is self._fs.tree.root and text == control.NAME:
            return self._control.attributes(control.DIRECTORY)
        # Read-only mounts only: with an old answer the kernel would refuse to create what another client removed.
        node = self._fs.lookup.lookup_cached(parent, text) if self._read_only else None
        if node is not None:
            return self._new(node)
        try:
            node = await self._fs.lookup.lookup(parent, text)
        except FusecacheError as exc:
            if errno_of(exc) != errno.ENOENT:
                raise
            missing = EntryAttributes()
            missing.st_ino = 0
            missing.entry_timeout = self._fs.options.fresh_seconds
            return missing
        return self._new(node)

    @guarded
    async def forget(self, inode_list: Sequence[tuple[int, int]]) -> None:
        """The kernel dropped lookup references."""
        for inode, count in inode_list:
            self._fs.tree.forget(inode, count)
        self._kept.on_forgotten(inode for inode, _ in inode_list if inode not in self._fs.tree.nodes)

    @guarded
    async def getattr(self, inode: int, ctx: RequestContext) -> EntryAttributes:
        """Return attributes."""
        if self._control.owns(inode):
            return self._control.attributes(inode)
        node = self._node(inode)
        if self._read_only and node.kind is Kind.FILE and not node.handles:
            await self._revalidate(node)
        return self._entries.of_node(node)

    @guarded
    @killable
    async def setattr(
        self,
        inode: int,
        attr: EntryAttributes,
        fields: SetattrFields,
        fh: int | None,
        ctx: RequestContext,
    ) -> EntryAttributes:
        """Change size, mode, owner or times."""
        if self._control.hints.owns(inode):
            # Truncation needs no action: each open starts a new message.
            return self._control.attributes(inode)
        self._check_writable(inode)
        node = self._node(inode)
        if fh is None:
            # Else the change would apply to a version that another client has replaced.
            await self._revalidate(node)
        if fields.update_size:
            if fh is None:
                await self._fs.file_io.wait_release(node)
            await self._fs.file_io.truncate(node, attr.st_size)
        old = attributes_of(node)
        new = PosixAttributes(
            mode=old.mode & ~_PERMISSIONS | attr.st_mode & _PERMISSIONS if fields.update_mode else old.mode,
            uid=attr.st_uid if fields.update_uid else old.uid,
            gid=attr.st_gid if fields.update_gid else old.gid,
            mtime_ns=attr.st_mtime_ns if fields.update_mtime else old.mtime_ns,
        )
        sets_time = _sets_time(fields, fh, is_new=new.mtime_ns != old.mtime_ns)
        if new != old or sets_time:
            self._fs.file_io.set_attributes(node, new, sets_time=sets_time)
            self._kept.on_changed(node)
        return self._entries.of_node(node)

    # ---- directories

    @guarded
    async def opendir(self, inode: int, ctx: RequestContext) -> int:
        """Open a directory."""
        own = self._control.opendir(inode)
        if own is not None:
            return own
        node = self._directory(inode)
        number = self._new_handle()
        self._directories.open(number, node, ctx)
        return number

    @guarded
    async def readdir(self, fh: int, start_id: int, token: ReaddirToken) -> None:
        """Stream a directory's entries, with attributes."""
        if self._control.owns_directory_handle(fh):
            self._read_control_directory(fh, start_id, token)
            return
        await self._directories.reply(fh, start_id, token)

    def _read_control_directory(self, fh: int, start_id: int, token: ReaddirToken) -> None:
        for index, (text, inode) in enumerate(self._control.entries(fh)[start_id:], start_id):
            entry = self._control.attributes(inode)
            if not token.add(text.encode(), entry, index + 1):
                return

    @guarded
    async def releasedir(self, fh: int) -> None:
        """Close a directory."""
        self._directories.release(fh)

    @guarded
    async def fsyncdir(self, fh: int, datasync: bool) -> None:
        """Return when its mode and owner are on the disk; name changes are there before their call returns."""
        await self._fs.journal.wait_committed()

    # ---- files

    @timed("open")
    @guarded
    @killable
    async def create(
        self, parent_inode: int, name: bytes, mode: int, flags: int, ctx: RequestContext
    ) -> tuple[FileInfo, EntryAttributes]:
        """Create and open a file."""
        if parent_inode == hint_files.DIRECTORY:
            return self._control.hints.create(os.fsdecode(name), ctx.uid, ctx.pid)
        node = await self._new_file(parent_inode, name, mode & ~ctx.umask & _PERMISSIONS, ctx)
        appends = bool(flags & os.O_APPEND)
        handle = self._fs.file_io.open(node, writable=True, pid=ctx.pid, appends=appends)
        return self._file_info(handle, ctx), self._new(node)

    @guarded
    async def open(self, inode: int, flags: int, ctx: RequestContext) -> FileInfo:
        """Open a file. ESTALE makes the kernel look the name up again, if another client replaced the object."""
        if self._control.hints.owns(inode):
            return self._control.hints.open(inode, ctx.uid, ctx.pid)
        if self._control.owns(inode):
            if flags & os.O_ACCMODE != os.O_RDONLY:
                raise FUSEError(errno.EACCES)
            return self._control.open(inode)
        return await self._open_file(inode, flags, ctx)

    @timed("open")
    @killable
    async def _open_file(self, inode: int, flags: int, ctx: RequestContext) -> FileInfo:
        node = self._node(inode)
        writable = flags & os.O_ACCMODE != os.O_RDONLY
        if writable:
            self._check_writable(inode)
            await self._fs.file_io.check_space(node, lambda: self._fs.tree.path(node))
            await self._fs.file_io.wait_release(node)
        await self._revalidate(node)
        await self.passthrough.prepare(node)
        await self._kept.wait_for_moves(node)
        appends = writable and bool(flags & os.O_APPEND)
        handle = self._fs.file_io.open(node, writable=writable, pid=ctx.pid, appends=appends)
        if writable and flags & os.O_TRUNC:
            try:
                await self._fs.file_io.truncate(node, 0)
            except BaseException:
                await self._fs.file_io.release(handle)
                raise
        return self._file_info(handle, ctx)

    @guarded
    async def read(self, fh: int, off: int, size: int) -> bytes | memoryview:
        """Return bytes, as a view of a buffer that stays valid until the session has replied."""
        if self._control.owns_handle(fh):
            return self._control.read(fh, off, size)
        if self._control.hints.owns_handle(fh):
            return self._control.hints.read(fh, off, size)
        handle = self._file(fh)
        if await self._mapped_reads.declines(handle, off, size):
            raise FUSEError(errno.EAGAIN)
        data = await self._fs.file_io.read(handle, off, size)
        self._fs.count_read(handle.node, len(data))
        return data

    @guarded
    async def write(self, fh: int, off: int, buf: bytes) -> int:
        """Write bytes to local content."""
        if self._control.hints.owns_handle(fh):
            return self._control.hints.write(fh, off, buf)
        return await self._fs.file_io.write(self._file(fh), off, buf)

    @guarded
    async def flush(self, fh: int) -> None:
        """Handle one close(2)."""
        if self._control.hints.owns_handle(fh):
            await self._control.hints.flush(fh)
        if fh < FIRST_HANDLE:  # else of the control directory
            handle = self._file(fh)
            await self._close_file(handle)
            self._kept.on_flushed(fh, handle)

    @timed("close")
    async def _close_file(self, handle: FileHandle) -> None:
        await self._fs.close_protocol.flush(handle)

    @guarded
    async def fsync(self, fh: int, datasync: bool) -> None:
        """Sync data and journal to the disk, and to the bucket if the mount is configured so."""
        if fh < FIRST_HANDLE:
            await self._fs.fsync(self._file(fh))

    @guarded
    async def release(self, fh: int) -> None:
        """Handle the close of an open file's last descriptor."""
        if self._control.owns_handle(fh):
            self._control.release(fh)
            return
        if self._control.hints.owns_handle(fh):
            self._control.hints.release(fh)
            return
        handle = self._files.pop(fh, None)
        if handle is None:  # of a predecessor
            self._kept.on_lost_closed(fh)
            return
        self.passthrough.close(handle.node)
        self._mapped_reads.on_closed(handle)
        try:
            await self._fs.file_io.release(handle)
        finally:
            # Last: a successor must finish what this daemon had not.
            self._kept.on_closed(fh, handle.node)

    @guarded
    async def statfs(self, ctx: RequestContext) -> StatvfsData:
        """Return the cache's limit, its used bytes and the bytes that may be written now. The bucket has no limit.

        Cached blocks count as used, but are evicted for writes. So more may be available than is free.
        """
        cache = self._fs.cache.statistics()
        used = cache.used_bytes + cache.reserved_bytes + cache.staging_bytes
        data = StatvfsData()
        data.f_bsize = data.f_frsize = _BLOCK
        data.f_blocks = max(cache.limit_bytes, used) // _BLOCK
        data.f_bfree = max(0, cache.limit_bytes - used) // _BLOCK
        data.f_bavail = self._fs.cache.writable_bytes() // _BLOCK
        data.f_files = data.f_ffree = data.f_favail = 1 << 32
        data.f_namemax = 255
        return data

    # ---- private

    def _on_unexpected(self, call: str, error: Exception, arguments: Mapping[str, Any]) -> None:
        """Record an unexpected exception of a handler, with the path that it was called for."""
        path = ""
        with suppress(Exception):  # the tree may be what is broken
            inode = next((arguments[each] for each in _INODES if each in arguments), None)
            node = self._files[arguments["fh"]].node if inode is None else self._node(inode)
            names = [os.fsdecode(arguments[each]) for each in _NAMES if each in arguments]
            path = "/".join([self._fs.tree.path(node), *names]).removeprefix("./")
        self._record_failure(f"fuse-{call}", error, path)

    def _new_handle(self) -> int:
        number = self._next_handle
        self._next_handle += 1
        return number

    def _file(self, fh: int) -> FileHandle:
        handle = self._files.get(fh)
        if handle is None:
            # Of a predecessor: what was written is not certain. Or of its control directory.
            raise FUSEError(errno.EIO if fh < FIRST_HANDLE else errno.ESTALE)
        return handle

    def _file_info(self, handle: FileHandle, ctx: RequestContext) -> FileInfo:
        # One inode is one version, so the kernel's cached pages of it are never stale. The daemon does not see a read
        # that they answer, so a recording does without those of earlier opens.
        number = self._new_handle()
        self._files[number] = handle
        keep_cache = not self._fs.hints.is_recording
        backing_id = self.passthrough.open(handle)
        self._kept.on_opened(number, ctx.unique, handle, backing_id)
        return FileInfo(fh=number, keep_cache=keep_cache, backing_id=backing_id)

    async def _revalidate(self, node: Node) -> None:
        """Check that the name still means this inode, by a lookup if its TTL is over. Raises ObjectChanged.

        The kernel then looks the name up. The inode may be of a file that is removed and still open.
        """
        if node.parent is not None and node.version is None and not self._fs.lookup.ttl.is_node_fresh(node):
            with in_use(node):
                try:
                    seen = await self._fs.lookup.lookup(node.parent, node.name)
                except NotFound as exc:
                    # The kernel looks the name up again, and creates a file if the caller asked for that.
                    raise ObjectChanged(f"{node.name}: was removed from the bucket") from exc
            if seen is not node:
                raise ObjectChanged(f"{node.name}: was replaced in the bucket")
        if not node.handles and not self._fs.tree.is_linked(node):
            # The kernel has not heard yet that the name has another file, or lost this one as its writer was killed.
            raise ObjectChanged(f"{node.name}: this file lost its name")


def _sets_time(fields: SetattrFields, fh: int | None, *, is_new: bool) -> bool | None:
    """Return whether a program sets a file's time, or the kernel tells the one of a write; None: it stays.

    With its write-back cache, the kernel tells it with the file's handle, or with a new size. And it repeats the time
    that it knows, as after a rename.
    """
    if not fields.update_mtime or not (is_new or fields.update_atime):
        return None
    return fh is None and not fields.update_size
