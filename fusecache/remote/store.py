"""The one contract that every store keeps: S3 (`remote/s3/store.py`) and memory (`support/memory_store.py`).

Blocking and safe to call from many threads at once. Every call ends within the store's own time-outs.
Errors are those of `fusecache.model.errors`, never botocore's.

Invariants:
1. A read names a version: a GET carries `If-Match`, and bytes of another version are never delivered.
2. Nothing is retried here beyond one request's transport; the endless loops belong to the engine.
3. No HeadBucket, ListBuckets or CreateBucket, ever (object-scoped tokens refuse them).
"""

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol

from fusecache.model.objects import Extent, ObjectId, ObjectInfo
from fusecache.remote.statistics import StoreStatistics


@dataclass(frozen=True, slots=True)
class Condition:
    """What must hold at the destination for a publishing request to take effect.

    `Condition(etag=None)`: there must be no object (`If-None-Match: *`).
    `Condition(etag="…")`: that version must be there (`If-Match`).
    """

    etag: str | None


@dataclass(frozen=True, slots=True)
class ListPage:
    """One page of a listing, in key order. `prefixes` are common prefixes and end with the delimiter."""

    objects: tuple[ObjectInfo, ...]
    prefixes: tuple[str, ...]
    next_token: str | None


@dataclass(eq=False, slots=True)
class Sent:
    """How far one body is: bytes that the network has taken. Set by the thread that sends, read by the loop.

    since: the loop's time when it was begun.
    """

    since: float
    bytes: int = 0


@dataclass(frozen=True, slots=True)
class FileSlice:
    """Bytes [offset, offset + size) of a local file: the body of a PUT. size 0 is a zero-byte object.

    md5: of these bytes, if it is known; else the store reads them once more for it. sent: told how far it is.
    """

    path: str
    offset: int
    size: int
    md5: bytes = b""
    sent: Sent | None = field(default=None, compare=False)


class Interruption:
    """Lets another thread end one read. Made for one `get_into`, which may hold several requests in turn."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._end: Callable[[], None] | None = None
        self._is_asked = False

    def interrupt(self) -> None:
        """End the read: it raises Unavailable soon. One that is over already is not touched."""
        with self._lock:
            self._is_asked = True
            if self._end is not None:
                self._end()

    @property
    def is_asked(self) -> bool:
        """Whether the read is to end."""
        return self._is_asked

    @contextmanager
    def by(self, end: Callable[[], None]) -> Iterator[None]:
        """For the store: within the block, `end` is what ends the request; at once if it is to end already."""
        with self._lock:
            self._end = end
            if self._is_asked:
                end()
        try:
            yield
        finally:
            with self._lock:
                self._end = None


class Store(Protocol):
    """A bucket, reached with one endpoint and one set of credentials."""

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
        """Return an object's facts with metadata. Raises ObjectMissing."""
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

        `progress(n)` is called from this thread whenever the first n bytes of the buffer are valid; n grows.
        What was reported stays valid even if the call then fails. `interruption` ends it early.
        Raises ObjectChanged (412, or another ETag in the answer), ObjectMissing, Unavailable (also for a
        body that is short, long, of another range, or content-encoded).
        """
        ...

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
    ) -> str:
        """Copy inside the bucket if the source is still that version; return the new ETag.

        `metadata` None keeps the source's. Objects over 5 GiB are copied in equal parts.
        Raises ObjectMissing, ObjectChanged (source or destination).
        """
        ...

    def delete(self, key: str) -> None:
        """Delete an object. A missing one is success."""
        ...

    def probe_write(self, prefix: str) -> None:
        """Show that writing is allowed and leave nothing behind (CreateMultipartUpload, then Abort)."""
        ...

    def statistics(self) -> StoreStatistics:
        """Return how many requests were made so far. Makes none."""
        ...
