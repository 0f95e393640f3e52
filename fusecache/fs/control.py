"""The control directory `.fusecache` in the mount's root, hidden from listings: files that report the daemon's state.

`socket` contains the path of the daemon's unix socket. `stats.json` contains the current counters. Jobs write into
`hints` what they are going to read (`hint_files`).
"""

import json
import stat
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fusecache.fs.hint_files import DIRECTORY as HINTS
from fusecache.fs.hint_files import HintFiles
from fusecache.fs.kept_files import HANDLES_OF_START
from fusecache.fuse.values import EntryAttributes, FileInfo
from fusecache.model.hints import FOLDER
from fusecache.model.names import CONTROL_NAME

DIRECTORY = 2
_SOCKET = 3
_FILES = {_SOCKET: "socket", 4: "stats.json"}
NAME = CONTROL_NAME
FIRST_HANDLE = 1 << 48
# Of the file that names the socket. It is constant: who has opened the file may ask the next daemon for its content.
_SOCKET_HANDLE = FIRST_HANDLE
# Handles of the two directories. They are constant because the directories have no per-open state.
_DIRECTORY_HANDLES = {FIRST_HANDLE - 1: DIRECTORY, FIRST_HANDLE - 2: HINTS}


class ControlDirectory:
    """Answers the kernel's requests about the fixed inodes of the control directory."""

    def __init__(
        self,
        socket_path: Callable[[], Path],
        statistics: Callable[[], dict[str, Any]],
        hints: HintFiles,
        uid: int,
        gid: int,
        start: int,
    ) -> None:
        """socket_path: returns where the socket is now. start: how many daemons have served the mount before."""
        self.hints = hints
        self._socket_path = socket_path
        self._statistics = statistics
        self._uid, self._gid = uid, gid
        self._open: dict[int, bytes] = {}
        # A handle of an earlier daemon, which a program may still close, is not used again.
        self._next_handle = _SOCKET_HANDLE + 1 + start * HANDLES_OF_START
        self._since = time.time_ns()

    def owns(self, inode: int) -> bool:
        """Return whether an inode belongs to the control directory."""
        return inode == DIRECTORY or inode in _FILES or self.hints.owns(inode)

    def opendir(self, inode: int) -> int | None:
        """Return a handle of a directory; None if the inode is not one."""
        handles = [handle for handle, directory in _DIRECTORY_HANDLES.items() if directory == inode]
        return handles[0] if handles else None

    def owns_directory_handle(self, handle: int) -> bool:
        """Return whether a directory handle was issued here."""
        return handle in _DIRECTORY_HANDLES

    def owns_handle(self, handle: int) -> bool:
        """Return whether a file handle was issued here."""
        return handle == _SOCKET_HANDLE or handle in self._open

    def lookup(self, parent: int, name: str) -> int | None:
        """Return the inode of a name in one of the two directories."""
        if parent == HINTS:
            return self.hints.lookup(name)
        if name == FOLDER:
            return HINTS
        return next((number for number, file in _FILES.items() if file == name), None)

    def attributes(self, inode: int) -> EntryAttributes:
        """Return what stat shows."""
        if self.hints.owns(inode):
            return self.hints.attributes(inode)
        entry = EntryAttributes()
        entry.st_ino = inode
        directory = inode == DIRECTORY
        entry.st_mode = (stat.S_IFDIR | 0o555) if directory else (stat.S_IFREG | 0o444)
        entry.st_nlink = 2 if directory else 1
        entry.st_uid, entry.st_gid = self._uid, self._gid
        # Content is generated at open, but programs that trust st_size would read nothing from an empty file.
        entry.st_size = 0 if directory else len(self._content(inode))
        entry.st_atime_ns = entry.st_ctime_ns = entry.st_mtime_ns = self._since
        entry.entry_timeout, entry.attr_timeout = 60, 0
        return entry

    def open(self, inode: int) -> FileInfo:
        """Open a file. Its content is generated now, or at each read of the socket's path."""
        if inode == _SOCKET:
            return FileInfo(fh=_SOCKET_HANDLE, direct_io=True, keep_cache=False)
        handle = self._next_handle
        self._next_handle += 1
        self._open[handle] = self._content(inode)
        return FileInfo(fh=handle, direct_io=True, keep_cache=False)

    def read(self, handle: int, offset: int, size: int) -> bytes:
        """Return bytes of an open file."""
        content = self._content(_SOCKET) if handle == _SOCKET_HANDLE else self._open[handle]
        return content[offset : offset + size]

    def release(self, handle: int) -> None:
        """Close a file."""
        self._open.pop(handle, None)

    def entries(self, handle: int) -> list[tuple[str, int]]:
        """Return names and inodes in an open directory."""
        if _DIRECTORY_HANDLES[handle] == HINTS:
            return self.hints.entries()
        return [*((name, number) for number, name in _FILES.items()), (FOLDER, HINTS)]

    def _content(self, inode: int) -> bytes:
        if inode == _SOCKET:
            return f"{self._socket_path()}\n".encode()
        return json.dumps(self._statistics(), indent=1).encode() + b"\n"
