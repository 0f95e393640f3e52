"""Finds out what the keys may do, and what an S3 store does with the preconditions of writes.

`ask_conditions` sends one write, which must fail, so that it leaves nothing behind even if its answer is lost.
`test_conditions` needs two objects, and some 15 requests: once for each bucket, as a store's answer may depend on the
bucket's versioning (Ceph 16.2.15 refuses every If-Match of a PUT then, and ignores those of uploads in parts).
"""

import base64
import hashlib
import time
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

# Of one key, as R2 allows (developers.cloudflare.com/r2/platform/limits).
_WRITE_INTERVAL_SECONDS = 1.0
_THROTTLED_MAX = 3


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
    """Write two small objects with true and false conditions, in one request and in parts; remove them again.

    key: their keys begin with it; of no object. Each is written once and replaced once. Raises ClientError,
    BotoCoreError if a request fails for another reason than its condition.
    """
    whole, in_parts = (_Object(client, bucket, f"{key}-{number}") for number in (1, 2))
    try:
        return _found(whole, in_parts)
    finally:
        whole.remove()
        in_parts.remove()


def _found(whole: "_Object", in_parts: "_Object") -> ConditionalWrites:
    none = condition_arguments(Condition(None))
    first, other = whole.put(b"1", none), in_parts.put(b"2", none)
    if first is None or other is None:
        return ConditionalWrites.REFUSED
    if whole.put(b"3", none) is not None or whole.put(b"3", {"IfMatch": quoted_etag(other)}) is not None:
        return ConditionalWrites.IGNORED
    is_false_refused = in_parts.put_in_parts(first) is None
    # Ceph 16 compares If-Match with its quotes.
    if (
        whole.put(b"4", {"IfMatch": quoted_etag(first)}) is None
        and whole.put(b"4", {"IfMatch": first}) is None
    ):
        return ConditionalWrites.REFUSED
    is_kept = is_false_refused and in_parts.put_in_parts(other) is not None
    return ConditionalWrites.KEPT if is_kept else ConditionalWrites.NOT_OF_PARTS


@dataclass(slots=True)
class _Object:
    client: "S3Client"
    bucket: str
    key: str
    # Of a bucket with versioning: a DELETE of each removes all of the object.
    versions: set[str] = field(default_factory=set)
    uploads: list[str] = field(default_factory=list)
    may_have_more: bool = False  # a request failed, or it has no versions

    def put(self, data: bytes, condition: dict[str, Any]) -> str | None:
        """Return the ETag of the object; None if the condition was refused."""
        put = partial(self.client.put_object, **self._names(), **_body(data))
        return self._sent(partial(put, **condition))

    def put_in_parts(self, etag: str) -> str | None:
        """As `put`, with If-Match, by an upload in parts."""
        upload_id = self.client.create_multipart_upload(**self._names())["UploadId"]
        self.uploads.append(upload_id)
        names: Any = {**self._names(), "UploadId": upload_id}
        part = self.client.upload_part(**names, PartNumber=1, **_body(b"5"))["ETag"]
        parts: Any = {"Parts": [{"PartNumber": 1, "ETag": part}]}
        complete = partial(self.client.complete_multipart_upload, **names, MultipartUpload=parts)
        found = self._sent(partial(complete, IfMatch=quoted_etag(etag)))
        if found is not None:
            self.uploads.remove(upload_id)
        return found

    def remove(self) -> None:
        """Remove all that may be there; failures are no reason to stop a mount."""
        for upload_id in self.uploads:
            self._try(partial(self.client.abort_multipart_upload, UploadId=upload_id))
        for version in self.versions:
            # Not all keys may delete versions.
            self.may_have_more |= not self._try(partial(self.client.delete_object, VersionId=version))
        if self.may_have_more:
            self._try(self.client.delete_object)

    def _names(self) -> Any:
        return {"Bucket": self.bucket, "Key": self.key}

    def _try(self, call: Callable[..., Any]) -> bool:
        try:
            _patiently(partial(call, **self._names()))
        except (botocore.exceptions.ClientError, botocore.exceptions.BotoCoreError):
            return False
        return True

    def _sent(self, call: Callable[[], Any]) -> str | None:
        before, self.may_have_more = self.may_have_more, True
        try:
            answer = _patiently(call)
        except botocore.exceptions.ClientError as exc:
            if _answer(exc)[0] not in (404, 409, 412, 501):
                raise
            self.may_have_more = before
            return None
        # "null" is the version of a bucket whose versioning is suspended: the next write replaces it.
        if answer.get("VersionId", "null") != "null":
            self.versions.add(answer["VersionId"])
            self.may_have_more = before
        return bare_etag(answer["ETag"])


def _patiently(call: Callable[[], Any]) -> Any:
    """Make a request, again while the store says that the key is written too often: R2 takes one write a second."""
    for _ in range(_THROTTLED_MAX):
        try:
            return call()
        except botocore.exceptions.ClientError as exc:
            if _answer(exc)[0] not in (429, 503):
                raise
            time.sleep(_WRITE_INTERVAL_SECONDS)
    return call()


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
