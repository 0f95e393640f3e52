"""ListMultipartUploads: pages of unfinished uploads."""

import json
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote_plus

from fusecache.model.objects import UnfinishedUpload
from fusecache.remote.store import UploadPage

if TYPE_CHECKING:
    from mypy_boto3_s3 import S3Client


def list_uploads(client: "S3Client", bucket: str, prefix: str, token: str | None) -> UploadPage:
    """Return one page. token: of the page before, None for the first."""
    markers = (
        {} if token is None else dict(zip(("KeyMarker", "UploadIdMarker"), json.loads(token), strict=True))
    )
    # Keys may hold characters that XML cannot. botocore decodes them in listings of objects only.
    arguments: dict[str, Any] = {"Bucket": bucket, "Prefix": prefix, "EncodingType": "url", **markers}
    answer = client.list_multipart_uploads(**arguments)
    is_encoded = answer.get("EncodingType") == "url"

    def key_of(text: str) -> str:
        return unquote_plus(text) if is_encoded else text

    uploads = tuple(
        UnfinishedUpload(key_of(row["Key"]), row["UploadId"], row["Initiated"].timestamp())
        for row in answer.get("Uploads", ())
    )
    if not answer.get("IsTruncated"):
        return UploadPage(uploads, None)
    return UploadPage(
        uploads, json.dumps([key_of(answer.get("NextKeyMarker", "")), answer.get("NextUploadIdMarker", "")])
    )
