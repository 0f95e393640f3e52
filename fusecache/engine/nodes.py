"""What the engine holds in memory: nodes of the tree, generations of content, changes the bucket is owed, handles.

Mutable, owned by the loop's thread alone. Rows of the journal (`model/records.py`) are their durable shadow.
"""

from dataclasses import dataclass, field, replace
from enum import Enum

import trio

from fusecache.disk.staging import StagingFile
from fusecache.engine.cache import ReadHandle
from fusecache.model.errors import FusecacheError
from fusecache.model.nouns import ObjectInfo
from fusecache.model.records import FileRecord, OperationKind, OperationRecord
from fusecache.model.states import MUTABLE, FileState, check_transition


class Kind(Enum):
    """What a node is."""

    FILE = "file"
    DIRECTORY = "directory"
    SYMLINK = "symlink"


@dataclass(eq=False, slots=True)
class Listing:
    """What is known of a directory's remote names; the rows themselves are in `index/listings.py`.

    hidden: keys that cannot be names here, and so have no row. started: loop time at which the newest complete
    generation was begun (-inf: never listed); finished: its end.
    """

    generation: int = 0
    hidden: int = 0
    started: float = float("-inf")
    running: trio.Event | None = None


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
    children: "dict[str, Node]" = field(default_factory=dict)
    listing: Listing = field(default_factory=Listing)
    has_marker: bool = False
    lock: trio.Lock = field(default_factory=trio.Lock)

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


@dataclass(eq=False, slots=True)
class FileHandle:
    """One open file. pid: thread that opened it for writing (0: unknown); process: its thread group."""

    node: Node
    writable: bool
    pid: int = 0
    process: int = 0
    reader: ReadHandle | None = None
    reader_version: ObjectInfo | None = None


@dataclass(eq=False, slots=True)
class DirectoryHandle:
    """One open directory, read in the order of the bucket: the rows of one listing, then names only known here.

    generation: of the listing that is read (0: not begun). after: sort name reached in it. local_names:
    those left once the rows are at their end. queue, position: entries that were fetched but not taken yet,
    and the cookie of the first of them.
    """

    node: Node
    generation: int = 0
    after: str = ""
    local_names: list[str] | None = None
    queue: list[Node] = field(default_factory=list)
    position: int = 0
