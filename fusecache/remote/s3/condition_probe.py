"""Finds out what the keys may do, and what an S3 store does with the preconditions of writes.

`ask_conditions` sends one write, which must fail, so that it leaves nothing behind even if its answer is lost.
`test_conditions` needs two objects, and some 15 requests: once for each bucket, as a store's answer may depend on the
bucket's versioning (Ceph 16.2.15 refuses every If-Match of a PUT then, and ignores those of uploads in parts).
"""

import base64
import hashlib
import time
from collections.abc import Mapping
from dataclasses import dataclass, field

from fusecache.model.errors import BucketMissing, ObjectMissing, RemoteError, UploadLost
from fusecache.remote.http.http_store import completion, text_of
from fusecache.remote.http.put import part_query
from fusecache.remote.http.signed_requests import Reply, SignedHttp, query_of
from fusecache.remote.protocol.headers import bare_etag, quoted_etag
from fusecache.remote.store import ConditionalWrites

# Of one key, as R2 allows (developers.cloudflare.com/r2/platform/limits).
_WRITE_INTERVAL_SECONDS = 1.0
_THROTTLED_MAX = 3
_NONE = {"if-none-match": "*"}


def ask_conditions(http: SignedHttp, what: str, key: str) -> ConditionalWrites:
    """Write an empty object that must be refused. key: of no object; if the condition is IGNORED, it is one then.

    KEPT: a false If-Match was refused; whether a true one is accepted is not known.
    Raises RemoteError if the keys may not write.
    """
    place = _Object(http, what, key, throttled_max=0)
    try:
        # Of an object that does not exist: no ETag matches.
        place.send("PUT", _match("0" * 32), data=b"")
    except RemoteError as exc:
        # AWS answers 404 for an object that is not there.
        if exc.status in (404, 409, 412) and not isinstance(exc, BucketMissing):
            return ConditionalWrites.KEPT
        # A store without conditions. AWS answers 403 to keys that may write but not read: they cannot compare ETags.
        if exc.status in (403, 501) and place.may_upload():
            return ConditionalWrites.REFUSED if exc.status == 501 else ConditionalWrites.UNKNOWN
        raise
    return ConditionalWrites.IGNORED


def test_conditions(http: SignedHttp, what: str, key: str) -> ConditionalWrites:
    """Write two small objects with true and false conditions, in one request and in parts; remove them again.

    key: their keys begin with it; of no object. Each is written once and replaced once. Raises RemoteError if a request
    fails for another reason than its condition.
    """
    whole, in_parts = (_Object(http, what, f"{key}-{number}") for number in (1, 2))
    try:
        return _found(whole, in_parts)
    finally:
        whole.remove()
        in_parts.remove()


def _found(whole: "_Object", in_parts: "_Object") -> ConditionalWrites:
    first, other = whole.put(b"1", _NONE, is_true=True), in_parts.put(b"2", _NONE, is_true=True)
    if first is None or other is None:
        return ConditionalWrites.REFUSED
    if whole.put(b"3", _NONE) is not None or whole.put(b"3", _match(other)) is not None:
        return ConditionalWrites.IGNORED
    is_false_refused = not in_parts.is_put_in_parts(first, is_true=False)
    # Ceph 16 compares If-Match with its quotes.
    ways = (_match(first), {"if-match": first})
    if all(whole.put(b"4", each, is_true=True) is None for each in ways):
        return ConditionalWrites.REFUSED
    is_kept = is_false_refused and in_parts.is_put_in_parts(other, is_true=True)
    return ConditionalWrites.KEPT if is_kept else ConditionalWrites.NOT_OF_PARTS


@dataclass(slots=True)
class _Object:
    http: SignedHttp
    what: str
    key: str
    # Of a bucket with versioning: a DELETE of each removes all of the object.
    versions: set[str] = field(default_factory=set)
    uploads: list[str] = field(default_factory=list)
    may_have_more: bool = False  # a request failed, or it has no versions
    throttled_max: int = _THROTTLED_MAX

    def put(self, data: bytes, condition: Mapping[str, str], *, is_true: bool = False) -> str | None:
        """Return the ETag of the object; None if the condition was refused."""
        reply = self._written("PUT", condition, data=data)
        if reply is None and is_true:
            reply = self._stored(data)
        return None if reply is None else bare_etag(reply.headers["etag"])

    def is_put_in_parts(self, etag: str, *, is_true: bool) -> bool:
        """Replace that version by an upload in parts; return whether the condition was met."""
        upload_id = text_of(self.send("POST", {}, query="uploads=").body, "UploadId")
        self.uploads.append(upload_id)
        part = self.send("PUT", {}, query=part_query(upload_id, 1), data=b"5").headers["etag"]
        query, body = query_of({"uploadId": upload_id}), completion([bare_etag(part)])
        reply = self._written("POST", _match(etag), query=query, data=body)
        if reply is None and not (is_true and self._stored(b"5")):
            return False
        self.uploads.remove(upload_id)
        return True

    def remove(self) -> None:
        """Remove all that may be there; failures are no reason to stop a mount."""
        for upload_id in self.uploads:
            self._delete(uploadId=upload_id)
        for version in self.versions:
            # Not all keys may delete versions.
            self.may_have_more |= not self._delete(versionId=version)
        if self.may_have_more:
            self._delete()

    def may_upload(self) -> bool:
        """Return whether the keys may send a part: of an upload that does not exist, so that nothing is stored."""
        try:
            self.send("PUT", {}, query=part_query("none", 1), data=b"")
        except RemoteError as exc:
            return isinstance(exc, UploadLost)
        return False

    def send(self, method: str, headers: Mapping[str, str], *, query: str = "", data: bytes = b"") -> Reply:
        """Send a request, again while the store says that the key is written too often."""
        digest = base64.b64encode(hashlib.md5(data, usedforsecurity=False).digest()).decode("ascii")
        if method == "PUT":
            headers = {**headers, "content-md5": digest}
        for _ in range(self.throttled_max):
            try:
                return self.http.call(self.what, method, self.key, headers, query=query, body=data)
            except RemoteError as exc:
                if exc.status not in (429, 503):
                    raise
                time.sleep(_WRITE_INTERVAL_SECONDS)
        return self.http.call(self.what, method, self.key, headers, query=query, body=data)

    def _written(
        self, method: str, condition: Mapping[str, str], *, query: str = "", data: bytes
    ) -> Reply | None:
        """Send a request that makes a version; return None if its condition was refused."""
        before, self.may_have_more = self.may_have_more, True
        try:
            reply = self.send(method, condition, query=query, data=data)
        except RemoteError as exc:
            if exc.status not in (404, 409, 412, 501):
                raise
            self.may_have_more = before
            return None
        # "null" is the version of a bucket whose versioning is suspended: the next write replaces it.
        if (version := reply.headers.get("x-amz-version-id", "null")) != "null":
            self.versions.add(version)
            self.may_have_more = before
        return reply

    def _stored(self, data: bytes) -> Reply | None:
        """Return the object if it holds these bytes: the first answer was lost, and the repeated request refused."""
        try:
            found = self.http.call(self.what, "GET", self.key)
        except ObjectMissing:
            return None
        self.may_have_more |= found.body == data
        return found if found.body == data else None

    def _delete(self, **query: str) -> bool:
        try:
            self.send("DELETE", {}, query=query_of(query))
        except RemoteError:
            return False
        return True


def _match(etag: str) -> dict[str, str]:
    return {"if-match": quoted_etag(etag)}
