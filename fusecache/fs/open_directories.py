"""The directories that the kernel has open: turns engine entries into readdir replies.

Cookies: 1 and 2 stand for `.` and `..`, n + 2 for the position after n entries. For the positions in the last reply it
is known which entry was there, also to a successor: names may be removed or published while a directory is read.

Builds the attributes that the kernel gets for nodes and listed names, with their TTL.
"""

import errno
import os
import stat

from fusecache.engine.file_system import FileSystem
from fusecache.engine.namespace.nodes import DirectoryHandle, Kind, Node, Shown
from fusecache.engine.namespace.readdir import go_back, place_behind, resumed
from fusecache.fs.kept_files import KeptFiles
from fusecache.fuse.values import EntryAttributes, FUSEError, ReaddirToken, RequestContext
from fusecache.model.names import CONTROL_NAME, device_of, is_special, type_and_permissions
from fusecache.model.objects import MIB
from fusecache.model.predecessor import KeptHandle, KeptReading

_TYPE_BITS = {Kind.FILE: stat.S_IFREG, Kind.DIRECTORY: stat.S_IFDIR, Kind.SYMLINK: stat.S_IFLNK}
# The kernel's TTL of immutable paths.
_IMMUTABLE_SECONDS = 3600


class EntryBuilder:
    """Builds the attributes of nodes and directory entries for one mount."""

    def __init__(self, filesystem: FileSystem, *, read_only: bool) -> None:
        self._fs = filesystem
        self._read_only = read_only

    def of_node(self, node: Node) -> EntryAttributes:
        """Return a node's attributes. TTL 0 makes the kernel ask again at once, if only a request can tell more."""
        seconds = min(self._fs.lookup.ttl.seconds(node), _IMMUTABLE_SECONDS)
        if self._read_only and node.kind is Kind.FILE and not self._fs.lookup.ttl.is_node_fresh(node):
            seconds = 0.0
        return _entry_of(node, seconds, is_linked=self._fs.tree.is_linked(node))

    def of_shown(self, directory: Node, shown: Shown) -> EntryAttributes:
        """Return the attributes of a directory's entry, from its node if there is one, else from its listing row."""
        if isinstance(shown, Node):
            return self.of_node(shown)
        seconds = self._fs.lookup.ttl.seconds_below(directory, shown.name)
        return _entry_of(shown, min(seconds, _IMMUTABLE_SECONDS), is_linked=True)


def _entry_of(shown: Shown, seconds: float, *, is_linked: bool) -> EntryAttributes:
    """Return the attributes of an inode, with a TTL in seconds."""
    kind = shown.kind
    entry = EntryAttributes()
    entry.st_ino = shown.number
    if is_special(shown.mode):
        entry.st_mode, entry.st_rdev = type_and_permissions(shown.mode), device_of(shown.mode)
    else:
        # symlink(7): a link's own mode is never used.
        entry.st_mode = _TYPE_BITS[kind] | (0o777 if kind is Kind.SYMLINK else shown.mode)
    entry.st_nlink = (2 if kind is Kind.DIRECTORY else 1) if is_linked else 0
    entry.st_uid, entry.st_gid = shown.uid, shown.gid
    size = shown.size
    entry.st_size = size
    entry.st_blksize = MIB
    entry.st_blocks = -(-size // 512)
    entry.st_atime_ns = entry.st_ctime_ns = entry.st_mtime_ns = shown.mtime_ns
    entry.entry_timeout = entry.attr_timeout = seconds
    return entry


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
