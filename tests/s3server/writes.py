"""Operations that change the bucket: objects, copies, deletes, uploads and their parts."""

import base64
import binascii
import hashlib
import re
from dataclasses import replace
from urllib.parse import quote

from tests.s3server.bodies import FileSegment, Segments, slice_segments
from tests.s3server.errors import S3Error
from tests.s3server.metadata import (
    SETTINGS,
    check_customer_key,
    parse_tags,
    request_headers,
    request_metadata,
)
from tests.s3server.objects import CONDITION_FAILED, Bucket, Condition, ObjectRecord, discarding
from tests.s3server.reads import iso_time, xml_answer
from tests.s3server.s3xml import child_text, element, parse, text
from tests.s3server.state import Exchange
from tests.s3server.target import arrived_key, copy_source
from tests.s3server.uploads import Part
from tests.s3server.wire import Answer

# 10 000 parts or 1 000 deletions, of keys of 1 024 bytes with every byte escaped
MAX_XML_BYTES = 8 << 20
MAX_DELETES = 1000
_COPY_RANGE = re.compile(r"bytes=(\d+)-(\d+)")
_BUCKET_NAME = re.compile(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]")


def create_bucket(exchange: Exchange) -> Answer:
    """CreateBucket."""
    if not _BUCKET_NAME.fullmatch(exchange.bucket_name):
        raise S3Error("InvalidArgument", "The specified bucket is not valid.")
    exchange.connection.receive_all(MAX_XML_BYTES)
    exchange.state.add_bucket(exchange.bucket_name)
    exchange.wrote()
    return Answer(200, [("Location", f"/{exchange.bucket_name}")])


def put_object(exchange: Exchange) -> Answer:
    """PutObject."""
    _check_length(exchange)
    bucket = exchange.bucket
    metadata = request_metadata(exchange.request, exchange.rules)
    size, etag, segments = _receive_body(exchange, bucket)
    record = ObjectRecord(exchange.key, size, etag, segments, metadata, request_headers(exchange.request))
    with discarding(bucket, segments):
        bucket.publish(record, _condition(exchange))
    exchange.wrote()
    return Answer(200, [("ETag", f'"{etag}"')])


def copy_object(exchange: Exchange) -> Answer:
    """CopyObject; the destination's conditions are the cf- headers, plain ones are not looked at."""
    bucket = exchange.bucket
    source_bucket, source = _copy_source(exchange)
    if source.size > exchange.rules.max_copy_bytes:
        raise S3Error("InvalidRequest", "The specified copy source is larger than the maximum allowable size")
    _check_source_conditions(exchange, source)
    check_customer_key(source.headers, exchange.request, "x-amz-copy-source")
    settings = {name: value for name in SETTINGS if (value := exchange.header(name)) is not None}
    kept = {name: value for name, value in source.headers.items() if name not in SETTINGS}
    record = replace(source, key=exchange.key, headers={**kept, **settings})
    if exchange.header("x-amz-metadata-directive") == "REPLACE":
        metadata = request_metadata(exchange.request, exchange.rules)
        record = replace(record, metadata=metadata, headers=request_headers(exchange.request))
    elif (source_bucket.name, source.key) == (bucket.name, exchange.key):
        raise S3Error("InvalidRequest", "This copies an object onto itself, unchanged.")
    segments, etag = _copied(source_bucket, bucket, source, 0, source.size)
    with discarding(bucket, segments):
        record = bucket.publish(
            replace(record, segments=segments, etag=etag),
            Condition(
                match=exchange.header("cf-copy-destination-if-match"),
                none_match=exchange.header("cf-copy-destination-if-none-match"),
            ),
        )
    exchange.wrote()
    modified = text("LastModified", iso_time(record.last_modified))
    return xml_answer("CopyObjectResult", modified, text("ETag", f'"{record.etag}"'))


def delete_object(exchange: Exchange) -> Answer:
    """DeleteObject: 204 always; conditions are not looked at."""
    if exchange.bucket.delete(exchange.key):
        exchange.wrote()
    return Answer(204, [])


def delete_objects(exchange: Exchange) -> Answer:
    """DeleteObjects: up to 1 000 keys, each with an answer of its own. ETags are looked at by rule only."""
    bucket = exchange.bucket
    tree = parse(_receive_xml(exchange), "Delete")
    wanted = [(child_text(node, "Key"), node.findtext("ETag")) for node in tree.findall("Object")]
    if not 0 < len(wanted) <= MAX_DELETES:
        raise S3Error("MalformedXML", f"{len(wanted)} keys")
    rows: list[str] = []
    for key, etag in wanted:
        stored = arrived_key(key, exchange.rules)
        match = etag if exchange.rules.conditional_deletes else None
        try:
            if not exchange.account.allows("DeleteObject", bucket.name, stored):
                raise S3Error("AccessDenied", "Access Denied")
            with bucket.lock:
                if bucket.find(stored) is not None:
                    bucket.check_condition(stored, Condition(match=match))
                if bucket.delete(stored):
                    exchange.wrote()
        except S3Error as exc:
            problem = text("Code", exc.code) + text("Message", exc.message)
            rows.append(element("Error", text("Key", key), problem))
            continue
        if tree.findtext("Quiet") != "true":
            rows.append(element("Deleted", text("Key", key)))
    return xml_answer("DeleteResult", *rows)


def create_upload(exchange: Exchange) -> Answer:
    """CreateMultipartUpload."""
    metadata = request_metadata(exchange.request, exchange.rules)
    headers = request_headers(exchange.request)
    upload = exchange.uploads.create(exchange.key, metadata, headers, _condition(exchange))
    exchange.wrote()
    return xml_answer(
        "InitiateMultipartUploadResult",
        text("Bucket", exchange.bucket_name),
        text("Key", exchange.key),
        text("UploadId", upload.upload_id),
    )


def upload_part(exchange: Exchange) -> Answer:
    """UploadPart. From the first byte on, an earlier part of that number is gone."""
    number = _part_number(exchange)
    _check_length(exchange)
    upload_id, bucket = exchange.query("uploadId"), exchange.bucket
    check_customer_key(exchange.uploads.find(upload_id, exchange.key).headers, exchange.request)
    exchange.uploads.begin_part(upload_id, exchange.key, number)
    size, etag, segments = _receive_body(exchange, bucket)
    part = Part(number, size, etag, segments, bucket.clock.now())
    exchange.uploads.put_part(upload_id, exchange.key, part)
    exchange.wrote()
    return Answer(200, [("ETag", f'"{etag}"')])


def upload_part_copy(exchange: Exchange) -> Answer:
    """UploadPartCopy; R2 knows no conditions here, so none is looked at."""
    number = _part_number(exchange)
    upload_id, bucket = exchange.query("uploadId"), exchange.bucket
    exchange.uploads.find(upload_id, exchange.key)
    source_bucket, source = _copy_source(exchange)
    check_customer_key(source.headers, exchange.request, "x-amz-copy-source")
    start, count = 0, source.size
    header = exchange.header("x-amz-copy-source-range")
    if header is not None:
        match = _COPY_RANGE.fullmatch(header)
        if match is None or not int(match[1]) <= int(match[2]) < source.size:
            raise S3Error("InvalidArgument", f"{header} of a source of {source.size} bytes")
        start, count = int(match[1]), int(match[2]) - int(match[1]) + 1
    if count > exchange.rules.max_put_bytes:
        raise S3Error("EntityTooLarge", "Your proposed upload exceeds the maximum allowed part size.")
    exchange.uploads.begin_part(upload_id, exchange.key, number)
    segments, etag = _copied(source_bucket, bucket, source, start, count)
    now = bucket.clock.now()
    exchange.uploads.put_part(upload_id, exchange.key, Part(number, count, etag, segments, now))
    exchange.wrote()
    return xml_answer("CopyPartResult", text("LastModified", iso_time(now)), text("ETag", f'"{etag}"'))


def complete_upload(exchange: Exchange) -> Answer:
    """CompleteMultipartUpload."""
    upload_id = exchange.query("uploadId")
    tree = parse(_receive_xml(exchange), "CompleteMultipartUpload")
    exchange.uploads.find(upload_id, exchange.key)
    chosen: list[tuple[int, str]] = []
    for node in tree.findall("Part"):
        number = child_text(node, "PartNumber")
        if not number.isdecimal():
            raise S3Error("MalformedXML", f"PartNumber {number!r}")
        chosen.append((int(number), parse_tags(child_text(node, "ETag"))))
    record = exchange.uploads.complete(upload_id, exchange.key, chosen, _condition(exchange))
    exchange.wrote()
    return xml_answer(
        "CompleteMultipartUploadResult",
        text("Location", f"{exchange.base_url}/{exchange.bucket_name}/{quote(exchange.key)}"),
        text("Bucket", exchange.bucket_name),
        text("Key", exchange.key),
        text("ETag", f'"{record.etag}"'),
    )


def abort_upload(exchange: Exchange) -> Answer:
    """AbortMultipartUpload."""
    exchange.uploads.abort(exchange.query("uploadId"), exchange.key)
    exchange.wrote()
    return Answer(204, [])


def _condition(exchange: Exchange) -> Condition:
    kind = exchange.rules.conditional_writes
    names = ("if-match", "if-none-match")
    if kind == "refused" and any(exchange.header(name) is not None for name in names):
        raise S3Error(
            "NotImplemented", "A header you provided implies functionality that is not implemented."
        )
    is_completion = bool(exchange.request.query.get("uploadId"))
    if kind == "ignored" or (kind in ("not-of-parts", "never-holds") and is_completion):
        return Condition()
    if kind == "never-holds" and exchange.header("if-match") is not None:
        raise S3Error("PreconditionFailed", CONDITION_FAILED)
    return Condition(match=exchange.header("if-match"), none_match=exchange.header("if-none-match"))


def _check_length(exchange: Exchange) -> None:
    length = exchange.request.content_length
    if length is None:
        raise S3Error("MissingContentLength", "You must provide the Content-Length HTTP header.")
    if length > exchange.rules.max_put_bytes:
        raise S3Error("EntityTooLarge", "Your proposed upload exceeds the maximum allowed object size.")


def _part_number(exchange: Exchange) -> int:
    value = exchange.query("partNumber")
    if not value.isdecimal() or not 1 <= int(value) <= exchange.rules.max_part_number:
        raise S3Error("InvalidArgument", f"Part number must be from 1 to {exchange.rules.max_part_number}")
    return int(value)


def _receive_body(exchange: Exchange, bucket: Bucket) -> tuple[int, str, Segments]:
    """Store the request's body; return size, MD5 and segments, which are the caller's to unlink.

    Raises S3Error: InvalidDigest, BadDigest, XAmzContentSHA256Mismatch; ConnectionEnded if it is cut short.
    """
    size = exchange.connection.body_left
    md5 = hashlib.md5(usedforsecurity=False)
    payload_hash = exchange.header("x-amz-content-sha256") or ""
    sha256 = None if payload_hash == "UNSIGNED-PAYLOAD" else hashlib.sha256()
    segments: Segments = ()
    if size:
        name, path = bucket.new_body()
        segments = (FileSegment(name, 0, size),)
        with discarding(bucket, segments), path.open("wb", buffering=0) as file:

            def sink(piece: memoryview) -> None:
                file.write(piece)
                md5.update(piece)
                if sha256 is not None:
                    sha256.update(piece)

            exchange.connection.receive(sink)
    with discarding(bucket, segments):
        exchange.check_midway()
        _check_content_md5(exchange, md5.digest())
        if sha256 is not None and sha256.hexdigest() != payload_hash:
            raise S3Error("XAmzContentSHA256Mismatch", "The provided x-amz-content-sha256 is not the body's.")
    return size, md5.hexdigest(), segments


def _receive_xml(exchange: Exchange) -> bytes:
    body = exchange.connection.receive_all(MAX_XML_BYTES)
    _check_content_md5(exchange, hashlib.md5(body, usedforsecurity=False).digest())
    payload_hash = exchange.header("x-amz-content-sha256") or ""
    if payload_hash not in ("UNSIGNED-PAYLOAD", hashlib.sha256(body).hexdigest()):
        raise S3Error("XAmzContentSHA256Mismatch", "The provided x-amz-content-sha256 is not the body's.")
    return body


def _check_content_md5(exchange: Exchange, digest: bytes) -> None:
    header = exchange.header("content-md5")
    if header is None:
        return
    try:
        expected = base64.b64decode(header, validate=True)
    except binascii.Error as exc:
        raise S3Error("InvalidDigest", "The Content-MD5 you specified is not valid.") from exc
    if len(expected) != len(digest):
        raise S3Error("InvalidDigest", "The Content-MD5 you specified is not valid.")
    if expected != digest:
        raise S3Error("BadDigest", "The Content-MD5 you specified did not match what we received.")


def _copy_source(exchange: Exchange) -> tuple[Bucket, ObjectRecord]:
    bucket_name, key = copy_source(exchange.header("x-amz-copy-source") or "", exchange.rules)
    if not exchange.account.allows("GetObject", bucket_name, key):
        raise S3Error("AccessDenied", "Access Denied")
    bucket, _ = exchange.state.find_bucket(bucket_name)
    return bucket, bucket.get(key)


def _check_source_conditions(exchange: Exchange, source: ObjectRecord) -> None:
    condition = Condition(
        match=exchange.header("x-amz-copy-source-if-match"),
        none_match=exchange.header("x-amz-copy-source-if-none-match"),
    )
    if not condition.holds(source.etag):
        raise S3Error("PreconditionFailed", CONDITION_FAILED)


def _copied(
    source_bucket: Bucket, bucket: Bucket, source: ObjectRecord, start: int, count: int
) -> tuple[Segments, str]:
    """Return a copy of part of an object, owned by the caller, and the MD5 of its bytes."""
    with source_bucket.lock:
        if source_bucket.get(source.key).number != source.number:
            raise S3Error("ServiceUnavailable", "The source was replaced during the copy.")
        segments = bucket.link_segments(slice_segments(source.segments, start, count), source_bucket)
    if count == source.size and "-" not in source.etag:
        return segments, source.etag
    with discarding(bucket, segments):
        body = bucket.open_segments(segments)
        try:
            return segments, body.etag()
        finally:
            body.close()
