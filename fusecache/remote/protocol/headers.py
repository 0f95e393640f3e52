"""Helpers for S3 headers: ETags, preconditions, and botocore event handlers for headers without an argument there."""

import base64
import hashlib
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

from fusecache.remote.store import Condition, ObjectContent

# Pseudo parameter that carries a copy's precondition from the call to the botocore events that add the headers.
HEADERS_PARAMETER = "FusecacheHeaders"


def bare_etag(etag: str) -> str:
    """Return an ETag without its quotes."""
    return etag.strip('"')


def quoted_etag(etag: str) -> str:
    """Return an ETag in quotes, as headers need it."""
    return f'"{etag}"'


def multipart_etag(part_etags: Sequence[str]) -> str:
    """Return the ETag that S3 computes for an object of these parts: the MD5 of their MD5s, then their number."""
    digests = b"".join(bytes.fromhex(etag) for etag in part_etags)
    return f"{hashlib.md5(digests, usedforsecurity=False).hexdigest()}-{len(part_etags)}"


def object_content(answer: Mapping[str, Any]) -> ObjectContent:
    """Return what botocore's response to a HEAD says about an object's content. Raises KeyError if a field is missing.

    A checksum of the parts' checksums (COMPOSITE, or with a part count behind a hyphen) depends on how they were cut.
    """
    is_full = answer.get("ChecksumType", "FULL_OBJECT") == "FULL_OBJECT"
    checksums = {
        name: value
        for name, value in answer.items()
        if is_full and name.startswith("Checksum") and name != "ChecksumType" and "-" not in value
    }
    etag, modified = bare_etag(answer["ETag"]), answer["LastModified"].timestamp()
    return ObjectContent(etag, answer["ContentLength"], modified, checksums)


def condition_arguments(condition: Condition | None) -> dict[str, Any]:
    """Return botocore's arguments for the precondition of a publishing request."""
    if condition is None:
        return {}
    return {"IfNoneMatch": "*"} if condition.etag is None else {"IfMatch": quoted_etag(condition.etag)}


def condition_headers(arguments: Mapping[str, Any]) -> dict[str, str]:
    """Return the headers for botocore's precondition arguments."""
    names = {"IfMatch": "if-match", "IfNoneMatch": "if-none-match"}
    return {names[name]: str(value) for name, value in arguments.items()}


def copy_condition_headers(condition: Condition) -> dict[str, str]:
    """Return Cloudflare's headers for a precondition on the destination of a copy."""
    if condition.etag is None:
        return {"cf-copy-destination-if-none-match": "*"}
    return {"cf-copy-destination-if-match": quoted_etag(condition.etag)}


def capture_headers(params: dict[str, Any], context: dict[str, Any], **_: object) -> None:
    """Move our pseudo parameter to the context before botocore validates the arguments."""
    context[HEADERS_PARAMETER] = params.pop(HEADERS_PARAMETER, {})


def restore_headers(params: dict[str, Any], context: dict[str, Any], **_: object) -> None:
    """Add the saved headers before the request is signed."""
    params["headers"].update(context.get(HEADERS_PARAMETER, {}))


def send_md5(params: dict[str, Any], **_: object) -> None:
    """Send the MD5 of a body instead of the CRC-32 that botocore chooses, which many stores do not know."""
    params.get("context", {}).pop("checksum", None)
    digest = hashlib.md5(params["body"], usedforsecurity=False).digest()
    params["headers"]["Content-MD5"] = base64.b64encode(digest).decode("ascii")


def refuse_head_bucket(**_: object) -> tuple[Any, dict[str, Any]]:
    """Answer botocore's HeadBucket with 403 before it is sent.

    botocore sends it to find the region after a redirect that names none. An object-scoped token may not send it; with
    this answer botocore does not follow such a redirect.
    """
    return SimpleNamespace(status_code=403), {"ResponseMetadata": {"HTTPHeaders": {}}}


def request_identity_encoding(request: Any, **_: object) -> None:
    """Request bodies without transformation. Set after signing, because a proxy may rewrite this header."""
    request.headers["Accept-Encoding"] = "identity"
