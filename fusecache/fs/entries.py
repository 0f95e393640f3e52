"""Builds the attributes that the kernel gets for nodes and listed names, with their TTL."""

import stat

from fusecache.engine.file_system import FileSystem
from fusecache.engine.namespace.nodes import Kind, Node, Shown
from fusecache.fuse.values import EntryAttributes
from fusecache.model.objects import MIB
from fusecache.model.special_files import device_of, is_special, type_and_permissions

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
