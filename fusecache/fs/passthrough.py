"""Lets the kernel read whole cached files by itself (FUSE_PASSTHROUGH): their reads do not come to the daemon.

Only on mounts that are read-only, as the kernel has either this or its writeback cache.

Invariants:
1. All opens of an inode at a time are of one kind, as the kernel demands. So a file changes its kind at an open when no
   other is left.
2. While an inode is open so, the cache holds its file: it is neither evicted nor written.

Gives cache files to programs that read them by themselves, where the kernel does not do that (`passthrough`).

A program asks over the control socket. It gets a descriptor of the file in the cache directory: its reads come neither
to the daemon nor to the mount. `loader` asks so for its shards.
"""

import errno
import logging
import os
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import trio

from fusecache.engine.file_system import FileSystem
from fusecache.engine.namespace.nodes import FileHandle, Kind, Node
from fusecache.fuse.library import FuseSession
from fusecache.model.errors import FusecacheError, NotPermitted
from fusecache.model.objects import MIB

log = logging.getLogger(__name__)

# An open by passthrough costs some 0.4 ms more, in which the daemon reads 0.5 MiB (benchmarks/passthrough.py).
LEAST_BYTES = MIB
_REASONS = {
    errno.EPERM: "the daemon has no CAP_SYS_ADMIN: run it as root of the host",
    errno.ELOOP: "the cache directory is on a stacked file system such as overlay: use a plain one",
    errno.EINVAL: "the cache directory's file system has no direct I/O or no leases: use a local one",
}


@dataclass(eq=False, slots=True)
class _Backing:
    """The kernel's number for the cache file of an inode. release: gives the file back to the cache; opens: of now."""

    number: int
    release: Callable[[], None]
    opens: int = 0


class Passthrough:
    """The inodes of one mount that are open by passthrough."""

    def __init__(self, filesystem: FileSystem) -> None:
        self._fs = filesystem
        self._session: FuseSession | None = None
        self._backings: dict[int, _Backing] = {}

    def attach(self, session: FuseSession) -> None:
        """Begin with a mount. The log says why if the kernel cannot read cache files. Blocks, for some system calls."""
        if not self._fs.options.read_only:
            return
        reason: str | None = "needs Linux 6.9 and the own FUSE library"
        if session.can_pass_through:
            try:
                fd = self._fs.cache.maintenance.open_probe()
                try:
                    session.close_backing(session.open_backing(fd))
                finally:
                    os.close(fd)
            except OSError as exc:
                reason = reason_against(exc)
            else:
                self._session = session
                return
        log.info("passthrough=off, the daemon reads cached files for the kernel reason=%s", reason)

    @property
    def is_on(self) -> bool:
        """Whether the kernel reads whole files of this mount by itself."""
        return self._session is not None

    async def prepare(self, node: Node) -> None:
        """Make an inode's file ready, if it is whole and no other open speaks against it. Call `open` at once then."""
        session, remote = self._session, node.object
        if (
            session is None
            or remote is None
            or remote.size < LEAST_BYTES
            or self._is_decided(node)
            or self._fs.hints.needs_reads(remote.object_id)
        ):
            return
        cache = self._fs.cache.maintenance
        whole = await cache.hold_whole(remote.object_id, remote.size)
        if whole is None:
            return
        release = partial(cache.release_whole, whole)
        try:
            # Another open may have come first.
            if self._is_decided(node) or node.object is not remote:
                release()
                return
            self._backings[node.number] = _Backing(session.open_backing(whole.fd), release)
        except OSError as exc:
            release()
            log.debug("no passthrough for a file inode=%d error=%s", node.number, exc)
        finally:
            os.close(whole.fd)

    def adopt(self, handle: FileHandle, backing_id: int) -> None:
        """Go on with an open of the daemon before, under its number. The kernel has read the file all the time."""
        number = handle.node.number
        if number not in self._backings:
            self._backings[number] = _Backing(backing_id, _nothing)
        self._backings[number].opens += 1
        self._fs.cache.maintenance.passed_through_opens += 1

    async def hold_adopted(self) -> None:
        """Have the cache hold the files that were adopted, which it protects until then as found."""
        cache = self._fs.cache.maintenance
        for number, backing in list(self._backings.items()):
            node = self._fs.tree.nodes.get(number)
            remote = None if node is None else node.object
            whole = None if remote is None else await cache.hold_whole(remote.object_id, remote.size)
            if whole is None:
                continue
            os.close(whole.fd)
            if self._backings.get(number) is backing:
                backing.release = partial(cache.release_whole, whole)
            else:  # closed by now
                cache.release_whole(whole)

    def open(self, handle: FileHandle) -> int:
        """Return the number with which the kernel opens a file, 0 for reads through the daemon."""
        backing = self._backings.get(handle.node.number)
        if backing is None:
            return 0
        backing.opens += 1
        self._fs.cache.maintenance.passed_through_opens += 1
        self._fs.file_io.announce_read(handle)
        return backing.number

    def close(self, node: Node) -> None:
        """End one open of an inode."""
        backing = self._backings.get(node.number)
        if backing is None:
            return
        backing.opens -= 1
        self._fs.cache.maintenance.passed_through_opens -= 1
        if not backing.opens:
            del self._backings[node.number]
            if self._session is not None:
                with suppress(OSError):  # the mount is gone, and its numbers with it
                    self._session.close_backing(backing.number)
            backing.release()

    def _is_decided(self, node: Node) -> bool:
        """Whether other opens have decided how the inode is open."""
        return node.handles > 0 or node.number in self._backings


def reason_against(problem: OSError) -> str:
    """Return why programs or the kernel cannot read the files in the cache directory by themselves."""
    return _REASONS.get(problem.errno or 0) or problem.strerror or str(problem)


def _nothing() -> None:
    """The cache has dropped the file: the kernel alone still has it."""


# Requests at once; others are told to read through the mount. The control socket has connections left then.
_AT_ONCE = 64
_LASTING = (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS)
_READ, _SEARCH = 4, 1


class HandedFiles:
    """The files of one mount that programs may have."""

    def __init__(
        self, filesystem: FileSystem, passthrough: Passthrough, revalidate: Callable[[Node], Awaitable[None]]
    ) -> None:
        """revalidate: as each open of a file, checks that its name still means this inode. Raises FusecacheError."""
        self._fs = filesystem
        self._passthrough = passthrough
        self._revalidate = revalidate
        self._mountpoint = ""
        self._device: int | None = None
        self._under_way = 0
        self._reason: str | None = None

    def attach(self, mountpoint: str) -> None:
        """Begin with a mount."""
        self._mountpoint = mountpoint

    async def open(self, request: Mapping[str, Any], user: int) -> int | None:
        """Return a descriptor of a file's bytes for reading, which the caller closes. None: read it through the mount.

        request: `device` and `inode`, as stat(2) shows them; `unless_open`: none if a program has the file open through
        the mount, whose pages the kernel keeps then. user: the program's; None too if modes forbid it to read the file.
        Raises NotPermitted if this mount gives no files at all, or is not the one that the file is on.
        """
        if self._under_way >= _AT_ONCE:
            return None
        self._under_way += 1
        try:
            await self._check(int(request.get("device", -1)))
            node = self._fs.tree.nodes.get(int(request.get("inode", -1)))
            if node is None or not _may_read(node, user):
                return None
            await self._revalidate(node)
            remote = node.object
            if (
                node.parent is None  # the kernel has not heard yet that the name means another file
                or remote is None
                or node.kind is not Kind.FILE
                or node.version is not None
                or node.writers > 0  # the kernel may have changes that the daemon has not
                or remote.size < LEAST_BYTES
                or (node.handles > 0 and bool(request.get("unless_open")))
                or self._fs.hints.needs_reads(remote.object_id)
            ):
                return None
            return await self._fs.cache.maintenance.hand_out(remote.object_id, remote.size)
        except NotPermitted:
            raise
        except (FusecacheError, OSError):  # reads through the mount say what is wrong
            return None
        finally:
            self._under_way -= 1

    async def _check(self, device: int) -> None:
        """Raise NotPermitted if this mount gives no files, or is another one. Raises OSError, for the moment."""
        if self._passthrough.is_on:
            raise NotPermitted("the kernel reads the files of this mount by itself")
        if self._reason is None:
            try:
                os.close(await trio.to_thread.run_sync(self._fs.cache.maintenance.open_probe))
            except OSError as exc:
                if exc.errno not in _LASTING:
                    raise
                self._reason = reason_against(exc)
            else:
                self._reason = ""
        if self._reason:
            raise NotPermitted(f"this mount gives no cache files: {self._reason}")
        if self._device is None:
            # In a thread that the end of the mount does not wait for: the kernel asks this daemon.
            found = await trio.to_thread.run_sync(os.stat, self._mountpoint, abandon_on_cancel=True)
            self._device = found.st_dev
        if device != self._device:
            raise NotPermitted("this socket belongs to the daemon of another mount: unset FUSECACHE_SOCKET")


def _may_read(node: Node, user: int) -> bool:
    """Return whether the modes let a user read a file by its path. Root, and who can read the cache directory, may."""
    if user in (0, os.geteuid()):
        return True
    right, each = _READ, node
    while True:
        # Which groups the user is in is unknown here.
        mode = each.mode >> 6 if each.uid == user else each.mode >> 3 & each.mode
        if not mode & right:
            return False
        if each.parent is None:
            return True
        right, each = _SEARCH, each.parent
