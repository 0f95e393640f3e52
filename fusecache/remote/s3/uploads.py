"""ListMultipartUploads: pages of unfinished uploads."""

import json
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote_plus

from botocore.parsers import ResponseParserError

from fusecache.model.objects import UnfinishedUpload
from fusecache.remote.store import UploadPage

if TYPE_CHECKING:
    from collections.abc import Callable

    from mypy_boto3_s3 import S3Client


def list_uploads(client: "S3Client", bucket: str, prefix: str, token: str | None) -> UploadPage:
    """Return one page. token: of the page before, None for the first."""
    markers = (
        {} if token is None else dict(zip(("KeyMarker", "UploadIdMarker"), json.loads(token), strict=True))
    )
    arguments: dict[str, Any] = {"Bucket": bucket, "Prefix": prefix, **markers}
    key_of: Callable[[str], str] = str
    try:
        answer = client.list_multipart_uploads(**arguments)
    except ResponseParserError:
        # A key holds characters that XML cannot. Not asked for at once: Ceph encodes keys without saying so.
        answer = client.list_multipart_uploads(**arguments, EncodingType="url")
        key_of = unquote_plus
    uploads = tuple(
        UnfinishedUpload(key_of(row["Key"]), row["UploadId"], row["Initiated"].timestamp())
        for row in answer.get("Uploads", ())
    )
    if not answer.get("IsTruncated"):
        return UploadPage(uploads, None)
    return UploadPage(
        uploads, json.dumps([key_of(answer.get("NextKeyMarker", "")), answer.get("NextUploadIdMarker", "")])
    )
