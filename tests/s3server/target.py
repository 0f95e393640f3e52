"""What a request asks for: its operation, bucket and key, told from method, path, query and headers."""

from dataclasses import dataclass
from urllib.parse import unquote_to_bytes

from tests.s3server.errors import S3Error
from tests.s3server.rules import Rules
from tests.s3server.wire import Request


@dataclass(frozen=True, slots=True)
class Target:
    """operation: its S3 name, or "Unknown". key is "" for calls on a bucket."""

    operation: str
    bucket: str
    key: str


# (method, a query parameter that must be there or "") -> operation; the first that fits
_BUCKET_OPERATIONS = (
    ("GET", "list-type", "ListObjectsV2"),
    ("GET", "uploads", "ListMultipartUploads"),
    ("HEAD", "", "HeadBucket"),
    ("PUT", "", "CreateBucket"),
    ("POST", "delete", "DeleteObjects"),
)
_OBJECT_OPERATIONS = (
    ("GET", "uploadId", "ListParts"),
    ("GET", "", "GetObject"),
    ("HEAD", "", "HeadObject"),
    ("PUT", "uploadId", "UploadPart"),
    ("PUT", "", "PutObject"),
    ("DELETE", "uploadId", "AbortMultipartUpload"),
    ("DELETE", "", "DeleteObject"),
    ("POST", "uploads", "CreateMultipartUpload"),
    ("POST", "uploadId", "CompleteMultipartUpload"),
)
_COPIES = {"PutObject": "CopyObject", "UploadPart": "UploadPartCopy"}
# Sub-resources that are not kept here must not be taken for the plain operation.
_UNKNOWN = frozenset(
    (
        *("acl", "attributes", "cors", "encryption", "lifecycle", "location", "logging", "notification"),
        *("object-lock", "policy", "replication", "restore", "retention", "select", "tagging", "torrent"),
        *("versioning", "versions", "website"),
    )
)


def find_target(request: Request) -> Target:
    """Return what a request asks for, the key as sent. S3Error InvalidURI if the path is not UTF-8."""
    try:
        path = unquote_to_bytes(request.path).decode()
    except UnicodeDecodeError as exc:
        raise S3Error("InvalidURI", "Couldn't parse the specified URI.") from exc
    bucket, _, key = path.removeprefix("/").partition("/")
    if not bucket:
        return Target("ListBuckets" if request.method == "GET" else "Unknown", "", "")
    if _UNKNOWN & request.query.keys():
        return Target("Unknown", bucket, key)
    operations = _OBJECT_OPERATIONS if key else _BUCKET_OPERATIONS
    for method, parameter, operation in operations:
        if request.method == method and (not parameter or parameter in request.query):
            copies = request.header("x-amz-copy-source") is not None
            return Target(_COPIES.get(operation, operation) if copies else operation, bucket, key)
    return Target("Unknown", bucket, key)


def arrived_key(key: str, rules: Rules) -> str:
    """Return the key, if it is no longer than a key may be. S3Error KeyTooLongError."""
    if len(key.encode()) > rules.max_key_bytes:
        raise S3Error("KeyTooLongError", "Your key is too long")
    return key


def copy_source(header: str, rules: Rules) -> tuple[str, str]:
    """Return bucket and key of an x-amz-copy-source header. S3Error InvalidArgument."""
    try:
        path = unquote_to_bytes(header.partition("?")[0]).decode()
    except UnicodeDecodeError as exc:
        raise S3Error("InvalidArgument", "the copy source is not UTF-8") from exc
    bucket, _, key = path.removeprefix("/").partition("/")
    if not bucket or not key:
        raise S3Error("InvalidArgument", "The copy source must be bucket/key.")
    return bucket, arrived_key(key, rules)
