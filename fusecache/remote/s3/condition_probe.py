"""Finds out by one write what the keys may do, and what an S3 store does with If-Match.

The write must fail, so that it leaves nothing behind even if its answer is lost.
If-None-Match is not tested, as that needs an object. Stores that honour If-Match of a PUT honour it, too.
"""

import base64
import hashlib
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import botocore.exceptions

from fusecache.remote.protocol.headers import condition_arguments
from fusecache.remote.store import Condition, ConditionalWrites

if TYPE_CHECKING:
    from mypy_boto3_s3 import S3Client

_EMPTY_BODY: dict[str, Any] = {
    "Body": b"",
    "ContentLength": 0,
    "ContentMD5": base64.b64encode(hashlib.md5(b"", usedforsecurity=False).digest()).decode(),
}


def ask_conditions(client: "S3Client", bucket: str, key: str) -> ConditionalWrites:
    """Write an empty object that must be refused. key: of no object; if the condition is IGNORED, it is one then.

    Raises ClientError if the keys may not write, BotoCoreError.
    """
    # Of an object that does not exist: no ETag matches.
    condition = condition_arguments(Condition("0" * 32))
    try:
        client.put_object(Bucket=bucket, Key=key, **_EMPTY_BODY, **condition)
    except botocore.exceptions.ClientError as exc:
        status, code = _answer(exc)
        # AWS answers 404 for an object that is not there.
        if status in (409, 412) or (status == 404 and code != "NoSuchBucket"):
            return ConditionalWrites.KEPT
        # A store without conditions. AWS answers 403 to keys that may write but not read: they cannot compare ETags.
        if status in (403, 501) and _may_upload(client, bucket, key):
            return ConditionalWrites.REFUSED if status == 501 else ConditionalWrites.UNKNOWN
        raise
    return ConditionalWrites.IGNORED


def _may_upload(client: "S3Client", bucket: str, key: str) -> bool:
    """Return whether the keys may send a part: of an upload that does not exist, so that nothing is stored."""
    try:
        with suppress(botocore.exceptions.BotoCoreError):
            client.upload_part(Bucket=bucket, Key=key, UploadId="none", PartNumber=1, **_EMPTY_BODY)
    except botocore.exceptions.ClientError as exc:
        return _answer(exc) == (404, "NoSuchUpload")
    return False


def _answer(exc: botocore.exceptions.ClientError) -> tuple[int, str]:
    status = exc.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
    return status, exc.response.get("Error", {}).get("Code", "")
