"""What a request asks for, and the documents that answer it: GetObject, HeadObject, ListObjects, GetBucketLocation.

No I/O. Everything else is refused with a sentence that names the mount.
"""

import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import formatdate
from ipaddress import ip_address
from typing import Any
from urllib.parse import parse_qsl, quote, unquote, urlsplit
from xml.sax.saxutils import escape

from fusecache.model.objects import GRANULE_BYTES
from fusecache.remote.protocol.headers import SIZE_HEADER
from fusecache.serve.errors import S3Error, not_implemented
from fusecache.serve.objects import Found

_NAMESPACE = "http://s3.amazonaws.com/doc/2006-03-01/"
_RANGE = re.compile(r"bytes=(\d{0,19})-(\d{0,19})")
# Query of a GET of an object that changes nothing in the answer: clients add their operation's name.
_HARMLESS = frozenset({"x-id"})
_LISTING = frozenset(
    {
        "list-type", "prefix", "delimiter", "max-keys", "continuation-token", "start-after", "marker", "encoding-type",
        "fetch-owner", "x-id",
    }
)  # fmt: skip
_MOST_KEYS = 1000
# Follows whatever a key may go on with.
_LAST_CHARACTER = "\U0010ffff"


@dataclass(frozen=True, slots=True)
class S3Request:
    """One request. path: as sent; query: decoded; headers: names in lower case."""

    method: str
    path: str
    query: tuple[tuple[str, str], ...]
    headers: Mapping[str, str]

    @classmethod
    def of(cls, method: bytes, target: bytes, headers: Sequence[tuple[bytes, bytes]]) -> "S3Request":
        """Return a request as it came over HTTP."""
        path, _, query = target.decode("latin-1").partition("?")
        named: dict[str, str] = {}
        for name, value in headers:
            text = name.decode("latin-1").lower()
            named[text] = (
                f"{named[text]},{value.decode('latin-1')}" if text in named else value.decode("latin-1")
            )
        pairs = tuple(parse_qsl(query, keep_blank_values=True))
        return cls(method.decode("ascii", "replace"), path, pairs, named)

    @property
    def is_head(self) -> bool:
        """Whether only the head of the answer is wanted."""
        return self.method == "HEAD"

    def place(self, bucket: str, *, by_host: bool = True) -> str | None:
        """Return the key, "" for the bucket itself. Raises S3Error for another bucket, or none.

        by_host: the host may name the bucket. Nodes never do that, and a node may be called like the bucket.
        """
        path = unquote(self.path).removeprefix("/")
        if by_host and self.headers.get("host", "").startswith(f"{bucket}."):
            return path
        named, _, key = path.partition("/")
        if not named:
            raise not_implemented("listing buckets")
        if named != bucket:
            raise S3Error(404, "NoSuchBucket", f"this endpoint serves the bucket {bucket}, not {named}")
        return key

    def check_host(self, bucket: str) -> None:
        """Raise S3Error unless the host is this node's loopback.

        Else a page of another site, whose name leads to 127.0.0.1, could read all objects in a browser of this node.
        """
        host = self.headers.get("host", "")
        with suppress(ValueError):
            name = (urlsplit(f"//{host}").hostname or "").removeprefix(f"{bucket}.")
            if name == "localhost" or ip_address(name).is_loopback:
                return
        raise S3Error.of_status(
            403,
            f"the host {host} is not 127.0.0.1: serve with a --key-file for clients that use another name",
        )

    def check_object(self) -> None:
        """Raise S3Error unless this reads an object."""
        if self.method not in ("GET", "HEAD"):
            raise not_implemented(f"{self.method} of an object")
        if others := [name for name, _ in self.query if name not in _HARMLESS]:
            raise not_implemented(f"{self.method} of an object with ?{others[0]}")

    def check_version(self, found: Found) -> bool:
        """Return whether the client has this version already. Raises S3Error if it wants another one."""
        wanted = self.headers.get("if-match")
        if wanted is not None and wanted != "*" and found.etag not in _etags(wanted):
            raise S3Error.of_status(412, f"the object's ETag is {found.etag}")
        unwanted = self.headers.get("if-none-match")
        return unwanted is not None and (unwanted == "*" or found.etag in _etags(unwanted))

    @property
    def is_conditional(self) -> bool:
        """Whether the answer depends on the version."""
        return "if-match" in self.headers or "if-none-match" in self.headers

    def asked(self) -> tuple[int, int] | None:
        """Return the range: its first byte, and the one behind it. The first is negative from the end; None: all."""
        match = _RANGE.fullmatch(self.headers.get("range", "").replace(" ", ""))
        if match is None or not any(match.groups()):
            return None
        first, last = match.groups()
        if not first:
            return (-int(last), 1 << 62) if int(last) else (1 << 62, 1 << 62)
        if last and int(last) < int(first):
            return None
        return int(first), int(last) + 1 if last else 1 << 62

    def asked_by_peer(self) -> tuple[Found, int, int]:
        """Return the version and the range that another node's daemon asks for. Raises S3Error."""
        size, asked = self.headers.get(SIZE_HEADER, ""), self.asked()
        etags = _etags(self.headers.get("if-match", ""))
        if self.method != "GET" or not size.isdigit() or asked is None or len(etags) != 1:
            raise S3Error.of_status(400, f"a node asks with If-Match, Range and {SIZE_HEADER}")
        found = Found(etags.pop(), int(size), 0.0)
        start, stop = asked[0], min(asked[1], found.size)
        is_whole = not start % GRANULE_BYTES and (stop == found.size or not stop % GRANULE_BYTES)
        if not found.etag or not is_whole or not 0 <= start < stop:
            raise S3Error.of_status(416, f"bytes {start} to {stop} of {size} are no piece")
        return found, start, stop

    def listing(self) -> dict[str, Any]:
        """Return what a listing asks the daemon for. Raises S3Error."""
        query = dict(self.query)
        if self.method != "GET":
            raise not_implemented(f"{self.method} of a bucket")
        if others := sorted(query.keys() - _LISTING):
            raise not_implemented(f"GET of a bucket with ?{others[0]}")
        limit = query.get("max-keys", str(_MOST_KEYS))
        if not limit.isdigit() or len(limit) > 9:
            raise S3Error.of_status(400, f"max-keys={limit}: not a number")
        prefix, delimiter = query.get("prefix", ""), query.get("delimiter", "")
        token, after = query.get("continuation-token") or None, query.get("start-after", "")
        if self.is_first_version:
            token, after = None, query.get("marker", "")
            if delimiter and after[len(prefix) :].endswith(delimiter):
                after += _LAST_CHARACTER  # behind all keys of this common prefix
        return {
            "prefix": prefix,
            "delimiter": delimiter,
            "token": token,
            "start_after": after,
            "limit": min(int(limit), _MOST_KEYS),
        }

    @property
    def is_first_version(self) -> bool:
        """Whether a listing is one of ListObjects, of which s3fs-fuse and others ask, and not of ListObjectsV2."""
        return ("list-type", "2") not in self.query


def _etags(text: str) -> set[str]:
    return {each.strip().removeprefix("W/").strip('"') for each in text.split(",")}


def object_headers(found: Found) -> list[tuple[str, str]]:
    """Return the headers of an answer with an object."""
    return [
        ("ETag", f'"{found.etag}"'),
        ("Last-Modified", formatdate(found.modified, usegmt=True)),
        ("Accept-Ranges", "bytes"),
        ("Content-Type", "binary/octet-stream"),
    ]


def listing_document(bucket: str, request: S3Request, page: Mapping[str, Any]) -> bytes:
    """Return a page as S3 sends it."""
    query = dict(request.query)
    is_encoded = query.get("encoding-type") == "url"

    def text(value: str) -> str:
        return quote(value, safe="/") if is_encoded else escape(value)

    rows = [f"<Name>{escape(bucket)}</Name>"]
    is_first = request.is_first_version
    after = ("marker", "Marker") if is_first else ("start-after", "StartAfter")
    for name, tag in (("prefix", "Prefix"), ("delimiter", "Delimiter"), after):
        if name in ("prefix", "marker") or query.get(name):
            rows.append(f"<{tag}>{text(query.get(name, ''))}</{tag}>")
    if is_encoded:
        rows.append("<EncodingType>url</EncodingType>")
    if (token := query.get("continuation-token")) and not is_first:
        rows.append(f"<ContinuationToken>{escape(token)}</ContinuationToken>")
    rows.append(f"<MaxKeys>{escape(query.get('max-keys', str(_MOST_KEYS)))}</MaxKeys>")
    if not is_first:
        rows.append(f"<KeyCount>{len(page['objects']) + len(page['prefixes'])}</KeyCount>")
    rows.append(f"<IsTruncated>{'true' if page['token'] else 'false'}</IsTruncated>")
    if page["token"] and is_first:
        last = max([row[0] for row in page["objects"][-1:]] + list(page["prefixes"][-1:]))
        rows.append(f"<NextMarker>{text(last)}</NextMarker>")
    elif page["token"]:
        rows.append(f"<NextContinuationToken>{escape(page['token'])}</NextContinuationToken>")
    for key, etag, size, modified in page["objects"]:
        stamp = datetime.fromtimestamp(modified, UTC).strftime("%Y-%m-%dT%H:%M:%S.000Z")
        rows.append(
            f"<Contents><Key>{text(key)}</Key><LastModified>{stamp}</LastModified>"
            f"<ETag>&quot;{escape(etag)}&quot;</ETag><Size>{size}</Size>"
            "<StorageClass>STANDARD</StorageClass></Contents>"
        )
    rows += [f"<CommonPrefixes><Prefix>{text(each)}</Prefix></CommonPrefixes>" for each in page["prefixes"]]
    return _document("ListBucketResult", "".join(rows))


def location_document() -> bytes:
    """Return the answer to GetBucketLocation."""
    return _document("LocationConstraint", "")


def _document(name: str, content: str) -> bytes:
    text = f'<{name} xmlns="{_NAMESPACE}">{content}</{name}>'
    return f'<?xml version="1.0" encoding="UTF-8"?>\n{text}'.encode()
