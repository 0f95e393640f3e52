"""Mapping of the bucket's responses to `fusecache.model.errors`, and the check of a GET's headers. No I/O.

S3's error code takes precedence over the HTTP status: 404 is a missing object unless the code names bucket or upload.
Unknown errors: 3xx and 4xx are permanent (`Refused`), all others may be retried (`Unavailable`).

Parser of ListObjectsV2 responses, with ElementTree's C parser: botocore's costs five times as much per name.

Not here: the request and error responses. A body that is not a listing raises ValueError, and the caller decides.
"""

import xml.etree.ElementTree as ET
from dataclasses import dataclass
from datetime import datetime
from urllib.parse import unquote_plus

from fusecache.model.errors import (
    AccessDenied,
    BucketMissing,
    NotAsSent,
    ObjectArchived,
    ObjectChanged,
    ObjectMissing,
    PartsRefused,
    Refused,
    RemoteError,
    Throttled,
    Unavailable,
    UploadLost,
)
from fusecache.model.objects import Extent, ObjectId, ObjectInfo
from fusecache.remote.protocol.headers import bare_etag
from fusecache.remote.store import ListPage

_ROOT = "ListBucketResult"


def parse_listing(body: bytes) -> ListPage:
    """Parse the body of a 200 response into a page. Raises ValueError if it is not a complete listing."""
    try:
        root = ET.fromstring(body)
    except ET.ParseError as exc:
        raise ValueError(f"the listing is not valid XML: {exc}") from exc
    space, _, name = root.tag.rpartition("}")
    if name != _ROOT:
        raise ValueError(f"expected a listing, got {name}")
    space = f"{space}}}" if space else ""
    is_encoded = root.findtext(f"{space}EncodingType") == "url"
    objects = tuple(_object(row, space, is_encoded=is_encoded) for row in root.iterfind(f"{space}Contents"))
    prefixes = tuple(
        _decoded(_text(row, f"{space}Prefix"), is_encoded=is_encoded)
        for row in root.iterfind(f"{space}CommonPrefixes")
    )
    is_truncated = _text(root, f"{space}IsTruncated") == "true"
    return ListPage(objects, prefixes, _text(root, f"{space}NextContinuationToken") if is_truncated else None)


def _object(row: ET.Element, space: str, *, is_encoded: bool) -> ObjectInfo:
    return ObjectInfo(
        _decoded(_text(row, f"{space}Key"), is_encoded=is_encoded),
        bare_etag(_text(row, f"{space}ETag")),
        int(_text(row, f"{space}Size")),
        datetime.fromisoformat(_text(row, f"{space}LastModified")).timestamp(),
    )


def _decoded(key: str, *, is_encoded: bool) -> str:
    # S3 encodes a space as '+' here, and a plus as %2B.
    return unquote_plus(key) if is_encoded and ("%" in key or "+" in key) else key


def _text(element: ET.Element, tag: str) -> str:
    child = element.find(tag)
    if child is None:
        raise ValueError(f"the listing lacks {tag.rpartition('}')[2]}")
    return child.text or ""


ERROR_BY_CODE: dict[str, type[RemoteError]] = {
    "NoSuchKey": ObjectMissing,
    "NoSuchBucket": BucketMissing,
    "NoSuchUpload": UploadLost,
    "EntityTooSmall": PartsRefused,
    "InvalidPart": PartsRefused,
    "InvalidPartOrder": PartsRefused,
    "PreconditionFailed": ObjectChanged,
    # A GET always names a version and an extent inside it. If the object is too short, it is another version.
    "InvalidRange": ObjectChanged,
    # Another write to the same key is in flight: the result of the precondition is not known yet.
    "ConditionalRequestConflict": Unavailable,
    "OperationAborted": Unavailable,
    "AccessDenied": AccessDenied,
    "AuthorizationHeaderMalformed": AccessDenied,
    "ExpiredRequest": AccessDenied,
    "ExpiredToken": AccessDenied,
    "InvalidAccessKeyId": AccessDenied,
    "InvalidToken": AccessDenied,
    "RequestTimeTooSkewed": AccessDenied,
    "SignatureDoesNotMatch": AccessDenied,
    "TokenRefreshRequired": AccessDenied,
    "Unauthorized": AccessDenied,
    "SlowDown": Throttled,
    "Throttling": Throttled,
    "TooManyRequests": Throttled,
    "RequestLimitExceeded": Throttled,
    # The body was damaged or truncated in transit: a retry with the same bytes may succeed.
    "BadDigest": NotAsSent,
    "ClientDisconnect": Unavailable,
    "IncompleteBody": Unavailable,
    "RequestTimeout": Unavailable,
    "ObjectLockedByBucketPolicy": Refused,
    # Azure's
    "BlobAlreadyExists": ObjectChanged,
    "BlobImmutableDueToPolicy": Refused,
    "ContainerNotFound": BucketMissing,
    "InvalidBlockList": PartsRefused,
    "LeaseIdMissing": Refused,
    "Md5Mismatch": NotAsSent,
    "ServerBusy": Throttled,
    "SnapshotsPresent": Refused,
}

ERROR_BY_STATUS: dict[int, type[RemoteError]] = {
    401: AccessDenied,
    403: AccessDenied,
    404: ObjectMissing,
    408: Unavailable,
    409: Unavailable,
    412: ObjectChanged,
    416: ObjectChanged,
    425: Unavailable,
    429: Throttled,
}

REMEDIES: dict[type[RemoteError], str] = {
    AccessDenied: "check the credentials, their permission on this bucket, and the clock of this machine",
    BucketMissing: "check the bucket's name, the endpoint and the account",
    Throttled: "the bucket limits the request rate",
}


def error_of_response(
    request: str,
    *,
    code: str,
    status: int,
    message: str,
    retry_after_seconds: float | None = None,
    storage_class: str = "",
) -> RemoteError:
    """Return the model's error for an error response.

    request: its name in the message, for example `GET s3://bucket/key`. code: S3's error code, or the status as text
    if the response had no body (HEAD). status: the HTTP status. storage_class: of an archived object.
    """
    if code in ("InvalidObjectState", "BlobArchived"):
        return ObjectArchived(
            f"{request}: archived in storage class {storage_class or 'unknown'}; restore it first"
        )
    kind = ERROR_BY_CODE.get(code) or ERROR_BY_STATUS.get(status)
    if kind is None:
        kind = Refused if 300 <= status < 500 else Unavailable
    # R2 answers InvalidArgument, not 403, to an access key of the wrong length.
    if code == "InvalidArgument" and "credential" in message.lower():
        kind = AccessDenied
    cause = f"{status}" if code == str(status) else f"{code} ({status})"
    detail = f": {message.rstrip('.')}" if message else ""
    remedy = REMEDIES.get(kind)
    if 300 <= status < 400:
        remedy = "check the endpoint and the region"
    if code == "RequestTimeTooSkewed":
        remedy = "the clock of this machine differs from the store's: set it (`timedatectl set-ntp true`)"
    error = kind(f"{request}: {cause}{detail}" + (f"; {remedy}" if remedy else ""))
    error.asks_to_slow_down = kind is Throttled or status >= 500
    error.retry_after_seconds = retry_after_seconds
    error.code = code
    error.status = status
    error.remedy = remedy or ""
    return error


def retry_after_seconds(header: str | None) -> float | None:
    """Return the seconds of a Retry-After header; None if it is missing or a date."""
    header = (header or "").strip()
    return float(header) if header.isascii() and header.isdigit() else None


@dataclass(frozen=True, slots=True)
class GetResponse:
    """The relevant headers of a GET's response. content_length: None if missing."""

    status: int
    etag: str
    content_range: str
    content_length: int | None


def check_get_response(request: str, object_id: ObjectId, extent: Extent, facts: GetResponse) -> None:
    """Check that a response holds exactly these bytes of this version.

    A stored Content-Encoding does not matter: if range and length match, the bytes are the stored ones.
    Raises ObjectChanged for another version, Unavailable for any other difference.
    """
    if facts.etag.startswith("W/"):
        raise Unavailable(f"{request}: a proxy transformed the body (ETag {facts.etag})")
    if facts.etag.strip('"') != object_id.etag:
        raise ObjectChanged(
            f"{request}: the response is version {facts.etag or 'unknown'}, not {object_id.etag}"
        )
    asked = f"bytes {extent.start}-{extent.stop - 1}"
    is_whole = facts.status == 200 and extent.start == 0
    is_range = facts.status == 206 and facts.content_range.startswith(f"{asked}/")
    if not (is_whole or is_range):
        raise Unavailable(f"{request}: asked for {asked}, got {facts.status} {facts.content_range}".rstrip())
    if facts.content_length != extent.size:
        raise Unavailable(
            f"{request}: asked for {extent.size} bytes, the response announces {facts.content_length}"
        )
