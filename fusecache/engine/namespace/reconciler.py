"""Turns listing rows into nodes, unless this node has newer knowledge.

Invariants:
1. A node with `local_refs` is authoritative for its name. A row never removes or replaces it.
2. A name that was only listed has no node. Its inode number is looked up in the listing's row.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

from fusecache.engine.namespace.lister import Lister
from fusecache.engine.namespace.nodes import LISTED_NUMBERS, Kind, ListedName, Node
from fusecache.engine.namespace.tree import Tree
from fusecache.index.journal import Journal
from fusecache.index.listings import ListedEntry, Listings
from fusecache.model.errors import ListingLost, NotFound
from fusecache.model.objects import ObjectInfo, attributes_from_metadata, symlink_target
from fusecache.model.records import BUCKET_TIME, PosixAttributes

# Cached nodes, of about 1 KB each. Beyond this count the least recently used ones that are idle are evicted.
NODES_KEPT = 50_000
_NODES_LOOKED_AT = 16


class DirectoryDefaults(NamedTuple):
    """What all names of a directory share. file, directory: default attributes, except the times of files."""

    prefix: str
    file: PosixAttributes
    directory: PosixAttributes
    has_attributes: bool


@dataclass(eq=False, repr=False)
class Reconciler:
    """Creates and replaces nodes from rows."""

    _tree: Tree
    _lister: Lister
    _listings: Listings
    _journal: Journal

    def reconcile(self, parent: Node, name: str, rows: list[ListedEntry], seen: float) -> Node:
        """Make the child match the rows, unless this node has newer knowledge. Raises NotFound."""
        key = self._tree.child_key(parent, name)
        visible = [
            row for row in rows if not self._tree.is_hidden(key + ("/" if row.is_directory else ""), seen)
        ]
        # A key that is also a prefix shows as the directory. Otherwise what is below it would be unreachable.
        row = next((row for row in visible if row.is_directory), visible[0] if visible else None)
        child = parent.children.get(name)
        if child is not None and (child.local_refs > 0 or child.verified > seen):
            return child
        if child is not None and (
            row is None
            or not _is_same(child, row)
            or self._metadata_changed(child, key, row)
            or self._time_changed(child, key, row)
        ):
            self._tree.detach(child)
            child = None
        if row is None:
            raise NotFound(f"{key}: no such file or directory in the bucket")
        if child is None:
            if row.is_directory:
                attributes = self._tree.directory_attributes(key + "/", self._directory_time)
                child = self._tree.make(
                    parent, name, Kind.DIRECTORY, attributes=attributes, number=row.number
                )
            else:
                version = ObjectInfo(key, row.etag, row.size, row.modified, row.metadata)
                child = self.make_file(parent, version, row.number)
        elif (
            child.object is not None and child.object.size and row.metadata is not None and not child.handles
        ):
            # An object published here has this node's time until the bucket reports its own.
            child.object = replace(child.object, modified=row.modified, metadata=row.metadata)
        child.verified = max(child.verified, seen)
        return child

    def make_file(self, parent: Node, version: ObjectInfo, number: int = 0) -> Node:
        """Create the node of an object: a symlink if its metadata say so, else a file."""
        name = version.key[len(self._tree.key(parent)) :]
        attributes = self._kept_attributes(version.key, version.etag, version.modified)
        if attributes is None and version.metadata is not None:
            attributes = self._attributes_from_metadata(version.metadata, version.modified)
        target = symlink_target(version.metadata)
        kind = Kind.SYMLINK if target else Kind.FILE
        return self._tree.make(
            parent, name, kind, attributes=attributes, version=version, target=target, number=number
        )

    def _attributes_from_metadata(
        self, metadata: Mapping[str, str], modified: float
    ) -> PosixAttributes | None:
        kind = Kind.SYMLINK if symlink_target(metadata) else Kind.FILE
        default = self._tree.default_attributes(kind, modified)
        return attributes_from_metadata(metadata, default, with_owner=self._tree.ownership.is_told)

    def _metadata_changed(self, child: Node, key: str, row: ListedEntry) -> bool:
        """Whether the same bytes have other metadata now. A write-back kernel keeps an inode's times, so replace it."""
        if child.kind is not Kind.FILE or child.object is None or row.metadata is None:
            return False
        return child.object.metadata != row.metadata and self._journal.attributes(key, row.etag) is None

    def _time_changed(self, child: Node, key: str, row: ListedEntry) -> bool:
        """Whether the bucket has another time for the same bytes than the node shows. See `_metadata_changed`.

        A file that was published here has the time of its write until then. One that is open keeps it.
        """
        if child.kind is not Kind.FILE or child.handles or child.object is None or row.metadata is not None:
            return False
        if child.object.modified == row.modified:
            return False
        kept = self._kept_attributes(key, row.etag, row.modified)
        return child.mtime_ns != (int(row.modified * 1e9) if kept is None else kept.mtime_ns)

    def _kept_attributes(self, key: str, etag: str, modified: float) -> PosixAttributes | None:
        """Return what this node keeps of a version's attributes. modified: its time in the bucket."""
        kept = self._journal.attributes(key, etag)
        if kept is None or kept.mtime_ns != BUCKET_TIME:
            return kept
        return replace(kept, mtime_ns=int(modified * 1e9))

    def has_set_time(self, key: str, etag: str) -> bool:
        """Return whether a program set the time of a version here."""
        kept = self._journal.attributes(key, etag)
        return kept is not None and kept.mtime_ns != BUCKET_TIME

    def defaults_below(self, directory: Node) -> DirectoryDefaults:
        """Return what all names of a directory share."""
        return DirectoryDefaults(
            self._tree.key(directory),
            self._tree.default_attributes(Kind.FILE, 0.0),
            self._tree.default_attributes(Kind.DIRECTORY, self._directory_time),
            has_attributes=self._journal.has_attributes,
        )

    def listed(self, defaults: DirectoryDefaults, row: ListedEntry, seen: float) -> ListedName:
        """Return what a row shows, without creating a node."""
        own: PosixAttributes | None = None
        if row.is_directory:
            kind, target, own = Kind.DIRECTORY, "", defaults.directory
            if defaults.has_attributes:
                own = self._tree.directory_attributes(f"{defaults.prefix}{row.name}/", self._directory_time)
        else:
            target = symlink_target(row.metadata) if row.metadata else ""
            kind = Kind.SYMLINK if target else Kind.FILE
            if defaults.has_attributes:
                own = self._kept_attributes(defaults.prefix + row.name, row.etag, row.modified)
            if own is None and row.metadata is not None:
                own = self._attributes_from_metadata(row.metadata, row.modified)
                if own is None and target:
                    own = self._tree.default_attributes(kind, row.modified)
        mtime_ns = int(row.modified * 1e9) if own is None else own.mtime_ns
        own = own or defaults.file
        size = len(target.encode()) if target else row.size
        return ListedName(
            row.number, kind, row.name, own.mode, own.uid, own.gid, mtime_ns, size, target, seen
        )

    @property
    def _directory_time(self) -> float:
        # The bucket has no time for a directory. Any constant will do.
        return self._tree.began_ns / 1e9

    # ---- nodes that exist only as rows

    def recalled(self, number: int) -> Node | None:
        """Re-instantiate the node of an inode number from its row; None if no row has that number any more."""
        directory, first, last = self._lister.row_position(number)
        if directory is None or not self._tree.is_linked(directory):
            return None
        by_epoch = self._lister.page_times_by_epoch(directory)
        for epoch, page_times in reversed(list(by_epoch.items())):
            try:
                row = self._listings.find_number(directory.number, epoch, number, first, last)
                if row is None:
                    continue
                node = self.reconcile(directory, row.name, [row], page_times.of(row.sort_name))
            except (NotFound, ListingLost):
                return None
            else:
                return node if node.number == number else None
        return None

    def evict_idle_nodes(self) -> None:
        """Drop idle nodes that can be re-instantiated from rows, least recently used first."""
        if len(self._tree.nodes) <= NODES_KEPT:
            return
        for node in self._tree.oldest(_NODES_LOOKED_AT):
            if self._is_recallable(node):
                self._tree.drop_recallable(node)

    def _is_recallable(self, node: Node) -> bool:
        parent = node.parent
        if node.number < LISTED_NUMBERS or node.kind is Kind.DIRECTORY or parent is None:
            return False
        if node.handles or node.local_refs or node.version is not None or node.writers:
            return False
        directory, first, last = self._lister.row_position(node.number)
        if directory is not parent or not first <= node.name <= last or not self._tree.is_linked(parent):
            return False
        if not parent.is_listed:
            return False
        try:
            row = self._listings.get(parent.number, parent.listing.epoch, node.name)
        except ListingLost:
            return False
        return row is not None and row.number == node.number and _is_same(node, row)


def _is_same(child: Node, row: ListedEntry) -> bool:
    if row.is_directory:
        return child.kind is Kind.DIRECTORY
    if child.kind is Kind.DIRECTORY or child.object is None:
        return False
    if child.kind is Kind.SYMLINK:
        return symlink_target(row.metadata) == child.target
    # A version that only the disk cache knew has no time: the bucket's own makes it another inode.
    has_same_time = bool(child.object.modified) == bool(row.modified)
    return child.object.etag == row.etag and has_same_time and not symlink_target(row.metadata)
