"""The engine's state in memory: nodes, file versions, queued changes, open handles, and their use counts.

All of it is mutable and owned by the loop's thread. Rows of the journal (`model/records.py`) are the durable copy.

Work on one file version before it is published: its preparation and its multipart upload.

Threads that work on a staging file: it is neither removed while one reads it, nor sealed while one writes.

What is known in memory of a directory's listing: its epoch, the times of its pages, their access frequency.
"""

from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import NamedTuple, TypeGuard

import trio

from fusecache.disk.staging import StagingFile
from fusecache.engine.cache.block_cache import ReadHandle
from fusecache.index.journal import DropAttributes, PutAttributes, PutFile
from fusecache.model.errors import FusecacheError, LocalDiskError
from fusecache.model.objects import ObjectInfo
from fusecache.model.predecessor import ReadPlace
from fusecache.model.records import (
    MUTABLE,
    FileRecord,
    FileState,
    OperationKind,
    OperationRecord,
    PosixAttributes,
    check_transition,
)
from fusecache.policy.incremental_checksums import IncrementalChecksums
from fusecache.policy.writeback.multipart import PartTable, first_ready_at
from fusecache.remote.store import Sent


@dataclass(eq=False, slots=True)
class Preparation:
    """Work that may run before a version's slot in the publish order: sync, checksums, parts. done: set at its end."""

    done: trio.Event
    scope: trio.CancelScope
    failure: FusecacheError | None = None


@dataclass(eq=False, slots=True)
class MultipartUpload:
    """The multipart upload of one version, possibly started before the version is sealed.

    key: the key it was started under. upload_id: "" until the bucket has answered. is_known: the journal has the
    upload_id. is_asked: the creation request or that journal write is in flight. ready: how many parts, from the first,
    may be sent. attributes: what its object's metadata will contain. attempts: creation and part requests in flight.
    sending: progress of each part's request, by part number. failures: pauses since the last success. quiet_until: loop
    time at which the current pause ends. failure: why it cannot continue. stopped: set when the upload is no longer
    needed. changed: set, then replaced by a new event, whenever an attempt ends.
    """

    key: str
    parts: PartTable
    attributes: PosixAttributes
    upload_id: str = ""
    is_known: bool = False
    is_asked: bool = False
    is_sealed: bool = False
    ready: int = 0
    attempts: int = 0
    sending: dict[int, Sent] = field(default_factory=dict)
    failures: int = 0
    quiet_until: float = float("-inf")
    failure: FusecacheError | None = None
    stopped: trio.Event = field(default_factory=trio.Event)
    changed: trio.Event = field(default_factory=trio.Event)

    def announce(self) -> None:
        """Wake the tasks that wait for the end of an attempt."""
        self.changed.set()
        self.changed = trio.Event()

    def stop(self) -> None:
        """The upload is no longer needed: start no further attempt and wake all waiters."""
        self.stopped.set()
        self.announce()


@dataclass(eq=False, slots=True)
class UploadState:
    """How far one version's way to the bucket is. Times are loop times, sizes are in bytes.

    multipart: the multipart upload of this run, which ends before the key of the version changes. sent_bytes: of parts
    that the bucket holds. request: the one in flight that uploads the version whole, or completes its multipart upload.
    preparation: None until it begins. written_bytes: written so far, counting rewrites; when they pass `grows_at`, the
    next part may be uploaded. growing_since: when the first part was ready.
    """

    multipart: MultipartUpload | None = None
    sent_bytes: int = 0
    request: Sent | None = None
    preparation: Preparation | None = None
    written_bytes: int = 0
    grows_at: int = field(default_factory=first_ready_at)
    growing_since: float = float("inf")

    @property
    def requests(self) -> tuple[Sent, ...]:
        """Progress of each unanswered request that uploads a part of the version, or publishes it."""
        parts = () if self.multipart is None else tuple(self.multipart.sending.values())
        return parts if self.request is None else (*parts, self.request)

    def on_written(self, nbytes: int, stop: int) -> bool:
        """Record a write of `nbytes` that ends at offset `stop`; return whether another part may be uploaded now."""
        self.written_bytes += nbytes
        return self.written_bytes >= self.grows_at and stop >= self.grows_at


@dataclass(eq=False, slots=True)
class FileUse:
    """Counts the reads and writes in progress."""

    readers: int = 0
    writers: int = 0
    _unread: trio.Event | None = None
    _unwritten: trio.Event | None = None

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Keep the file while a thread reads it, even if its bytes become cache at the same time."""
        self.readers += 1
        try:
            yield
        finally:
            self.readers -= 1
            if self.readers == 0 and self._unread is not None:
                self._unread.set()
                self._unread = None

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Keep the content from being sealed while a thread writes into it."""
        self.writers += 1
        try:
            yield
        finally:
            self.writers -= 1
            if self.writers == 0 and self._unwritten is not None:
                self._unwritten.set()
                self._unwritten = None

    async def wait_unread(self) -> None:
        """Return when no thread reads the file."""
        while self.readers:
            if self._unread is None:
                self._unread = trio.Event()
            await self._unread.wait()

    async def wait_written(self) -> None:
        """Return at the end of a moment without writes: others may have begun since."""
        if self.writers:
            if self._unwritten is None:
                self._unwritten = trio.Event()
            await self._unwritten.wait()


# Inode numbers from here on belong to listing rows, in ranges; one page of a listing takes at most one range.
LISTED_NUMBERS = 1 << 52
INODE_RANGE = 1024
# Sorts after every sort name.
LAST_NAME = "\U0010ffff"


@dataclass(eq=False, slots=True)
class PageTimes:
    """When each page of a directory was requested: names up to `ends[i]` at loop time `times[i]`."""

    ends: list[str] = field(default_factory=list)
    times: list[float] = field(default_factory=list)

    def add(self, end: str, moment: float) -> None:
        """Append a page that ends at `end` and was requested at that loop time."""
        self.ends.append(end)
        self.times.append(moment)

    def of(self, sort_name: str) -> float:
        """Return when the page with that name was requested. Names after the last page belong to it."""
        return self.page_of(sort_name)[1]

    def page_of(self, sort_name: str) -> tuple[str, float]:
        """Return the end of the page with that name, and when it was requested."""
        if not self.times:
            return "", float("-inf")
        index = min(bisect_left(self.ends, sort_name), len(self.times) - 1)
        return self.ends[index], self.times[index]

    def start_of(self, sort_name: str) -> str:
        """Return the name after which the page with that name begins; "" for the first page."""
        index = min(bisect_left(self.ends, sort_name), len(self.times) - 1)
        return self.ends[index - 1] if index > 0 else ""

    def behind(self, start: str) -> float:
        """Return when the page that begins after that name was requested."""
        if not self.times:
            return float("-inf")
        return self.times[min(bisect_right(self.ends, start), len(self.times) - 1)]

    def renew(self, start: str, end: str, moment: float) -> None:
        """Record that the names after `start` up to `end`, and no others, were requested again at that loop time."""
        if self.ends:
            self.ends[-1] = LAST_NAME  # the last page covers all names after it
        first, last = bisect_right(self.ends, start), bisect_left(self.ends, end)
        before = list(zip(self.ends[:first], self.times[:first], strict=True))
        if start and first < len(self.ends) and (not before or before[-1][0] != start):
            before.append((start, self.times[first]))
        after = [each for each in zip(self.ends[last:], self.times[last:], strict=True) if each[0] != end]
        parts = [*before, (end, moment), *after]
        self.ends, self.times = [part[0] for part in parts], [part[1] for part in parts]


class AccessHeat(NamedTuple):
    """Access frequency of one page of a directory: the loop time of the last lookup and a decaying count of lookups."""

    moment: float
    heat: float


@dataclass(eq=False, slots=True)
class ListingState:
    """What is known of a directory's names in the bucket; the rows themselves are in `index/listings.py`.

    epoch: of the newest complete listing (0: none). finished: loop time at which it ended (-inf: expired). seconds: its
    duration. page_times: when its pages were requested. hidden: objects that no name shows, so that they have no row.
    has_directories: whether it may contain any. inode_ranges: of its rows. free_numbers: the unused rest of one range.
    probes: single names requested since the listing began; probed: the last one, as a name requested twice in a row
    counts once. reader: the process that last read the directory; last_read: the child that it read last. uses: access
    frequency of each page, by the name after which the page begins. refusal: why its rows could not be stored;
    refused_until: loop time until which the directory is not listed again for that reason.
    """

    epoch: int = 0
    hidden: int = 0
    finished: float = float("-inf")
    seconds: float = 0.0
    page_times: PageTimes = field(default_factory=PageTimes)
    has_directories: bool = True
    inode_ranges: set[int] = field(default_factory=set)
    free_numbers: range = range(0)
    probes: int = 0
    probed: str = ""
    reader: int = 0
    last_read: str = ""
    uses: "dict[str, AccessHeat]" = field(default_factory=dict)
    refusal: LocalDiskError | None = None
    refused_until: float = float("-inf")

    def expire(self) -> None:
        """Mark everything known as stale."""
        self.finished = float("-inf")
        self.page_times.times = [float("-inf")] * len(self.page_times.times)

    def on_lost(self) -> None:
        """The rows are gone: the directory counts as not listed."""
        self.epoch, self.finished = 0, float("-inf")
        self.page_times, self.inode_ranges, self.free_numbers = PageTimes(), set(), range(0)
        self.has_directories = True


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
    handle whose process is being killed; such content is not published. changes: how often the bytes changed;
    flushed_changes: that count at the last durable close.
    """

    changed_since_flush: bool = True
    dirty_since: float = float("inf")
    flushed_by: "FileHandle | None" = None
    killed_writer: "FileHandle | None" = None
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
class FileVersion:
    """One version of a file's content, written on this node. `record` is its journal row; times are loop times.

    waiting_since: when the oldest content that it superseded was closed. granule_checksums: those of the sealed bytes;
    checksums: those at the last fsync.
    replaces: the rejected version that this one replaces once its close is durable. successor: the newer content of the
    same file that superseded this one; waiters for this one wait for that one. is_forced: the operator wants this
    commit marker published although the bucket rejected a file that it announces.
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
    waiting_since: float = float("inf")
    sealed_at: float = float("inf")
    replaces: "FileVersion | None" = None
    successor: "FileVersion | None" = None
    is_forced: bool = False
    # Few writers wait for space.
    _growth: trio.Lock | None = field(default=None, init=False, repr=False)

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

    readers: the removed file, which may still be open. times_followed: how often a removal followed what was renamed.
    has_dependent_write: content is written beside a commit marker that this removes, so it must not be deferred.
    """

    record: OperationRecord
    node: Node | None
    readers: Node | None = None
    error: FusecacheError | None = None
    has_dependent_write: bool = False
    queued_at: float = field(default_factory=trio.current_time)
    times_followed: int = 0

    @property
    def sequence(self) -> int:
        """Its position in the publish order."""
        return self.record.sequence

    @property
    def in_flight(self) -> bool:
        """Whether the request may have been sent, by this daemon or by the previous one."""
        return self.record.sent

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
