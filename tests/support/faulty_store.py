"""Scripted failures in front of any store: for tests that say which call fails, and how."""

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TypeVar

from fusecache.model.errors import RemoteError
from fusecache.model.objects import Extent, ObjectId, ObjectInfo
from fusecache.remote.statistics import StoreStatistics
from fusecache.remote.store import (
    Condition,
    FileSlice,
    Interruption,
    ListPage,
    ObjectContent,
    Store,
    UploadPage,
)

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Fault:
    """One scripted failure.

    error: what is raised. method: a name of the Store protocol, or `*`. key: a glob over key or prefix.
    skip: matching calls that pass first. times: how often it fires; None is for ever.
    after_effect: the call takes effect, only its answer is lost.
    deliver_bytes: of a get_into, so many bytes arrive and are reported before the error.
    """

    error: RemoteError
    method: str = "*"
    key: str = "*"
    skip: int = 0
    times: int | None = 1
    after_effect: bool = False
    deliver_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Call:
    """One call that reached the wrapper; `error` is what the script raised, if it did."""

    method: str
    key: str
    error: RemoteError | None = None


@dataclass(slots=True)
class _Armed:
    fault: Fault
    skip: int
    times: int | None


class FaultyStore(Store):
    """A `Store` that fails by script and otherwise passes every call on. Safe for many threads."""

    def __init__(self, inner: Store, *faults: Fault) -> None:
        self._inner = inner
        self._lock = threading.Lock()
        self._faults = [_Armed(fault, fault.skip, fault.times) for fault in faults]
        self._calls: list[Call] = []

    def script(self, *faults: Fault) -> None:
        """Add faults. The first that matches and is not used up acts."""
        with self._lock:
            self._faults.extend(_Armed(fault, fault.skip, fault.times) for fault in faults)

    def heal(self, *faults: Fault) -> None:
        """Replace every fault by these; no call comes between."""
        with self._lock:
            self._faults = [_Armed(fault, fault.skip, fault.times) for fault in faults]

    def calls(self, method: str = "*", key: str = "*") -> tuple[Call, ...]:
        """Return the calls so far that match two globs, oldest first."""
        with self._lock:
            return tuple(c for c in self._calls if fnmatchcase(c.method, method) and fnmatchcase(c.key, key))

    def list_page(
        self,
        prefix: str,
        *,
        delimiter: str = "",
        token: str | None = None,
        start_after: str = "",
        limit: int = 1000,
    ) -> ListPage:
        """See `Store`."""
        return self._pass(
            "list_page",
            prefix,
            lambda: self._inner.list_page(
                prefix, delimiter=delimiter, token=token, start_after=start_after, limit=limit
            ),
        )

    def head(self, key: str) -> ObjectInfo:
        """See `Store`."""
        return self._pass("head", key, lambda: self._inner.head(key))

    def content(self, key: str) -> ObjectContent:
        """See `Store`."""
        return self._pass("content", key, lambda: self._inner.content(key))

    def get_into(
        self,
        object_id: ObjectId,
        extent: Extent,
        buffer: memoryview,
        progress: Callable[[int], None],
        interruption: Interruption | None = None,
    ) -> None:
        """See `Store`."""
        fault = self._next_fault("get_into", object_id.key)
        if fault is None:
            return self._inner.get_into(object_id, extent, buffer, progress, interruption)
        count = min(fault.deliver_bytes, extent.size)
        if count:
            self._inner.get_into(
                object_id, Extent(extent.start, extent.start + count), buffer, progress, interruption
            )
        raise fault.error

    def put(
        self, key: str, body: FileSlice, *, metadata: Mapping[str, str], condition: Condition | None = None
    ) -> str:
        """See `Store`."""
        return self._pass(
            "put", key, lambda: self._inner.put(key, body, metadata=metadata, condition=condition)
        )

    def create_multipart(self, key: str, *, metadata: Mapping[str, str]) -> str:
        """See `Store`."""
        return self._pass(
            "create_multipart", key, lambda: self._inner.create_multipart(key, metadata=metadata)
        )

    def upload_part(self, key: str, upload_id: str, number: int, body: FileSlice) -> str:
        """See `Store`."""
        return self._pass("upload_part", key, lambda: self._inner.upload_part(key, upload_id, number, body))

    def complete_multipart(
        self, key: str, upload_id: str, part_etags: Sequence[str], *, condition: Condition | None = None
    ) -> str:
        """See `Store`."""
        return self._pass(
            "complete_multipart",
            key,
            lambda: self._inner.complete_multipart(key, upload_id, part_etags, condition=condition),
        )

    def abort_multipart(self, key: str, upload_id: str) -> None:
        """See `Store`."""
        return self._pass("abort_multipart", key, lambda: self._inner.abort_multipart(key, upload_id))

    def list_uploads(self, prefix: str, *, token: str | None = None) -> UploadPage:
        """See `Store`."""
        return self._pass("list_uploads", prefix, lambda: self._inner.list_uploads(prefix, token=token))

    def copy(
        self,
        source: ObjectId,
        key: str,
        *,
        condition: Condition | None = None,
        metadata: Mapping[str, str] | None = None,
        size: int | None = None,
    ) -> str:
        """See `Store`."""
        return self._pass(
            "copy",
            key,
            lambda: self._inner.copy(source, key, condition=condition, metadata=metadata, size=size),
        )

    def delete(self, key: str) -> None:
        """See `Store`."""
        return self._pass("delete", key, lambda: self._inner.delete(key))

    def probe_write(self, prefix: str) -> None:
        """See `Store`."""
        return self._pass("probe_write", prefix, lambda: self._inner.probe_write(prefix))

    def statistics(self) -> StoreStatistics:
        """See `Store`: of the requests that were let through."""
        return self._inner.statistics()

    def _pass(self, method: str, key: str, call: Callable[[], T]) -> T:
        fault = self._next_fault(method, key)
        if fault is None:
            return call()
        if fault.after_effect:
            call()
        raise fault.error

    def _next_fault(self, method: str, key: str) -> Fault | None:
        with self._lock:
            fault = self._take_fault(method, key)
            self._calls.append(Call(method, key, fault.error if fault else None))
            return fault

    def _take_fault(self, method: str, key: str) -> Fault | None:
        for armed in self._faults:
            if not (fnmatchcase(method, armed.fault.method) and fnmatchcase(key, armed.fault.key)):
                continue
            if armed.skip > 0:
                armed.skip -= 1
            elif armed.times is None or armed.times > 0:
                armed.times = None if armed.times is None else armed.times - 1
                return armed.fault
        return None
