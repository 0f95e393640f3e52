"""Operations that only look: objects, listings, uploads in progress."""

import base64
import binascii
import bisect
import hashlib
import re
from collections.abc import Callable
from datetime import UTC, datetime
from email.utils import formatdate, parsedate_to_datetime
from urllib.parse import quote

from tests.s3server.bodies import OpenBody
from tests.s3server.errors import S3Error
from tests.s3server.metadata import check_customer_key, metadata_headers
from tests.s3server.objects import CONDITION_FAILED, Condition, ObjectRecord
from tests.s3server.s3xml import document, element, text
from tests.s3server.state import Exchange
from tests.s3server.wire import Answer, BytesBody

# Objects of these storage classes must be restored before they can be read.
ARCHIVES = frozenset({"GLACIER", "DEEP_ARCHIVE"})
_RANGE = re.compile(r"bytes=(\d*)-(\d*)")


def xml_answer(name: str, *children: str) -> Answer:
    """Return a 200 with an XML document."""
    body = document(name, children)
    return Answer(200, [("Content-Type", "application/xml")], length=len(body), body=BytesBody(body))


def iso_time(seconds: float) -> str:
    """Return a time as S3's XML has it."""
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def list_buckets(exchange: Exchange) -> Answer:
    """ListBuckets."""
    rows = (
        element("Bucket", text("Name", bucket.name), text("CreationDate", iso_time(bucket.created)))
        for bucket in exchange.state.buckets()
    )
    owner = element("Owner", text("ID", "owner"), text("DisplayName", "owner"))
    return xml_answer("ListAllMyBucketsResult", element("Buckets", *rows), owner)


def head_bucket(exchange: Exchange) -> Answer:
    """HeadBucket."""
    _ = exchange.bucket
    return Answer(200, [("Content-Type", "application/xml")])


def list_objects(exchange: Exchange) -> Answer:
    """ListObjectsV2."""
    token = exchange.request.query.get("continuation-token")
    start_after = exchange.query("start-after")
    encode = _encoder(exchange)
    limit = exchange.query_int("max-keys", 1000, low=0, high=1000)
    prefix, delimiter = exchange.query("prefix"), exchange.query("delimiter")
    after = start_after if token is None else _parse_token(token)
    page = exchange.bucket.list(prefix=prefix, delimiter=delimiter, after=after, limit=limit)
    children = [
        text("Name", exchange.bucket_name),
        text("Prefix", encode(prefix)),
        text("MaxKeys", limit),
        text("KeyCount", len(page.objects) + len(page.prefixes)),
        text("IsTruncated", page.next_after is not None),
    ]
    if delimiter:
        children.append(text("Delimiter", encode(delimiter)))
    if start_after:
        children.append(text("StartAfter", encode(start_after)))
    if exchange.query("encoding-type"):
        children.append(text("EncodingType", "url"))
    if token is not None:
        children.append(text("ContinuationToken", token))
    if page.next_after is not None:
        children.append(text("NextContinuationToken", _token(page.next_after)))
    children += [_object_row(record, encode) for record in page.objects]
    children += [element("CommonPrefixes", text("Prefix", encode(common))) for common in page.prefixes]
    return xml_answer("ListBucketResult", *children)


def list_uploads(exchange: Exchange) -> Answer:
    """ListMultipartUploads, in pages."""
    encode = _encoder(exchange)
    limit = exchange.query_int("max-uploads", 1000, low=1, high=1000)
    marker, id_marker = exchange.query("key-marker"), exchange.query("upload-id-marker")
    prefix = exchange.query("prefix")
    uploads = [upload for upload in exchange.uploads.all() if upload.key.startswith(prefix)]
    if id_marker:
        places = [(upload.key, upload.upload_id) for upload in uploads]
        last = (marker, id_marker)
        behind = (
            places.index(last) + 1 if last in places else bisect.bisect_right(places, (marker, "\U0010ffff"))
        )
        uploads = uploads[behind:]
    elif marker:
        uploads = [upload for upload in uploads if upload.key > marker]
    page = uploads[:limit]
    truncated = len(uploads) > limit
    children = [
        text("Bucket", exchange.bucket_name),
        text("Prefix", encode(prefix)),
        text("KeyMarker", encode(marker)),
        text("UploadIdMarker", id_marker),
        text("MaxUploads", limit),
        text("IsTruncated", truncated),
    ]
    if exchange.query("encoding-type"):
        children.append(text("EncodingType", "url"))
    if truncated:
        children.append(text("NextKeyMarker", encode(page[-1].key)))
        children.append(text("NextUploadIdMarker", page[-1].upload_id))
    children += [
        element(
            "Upload",
            text("Key", encode(upload.key)),
            text("UploadId", upload.upload_id),
            text("StorageClass", "STANDARD"),
            text("Initiated", iso_time(upload.created)),
        )
        for upload in page
    ]
    return xml_answer("ListMultipartUploadsResult", *children)


def list_parts(exchange: Exchange) -> Answer:
    """ListParts, in pages."""
    upload = exchange.uploads.find(exchange.query("uploadId"), exchange.key)
    limit = exchange.query_int("max-parts", 1000, low=1, high=1000)
    marker = exchange.query_int("part-number-marker", 0, low=0, high=exchange.rules.max_part_number)
    parts = [upload.parts[number] for number in sorted(upload.parts) if number > marker]
    page = parts[:limit]
    truncated = len(parts) > limit
    children = [
        text("Bucket", exchange.bucket_name),
        text("Key", upload.key),
        text("UploadId", upload.upload_id),
        text("PartNumberMarker", marker),
        text("MaxParts", limit),
        text("IsTruncated", truncated),
        text("StorageClass", "STANDARD"),
    ]
    if truncated:
        children.append(text("NextPartNumberMarker", page[-1].number))
    children += [
        element(
            "Part",
            text("PartNumber", part.number),
            text("LastModified", iso_time(part.last_modified)),
            text("ETag", f'"{part.etag}"'),
            text("Size", part.size),
        )
        for part in page
    ]
    return xml_answer("ListPartsResult", *children)


def get_object(exchange: Exchange) -> Answer:
    """GetObject and HeadObject: conditions first, then the range."""
    record, body = exchange.bucket.open(exchange.key)
    try:
        check_customer_key(record.headers, exchange.request)
        _check_read_conditions(exchange, record)
        if exchange.request.method == "GET" and record.headers.get("x-amz-storage-class") in ARCHIVES:
            storage_class = ("StorageClass", record.headers["x-amz-storage-class"])
            message = "The operation is not valid for the object's storage class"
            raise S3Error("InvalidObjectState", message, details=(storage_class,))
        return _object_answer(exchange, record, body)
    except S3Error:
        body.close()
        raise


def _object_answer(exchange: Exchange, record: ObjectRecord, body: OpenBody) -> Answer:
    headers = [*_version_headers(record), ("Accept-Ranges", "bytes")]
    headers += [(name.title(), value) for name, value in record.headers.items()]
    headers += metadata_headers(record.metadata)
    if exchange.rules.full_checksums and exchange.header("x-amz-checksum-mode") == "ENABLED":
        digest = hashlib.sha256()
        for chunk in body.chunks(0, record.size):
            digest.update(chunk)
        headers.append(("x-amz-checksum-sha256", base64.b64encode(digest.digest()).decode()))
        headers.append(("x-amz-checksum-type", "FULL_OBJECT"))
    wanted = parse_range(exchange.header("range"), record.size)
    if wanted is None:
        return Answer(200, headers, length=record.size, body=body)
    start, stop = wanted
    headers.append(("Content-Range", f"bytes {start}-{stop - 1}/{record.size}"))
    return Answer(206, headers, start=start, length=stop - start, body=body)


def parse_range(header: str | None, size: int) -> tuple[int, int] | None:
    """Return [start, stop) of a Range header; None for the whole object, also if it is not understood.

    S3Error InvalidRange if no byte of the object is in the range.
    """
    match = _RANGE.fullmatch(header or "")
    if match is None or match[0] == "bytes=-":
        return None
    first, last = match[1], match[2]
    if first and last and int(last) < int(first):
        return None
    if first:
        start, stop = int(first), min(int(last) + 1, size) if last else size
    else:
        start, stop = max(0, size - int(last)), size
    if start >= stop:
        headers = (("Content-Range", f"bytes */{size}"),)
        raise S3Error("InvalidRange", "The requested range is not satisfiable", headers=headers)
    return start, stop


def _check_read_conditions(exchange: Exchange, record: ObjectRecord) -> None:
    """Raise S3Error PreconditionFailed or NotModified, in the order of RFC 9110, section 13.2.2."""
    match, none_match = exchange.header("if-match"), exchange.header("if-none-match")
    whole_seconds = int(record.last_modified)
    if match is not None:
        if not Condition(match=match).holds(record.etag):
            raise S3Error("PreconditionFailed", CONDITION_FAILED)
    elif whole_seconds > (_header_time(exchange.header("if-unmodified-since")) or whole_seconds):
        raise S3Error("PreconditionFailed", CONDITION_FAILED)
    if none_match is not None:
        if not Condition(none_match=none_match).holds(record.etag):
            raise S3Error("NotModified", headers=tuple(_version_headers(record)))
    elif (since := _header_time(exchange.header("if-modified-since"))) is not None and whole_seconds <= since:
        raise S3Error("NotModified", headers=tuple(_version_headers(record)))


def _header_time(value: str | None) -> float | None:
    try:
        return None if value is None else parsedate_to_datetime(value).timestamp()
    except ValueError:
        return None  # RFC 9110: a date that is none is as if not sent


def _version_headers(record: ObjectRecord) -> list[tuple[str, str]]:
    return [("ETag", f'"{record.etag}"'), ("Last-Modified", formatdate(record.last_modified, usegmt=True))]


def _object_row(record: ObjectRecord, encode: Callable[[str], str]) -> str:
    return element(
        "Contents",
        text("Key", encode(record.key)),
        text("LastModified", iso_time(record.last_modified)),
        text("ETag", f'"{record.etag}"'),
        text("Size", record.size),
        text("StorageClass", record.headers.get("x-amz-storage-class", "STANDARD")),
    )


def _encoder(exchange: Exchange) -> Callable[[str], str]:
    kind = exchange.query("encoding-type")
    if kind not in ("", "url"):
        raise S3Error("InvalidArgument", "Invalid Encoding Method specified in Request")
    return quote if kind else str


def _token(after: str) -> str:
    return base64.urlsafe_b64encode(after.encode()).decode()


def _parse_token(token: str) -> str:
    try:
        return base64.urlsafe_b64decode(token).decode()
    except (binascii.Error, UnicodeDecodeError, ValueError) as exc:
        raise S3Error("InvalidArgument", "The continuation token provided is incorrect") from exc
