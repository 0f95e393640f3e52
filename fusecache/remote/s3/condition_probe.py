"""Finds out what the keys may do, and what an S3 store does with the preconditions of writes.

`ask_conditions` sends one write, which must fail, so that it leaves nothing behind even if its answer is lost.
`test_conditions` needs an object, and a dozen requests: once for each bucket, as a store's answer may depend on the
bucket's versioning (Ceph 16.2.15 refuses every If-Match of a PUT then, and ignores those of uploads in parts).
"""

import base64
import hashlib
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import botocore.exceptions

from fusecache.remote.protocol.headers import bare_etag, condition_arguments, quoted_etag
from fusecache.remote.store import Condition, ConditionalWrites

if TYPE_CHECKING:
    from mypy_boto3_s3 import S3Client


def _body(data: bytes) -> dict[str, Any]:
    digest = hashlib.md5(data, usedforsecurity=False).digest()
    return {"Body": data, "ContentLength": len(data), "ContentMD5": base64.b64encode(digest).decode()}


def ask_conditions(client: "S3Client", bucket: str, key: str) -> ConditionalWrites:
    """Write an empty object that must be refused. key: of no object; if the condition is IGNORED, it is one then.

    KEPT: a false If-Match was refused; whether a true one is accepted is not known.
    Raises ClientError if the keys may not write, BotoCoreError.
    """
    # Of an object that does not exist: no ETag matches.
    condition = condition_arguments(Condition("0" * 32))
    try:
        client.put_object(Bucket=bucket, Key=key, **_body(b""), **condition)
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


def test_conditions(client: "S3Client", bucket: str, key: str) -> ConditionalWrites:
    """Write a small object with true and false conditions, in one request and in parts; remove it again.

    key: of no object. Raises ClientError, BotoCoreError if a request fails for another reason than its condition.
    """
    test = _Test(client, bucket, key)
    try:
        return test.run()
    finally:
        test.remove()


@dataclass(slots=True)
class _Test:
    client: "S3Client"
    bucket: str
    key: str
    # Of a bucket with versioning: a DELETE of each removes all of the object.
    versions: set[str] = field(default_factory=set)
    uploads: list[str] = field(default_factory=list)

    def run(self) -> ConditionalWrites:
        none = condition_arguments(Condition(None))
        first = self._put(b"1", none)
        if first is None:
            return ConditionalWrites.REFUSED
        if self._put(b"2", none) is not None:
            return ConditionalWrites.IGNORED
        # Ceph 16 compares If-Match with its quotes.
        second = self._put(b"3", {"IfMatch": quoted_etag(first)}) or self._put(b"3", {"IfMatch": first})
        if second is None:
            return ConditionalWrites.REFUSED
        if self._put(b"4", {"IfMatch": quoted_etag(first)}) is not None:
            return ConditionalWrites.IGNORED
        is_kept = self._put_in_parts(first) is None and self._put_in_parts(second) is not None
        return ConditionalWrites.KEPT if is_kept else ConditionalWrites.NOT_OF_PARTS

    def remove(self) -> None:
        """Remove what is there now; failures are no reason to stop a mount."""
        for upload_id in self.uploads:
            self._try(partial(self.client.abort_multipart_upload, UploadId=upload_id))
        removed = [self._try(partial(self.client.delete_object, VersionId=each)) for each in self.versions]
        if not removed or not all(removed):  # not all keys may delete versions
            self._try(self.client.delete_object)

    def _try(self, call: Callable[..., Any]) -> bool:
        try:
            call(Bucket=self.bucket, Key=self.key)
        except (botocore.exceptions.ClientError, botocore.exceptions.BotoCoreError):
            return False
        return True

    def _put(self, data: bytes, condition: dict[str, Any]) -> str | None:
        """Return the ETag of the object; None if the condition was refused."""
        return self._sent(
            lambda: self.client.put_object(Bucket=self.bucket, Key=self.key, **_body(data), **condition)
        )

    def _put_in_parts(self, etag: str) -> str | None:
        names: Any = {"Bucket": self.bucket, "Key": self.key}
        names["UploadId"] = upload_id = self.client.create_multipart_upload(**names)["UploadId"]
        self.uploads.append(upload_id)
        part = self.client.upload_part(**names, PartNumber=1, **_body(b"5"))["ETag"]
        parts: Any = {"Parts": [{"PartNumber": 1, "ETag": part}]}
        complete = self.client.complete_multipart_upload
        found = self._sent(lambda: complete(**names, MultipartUpload=parts, IfMatch=quoted_etag(etag)))
        if found is not None:
            self.uploads.remove(upload_id)
        return found

    def _sent(self, call: Callable[[], Any]) -> str | None:
        try:
            answer = call()
        except botocore.exceptions.ClientError as exc:
            if _answer(exc)[0] in (404, 409, 412, 501):
                return None
            raise
        # "null" is the version of a bucket whose versioning is suspended: the next write replaces it.
        if answer.get("VersionId", "null") != "null":
            self.versions.add(answer["VersionId"])
        return bare_etag(answer["ETag"])


def _may_upload(client: "S3Client", bucket: str, key: str) -> bool:
    """Return whether the keys may send a part: of an upload that does not exist, so that nothing is stored."""
    try:
        with suppress(botocore.exceptions.BotoCoreError):
            client.upload_part(Bucket=bucket, Key=key, UploadId="none", PartNumber=1, **_body(b""))
    except botocore.exceptions.ClientError as exc:
        return _answer(exc) == (404, "NoSuchUpload")
    return False


def _answer(exc: botocore.exceptions.ClientError) -> tuple[int, str]:
    status = exc.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
    return status, exc.response.get("Error", {}).get("Code", "")
