"""The store for Azure Blob Storage: block blobs, over its REST API.

Azure has no upload ids. Parts are blocks of a blob that is not committed yet, and the commit names them. So an upload
id is made here: it identifies the blocks, and carries the metadata, which the commit needs. A block's name holds the
MD5 of its bytes. Blocks that no commit names disappear after a week; they cannot be listed or dropped.
"""

import base64
import binascii
import json
import time
import uuid
import xml.etree.ElementTree as ET
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from email.utils import formatdate, parsedate_to_datetime
from types import MappingProxyType
from urllib.parse import quote, unquote, urlencode

from fusecache.model.errors import AccessDenied, Refused, Unavailable, UploadLost
from fusecache.model.objects import STANDARD, ObjectId, ObjectInfo
from fusecache.remote.http.http_store import HttpStore, whole_response
from fusecache.remote.http.put import SliceBody
from fusecache.remote.protocol.headers import bare_etag, quoted_etag
from fusecache.remote.store import Condition, FileSlice, ListPage, UploadPage

_VERSION = "2023-11-03"
# Azure copies inside an account at once; if it ever says `pending`, a copy may take this long.
_COPY_SECONDS = 60.0
_COPY_POLL_SECONDS = 0.5


def common_headers() -> dict[str, str]:
    """Return the headers of every request."""
    return {"x-ms-date": formatdate(usegmt=True), "x-ms-version": _VERSION}


class AzureStore(HttpStore):
    """A `Store` on a container of Azure Blob Storage. Thread-safe."""

    metadata_prefix = "x-ms-meta-"
    hyphen = "_"  # Azure's names of metadata are identifiers
    standard_prefix = "x-ms-blob-"
    object_headers = MappingProxyType({"x-ms-blob-type": "BlockBlob"})
    impossible = MappingProxyType({"if-match": '"0x0"'})
    _is_flat = False

    def list_page(
        self,
        prefix: str,
        *,
        delimiter: str = "",
        token: str | None = None,
        start_after: str = "",
        limit: int = 1000,
    ) -> ListPage:
        """Return one page of the objects whose keys start with `prefix`. It may be empty, and have a next page.

        Azure takes no start_after: a token repeats it, and the names before it are dropped here.
        """
        self._require_flat()
        marker = ""
        if token is not None:
            marker, start_after = json.loads(token)
        query = {"restype": "container", "comp": "list", "maxresults": str(limit), "prefix": prefix}
        query |= {"delimiter": delimiter} if delimiter else {}
        query |= {"marker": marker} if marker else {}
        with self._named("LIST", prefix, "lists") as what, whole_response(what):
            reply = self._http.call(what, "GET", None, query=urlencode(query, quote_via=quote))
            root = ET.fromstring(reply.body)
            objects = (_object(row) for row in root.iterfind("Blobs/Blob"))
            prefixes = (_name(row) for row in root.iterfind("Blobs/BlobPrefix"))
            following = root.findtext("NextMarker")
            return ListPage(
                tuple(each for each in objects if each.key > start_after),
                tuple(each for each in prefixes if each > start_after),
                json.dumps([following, start_after]) if following else None,
            )

    def create_multipart(self, key: str, *, metadata: Mapping[str, str]) -> str:
        """Return a new upload id, without a request."""
        facts = {"id": uuid.uuid4().hex, "metadata": self._metadata_headers(metadata)}
        return base64.urlsafe_b64encode(json.dumps(facts).encode()).decode("ascii")

    def upload_part(self, key: str, upload_id: str, number: int, body: FileSlice) -> str:
        """Store part `number` (from 1); return the MD5 of its bytes."""
        upload, _ = _upload(key, upload_id)
        with SliceBody(body) as stream:
            md5 = stream.md5()
        block = _block(upload, number, md5.hex())
        query = urlencode({"comp": "block", "blockid": block}, quote_via=quote)
        self._send(f"PUT PART {number}", key, "parts", replace(body, md5=md5), {}, query)
        return md5.hex()

    def complete_multipart(
        self, key: str, upload_id: str, part_etags: Sequence[str], *, condition: Condition | None = None
    ) -> str:
        """Publish parts 1..n; return the object's ETag."""
        upload, metadata = _upload(key, upload_id)
        blocks = (_block(upload, number, etag) for number, etag in enumerate(part_etags, 1))
        rows = "".join(f"<Uncommitted>{block}</Uncommitted>" for block in blocks)
        body = f'<?xml version="1.0" encoding="utf-8"?><BlockList>{rows}</BlockList>'.encode()
        headers = {**metadata, **self._conditions(key, condition)}
        with self._named("COMPLETE UPLOAD", key, "completes") as what:
            return self._etag_of(
                key, self._http.call(what, "PUT", key, headers, query="comp=blocklist", body=body).headers
            )

    def abort_multipart(self, key: str, upload_id: str) -> None:
        """Do nothing: Azure drops the blocks after a week."""

    def list_uploads(self, prefix: str, *, token: str | None = None) -> UploadPage:
        """Return no uploads: Azure has none."""
        return UploadPage((), None)

    def copy(
        self,
        source: ObjectId,
        key: str,
        *,
        condition: Condition | None = None,
        metadata: Mapping[str, str] | None = None,
        size: int | None = None,
    ) -> str:
        """Copy inside the account if the source is still that version; return the new ETag."""
        headers = {
            "x-ms-copy-source": self._http.url(source.key),
            "x-ms-source-if-match": quoted_etag(source.etag),
            # Azure copies the standard headers.
            **self._metadata_headers({k: v for k, v in (metadata or {}).items() if k[0] != STANDARD}),
            **self._conditions(key, condition),
        }
        with self._named(f"COPY from {source.key!r}", key, "copies") as what:
            answer = self._http.call(what, "PUT", key, headers).headers
        deadline = time.monotonic() + _COPY_SECONDS
        while answer.get("x-ms-copy-status") == "pending" and time.monotonic() < deadline:
            time.sleep(_COPY_POLL_SECONDS)
            answer = self._head(key)
        if answer.get("x-ms-copy-status") != "success":
            raise Unavailable(f"{what}: the copy is {answer.get('x-ms-copy-status', 'not confirmed')}")
        return self._etag_of(key, answer)

    # ---- private

    def _conditions(self, key: str, condition: Condition | None) -> dict[str, str]:
        if condition is None or not self._sends_conditions:
            return {}
        return {"if-none-match": "*"} if condition.etag is None else {"if-match": quoted_etag(condition.etag)}

    def _require_flat(self) -> None:
        """Raise Refused, once, if the account has a hierarchical namespace: its directories are no objects."""
        if self._is_flat:
            return
        is_tree = False
        # Not all keys may ask.
        with suppress(AccessDenied, Refused), self._named("GET ACCOUNT", "", "heads") as what:
            answer = self._http.call(what, "GET", None, query="restype=account&comp=properties").headers
            is_tree = answer.get("x-ms-is-hns-enabled") == "true"
        if is_tree:
            raise Refused(
                f"{self._place}: the account has a hierarchical namespace, whose directories are no objects; choose a "
                "storage account without it"
            )
        self._is_flat = True


def _object(row: ET.Element) -> ObjectInfo:
    facts = {each.tag: each.text or "" for each in row.iterfind("Properties/*")}
    return ObjectInfo(
        _name(row),
        bare_etag(facts["Etag"]),
        int(facts["Content-Length"]),
        parsedate_to_datetime(facts["Last-Modified"]).timestamp(),
    )


def _name(row: ET.Element) -> str:
    name = row.find("Name")
    if name is None:
        raise ValueError("Name")
    text = name.text or ""
    return unquote(text) if name.get("Encoded") == "true" else text


def _upload(key: str, upload_id: str) -> tuple[str, dict[str, str]]:
    """Return the identity of an upload and the headers with its metadata. Raises UploadLost."""
    try:
        facts = json.loads(base64.urlsafe_b64decode(upload_id))
        return facts["id"], facts["metadata"]
    except (binascii.Error, ValueError, KeyError, TypeError) as exc:
        raise UploadLost(f"{key}: {upload_id!r} is no upload of this store") from exc


def _block(upload: str, number: int, md5: str) -> str:
    """Return a block's name: at most 64 bytes, and all names of a blob equally long."""
    return base64.b64encode(bytes.fromhex(upload) + number.to_bytes(4, "big") + bytes.fromhex(md5)).decode(
        "ascii"
    )
