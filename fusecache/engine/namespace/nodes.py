"""The engine's state in memory: nodes, file versions, queued changes, open handles, and their use counts.

All of it is mutable and owned by the loop's thread. Rows of the journal (`model/records.py`) are the durable copy.
"""

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import NamedTuple, TypeGuard

import trio

from fusecache.disk.staging import StagingFile
from fusecache.engine.cache.block_cache import ReadHandle
from fusecache.engine.namespace.file_use import FileUse
from fusecache.engine.namespace.listing_state import ListingState
from fusecache.engine.namespace.upload_state import UploadState
from fusecache.index.journal import DropAttributes, PutAttributes, PutFile
from fusecache.model.errors import FusecacheError
from fusecache.model.objects import ObjectInfo
from fusecache.model.predecessor import ReadPlace
from fusecache.model.records import FileRecord, OperationKind, OperationRecord, PosixAttributes
from fusecache.model.states import MUTABLE, FileState, check_transition
from fusecache.policy.incremental_checksums import IncrementalChecksums


class Kind(Enum):
    """The type of a node."""

    FILE = "file"
    DIRECTORY = "directory"
    SYMLINK = "symlink"


class ListedName(NamedTuple):
    """A name from a listing row. It gets a node only when it is used.

    number: the inode number from the row. seen: loop time at which the bucket showed it.
    """

    number: int
    kind: Kind
    name: str
    mode: int
    uid: int
    gid: int
    mtime_ns: int
    size: int
    target: str
    seen: float


@dataclass(eq=False, slots=True)
class Node:
    """One inode. A remote object that changes becomes another node, so the kernel never mixes two versions.

    object: the version that the bucket shows under this node's name, or will show after a queued rename; None: none.
    version: local content, which takes precedence over it. local_refs: versions and changes that are not published yet,
    of this node and of all below it. While there are any, the node is authoritative and no listing removes it.
    verified: loop time at which the bucket's state of it was last known.
    staged: generation of published content that the cache has not taken over yet; 0: none.
    """

    number: int
    kind: Kind
    name: str
    parent: "Node | None"
    mode: int
    uid: int
    gid: int
    mtime_ns: int
    object: ObjectInfo | None = None
    version: "FileVersion | None" = None
    target: str = ""
    lookups: int = 0
    handles: int = 0
    writers: int = 0
    appenders: int = 0
    write_error: FusecacheError | None = None
    local_refs: int = 0
    verified: float = float("-inf")
    has_marker: bool = False
    staged: int = 0
    # Most nodes are files. They have neither children nor a listing, and rarely need the lock.
    children: "dict[str, Node]" = field(init=False)
    _listing: ListingState | None = field(default=None, init=False)
    _lock: trio.Lock | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self.children = {} if self.kind is Kind.DIRECTORY else _NO_CHILDREN

    @property
    def listing(self) -> ListingState:
        """What is known of a directory's names in the bucket."""
        if self._listing is None:
            self._listing = ListingState()
        return self._listing

    @property
    def is_listed(self) -> bool:
        """Whether a complete listing of it is stored."""
        return self._listing is not None and self._listing.epoch > 0

    @property
    def lock(self) -> trio.Lock:
        """Held by the writer that copies the published version into local content."""
        if self._lock is None:
            self._lock = trio.Lock()
        return self._lock

    def published_etag(self, key: str) -> str | None:
        """Return the ETag that the bucket shows under the node's key, before any queued change; None: no object."""
        return self.object.etag if self.object is not None and self.object.key == key else None

    @property
    def size(self) -> int:
        """Size of the content as this node shows it, in bytes."""
        if self.version is not None:
            return self.version.size
        if self.kind is Kind.SYMLINK:
            return len(self.target.encode())
        return self.object.size if self.object is not None else 0


@dataclass(eq=False, slots=True)
class CloseState:
    """What close(2) made durable of a version that is being written.

    changed_since_flush: it may hold changes that no close covers. dirty_since: loop time of the first change that is
    neither published nor acknowledged by a durable close. flushed_by: the handle of the last close. killed_writer: the
    handle whose process is being killed; such content is not published. journaling: closes whose journal row is not on
    disk yet. changes: how often the bytes changed; flushed_changes: that count at the last durable close.
    """

    changed_since_flush: bool = True
    dirty_since: float = float("inf")
    flushed_by: "FileHandle | None" = None
    killed_writer: "FileHandle | None" = None
    journaling: int = 0
    changes: int = 0
    flushed_changes: int = -1

    def mark_flushed(self) -> None:
        """A close covers the bytes as they are now."""
        self.changed_since_flush = False
        self.flushed_changes = self.changes

    @property
    def covers_all(self) -> bool:
        """Whether a close acknowledged exactly these bytes."""
        return self.changes == self.flushed_changes


@dataclass(eq=False, slots=True)
class MarkerState:
    """State of one version of a commit marker.

    missing: the rejected change that it waits for, so it is held. reported_before: the sequence of the previous version
    of its name. is_forced: the operator wants it published regardless. is_stale: it may name files that were removed
    before it was published, so the next version supersedes it in the queue.
    """

    missing: "QueuedChange | None" = None
    reported_before: int = 0
    is_forced: bool = False
    is_stale: bool = False


@dataclass(eq=False, slots=True)
class FileVersion:
    """One version of a file's content, written on this node. `record` is its journal row; times are loop times.

    waiting_since: when the oldest content that it superseded was closed. awaited: waiters for exactly this content to
    be in the bucket. granule_checksums: those of the sealed bytes; checksums: those at the last fsync.
    follows_directly: its close was journaled directly after that of the previous version of the key. replaces: the
    rejected version that this one replaces once its close is durable. successor: the newer content of the same file
    that superseded this one; waiters for this one wait for that one.
    """

    record: FileRecord
    file: StagingFile
    node: Node | None
    size: int
    reserved: int = 0
    close_state: CloseState = field(default_factory=CloseState, repr=False)
    use: FileUse = field(default_factory=FileUse, init=False, repr=False)
    upload: UploadState = field(default_factory=UploadState, init=False, repr=False)
    checksums: IncrementalChecksums = field(default_factory=IncrementalChecksums, repr=False)
    granule_checksums: bytes = field(default=b"", repr=False)
    error: FusecacheError | None = None
    flushed_at: float = float("inf")
    waiting_since: float = float("inf")
    sealed_at: float = float("inf")
    awaited: int = 0
    follows_directly: bool = False
    replaces: "FileVersion | None" = None
    successor: "FileVersion | None" = None
    # Few versions are of commit markers, and few writers wait for space.
    _marker: MarkerState | None = field(default=None, init=False, repr=False)
    _growth: trio.Lock | None = field(default=None, init=False, repr=False)

    def __post_init__(self) -> None:
        self.upload.key = self.record.key

    @property
    def marker(self) -> MarkerState:
        """Its state as a commit marker."""
        if self._marker is None:
            self._marker = MarkerState()
        return self._marker

    @property
    def is_stale_marker(self) -> bool:
        """Whether the next version supersedes it in the queue, as it may name files that were removed."""
        return self._marker is not None and self._marker.is_stale

    @property
    def growth(self) -> trio.Lock:
        """Held by the writer that waits for disk space."""
        if self._growth is None:
            self._growth = trio.Lock()
        return self._growth

    @property
    def state(self) -> FileState:
        """Its state in the life cycle."""
        return self.record.state

    @property
    def sequence(self) -> int:
        """Its position in the publish order; 0 until a close is journaled."""
        return self.record.sequence

    @property
    def is_mutable(self) -> bool:
        """Whether a writer may change it in place."""
        return self.record.state in MUTABLE

    @property
    def in_flight(self) -> bool:
        """Whether the publishing request may have been sent."""
        return self.record.state is FileState.PUBLISHING

    @property
    def bytes_under_way(self) -> int:
        """Bytes in requests that have not been answered."""
        multipart = self.upload.multipart
        if multipart is not None:
            return multipart.parts.under_way_bytes(self.size)
        return self.size if self.upload.request is not None and not self.record.upload_id else 0

    @property
    def moved_bytes(self) -> int:
        """Bytes that the bucket has, or that the network has accepted."""
        return min(self.size, self.upload.sent_bytes + sum(each.bytes for each in self.upload.requests))

    def on_written(self, start: int, stop: int) -> bool:
        """Record a write of bytes [start, stop); return whether another part may be uploaded now."""
        self.on_changed(start, stop)
        self.size = max(self.size, stop)
        return self.upload.on_written(stop - start, stop)

    def on_changed(self, start: int, stop: int) -> None:
        """Record that bytes [start, stop) changed or are gone: uploaded parts that hold them are invalid."""
        self.close_state.changes += 1
        self.checksums.change(min(start, self.size), stop)  # a hole before `start` is new, too
        multipart = self.upload.multipart
        if multipart is not None and multipart.parts.change(start, stop):
            self.record = replace(self.record, part_etags=multipart.parts.etags())
            self.upload.sent_bytes = multipart.parts.held_bytes(self.size)

    def transition_to(self, state: FileState, **changes: object) -> FileRecord:
        """Change the state, and other fields of the record with it; return the new row."""
        check_transition(self.record.state, state)
        self.record = replace(self.record, state=state, **changes)  # type: ignore[arg-type]
        return self.record

    def changed_keys(self) -> tuple[str, ...]:
        """The keys that publishing it changes."""
        return (self.record.key,)


@dataclass(eq=False, slots=True)
class Operation:
    """One queued change of names. queued_at: loop time.

    in_flight: the request may have been sent, by this daemon or by the previous one. readers: the removed file, which
    may still be open. times_moved_back: how often a removal got a later position while it was the oldest one.
    has_dependent_write: a write waits for this removal, so it must not be deferred. Either newer content of the same
    name could not supersede it, or content is rewritten below a commit marker that this removes.
    """

    record: OperationRecord
    node: Node | None
    in_flight: bool = False
    readers: Node | None = None
    error: FusecacheError | None = None
    times_moved_back: int = 0
    has_dependent_write: bool = False
    queued_at: float = field(default_factory=trio.current_time)

    @property
    def sequence(self) -> int:
        """Its position in the publish order."""
        return self.record.sequence

    def changed_keys(self) -> tuple[str, ...]:
        """The keys that publishing it changes."""
        if self.record.kind is OperationKind.RENAME:
            return (self.record.key, self.record.target)
        return (self.record.key,)


QueuedChange = FileVersion | Operation


def is_removal(item: QueuedChange | None) -> TypeGuard[Operation]:
    """Return whether a queued change is the removal of an object."""
    return isinstance(item, Operation) and item.record.kind is OperationKind.DELETE


def is_rename(item: FileVersion | Operation) -> TypeGuard[Operation]:
    """Return whether a queued change is a rename."""
    return isinstance(item, Operation) and item.record.kind is OperationKind.RENAME


def is_symlink(item: QueuedChange) -> TypeGuard[Operation]:
    """Return whether a queued change makes a symlink."""
    return isinstance(item, Operation) and item.record.kind is OperationKind.SYMLINK


def dropped_row(version: FileVersion) -> PutFile:
    """Return the row of content that must not come back after a crash: the next mount removes its file.

    The row is deleted only after the file. A file without a row could not be told from one that is still needed.
    """
    return PutFile(replace(version.record, state=FileState.DROPPED))


# What a name shows in a directory.
Shown = Node | ListedName


class DirectoryEntry(NamedTuple):
    """A name as it was fetched, with what it showed then. A node may have another name by now."""

    sort_name: str
    shown: Shown


_NO_CHILDREN: dict[str, Node] = {}


@dataclass(eq=False, slots=True)
class FileHandle:
    """One open file. pid: the thread that opened it (0: unknown); process: its thread group, if it may write.

    appends: opened with O_APPEND. is_flushed: a descriptor of it was closed. released: set when the last one was.
    """

    node: Node
    writable: bool
    pid: int = 0
    process: int = 0
    appends: bool = False
    is_flushed: bool = False
    released: trio.Event = field(default_factory=trio.Event)
    reader: ReadHandle | None = None
    reader_version: ObjectInfo | None = None


@dataclass(eq=False, slots=True)
class DirectoryHandle:
    """One open directory, read in the bucket's order.

    process: the reader (0: unknown). epoch: of the listing that is read (0: not started). after: all names up to this
    sort name were fetched; early_files: of these, the files whose directories sort behind it (`readdir.py`).
    is_at_end: all were. restarts: how often its rows were lost.
    queue: entries fetched but not yet returned. position: how many were returned; place: behind the last of them.
    returned: by the last reply, each with the place before it.
    """

    node: Node
    process: int = 0
    epoch: int = 0
    after: str = ""
    early_files: tuple[str, ...] = ()
    is_at_end: bool = False
    queue: "deque[DirectoryEntry]" = field(default_factory=deque)
    position: int = 0
    place: ReadPlace | None = None
    returned: "list[tuple[str, Shown, ReadPlace | None]]" = field(default_factory=list)
    restarts: int = 0


def attributes_of(node: Node) -> PosixAttributes:
    """Return the node's attributes as one value."""
    return PosixAttributes(node.mode, node.uid, node.gid, node.mtime_ns)


def directory_row(
    key: str, attributes: PosixAttributes, default: PosixAttributes
) -> PutAttributes | DropAttributes:
    """Return the row that keeps a directory's mode and owner on this node; where both are the default, none is."""
    if attributes == replace(default, mtime_ns=attributes.mtime_ns):
        return DropAttributes(key, "")
    return PutAttributes(key, "", attributes)


@contextmanager
def in_use(node: Node | None) -> Iterator[None]:
    """Keep a node in memory while its user awaits something else."""
    if node is not None:
        node.handles += 1
    try:
        yield
    finally:
        if node is not None:
            node.handles -= 1
