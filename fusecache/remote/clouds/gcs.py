"""The store for Google Cloud Storage, over its XML API: S3's requests with other headers.

Writes take no ETag as a precondition, but the generation, a number of each version. A HEAD finds the generation that
belongs to an ETag. The completion of a multipart upload takes none at all: a HEAD checks it first, not atomic.
"""

import xml.etree.ElementTree as ET
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from types import MappingProxyType
from urllib.parse import quote, urlencode

from fusecache.model.errors import ObjectChanged, ObjectMissing, UploadLost
from fusecache.model.objects import ObjectId, UnfinishedUpload
from fusecache.remote.clouds.store import CloudStore, whole_response
from fusecache.remote.http.put import part_query
from fusecache.remote.http.signed_requests import xml_element
from fusecache.remote.protocol.headers import bare_etag, quoted_etag
from fusecache.remote.protocol.list_response import parse_listing
from fusecache.remote.store import Condition, ConditionalWrites, FileSlice, ListPage, UploadPage

_GENERATION = "x-goog-generation"
_IF_GENERATION = "x-goog-if-generation-match"


class GcsStore(CloudStore):
    """A `Store` on a bucket of Google Cloud Storage. Thread-safe."""

    metadata_prefix = "x-goog-meta-"
    impossible = MappingProxyType({_IF_GENERATION: "1"})
    promise = ConditionalWrites.NOT_OF_PARTS

    def list_page(
        self,
        prefix: str,
        *,
        delimiter: str = "",
        token: str | None = None,
        start_after: str = "",
        limit: int = 1000,
    ) -> ListPage:
        """Return one page of the objects whose keys start with `prefix`."""
        chosen = {
            "prefix": prefix,
            "delimiter": delimiter,
            "continuation-token": token,
            "start-after": start_after,
        }
        query = _query({"list-type": "2", "max-keys": str(limit), **{k: v for k, v in chosen.items() if v}})
        with self._named("LIST", prefix, "lists") as what, whole_response(what):
            try:
                return parse_listing(self._http.call(what, "GET", query=query).body)
            except ValueError:  # a key holds characters that XML cannot
                return parse_listing(self._http.call(what, "GET", query=f"{query}&encoding-type=url").body)

    def create_multipart(self, key: str, *, metadata: Mapping[str, str]) -> str:
        """Begin a multipart upload; return its UploadId."""
        with self._named("CREATE UPLOAD", key, "creates") as what, whole_response(what):
            headers = self._metadata_headers(metadata)
            return _text(self._http.call(what, "POST", key, headers, query="uploads=").body, "UploadId")

    def upload_part(self, key: str, upload_id: str, number: int, body: FileSlice) -> str:
        """Store part `number` (from 1); return its ETag."""
        query = part_query(upload_id, number)
        return self._etag_of(key, self._send(f"PUT PART {number}", key, "parts", body, {}, query))

    def complete_multipart(
        self, key: str, upload_id: str, part_etags: Sequence[str], *, condition: Condition | None = None
    ) -> str:
        """Publish parts 1..n; return the object's ETag."""
        if condition is not None and self._sends_conditions:
            self._generation(key, condition.etag)
        parts = "".join(
            f"<Part><PartNumber>{number}</PartNumber><ETag>{quoted_etag(etag)}</ETag></Part>"
            for number, etag in enumerate(part_etags, 1)
        )
        body = f"<CompleteMultipartUpload>{parts}</CompleteMultipartUpload>".encode()
        with self._named("COMPLETE UPLOAD", key, "completes") as what, whole_response(what):
            reply = self._http.call(what, "POST", key, query=_query({"uploadId": upload_id}), body=body)
            return bare_etag(_text(reply.body, "ETag"))

    def abort_multipart(self, key: str, upload_id: str) -> None:
        """Drop an upload and its parts. An unknown upload is success."""
        with suppress(UploadLost, ObjectMissing), self._named("ABORT UPLOAD", key, "aborts") as what:
            self._http.call(what, "DELETE", key, query=_query({"uploadId": upload_id}))

    def list_uploads(self, prefix: str, *, token: str | None = None) -> UploadPage:
        """Return one page of the unfinished uploads whose keys start with `prefix`."""
        query = f"uploads=&{_query({'prefix': prefix})}" + (f"&{token}" if token else "")
        with self._named("LIST UPLOADS", prefix, "lists") as what, whole_response(what):
            root = ET.fromstring(self._http.call(what, "GET", query=query).body)
            uploads = tuple(
                UnfinishedUpload(
                    row.findtext("{*}Key") or "",
                    row.findtext("{*}UploadId") or "",
                    datetime.fromisoformat(row.findtext("{*}Initiated") or "").timestamp(),
                )
                for row in root.iterfind("{*}Upload")
            )
            if root.findtext("{*}IsTruncated") != "true":
                return UploadPage(uploads, None)
            names = {"key-marker": "NextKeyMarker", "upload-id-marker": "NextUploadIdMarker"}
            return UploadPage(
                uploads, _query({name: root.findtext(f"{{*}}{tag}") or "" for name, tag in names.items()})
            )

    def copy(
        self,
        source: ObjectId,
        key: str,
        *,
        condition: Condition | None = None,
        metadata: Mapping[str, str] | None = None,
        size: int | None = None,
    ) -> str:
        """Copy inside the bucket if the source is still that version; return the new ETag."""
        found = self._head(source.key)
        self._require_version(source.key, found, source.etag)
        headers = {
            "x-goog-copy-source": self._http.path(source.key).removeprefix("/"),
            "x-goog-metadata-directive": "COPY",
            **self._conditions(key, condition),
        }
        if metadata is not None:
            headers |= {"x-goog-metadata-directive": "REPLACE", **self._metadata_headers(metadata)}
        with self._named(f"COPY from {source.key!r}", key, "copies") as what, whole_response(what):
            headers["x-goog-copy-source-if-generation-match"] = found[_GENERATION]
            return bare_etag(_text(self._http.call(what, "PUT", key, headers).body, "ETag"))

    # ---- private

    def _conditions(self, key: str, condition: Condition | None) -> dict[str, str]:
        if condition is None or not self._sends_conditions:
            return {}
        return {_IF_GENERATION: "0" if condition.etag is None else self._generation(key, condition.etag)}

    def _generation(self, key: str, etag: str | None) -> str:
        """Return the generation of a version; "0" for None: no object. Raises ObjectChanged if there is another."""
        try:
            found = self._head(key)
        except ObjectMissing as exc:
            if etag is None:
                return "0"
            raise ObjectChanged(f"{self._place}/{key} no longer exists: not replaced") from exc
        self._require_version(key, found, etag)
        with whole_response(f"HEAD {self._place}/{key}"):
            return found[_GENERATION]

    def _require_version(self, key: str, found: Mapping[str, str], etag: str | None) -> None:
        there = self._etag_of(key, found)
        if there != etag:
            raise ObjectChanged(f"{self._place}/{key}: expected {etag or 'none'}, found {there}")


def _query(chosen: Mapping[str, str]) -> str:
    return urlencode(chosen, quote_via=quote)


def _text(body: bytes, name: str) -> str:
    """Return the text of an element. Raises ValueError."""
    found = xml_element(name, body.decode("utf-8", "replace"))
    if not found:
        raise ValueError(name)
    return found
