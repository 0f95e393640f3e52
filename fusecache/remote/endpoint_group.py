"""Several endpoints of one data set as one store for reading. The first endpoint is the primary.

Not here: which endpoint is asked first, and when a failing one is asked again (`policy.endpoint_choice`).

Invariants:
1. Bytes of one content only: a read at another endpoint has the same ETag, or the ETag of a copy that was found equal.
2. `ObjectMissing` of a read is raised only if every endpoint reports it. If one failed otherwise, its error is raised.
3. Names (LIST, HEAD) are the primary's. While it fails, the next endpoint answers, unless this mount has written: its
   own files might be missing there.
4. The endpoint that returned a page of a listing also returns the next: a token is valid at its own endpoint only.

Which objects an endpoint's copy can stand for: the same bytes under the same key, perhaps with another ETag.
"""

import enum
import logging
import random
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Container, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Any, NoReturn, TypeVar

from fusecache.model.errors import (
    AccessDenied,
    BucketMissing,
    CredentialsMissing,
    ObjectArchived,
    ObjectChanged,
    ObjectMissing,
    Refused,
    RemoteError,
    Unavailable,
)
from fusecache.model.objects import Extent, ObjectId, ObjectInfo
from fusecache.policy.endpoint_choice import EndpointChoice, GetTimes
from fusecache.remote.statistics import StoreStatistics
from fusecache.remote.store import (
    Interruption,
    ListPage,
    ObjectContent,
    ReadStore,
    UploadPage,
)

log = logging.getLogger(__name__)

# Objects remembered for each endpoint, and how many of their keys a status names.
REMEMBERED_OBJECTS = 10_000
NAMED_KEYS = 5
# A copy that could not be used is asked for again after this long.
RECHECK_SECONDS = 60.0


class Copy(enum.Enum):
    """An endpoint's copy of one object version, compared with the primary's. Only SAME is ever read."""

    SAME = "same"
    MISSING = "missing"
    REFUSED = "refused"
    OLDER = "older version"
    OTHER = "other bytes"
    UNPROVEN = "not comparable"  # another ETag, and no checksum that both endpoints have
    UNKNOWN = "not compared yet"


@dataclass(frozen=True, slots=True)
class KnownCopy:
    """A copy, until a time. etag: with which a SAME copy is read."""

    copy: Copy
    etag: str
    until: float


def judge(original: ObjectContent, copy: ObjectContent) -> Copy:
    """Compare a copy with the original.

    ETags of one content differ if it was uploaded in other parts. Then sizes and checksums of all bytes decide. ETags
    without a part count are MD5s. Under SSE-KMS they are not, but then stores have other checksums.
    """
    if (original.etag, original.size) == (copy.etag, copy.size):
        return Copy.SAME
    common = original.checksums.keys() & copy.checksums.keys()
    if common:
        differs = any(original.checksums[name] != copy.checksums[name] for name in common)
    else:
        differs = "-" not in original.etag + copy.etag  # the MD5 of each
    if differs or original.size != copy.size:
        return Copy.OLDER if copy.modified < original.modified else Copy.OTHER
    return Copy.SAME if common else Copy.UNPROVEN


class Copies:
    """What is known of one endpoint's copies: the objects whose copy is not simply the same ETag. Not thread-safe."""

    def __init__(self) -> None:
        self._known: OrderedDict[ObjectId, KnownCopy] = OrderedDict()

    def etag_of(self, object_id: ObjectId, now: float) -> str | None:
        """Return the ETag under which to read an object; None if its copy cannot be used now."""
        known = self._known.get(object_id)
        if known is None or now >= known.until:
            return object_id.etag
        return known.etag if known.copy is Copy.SAME else None

    def record(self, object_id: ObjectId, copy: Copy, now: float, *, etag: str = "") -> None:
        """Remember a copy."""
        until = float("inf") if copy is Copy.SAME else now + RECHECK_SECONDS
        self._known[object_id] = KnownCopy(copy, etag, until)
        self._known.move_to_end(object_id)
        while len(self._known) > REMEMBERED_OBJECTS:
            self._known.popitem(last=False)

    def forget(self, object_id: ObjectId) -> None:
        """The endpoint has served the object with the same ETag."""
        self._known.pop(object_id, None)

    def facts(self) -> dict[str, Any]:
        """Return the status fields: how many copies are not used, by cause, and the newest of their keys."""
        unused = [(object_id.key, known.copy) for object_id, known in self._known.items()]
        unused = [row for row in unused if row[1] is not Copy.SAME]
        return {
            "unused_copies": dict(Counter(copy.value for _, copy in unused)),
            "unused_keys": [
                {"key": key, "cause": copy.value} for key, copy in reversed(unused[-NAMED_KEYS:])
            ],
        }


T = TypeVar("T")

# If all endpoints fail, the first of these errors is raised: never "missing" while one endpoint could not answer.
MOST_OPEN_FIRST: tuple[type[RemoteError], ...] = (
    Unavailable,
    AccessDenied,
    CredentialsMissing,
    BucketMissing,
    Refused,
    ObjectArchived,
    ObjectChanged,
    ObjectMissing,
)
# An endpoint that fails like this fails for other objects too.
ENDPOINT_IS_DOWN = (Unavailable, AccessDenied, CredentialsMissing, BucketMissing)
# A LIST or HEAD without an answer for this long counts as failed. A healthy endpoint answers within a second.
NAMES_SECONDS = 5.0
# Names come from another endpoint after this many failures of the primary in a row. One failure, such as a reset
# connection, is retried: another endpoint may lack the newest names.
STAND_IN_FAILURES = 2
# The log names an endpoint once it has failed this many times in a row.
LOGGED_FAILURES = 3
# Copies with other bytes that the log names for each endpoint; the status counts all.
LOGGED_COPIES = 5


class EndpointReader:
    """One endpoint, for reading: its store, and how keys of the mount are spelled there."""

    def __init__(
        self, name: str, store: ReadStore, *, weight: float = 1.0, prefix: str = "", prefix_there: str = ""
    ) -> None:
        """name: for log and status. prefix: that all keys of the mount begin with; prefix_there: what replaces it."""
        self.name = name
        self.store = store
        self.weight = weight
        self.copies = Copies()
        self.error = ""
        self.is_denied = False
        self.logged_copies = 0
        self._prefix, self._prefix_there = prefix, prefix_there

    def there(self, key: str) -> str:
        """Return a key of the mount as this endpoint spells it."""
        return self._prefix_there + key.removeprefix(self._prefix)

    def list_page(self, prefix: str, *, start_after: str, **options: Any) -> ListPage:
        """Return one page, with keys as the mount spells them."""
        after = self.there(start_after) if start_after else ""
        page = self.store.list_page(self.there(prefix), start_after=after, **options)
        if self._prefix == self._prefix_there:
            return page
        return ListPage(
            tuple(replace(info, key=self._here(info.key)) for info in page.objects),
            tuple(map(self._here, page.prefixes)),
            page.next_token,
        )

    def head(self, key: str) -> ObjectInfo:
        """Return an object's properties."""
        return replace(self.store.head(self.there(key)), key=key)

    def content(self, key: str) -> ObjectContent:
        """Return what tells an object's content from another."""
        return self.store.content(self.there(key))

    def _here(self, key: str) -> str:
        return self._prefix + key.removeprefix(self._prefix_there)


class EndpointGroup:
    """Several endpoints, which answer reads as one store does. Thread-safe."""

    def __init__(self, endpoints: Sequence[EndpointReader]) -> None:
        """endpoints: in order of preference for names; the first is the primary."""
        self._endpoints = tuple(endpoints)
        self._choice = EndpointChoice([(each.name, each.weight) for each in endpoints])
        self._lock = threading.Lock()  # of the choice, and of what is known of copies
        self._has_written = False
        self._names_from = 0
        self._has_no_names = False  # the primary, at the last request for names

    @property
    def stores(self) -> tuple[ReadStore, ...]:
        """The stores of all endpoints, the primary's first."""
        return tuple(each.store for each in self._endpoints)

    @property
    def primary(self) -> ReadStore:
        """The store of the primary."""
        return self._endpoints[0].store

    def on_write(self) -> None:
        """This mount writes through the primary: from now on only the primary gives names."""
        self._has_written = True

    def on_written(self, object_id: ObjectId) -> None:
        """This mount has stored an object at the primary: the other endpoints lack it, or have an older version."""
        with self._lock:
            for each in self._endpoints[1:]:
                each.copies.record(object_id, Copy.OLDER, time.monotonic())

    def rows(self) -> list[dict[str, Any]]:
        """Return the status of each endpoint."""
        with self._lock:
            now = time.monotonic()
            return [
                {
                    "endpoint": each.name,
                    "primary": index == 0,
                    "weight": each.weight,
                    "state": self._choice.state(index, now).value,
                    "failing_seconds": round(now - health.failing_since, 1) if health.is_failing else 0.0,
                    "error": each.error if health.is_failing else "",
                    "gives_names": index == self._names_from,
                    "latency_seconds": round(health.first_byte_seconds, 4),
                    **_request_facts(each.store.statistics()),
                    **each.copies.facts(),
                }
                for index, (each, health) in enumerate(zip(self._endpoints, self._choice.health, strict=True))
            ]

    def statistics(self) -> StoreStatistics:
        """Return the summed request counts of all endpoints."""
        return sum((store.statistics() for store in self.stores), StoreStatistics())

    # ---- names

    def list_page(
        self,
        prefix: str,
        *,
        delimiter: str = "",
        token: str | None = None,
        start_after: str = "",
        limit: int = 1000,
    ) -> ListPage:
        """Return one page from the primary, or from the endpoint that answers for it."""

        def ask(index: int, token: str | None = None) -> ListPage:
            page = self._endpoints[index].list_page(
                prefix, delimiter=delimiter, token=token, start_after=start_after, limit=limit
            )
            own = None if page.next_token is None else f"{index}:{page.next_token}"
            return replace(page, next_token=own)

        if token is not None:
            index, _, inner = token.partition(":")
            return self._ask_or_fail(int(index), partial(ask, int(index), inner))
        self._begin_probes(lambda each: each.list_page(prefix, start_after="", limit=1))
        return self._ask_for_names(ask)

    def head(self, key: str) -> ObjectInfo:
        """Return an object's properties from the primary, or from the endpoint that answers for it."""
        self._begin_probes(lambda each: each.head(key))
        return self._ask_for_names(lambda index: self._endpoints[index].head(key))

    def list_uploads(self, prefix: str, *, token: str | None = None) -> UploadPage:
        """Return one page of the unfinished uploads at the primary."""
        return self.primary.list_uploads(prefix, token=token)

    def _ask_for_names(self, ask: Callable[[int], T]) -> T:
        if self._has_written:
            return self._ask_or_fail(0, partial(ask, 0))
        failed: dict[int, RemoteError] = {}
        while (index := self._next_for_names(failed)) is not None:
            try:
                answer = self._ask_or_fail(index, partial(within, NAMES_SECONDS, partial(ask, index)))
            except RemoteError as exc:
                if index == 0 and not isinstance(exc, ENDPOINT_IS_DOWN):
                    raise
                failed[index] = exc  # "missing", too, is the primary's to say
                self._has_no_names = self._has_no_names or index == 0
            else:
                self._on_names(index)
                return answer
        raise min(failed.values(), key=_openness)

    def _next_for_names(self, failed: Container[int]) -> int | None:
        """Return the endpoint to ask next; None if no other may answer."""
        with self._lock:
            lasts = self._has_no_names and self._choice.health[0].failures >= STAND_IN_FAILURES
            order = self._choice.order_by_rank() if lasts else [0]
        return next((index for index in order if index not in failed), None)

    def _on_names(self, index: int) -> None:
        before, self._names_from = self._names_from, index
        self._has_no_names = self._has_no_names and index != 0
        if index != before:
            level, names = logging.WARNING if index else logging.INFO, self._endpoints
            log.log(level, "names come from endpoint=%s before=%s", names[index].name, names[before].name)

    def _ask_or_fail(self, index: int, ask: Callable[[], T]) -> T:
        """Return an endpoint's answer, and record what it says about the endpoint's health."""
        began = time.monotonic()
        try:
            answer = ask()
        except ENDPOINT_IS_DOWN as exc:
            self._on_failure(index, exc, began)
            raise
        self._on_success(index, None)
        return answer

    # ---- bytes

    def get_into(
        self,
        object_id: ObjectId,
        extent: Extent,
        buffer: memoryview,
        progress: Callable[[int], None],
        interruption: Interruption | None = None,
    ) -> None:
        """Fill the buffer. If an endpoint fails midway, the next one goes on where it ended."""
        self._begin_probes(lambda each: each.head(object_id.key))
        read = _Read(object_id, extent, buffer, progress, interruption)
        with self._lock:
            order = self._choice.order(f"{object_id.key}\0{object_id.etag}", time.monotonic())
        errors: list[RemoteError] = []
        for index in order:
            try:
                if self._read_at(index, read):
                    return
            except RemoteError as exc:
                errors.append(exc)
                if interruption is not None and interruption.is_asked:
                    raise Unavailable(f"{exc}; interrupted by its reader") from exc
        raise min(errors, key=_openness)

    def _read_at(self, index: int, read: "_Read", *, is_compared: bool = False) -> bool:
        """Read the rest from one endpoint; return False if its copy cannot be used."""
        endpoint, object_id, began = self._endpoints[index], read.object_id, time.monotonic()
        with self._lock:
            etag = endpoint.copies.etag_of(object_id, began)
        if etag is None:
            return False
        try:
            times = read.at(endpoint, etag)
        except ENDPOINT_IS_DOWN as exc:
            self._on_failure(index, exc, began)
            if isinstance(exc, AccessDenied):
                self._record_copy(index, object_id, Copy.REFUSED)
            raise
        except ObjectChanged:
            if index and not is_compared and self._compare(index, object_id):
                return self._read_at(index, read, is_compared=True)
            raise
        except ObjectMissing:
            self._record_copy(index, object_id, Copy.MISSING)
            raise
        except (ObjectArchived, Refused) as exc:
            self._record_copy(index, object_id, Copy.REFUSED, cause=str(exc))
            raise
        self._on_success(index, times, object_id if etag == object_id.etag else None)
        return True

    def _compare(self, index: int, object_id: ObjectId) -> bool:
        """Compare an endpoint's copy, whose ETag differs, with the primary's; return whether it is the same content."""
        # Other reads of the object use other endpoints until the answer is known.
        self._record_copy(index, object_id, Copy.UNKNOWN)
        endpoint, key = self._endpoints[index], object_id.key
        try:
            original = within(NAMES_SECONDS, partial(self._endpoints[0].content, key))
            copy = within(NAMES_SECONDS, partial(endpoint.content, key))
        except RemoteError as exc:
            log.info("copy could not be compared endpoint=%s key=%s error=%s", endpoint.name, key, exc)
            return False
        if original.etag != object_id.etag:
            return False
        found = judge(original, copy)
        is_odd = found in (Copy.OTHER, Copy.UNPROVEN)
        self._record_copy(index, object_id, found, etag=copy.etag, cause=found.value if is_odd else "")
        return found is Copy.SAME

    def _record_copy(
        self, index: int, object_id: ObjectId, copy: Copy, *, etag: str = "", cause: str = ""
    ) -> None:
        """Remember a copy. cause: why a person should know that it is not used."""
        endpoint = self._endpoints[index]
        if not index:
            return  # the primary's word stands
        with self._lock:
            endpoint.copies.record(object_id, copy, time.monotonic(), etag=etag)
        if cause:
            endpoint.logged_copies += 1
            log.log(
                logging.WARNING if endpoint.logged_copies <= LOGGED_COPIES else logging.DEBUG,
                "copy is not used cause=%s endpoint=%s key=%s; other endpoints serve this object",
                cause,
                endpoint.name,
                object_id.key,
            )

    # ---- health

    def _on_failure(self, index: int, error: Exception, began: float, *, is_probe: bool = False) -> None:
        endpoint = self._endpoints[index]
        with self._lock:
            failures = self._choice.on_failure(
                index,
                began=began,
                now=time.monotonic(),
                chance=random.random(),
                retry_after_seconds=getattr(error, "retry_after_seconds", None) or 0.0,
                is_probe=is_probe,
            )
            endpoint.error = str(error)
            endpoint.is_denied = isinstance(error, AccessDenied | CredentialsMissing)
        if failures == LOGGED_FAILURES:
            log.warning("endpoint fails, reads use the others endpoint=%s error=%s", endpoint.name, error)

    def _on_success(self, index: int, times: GetTimes | None, served: ObjectId | None = None) -> None:
        """An endpoint answered. served: the object that it has as the primary has it."""
        with self._lock:
            if served is not None:
                self._endpoints[index].copies.forget(served)
            was_failing = self._choice.on_success(index, times, time.monotonic())
        if was_failing:
            log.info("endpoint answers again endpoint=%s", self._endpoints[index].name)

    def _begin_probes(self, ask: Callable[[EndpointReader], object]) -> None:
        """Probe failing endpoints whose pause is over, each in a thread of its own: no reader waits for them."""
        if not any(each.is_failing for each in self._choice.health):
            return
        with self._lock:
            due = self._choice.begin_probes(time.monotonic())
        for index in due:
            threading.Thread(
                target=self._probe, args=(index, ask), name="endpoint probe", daemon=True
            ).start()

    def _probe(self, index: int, ask: Callable[[EndpointReader], object]) -> None:
        endpoint, began = self._endpoints[index], time.monotonic()
        try:
            if endpoint.is_denied:
                endpoint.store.reload()
            with suppress(ObjectMissing, ObjectChanged, Refused):  # an answer, too
                ask(endpoint)
        except Exception as exc:  # noqa: BLE001  # whatever it is: the endpoint must be probed again
            self._on_failure(index, exc, began, is_probe=True)
            return
        with self._lock:
            was_failing = self._choice.on_probed(index)
        if was_failing:
            log.info("endpoint answers again endpoint=%s", endpoint.name)


@dataclass(eq=False, repr=False)
class _Read:
    """One read of an extent, from one endpoint after the other. valid: bytes of the buffer that have arrived."""

    object_id: ObjectId
    _extent: Extent
    _buffer: memoryview
    _progress: Callable[[int], None]
    _interruption: Interruption | None
    valid: int = 0

    def at(self, endpoint: EndpointReader, etag: str) -> GetTimes | None:
        """Read the rest from one endpoint; return how long that took, None if nothing was left to read."""
        begin, began = self.valid, time.monotonic()
        if self._extent.start + begin == self._extent.stop:
            return None
        first, first_at = 0, began

        def report(count: int) -> None:
            nonlocal first, first_at
            if not first:
                first, first_at = count, time.monotonic()
            self.valid = begin + count
            self._progress(self.valid)

        rest = Extent(self._extent.start + begin, self._extent.stop)
        there = ObjectId(endpoint.there(self.object_id.key), etag)
        endpoint.store.get_into(there, rest, self._buffer[begin:], report, self._interruption)
        return GetTimes(first_at - began, rest.size - first, time.monotonic() - first_at)


def _openness(error: RemoteError) -> int:
    return next((rank for rank, kind in enumerate(MOST_OPEN_FIRST) if isinstance(error, kind)), 0)


def _request_facts(made: StoreStatistics) -> dict[str, int]:
    return {
        "requests": made.class_a + made.class_b + made.deletes + made.aborts,
        "gets": made.gets,
        "bytes_read": made.bytes_read,
        "errors": made.errors,
    }


def within(seconds: float, call: Callable[[], T]) -> T:
    """Return a blocking call's result. Raises its error.

    Raises Unavailable if the call is not done in time. Its thread then goes on, and its result is dropped.
    """
    results: SimpleQueue[Callable[[], T]] = SimpleQueue()

    def run() -> None:
        try:
            value = call()
        except Exception as exc:  # noqa: BLE001  # raised by the caller
            results.put(partial(_raise, exc))
        else:
            results.put(lambda: value)

    # No thread of a pool: the interpreter does not wait for a daemon thread.
    Thread(target=run, name="limited request", daemon=True).start()
    try:
        return results.get(timeout=seconds)()
    except Empty:
        raise Unavailable(f"the bucket has not answered for {seconds:g} s") from None


def _raise(failure: Exception) -> NoReturn:
    """Raise it, and keep no reference: its traceback has this frame, and would live with it until a collection."""
    try:
        raise failure
    finally:
        del failure
