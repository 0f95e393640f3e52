"""What all stores over HTTP share: reads, PUTs, deletes, the probe, counts and errors."""

import ssl
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from email.utils import parsedate_to_datetime
from functools import partial
from types import MappingProxyType

from fusecache.model.errors import ObjectChanged, ObjectMissing, RemoteError, Unavailable, Untrusted
from fusecache.model.objects import Extent, ObjectId, ObjectInfo
from fusecache.remote.http.file_body import SliceBody
from fusecache.remote.http.put import delete, send_body
from fusecache.remote.http.ranged_get import GetRequest, fill
from fusecache.remote.http.signed_requests import HttpRequest, SignedHttp
from fusecache.remote.protocol.headers import bare_etag
from fusecache.remote.protocol.user_metadata import (
    carried,
    decode_metadata,
    encode_metadata,
    standard_headers,
)
from fusecache.remote.statistics import RequestCounter, StoreStatistics
from fusecache.remote.store import PROBE_NAME, Condition, ConditionalWrites, FileSlice, Interruption


class HttpStore:
    """The shared part of a `Store`. Thread-safe.

    metadata_prefix: of the headers with user metadata. hyphen: what stands for `-` in their names. standard_prefix: of
    standard headers such as Content-Type, where they are set.
    object_headers: of every PUT of an object. impossible: a precondition that fails for an object that does not exist.
    promise: what the store does with preconditions, if it does not ignore them. trusted_file: variable that names CAs.
    """

    metadata_prefix: str
    hyphen = "-"
    standard_prefix = ""
    object_headers: Mapping[str, str] = MappingProxyType({})
    impossible: Mapping[str, str]
    promise = ConditionalWrites.KEPT
    trusted_file = "SSL_CERT_FILE"

    def __init__(self, place: str, http: SignedHttp, reload: Callable[[], None] = lambda: None) -> None:
        """place: the bucket's name in errors, like gs://bucket. reload: reads the credentials again."""
        self._place = place
        self._http = http
        self._reload = reload
        self._counter = RequestCounter()
        self._sends_conditions = True
        self.conditional_writes = ConditionalWrites.UNKNOWN

    def statistics(self) -> StoreStatistics:
        """Return the request counts."""
        return self._counter.statistics()

    def close(self) -> None:
        """Close idle connections. The next request opens a new one."""
        self._http.close()

    def reload(self) -> None:
        """Read the credentials again."""
        self._reload()

    def head(self, key: str) -> ObjectInfo:
        """Return an object's properties with its metadata."""
        headers = self._head(key)
        found = {
            name.removeprefix(self.metadata_prefix).replace(self.hyphen, "-"): value
            for name, value in headers.items()
            if name.startswith(self.metadata_prefix)
        }
        with whole_response(f"HEAD {self._place}/{key}"):
            return ObjectInfo(
                key=key,
                etag=bare_etag(headers["etag"]),
                # Google unpacks gzip on the way, and names the stored size in a header of its own.
                size=int(headers.get("x-goog-stored-content-length") or headers["content-length"]),
                modified=parsedate_to_datetime(headers["last-modified"]).timestamp(),
                metadata=decode_metadata(found),
                carried=carried(headers, found),
            )

    def get_into(
        self,
        object_id: ObjectId,
        extent: Extent,
        buffer: memoryview,
        progress: Callable[[int], None],
        interruption: Interruption | None = None,
    ) -> None:
        """Fill `buffer[:extent.size]` with the bytes of `extent`, by one ranged GET with If-Match."""
        with self._named("GET", object_id.key, "gets") as what:
            get = GetRequest.into(buffer, what, object_id, extent, progress, interruption)
            fill(self._http, get, partial(self._counter.add, "bytes_read"))

    def put(
        self, key: str, body: FileSlice, *, metadata: Mapping[str, str], condition: Condition | None = None
    ) -> str:
        """Store a whole object; return its ETag."""
        headers = {
            **self.object_headers,
            **self._metadata_headers(metadata),
            **self._conditions(key, condition),
        }
        try:
            answer = self._send("PUT", key, "puts", body, headers)
        except ObjectMissing as exc:
            if condition is None or condition.etag is None:
                raise
            raise ObjectChanged(f"{self._place}/{key} no longer exists: not replaced") from exc
        return self._etag_of(key, answer)

    def delete(self, key: str) -> None:
        """Delete an object. A missing one is success."""
        with suppress(ObjectMissing), self._named("DELETE", key, "deletes") as what:
            delete(self._http, what, key)

    def probe_write(self, prefix: str) -> None:
        """Check that writing is allowed, by a write whose precondition fails; leave nothing behind."""
        self.probe_conditions(prefix)

    def probe_conditions(self, prefix: str) -> ConditionalWrites:
        """Find out whether the store honours preconditions, by one write that must fail; leave nothing behind."""
        key = f"{prefix}{PROBE_NAME}{uuid.uuid4().hex}"
        with self._named("PUT", key, "puts") as what, suppress(ObjectChanged, ObjectMissing):
            self._http.call(what, "PUT", key, {**self.object_headers, **self.impossible})
            self.delete(key)
            self.conditional_writes = ConditionalWrites.IGNORED
            return self.conditional_writes
        self.conditional_writes = self.promise
        return self.promise

    def send_no_conditions(self) -> None:
        """From now on send writes without their conditions, for a store that does not honour them."""
        self._sends_conditions = False

    # ---- for the stores

    def _conditions(self, key: str, condition: Condition | None) -> dict[str, str]:
        """Return the headers for the precondition of a write."""
        raise NotImplementedError

    def _head(self, key: str) -> Mapping[str, str]:
        with self._named("HEAD", key, "heads") as what:
            return self._http.call(what, "HEAD", key).headers

    def _count_sent(self, count: int) -> None:
        self._counter.add("bytes_sent", count)
        self._http.upload_pace.take(count)

    def _send(
        self, verb: str, key: str, field: str, body: FileSlice, headers: Mapping[str, str], query: str = ""
    ) -> dict[str, str]:
        """Send a body; return the headers of the response."""
        with (
            SliceBody(body, self._count_sent) as stream,
            self._named(verb, key, field) as what,
        ):
            answer = send_body(self._http, HttpRequest(what, "PUT", key, headers, query), stream)
        self._counter.add("bytes_written", body.size)
        return answer

    def _metadata_headers(self, metadata: Mapping[str, str]) -> dict[str, str]:
        """Return the headers of a request that makes an object."""
        standard, encoded = standard_headers(metadata), encode_metadata(metadata)
        return {
            **{self.standard_prefix + name: value for name, value in standard.items()},
            **{
                self.metadata_prefix + name.replace("-", self.hyphen): value
                for name, value in encoded.items()
            },
        }

    def _etag_of(self, key: str, headers: Mapping[str, str]) -> str:
        etag = bare_etag(headers.get("etag", ""))
        if not etag:
            raise Unavailable(f"{self._place}/{key}: the response has no ETag")
        return etag

    @contextmanager
    def _named(self, verb: str, key: str, field: str) -> Iterator[str]:
        """Count a request, yield its name, and complete its errors."""
        self._counter.add(field)
        what = f"{verb} {self._place}/{key}"
        try:
            yield what
        except RemoteError as exc:
            self._counter.add("errors")
            if isinstance(exc.__cause__, ssl.SSLCertVerificationError):
                hint = f"for a private certificate set {self.trusted_file} to its CA file"
                raise Untrusted(f"{exc}; {hint}") from exc
            if what not in str(exc):  # an error of the credentials' source
                raise type(exc)(f"{what}: {exc}") from exc
            raise


@contextmanager
def whole_response(what: str) -> Iterator[None]:
    """Raise Unavailable for a field of a response that is missing or malformed."""
    try:
        yield
    except (KeyError, ValueError, SyntaxError) as exc:  # SyntaxError: of ElementTree
        raise Unavailable(f"{what}: the response lacks a valid field: {exc}") from exc
