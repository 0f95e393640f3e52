"""What the engine holds in memory: nodes of the tree, generations of content, changes the bucket is owed, handles.

Mutable, owned by the loop's thread alone. Rows of the journal (`model/records.py`) are their durable shadow.
"""

from bisect import bisect_left
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import NamedTuple

import trio

from fusecache.disk.staging import StagingFile
from fusecache.engine.cache import ReadHandle
from fusecache.model.errors import FusecacheError
from fusecache.model.nouns import ObjectInfo
from fusecache.model.records import FileRecord, OperationKind, OperationRecord
from fusecache.model.states import MUTABLE, FileState, check_transition

# Inode numbers from here on are those of listings' rows: in chunks, of which one page of a listing takes one at most.
LISTED_NUMBERS = 1 << 40
CHUNK = 1024


class Kind(Enum):
    """What a node is."""

    FILE = "file"
    DIRECTORY = "directory"
    SYMLINK = "symlink"


@dataclass(eq=False, slots=True)
class Marks:
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


@dataclass(eq=False, slots=True)
class Listing:
    """What is known of a directory's remote names; the rows themselves are in `index/listings.py`.

    generation: of the newest complete listing (0: none); finished: the loop time at which it ended (-inf: it cannot be
    believed), seconds: that it took, marks: of its pages. hidden: keys that cannot be names here, and so have no row.
    has_directories: whether it may hold any. chunks: of inode numbers in its rows. probed: the names that were asked
    for one by one since it began, repetitions not counted: `probes` of them. walker: the process that last read it;
    walked: the child that was last read since.
    """

    generation: int = 0
    hidden: int = 0
    finished: float = float("-inf")
    seconds: float = 0.0
    marks: Marks = field(default_factory=Marks)
    has_directories: bool = True
    chunks: set[int] = field(default_factory=set)
    open_numbers: range = range(0)
    probes: int = 0
    probed: str = ""
    walker: int = 0
    walked: str = ""

    def expire(self) -> None:
        """Nothing of it is fresh any more."""
        self.finished = float("-inf")
        self.marks.times = [float("-inf")] * len(self.marks.times)


class Listed(NamedTuple):
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
    generation: "Generation | None" = None
    target: str = ""
    lookups: int = 0
    handles: int = 0
    writers: int = 0
    write_error: FusecacheError | None = None
    pins: int = 0
    verified: float = float("-inf")
    has_marker: bool = False
    # Files, of which there are many, have neither children nor a listing, and seldom need the lock.
    children: "dict[str, Node]" = field(init=False)
    _listing: Listing | None = field(default=None, init=False)
    _lock: trio.Lock | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self.children = {} if self.kind is Kind.DIRECTORY else _NO_CHILDREN

    @property
    def listing(self) -> Listing:
        """What is known of a directory's remote names."""
        if self._listing is None:
            self._listing = Listing()
        return self._listing

    @property
    def is_listed(self) -> bool:
        """Whether the rows of a listing of it are kept."""
        return self._listing is not None and self._listing.generation > 0

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
        if self.generation is not None:
            return self.generation.size
        if self.kind is Kind.SYMLINK:
            return len(self.target.encode())
        return self.object.size if self.object is not None else 0


@dataclass(eq=False, slots=True)
class Generation:
    """One version of a file's content that is or was written here. `record` is its journal row."""

    record: FileRecord
    file: StagingFile
    node: Node | None
    size: int
    reserved: int = 0
    error: FusecacheError | None = None
    changed_since_flush: bool = True
    killed_writer: "FileHandle | None" = None
    flushed_at: float = float("inf")
    waiting_since: float = float("inf")
    sealed_at: float = float("inf")
    readers: int = 0
    unread: trio.Event | None = None
    prepared: "Prepared | None" = None
    granule_checksums: bytes = b""
    sent_bytes: int = 0
    # The refused version that this one replaces once it is promised.
    replaces: "Generation | None" = None
    # Where its multipart upload was begun: a rename changes `record.key`, an upload's key never.
    upload_key: str = ""

    def __post_init__(self) -> None:
        self.upload_key = self.record.key

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

    def go(self, state: FileState, **changes: object) -> FileRecord:
        """Change state, and other fields of the record with it; return the new row."""
        check_transition(self.record.state, state)
        self.record = replace(self.record, state=state, **changes)  # type: ignore[arg-type]
        return self.record

    def changed_keys(self) -> tuple[str, ...]:
        """The keys that publishing it changes."""
        return (self.record.key,)


@dataclass(eq=False, slots=True)
class Prepared:
    """The work that may run before a generation's turn: sync, checksums, parts. done is set at its end."""

    done: trio.Event
    scope: trio.CancelScope
    failure: FusecacheError | None = None


@dataclass(eq=False, slots=True)
class Operation:
    """One change of names that the bucket is owed. queued_at: loop time.

    in_flight: the request may have been sent, by this daemon or by the one before it.
    """

    record: OperationRecord
    node: Node | None
    in_flight: bool = False
    error: FusecacheError | None = None
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


Item = Generation | Operation
# What a directory shows.
Shown = Node | Listed
_NO_CHILDREN: dict[str, Node] = {}


@dataclass(eq=False, slots=True)
class FileHandle:
    """One open file. pid: thread that opened it (0: unknown); process: its thread group, if it may write."""

    node: Node
    writable: bool
    pid: int = 0
    process: int = 0
    reader: ReadHandle | None = None
    reader_version: ObjectInfo | None = None


@dataclass(eq=False, slots=True)
class DirectoryHandle:
    """One open directory, read in the order of the bucket: the rows of one listing, then names only known here.

    process: who reads it (0: unknown). generation: of the listing that is read (0: not begun). after: sort name
    reached in it. early: files that were given before it was known whether a directory of that name comes.
    local_names: those left once the rows are at their end. queue, position: entries that were fetched but not taken
    yet, and the cookie of the first of them.
    """

    node: Node
    process: int = 0
    generation: int = 0
    after: str = ""
    early: list[str] = field(default_factory=list)
    local_names: list[str] | None = None
    queue: "deque[Shown]" = field(default_factory=deque)
    position: int = 0


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
