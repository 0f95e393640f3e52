"""A bucket behind the S3 protocol: Cloudflare R2 first, any other S3 as well. The only file that knows boto3.

Not a retry loop: botocore repeats a failed request once at most, the endless loops belong to the engine.

Reads go through `RangedGets` once the first of a client has shown how botocore asks; every other request is
botocore's.

Invariants:
1. Every body has a Content-Length and a Content-MD5, never `aws-chunked`, never a trailer, never `Expect`.
2. No byte of a GET is reported before status, ETag, range and length of the answer were checked.
3. A connection whose body was not read to its end is closed, not reused.
"""

import os
import ssl
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import boto3
import botocore.exceptions
import botocore.handlers
import botocore.httpsession
import botocore.parsers
import botocore.session
import botocore.utils
import urllib3.exceptions
from botocore.config import Config

from fusecache.model.errors import (
    ConfigError,
    CredentialsMissing,
    FusecacheError,
    ObjectChanged,
    ObjectMissing,
    Refused,
    RemoteError,
    Unavailable,
    UploadLost,
)
from fusecache.model.nouns import KIB, Extent, ObjectId, ObjectInfo
from fusecache.model.texts import nearest_text
from fusecache.remote.answers import GetFacts, check_get_answer, error_of_answer, retry_after_seconds
from fusecache.remote.body import SliceBody
from fusecache.remote.endpoints import Credentials, Endpoint, Transport
from fusecache.remote.headers import (
    HEADERS_PARAMETER,
    ask_for_identity,
    bare_etag,
    condition_arguments,
    copy_condition_headers,
    give_headers,
    know_no_region,
    multipart_etag,
    quoted_etag,
    take_headers,
)
from fusecache.remote.listing_answer import parse_listing
from fusecache.remote.metadata import decode_metadata, encode_metadata
from fusecache.remote.openssl import TlsContext, library
from fusecache.remote.part_puts import PartPut, PartPuts
from fusecache.remote.ranged_get import (
    SLOWEST_BYTES_PER_SECOND,
    Form,
    Get,
    RangedGets,
    SentElsewhere,
    form_of,
)
from fusecache.remote.signing import Keys
from fusecache.remote.statistics import RequestCounter, StoreStatistics
from fusecache.remote.store import Condition, FileSlice, Interruption, ListPage

if TYPE_CHECKING:
    from mypy_boto3_s3 import S3Client
    from mypy_boto3_s3.type_defs import (
        GetObjectOutputTypeDef,
        HeadObjectOutputTypeDef,
    )

# The piece in which botocore's bodies are read: urllib3 makes a bytes object of each, which must stay in L2.
READ_PIECE_BYTES = 256 * KIB
# What a copy inside the bucket keeps beside the user's metadata.
KEPT_HEADERS = ("CacheControl", "ContentDisposition", "ContentEncoding", "ContentLanguage", "ContentType")
# Where an answer to LIST carries the page that we read out of it.
_PAGE = "FusecachePage"
CREDENTIALS_HELP = "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or name a profile of ~/.aws/credentials"


@dataclass(eq=False, slots=True)
class _Access:
    """A client, the credentials behind it, and the short ways for its GETs and parts: None until known, or if there
    is none.
    """

    session: botocore.session.Session
    client: "S3Client"
    gets: RangedGets | None = None
    is_shown: bool = False
    puts: PartPuts | None = None
    is_upload_shown: bool = False
    sent: threading.local = field(default_factory=threading.local)

    def note_sent(self, request: Any, **_: object) -> None:
        """After a request is signed: remember how it looks."""
        self.sent.request = request

    def keys(self) -> Keys:
        """Return the credentials of this moment, renewed if they are such."""
        credentials = self.session.get_credentials()
        if credentials is None:
            raise botocore.exceptions.NoCredentialsError
        frozen = credentials.get_frozen_credentials()
        if frozen.access_key is None or frozen.secret_key is None:
            raise botocore.exceptions.NoCredentialsError
        return Keys(frozen.access_key, frozen.secret_key, frozen.token)


class S3Store:
    """A `Store` on a bucket. Safe for many threads; one client, one connection pool.

    credentials: None takes the usual AWS chain (environment, files, profile, instance role).
    Raises ConfigError for a profile or endpoint that botocore refuses. No request is made here.
    """

    def __init__(
        self,
        bucket: str,
        endpoint: Endpoint,
        *,
        credentials: Credentials | None = None,
        profile: str | None = None,
        transport: Transport | None = None,
    ) -> None:
        self._bucket = bucket
        self._endpoint = endpoint
        self._credentials = credentials
        self._profile = profile
        self._transport = transport or Transport()
        self._counter = RequestCounter()
        self._reloading = threading.Lock()
        self._access = self._new_access()

    def statistics(self) -> StoreStatistics:
        """Return how many requests were made."""
        return self._counter.statistics()

    def reload(self) -> None:
        """Read the credentials again from where they came from; requests under way keep the old ones."""
        with self._reloading:
            before, self._access = self._access, self._new_access()
            for way in (before.gets, before.puts):
                if way is not None:
                    way.close()

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
        with self._request("LIST", prefix, "lists") as what:
            answer: Any = self._client.list_objects_v2(**arguments)
            page: ListPage | None = answer.get(_PAGE)
            if page is None:
                raise Unavailable(f"{what}: the answer is not a whole listing")
            return page

    def head(self, key: str) -> ObjectInfo:
        """Return an object's facts with metadata."""
        with _whole_answer(f"HEAD s3://{self._bucket}/{key}"):
            answer = self._head(key)
            return ObjectInfo(
                key=key,
                etag=bare_etag(answer["ETag"]),
                size=answer["ContentLength"],
                modified=answer["LastModified"].timestamp(),
                metadata=decode_metadata(answer["Metadata"]),
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
        target = buffer[: extent.size]
        if target.nbytes != extent.size:
            raise ValueError(f"a buffer of {buffer.nbytes} bytes cannot take {extent.size}")
        access = self._access
        gets = access.gets
        with self._request("GET", object_id.key, "gets") as what:
            get = Get(what, object_id, extent, target, progress, interruption or Interruption())
            if gets is not None and gets.can_ask_for(object_id):
                try:
                    return gets.fill(get, access.keys())
                except SentElsewhere:
                    # botocore follows where it can, which shows the way from then on, and says why where it cannot.
                    access.gets, access.is_shown = None, False
            self._get_by_botocore(access, get)

    def put(
        self, key: str, body: FileSlice, *, metadata: Mapping[str, str], condition: Condition | None = None
    ) -> str:
        """Store a whole object; return its ETag."""
        try:
            return self._put(key, body, metadata, condition_arguments(condition))
        except ObjectChanged:
            if condition is None or condition.etag is None or not self._is_version(key, condition.etag):
                raise
            # The version is there, and still refused: Ceph 16 compares If-Match with its quotes (seen on 16.2.15).
            return self._put(key, body, metadata, {"IfMatch": condition.etag})
        except ObjectMissing as exc:
            if condition is None or condition.etag is None:
                raise
            # S3 says 404 where R2 says 412: what was to be replaced is gone.
            raise ObjectChanged(f"s3://{self._bucket}/{key} is not there any more: not replaced") from exc

    def _is_version(self, key: str, etag: str) -> bool:
        try:
            return self.head(key).etag == etag
        except ObjectMissing:
            return False

    def create_multipart(self, key: str, *, metadata: Mapping[str, str]) -> str:
        """Begin a multipart upload; return its UploadId."""
        with self._request("CREATE UPLOAD", key, "creates"):
            answer = self._client.create_multipart_upload(
                Bucket=self._bucket, Key=key, Metadata=encode_metadata(metadata)
            )
        return answer["UploadId"]

    def upload_part(self, key: str, upload_id: str, number: int, body: FileSlice) -> str:
        """Store part `number` (from 1); return its ETag."""
        access = self._access
        puts = access.puts
        with SliceBody(body) as stream, self._request(f"PUT PART {number}", key, "parts") as what:
            if puts is not None:
                known = FileSlice(body.path, body.offset, body.size, stream.md5())
                try:
                    etag = puts.send(PartPut(what, key, upload_id, number, known), access.keys())
                    self._counter.add("bytes_written", body.size)
                    return etag
                except SentElsewhere:
                    access.puts = None  # botocore follows where it can, and says why where it cannot
            answer = access.client.upload_part(
                Bucket=self._bucket, Key=key, UploadId=upload_id, PartNumber=number, **_body_arguments(stream)
            )
            if not access.is_upload_shown:
                self._take_upload_form(access, key)
        self._counter.add("bytes_written", body.size)
        return bare_etag(answer["ETag"])

    def complete_multipart(
        self, key: str, upload_id: str, part_etags: Sequence[str], *, condition: Condition | None = None
    ) -> str:
        """Publish parts 1..n; return the object's ETag."""
        with self._request("COMPLETE UPLOAD", key, "completes"):
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
        # Ceph 16 leaves it empty (seen on 16.2.15).
        return bare_etag(answer["ETag"]) or multipart_etag(part_etags)

    def abort_multipart(self, key: str, upload_id: str) -> None:
        """Drop an upload and its parts. An unknown upload is success."""
        access = self._access
        with suppress(UploadLost), self._request("ABORT UPLOAD", key, "aborts"):
            access.client.abort_multipart_upload(Bucket=self._bucket, Key=key, UploadId=upload_id)
            if not access.is_upload_shown:
                self._take_upload_form(access, key)

    def copy(
        self,
        source: ObjectId,
        key: str,
        *,
        condition: Condition | None = None,
        metadata: Mapping[str, str] | None = None,
    ) -> str:
        """Copy inside the bucket if the source is still that version; return the new ETag.

        Costs a HEAD of the source first: its size decides how it is copied.
        """
        facts = self._head(source.key)
        self._require_version(facts, source)
        kept: dict[str, Any] = {name: facts[name] for name in KEPT_HEADERS if facts.get(name)}  # type: ignore[literal-required]
        # As they came, not decoded and encoded again: what others wrote must stay what it was.
        kept["Metadata"] = dict(facts["Metadata"]) if metadata is None else encode_metadata(metadata)
        if facts["ContentLength"] > self._transport.single_copy_bytes:
            return self._copy_in_parts(source, key, facts["ContentLength"], condition, kept)
        arguments: dict[str, Any] = {
            "Bucket": self._bucket,
            "Key": key,
            "CopySource": {"Bucket": self._bucket, "Key": source.key},
            "CopySourceIfMatch": quoted_etag(source.etag),
            "MetadataDirective": "COPY",
        }
        if metadata is not None:
            arguments |= {"MetadataDirective": "REPLACE", **kept}
        if condition is not None and self._endpoint.is_r2:
            arguments[HEADERS_PARAMETER] = copy_condition_headers(condition)
        elif condition is not None:
            self._require_condition(key, condition)
        with self._request(f"COPY from {source.key!r}", key, "copies"):
            answer = self._client.copy_object(**arguments)
        return bare_etag(answer["CopyObjectResult"]["ETag"])

    def delete(self, key: str) -> None:
        """Delete an object. A missing one is success."""
        with suppress(ObjectMissing), self._request("DELETE", key, "deletes"):
            self._client.delete_object(Bucket=self._bucket, Key=key)

    def probe_write(self, prefix: str) -> None:
        """Show that writing is allowed and leave nothing behind."""
        key = f"{prefix}.fusecache-probe-{uuid.uuid4().hex}"
        self.abort_multipart(key, self.create_multipart(key, metadata={}))

    # ---- private

    @property
    def _client(self) -> "S3Client":
        return self._access.client

    def _new_access(self) -> _Access:
        given = self._credentials
        core = botocore.session.get_session()
        try:
            session = boto3.Session(
                botocore_session=core,
                profile_name=self._profile,
                aws_access_key_id=given.access_key if given else None,
                aws_secret_access_key=given.secret_key if given else None,
                aws_session_token=given.session_token if given else None,
            )
            client = session.client(
                "s3",
                endpoint_url=self._endpoint.url,
                config=self._config(self._endpoint.region or session.region_name or "us-east-1"),
            )
        except botocore.exceptions.ProfileNotFound as exc:
            known = core.available_profiles
            hint = nearest_text(self._profile or "", known) or f": known are {', '.join(known) or 'none'}"
            raise ConfigError(
                f"profile = {self._profile!r}: ~/.aws/config and ~/.aws/credentials have no such profile{hint}"
            ) from exc
        except (botocore.exceptions.BotoCoreError, ValueError) as exc:
            raise ConfigError(f"cannot use bucket {self._bucket!r}: {exc}") from exc
        events = client.meta.events
        # Cloudflare never answers 100 Continue: each PUT would wait a second for it.
        events.unregister("before-call.s3", botocore.handlers.add_expect_header)
        events.register("before-parameter-build.s3.CopyObject", take_headers)
        events.register("before-call.s3.CopyObject", give_headers)
        events.register("before-parse.s3.ListObjectsV2", _take_page)
        events.register("before-call.s3.HeadBucket", know_no_region)  # type: ignore[arg-type]  # it answers
        # After signing: a proxy on the way may rewrite this header.
        events.register("before-send.s3", ask_for_identity)
        access = _Access(core, client)
        for operation in ("GetObject", "UploadPart", "AbortMultipartUpload"):
            events.register(f"before-send.s3.{operation}", access.note_sent)
        return access

    def _get_by_botocore(self, access: _Access, get: Get) -> None:
        """Run a GET by the client; the first that comes back shows how it asks."""
        answer = access.client.get_object(
            Bucket=self._bucket,
            Key=get.object_id.key,
            Range=f"bytes={get.extent.start}-{get.extent.stop - 1}",
            IfMatch=quoted_etag(get.object_id.etag),
        )
        # botocore's own readinto is this one with poorer words for its errors.
        stream: Any = answer["Body"]._raw_stream  # type: ignore[attr-defined]
        try:
            check_get_answer(get.what, get.object_id, get.extent, _get_facts(answer))
            with get.interruption.by(partial(_shut, stream)):
                self._fill(stream, get)
        except BaseException:
            stream.close()
            raise
        if not access.is_shown:
            self._take_form(access, get.object_id.key)

    def _take_form(self, access: _Access, key: str) -> None:
        """Make the short way for GETs like the one that this thread just sent, unless a proxy stands between."""
        access.is_shown = True
        form = _shown_form(access, key)
        if form is not None:
            tls = _tls_context(access.session) if form.scheme == "https" else None
            access.gets = RangedGets(form, tls, self._transport, self._count_read)

    def _take_upload_form(self, access: _Access, key: str) -> None:
        """Make the short way for parts, likewise."""
        access.is_upload_shown = True
        form = _shown_form(access, key)
        if form is not None:
            tls = _tls_context(access.session) if form.scheme == "https" else None
            access.puts = PartPuts(form, tls, self._transport)

    def _count_read(self, count: int) -> None:
        self._counter.add("bytes_read", count)

    def _config(self, region: str) -> Config:
        transport = self._transport
        # Default checksums would send aws-chunked bodies with a trailer, which R2 answers with Unauthorized.
        return Config(
            region_name=region,
            signature_version="s3v4",
            s3={"addressing_style": "path"},
            request_checksum_calculation="when_required",
            response_checksum_validation="when_required",
            retries={"mode": "standard", "total_max_attempts": transport.attempts},
            connect_timeout=transport.connect_timeout_seconds,
            read_timeout=transport.read_timeout_seconds,
            max_pool_connections=transport.max_connections,
            tcp_keepalive=True,
        )

    @contextmanager
    def _request(self, verb: str, key: str, field: str) -> Iterator[str]:
        """Count a request, name it, and turn what goes wrong into the model's errors."""
        self._counter.add(field)
        what = f"{verb} s3://{self._bucket}/{key}"
        try:
            yield what
        except botocore.exceptions.ClientError as exc:
            self._counter.add("errors")
            error, facts = exc.response.get("Error", {}), exc.response.get("ResponseMetadata", {})
            raise error_of_answer(
                what,
                code=error.get("Code", ""),
                status=facts.get("HTTPStatusCode", 0),
                message=error.get("Message", ""),
                retry_after_seconds=retry_after_seconds(facts.get("HTTPHeaders", {}).get("retry-after")),
            ) from exc
        except (
            botocore.exceptions.BotoCoreError,
            botocore.parsers.ResponseParserError,
            urllib3.exceptions.HTTPError,
        ) as exc:
            self._counter.add("errors")
            raise _transport_error(what, exc) from exc
        except RemoteError:
            self._counter.add("errors")
            raise

    def _put(self, key: str, body: FileSlice, metadata: Mapping[str, str], condition: dict[str, Any]) -> str:
        with SliceBody(body) as stream, self._request("PUT", key, "puts"):
            answer = self._client.put_object(
                Bucket=self._bucket,
                Key=key,
                **_body_arguments(stream),
                Metadata=encode_metadata(metadata),
                **condition,
            )
        self._counter.add("bytes_written", body.size)
        return bare_etag(answer["ETag"])

    def _head(self, key: str) -> "HeadObjectOutputTypeDef":
        with self._request("HEAD", key, "heads"):
            return self._client.head_object(Bucket=self._bucket, Key=key)

    def _fill(self, stream: Any, get: Get) -> None:
        size = get.extent.size
        deadline = time.monotonic() + self._transport.read_timeout_seconds + size / SLOWEST_BYTES_PER_SECOND
        filled = 0
        while filled < size:
            count = stream.readinto(get.target[filled : filled + READ_PIECE_BYTES])
            if count == 0:
                raise Unavailable(f"{get.what}: the body ended after {filled} of {size} bytes")
            if get.interruption.is_asked:
                # Of a TLS connection that is shut, these may be bytes that nobody has decrypted.
                raise Unavailable(f"{get.what}: ended by its reader after {filled} of {size} bytes")
            filled += count
            self._count_read(count)
            get.progress(filled)
            if time.monotonic() > deadline:
                raise Unavailable(f"{get.what}: only {filled} of {size} bytes came in time")

    def _require_version(self, facts: "HeadObjectOutputTypeDef", source: ObjectId) -> None:
        found = bare_etag(facts["ETag"])
        if found != source.etag:
            raise ObjectChanged(
                f"s3://{self._bucket}/{source.key} is now version {found}, not {source.etag}: not copied"
            )

    def _require_condition(self, key: str, condition: Condition) -> None:
        """Check a destination by a HEAD, for endpoints whose copies take no condition. Not atomic."""
        try:
            found: str | None = bare_etag(self._head(key)["ETag"])
        except ObjectMissing:
            found = None
        if found != condition.etag:
            raise ObjectChanged(
                f"s3://{self._bucket}/{key}: expected {condition.etag or 'none'}, found {found or 'none'}"
            )

    def _copy_in_parts(
        self, source: ObjectId, key: str, size: int, condition: Condition | None, kept: Mapping[str, Any]
    ) -> str:
        with self._request("CREATE UPLOAD", key, "creates"):
            upload_id = self._client.create_multipart_upload(Bucket=self._bucket, Key=key, **kept)["UploadId"]
        try:
            etags = []
            step = self._transport.copy_part_bytes
            for number, start in enumerate(range(0, size, step), 1):
                with self._request(f"COPY PART {number} from {source.key!r}", key, "copies"):
                    part = self._client.upload_part_copy(
                        Bucket=self._bucket,
                        Key=key,
                        UploadId=upload_id,
                        PartNumber=number,
                        CopySource={"Bucket": self._bucket, "Key": source.key},
                        CopySourceRange=f"bytes={start}-{min(start + step, size) - 1}",
                    )
                etags.append(bare_etag(part["CopyPartResult"]["ETag"]))
            # R2's part copies take no condition on the source. Its version was right before the first part
            # and is right after the last, so every part is of it: an ETag that came back means equal bytes.
            self._require_version(self._head(source.key), source)
            if condition is not None:
                self._require_condition(key, condition)
            return self.complete_multipart(key, upload_id, etags, condition=condition)
        except FusecacheError:
            # Parts left behind cost storage for a week; a failure to drop them must not hide the copy's.
            with suppress(RemoteError):
                self.abort_multipart(key, upload_id)
            raise


@contextmanager
def _whole_answer(what: str) -> Iterator[None]:
    """A field that is not in the answer was lost on its way: botocore makes an empty body an empty answer."""
    try:
        yield
    except KeyError as exc:
        raise Unavailable(f"{what}: the answer lacks {exc}") from exc


def _take_page(response_dict: dict[str, Any], customized_response_dict: dict[str, Any], **_: object) -> None:
    """Before botocore parses the answer to a LIST: read it ourselves, and leave it nothing but what we could not."""
    if response_dict["status_code"] == 200:
        with suppress(ValueError):
            customized_response_dict[_PAGE] = parse_listing(response_dict["body"])
            response_dict["body"] = b""


def _body_arguments(stream: SliceBody) -> dict[str, Any]:
    # An empty stream has no length that botocore would announce; empty bytes have.
    body = stream if len(stream) else b""
    return {"Body": body, "ContentLength": len(stream), "ContentMD5": stream.content_md5()}


def _shown_form(access: _Access, key: str) -> Form | None:
    """Return the form of the request that this thread just sent; None if a proxy stands between, or it is special."""
    request = access.sent.request
    url, authorization = request.url.partition("?")[0], _header(request, "Authorization")
    if botocore.utils.get_environ_proxies(url):
        return None
    return form_of(url, key, authorization, _header(request, "User-Agent"))


def _header(request: Any, name: str) -> str:
    value = request.headers.get(name, "")
    return value.decode("latin-1") if isinstance(value, bytes) else str(value)


def _shut(stream: Any) -> None:
    """Wake the thread that reads an answer of urllib3."""
    with suppress(OSError, ValueError):  # ValueError: it has been read to its end
        stream.shutdown()


def _tls_context(session: botocore.session.Session) -> TlsContext | ssl.SSLContext:
    """Return a context that trusts whom botocore trusts: AWS_CA_BUNDLE or `ca_bundle`, else its own CAs."""
    named: str | None = session.get_config_variable("ca_bundle") or os.environ.get("REQUESTS_CA_BUNDLE")
    path = named or str(botocore.httpsession.get_cert_path(True))  # noqa: FBT003 (botocore's signature)
    cafile, capath = (None, path) if os.path.isdir(path) else (path, None)
    openssl = library()
    if openssl is not None:
        return TlsContext(openssl, cafile=cafile, capath=capath)
    context: ssl.SSLContext = botocore.httpsession.create_urllib3_context()
    context.check_hostname = True  # urllib3 does this check itself
    context.load_verify_locations(cafile=cafile, capath=capath)
    return context


def _get_facts(answer: "GetObjectOutputTypeDef") -> GetFacts:
    return GetFacts(
        status=answer["ResponseMetadata"]["HTTPStatusCode"],
        etag=answer.get("ETag", ""),
        content_range=answer.get("ContentRange", ""),
        content_length=answer.get("ContentLength"),
    )


def _transport_error(what: str, exc: Exception) -> FusecacheError:
    """Name what went wrong before or beside an answer of the bucket."""
    if isinstance(exc, botocore.exceptions.HTTPClientError):
        inner = exc.kwargs.get("error")
        if isinstance(inner, FusecacheError):  # our own body could not be read
            return inner
    if isinstance(exc, botocore.exceptions.SSLError):
        return Unavailable(f"{what}: {exc}; for a private certificate set AWS_CA_BUNDLE to its CA file")
    missing = (
        botocore.exceptions.NoCredentialsError,
        botocore.exceptions.PartialCredentialsError,
        botocore.exceptions.CredentialRetrievalError,
        botocore.exceptions.TokenRetrievalError,
        botocore.exceptions.SSOError,
    )
    if isinstance(exc, missing):
        return CredentialsMissing(f"{what}: {exc}; {CREDENTIALS_HELP}")
    if isinstance(exc, botocore.exceptions.ParamValidationError):
        return Refused(f"{what}: {exc}")
    return Unavailable(f"{what}: {exc}")
