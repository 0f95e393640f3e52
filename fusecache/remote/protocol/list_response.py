"""Parser of ListObjectsV2 responses, with ElementTree's C parser: botocore's costs five times as much per name.

Not here: the request and error responses. A body that is not a listing raises ValueError, and the caller decides.
"""

import xml.etree.ElementTree as ET
from datetime import datetime
from urllib.parse import unquote_plus

from fusecache.model.objects import ObjectInfo
from fusecache.remote.protocol.headers import bare_etag
from fusecache.remote.store import ListPage

_ROOT = "ListBucketResult"


def parse_listing(body: bytes) -> ListPage:
    """Parse the body of a 200 response into a page. Raises ValueError if it is not a complete listing."""
    try:
        root = ET.fromstring(body)
    except ET.ParseError as exc:
        raise ValueError(f"the listing is not valid XML: {exc}") from exc
    space, _, name = root.tag.rpartition("}")
    if name != _ROOT:
        raise ValueError(f"expected a listing, got {name}")
    space = f"{space}}}" if space else ""
    is_encoded = root.findtext(f"{space}EncodingType") == "url"
    objects = tuple(_object(row, space, is_encoded=is_encoded) for row in root.iterfind(f"{space}Contents"))
    prefixes = tuple(
        _decoded(_text(row, f"{space}Prefix"), is_encoded=is_encoded)
        for row in root.iterfind(f"{space}CommonPrefixes")
    )
    is_truncated = _text(root, f"{space}IsTruncated") == "true"
    return ListPage(objects, prefixes, _text(root, f"{space}NextContinuationToken") if is_truncated else None)


def _object(row: ET.Element, space: str, *, is_encoded: bool) -> ObjectInfo:
    return ObjectInfo(
        _decoded(_text(row, f"{space}Key"), is_encoded=is_encoded),
        bare_etag(_text(row, f"{space}ETag")),
        int(_text(row, f"{space}Size")),
        datetime.fromisoformat(_text(row, f"{space}LastModified")).timestamp(),
    )


def _decoded(key: str, *, is_encoded: bool) -> str:
    # S3 encodes a space as '+' here, and a plus as %2B.
    return unquote_plus(key) if is_encoded and ("%" in key or "+" in key) else key


def _text(element: ET.Element, tag: str) -> str:
    child = element.find(tag)
    if child is None:
        raise ValueError(f"the listing lacks {tag.rpartition('}')[2]}")
    return child.text or ""
