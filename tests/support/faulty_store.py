"""Scripted failures in front of any store: for tests that say which call fails, and how."""

import threading
from collections.abc import Callable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from fusecache.model.errors import RemoteError
from fusecache.model.objects import Extent, ObjectId
from fusecache.remote.statistics import StoreStatistics
from fusecache.remote.store import Interruption, Store


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

    def statistics(self) -> StoreStatistics:
        """See `Store`: of the requests that were let through."""
        return self._inner.statistics()

    def pass_on(self, method: str, key: str, *arguments: Any, **options: Any) -> Any:
        """Make a call, unless a fault is due."""
        fault = self._next_fault(method, key)
        if fault is not None and not fault.after_effect:
            raise fault.error
        answer = getattr(self._inner, method)(*arguments, **options)
        if fault is not None:
            raise fault.error
        return answer

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


def _passing(method: str, place: int) -> Callable[..., Any]:
    return lambda self, *arguments, **options: self.pass_on(method, arguments[place], *arguments, **options)


# Where the key, or the prefix, stands among the arguments of each call.
for _method in (
    "list_page", "head", "content", "put", "create_multipart", "upload_part", "complete_multipart", "abort_multipart",
    "list_uploads", "delete", "probe_write",
):  # fmt: skip
    setattr(FaultyStore, _method, _passing(_method, 0))
setattr(FaultyStore, "copy", _passing("copy", 1))  # noqa: B010  # a method that the class has from `Store`
