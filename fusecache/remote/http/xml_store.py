"""What the XML APIs of S3 and of Google Cloud Storage have in common: lists, and uploads in parts."""

import json
import xml.etree.ElementTree as ET
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from urllib.parse import unquote_plus

from fusecache.model.errors import ObjectChanged, ObjectMissing, UploadLost
from fusecache.model.objects import UnfinishedUpload
from fusecache.remote.http.http_store import HttpStore, whole_response
from fusecache.remote.http.put import part_query
from fusecache.remote.http.signed_requests import query_of
from fusecache.remote.protocol.headers import bare_etag, multipart_etag, quoted_etag
from fusecache.remote.protocol.list_response import parse_listing
from fusecache.remote.store import Condition, FileSlice, ListPage, UploadPage

XML_NAMESPACE = "http://s3.amazonaws.com/doc/2006-03-01/"


class XmlStore(HttpStore):
    """The shared part of the stores with an XML API. Thread-safe."""

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
            "continuation-token": token,
            "delimiter": delimiter,
            # XML cannot hold all characters of keys.
            "encoding-type": "url",
            "list-type": "2",
            "max-keys": str(limit),
            "prefix": prefix,
            "start-after": start_after,
        }
        query = query_of({name: value for name, value in chosen.items() if value})
        with self._named("LIST", prefix, "lists") as what, whole_response(what):
            return parse_listing(self._http.call(what, "GET", None, query=query).body)

    def create_multipart(self, key: str, *, metadata: Mapping[str, str]) -> str:
        """Begin a multipart upload; return its UploadId."""
        return self._begin_upload(key, self._metadata_headers(metadata))

    def upload_part(self, key: str, upload_id: str, number: int, body: FileSlice) -> str:
        """Store part `number` (from 1); return its ETag."""
        query = part_query(upload_id, number)
        return self._etag_of(key, self._send(f"PUT PART {number}", key, "parts", body, {}, query))

    def complete_multipart(
        self, key: str, upload_id: str, part_etags: Sequence[str], *, condition: Condition | None = None
    ) -> str:
        """Publish parts 1..n; return the object's ETag."""
        headers = self._conditions_of_parts(key, condition)
        query = query_of({"uploadId": upload_id})
        with self._named("COMPLETE UPLOAD", key, "completes") as what, whole_response(what):
            reply = self._http.call(what, "POST", key, headers, query=query, body=completion(part_etags))
            # Ceph 16 leaves the ETag empty (seen on 16.2.15).
            return bare_etag(text_of(reply.body, "ETag")) or multipart_etag(part_etags)

    def abort_multipart(self, key: str, upload_id: str) -> None:
        """Drop an upload and its parts. An unknown upload is success."""
        query = query_of({"uploadId": upload_id})
        with suppress(UploadLost, ObjectMissing), self._named("ABORT UPLOAD", key, "aborts") as what:
            self._http.call(what, "DELETE", key, query=query)

    def list_uploads(self, prefix: str, *, token: str | None = None) -> UploadPage:
        """Return one page of the unfinished uploads whose keys start with `prefix`."""
        chosen = {"uploads": "", "prefix": prefix, **({} if token is None else json.loads(token))}
        key_of: Callable[[str], str] = str
        with self._named("LIST UPLOADS", prefix, "lists") as what, whole_response(what):
            try:
                root = ET.fromstring(self._http.call(what, "GET", None, query=query_of(chosen)).body)
            except ET.ParseError:
                # A key holds characters that XML cannot. Not asked for at once: Ceph encodes without saying so.
                chosen, key_of = {**chosen, "encoding-type": "url"}, unquote_plus
                root = ET.fromstring(self._http.call(what, "GET", None, query=query_of(chosen)).body)
            uploads = tuple(
                UnfinishedUpload(
                    key_of(row.findtext("{*}Key") or ""),
                    row.findtext("{*}UploadId") or "",
                    datetime.fromisoformat(row.findtext("{*}Initiated") or "").timestamp(),
                )
                for row in root.iterfind("{*}Upload")
            )
            if root.findtext("{*}IsTruncated") != "true":
                return UploadPage(uploads, None)
            markers = {
                "key-marker": key_of(root.findtext("{*}NextKeyMarker") or ""),
                "upload-id-marker": root.findtext("{*}NextUploadIdMarker") or "",
            }
            return UploadPage(uploads, json.dumps(markers))

    # ---- for the stores

    def _conditions_of_parts(self, key: str, condition: Condition | None) -> dict[str, str]:
        """Return the headers for the precondition of an upload's end. Raises ObjectChanged."""
        raise NotImplementedError

    def _require_version(self, key: str, found: Mapping[str, str], etag: str | None) -> None:
        there = self._etag_of(key, found)
        if there != etag:
            raise ObjectChanged(f"{self._place}/{key}: expected {etag or 'none'}, found {there}")

    def _head_of_version(self, key: str, etag: str | None) -> Mapping[str, str] | None:
        """Return what a HEAD says of a version; None for None: no object. Raises ObjectChanged for another version.

        It takes the place of a precondition, where a request has none. Not atomic.
        """
        try:
            found = self._head(key)
        except ObjectMissing as exc:
            if etag is None:
                return None
            raise ObjectChanged(f"{self._place}/{key} no longer exists: not replaced") from exc
        self._require_version(key, found, etag)
        return found

    def _begin_upload(self, key: str, headers: Mapping[str, str]) -> str:
        with self._named("CREATE UPLOAD", key, "creates") as what, whole_response(what):
            return text_of(self._http.call(what, "POST", key, headers, query="uploads=").body, "UploadId")


def completion(part_etags: Sequence[str]) -> bytes:
    """Return the body of the request that publishes parts 1..n."""
    parts = "".join(
        f"<Part><PartNumber>{number}</PartNumber><ETag>{quoted_etag(etag)}</ETag></Part>"
        for number, etag in enumerate(part_etags, 1)
    )
    return f'<CompleteMultipartUpload xmlns="{XML_NAMESPACE}">{parts}</CompleteMultipartUpload>'.encode()


def text_of(body: bytes, name: str) -> str:
    """Return the text of an element. Raises ValueError or SyntaxError if it is missing."""
    found = ET.fromstring(body.strip()).find(f".//{{*}}{name}")
    if found is None:
        raise ValueError(name)
    return found.text or ""
