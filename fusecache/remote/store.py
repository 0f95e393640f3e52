"""The interface of every store: `remote/s3`, `remote/clouds`, and memory (`tests/support/memory_store.py`).

Calls block and are thread-safe. Every call ends within the store's own timeouts.
Errors are those of `fusecache.model.errors`, never botocore's.

Invariants:
1. A read names a version: a GET carries `If-Match`, and bytes of another version are never returned.
2. A store retries only inside the transport of one request. Endless retry loops belong to the engine.
3. Never HeadBucket, ListBuckets or CreateBucket: object-scoped tokens do not allow them.
"""

import enum
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from fusecache.model.objects import Extent, ObjectId, ObjectInfo, UnfinishedUpload
from fusecache.remote.statistics import StoreStatistics

# How the names of objects that probe a store begin.
PROBE_NAME = ".fusecache-probe-"


class ConditionalWrites(enum.Enum):
    """What a store does with If-Match of a write. NOT_OF_PARTS: kept, but ignored for an upload in parts."""

    KEPT = "kept"
    REFUSED = "refused"
    IGNORED = "ignored"
    NOT_OF_PARTS = "not-of-parts"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Condition:
    """Precondition on the destination of a publishing request.

    `Condition(etag=None)`: no object exists (`If-None-Match: *`).
    `Condition(etag="…")`: the object has this version (`If-Match`).
    """

    etag: str | None


@dataclass(frozen=True, slots=True)
class ListPage:
    """One page of a listing, in key order. prefixes: the common prefixes, which end with the delimiter."""

    objects: tuple[ObjectInfo, ...]
    prefixes: tuple[str, ...]
    next_token: str | None


@dataclass(frozen=True, slots=True)
class UploadPage:
    """One page of unfinished multipart uploads, in key order."""

    uploads: tuple[UnfinishedUpload, ...]
    next_token: str | None


@dataclass(frozen=True, slots=True)
class ObjectContent:
    """What tells one content from another: size, and the store's checksums of all bytes, by algorithm."""

    etag: str
    size: int
    modified: float
    checksums: Mapping[str, str]


@dataclass(eq=False, slots=True)
class Sent:
    """Upload progress of one body: bytes that the kernel has taken. The sending thread writes, the event loop reads.

    since: the event loop's time when the upload began.
    """

    since: float
    bytes: int = 0


@dataclass(frozen=True, slots=True)
class FileSlice:
    """Bytes [offset, offset + size) of a local file: the body of a PUT. Size 0 is a zero-byte object.

    md5: of these bytes, if known; else the store reads them an extra time to compute it. sent: receives the progress.
    """

    path: str
    offset: int
    size: int
    md5: bytes = b""
    sent: Sent | None = field(default=None, compare=False)


class Interruption:
    """Lets another thread cancel one `get_into` call, which may make several requests one after the other."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._end: Callable[[], None] | None = None
        self._is_asked = False

    def interrupt(self) -> None:
        """Cancel the read: it raises Unavailable soon. A read that has ended is not affected."""
        with self._lock:
            self._is_asked = True
            if self._end is not None:
                self._end()

    @property
    def is_asked(self) -> bool:
        """Whether the read has been cancelled."""
        return self._is_asked

    @contextmanager
    def by(self, end: Callable[[], None]) -> Iterator[None]:
        """For the store: within the block, cancelling calls `end`. If the read is cancelled already, call it now."""
        with self._lock:
            self._end = end
            if self._is_asked:
                end()
        try:
            yield
        finally:
            with self._lock:
                self._end = None


class ReadStore(Protocol):
    """The reading part of a store. What has a body here, most stores need not have."""

    def reload(self) -> None:
        """Reload the credentials, if there are any."""
        return

    def close(self) -> None:
        """Close idle connections."""
        return

    def content(self, key: str) -> ObjectContent:
        """Return what tells an object's content from another. Raises ObjectMissing."""
        info = self.head(key)
        return ObjectContent(info.etag, info.size, info.modified, {})

    def list_page(
        self,
        prefix: str,
        *,
        delimiter: str = "",
        token: str | None = None,
        start_after: str = "",
        limit: int = 1000,
    ) -> ListPage:
        """Return one page of the objects whose keys start with `prefix`. `limit` is at most 1 000."""
        ...

    def head(self, key: str) -> ObjectInfo:
        """Return an object's properties with its metadata. Raises ObjectMissing."""
        ...

    def get_into(
        self,
        object_id: ObjectId,
        extent: Extent,
        buffer: memoryview,
        progress: Callable[[int], None],
        interruption: Interruption | None = None,
    ) -> None:
        """Fill `buffer[:extent.size]` with the bytes of `extent`, by one ranged GET with If-Match.

        Calls `progress(n)` from this thread when the first n bytes of the buffer are valid; n grows. Reported bytes
        stay valid even if the call fails later. `interruption` cancels the call.
        Raises ObjectChanged (412, or another ETag in the response), ObjectMissing, or Unavailable (also for a
        body that is short, long, of another range, or transformed by a proxy).
        """
        ...

    def list_uploads(self, prefix: str, *, token: str | None = None) -> UploadPage:
        """Return one page of the unfinished uploads whose keys start with `prefix`."""
        ...

    def statistics(self) -> StoreStatistics:
        """Return the request counts so far. Makes no request."""
        ...


class Store(ReadStore, Protocol):
    """A bucket behind one endpoint and one set of credentials."""

    @property
    def conditional_writes(self) -> ConditionalWrites:
        """What the store does with preconditions of writes, as far as known."""
        return ConditionalWrites.UNKNOWN

    def probe_conditions(self, prefix: str) -> ConditionalWrites:
        """Find out what the store does with If-Match. Leaves nothing behind."""
        return self.conditional_writes

    def take_conditions(self, found: ConditionalWrites) -> None:
        """Use the result of an earlier probe."""
        return

    def send_no_conditions(self) -> None:
        """From now on send writes without their conditions."""
        return

    def put(
        self, key: str, body: FileSlice, *, metadata: Mapping[str, str], condition: Condition | None = None
    ) -> str:
        """Store a whole object with Content-Length and Content-MD5; return its ETag. Raises ObjectChanged on 412."""
        ...

    def create_multipart(self, key: str, *, metadata: Mapping[str, str]) -> str:
        """Begin a multipart upload; return its UploadId."""
        ...

    def upload_part(self, key: str, upload_id: str, number: int, body: FileSlice) -> str:
        """Store part `number` (from 1); return its ETag. Raises UploadLost."""
        ...

    def complete_multipart(
        self, key: str, upload_id: str, part_etags: Sequence[str], *, condition: Condition | None = None
    ) -> str:
        """Publish parts 1..n; return the object's ETag. Raises UploadLost, ObjectChanged on 412."""
        ...

    def abort_multipart(self, key: str, upload_id: str) -> None:
        """Drop an upload and its parts. An unknown upload is success."""
        ...

    def copy(
        self,
        source: ObjectId,
        key: str,
        *,
        condition: Condition | None = None,
        metadata: Mapping[str, str] | None = None,
        size: int | None = None,
    ) -> str:
        """Copy inside the bucket if the source is still that version; return the new ETag.

        `metadata` None keeps the source's. Objects over 5 GiB are copied in equal parts. size: the source's, if known:
        then a copy that keeps the metadata needs no request before it.
        Raises ObjectMissing, ObjectChanged (source or destination).
        """
        ...

    def delete(self, key: str) -> None:
        """Delete an object. A missing one is success."""
        ...

    def probe_write(self, prefix: str) -> None:
        """Check that writing is allowed; by a write that must fail; leave nothing behind."""
        ...


class Peers(Protocol):
    """Other nodes that read the same bucket, and may have its bytes. A group: the granules of one chunk."""

    def owner(self, object_id: ObjectId, group: int) -> str | None:
        """Return the node to ask for a group. None: the bucket."""
        ...

    def is_own(self, object_id: ObjectId, group: int) -> bool:
        """Return whether this node keeps a group for the others."""
        ...

    def on_bucket_body(self, nbytes: int, seconds: float) -> None:
        """The bucket has sent a body in so much time: nodes are compared with that."""
        ...

    def get_into(
        self,
        node: str,
        object_id: ObjectId,
        size: int,
        extent: Extent,
        buffer: memoryview,
        progress: Callable[[int], None],
        interruption: Interruption,
    ) -> None:
        """Fill the buffer from a node, as `Store.get_into` does. `progress` counts bytes that were checked.

        size: of the object. Raises RemoteError: then the bucket is to be asked.
        """
        ...


@runtime_checkable
class SupportsPrimary(Protocol):
    """A store over several endpoints, which may answer for each other in LIST and HEAD."""

    def primary(self) -> Store:
        """Return the same store, whose LISTs and HEADs only the endpoint that takes the writes answers."""
        ...


def primary_of(store: Store) -> Store:
    """Return the store for requests that decide about a write: their LISTs and HEADs must be the newest."""
    return store.primary() if isinstance(store, SupportsPrimary) else store
