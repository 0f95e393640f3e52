"""The directories that the kernel has open: turns engine entries into readdir replies.

Cookies: 1 and 2 stand for `.` and `..`, n + 2 for the position after n entries. For the positions in the last reply it
is known which entry was there, also to a successor: names may be removed or published while a directory is read.
"""

import errno
import os

from fusecache.engine.file_system import FileSystem
from fusecache.engine.namespace.nodes import DirectoryHandle, Node, Shown
from fusecache.engine.namespace.readdir import go_back, place_behind, resumed
from fusecache.fs.entries import EntryBuilder
from fusecache.fs.kept_files import KeptFiles
from fusecache.fuse.values import FUSEError, ReaddirToken, RequestContext
from fusecache.model.names import CONTROL_NAME
from fusecache.model.predecessor import KeptHandle, KeptReading

# Large replies, but bounded work between two checkpoints.
_ENTRIES_AT_ONCE = 512
# `.` and `..`, before a directory's first name.
_DOTS = 2


class OpenDirectories:
    """The open directories of one mount, by handle number."""

    def __init__(self, filesystem: FileSystem, entries: EntryBuilder, kept: KeptFiles) -> None:
        self._fs = filesystem
        self._kept = kept
        self._entries = entries
        self._handles: dict[int, DirectoryHandle] = {}
        # How far a predecessor's readers were, until they read on.
        self._left: dict[int, KeptReading] = {}

    def open(self, number: int, node: Node, ctx: RequestContext) -> None:
        """Open a directory under a handle number."""
        self._add(number, node, ctx.pid)
        self._kept.on_directory_opened(number, ctx.unique, node, ctx.pid)

    def adopt(self, left: KeptHandle, node: Node) -> None:
        """Count a directory as open that a predecessor opened."""
        self._add(left.number, node, left.pid)
        if left.reading is not None:
            self._left[left.number] = left.reading

    def _add(self, number: int, node: Node, process: int) -> None:
        node.handles += 1
        self._handles[number] = DirectoryHandle(node, process)

    async def reply(self, number: int, start_id: int, token: ReaddirToken) -> None:
        """Reply entries, with attributes, from the cookie `start_id` on until the reply is full."""
        handle = self._handles.get(number)
        if handle is None:  # of a predecessor, and gone
            raise FUSEError(errno.ESTALE)
        is_rewound = start_id == 0 and handle.epoch != 0  # also of a directory that was empty, at position 0
        if start_id < _DOTS:
            if not self._reply_dots(handle.node, start_id, token):
                return
            start_id = _DOTS
        position = start_id - _DOTS
        if is_rewound or (position != handle.position and not go_back(handle, position)):
            handle = await self._at(number, position)
        handle.returned = []
        while await self._fill(handle) and self._add_queued(handle, token):
            pass
        if handle.returned:
            self._left.pop(number, None)
            self._kept.on_directory_read(number, handle)

    def _add_queued(self, handle: DirectoryHandle, token: ReaddirToken) -> bool:
        """Add the entries that were fetched to a reply; return whether all fitted."""
        while handle.queue:
            shown = self._first_queued(handle)
            if shown is not None:
                entry = self._entries.of_shown(handle.node, shown)
                if not token.add(os.fsencode(shown.name), entry, handle.position + 1 + _DOTS):
                    return False
                if isinstance(shown, Node):
                    shown.lookups += 1
                self._kept.on_shown(shown, handle.node)
                handle.returned.append((*handle.queue[0], handle.place))
                if self._kept.is_on:
                    handle.place = place_behind(handle, handle.queue[0].sort_name)
                handle.position += 1
            handle.queue.popleft()
        return True

    def _first_queued(self, handle: DirectoryHandle) -> Shown | None:
        """Return what the first entry of the queue shows now; None: nothing any more."""
        shown = self._fs.lookup.reader.current(handle.node, handle.queue[0])
        if shown is not None and not self._is_control(handle.node, shown.name):
            return shown
        return None

    def _is_control(self, directory: Node, name: str) -> bool:
        """Return whether an object has the control directory's name: the kernel would take it for that directory."""
        return name == CONTROL_NAME and directory is self._fs.tree.root

    def release(self, number: int) -> None:
        """Close a directory, if it is open."""
        handle = self._handles.pop(number, None)
        if handle is not None:
            self._left.pop(number, None)
            self._kept.on_directory_closed(number)
            handle.node.handles -= 1
            self._fs.tree.forget(handle.node.number, 0)

    async def _at(self, number: int, position: int) -> DirectoryHandle:
        """Go to a position: where a predecessor was, else by a read from the start, for rewinddir(3) and seekdir(3)."""
        old = self._handles[number]
        reading = self._left.get(number)
        handle = None if reading is None else resumed(old.node, old.process, reading, position)
        if handle is None:
            handle = DirectoryHandle(old.node, old.process)
        self._handles[number] = handle
        while handle.position < position and await self._fill(handle):
            handle.position += self._first_queued(handle) is not None
            handle.queue.popleft()
        return handle

    def _reply_dots(self, directory: Node, start: int, token: ReaddirToken) -> bool:
        """Reply `.` and `..`, for which the kernel takes no reference; return whether both fitted."""
        for index, node in list(enumerate((directory, directory.parent or directory)))[start:]:
            name = b"." * (index + 1)
            if not token.add(name, self._entries.of_node(node), index + 1):
                return False
        return True

    async def _fill(self, handle: DirectoryHandle) -> bool:
        if not handle.queue:
            handle.queue.extend(await self._fs.lookup.reader.next_entries(handle, _ENTRIES_AT_ONCE))
        return bool(handle.queue)
