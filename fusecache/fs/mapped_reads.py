"""Declines what the kernel reads around page faults of a mapping that is read at random, if the bucket must send it.

A page fault needs 4 KiB. The kernel reads its whole read-ahead window around it, 1 MiB here: a data set would come
sixteen times. Read-ahead is a wish: if it fails, the kernel asks for the one page that it needs, and a program sees no
error (`filemap_fault` in mm/filemap.c, seen on 6.18). If a mapping is read in order, windows continue each other: these
are served as ever.

A read(2) of as many bytes looks the same. So the process that opened the file must have it mapped.
"""

import os
from collections import deque
from dataclasses import dataclass, field

import trio

from fusecache.engine.file_system import FileSystem
from fusecache.engine.namespace.nodes import FileHandle
from fusecache.model.objects import GRANULE_BYTES

# Windows of one open file that are known: of several threads that read in order, and what the kernel asks for again.
_KNOWN_WINDOWS = 64
# So many windows in a row that continue none are served. A reader of large tensors jumps as well, and then reads on.
_JUMPS_SERVED = 2
# A look into /proc costs up to a millisecond.
_LOOK_SECONDS = 1.0


@dataclass(eq=False, slots=True)
class _Faults:
    """What is known of one open file.

    window: the longest one. ends: of the last windows. declined: where the last windows began that were declined.
    jumps: windows in a row that continue none. looked: when its process was looked at.
    """

    window: int = 0
    ends: deque[int] = field(default_factory=lambda: deque(maxlen=_KNOWN_WINDOWS))
    declined: deque[int] = field(default_factory=lambda: deque(maxlen=_KNOWN_WINDOWS))
    jumps: int = 0
    looked: float = float("-inf")
    is_mapped: bool = False


class MappedReads:
    """Decides for each read whether it is declined."""

    def __init__(self, filesystem: FileSystem) -> None:
        self._files = filesystem.file_io
        self._known: dict[FileHandle, _Faults] = {}

    async def declines(self, handle: FileHandle, offset: int, size: int) -> bool:
        """Return whether a read is a window around a page fault that the bucket would have to send."""
        if size <= GRANULE_BYTES or not handle.pid:
            return False
        known = self._known.get(handle)
        if known is None:
            known = self._known[handle] = _Faults()
        known.window = max(known.window, size)
        # A shorter one is what is left of a window that overlaps an older one.
        is_full = size == known.window or offset + size >= handle.node.size
        ends = known.ends
        # The last one first: of nearly all reads it is that.
        continues = offset == 0 or (is_full and bool(ends) and (offset == ends[-1] or offset in ends))
        ends.append(offset + size)
        known.jumps = 0 if continues else known.jumps + 1
        if known.jumps <= _JUMPS_SERVED or offset in known.declined:
            return False
        if not await self._files.must_fetch(handle, offset, size):
            return False
        now = trio.current_time()
        if now >= known.looked + _LOOK_SECONDS:
            known.looked = now
            node = handle.node
            known.is_mapped = await trio.to_thread.run_sync(_is_mapped, handle.pid, node.number, node.name)
        if known.is_mapped:
            known.declined.append(offset)
        return known.is_mapped

    def on_closed(self, handle: FileHandle) -> None:
        """An open file was closed."""
        self._known.pop(handle, None)


def _is_mapped(pid: int, inode: int, name: str) -> bool:
    """Return whether a process has a file mapped; blocks."""
    end = b"/" + os.fsencode(name)
    try:
        with open(f"/proc/{pid}/maps", "rb") as maps:
            # proc_pid_maps(5): address, permissions, offset, device, inode, path.
            return any(
                line.rstrip(b"\n").endswith(end) and line.split(None, 5)[4] == b"%d" % inode for line in maps
            )
    except OSError:
        return False
