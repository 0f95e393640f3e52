"""What the engine holds in memory: nodes of the tree, generations of content, changes the bucket is owed, handles.

Mutable, owned by the loop's thread alone. Rows of the journal (`model/records.py`) are their durable shadow.
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
from fusecache.index.journal import PutFile
from fusecache.model.errors import FusecacheError
from fusecache.model.objects import ObjectInfo
from fusecache.model.records import FileRecord, OperationKind, OperationRecord, PosixAttributes
from fusecache.model.states import MUTABLE, FileState, check_transition
from fusecache.policy.incremental_checksums import IncrementalChecksums
from fusecache.policy.writeback.multipart import PartTable, first_ready_at
from fusecache.remote.store import Sent

# Inode numbers from here on are those of listings' rows: in chunks, of which one page of a listing takes one at most.
LISTED_NUMBERS = 1 << 40
INODE_RANGE = 1024
# Behind every sort name.
LAST_NAME = "\U0010ffff"


class Kind(Enum):
    """What a node is."""

    FILE = "file"
    DIRECTORY = "directory"
    SYMLINK = "symlink"


@dataclass(eq=False, slots=True)
class PageTimes:
    """When which part of a directory was listed: names up to `ends[i]` at loop time `times[i]`, one a page."""

    ends: list[str] = field(default_factory=list)
    times: list[float] = field(default_factory=list)

    def add(self, end: str, moment: float) -> None:
        """Another page was asked for at that moment."""
        self.ends.append(end)
        self.times.append(moment)

    def of(self, sort_name: str) -> float:
        """Return when the part with that name was asked for; names behind the last page belong to it."""
        return self.page_of(sort_name)[1]

    def page_of(self, sort_name: str) -> tuple[str, float]:
        """Return the end of the part with that name, and when it was asked for."""
        if not self.times:
            return "", float("-inf")
        index = min(bisect_left(self.ends, sort_name), len(self.times) - 1)
        return self.ends[index], self.times[index]

    def start_of(self, sort_name: str) -> str:
        """Return behind which name the part with that name begins; "" for the first."""
        index = min(bisect_left(self.ends, sort_name), len(self.times) - 1)
        return self.ends[index - 1] if index > 0 else ""

    def behind(self, start: str) -> float:
        """Return when the part that begins behind that name was asked for."""
        if not self.times:
            return float("-inf")
        return self.times[min(bisect_right(self.ends, start), len(self.times) - 1)]

    def renew(self, start: str, end: str, moment: float) -> None:
        """The names behind `start` up to `end` were asked for again at that moment; no others."""
        if self.ends:
            self.ends[-1] = LAST_NAME  # the last part is that of all names behind it
        first, last = bisect_right(self.ends, start), bisect_left(self.ends, end)
        before = list(zip(self.ends[:first], self.times[:first], strict=True))
        if start and first < len(self.ends) and (not before or before[-1][0] != start):
            before.append((start, self.times[first]))
        after = [each for each in zip(self.ends[last:], self.times[last:], strict=True) if each[0] != end]
        parts = [*before, (end, moment), *after]
        self.ends, self.times = [part[0] for part in parts], [part[1] for part in parts]


class AccessHeat(NamedTuple):
    """How names of a part of a directory are looked up: the loop time of the last one, and a decaying count of them."""

    moment: float
    heat: float


@dataclass(eq=False, slots=True)
class ListingState:
    """What is known of a directory's remote names; the rows themselves are in `index/listings.py`.

    generation: of the newest complete listing (0: none); finished: the loop time at which it ended (-inf: it cannot be
    believed), seconds: that it took, marks: of its pages. hidden: keys that cannot be names here, and so have no row.
    has_directories: whether it may hold any. chunks: of inode numbers in its rows. probed: the names that were asked
    for one by one since it began, repetitions not counted: `probes` of them. walker: the process that last read it;
    walked: the child that was last read since. uses: of its parts, by where they begin.
    """

    epoch: int = 0
    hidden: int = 0
    finished: float = float("-inf")
    seconds: float = 0.0
    page_times: PageTimes = field(default_factory=PageTimes)
    has_directories: bool = True
    chunks: set[int] = field(default_factory=set)
    open_numbers: range = range(0)
    probes: int = 0
    probed: str = ""
    walker: int = 0
    walked: str = ""
    uses: "dict[str, AccessHeat]" = field(default_factory=dict)

    def expire(self) -> None:
        """Nothing of it is fresh any more."""
        self.finished = float("-inf")
        self.page_times.times = [float("-inf")] * len(self.page_times.times)


class ListedName(NamedTuple):
    """A name as a listing shows it, for which no node is needed until somebody does something with it.

    number: of its inode, from the listing's row. seen: the loop time at which the bucket showed it.
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
    """One inode. A remote object that changes becomes another node, so that the kernel never mixes two versions.

    object: the version that the bucket shows, or will show after a queued rename, under this node's name;
    None: none. generation: local content that stands before it. pins: generations and changes of this node
    and of all below it: while there are any, the node is the truth and no listing removes it. verified:
    loop time at which the bucket's view of it was last known.
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
    # Files, of which there are many, have neither children nor a listing, and seldom need the lock.
    children: "dict[str, Node]" = field(init=False)
    _listing: ListingState | None = field(default=None, init=False)
    _lock: trio.Lock | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self.children = {} if self.kind is Kind.DIRECTORY else _NO_CHILDREN

    @property
    def listing(self) -> ListingState:
        """What is known of a directory's remote names."""
        if self._listing is None:
            self._listing = ListingState()
        return self._listing

    @property
    def is_listed(self) -> bool:
        """Whether the rows of a listing of it are kept."""
        return self._listing is not None and self._listing.epoch > 0

    @property
    def lock(self) -> trio.Lock:
        """Held by the writer that makes local content of the published version."""
        if self._lock is None:
            self._lock = trio.Lock()
        return self._lock

    def published_etag(self, key: str) -> str | None:
        """Return what the bucket shows under the node's key, before anything that is queued; None: nothing."""
        return self.object.etag if self.object is not None and self.object.key == key else None

    @property
    def size(self) -> int:
        """Bytes of content as this node shows it."""
        if self.version is not None:
            return self.version.size
        if self.kind is Kind.SYMLINK:
            return len(self.target.encode())
        return self.object.size if self.object is not None else 0


@dataclass(eq=False, slots=True)
class FileVersion:
    """One version of a file's content that is or was written here. `record` is its journal row."""

    record: FileRecord
    file: StagingFile
    node: Node | None
    size: int
    reserved: int = 0
    _growth: trio.Lock | None = field(default=None, init=False, repr=False)
    error: FusecacheError | None = None
    changed_since_flush: bool = True
    killed_writer: "FileHandle | None" = None
    flushed_by: "FileHandle | None" = None
    flushed_at: float = float("inf")
    # Closes whose row is on its way to the disk.
    closing: int = 0
    waiting_since: float = float("inf")
    sealed_at: float = float("inf")
    readers: int = 0
    unread: trio.Event | None = None
    # Writes that a thread works on; idle: set when there is none any more.
    writes: int = 0
    idle: trio.Event | None = None
    # Loop time of the first change that is in nothing published or promised to be.
    dirty_since: float = float("inf")
    # Those who wait for this very content to be in the bucket.
    awaited: int = 0
    prepared: "Preparation | None" = None
    granule_checksums: bytes = field(default=b"", repr=False)
    # How often its bytes changed; that number at the last promise; its checksums at the last fsync.
    changes: int = 0
    flushed_changes: int = -1
    checksums: IncrementalChecksums = field(default_factory=IncrementalChecksums, repr=False)
    # Whether it was promised right behind the version before it, with nothing queued between.
    has_dependent_write: bool = False
    # Whether it may speak of what was removed before it was published: the next version goes before it.
    is_superseded_marker: bool = False
    # Bytes written so far, repetitions counted; past `grows_at` of them the next part may be sent.
    written: int = 0
    grows_at: int = field(default_factory=first_ready_at)
    growing_since: float = float("inf")
    upload: "MultipartUpload | None" = None
    sent_bytes: int = 0
    # The one request that sends it whole, or completes its upload.
    asked: Sent | None = None
    # What its name says to be there, and the bucket refused: for that it is kept back. told_before: the place of the
    # version of its name before it. is_forced: somebody wants it published all the same.
    missing: "QueuedChange | None" = None
    reported_before: int = 0
    is_forced: bool = False
    # The refused version that this one replaces once it is promised.
    replaces: "FileVersion | None" = None
    # Newer content of the same file for which this one was dropped: who waits for this one waits for that.
    successor: "FileVersion | None" = None
    # Where its multipart upload was begun: a rename changes `record.key`, an upload's key never.
    upload_key: str = ""

    def __post_init__(self) -> None:
        self.upload_key = self.record.key

    @property
    def growth(self) -> trio.Lock:
        """Held by the writer that waits for room."""
        if self._growth is None:
            self._growth = trio.Lock()
        return self._growth

    @property
    def state(self) -> FileState:
        """Where it is in its life."""
        return self.record.state

    @property
    def sequence(self) -> int:
        """Its place in the publish order; 0 while nothing is promised."""
        return self.record.sequence

    @property
    def is_mutable(self) -> bool:
        """Whether a writer may change it in place."""
        return self.record.state in MUTABLE

    @property
    def in_flight(self) -> bool:
        """Whether the request that publishes it may have been sent."""
        return self.record.state is FileState.PUBLISHING

    @property
    def bytes_under_way(self) -> int:
        """How many of its bytes are in requests that have not been answered."""
        if self.upload is not None:
            return self.upload.parts.under_way_bytes(self.size)
        return self.size if self.asked is not None and not self.record.upload_id else 0

    @property
    def requests(self) -> tuple[Sent, ...]:
        """How far each request is that sends some of it, or publishes it, and has not been answered."""
        parts = () if self.upload is None else tuple(self.upload.sending.values())
        return parts if self.asked is None else (*parts, self.asked)

    @property
    def moved_bytes(self) -> int:
        """How many of its bytes the bucket has, or the network has taken."""
        return min(self.size, self.sent_bytes + sum(each.bytes for each in self.requests))

    def on_written(self, start: int, stop: int) -> bool:
        """Bytes [start, stop) were written; return whether another part may be sent now."""
        self.on_changed(start, stop)
        self.size = max(self.size, stop)
        self.written += stop - start
        return self.written >= self.grows_at and stop >= self.grows_at

    def on_changed(self, start: int, stop: int) -> None:
        """Bytes [start, stop) are others now, or gone: what the bucket holds of them counts no longer."""
        self.changes += 1
        self.checksums.change(min(start, self.size), stop)  # a hole before it is new, too
        if self.upload is not None and self.upload.parts.change(start, stop):
            self.record = replace(self.record, part_etags=self.upload.parts.etags())
            self.sent_bytes = self.upload.parts.held_bytes(self.size)

    def transition_to(self, state: FileState, **changes: object) -> FileRecord:
        """Change state, and other fields of the record with it; return the new row."""
        check_transition(self.record.state, state)
        self.record = replace(self.record, state=state, **changes)  # type: ignore[arg-type]
        return self.record

    def changed_keys(self) -> tuple[str, ...]:
        """The keys that publishing it changes."""
        return (self.record.key,)


@dataclass(eq=False, slots=True)
class Preparation:
    """The work that may run before a generation's turn: sync, checksums, parts. done is set at its end."""

    done: trio.Event
    scope: trio.CancelScope
    failure: FusecacheError | None = None


@dataclass(eq=False, slots=True)
class MultipartUpload:
    """The multipart upload of one generation, perhaps begun before it is sealed.

    key: where it was begun. upload_id: "" until the bucket has answered; is_known: the journal has it; is_asked: one of
    both is under way. ready: so many parts, from the first, may be sent. attributes: what its object's metadata will
    say. attempts: of the creation, and at parts, under way. sending: how far the requests are, by part. failures: how
    many pauses it made since anything of it went well; the present one lasts until the loop time `quiet_until`.
    failure: why it cannot go on. stopped: set when nobody wants it any more. changed: set, and made anew, when an
    attempt ended.
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
        """Wake those who wait for an attempt's end."""
        self.changed.set()
        self.changed = trio.Event()

    def stop(self) -> None:
        """Nobody wants it any more: no further attempt begins, and those who wait for it wait no longer."""
        self.stopped.set()
        self.announce()


@dataclass(eq=False, slots=True)
class Operation:
    """One change of names that the bucket is owed. queued_at: loop time.

    in_flight: the request may have been sent, by this daemon or by the one before it. readers: the removed file, which
    somebody may still have open. delays: how often a removal was given a later place while it was the oldest.
    is_followed: whether something waits for a removal that nobody put off for: newer content of its name which cannot
    take its place, or what is written anew where it said that all is there.
    """

    record: OperationRecord
    node: Node | None
    in_flight: bool = False
    readers: Node | None = None
    error: FusecacheError | None = None
    delays: int = 0
    has_dependent_write: bool = False
    queued_at: float = field(default_factory=trio.current_time)

    @property
    def sequence(self) -> int:
        """Its place in the publish order."""
        return self.record.sequence

    def changed_keys(self) -> tuple[str, ...]:
        """The keys that publishing it changes."""
        if self.record.kind is OperationKind.RENAME:
            return (self.record.key, self.record.target)
        return (self.record.key,)


QueuedChange = FileVersion | Operation


def is_removal(item: QueuedChange | None) -> TypeGuard[Operation]:
    """Return whether an item is the removal of an object."""
    return isinstance(item, Operation) and item.record.kind is OperationKind.DELETE


def is_rename(item: FileVersion | Operation) -> bool:
    """Return whether an item is a queued rename."""
    return isinstance(item, Operation) and item.record.kind is OperationKind.RENAME


def dropped_row(version: FileVersion) -> PutFile:
    """Return the row of content that must not come back after a crash: the next mount removes its file.

    The row goes when the file has gone: of one without a row nobody could tell that it is not wanted.
    """
    return PutFile(replace(version.record, state=FileState.DROPPED))


# What a directory shows.
Shown = Node | ListedName
_NO_CHILDREN: dict[str, Node] = {}


@dataclass(eq=False, slots=True)
class FileHandle:
    """One open file. pid: thread that opened it (0: unknown); process: its thread group, if it may write.

    appends: whether it was opened with O_APPEND. is_flushed: whether a descriptor of it was closed; released:
    when the last one was.
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
    """One open directory, read in the order of the bucket: the rows of one listing, then names only known here.

    process: who reads it (0: unknown). generation: of the listing that is read (0: not begun). after: sort name
    reached in it. early: files that were given before it was known whether a directory of that name comes.
    local_names: those left once the rows are at their end. pinned: names that stood for something unpublished when the
    reading began, and that no row has shown since. queue, position: entries that were fetched but not taken
    yet, and the cookie of the first of them.
    """

    node: Node
    process: int = 0
    epoch: int = 0
    after: str = ""
    unpaired_files: list[str] = field(default_factory=list)
    local_names: list[str] | None = None
    pinned: set[str] = field(default_factory=set)
    queue: "deque[Shown]" = field(default_factory=deque)
    position: int = 0


def attributes_of(node: Node) -> PosixAttributes:
    """Return the node's attributes as one value."""
    return PosixAttributes(node.mode, node.uid, node.gid, node.mtime_ns)


@contextmanager
def in_use(node: Node | None) -> Iterator[None]:
    """Keep a node in memory while its user waits for something else."""
    if node is not None:
        node.handles += 1
    try:
        yield
    finally:
        if node is not None:
            node.handles -= 1
