"""One bucket reached by several endpoints or keys: reads by the first that can, writes by the writer.

Separate read and write keys for one bucket are common; so is a mirror nearby. A `Remote` is itself a `Store`.

Invariants:
1. "Missing" is said only if every reader said it: a reader that could not be asked leaves it open.
2. A listing is continued by the reader that began it: tokens mean nothing to another endpoint.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol, TypeVar, runtime_checkable

from fusecache.model.errors import (
    AccessDenied,
    BucketMissing,
    CredentialsMissing,
    ObjectChanged,
    ObjectMissing,
    ReadOnly,
    Refused,
    RemoteError,
    Unavailable,
)
from fusecache.model.objects import Extent, ObjectId, ObjectInfo
from fusecache.remote.statistics import StoreStatistics
from fusecache.remote.store import Condition, FileSlice, Interruption, ListPage, Store

T = TypeVar("T")

# If all readers fail, the error that leaves most open is told: never "missing" while one could not be asked.
MOST_OPEN_FIRST: tuple[type[RemoteError], ...] = (
    Unavailable,
    AccessDenied,
    CredentialsMissing,
    BucketMissing,
    Refused,
    ObjectChanged,
    ObjectMissing,
)
# A reader that failed like this fails for other objects too: the next read begins with the one that answered.
READER_IS_DOWN = (Unavailable, AccessDenied, CredentialsMissing, BucketMissing)


@runtime_checkable
class SupportsReload(Protocol):
    """A store whose credentials can be read again."""

    def reload(self) -> None:
        """Read them again."""
        ...


@runtime_checkable
class SupportsClose(Protocol):
    """A store that holds connections."""

    def close(self) -> None:
        """Close idle connections."""
        ...


class Denial:
    """Since when the bucket has refused our keys, with nothing granted in between. Any thread may note an answer."""

    def __init__(self) -> None:
        self._since: float | None = None

    def record(self, error: RemoteError | None) -> None:
        """A request was answered; error: how, None if as asked. What says nothing of the keys changes nothing."""
        if isinstance(error, AccessDenied | CredentialsMissing):
            if self._since is None:
                self._since = time.monotonic()
        elif not isinstance(error, Unavailable):
            self._since = None

    def seconds(self) -> float:
        """Return for how long; 0 if they are not refused."""
        since = self._since
        return 0.0 if since is None else time.monotonic() - since


class ReadWriteSplit:
    """A `Store` over several: readers in order of preference, and one writer or none (a read-only mount).

    Raises ReadOnly from every writing call if there is no writer.
    """

    def __init__(self, readers: Sequence[Store], writer: Store | None) -> None:
        if not readers:
            raise ValueError("a remote needs at least one reader")
        self._readers = tuple(readers)
        self._writer = writer
        self._preferred = 0  # one int: a race between threads only costs a detour
        self.reads_denied = Denial()
        self.writes_denied = Denial()

    @property
    def is_writable(self) -> bool:
        """Whether there is a writer."""
        return self._writer is not None

    def reload(self) -> None:
        """Read the credentials of every store again from where they came from."""
        for store in self._stores():
            if isinstance(store, SupportsReload):
                store.reload()

    def close(self) -> None:
        """Close the idle connections of every store."""
        for store in self._stores():
            if isinstance(store, SupportsClose):
                store.close()

    def statistics(self) -> StoreStatistics:
        """Return the requests of all stores together."""
        return sum((store.statistics() for store in self._stores()), StoreStatistics())

    def _stores(self) -> list[Store]:
        """Return each store once: the writer is often a reader too."""
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
        """Return one page, from the first reader that can; the next page comes from the same reader."""

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
        """Return an object's facts, from the first reader that has it."""
        return self._first(lambda index: self._readers[index].head(key))

    def get_into(
        self,
        object_id: ObjectId,
        extent: Extent,
        buffer: memoryview,
        progress: Callable[[int], None],
        interruption: Interruption | None = None,
    ) -> None:
        """Fill the buffer; where one reader broke off, the next goes on, for the version is the same."""
        valid = 0

        def ask(index: int) -> None:
            nonlocal valid
            begin = valid
            if interruption is not None and interruption.is_asked:
                raise Unavailable(f"GET {object_id.key}: ended by its reader after {begin} bytes")

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
        """Store a whole object by the writer."""
        return self._ask_writer(lambda store: store.put(key, body, metadata=metadata, condition=condition))

    def create_multipart(self, key: str, *, metadata: Mapping[str, str]) -> str:
        """Begin a multipart upload by the writer."""
        return self._ask_writer(lambda store: store.create_multipart(key, metadata=metadata))

    def upload_part(self, key: str, upload_id: str, number: int, body: FileSlice) -> str:
        """Store a part by the writer."""
        return self._ask_writer(lambda store: store.upload_part(key, upload_id, number, body))

    def complete_multipart(
        self, key: str, upload_id: str, part_etags: Sequence[str], *, condition: Condition | None = None
    ) -> str:
        """Publish parts by the writer."""
        return self._ask_writer(
            lambda store: store.complete_multipart(key, upload_id, part_etags, condition=condition)
        )

    def abort_multipart(self, key: str, upload_id: str) -> None:
        """Drop an upload by the writer."""
        self._ask_writer(lambda store: store.abort_multipart(key, upload_id))

    def copy(
        self,
        source: ObjectId,
        key: str,
        *,
        condition: Condition | None = None,
        metadata: Mapping[str, str] | None = None,
    ) -> str:
        """Copy inside the bucket by the writer."""
        return self._ask_writer(lambda store: store.copy(source, key, condition=condition, metadata=metadata))

    def delete(self, key: str) -> None:
        """Delete an object by the writer."""
        self._ask_writer(lambda store: store.delete(key))

    def probe_write(self, prefix: str) -> None:
        """Show that the writer may write."""
        self._ask_writer(lambda store: store.probe_write(prefix))

    def _ask_writer(self, ask: Callable[[Store], T]) -> T:
        if self._writer is None:
            raise ReadOnly("this mount is read-only: it has no key that may write to the bucket")
        try:
            answer = ask(self._writer)
        except RemoteError as exc:
            self.writes_denied.record(exc)
            raise
        self.writes_denied.record(None)
        if self._writer in self._readers:
            self.reads_denied.record(None)  # the same keys
        return answer

    def _first(self, ask: Callable[[int], T]) -> T:
        """Ask the readers in turn, the preferred one first; return the first answer."""
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
