"""ETags and checksums in headers."""

import hashlib
from collections.abc import Mapping, Sequence
from email.utils import parsedate_to_datetime

from fusecache.remote.store import ObjectContent


def bare_etag(etag: str) -> str:
    """Return an ETag without its quotes."""
    return etag.strip('"')


def quoted_etag(etag: str) -> str:
    """Return an ETag in quotes, as headers need it."""
    return f'"{etag}"'


def multipart_etag(part_etags: Sequence[str]) -> str:
    """Return the ETag that S3 computes for an object of these parts: the MD5 of their MD5s, then their number."""
    digests = b"".join(bytes.fromhex(etag) for etag in part_etags)
    return f"{hashlib.md5(digests, usedforsecurity=False).hexdigest()}-{len(part_etags)}"


def object_content(headers: Mapping[str, str]) -> ObjectContent:
    """Return what the response to a HEAD says about an object's content. Raises KeyError, ValueError.

    A checksum of the parts' checksums (COMPOSITE, or with a part count behind a hyphen) depends on how they were cut.
    """
    is_full = headers.get("x-amz-checksum-type", "FULL_OBJECT") == "FULL_OBJECT"
    checksums = {
        name: value
        for name, value in headers.items()
        if is_full
        and name.startswith("x-amz-checksum-")
        and name != "x-amz-checksum-type"
        and "-" not in value
    }
    modified = parsedate_to_datetime(headers["last-modified"]).timestamp()
    return ObjectContent(bare_etag(headers["etag"]), int(headers["content-length"]), modified, checksums)
