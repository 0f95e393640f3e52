"""Prefetches the next files of a directory for readers that open its files in listing order.

The order is that of the cached listing, however old it is. It only predicts the next file and never answers a lookup.
The only requests to the bucket are GETs of the files' bytes. Used on the trio loop; nothing here awaits.

Invariant: memory is bounded, by the number of directories and by the readers and scans of each.
"""

from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TypeVar

from fusecache.engine.cache.block_cache import BlockCache
from fusecache.engine.cache.readahead import PrefetchRange
from fusecache.engine.namespace.lookup import Lookup
from fusecache.engine.namespace.nodes import Node
from fusecache.engine.namespace.tree import Tree
from fusecache.engine.prefetch.hint_service import HintService
from fusecache.index.listings import ListedEntry
from fusecache.model.objects import ObjectId
from fusecache.policy.cache.sibling_readahead import (
    REACH,
    ScanPattern,
    bytes_to_ask,
    is_near,
    next_window,
    observe,
)

# The jobs of a node read fewer directories at the same time. A scan of an evicted one is recognised again.
_DIRECTORIES = 32
# Readers and scans tracked per directory. 128 threads are more than the workers of a node's loaders.
_READERS = 128
_SCANS = 16
# Listing rows are read in portions of 32 once a scan is recognised.
_ROWS_AT_ONCE = 32

T = TypeVar("T")
# (sort name, limit) -> the next rows after that name
_RowsAfter = Callable[[str, int], list[ListedEntry]]


@dataclass(eq=False, slots=True)
class _DirectoryScan:
    """One scan of a directory and the names around its front.

    positions: of the names from SPAN before the front on. unrequested: rows of positions pattern.requested … stop - 1.
    stop: one past the last known position. last: the sort name of the last row read, at first the opened name.
    """

    last: str
    pattern: ScanPattern = field(default_factory=ScanPattern)
    positions: OrderedDict[str, int] = field(default_factory=OrderedDict)
    unrequested: deque[ListedEntry] = field(default_factory=deque)
    stop: int = 1

    def position(self, name: str, rows_after: _RowsAfter) -> int | None:
        """Return the position of a name near the front, None if it is not there."""
        if name > self.last and self.stop - self.pattern.front < REACH:
            self.extend(rows_after, REACH)
        position = self.positions.get(name)
        return position if position is not None and is_near(self.pattern, position) else None

    def extend(self, rows_after: _RowsAfter, count: int) -> None:
        """Read further rows from the listing."""
        rows = rows_after(self.last, count)
        for row in rows:
            if not row.is_directory:
                self.positions[row.name] = self.stop
                self.unrequested.append(row)
                self.stop += 1
        if rows:
            self.last = rows[-1].sort_name

    def observe(self, position: int, size: int) -> None:
        """The file at a position was opened."""
        self.pattern = observe(self.pattern, position, size)
        while len(self.unrequested) > self.stop - self.pattern.requested:
            self.unrequested.popleft()
        while self.positions and not is_near(self.pattern, next(iter(self.positions.values()))):
            self.positions.popitem(last=False)

    def next_window(self, rows_after: _RowsAfter) -> list[ListedEntry]:
        """Return the rows of the files to prefetch now."""
        if not self.pattern.is_in_order:
            return []
        if self.stop < self.pattern.front + self.pattern.window + REACH:
            self.extend(rows_after, _ROWS_AT_ONCE)
        self.pattern, count = next_window(self.pattern, [row.size for row in self.unrequested])
        return [self.unrequested.popleft() for _ in range(count)]


@dataclass(eq=False, slots=True)
class _Directory:
    """The readers of one directory: the scan of each, the latest scan, and the scans recognised as in order."""

    readers: OrderedDict[int, _DirectoryScan] = field(default_factory=OrderedDict)
    latest: _DirectoryScan | None = None
    scans: OrderedDict[int, _DirectoryScan] = field(default_factory=OrderedDict)

    def scan_of(self, name: str, reader: int, rows_after: _RowsAfter) -> tuple[_DirectoryScan, int]:
        """Return the scan that an opened name belongs to, and its position; a new scan if it fits none."""
        for scan in self._candidates(reader):
            position = scan.position(name, rows_after)
            if position is not None:
                return scan, position
        scan = _DirectoryScan(name)
        scan.positions[name] = 0
        return scan, 0

    def _candidates(self, reader: int) -> Iterator[_DirectoryScan]:
        """Yield scans, the latest first, so that threads that share one list of names continue one scan."""
        if self.latest is not None:
            yield self.latest
        for scan in list(self.scans.values()):
            if scan is not self.latest:
                yield scan
        own = self.readers.get(reader)
        if own is not None and own is not self.latest and id(own) not in self.scans:
            yield own

    def remember(self, scan: _DirectoryScan, reader: int) -> None:
        """The reader was last seen in this scan."""
        self.latest = scan
        _keep(self.readers, reader, scan, _READERS)
        if scan.pattern.is_in_order:
            _keep(self.scans, id(scan), scan, _SCANS)
        else:
            self.scans.pop(id(scan), None)


@dataclass(eq=False, repr=False)
class SiblingReadahead:
    """Observes the order in which files are read, and lets the cache prefetch the next ones."""

    _tree: Tree
    _lookup: Lookup
    _cache: BlockCache
    _hints: HintService
    _directories: OrderedDict[int, _Directory] = field(default_factory=OrderedDict)

    def on_read(self, node: Node, reader: int) -> None:
        """A reader (any number that identifies a thread) begins to read a file of the bucket at its start.

        Nothing is guessed for files that a hint names.
        """
        parent, version = node.parent, node.object
        if parent is None or version is None or self._hints.names(version.object_id):
            return
        if not self._tree.is_linked(parent):
            return  # the directory was removed: its files have no key any more
        directory = self._directories.get(parent.number) or _Directory()
        _keep(self._directories, parent.number, directory, _DIRECTORIES)

        def rows_after(sort_name: str, limit: int) -> list[ListedEntry]:
            return self._lookup.lister.rows_after(parent, sort_name, limit)

        scan, position = directory.scan_of(node.name, reader, rows_after)
        scan.observe(position, version.size)
        directory.remember(scan, reader)
        rows = scan.next_window(rows_after)
        if rows:
            prefix = self._tree.key(parent)
            self._cache.prefetch(
                [_prefetch_range(parent, prefix, row) for row in rows if _is_remote(parent, row)]
            )


def _is_remote(parent: Node, row: ListedEntry) -> bool:
    """Return whether the bucket has bytes to fetch: not for empty files, nor for files with newer local content."""
    child = parent.children.get(row.name)
    return row.size > 0 and (child is None or (child.version is None and child.object is not None))


def _prefetch_range(parent: Node, prefix: str, row: ListedEntry) -> PrefetchRange:
    child = parent.children.get(row.name)
    if child is not None and child.object is not None:  # at least as new as the row
        object_id, size = child.object.object_id, child.object.size
    else:
        object_id, size = ObjectId(prefix + row.name, row.etag), row.size
    return PrefetchRange(object_id, size, bytes_to_ask(size))


def _keep(entries: OrderedDict[int, T], key: int, value: T, most: int) -> None:
    """Put an entry last, and drop the first entries while there are more than `most`."""
    entries[key] = value
    entries.move_to_end(key)
    while len(entries) > most:
        entries.popitem(last=False)
