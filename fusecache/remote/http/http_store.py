"""What all stores over HTTP share: reads, PUTs, deletes, the probe, counts and errors.

What the XML APIs of S3 and of Google Cloud Storage have in common: lists, and uploads in parts.
"""

import json
import ssl
import uuid
import xml.etree.ElementTree as ET
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import datetime
from email.utils import parsedate_to_datetime
from functools import partial
from types import MappingProxyType
from urllib.parse import unquote_plus

from fusecache.model.errors import (
    ObjectChanged,
    ObjectMissing,
    RemoteError,
    Unavailable,
    Untrusted,
    UploadLost,
)
from fusecache.model.objects import Extent, ObjectId, ObjectInfo, UnfinishedUpload
from fusecache.remote.http.put import SliceBody, delete, part_query, send_body
from fusecache.remote.http.ranged_get import GetRequest, fill
from fusecache.remote.http.signed_requests import HttpRequest, SignedHttp, query_of
from fusecache.remote.protocol.headers import (
    bare_etag,
    carried,
    decode_metadata,
    encode_metadata,
    multipart_etag,
    quoted_etag,
    standard_headers,
)
from fusecache.remote.protocol.responses import parse_listing
from fusecache.remote.statistics import RequestCounter, StoreStatistics
from fusecache.remote.store import (
    PROBE_NAME,
    Condition,
    ConditionalWrites,
    FileSlice,
    Interruption,
    ListPage,
    Store,
    UploadPage,
)


class HttpStore(Store):
    """The shared part of the stores. Thread-safe.

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
    conditional_writes = ConditionalWrites.UNKNOWN

    def __init__(self, place: str, http: SignedHttp, reload: Callable[[], None] = lambda: None) -> None:
        """place: the bucket's name in errors, like gs://bucket. reload: reads the credentials again."""
        self._place = place
        self._http = http
        self._reload = reload
        self._counter = RequestCounter()
        self._sends_conditions = True

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

    def take_conditions(self, found: ConditionalWrites) -> None:
        """Use the result of an earlier probe, after which the mount accepted the store."""
        self.conditional_writes = found
        if found in (ConditionalWrites.REFUSED, ConditionalWrites.IGNORED):
            self.send_no_conditions()

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


XML_NAMESPACE = "http://s3.amazonaws.com/doc/2006-03-01/"


class XmlStore(HttpStore):
    """The shared part of the stores with an XML API. Thread-safe."""

    def list_page(
        self,
        prefix: str,
        *,
        delimiter: str = "",
        token: str | None = None,
        start_after: str = "",
        limit: int = 1000,
    ) -> ListPage:
        """Return one page of the objects whose keys start with `prefix`."""
        chosen = {
            "continuation-token": token,
            "delimiter": delimiter,
            # XML cannot hold all characters of keys.
            "encoding-type": "url",
            "list-type": "2",
            "max-keys": str(limit),
            "prefix": prefix,
            "start-after": start_after,
        }
        query = query_of({name: value for name, value in chosen.items() if value})
        with self._named("LIST", prefix, "lists") as what, whole_response(what):
            return parse_listing(self._http.call(what, "GET", None, query=query).body)

    def create_multipart(self, key: str, *, metadata: Mapping[str, str]) -> str:
        """Begin a multipart upload; return its UploadId."""
        return self._begin_upload(key, self._metadata_headers(metadata))

    def upload_part(self, key: str, upload_id: str, number: int, body: FileSlice) -> str:
        """Store part `number` (from 1); return its ETag."""
        query = part_query(upload_id, number)
        return self._etag_of(key, self._send(f"PUT PART {number}", key, "parts", body, {}, query))

    def complete_multipart(
        self, key: str, upload_id: str, part_etags: Sequence[str], *, condition: Condition | None = None
    ) -> str:
        """Publish parts 1..n; return the object's ETag."""
        headers = self._conditions_of_parts(key, condition)
        query = query_of({"uploadId": upload_id})
        with self._named("COMPLETE UPLOAD", key, "completes") as what, whole_response(what):
            reply = self._http.call(what, "POST", key, headers, query=query, body=completion(part_etags))
            # Ceph 16 leaves the ETag empty (seen on 16.2.15).
            return bare_etag(text_of(reply.body, "ETag")) or multipart_etag(part_etags)

    def abort_multipart(self, key: str, upload_id: str) -> None:
        """Drop an upload and its parts. An unknown upload is success."""
        query = query_of({"uploadId": upload_id})
        with suppress(UploadLost, ObjectMissing), self._named("ABORT UPLOAD", key, "aborts") as what:
            self._http.call(what, "DELETE", key, query=query)

    def list_uploads(self, prefix: str, *, token: str | None = None) -> UploadPage:
        """Return one page of the unfinished uploads whose keys start with `prefix`."""
        chosen = {"uploads": "", "prefix": prefix, **({} if token is None else json.loads(token))}
        key_of: Callable[[str], str] = str
        with self._named("LIST UPLOADS", prefix, "lists") as what, whole_response(what):
            try:
                root = ET.fromstring(self._http.call(what, "GET", None, query=query_of(chosen)).body)
            except ET.ParseError:
                # A key holds characters that XML cannot. Not asked for at once: Ceph encodes without saying so.
                chosen, key_of = {**chosen, "encoding-type": "url"}, unquote_plus
                root = ET.fromstring(self._http.call(what, "GET", None, query=query_of(chosen)).body)
            uploads = tuple(
                UnfinishedUpload(
                    key_of(row.findtext("{*}Key") or ""),
                    row.findtext("{*}UploadId") or "",
                    datetime.fromisoformat(row.findtext("{*}Initiated") or "").timestamp(),
                )
                for row in root.iterfind("{*}Upload")
            )
            if root.findtext("{*}IsTruncated") != "true":
                return UploadPage(uploads, None)
            markers = {
                "key-marker": key_of(root.findtext("{*}NextKeyMarker") or ""),
                "upload-id-marker": root.findtext("{*}NextUploadIdMarker") or "",
            }
            return UploadPage(uploads, json.dumps(markers))

    # ---- for the stores

    def _conditions_of_parts(self, key: str, condition: Condition | None) -> dict[str, str]:
        """Return the headers for the precondition of an upload's end. Raises ObjectChanged."""
        raise NotImplementedError

    def _require_version(self, key: str, found: Mapping[str, str], etag: str | None) -> None:
        there = self._etag_of(key, found)
        if there != etag:
            raise ObjectChanged(f"{self._place}/{key}: expected {etag or 'none'}, found {there}")

    def _head_of_version(self, key: str, etag: str | None) -> Mapping[str, str] | None:
        """Return what a HEAD says of a version; None for None: no object. Raises ObjectChanged for another version.

        It takes the place of a precondition, where a request has none. Not atomic.
        """
        try:
            found = self._head(key)
        except ObjectMissing as exc:
            if etag is None:
                return None
            raise ObjectChanged(f"{self._place}/{key} no longer exists: not replaced") from exc
        self._require_version(key, found, etag)
        return found

    def _begin_upload(self, key: str, headers: Mapping[str, str]) -> str:
        with self._named("CREATE UPLOAD", key, "creates") as what, whole_response(what):
            return text_of(self._http.call(what, "POST", key, headers, query="uploads=").body, "UploadId")


def completion(part_etags: Sequence[str]) -> bytes:
    """Return the body of the request that publishes parts 1..n."""
    parts = "".join(
        f"<Part><PartNumber>{number}</PartNumber><ETag>{quoted_etag(etag)}</ETag></Part>"
        for number, etag in enumerate(part_etags, 1)
    )
    return f'<CompleteMultipartUpload xmlns="{XML_NAMESPACE}">{parts}</CompleteMultipartUpload>'.encode()


def text_of(body: bytes, name: str) -> str:
    """Return the text of an element. Raises ValueError or SyntaxError if it is missing."""
    found = ET.fromstring(body.strip()).find(f".//{{*}}{name}")
    if found is None:
        raise ValueError(name)
    return found.text or ""
