"""Gives cache files to programs that read them by themselves, where the kernel does not do that (`passthrough`).

A program asks over the control socket. It gets a descriptor of the file in the cache directory: its reads come neither
to the daemon nor to the mount. `loader` asks so for its shards.
"""

import errno
import os
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import trio

from fusecache.engine.file_system import FileSystem
from fusecache.engine.namespace.nodes import Kind, Node
from fusecache.fs.passthrough import LEAST_BYTES, Passthrough, reason_against
from fusecache.model.errors import FusecacheError, NotPermitted

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
