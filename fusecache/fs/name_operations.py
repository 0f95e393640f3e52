"""The kernel's requests that change names: translated into engine calls, as in `operations.py`.

A request may be done again, after a daemon that had begun it was killed (`RequestContext.is_redone`). If that daemon
had carried the change out, it must not fail now for that reason.
"""

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager

from fusecache.engine.file_system import FileSystem
from fusecache.engine.namespace.nodes import Kind, Node
from fusecache.fs import control, hint_files
from fusecache.fs.control import ControlDirectory
from fusecache.fs.handlers import guarded, killable
from fusecache.fs.kept_files import KeptFiles
from fusecache.fs.open_directories import EntryBuilder
from fusecache.fuse.handlers import RequestHandlers
from fusecache.fuse.values import (
    RENAME_NOREPLACE,
    ROOT_INODE,
    EntryAttributes,
    FUSEError,
    RequestContext,
)
from fusecache.model.errors import (
    AlreadyExists,
    InvalidName,
    NameTooLong,
    NotFound,
    NotPermitted,
    ReadOnly,
)
from fusecache.model.names import decode_name, special_mode

_PERMISSIONS = 0o7777
# The target is stored percent-encoded in the object's metadata, which S3 limits to 2 KiB.
_TARGET_BYTES_MAX = 600


class NameOperations(RequestHandlers):
    """The handlers that make, move and remove names."""

    _fs: FileSystem
    _control: ControlDirectory
    _kept: KeptFiles
    _entries: EntryBuilder
    _read_only: bool

    @guarded
    async def readlink(self, inode: int, ctx: RequestContext) -> bytes:
        """Return the target of a symlink that is followed."""
        return os.fsencode(self._fs.symlinks.read(self._node(inode)))

    @guarded
    @killable
    async def mkdir(self, parent_inode: int, name: bytes, mode: int, ctx: RequestContext) -> EntryAttributes:
        """Make a directory."""
        self._check_writable(parent_inode)
        bits = mode & ~ctx.umask & _PERMISSIONS
        parent, new_name = self._directory(parent_inode), self._new_name(parent_inode, name)
        try:
            node = await self._fs.namespace_ops.mkdir(parent, new_name, bits, (ctx.uid, ctx.gid))
        except AlreadyExists:
            # A predecessor made it, but did not get to say so: the kernel asks only where it knows of no such name.
            node = await self._fs.lookup.lookup(parent, new_name)
            if not ctx.is_redone or node.kind is not Kind.DIRECTORY:
                raise
        return self._new(node)

    @guarded
    @killable
    async def symlink(
        self, parent_inode: int, name: bytes, target: bytes, ctx: RequestContext
    ) -> EntryAttributes:
        """Make a symlink."""
        self._check_writable(parent_inode)
        try:
            text = target.decode("utf-8")
        except UnicodeDecodeError as exc:
            raise InvalidName(f"{target!r}: a symlink's target must be UTF-8") from exc
        if len(target) > _TARGET_BYTES_MAX:
            raise NameTooLong(f"a symlink's target may have {_TARGET_BYTES_MAX} bytes, not {len(target)}")
        parent, new_name = self._directory(parent_inode), self._new_name(parent_inode, name)
        self._fs.symlinks.check_new(parent, new_name, text)
        try:
            node = await self._fs.namespace_ops.symlink(parent, new_name, text)
        except AlreadyExists:
            node = await self._fs.lookup.lookup(parent, new_name)
            if not ctx.is_redone or node.target != text:
                raise
        return self._new(node)

    @guarded
    @killable
    async def unlink(self, parent_inode: int, name: bytes, ctx: RequestContext) -> None:
        """Remove a file."""
        if parent_inode == hint_files.DIRECTORY:
            self._control.hints.unlink(os.fsdecode(name), ctx.uid)
            return
        self._check_writable(parent_inode)
        parent, old_name = self._directory(parent_inode), decode_name(name)
        with _done_before(ctx):
            await self._fs.namespace_ops.unlink(parent, old_name)

    @guarded
    @killable
    async def rmdir(self, parent_inode: int, name: bytes, ctx: RequestContext) -> None:
        """Remove an empty directory."""
        self._check_writable(parent_inode)
        parent, old_name = self._directory(parent_inode), decode_name(name)
        with _done_before(ctx):
            await self._fs.namespace_ops.rmdir(parent, old_name)

    @guarded
    @killable
    async def rename(
        self,
        parent_inode_old: int,
        name_old: bytes,
        parent_inode_new: int,
        name_new: bytes,
        flags: int,
        ctx: RequestContext,
    ) -> None:
        """Rename, atomically on this node. RENAME_EXCHANGE is not supported."""
        self._check_writable(parent_inode_old)
        self._check_writable(parent_inode_new)
        if flags & ~RENAME_NOREPLACE:
            raise FUSEError(errno.EINVAL)
        old, new = self._directory(parent_inode_old), self._directory(parent_inode_new)
        old_name, new_name = decode_name(name_old), self._new_name(parent_inode_new, name_new)
        with _done_before(ctx):
            await self._fs.namespace_ops.rename(
                old, old_name, new, new_name, replace=not flags & RENAME_NOREPLACE
            )

    @guarded
    async def link(
        self, inode: int, new_parent_inode: int, new_name: bytes, ctx: RequestContext
    ) -> EntryAttributes:
        """Hard links do not exist in a bucket: EPERM, as link(2) specifies for such file systems."""
        raise NotPermitted("hard links are not supported: a bucket has none; use a symlink or a copy")

    @guarded
    @killable
    async def mknod(
        self, parent_inode: int, name: bytes, mode: int, rdev: int, ctx: RequestContext
    ) -> EntryAttributes:
        """Make an empty file, or a pipe, socket or device node, which stays on this node."""
        bits = mode & ~ctx.umask & _PERMISSIONS
        if not stat.S_ISREG(mode):
            bits = special_mode(stat.S_IFMT(mode) | bits, rdev)
        try:
            node = await self._new_file(parent_inode, name, bits, ctx)
        except AlreadyExists:
            if not ctx.is_redone:
                raise
            node = await self._fs.lookup.lookup(self._directory(parent_inode), decode_name(name))
            if not _is_empty_of_type(node, bits):
                raise
            return self._new(node)
        handle = self._fs.file_io.open(node, writable=True, pid=ctx.pid)
        try:
            await self._fs.close_protocol.flush(handle)
        finally:
            await self._fs.file_io.release(handle)
        return self._new(node)

    # ---- for all handlers

    def _node(self, inode: int) -> Node:
        node = self._fs.lookup.node_by_inode(inode)
        if node is None:
            raise FUSEError(errno.ESTALE)
        return node

    def _directory(self, inode: int) -> Node:
        if self._control.owns(inode):
            raise FUSEError(errno.EACCES)
        node = self._node(inode)
        if node.kind is not Kind.DIRECTORY:
            raise FUSEError(errno.ENOTDIR)
        if not self._fs.tree.is_linked(node):
            raise FUSEError(errno.ENOENT)  # removed: nothing can be created in it
        return node

    def _new_name(self, parent_inode: int, name: bytes) -> str:
        """Return the name of an entry to be created. Raises NotPermitted for the control directory's name."""
        text = decode_name(name)
        if text == control.NAME and parent_inode == ROOT_INODE:
            raise NotPermitted(
                f"{text}: this name in the mount's root is reserved for the daemon's control files"
            )
        return text

    def _check_writable(self, inode: int) -> None:
        if self._control.owns(inode):
            raise FUSEError(errno.EACCES)
        if self._read_only:
            raise ReadOnly("this mount is read-only")

    async def _new_file(self, parent_inode: int, name: bytes, mode: int, ctx: RequestContext) -> Node:
        self._check_writable(parent_inode)
        return await self._fs.namespace_ops.create(
            self._directory(parent_inode), self._new_name(parent_inode, name), mode, (ctx.uid, ctx.gid)
        )

    def _new(self, node: Node) -> EntryAttributes:
        """Return what the kernel hears of a node."""
        node.lookups += 1
        self._kept.on_shown(node, node.parent)
        return self._entries.of_node(node)


def _is_empty_of_type(node: Node, mode: int) -> bool:
    """Return whether a node is an empty file, or a special file, of the type and device number in a mode."""
    is_same = node.mode & ~_PERMISSIONS == mode & ~_PERMISSIONS
    return node.kind is Kind.FILE and not node.size and is_same


@contextmanager
def _done_before(ctx: RequestContext) -> Iterator[None]:
    """A removal or rename that is done again finds nothing if the predecessor has carried it out: that is success."""
    try:
        yield
    except NotFound:
        if not ctx.is_redone:
            raise
