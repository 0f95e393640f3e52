"""`fusecache access`: finds out what keys can do in a bucket, and removes what it wrote for that.

Invariants:
1. No object of the bucket is changed: all writes go to new names, if the store can with `If-None-Match: *`.
2. A name is remembered before the request that may write it. An interrupt waits for the end of a request.
3. Only a refusal counts as "no". Everything else that fails is "unknown".
"""

import signal
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field, replace

from fusecache.bucket.address import BucketKeys, Place, open_store
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
from fusecache.model.objects import Extent, ObjectId
from fusecache.policy.key_rights import (
    CONDITIONAL,
    DELETE,
    GET,
    LIST,
    MULTIPART,
    PUT,
    RIGHTS,
    KeyRole,
    expected_rights,
)
from fusecache.remote.endpoints import Transport
from fusecache.remote.s3.store import S3Store
from fusecache.remote.store import PROBE_NAME, Condition, FileSlice

# A person waits for the answer. One attempt: a repeated request could begin a second upload whose id is not known.
TRANSPORT = Transport(max_connections=2, connect_timeout_seconds=5.0, read_timeout_seconds=10.0, attempts=1)
# Pause before a request is repeated, once, after a temporary error.
PAUSE_SECONDS = 1.0
# Refusals that say nothing about rights: the keys have expired, or a clock is wrong.
_NO_VERDICT = frozenset({"ExpiredRequest", "ExpiredToken", "RequestTimeTooSkewed", "TokenRefreshRequired"})
_NOT_IMPLEMENTED = "NotImplemented"
# One byte to write: any file will do.
_BODY = FileSlice(__file__, 0, 1)


@dataclass(frozen=True, slots=True)
class ProbedKey:
    """A key to test. places: the ones that it is for."""

    name: str
    role: KeyRole
    places: tuple[Place, ...]
    source: BucketKeys

    def is_for(self, place: Place) -> bool:
        """Return whether the key should open a place."""
        return any(place.has_bucket_of(each) for each in self.places)


@dataclass(slots=True)
class Finding:
    """What one key can do in one place. causes: why not, or why it is unknown, by right."""

    key: ProbedKey
    place: Place
    can: dict[str, bool | None] = field(default_factory=lambda: dict.fromkeys(RIGHTS))
    causes: dict[str, str] = field(default_factory=dict)

    @property
    def should(self) -> dict[str, bool | None]:
        """What the key should be able to do; None: either way."""
        return expected_rights(self.key.role, is_own=self.key.is_for(self.place))


def probe_place(place: Place, keys: Sequence[ProbedKey], on_left: Callable[[str], None]) -> list[Finding]:
    """Return what each key can do in a place. on_left: called with each thing that could not be removed again.

    Raises ConfigError or CredentialsMissing if a key cannot be read.
    """
    with ExitStack() as stack:
        check = stack.enter_context(_late_interrupts())
        stores = [stack.enter_context(closing(open_store(place, key.source, TRANSPORT))) for key in keys]
        probes = [_Probe(Finding(key, place), store, check) for key, store in zip(keys, stores, strict=True)]
        try:
            for probe in probes:
                probe.try_list()
                probe.try_put()
            readable = [each for probe in probes if (each := probe.written or probe.listed)]
            readable.sort(key=lambda each: PROBE_NAME not in each.key)
            for probe in probes:
                probe.try_get(readable[0] if readable else None)
                probe.try_delete()
                probe.try_multipart()
        finally:
            for probe in probes:
                for text in probe.remove_all([probe, *(each for each in probes if each is not probe)]):
                    on_left(text)
        check()
    return [probe.finding for probe in probes]


@contextmanager
def _late_interrupts() -> Iterator[Callable[[], None]]:
    """Make SIGINT and SIGTERM wait, so that no request is cut; yield a function that raises KeyboardInterrupt then."""
    came: list[int] = []

    def check() -> None:
        if came:
            raise KeyboardInterrupt

    numbers = (signal.SIGINT, signal.SIGTERM)
    before = [signal.signal(number, lambda number, _: came.append(number)) for number in numbers]
    try:
        yield check
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)


class _Probe:
    """The requests of one key in one place. listed, written: objects that a GET may ask for."""

    def __init__(self, finding: Finding, store: S3Store, check: Callable[[], None]) -> None:
        """check: called before each request."""
        self.finding = finding
        self.listed: ObjectId | None = None
        self.written: ObjectId | None = None
        self._store = store
        self._check = check
        self._objects: list[str] = []
        self._uploads: list[str] = []
        self._unanswered: set[str] = set()
        self._silence = ""

    def try_list(self) -> None:
        """Ask for names, and remember an object that can be read."""

        def ask() -> None:
            page = self._store.list_page(self.finding.place.prefix, limit=100)
            self.listed = next((each.object_id for each in page.objects if each.size), None)

        self._ask(LIST, ask)

    def try_put(self) -> None:
        """Write an object; then find out whether the store honours preconditions, true and false ones."""

        def put() -> None:
            with self._writing(self._objects) as name:
                try:
                    etag = self._store.put(name, _BODY, metadata={}, condition=Condition(None))
                except RemoteError as exc:
                    if exc.code != _NOT_IMPLEMENTED:
                        raise
                    etag = self._store.put(name, _BODY, metadata={})
                self.written = ObjectId(name, etag)

        def put_conditionally() -> None:
            if self.written is not None:
                try:
                    etag = self._store.put(
                        self.written.key, _BODY, metadata={}, condition=Condition(self.written.etag)
                    )
                except (ObjectChanged, Refused) as exc:
                    raise AccessDenied(
                        "the store refuses If-Match of the right version: mounts need --conflict last-wins"
                    ) from exc
                self.written = replace(self.written, etag=etag)
            with self._writing(self._objects) as name:
                # Of an object that does not exist: no version matches.
                self._store.put(name, _BODY, metadata={}, condition=Condition("0" * 32))
            raise AccessDenied("the store ignores If-Match: mounts need --conflict last-wins")

        self._ask(PUT, put)
        if self.finding.can[PUT]:
            self._ask(CONDITIONAL, put_conditionally)
        else:
            self._record(CONDITIONAL, self.finding.causes[PUT], can=self.finding.can[PUT])

    def try_get(self, readable: ObjectId | None) -> None:
        """Read a byte of an object; if there is none, ask for a name that does not exist."""
        if readable is not None:
            buffer = memoryview(bytearray(1))
            self._ask(GET, lambda: self._store.get_into(readable, Extent(0, 1), buffer, lambda _: None))
            return
        self._ask(GET, lambda: self._store.head(self._new_name()))
        if self.finding.can[GET] is False and not self.finding.can[LIST]:
            # S3 answers 403 for a missing object, too, to a key that may not list.
            self._record(GET, "there is no object to read: write one, or name another prefix", can=None)

    def try_delete(self) -> None:
        """Delete a name that never existed."""
        self._ask(DELETE, lambda: self._store.delete(self._new_name()))

    def try_multipart(self) -> None:
        """Begin an upload, send a part, and abort it."""

        def ask() -> None:
            with self._writing(self._uploads) as name:
                upload_id = self._store.create_multipart(name, metadata={})
            self._store.upload_part(name, upload_id, 1, _BODY)
            self._store.abort_multipart(name, upload_id)
            self._uploads.remove(name)

        self._ask(MULTIPART, ask)

    def remove_all(self, probes: "Sequence[_Probe]") -> Iterator[str]:
        """Remove what this key wrote, with the first key that may; yield what remains. probes: this one first."""
        source, bucket = self.finding.place.source, self.finding.place.bucket
        for name in self._objects:
            if error := self._first_error(DELETE, name, probes):
                yield (
                    f"the object s3://{bucket}/{name} remains: {error}; remove it with other keys: `fusecache clean "
                    f"{source} --prefix {PROBE_NAME} --even-recent --delete`"
                )
            elif name in self._unanswered:
                yield f"the object s3://{bucket}/{name} may appear later: its request was not answered"
        for name in self._uploads:
            if error := self._first_error(MULTIPART, name, probes):
                yield (
                    f"an upload of s3://{bucket}/{name} remains: {error}; abort it in an hour, with other keys: "
                    f"`fusecache uploads {source} --abort --yes --older-than 1h`"
                )

    def _first_error(self, right: str, name: str, probes: "Sequence[_Probe]") -> RemoteError | None:
        """Remove a name with one key after the other; return this key's error if none may."""
        errors: list[RemoteError] = []
        for probe in probes:
            try:
                probe.remove(right, name)
                break
            except RemoteError as exc:
                errors.append(exc)
        if errors and isinstance(errors[0], AccessDenied):
            self._record(right, str(errors[0]), can=False)
        return errors[0] if len(errors) == len(probes) else None

    def remove(self, right: str, name: str) -> None:
        """Delete an object; or abort the uploads of a name, also one whose id is not known."""
        if right == DELETE:
            self._store.delete(name)
            return
        for each in self._store.list_uploads(name).uploads:
            self._store.abort_multipart(each.key, each.upload_id)

    def _new_name(self) -> str:
        return f"{self.finding.place.prefix}{PROBE_NAME}{uuid.uuid4().hex}"

    @contextmanager
    def _writing(self, names: list[str]) -> Iterator[str]:
        """Remember a new name from before it is written, unless the bucket refuses the request."""
        name = self._new_name()
        names.append(name)
        try:
            yield name
        except (AccessDenied, BucketMissing):
            names.remove(name)
            raise
        except RemoteError as exc:
            if not exc.code:
                self._unanswered.add(name)
            raise

    def _record(self, right: str, cause: str = "", *, can: bool | None) -> None:
        self.finding.can[right], self.finding.causes[right] = can, cause

    def _ask(self, right: str, ask: Callable[[], object], *, repeats: bool = True) -> None:
        """Record whether the bucket allows a request."""
        self._check()
        if self._silence:
            return self._record(right, self._silence, can=None)
        try:
            ask()
        except (ObjectMissing, ObjectArchived, ObjectChanged):
            return self._record(right, can=True)  # answers that only a key with the right gets
        except CredentialsMissing:
            raise
        except AccessDenied as exc:
            return self._record(right, str(exc), can=None if exc.code in _NO_VERDICT else False)
        except RemoteError as exc:
            if repeats and exc.code and isinstance(exc, Unavailable) and exc.code != _NOT_IMPLEMENTED:
                time.sleep(PAUSE_SECONDS)
                return self._ask(right, ask, repeats=False)
            if not exc.code or isinstance(exc, BucketMissing):
                self._silence = str(exc)  # the next request would end, or wait, like this one
            return self._record(right, str(exc), can=False if exc.code == _NOT_IMPLEMENTED else None)
        return self._record(right, can=True)
