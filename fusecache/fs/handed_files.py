"""Gives cache files to programs that read them by themselves, where the kernel does not do that (`passthrough`).

A program asks over the control socket. It gets a descriptor of the file in the cache directory: its reads come neither
to the daemon nor to the mount. `loader` asks so for its shards.
"""

import os
from collections.abc import Callable

from fusecache.engine.file_system import FileSystem
from fusecache.fs.passthrough import LEAST_BYTES, reason_against
from fusecache.model.errors import FusecacheError, NotPermitted


class HandedFiles:
    """The files of one mount that programs may have."""

    def __init__(self, filesystem: FileSystem, is_needless: Callable[[], bool]) -> None:
        """is_needless: whether the kernel reads the files of this mount by itself."""
        self._fs = filesystem
        self._is_needless = is_needless
        self._reason: str | None = None

    async def open(self, path: str, *, unless_open: bool) -> int | None:
        """Return a descriptor of a file's bytes for reading, which the caller closes. None: read it through the mount.

        unless_open: None too if a program has the file open through the mount, whose pages the kernel keeps then.
        Raises NotPermitted if this mount gives no files at all.
        """
        self._check()
        try:
            node = await self._fs.lookup_path(path)
            remote = node.object
            if (
                remote is None
                or node.version is not None
                or node.writers > 0  # the kernel may have changes that the daemon has not
                or remote.size < LEAST_BYTES
                or (unless_open and node.handles > 0)
                or self._fs.hints.needs_reads(remote.object_id)
            ):
                return None
            return await self._fs.cache.maintenance.hand_out(remote.object_id, remote.size)
        except FusecacheError:  # the mount tells the program
            return None

    def _check(self) -> None:
        """Raise NotPermitted if this mount gives no files. Blocks, for some system calls, the first time."""
        if self._is_needless():
            raise NotPermitted("the kernel reads the files of this mount by itself")
        if self._reason is None:
            self._reason = ""
            try:
                os.close(self._fs.cache.maintenance.open_probe())
            except OSError as exc:
                self._reason = reason_against(exc)
        if self._reason:
            raise NotPermitted(f"this mount gives no cache files: {self._reason}")
