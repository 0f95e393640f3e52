"""Finds out what an S3 store does with If-Match of a write.

If-None-Match is not tested, as that needs an object. Stores that honour If-Match of a PUT honour it, too.
"""

import base64
import hashlib
from typing import TYPE_CHECKING

import botocore.exceptions

from fusecache.remote.protocol.headers import condition_arguments
from fusecache.remote.store import Condition, ConditionalWrites

if TYPE_CHECKING:
    from mypy_boto3_s3 import S3Client

_EMPTY_MD5 = base64.b64encode(hashlib.md5(b"", usedforsecurity=False).digest()).decode()


def ask_conditions(client: "S3Client", bucket: str, key: str) -> ConditionalWrites:
    """Write an empty object that must be refused. key: of no object; if the condition is IGNORED, it is one then."""
    # Of an object that does not exist: no ETag matches.
    condition = condition_arguments(Condition("0" * 32))
    try:
        client.put_object(
            Bucket=bucket, Key=key, Body=b"", ContentLength=0, ContentMD5=_EMPTY_MD5, **condition
        )
    except botocore.exceptions.ClientError as exc:
        status = exc.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
        if status in (404, 409, 412):
            return ConditionalWrites.KEPT
        return ConditionalWrites.REFUSED if status == 501 else ConditionalWrites.UNKNOWN
    except botocore.exceptions.BotoCoreError:
        return ConditionalWrites.UNKNOWN
    return ConditionalWrites.IGNORED
