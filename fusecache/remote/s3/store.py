"""The store for the S3 protocol: Cloudflare R2 first, any other S3 service as well.

Invariants:
1. Every body has a Content-Length and a Content-MD5 or a signed hash, never `aws-chunked`, a trailer, or `Expect`.
2. If a copy returns an ETag, the copy holds the bytes of the requested version.
"""

import base64
import hashlib
import re
import threading
import time
import uuid
import xml.etree.ElementTree as ET
from collections.abc import Mapping, Sequence
from contextlib import suppress
from email.utils import parsedate_to_datetime
from functools import partial
from pathlib import Path
from xml.sax.saxutils import escape

from fusecache.model.errors import (
    FusecacheError,
    ObjectChanged,
    ObjectMissing,
    Refused,
    RemoteError,
    Unavailable,
)
from fusecache.model.objects import ObjectId, ObjectInfo
from fusecache.remote.endpoints import NO_SETTINGS, Credentials, Endpoint, RequestSettings, Transport
from fusecache.remote.http.http_store import XML_NAMESPACE, XmlStore, text_of, whole_response
from fusecache.remote.http.put import part_query
from fusecache.remote.http.signed_requests import query_of
from fusecache.remote.protocol.headers import STANDARD_HEADERS, bare_etag, object_content, quoted_etag
from fusecache.remote.protocol.responses import ERROR_BY_CODE
from fusecache.remote.s3.condition_probe import ask_conditions, test_conditions
from fusecache.remote.s3.credentials import open_access
from fusecache.remote.store import PROBE_NAME, Condition, ConditionalWrites, FileSlice, ObjectContent

# Answers of stores that know no DeleteObjects, or not in this form.
_NO_BATCHES = frozenset(
    {"NotImplemented", "MethodNotAllowed", "MalformedXML", "InvalidRequest", "501", "405"}
)
# Characters that XML 1.0 cannot hold: such keys are deleted one by one.
_NOT_IN_XML = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\ufffe\uffff]")
_STORAGE_CLASS = "x-amz-storage-class"
# Uploads of a test of the conditions that began longer ago belong to a daemon that was killed.
_LEFT_BEHIND_SECONDS = 3600.0


class S3Store(XmlStore):
    """A `Store` on a bucket. Thread-safe; one connection pool.

    credentials: None uses the AWS chain (environment, files, profile, instance role), or the credentials_file.
    The constructor makes no request. Raises ConfigError, CredentialsMissing.
    """

    metadata_prefix = "x-amz-meta-"
    trusted_file = "AWS_CA_BUNDLE"

    def __init__(
        self,
        bucket: str,
        endpoint: Endpoint,
        *,
        credentials: Credentials | None = None,
        profile: str | None = None,
        credentials_file: Path | None = None,
        transport: Transport | None = None,
        settings: RequestSettings = NO_SETTINGS,
    ) -> None:
        self._endpoint = endpoint
        self._settings = settings
        self._transport = transport or Transport()
        self._open_access = partial(
            open_access,
            bucket,
            endpoint,
            credentials=credentials,
            profile=profile,
            credentials_file=credentials_file,
            settings=settings,
        )
        super().__init__(f"s3://{bucket}", self._open_access().http(self._transport))
        if endpoint.is_r2:
            self.conditional_writes = ConditionalWrites.KEPT
        self._has_batches = True
        self._reloading = threading.Lock()

    def reload(self) -> None:
        """Reload the credentials from their source; requests in flight keep the old ones.

        Raises ConfigError or CredentialsMissing if the source has none; then all requests keep the old ones.
        """
        with self._reloading:
            access = self._open_access()
            if access.kept_keys is not None:
                access.keys()
            before, self._http = self._http, access.http(self._transport)
            before.close()

    def content(self, key: str) -> ObjectContent:
        """Return size and checksums of an object, by a HEAD that asks for the checksums."""
        with self._named("HEAD", key, "heads") as what, whole_response(what):
            return object_content(
                self._http.call(what, "HEAD", key, {"x-amz-checksum-mode": "ENABLED"}).headers
            )

    def put(
        self, key: str, body: FileSlice, *, metadata: Mapping[str, str], condition: Condition | None = None
    ) -> str:
        """Store a whole object; return its ETag."""
        try:
            return super().put(key, body, metadata=metadata, condition=condition)
        except ObjectChanged:
            if condition is None or condition.etag is None or not self._is_version(key, condition.etag):
                raise
            return self._put_again(key, body, metadata, condition.etag)

    def _put_again(self, key: str, body: FileSlice, metadata: Mapping[str, str], etag: str) -> str:
        """The version matches, yet the bucket refuses: Ceph 16 compares If-Match with its quotes (seen on 16.2.15)."""
        headers = {**self._metadata_headers(metadata), "if-match": etag}
        try:
            return self._etag_of(key, self._send("PUT", key, "puts", body, headers))
        except ObjectChanged as exc:
            if not self._is_version(key, etag):
                raise
            self.conditional_writes = ConditionalWrites.REFUSED
            raise Refused(
                f"{self._place}/{key}: the store refuses If-Match although the object has that version, as older "
                "Ceph gateways do once a bucket has versioning; suspend versioning, or mount again with "
                "--conflict last-wins, then `fusecache recover --restore`"
            ) from exc

    def _is_version(self, key: str, etag: str) -> bool:
        try:
            return self.head(key).etag == etag
        except ObjectMissing:
            return False

    # ---- copies

    def copy(
        self,
        source: ObjectId,
        key: str,
        *,
        condition: Condition | None = None,
        metadata: Mapping[str, str] | None = None,
        size: int | None = None,
    ) -> str:
        """Copy inside the bucket if the source is still that version; return the new ETag.

        Sends a HEAD of the source first, unless nothing of the answer is needed: its size decides between one request
        and parts, and headers are lost if the metadata change.
        """
        headers = {} if metadata is None else self._metadata_headers(metadata)
        # A copy does not keep the storage class by itself. One HEAD a copy: other stores need it for the target.
        asks = self._endpoint.is_r2 or bool(self._settings.storage_class)
        if asks or metadata is not None or size is None or size > self._transport.single_copy_bytes:
            found = self._head(source.key)
            self._require_version(source.key, found, source.etag)
            # A store that has classes names that of every object but those of the standard one.
            storage_class = found.get(_STORAGE_CLASS) or ("STANDARD" if self._settings.storage_class else "")
            if storage_class:
                headers[_STORAGE_CLASS] = storage_class
            with whole_response(f"HEAD {self._place}/{source.key}"):
                size = int(found["content-length"])
            if size > self._transport.single_copy_bytes:
                kept = {} if metadata is not None else self._belonging(found)
                return self._copy_in_parts(source, key, size, condition, {**kept, **headers})
        headers |= {
            **self._copy_source(source.key),
            "x-amz-copy-source-if-match": quoted_etag(source.etag),
            "x-amz-metadata-directive": "COPY" if metadata is None else "REPLACE",
        }
        if condition is not None and self._endpoint.is_r2:
            name = "none-match" if condition.etag is None else "match"
            value = "*" if condition.etag is None else quoted_etag(condition.etag)
            headers[f"cf-copy-destination-if-{name}"] = value
        elif condition is not None:
            self._head_of_version(key, condition.etag)
        with self._named(f"COPY from {source.key!r}", key, "copies") as what, whole_response(what):
            return bare_etag(text_of(self._http.call(what, "PUT", key, headers).body, "ETag"))

    def _copy_in_parts(
        self, source: ObjectId, key: str, size: int, condition: Condition | None, headers: Mapping[str, str]
    ) -> str:
        upload_id = self._begin_upload(key, headers)
        try:
            etags = []
            step = self._transport.copy_part_bytes
            for number, start in enumerate(range(0, size, step), 1):
                extent = {"x-amz-copy-source-range": f"bytes={start}-{min(start + step, size) - 1}"}
                sent, query = {**self._copy_source(source.key), **extent}, part_query(upload_id, number)
                name = f"COPY PART {number} from {source.key!r}"
                with self._named(name, key, "copies") as what, whole_response(what):
                    reply = self._http.call(what, "PUT", key, sent, query=query)
                    etags.append(bare_etag(text_of(reply.body, "ETag")))
            # R2's part copies take no precondition on the source. The version is checked before the first part and
            # after the last, so every part is from that version.
            self._require_version(source.key, self._head(source.key), source.etag)
            if condition is not None:
                self._head_of_version(key, condition.etag)
            return self.complete_multipart(key, upload_id, etags, condition=condition)
        except FusecacheError:
            # Abandoned parts cost storage for a week. If the abort fails, raise the copy's error regardless.
            with suppress(RemoteError):
                self.abort_multipart(key, upload_id)
            raise

    def _copy_source(self, key: str) -> dict[str, str]:
        return {"x-amz-copy-source": self._http.path(key).removeprefix("/")}

    def _belonging(self, found: Mapping[str, str]) -> dict[str, str]:
        """Return what belongs to an object besides its bytes, as the response to a HEAD has it."""
        return {
            name: value
            for name, value in found.items()
            if name in STANDARD_HEADERS or name.startswith(self.metadata_prefix)
        }

    # ---- bulk deletes

    def delete_all(self, objects: Sequence[ObjectInfo]) -> dict[str, RemoteError]:
        """Delete up to 1 000 objects, S3's limit on one request; return the errors by key. A missing object is success.

        AWS, and Ceph since version 20, compare the ETag of each ("How to perform conditional deletes"). Cloudflare R2
        has no condition on deletes: callers list right before.
        ObjectChanged: the object is another version than `objects` has. Raises RemoteError if a whole batch fails.
        """
        failures: dict[str, RemoteError] = {}
        alone = [each for each in objects if not self._has_batches or _NOT_IN_XML.search(each.key)]
        batch = [each for each in objects if each not in alone] if alone else list(objects)
        if batch:
            try:
                failures = self._delete_batch(batch)
            except RemoteError as exc:
                if exc.code not in _NO_BATCHES:
                    raise
                self._has_batches = False
                alone = list(objects)
        for each in alone:
            try:
                self.delete(each.key)
            except RemoteError as exc:
                failures[each.key] = exc
        return failures

    def _delete_batch(self, batch: Sequence[ObjectInfo]) -> dict[str, RemoteError]:
        rows = "".join(map(self._delete_row, batch))
        body = f'<Delete xmlns="{XML_NAMESPACE}">{rows}<Quiet>true</Quiet></Delete>'.encode()
        digest = hashlib.md5(body, usedforsecurity=False).digest()
        headers = {"content-md5": base64.b64encode(digest).decode("ascii")}
        name = f"{batch[0].key} and {len(batch) - 1} more"
        failures: dict[str, RemoteError] = {}
        with self._named("DELETE", name, "deletes") as what, whole_response(what):
            reply = self._http.call(what, "POST", None, headers, query="delete=", body=body)
            for row in ET.fromstring(reply.body).iterfind("{*}Error"):
                key, code, message = (
                    row.findtext(f"{{*}}{each}") or "" for each in ("Key", "Code", "Message")
                )
                error = ERROR_BY_CODE.get(code, Unavailable)(f"DELETE {self._place}/{key}: {code}: {message}")
                if not isinstance(error, ObjectMissing):
                    failures[key] = error
        return failures

    def _delete_row(self, each: ObjectInfo) -> str:
        etag = "" if self._endpoint.is_r2 else f"<ETag>{escape(quoted_etag(each.etag))}</ETag>"
        return f"<Object><Key>{escape(each.key, {chr(13): '&#13;', chr(10): '&#10;'})}</Key>{etag}</Object>"

    # ---- the store's clock, and its conditions

    def server_time(self, prefix: str) -> float:
        """Return the store's clock in seconds since 1970, from the Date of a LIST."""
        query = query_of({"list-type": "2", "max-keys": "1", "prefix": prefix})
        with self._named("LIST", prefix, "lists") as what, whole_response(what):
            date = self._http.call(what, "GET", None, query=query).headers.get("date", "")
            return parsedate_to_datetime(date).timestamp()

    def probe_write(self, prefix: str) -> None:
        """Check that writing is allowed, by a write that must fail; leave nothing behind."""
        key = self._probe_key(prefix)
        with self._named("PUT", key, "puts") as what:
            found = ask_conditions(self._http, what, key)
        if not self._endpoint.is_r2:
            self.conditional_writes = found
        if found is ConditionalWrites.IGNORED:
            self.delete(key)

    def probe_conditions(self, prefix: str) -> ConditionalWrites:
        """Find out what the store does with the conditions of writes; leave nothing behind.

        R2 keeps them: that is documented.
        """
        if not self._endpoint.is_r2:
            with suppress(RemoteError):
                if self.conditional_writes is ConditionalWrites.UNKNOWN:
                    self.probe_write(prefix)
                if self.conditional_writes is ConditionalWrites.KEPT:
                    self.conditional_writes = ConditionalWrites.UNKNOWN
                    key = self._probe_key(prefix)
                    try:
                        with self._named("TEST CONDITIONS", key, "puts") as what:
                            self.conditional_writes = test_conditions(self._http, what, key)
                    finally:
                        # Those whose answers were lost, or whose daemon was killed: nothing else knows their ids.
                        for each in self.list_uploads(prefix + PROBE_NAME).uploads:
                            if each.key.startswith(key) or each.begun < time.time() - _LEFT_BEHIND_SECONDS:
                                self.abort_multipart(each.key, each.upload_id)
        return self.conditional_writes

    def _probe_key(self, prefix: str) -> str:
        return f"{prefix}{PROBE_NAME}{uuid.uuid4().hex}"

    def _conditions(self, key: str, condition: Condition | None) -> dict[str, str]:
        if condition is None or not self._sends_conditions:
            return {}
        return {"if-none-match": "*"} if condition.etag is None else {"if-match": quoted_etag(condition.etag)}

    def _conditions_of_parts(self, key: str, condition: Condition | None) -> dict[str, str]:
        is_kept = self.conditional_writes is not ConditionalWrites.NOT_OF_PARTS
        return self._conditions(key, condition) if is_kept else {}
