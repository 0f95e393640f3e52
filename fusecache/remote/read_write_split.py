"""One bucket behind several stores: the first reader that answers serves reads, the writer serves writes.

Separate credentials for reads and writes of one bucket are common; so is a mirror nearby. A `ReadWriteSplit` is itself
a `Store`. The daemon passes exactly one reader today; only tests use the failover among several.

Invariants:
1. `ObjectMissing` is raised only if every reader reports it. If one reader failed otherwise, its error is raised.
2. The reader that returned a page of a listing also returns the next: a token is valid at its own endpoint only.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol, TypeVar, runtime_checkable

from fusecache.model.errors import (
    AccessDenied,
    BucketMissing,
    CredentialsMissing,
    FusecacheError,
    ObjectChanged,
    ObjectMissing,
    ReadOnly,
    Refused,
    RemoteError,
    Unavailable,
)
from fusecache.model.objects import Extent, ObjectId, ObjectInfo
from fusecache.remote.refused_keys import RefusedKeys
from fusecache.remote.statistics import StoreStatistics
from fusecache.remote.store import (
    Condition,
    ConditionalWrites,
    FileSlice,
    Interruption,
    ListPage,
    Store,
    UploadPage,
)

T = TypeVar("T")

# If all readers fail, the first of these errors is raised: never "missing" while one reader could not answer.
MOST_OPEN_FIRST: tuple[type[RemoteError], ...] = (
    Unavailable,
    AccessDenied,
    CredentialsMissing,
    BucketMissing,
    Refused,
    ObjectChanged,
    ObjectMissing,
)
# A reader that fails like this fails for other objects too: the next read starts with the reader that answered.
READER_IS_DOWN = (Unavailable, AccessDenied, CredentialsMissing, BucketMissing)


@runtime_checkable
class SupportsReload(Protocol):
    """A store that can reload its credentials."""

    def reload(self) -> None:
        """Reload the credentials."""
        ...


@runtime_checkable
class SupportsClose(Protocol):
    """A store that holds connections."""

    def close(self) -> None:
        """Close idle connections."""
        ...


@runtime_checkable
class SupportsConditionProbe(Protocol):
    """A store that can find out whether it honours preconditions of writes."""

    def probe_conditions(self, prefix: str) -> ConditionalWrites:
        """Find out what the store does with If-Match."""
        ...

    def send_no_conditions(self) -> None:
        """From now on send writes without their conditions."""
        ...


class Denial:
    """Measures how long the bucket has refused the credentials without a success in between. Thread-safe."""

    def __init__(self) -> None:
        self._since: float | None = None

    def record(self, error: RemoteError | None) -> None:
        """Record the end of a request. error: None for success. `Unavailable` says nothing about credentials."""
        if isinstance(error, AccessDenied | CredentialsMissing):
            if self._since is None:
                self._since = time.monotonic()
        elif not isinstance(error, Unavailable):
            self._since = None

    @property
    def is_on(self) -> bool:
        """Whether the credentials are refused."""
        return self._since is not None

    def seconds(self) -> float:
        """Return the duration; 0 if the credentials are not refused."""
        since = self._since
        return 0.0 if since is None else time.monotonic() - since


class ReadWriteSplit:
    """A `Store` over several stores: readers in order of preference, and one writer, or none for a read-only mount.

    Without a writer, every writing call raises ReadOnly.
    """

    def __init__(self, readers: Sequence[Store], writer: Store | None, *, prefix: str = "") -> None:
        """prefix: of the mount, below which the writer's credentials must allow writes."""
        if not readers:
            raise ValueError("a remote needs at least one reader")
        self._readers = tuple(readers)
        self._writer = writer
        self._prefix = prefix
        self._refused_keys = RefusedKeys(self._probe_writer)
        self._preferred = 0  # no lock: after a race between threads, a read only tries a failing reader first
        # What the writer's store does with preconditions, once known.
        self.conditional_writes = ConditionalWrites.UNKNOWN
        self.reads_denied = Denial()
        self.writes_denied = Denial()

    def reload(self) -> None:
        """Reload the refused credentials from their source; if none are refused, those of every store.

        One failure does not stop the others: it is raised at the end, and that store keeps its credentials.
        """
        refused = [*(self._readers if self.reads_denied.is_on else ())]
        if self.writes_denied.is_on and self._writer is not None:
            refused.append(self._writer)
        failures: list[FusecacheError] = []
        for store in self._stores():
            if isinstance(store, SupportsReload) and (store in refused or not refused):
                try:
                    store.reload()
                except FusecacheError as exc:
                    failures.append(exc)
        if failures:
            raise failures[0]

    def close(self) -> None:
        """Close the idle connections of every store."""
        for store in self._stores():
            if isinstance(store, SupportsClose):
                store.close()

    def statistics(self) -> StoreStatistics:
        """Return the summed request counts of all stores."""
        return sum((store.statistics() for store in self._stores()), StoreStatistics())

    def _stores(self) -> list[Store]:
        """Return each store once: the writer is often also a reader."""
        return list({id(store): store for store in (*self._readers, self._writer) if store}.values())

    def list_page(
        self,
        prefix: str,
        *,
        delimiter: str = "",
        token: str | None = None,
        start_after: str = "",
        limit: int = 1000,
    ) -> ListPage:
        """Return one page from the first reader that answers; the next page comes from the same reader."""

        def ask(index: int, token: str | None) -> ListPage:
            page = self._readers[index].list_page(
                prefix, delimiter=delimiter, token=token, start_after=start_after, limit=limit
            )
            own = None if page.next_token is None else f"{index}:{page.next_token}"
            return ListPage(page.objects, page.prefixes, own)

        if token is not None:
            index, _, inner = token.partition(":")
            return ask(int(index), inner)
        return self._first(lambda index: ask(index, None))

    def head(self, key: str) -> ObjectInfo:
        """Return an object's properties, from the first reader that has the object."""
        return self._first(lambda index: self._readers[index].head(key))

    def get_into(
        self,
        object_id: ObjectId,
        extent: Extent,
        buffer: memoryview,
        progress: Callable[[int], None],
        interruption: Interruption | None = None,
    ) -> None:
        """Fill the buffer. If a reader fails midway, the next one resumes there: the version is the same."""
        valid = 0

        def ask(index: int) -> None:
            nonlocal valid
            begin = valid
            if interruption is not None and interruption.is_asked:
                raise Unavailable(f"GET {object_id.key}: interrupted by its reader after {begin} bytes")

            def report(count: int) -> None:
                nonlocal valid
                valid = begin + count
                progress(valid)

            if extent.start + begin < extent.stop:
                rest = Extent(extent.start + begin, extent.stop)
                self._readers[index].get_into(object_id, rest, buffer[begin:], report, interruption)

        self._first(ask)

    def put(
        self, key: str, body: FileSlice, *, metadata: Mapping[str, str], condition: Condition | None = None
    ) -> str:
        """Store a whole object through the writer."""
        return self._ask_writer(
            key, lambda store: store.put(key, body, metadata=metadata, condition=condition)
        )

    def create_multipart(self, key: str, *, metadata: Mapping[str, str]) -> str:
        """Begin a multipart upload through the writer."""
        return self._ask_writer(key, lambda store: store.create_multipart(key, metadata=metadata))

    def upload_part(self, key: str, upload_id: str, number: int, body: FileSlice) -> str:
        """Store a part through the writer."""
        return self._ask_writer(key, lambda store: store.upload_part(key, upload_id, number, body))

    def complete_multipart(
        self, key: str, upload_id: str, part_etags: Sequence[str], *, condition: Condition | None = None
    ) -> str:
        """Complete a multipart upload through the writer."""
        return self._ask_writer(
            key, lambda store: store.complete_multipart(key, upload_id, part_etags, condition=condition)
        )

    def abort_multipart(self, key: str, upload_id: str) -> None:
        """Abort a multipart upload through the writer."""
        self._ask_writer(key, lambda store: store.abort_multipart(key, upload_id))

    def list_uploads(self, prefix: str, *, token: str | None = None) -> UploadPage:
        """Return one page of unfinished uploads from the writer, else from the first reader."""
        return (self._writer or self._readers[0]).list_uploads(prefix, token=token)

    def copy(
        self,
        source: ObjectId,
        key: str,
        *,
        condition: Condition | None = None,
        metadata: Mapping[str, str] | None = None,
    ) -> str:
        """Copy inside the bucket through the writer."""
        return self._ask_writer(
            key, lambda store: store.copy(source, key, condition=condition, metadata=metadata)
        )

    def delete(self, key: str) -> None:
        """Delete an object through the writer."""
        self._ask_writer(key, lambda store: store.delete(key))

    def probe_write(self, prefix: str) -> None:
        """Check that the writer may write."""
        self._ask_writer("", lambda store: store.probe_write(prefix))

    def probe_conditions(self) -> ConditionalWrites:
        """Find out, and record, what the writer's store does with If-Match. Leaves nothing behind."""
        if isinstance(self._writer, SupportsConditionProbe):
            self.conditional_writes = self._writer.probe_conditions(self._prefix)
        return self.conditional_writes

    def send_no_conditions(self) -> None:
        """From now on send writes without their conditions."""
        if isinstance(self._writer, SupportsConditionProbe):
            self._writer.send_no_conditions()

    def _probe_writer(self) -> None:
        if self._writer is not None:
            self._writer.probe_write(self._prefix)

    def _ask_writer(self, key: str, ask: Callable[[Store], T]) -> T:
        """Send a write. key: of the object; "" if a refusal is never one of this key alone."""
        if self._writer is None:
            raise ReadOnly("this mount is read-only; mount without --read-only to write")
        try:
            answer = ask(self._writer)
        except AccessDenied as exc:
            error, allows_others = self._refused_keys.judge(key, exc) if key else (exc, False)
            self.writes_denied.record(None if allows_others else exc)
            raise error from exc
        except RemoteError as exc:
            self.writes_denied.record(exc)
            raise
        self._refused_keys.on_accepted(key)
        self.writes_denied.record(None)
        if self._writer in self._readers:
            self.reads_denied.record(None)  # reads use the same credentials
        return answer

    def _first(self, ask: Callable[[int], T]) -> T:
        """Try the readers in order, the preferred one first; return the first answer."""
        begin = self._preferred
        errors: list[RemoteError] = []
        for step in range(len(self._readers)):
            index = (begin + step) % len(self._readers)
            try:
                answer = ask(index)
            except RemoteError as exc:
                errors.append(exc)
                continue
            if errors and isinstance(errors[0], READER_IS_DOWN):
                self._preferred = index
            self.reads_denied.record(None)
            return answer
        error = min(errors, key=_openness)
        self.reads_denied.record(error)
        raise error


def _openness(error: RemoteError) -> int:
    return next((rank for rank, kind in enumerate(MOST_OPEN_FIRST) if isinstance(error, kind)), 0)
