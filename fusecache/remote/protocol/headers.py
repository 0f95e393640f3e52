"""S3's headers in small: ETags, conditions, and the event handlers that set what boto3 itself cannot."""

import hashlib
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

from fusecache.remote.store import Condition

# Carries a copy's condition from the call to the two botocore events that turn it into headers.
HEADERS_PARAMETER = "FusecacheHeaders"


def bare_etag(etag: str) -> str:
    """Return an ETag without its quotes."""
    return etag.strip('"')


def quoted_etag(etag: str) -> str:
    """Return an ETag as headers want it."""
    return f'"{etag}"'


def multipart_etag(part_etags: Sequence[str]) -> str:
    """Return the ETag that S3 gives to an object of these parts: the MD5 of their MD5s, and their number."""
    digests = b"".join(bytes.fromhex(etag) for etag in part_etags)
    return f"{hashlib.md5(digests, usedforsecurity=False).hexdigest()}-{len(part_etags)}"


def condition_arguments(condition: Condition | None) -> dict[str, Any]:
    """Return boto3's arguments for a condition of a publishing request."""
    if condition is None:
        return {}
    return {"IfNoneMatch": "*"} if condition.etag is None else {"IfMatch": quoted_etag(condition.etag)}


def condition_headers(arguments: Mapping[str, Any]) -> dict[str, str]:
    """Return the headers that boto3's arguments for a condition become."""
    names = {"IfMatch": "if-match", "IfNoneMatch": "if-none-match"}
    return {names[name]: str(value) for name, value in arguments.items()}


def copy_condition_headers(condition: Condition) -> dict[str, str]:
    """Return Cloudflare's headers for a condition on the destination of a copy."""
    if condition.etag is None:
        return {"cf-copy-destination-if-none-match": "*"}
    return {"cf-copy-destination-if-match": quoted_etag(condition.etag)}


def capture_headers(params: dict[str, Any], context: dict[str, Any], **_: object) -> None:
    """Before boto3 checks the arguments: move ours out of the way."""
    context[HEADERS_PARAMETER] = params.pop(HEADERS_PARAMETER, {})


def restore_headers(params: dict[str, Any], context: dict[str, Any], **_: object) -> None:
    """Before the request is signed: add the headers."""
    params["headers"].update(context.get(HEADERS_PARAMETER, {}))


def know_no_region(**_: object) -> tuple[Any, dict[str, Any]]:
    """Before a HeadBucket, by which botocore looks for a region after a redirect that names none: answer it ourselves.

    A token for objects may not ask for the bucket, and a region that the redirect does not name is not followed.
    """
    return SimpleNamespace(status_code=403), {"ResponseMetadata": {"HTTPHeaders": {}}}


def ask_for_identity(request: Any, **_: object) -> None:
    """After the request is signed: ask for bodies as they are stored."""
    request.headers["Accept-Encoding"] = "identity"
