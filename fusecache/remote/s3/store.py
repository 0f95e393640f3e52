"""The store for the S3 protocol: Cloudflare R2 first, any other S3 service as well.

Not a retry loop: botocore retries a failed request at most once. Endless retries belong to the engine.

Most requests of a mount are GETs, PUTs of objects and parts, and DELETEs. They use the direct HTTP path
(`remote/http/signed_requests.py`) once a successful request of botocore has set it up. botocore sends all others.

Invariants:
1. Every body has a Content-Length and a Content-MD5, never `aws-chunked`, never a trailer, never `Expect`.
2. No byte of a GET is reported before status, ETag, range and length of the response are checked.
3. A connection whose body was not read to its end is closed, not reused.
"""

import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from email.utils import parsedate_to_datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fusecache.model.errors import (
    FusecacheError,
    ObjectChanged,
    ObjectMissing,
    Refused,
    RemoteError,
    Unavailable,
    UploadLost,
)
from fusecache.model.objects import KIB, Extent, ObjectId, ObjectInfo
from fusecache.remote.endpoints import Credentials, Endpoint, Transport
from fusecache.remote.http.file_body import SliceBody
from fusecache.remote.http.put import PutRequest, part_query
from fusecache.remote.http.ranged_get import GetRequest
from fusecache.remote.http.signed_requests import (
    NO_SETTINGS,
    SLOWEST_BYTES_PER_SECOND,
    RedirectedRequest,
    is_plain,
)
from fusecache.remote.protocol.headers import (
    bare_etag,
    condition_arguments,
    condition_headers,
    multipart_etag,
    object_content,
    quoted_etag,
)
from fusecache.remote.protocol.responses import GetResponse, check_get_response
from fusecache.remote.protocol.user_metadata import (
    carried,
    decode_metadata,
    metadata_arguments,
    metadata_headers,
)
from fusecache.remote.request_settings import RequestSettings
from fusecache.remote.s3.bulk_delete import BulkDelete
from fusecache.remote.s3.client import PAGE, ClientAccess, open_access
from fusecache.remote.s3.condition_probe import ask_conditions, test_conditions
from fusecache.remote.s3.copy import CopyRequests
from fusecache.remote.s3.errors import RequestNames
from fusecache.remote.s3.uploads import list_uploads
from fusecache.remote.statistics import RequestCounter, StoreStatistics
from fusecache.remote.store import (
    PROBE_NAME,
    Condition,
    ConditionalWrites,
    FileSlice,
    Interruption,
    ListPage,
    ObjectContent,
    UploadPage,
)
from fusecache.remote.within import within

if TYPE_CHECKING:
    from mypy_boto3_s3 import S3Client
    from mypy_boto3_s3.type_defs import GetObjectOutputTypeDef, HeadObjectOutputTypeDef

# Piece size for bodies read through botocore: urllib3 makes a bytes object of each, which should fit the L2 cache.
READ_PIECE_BYTES = 256 * KIB


class S3Store:
    """A `Store` on a bucket. Thread-safe; one client, one connection pool.

    credentials: None uses the AWS chain (environment, files, profile, instance role), or the credentials_file.
    The constructor raises ConfigError for a profile or endpoint that botocore rejects, and makes no request.
    """

    def __init__(
        self,
        bucket: str,
        endpoint: Endpoint,
        *,
        credentials: Credentials | None = None,
        profile: str | None = None,
        credentials_file: Path | None = None,
        transport: Transport | None = None,
        settings: RequestSettings = NO_SETTINGS,
    ) -> None:
        self._bucket = bucket
        self._endpoint = endpoint
        self._credentials = credentials
        self._profile = profile
        self._credentials_file = credentials_file
        self._settings = settings
        self._sends_conditions = True
        self.conditional_writes = ConditionalWrites.KEPT if endpoint.is_r2 else ConditionalWrites.UNKNOWN
        self._transport = transport or Transport()
        self._counter = RequestCounter()
        self._request_names = RequestNames(bucket, self._counter)
        self._reloading = threading.Lock()
        self._access = self._new_access()

    def statistics(self) -> StoreStatistics:
        """Return the request counts."""
        return self._counter.statistics()

    def close(self) -> None:
        """Close idle connections. The next request opens a new one."""
        self._access.close()

    def reload(self) -> None:
        """Reload the credentials from their source; requests in flight keep the old ones.

        Raises ConfigError or CredentialsMissing if the source has none; then all requests keep the old ones.
        """
        with self._reloading:
            access = self._new_access()
            try:
                access.check_keys()
            except FusecacheError:
                access.close()
                raise
            before, self._access = self._access, access
            before.close()

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
        arguments: dict[str, Any] = {"Bucket": self._bucket, "Prefix": prefix, "MaxKeys": limit}
        if delimiter:
            arguments["Delimiter"] = delimiter
        if token is not None:
            arguments["ContinuationToken"] = token
        if start_after:
            arguments["StartAfter"] = start_after
        with self._request_names.named("LIST", prefix, "lists") as what:
            answer: Any = self._client.list_objects_v2(**arguments)
            page: ListPage | None = answer.get(PAGE)
            if page is None:
                raise Unavailable(f"{what}: the response is not a complete listing")
            return page

    def head(self, key: str) -> ObjectInfo:
        """Return an object's properties with its metadata."""
        with _whole_answer(f"HEAD s3://{self._bucket}/{key}"):
            answer = self._head(key)
            return ObjectInfo(
                key=key,
                etag=bare_etag(answer["ETag"]),
                size=answer["ContentLength"],
                modified=answer["LastModified"].timestamp(),
                metadata=decode_metadata(answer["Metadata"]),
                carried=carried(answer["ResponseMetadata"]["HTTPHeaders"], answer["Metadata"]),
            )

    def content(self, key: str) -> ObjectContent:
        """Return size and checksums of an object, by a HEAD that asks for the checksums."""
        with (
            _whole_answer(f"HEAD s3://{self._bucket}/{key}"),
            self._request_names.named("HEAD", key, "heads"),
        ):
            return object_content(
                self._client.head_object(Bucket=self._bucket, Key=key, ChecksumMode="ENABLED")
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
        access = self._access
        direct = access.direct_http(object_id.key)
        with self._request_names.named("GET", object_id.key, "gets") as what:
            get = GetRequest.into(buffer, what, object_id, extent, progress, interruption)
            if direct is not None and is_plain(object_id.etag):
                try:
                    return direct.gets.fill(get, access.keys())
                except RedirectedRequest:
                    access.drop_direct_http()
            self._get_by_botocore(access, get)

    def put(
        self, key: str, body: FileSlice, *, metadata: Mapping[str, str], condition: Condition | None = None
    ) -> str:
        """Store a whole object; return its ETag."""
        condition = condition if self._sends_conditions else None
        try:
            return self._put(key, body, metadata, condition_arguments(condition))
        except ObjectChanged:
            if condition is None or condition.etag is None or not self._is_version(key, condition.etag):
                raise
            return self._put_again(key, body, metadata, condition.etag)
        except ObjectMissing as exc:
            if condition is None or condition.etag is None:
                raise
            # S3 answers 404 where R2 answers 412: the object to replace is gone.
            raise ObjectChanged(f"s3://{self._bucket}/{key} no longer exists: not replaced") from exc

    def _put_again(self, key: str, body: FileSlice, metadata: Mapping[str, str], etag: str) -> str:
        """The version matches, yet the bucket refuses: Ceph 16 compares If-Match with its quotes (seen on 16.2.15)."""
        try:
            return self._put(key, body, metadata, {"IfMatch": etag})
        except ObjectChanged as exc:
            if not self._is_version(key, etag):
                raise
            self.conditional_writes = ConditionalWrites.REFUSED
            raise Refused(
                f"s3://{self._bucket}/{key}: the store refuses If-Match although the object has that version, as older "
                "Ceph gateways do once a bucket has versioning; suspend versioning, or mount again with "
                "--conflict last-wins, then `fusecache recover --restore`"
            ) from exc

    def _is_version(self, key: str, etag: str) -> bool:
        try:
            return self.head(key).etag == etag
        except ObjectMissing:
            return False

    def create_multipart(self, key: str, *, metadata: Mapping[str, str]) -> str:
        """Begin a multipart upload; return its UploadId."""
        with self._request_names.named("CREATE UPLOAD", key, "creates"):
            answer = self._client.create_multipart_upload(
                Bucket=self._bucket, Key=key, **metadata_arguments(metadata)
            )
        return answer["UploadId"]

    def upload_part(self, key: str, upload_id: str, number: int, body: FileSlice) -> str:
        """Store part `number` (from 1); return its ETag."""
        access = self._access
        with (
            SliceBody(body, self._count_sent) as stream,
            self._request_names.named(f"PUT PART {number}", key, "parts") as what,
        ):
            etag = self._put_direct(access, PutRequest(what, key, {}, part_query(upload_id, number)), stream)
            if etag is None:
                answer = access.client.upload_part(
                    Bucket=self._bucket,
                    Key=key,
                    UploadId=upload_id,
                    PartNumber=number,
                    **_body_arguments(stream),
                )
                access.set_up_direct_http(key)
                with _whole_answer(what):
                    etag = bare_etag(answer["ETag"])
        self._counter.add("bytes_written", body.size)
        return etag

    def complete_multipart(
        self, key: str, upload_id: str, part_etags: Sequence[str], *, condition: Condition | None = None
    ) -> str:
        """Publish parts 1..n; return the object's ETag."""
        if not self._sends_conditions or self.conditional_writes is ConditionalWrites.NOT_OF_PARTS:
            condition = None
        with self._request_names.named("COMPLETE UPLOAD", key, "completes"):
            answer = self._client.complete_multipart_upload(
                Bucket=self._bucket,
                Key=key,
                UploadId=upload_id,
                MultipartUpload={
                    "Parts": [
                        {"PartNumber": number, "ETag": quoted_etag(etag)}
                        for number, etag in enumerate(part_etags, 1)
                    ]
                },
                **condition_arguments(condition),
            )
        # Ceph 16 leaves the ETag empty (seen on 16.2.15).
        return bare_etag(answer["ETag"]) or multipart_etag(part_etags)

    def abort_multipart(self, key: str, upload_id: str) -> None:
        """Drop an upload and its parts. An unknown upload is success."""
        access = self._access
        with suppress(UploadLost), self._request_names.named("ABORT UPLOAD", key, "aborts"):
            access.client.abort_multipart_upload(Bucket=self._bucket, Key=key, UploadId=upload_id)
            access.set_up_direct_http(key)

    def list_uploads(self, prefix: str, *, token: str | None = None) -> UploadPage:
        """Return one page of the unfinished uploads whose keys start with `prefix`."""
        with self._request_names.named("LIST UPLOADS", prefix, "lists"):
            return list_uploads(self._client, self._bucket, prefix, token)

    def copy(
        self,
        source: ObjectId,
        key: str,
        *,
        condition: Condition | None = None,
        metadata: Mapping[str, str] | None = None,
        size: int | None = None,
    ) -> str:
        """Copy inside the bucket if the source is still that version; return the new ETag.

        Sends a HEAD of the source first, unless nothing of the answer is needed: its size decides between one request
        and parts, and headers are lost if the metadata change.
        """
        copies = CopyRequests(
            store=self,
            client=self._client,
            head=self._head,
            request_names=self._request_names,
            bucket=self._bucket,
            transport=self._transport,
            is_r2=self._endpoint.is_r2,
            storage_class=self._settings.storage_class,
        )
        return copies.copy(source, key, condition, metadata, size)

    def delete(self, key: str) -> None:
        """Delete an object. A missing one is success."""
        access = self._access
        direct = access.direct_http(key)
        with suppress(ObjectMissing), self._request_names.named("DELETE", key, "deletes") as what:
            if direct is not None:
                try:
                    return direct.puts.delete(what, key, access.keys())
                except RedirectedRequest:
                    access.drop_direct_http()
            access.client.delete_object(Bucket=self._bucket, Key=key)
            access.set_up_direct_http(key)

    def bulk_delete(self) -> BulkDelete:
        """Return the requests that delete many objects at once."""
        return BulkDelete(
            self, self._client, self._request_names, self._bucket, compares_etags=not self._endpoint.is_r2
        )

    def server_time(self, prefix: str) -> float:
        """Return the store's clock in seconds since 1970, from the Date of a LIST."""
        with self._request_names.named("LIST", prefix, "lists") as what:
            answer = self._client.list_objects_v2(Bucket=self._bucket, Prefix=prefix, MaxKeys=1)
            date = answer["ResponseMetadata"]["HTTPHeaders"].get("date", "")
            try:
                return parsedate_to_datetime(date).timestamp()
            except ValueError as exc:
                raise Unavailable(f"{what}: the response has no valid Date: {date!r}") from exc

    def probe_write(self, prefix: str) -> None:
        """Check that writing is allowed, by a write that must fail; leave nothing behind."""
        self._probe(prefix)

    def probe_conditions(self, prefix: str) -> ConditionalWrites:
        """Find out what the store does with the conditions of writes; leave nothing behind.

        R2 keeps them: that is documented.
        """
        if not self._endpoint.is_r2:
            with suppress(RemoteError):
                if self.conditional_writes is ConditionalWrites.UNKNOWN:
                    self._probe(prefix)
                if self.conditional_writes is ConditionalWrites.KEPT:
                    self.conditional_writes = ConditionalWrites.UNKNOWN
                    key = self._probe_key(prefix)
                    with self._request_names.named("TEST CONDITIONS", key, "puts"):
                        self.conditional_writes = test_conditions(self._client, self._bucket, key)
        return self.conditional_writes

    def send_no_conditions(self) -> None:
        """From now on send writes without their conditions, for a store that does not honour them."""
        self._sends_conditions = False

    # ---- private

    @property
    def _client(self) -> "S3Client":
        return self._access.client

    def _new_access(self) -> ClientAccess:
        return open_access(
            self._endpoint,
            self._transport,
            credentials=self._credentials,
            profile=self._profile,
            count_read=self._count_read,
            credentials_file=self._credentials_file,
            settings=self._settings,
        )

    def _probe(self, prefix: str) -> None:
        """Send a write that must fail. Raises RemoteError unless the answer shows that the keys may write."""
        key = self._probe_key(prefix)
        access = self._access
        with self._request_names.named("PUT", key, "puts"):
            found = ask_conditions(access.client, self._bucket, key)
        if not self._endpoint.is_r2:
            self.conditional_writes = found
        access.set_up_direct_http(key)
        if found is ConditionalWrites.IGNORED:
            self.delete(key)

    def _probe_key(self, prefix: str) -> str:
        return f"{prefix}{PROBE_NAME}{uuid.uuid4().hex}"

    def _get_by_botocore(self, access: ClientAccess, get: GetRequest) -> None:
        """Run a GET through botocore; the first success sets up the direct HTTP path."""

        def ask() -> "GetObjectOutputTypeDef":
            answer = access.client.get_object(
                Bucket=self._bucket,
                Key=get.object_id.key,
                Range=f"bytes={get.extent.start}-{get.extent.stop - 1}",
                IfMatch=quoted_etag(get.object_id.etag),
            )
            access.set_up_direct_http(get.object_id.key)
            return answer

        # In a thread of its own: botocore has no way to end a request that waits for its response.
        answer = within(None, ask, get.interruption, discard=lambda late: late["Body"].close())
        # The raw stream: botocore's wrapper only adds less precise error messages to readinto.
        stream: Any = answer["Body"]._raw_stream  # type: ignore[attr-defined]
        try:
            check_get_response(get.what, get.object_id, get.extent, _get_facts(answer))
            with get.interruption.by(partial(_shut, stream)):
                self._fill(stream, get)
        except BaseException:
            stream.close()
            raise

    def _count_read(self, count: int) -> None:
        self._counter.add("bytes_read", count)

    def _count_sent(self, count: int) -> None:
        self._counter.add("bytes_sent", count)
        self._transport.upload_pace.take(count)

    def _put(self, key: str, body: FileSlice, metadata: Mapping[str, str], condition: dict[str, Any]) -> str:
        access = self._access
        headers = {**condition_headers(condition), **metadata_headers(metadata)}
        with (
            SliceBody(body, self._count_sent) as stream,
            self._request_names.named("PUT", key, "puts") as what,
        ):
            etag = self._put_direct(access, PutRequest(what, key, headers), stream)
            if etag is None:
                answer = access.client.put_object(
                    Bucket=self._bucket,
                    Key=key,
                    **_body_arguments(stream),
                    **metadata_arguments(metadata),
                    **condition,
                )
                access.set_up_direct_http(key)
                with _whole_answer(what):
                    etag = bare_etag(answer["ETag"])
        self._counter.add("bytes_written", body.size)
        return etag

    def _put_direct(self, access: ClientAccess, put: PutRequest, stream: SliceBody) -> str | None:
        """Send a PUT without botocore; return None if botocore must send it."""
        direct = access.direct_http(put.key)
        if direct is None or not all(map(is_plain, put.headers.values())):
            return None
        try:
            return direct.puts.put(put, stream, access.keys())
        except RedirectedRequest:
            access.drop_direct_http()
            return None

    def _head(self, key: str) -> "HeadObjectOutputTypeDef":
        with self._request_names.named("HEAD", key, "heads"):
            return self._client.head_object(Bucket=self._bucket, Key=key)

    def _fill(self, stream: Any, get: GetRequest) -> None:
        size = get.extent.size
        deadline = time.monotonic() + self._transport.read_timeout_seconds + size / SLOWEST_BYTES_PER_SECOND
        filled = 0
        while filled < size:
            count = stream.readinto(get.target[filled : filled + READ_PIECE_BYTES])
            if count == 0:
                raise Unavailable(f"{get.what}: the body ended after {filled} of {size} bytes")
            if get.interruption.is_asked:
                # After the shutdown of a TLS connection, these bytes may still be encrypted.
                raise Unavailable(f"{get.what}: interrupted by its reader after {filled} of {size} bytes")
            filled += count
            self._count_read(count)
            get.progress(filled)
            if time.monotonic() > deadline:
                raise Unavailable(f"{get.what}: timeout after {filled} of {size} bytes")


@contextmanager
def _whole_answer(what: str) -> Iterator[None]:
    """Raise Unavailable for a missing field: botocore turns an empty body into a response without fields."""
    try:
        yield
    except KeyError as exc:
        raise Unavailable(f"{what}: the response lacks {exc}") from exc


def _body_arguments(stream: SliceBody) -> dict[str, Any]:
    # botocore sends no Content-Length for an empty stream, but does for empty bytes.
    body = stream if len(stream) else b""
    return {"Body": body, "ContentLength": len(stream), "ContentMD5": stream.content_md5()}


def _shut(stream: Any) -> None:
    """Wake the thread that reads a response of urllib3."""
    with suppress(OSError, ValueError):  # ValueError: already read to its end
        stream.shutdown()


def _get_facts(answer: "GetObjectOutputTypeDef") -> GetResponse:
    return GetResponse(
        status=answer["ResponseMetadata"]["HTTPStatusCode"],
        etag=answer.get("ETag", ""),
        content_range=answer.get("ContentRange", ""),
        content_length=answer.get("ContentLength"),
    )
