"""The bucket's answers, judged in the words of `fusecache.model.errors`: a table and a check, no I/O.

A code decides before a status does: 404 is a missing object unless the code says bucket or upload.
What the table does not know: 4xx will not get better by asking again, everything else may.
"""

from dataclasses import dataclass

from fusecache.model.errors import (
    AccessDenied,
    BucketMissing,
    NotAsSent,
    ObjectChanged,
    ObjectMissing,
    PartsRefused,
    Refused,
    RemoteError,
    Throttled,
    Unavailable,
    UploadLost,
)
from fusecache.model.objects import Extent, ObjectId

ERROR_BY_CODE: dict[str, type[RemoteError]] = {
    "NoSuchKey": ObjectMissing,
    "NoSuchBucket": BucketMissing,
    "NoSuchUpload": UploadLost,
    "EntityTooSmall": PartsRefused,
    "InvalidPart": PartsRefused,
    "InvalidPartOrder": PartsRefused,
    "PreconditionFailed": ObjectChanged,
    # A GET always names a version and an extent inside it: a version too short for it is another version.
    "InvalidRange": ObjectChanged,
    # A write to the same key is under way: its outcome, and so the condition's, is not known yet.
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
    # The body was damaged or cut on its way: the same bytes, sent again, may arrive whole.
    "BadDigest": NotAsSent,
    "ClientDisconnect": Unavailable,
    "IncompleteBody": Unavailable,
    "RequestTimeout": Unavailable,
    "ObjectLockedByBucketPolicy": Refused,
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

WAY_OUT: dict[type[RemoteError], str] = {
    AccessDenied: "check the keys, their permission on this bucket, and the clock of this machine",
    BucketMissing: "check the bucket's name, the endpoint and the account",
    Throttled: "fewer requests a second are needed",
}


def error_of_response(
    request: str, *, code: str, status: int, message: str, retry_after_seconds: float | None = None
) -> RemoteError:
    """Return the model's error for an error answer.

    request: what was asked, for example `GET s3://bucket/key`. code: S3's error code, or the status as text
    where the answer had no body (HEAD). status: the HTTP status.
    """
    kind = ERROR_BY_CODE.get(code) or ERROR_BY_STATUS.get(status)
    if kind is None:
        kind = Refused if 300 <= status < 500 else Unavailable
    # R2 says InvalidArgument, not 403, to an access key of the wrong length.
    if code == "InvalidArgument" and "credential" in message.lower():
        kind = AccessDenied
    cause = f"{status}" if code == str(status) else f"{code} ({status})"
    detail = f": {message.rstrip('.')}" if message else ""
    way_out = WAY_OUT.get(kind)
    if 300 <= status < 400:
        way_out = "check the endpoint and the region"
    error = kind(f"{request}: {cause}{detail}" + (f"; {way_out}" if way_out else ""))
    error.asks_to_slow_down = kind is Throttled or status >= 500
    error.retry_after_seconds = retry_after_seconds
    return error


def retry_after_seconds(header: str | None) -> float | None:
    """Return what a Retry-After header asks for, if it is there and a number of seconds (dates: None)."""
    header = (header or "").strip()
    return float(header) if header.isascii() and header.isdigit() else None


@dataclass(frozen=True, slots=True)
class GetResponse:
    """What the header of a GET's answer says; content_length None if it says nothing."""

    status: int
    etag: str
    content_range: str
    content_length: int | None


def check_get_response(request: str, object_id: ObjectId, extent: Extent, facts: GetResponse) -> None:
    """Refuse an answer that is not exactly these bytes of this version.

    A stored Content-Encoding is no matter: with the asked range and length the bytes are the stored ones.
    Raises ObjectChanged for another version, Unavailable for anything else that differs.
    """
    if facts.etag.startswith("W/"):
        raise Unavailable(f"{request}: the body was transformed on its way (ETag {facts.etag})")
    if facts.etag.strip('"') != object_id.etag:
        raise ObjectChanged(
            f"{request}: the answer is version {facts.etag or 'unknown'}, not {object_id.etag}"
        )
    asked = f"bytes {extent.start}-{extent.stop - 1}"
    is_whole = facts.status == 200 and extent.start == 0
    is_range = facts.status == 206 and facts.content_range.startswith(f"{asked}/")
    if not (is_whole or is_range):
        raise Unavailable(f"{request}: asked for {asked}, got {facts.status} {facts.content_range}".rstrip())
    if facts.content_length != extent.size:
        raise Unavailable(
            f"{request}: asked for {extent.size} bytes, the answer announces {facts.content_length}"
        )
