"""One bucket behind two stores: one serves reads, the other takes writes.

Separate credentials for reads and writes of one bucket are common. The reader may be an `EndpointGroup`. A
`ReadWriteSplit` is itself a `Store`.

Tells a refusal of one object's key from a refusal of the credentials: both are a 403.

Refused credentials are a person's to renew, so requests are retried. A key that the credentials may not write, though
they may write others, stays refused: its change must not hold back the others.
"""

import copy
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from fusecache.model.errors import (
    AccessDenied,
    FusecacheError,
    ReadOnly,
    Refused,
    RemoteError,
    Unavailable,
)
from fusecache.model.objects import Extent, ObjectId, ObjectInfo
from fusecache.policy.bucket_health import BucketHealth
from fusecache.remote.endpoint_group import EndpointGroup
from fusecache.remote.statistics import RequestTimes, StoreStatistics
from fusecache.remote.store import (
    Condition,
    ConditionalWrites,
    FileSlice,
    Interruption,
    ListPage,
    ReadStore,
    Store,
    UploadPage,
)

# A key counts as refused for good when it was refused this long while other writes were allowed. The permissions of
# new credentials take up to a minute to take effect.
KEY_REFUSED_SECONDS = 90.0
# How long an accepted write proves that the credentials may write.
PROOF_SECONDS = 2.0
# Keys remembered; more are refused at once only if the credentials are.
_KEYS_MAX = 10_000


@dataclass(slots=True)
class _Refusal:
    """since: when this key was first refused while the credentials were proven to work; None: not proven."""

    since: float | None = None


class RefusedKeys:
    """Judges each refusal of a write. Thread-safe."""

    def __init__(self, probe: Callable[[], None]) -> None:
        """probe: sends a write that the credentials must allow, and leaves nothing behind."""
        self._probe = probe
        self._lock = threading.Lock()  # of all but `_probing`
        self._probing = threading.Lock()  # held by the one thread that probes; the others wait for its answer
        self._refusals: dict[str, _Refusal] = {}
        self._accepted_at = float("-inf")
        self._probed_at = float("-inf")

    def on_accepted(self, key: str) -> None:
        """The bucket accepted a write of a key."""
        with self._lock:
            self._accepted_at = time.monotonic()
            self._refusals.pop(key, None)

    def judge(self, key: str, error: AccessDenied) -> tuple[RemoteError, bool]:
        """Return the error to raise for a refused write, and whether the credentials may write other keys.

        The error is Refused once the key was refused for KEY_REFUSED_SECONDS while other writes were allowed.
        """
        allows_others = self._may_write()
        now = time.monotonic()
        with self._lock:
            if len(self._refusals) >= _KEYS_MAX and key not in self._refusals:
                self._refusals.clear()
            refusal = self._refusals.setdefault(key, _Refusal())
            if not allows_others:
                refusal.since = None
            elif refusal.since is None:
                refusal.since = now
            elif now - refusal.since >= KEY_REFUSED_SECONDS:
                return Refused(f"{error}; the credentials may write other keys, but not this one"), True
        return error, allows_others

    def _may_write(self) -> bool:
        """Return whether the credentials may write: an accepted request proves it, else a probe."""
        with self._probing:
            with self._lock:
                before = self._accepted_at
                is_known = time.monotonic() - max(before, self._probed_at) < PROOF_SECONDS
            if not is_known:
                try:
                    self._probe()
                except RemoteError:
                    accepted_at = float("-inf")
                else:
                    accepted_at = time.monotonic()
                with self._lock:
                    self._probed_at = time.monotonic()
                    if self._accepted_at == before:  # else a write was accepted in between
                        self._accepted_at = accepted_at
            with self._lock:
                return time.monotonic() - self._accepted_at < PROOF_SECONDS


T = TypeVar("T")


class ReadWriteSplit(Store):
    """A `Store` over a reader and a writer, or none for a read-only mount: then every writing call raises ReadOnly."""

    def __init__(self, reader: ReadStore | EndpointGroup, writer: Store | None, *, prefix: str = "") -> None:
        """prefix: of the mount, below which the writer's credentials must allow writes."""
        self._reader: ReadStore | EndpointGroup = reader
        self._group = reader if isinstance(reader, EndpointGroup) else None
        self._readers = reader.stores if isinstance(reader, EndpointGroup) else (reader,)
        self._writer = writer
        self._prefix = prefix
        self._refused_keys = RefusedKeys(self._probe_writer)
        self.health = BucketHealth(time.monotonic)
        self.times = RequestTimes()

    def primary(self) -> Store:
        """Return the same store, of which the reads only the endpoint that takes the writes answers."""
        if self._group is None:
            return self
        view = copy.copy(self)
        view._reader = self._group.primary
        return view

    def endpoints(self) -> list[dict[str, Any]]:
        """Return the status of each endpoint; nothing if there is only one."""
        return [] if self._group is None else self._group.rows()

    def reload(self) -> None:
        """Reload the refused credentials from their source; if none are refused, those of every store.

        One failure does not stop the others: it is raised at the end, and that store keeps its credentials.
        """
        refused = [*(self._readers if self.health.reads_refused_since else ())]
        if self.health.writes_refused_since and self._writer is not None:
            refused.append(self._writer)
        failures: list[FusecacheError] = []
        for store in self._stores():
            if store in refused or not refused:
                try:
                    store.reload()
                except FusecacheError as exc:
                    failures.append(exc)
        if failures:
            raise failures[0]

    def close(self) -> None:
        """Close the idle connections of every store."""
        for store in self._stores():
            store.close()

    def statistics(self) -> StoreStatistics:
        """Return the summed request counts of all stores."""
        return sum((store.statistics() for store in self._stores()), StoreStatistics())

    def _stores(self) -> list[ReadStore]:
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
        """Return one page from the reader."""
        return self._ask_reader(
            "list",
            lambda: self._reader.list_page(
                prefix, delimiter=delimiter, token=token, start_after=start_after, limit=limit
            ),
        )

    def head(self, key: str) -> ObjectInfo:
        """Return an object's properties from the reader."""
        return self._ask_reader("head", lambda: self._reader.head(key))

    def get_into(
        self,
        object_id: ObjectId,
        extent: Extent,
        buffer: memoryview,
        progress: Callable[[int], None],
        interruption: Interruption | None = None,
    ) -> None:
        """Fill the buffer from the reader."""
        self._ask_reader(
            "get", lambda: self._reader.get_into(object_id, extent, buffer, progress, interruption)
        )

    def put(
        self, key: str, body: FileSlice, *, metadata: Mapping[str, str], condition: Condition | None = None
    ) -> str:
        """Store a whole object through the writer."""
        etag = self._ask_writer(
            "put", key, lambda store: store.put(key, body, metadata=metadata, condition=condition)
        )
        return self._on_written(key, etag)

    def create_multipart(self, key: str, *, metadata: Mapping[str, str]) -> str:
        """Begin a multipart upload through the writer."""
        return self._ask_writer("create", key, lambda store: store.create_multipart(key, metadata=metadata))

    def upload_part(self, key: str, upload_id: str, number: int, body: FileSlice) -> str:
        """Store a part through the writer."""
        return self._ask_writer("part", key, lambda store: store.upload_part(key, upload_id, number, body))

    def complete_multipart(
        self, key: str, upload_id: str, part_etags: Sequence[str], *, condition: Condition | None = None
    ) -> str:
        """Complete a multipart upload through the writer."""
        etag = self._ask_writer(
            "complete",
            key,
            lambda store: store.complete_multipart(key, upload_id, part_etags, condition=condition),
        )
        return self._on_written(key, etag)

    def abort_multipart(self, key: str, upload_id: str) -> None:
        """Abort a multipart upload through the writer."""
        self._ask_writer("abort", key, lambda store: store.abort_multipart(key, upload_id))

    def list_uploads(self, prefix: str, *, token: str | None = None) -> UploadPage:
        """Return one page of unfinished uploads from the writer, else from the reader."""
        return (self._writer or self._reader).list_uploads(prefix, token=token)

    def copy(
        self,
        source: ObjectId,
        key: str,
        *,
        condition: Condition | None = None,
        metadata: Mapping[str, str] | None = None,
        size: int | None = None,
    ) -> str:
        """Copy inside the bucket through the writer."""
        etag = self._ask_writer(
            "copy",
            key,
            lambda store: store.copy(source, key, condition=condition, metadata=metadata, size=size),
        )
        return self._on_written(key, etag)

    def delete(self, key: str) -> None:
        """Delete an object through the writer."""
        self._ask_writer("delete", key, lambda store: store.delete(key))

    def probe_write(self, prefix: str) -> None:
        """Check that the writer may write, also while writes are held."""
        self._ask_writer("probe", "", lambda store: store.probe_write(prefix))

    @property
    def conditional_writes(self) -> ConditionalWrites:
        """What the writer's store does with preconditions, as far as known."""
        return ConditionalWrites.UNKNOWN if self._writer is None else self._writer.conditional_writes

    def probe_conditions(self, prefix: str) -> ConditionalWrites:
        """Find out what the writer's store does with preconditions. Leaves nothing behind."""
        return self.conditional_writes if self._writer is None else self._writer.probe_conditions(prefix)

    def take_conditions(self, found: ConditionalWrites) -> None:
        """Use the result of an earlier probe, after which the mount accepted the store."""
        if self._writer is not None:
            self._writer.take_conditions(found)

    def send_no_conditions(self) -> None:
        """From now on send writes without their conditions."""
        if self._writer is not None:
            self._writer.send_no_conditions()

    def _probe_writer(self) -> None:
        if self._writer is not None:
            self._writer.probe_write(self._prefix)

    def _on_written(self, key: str, etag: str) -> str:
        if self._group is not None:
            self._group.on_written(ObjectId(key, etag))
        return etag

    def _ask_writer(self, kind: str, key: str, ask: Callable[[Store], T]) -> T:
        """Send a write. key: of the object; "" if a refusal is never one of this key alone."""
        if self._writer is None:
            raise ReadOnly("this mount is read-only; mount without --read-only to write")
        if key and self.health.writes_held:
            raise Unavailable(self.health.writes_held)
        if key and self._group is not None:
            self._group.on_write()
        try:
            with self.times.measure(kind):
                answer = ask(self._writer)
        except AccessDenied as exc:
            error, allows_others = self._refused_keys.judge(key, exc) if key else (exc, False)
            self.health.on_write(None if allows_others else exc)
            raise error from exc
        except RemoteError as exc:
            self.health.on_write(exc)
            raise
        self._refused_keys.on_accepted(key)
        self.health.on_write(None)
        if self._writer in self._readers:
            self.health.on_read(None)  # reads use the same credentials
        return answer

    def _ask_reader(self, kind: str, ask: Callable[[], T]) -> T:
        try:
            with self.times.measure(kind):
                answer = ask()
        except RemoteError as exc:
            self.health.on_read(exc)
            raise
        self.health.on_read(None)
        return answer
