"""Finds out what the keys may do, and what an S3 store does with the preconditions of writes.

`ask_conditions` sends one write, which must fail, so that it leaves nothing behind even if its answer is lost.
`test_conditions` needs an object, and a dozen requests: once for each bucket, as a store's answer may depend on the
bucket's versioning (Ceph 16.2.15 refuses every If-Match of a PUT then, and ignores those of uploads in parts).
"""

import base64
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field

from fusecache.model.errors import BucketMissing, RemoteError, UploadLost
from fusecache.remote.http.put import part_query
from fusecache.remote.http.signed_requests import Reply, SignedHttp, query_of
from fusecache.remote.http.xml_store import completion, text_of
from fusecache.remote.protocol.headers import bare_etag, quoted_etag
from fusecache.remote.store import ConditionalWrites

_NONE = {"if-none-match": "*"}
# Statuses of answers to a condition.
_REFUSALS = (404, 409, 412, 501)


def ask_conditions(http: SignedHttp, what: str, key: str) -> ConditionalWrites:
    """Write an empty object that must be refused. key: of no object; if the condition is IGNORED, it is one then.

    KEPT: a false If-Match was refused; whether a true one is accepted is not known.
    Raises RemoteError if the keys may not write.
    """
    try:
        # Of an object that does not exist: no ETag matches.
        _put(http, what, key, b"", {"if-match": quoted_etag("0" * 32)})
    except RemoteError as exc:
        # AWS answers 404 for an object that is not there.
        if exc.status in (404, 409, 412) and not isinstance(exc, BucketMissing):
            return ConditionalWrites.KEPT
        # A store without conditions. AWS answers 403 to keys that may write but not read: they cannot compare ETags.
        if exc.status in (403, 501) and _may_upload(http, what, key):
            return ConditionalWrites.REFUSED if exc.status == 501 else ConditionalWrites.UNKNOWN
        raise
    return ConditionalWrites.IGNORED


def test_conditions(http: SignedHttp, what: str, key: str) -> ConditionalWrites:
    """Write a small object with true and false conditions, in one request and in parts; remove it again.

    key: of no object. Raises RemoteError if a request fails for another reason than its condition.
    """
    test = _Test(http, what, key)
    try:
        return test.run()
    finally:
        test.remove()


@dataclass(slots=True)
class _Test:
    http: SignedHttp
    what: str
    key: str
    # Of a bucket with versioning: a DELETE of each removes all of the object.
    versions: set[str] = field(default_factory=set)
    uploads: list[str] = field(default_factory=list)

    def run(self) -> ConditionalWrites:
        first = self._put(b"1", _NONE)
        if first is None:
            return ConditionalWrites.REFUSED
        if self._put(b"2", _NONE) is not None:
            return ConditionalWrites.IGNORED
        # Ceph 16 compares If-Match with its quotes.
        second = self._put(b"3", {"if-match": quoted_etag(first)}) or self._put(b"3", {"if-match": first})
        if second is None:
            return ConditionalWrites.REFUSED
        if self._put(b"4", {"if-match": quoted_etag(first)}) is not None:
            return ConditionalWrites.IGNORED
        is_kept = not self._puts_in_parts(first) and self._puts_in_parts(second)
        return ConditionalWrites.KEPT if is_kept else ConditionalWrites.NOT_OF_PARTS

    def remove(self) -> None:
        """Remove what is there now; failures are no reason to stop a mount."""
        for upload_id in self.uploads:
            self._delete(uploadId=upload_id)
        removed = [self._delete(versionId=each) for each in self.versions]
        if not removed or not all(removed):  # not all keys may delete versions
            self._delete()

    def _delete(self, **query: str) -> bool:
        try:
            self.http.call(self.what, "DELETE", self.key, query=query_of(query))
        except RemoteError:
            return False
        return True

    def _put(self, data: bytes, condition: Mapping[str, str]) -> str | None:
        """Return the ETag of the object; None if the condition was refused."""
        try:
            reply = _put(self.http, self.what, self.key, data, condition)
        except RemoteError as exc:
            if exc.status not in _REFUSALS:
                raise
            return None
        self._remember(reply)
        return bare_etag(reply.headers["etag"])

    def _puts_in_parts(self, etag: str) -> bool:
        """Return whether an upload in parts replaces that version."""
        begun = self.http.call(self.what, "POST", self.key, query="uploads=")
        upload_id = text_of(begun.body, "UploadId")
        self.uploads.append(upload_id)
        part = _put(self.http, self.what, self.key, b"5", query=part_query(upload_id, 1)).headers["etag"]
        condition, query = {"if-match": quoted_etag(etag)}, query_of({"uploadId": upload_id})
        try:
            reply = self.http.call(
                self.what, "POST", self.key, condition, query=query, body=completion([bare_etag(part)])
            )
        except RemoteError as exc:
            if exc.status not in _REFUSALS:
                raise
            return False
        self.uploads.remove(upload_id)
        self._remember(reply)
        return True

    def _remember(self, reply: Reply) -> None:
        # "null" is the version of a bucket whose versioning is suspended: the next write replaces it.
        version = reply.headers.get("x-amz-version-id", "null")
        if version != "null":
            self.versions.add(version)


def _put(
    http: SignedHttp,
    what: str,
    key: str,
    data: bytes,
    headers: Mapping[str, str] | None = None,
    query: str = "",
) -> Reply:
    digest = hashlib.md5(data, usedforsecurity=False).digest()
    md5 = {"content-md5": base64.b64encode(digest).decode("ascii")}
    return http.call(what, "PUT", key, {**(headers or {}), **md5}, query=query, body=data)


def _may_upload(http: SignedHttp, what: str, key: str) -> bool:
    """Return whether the keys may send a part: of an upload that does not exist, so that nothing is stored."""
    try:
        _put(http, what, key, b"", query=part_query("none", 1))
    except RemoteError as exc:
        return isinstance(exc, UploadLost)
    return False
