"""Each request of the kernel: its lengths are checked, its handler is called, its reply is packed."""

import errno
import os
import time
from collections.abc import Awaitable, Callable  # noqa: TC003
from struct import Struct
from typing import Any

from fusecache.fuse.handlers import RequestHandlers
from fusecache.fuse.kept_requests import KeptBuffer
from fusecache.fuse.protocol import (
    ATTR_OUT,
    BATCH_FORGET_IN,
    CREATE_IN,
    DIRENT,
    ENTRY_OUT,
    FATTR_ATIME,
    FATTR_ATIME_NOW,
    FATTR_CTIME,
    FATTR_FH,
    FATTR_GID,
    FATTR_MODE,
    FATTR_MTIME,
    FATTR_MTIME_NOW,
    FATTR_SIZE,
    FATTR_UID,
    FLUSH_IN,
    FOPEN_DIRECT_IO,
    FOPEN_KEEP_CACHE,
    FOPEN_NONSEEKABLE,
    FOPEN_PASSTHROUGH,
    FORGET_IN,
    FORGET_ONE,
    FSYNC_FDATASYNC,
    FSYNC_IN,
    IN_HEADER,
    LINK_IN,
    MKDIR_IN,
    MKNOD_IN,
    OPEN_IN,
    OPEN_OUT,
    READ_IN,
    RELEASE_IN,
    RENAME2_IN,
    RENAME_IN,
    SETATTR_IN,
    STATFS_OUT,
    WRITE_IN,
    WRITE_OUT,
    Opcode,
)
from fusecache.fuse.values import (
    EntryAttributes,
    FileInfo,
    FUSEError,
    RequestContext,
    SetattrFields,
    StatvfsData,
)

Payload = bytes | memoryview
_NANOSECONDS = 10**9
_UNSIGNED = 2**64 - 1
# As good as for ever; more would not fit.
_LONGEST_TIMEOUT_SECONDS = 2**32
# What struct fuse_attr's kstat shows as an inode's number in a directory without attributes.
_NAME_ALIGNMENT = 8
# A readdir reply holds no more, whatever the kernel asks for.
_READDIR_BYTES_MAX = 1024 * 1024
# Requests that change nothing, so that a signal may end them.
_READING = frozenset(
    {
        Opcode.LOOKUP, Opcode.GETATTR, Opcode.READLINK, Opcode.OPEN, Opcode.READ, Opcode.STATFS, Opcode.FSYNC,
        Opcode.OPENDIR, Opcode.READDIRPLUS, Opcode.FSYNCDIR,
    }
)  # fmt: skip
# Of these, the ones after which nothing is open that was not open before.
_REPEATABLE = _READING - {Opcode.OPEN, Opcode.OPENDIR}
# Requests that the kernel expects no reply to.
SILENT = frozenset({Opcode.FORGET, Opcode.BATCH_FORGET, Opcode.INTERRUPT})


class Malformed(FUSEError):
    """A request whose lengths do not fit; it is answered with EINVAL."""

    def __init__(self) -> None:
        super().__init__(errno.EINVAL)


class KernelRequest:
    """One request. body: a view of what follows the header, valid until the handler waits (of a write: to its end).

    place: the memory that it lies in, once the session has set it. is_carried: a mover answers it, and the place is
    needed until then.
    """

    __slots__ = (
        "body", "gid", "is_carried", "is_redone", "nodeid", "opcode", "pid", "place", "token", "uid", "unique",
    )  # fmt: skip

    place: KeptBuffer

    def __init__(self, message: memoryview) -> None:
        """message: all of it. Raises Malformed, if not even the header is there."""
        if len(message) < IN_HEADER.size:
            raise Malformed
        size, self.opcode, self.unique, self.nodeid, self.uid, self.gid, self.pid, _, _ = (
            IN_HEADER.unpack_from(message)
        )
        # A length that is wrong leaves nothing that could be parsed.
        self.body = message[IN_HEADER.size :] if size == len(message) else message[:0]
        self.token: _DirectoryReply | None = None
        self.is_redone = self.is_carried = False

    def keep_reply(self, payload: Payload, error: int) -> None:
        """Keep the reply for a successor, unless the request changes nothing, and may be answered again."""
        if self.opcode not in _REPEATABLE:
            self.place.keep_reply(payload, error)

    def changes_nothing(self) -> bool:
        """Return whether a signal may end it: not an open that truncates. Needs the body."""
        if self.opcode == Opcode.OPEN:
            return len(self.body) >= OPEN_IN.size and not self.fields(OPEN_IN)[0] & os.O_TRUNC
        return self.opcode in _READING

    def context(self, umask: int = 0) -> RequestContext:
        """Return who called."""
        return RequestContext(self.uid, self.gid, self.pid, umask, self.unique, self.is_redone)

    def fields(self, struct: Struct) -> tuple[Any, ...]:
        """Return the fields of the struct that the body begins with. Raises Malformed."""
        if len(self.body) < struct.size:
            raise Malformed
        return struct.unpack_from(self.body)

    def names(self, count: int, struct: Struct | None = None) -> list[bytes]:
        """Return the names behind a struct, each of which ends in NUL. Raises Malformed."""
        raw = bytes(self.body[struct.size if struct else 0 :])
        parts = raw.split(b"\0", count)
        if len(parts) <= count or not all(parts[:count]):
            raise Malformed
        return parts[:count]


class _DirectoryReply:
    """The entries of one readdir reply, at most `size` bytes."""

    __slots__ = ("_left", "_parts")

    def __init__(self, size: int) -> None:
        self._left = min(size, _READDIR_BYTES_MAX)
        self._parts: list[bytes] = []

    def add(self, name: bytes, entry: EntryAttributes, next_id: int) -> bool:
        """Add an entry; return whether it fitted."""
        plain = ENTRY_OUT.size + DIRENT.size + len(name)
        padding = -plain % _NAME_ALIGNMENT
        if plain + padding > self._left:
            return False
        self._left -= plain + padding
        kind = (entry.st_mode >> 12) & 0xF
        self._parts += (
            _entry(entry), DIRENT.pack(entry.st_ino, next_id, len(name), kind), name, bytes(padding)
        )  # fmt: skip
        return True

    def payload(self) -> bytes:
        """Return the reply."""
        return b"".join(self._parts)


def _attributes(entry: EntryAttributes) -> tuple[int, ...]:
    modified, modified_rest = divmod(entry.st_mtime_ns, _NANOSECONDS)
    accessed, accessed_rest = divmod(entry.st_atime_ns, _NANOSECONDS)
    changed, changed_rest = divmod(entry.st_ctime_ns, _NANOSECONDS)
    return (
        entry.st_ino, entry.st_size, entry.st_blocks,
        accessed & _UNSIGNED, modified & _UNSIGNED, changed & _UNSIGNED,
        accessed_rest, modified_rest, changed_rest,
        entry.st_mode, entry.st_nlink, entry.st_uid, entry.st_gid, entry.st_rdev, entry.st_blksize, 0,
    )  # fmt: skip


def _timeout(seconds: float) -> tuple[int, int]:
    if seconds <= 0:
        return 0, 0
    if seconds >= _LONGEST_TIMEOUT_SECONDS:
        return _LONGEST_TIMEOUT_SECONDS, 0
    whole = int(seconds)
    return whole, int((seconds - whole) * _NANOSECONDS)


def _entry(entry: EntryAttributes) -> bytes:
    name, name_rest = _timeout(entry.entry_timeout)
    kept, kept_rest = _timeout(entry.attr_timeout)
    return ENTRY_OUT.pack(
        entry.st_ino, entry.generation, name, kept, name_rest, kept_rest, *_attributes(entry)
    )


def _attr(entry: EntryAttributes) -> bytes:
    kept, kept_rest = _timeout(entry.attr_timeout)
    return ATTR_OUT.pack(kept, kept_rest, 0, *_attributes(entry))


def _opened(info: FileInfo) -> bytes:
    if info.backing_id:  # together with KEEP_CACHE it would be EIO
        return OPEN_OUT.pack(info.fh, FOPEN_PASSTHROUGH, info.backing_id)
    flags = (
        (FOPEN_DIRECT_IO if info.direct_io else 0)
        | (FOPEN_KEEP_CACHE if info.keep_cache else 0)
        | (FOPEN_NONSEEKABLE if info.nonseekable else 0)
    )
    return OPEN_OUT.pack(info.fh, flags, 0)


def packed_statfs(data: StatvfsData) -> bytes:
    """Return the reply to a statfs request."""
    return STATFS_OUT.pack(
        data.f_blocks, data.f_bfree, data.f_bavail, data.f_files, data.f_ffree, data.f_bsize, data.f_namemax,
        data.f_frsize, *[0] * 7,
    )  # fmt: skip


def _nanoseconds(seconds: int, rest: int) -> int:
    return (seconds - 2**64 if seconds >= 2**63 else seconds) * _NANOSECONDS + rest


class Requests:
    """Calls the handlers of a file system. `table` has a coroutine function for each opcode that is known.

    Each returns the payload of the reply, and raises FUSEError. It reads the request's body before it waits.
    """

    def __init__(self, operations: RequestHandlers) -> None:
        self._operations = operations
        self.table: dict[int, Callable[[KernelRequest], Awaitable[Payload]]] = {
            Opcode.LOOKUP: self._lookup,
            Opcode.FORGET: self._forget,
            Opcode.BATCH_FORGET: self._forget_batch,
            Opcode.GETATTR: self._getattr,
            Opcode.SETATTR: self._setattr,
            Opcode.READLINK: self._readlink,
            Opcode.SYMLINK: self._symlink,
            Opcode.MKNOD: self._mknod,
            Opcode.MKDIR: self._mkdir,
            Opcode.UNLINK: self._unlink,
            Opcode.RMDIR: self._rmdir,
            Opcode.RENAME: self._rename,
            Opcode.RENAME2: self._rename2,
            Opcode.LINK: self._link,
            Opcode.OPEN: self._open,
            Opcode.CREATE: self._create,
            Opcode.READ: self._read,
            Opcode.WRITE: self._write,
            Opcode.STATFS: self._statfs,
            Opcode.FLUSH: self._flush,
            Opcode.RELEASE: self._release,
            Opcode.FSYNC: self._fsync,
            Opcode.OPENDIR: self._opendir,
            Opcode.READDIRPLUS: self._readdirplus,
            Opcode.RELEASEDIR: self._releasedir,
            Opcode.FSYNCDIR: self._fsyncdir,
            Opcode.DESTROY: self._destroy,
        }

    # ---- names

    async def _lookup(self, request: KernelRequest) -> Payload:
        (name,) = request.names(1)
        return _entry(await self._operations.lookup(request.nodeid, name, request.context()))

    async def _forget(self, request: KernelRequest) -> Payload:
        (count,) = request.fields(FORGET_IN)
        await self._operations.forget([(request.nodeid, count)])
        return b""

    async def _forget_batch(self, request: KernelRequest) -> Payload:
        count, _ = request.fields(BATCH_FORGET_IN)
        rows = bytes(request.body[BATCH_FORGET_IN.size : BATCH_FORGET_IN.size + count * FORGET_ONE.size])
        if len(rows) != count * FORGET_ONE.size:
            raise Malformed
        await self._operations.forget(list(FORGET_ONE.iter_unpack(rows)))
        return b""

    async def _readlink(self, request: KernelRequest) -> Payload:
        return await self._operations.readlink(request.nodeid, request.context())

    async def _symlink(self, request: KernelRequest) -> Payload:
        name, target = request.names(2)
        return _entry(await self._operations.symlink(request.nodeid, name, target, request.context()))

    async def _mknod(self, request: KernelRequest) -> Payload:
        mode, rdev, umask, _ = request.fields(MKNOD_IN)
        (name,) = request.names(1, MKNOD_IN)
        return _entry(await self._operations.mknod(request.nodeid, name, mode, rdev, request.context(umask)))

    async def _mkdir(self, request: KernelRequest) -> Payload:
        mode, umask = request.fields(MKDIR_IN)
        (name,) = request.names(1, MKDIR_IN)
        # Without the type, as mkdir(2) has it; handlers see it with that, as libfuse has it.
        mode = (mode & 0o7777) | 0o040000
        return _entry(await self._operations.mkdir(request.nodeid, name, mode, request.context(umask)))

    async def _unlink(self, request: KernelRequest) -> Payload:
        (name,) = request.names(1)
        await self._operations.unlink(request.nodeid, name, request.context())
        return b""

    async def _rmdir(self, request: KernelRequest) -> Payload:
        (name,) = request.names(1)
        await self._operations.rmdir(request.nodeid, name, request.context())
        return b""

    async def _rename(self, request: KernelRequest) -> Payload:
        (directory,) = request.fields(RENAME_IN)
        old, new = request.names(2, RENAME_IN)
        await self._operations.rename(request.nodeid, old, directory, new, 0, request.context())
        return b""

    async def _rename2(self, request: KernelRequest) -> Payload:
        directory, flags, _ = request.fields(RENAME2_IN)
        old, new = request.names(2, RENAME2_IN)
        await self._operations.rename(request.nodeid, old, directory, new, flags, request.context())
        return b""

    async def _link(self, request: KernelRequest) -> Payload:
        (inode,) = request.fields(LINK_IN)
        (name,) = request.names(1, LINK_IN)
        return _entry(await self._operations.link(inode, request.nodeid, name, request.context()))

    # ---- attributes

    async def _getattr(self, request: KernelRequest) -> Payload:
        return _attr(await self._operations.getattr(request.nodeid, request.context()))

    async def _setattr(self, request: KernelRequest) -> Payload:
        (
            valid, _, fh, size, _, atime, mtime, ctime, atime_rest, mtime_rest, ctime_rest, mode, _, uid, gid, _,
        ) = request.fields(SETATTR_IN)  # fmt: skip
        attributes = EntryAttributes()
        attributes.st_size, attributes.st_mode, attributes.st_uid, attributes.st_gid = size, mode, uid, gid
        now = time.time_ns() if valid & (FATTR_ATIME_NOW | FATTR_MTIME_NOW) else 0
        attributes.st_atime_ns = now if valid & FATTR_ATIME_NOW else _nanoseconds(atime, atime_rest)
        attributes.st_mtime_ns = now if valid & FATTR_MTIME_NOW else _nanoseconds(mtime, mtime_rest)
        attributes.st_ctime_ns = _nanoseconds(ctime, ctime_rest)
        fields = SetattrFields(
            update_atime=bool(valid & (FATTR_ATIME | FATTR_ATIME_NOW)),
            update_mtime=bool(valid & (FATTR_MTIME | FATTR_MTIME_NOW)),
            update_ctime=bool(valid & FATTR_CTIME),
            update_mode=bool(valid & FATTR_MODE),
            update_uid=bool(valid & FATTR_UID),
            update_gid=bool(valid & FATTR_GID),
            update_size=bool(valid & FATTR_SIZE),
        )
        handle = fh if valid & FATTR_FH else None
        return _attr(
            await self._operations.setattr(request.nodeid, attributes, fields, handle, request.context())
        )

    async def _statfs(self, request: KernelRequest) -> Payload:
        return packed_statfs(await self._operations.statfs(request.context()))

    # ---- files

    async def _open(self, request: KernelRequest) -> Payload:
        flags, _ = request.fields(OPEN_IN)
        return _opened(await self._operations.open(request.nodeid, flags, request.context()))

    async def _create(self, request: KernelRequest) -> Payload:
        flags, mode, umask, _ = request.fields(CREATE_IN)
        (name,) = request.names(1, CREATE_IN)
        info, entry = await self._operations.create(request.nodeid, name, mode, flags, request.context(umask))
        return _entry(entry) + _opened(info)

    async def _read(self, request: KernelRequest) -> Payload:
        fh, offset, size, _, _, _, _ = request.fields(READ_IN)
        data = await self._operations.read(fh, offset, size)
        return data if len(data) <= size else data[:size]

    async def _write(self, request: KernelRequest) -> Payload:
        fh, offset, size, _, _, _, _ = request.fields(WRITE_IN)
        data = request.body[WRITE_IN.size :]
        if len(data) != size:
            raise Malformed
        # A view: no copy of up to a MiB.
        return WRITE_OUT.pack(await self._operations.write(fh, offset, data), 0)  # type: ignore[arg-type]

    async def _flush(self, request: KernelRequest) -> Payload:
        fh, _, _, _ = request.fields(FLUSH_IN)
        await self._operations.flush(fh)
        return b""

    async def _release(self, request: KernelRequest) -> Payload:
        fh, _, _, _ = request.fields(RELEASE_IN)
        await self._operations.release(fh)
        return b""

    async def _fsync(self, request: KernelRequest) -> Payload:
        fh, flags, _ = request.fields(FSYNC_IN)
        await self._operations.fsync(fh, bool(flags & FSYNC_FDATASYNC))
        return b""

    # ---- directories

    async def _opendir(self, request: KernelRequest) -> Payload:
        request.fields(OPEN_IN)
        return OPEN_OUT.pack(await self._operations.opendir(request.nodeid, request.context()), 0, 0)

    async def _readdirplus(self, request: KernelRequest) -> Payload:
        fh, offset, size, _, _, _, _ = request.fields(READ_IN)
        token = request.token = _DirectoryReply(size)
        await self._operations.readdir(fh, offset, token)
        return token.payload()

    async def _releasedir(self, request: KernelRequest) -> Payload:
        fh, _, _, _ = request.fields(RELEASE_IN)
        await self._operations.releasedir(fh)
        return b""

    async def _fsyncdir(self, request: KernelRequest) -> Payload:
        fh, flags, _ = request.fields(FSYNC_IN)
        await self._operations.fsyncdir(fh, bool(flags & FSYNC_FDATASYNC))
        return b""

    async def _destroy(self, request: KernelRequest) -> Payload:
        return b""
