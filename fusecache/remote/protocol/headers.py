"""ETags and checksums in headers.

What belongs to an object besides its bytes, in headers: user metadata, and standard headers such as Content-Type.

R2 decodes RFC 2047 words in values, and S3 allows ASCII only. A value is therefore sent as plain unreserved ASCII:
percent-encoded UTF-8. Values written by other clients are returned unchanged, unless they happen to be valid
percent-encoding. What a rewrite carries over (`ObjectInfo.carried`) is sent as it was received.
"""

import hashlib
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from email.utils import parsedate_to_datetime
from urllib.parse import quote, unquote

from fusecache.model.objects import RAW, STANDARD
from fusecache.remote.store import ObjectContent

# Of a request of another node: the size of the object. Of its answer: the checksums of the granules, in base64.
SIZE_HEADER, CHECKSUMS_HEADER = "x-fusecache-size", "x-fusecache-checksums"
# Of a request of another node: `signing.mount_digest`.
MOUNT_HEADER = "x-fusecache-mount"
# Excluded: `%` (our escape), `=` and `?` (RFC 2047 words), space (proxies trim it at the ends).
SAFE_CHARACTERS = "/:+,;@!$&'()*~"
# Standard headers that belong to an object.
STANDARD_HEADERS = (
    "cache-control",
    "content-disposition",
    "content-encoding",
    "content-language",
    "content-type",
)
# A header's name (RFC 9110, 5.6.2), in lower case.
_NAME = re.compile(r"[a-z0-9!#$%&'*+.^_`|~-]+")


def encode_metadata(metadata: Mapping[str, str]) -> dict[str, str]:
    """Return the user metadata with values as ASCII; names must be lower-case ASCII already.

    Raises ValueError for a name that is not valid in a header, or that would change there.
    """
    encoded: dict[str, str] = {}
    for name, value in metadata.items():
        if name.startswith(STANDARD):
            continue
        bare = name.removeprefix(RAW)
        if not _NAME.fullmatch(bare):
            raise ValueError(f"metadata name {name!r}: allowed are lower-case ASCII names valid in a header")
        encoded[bare] = value if name.startswith(RAW) else quote(value, safe=SAFE_CHARACTERS)
    return encoded


def standard_headers(metadata: Mapping[str, str]) -> dict[str, str]:
    """Return the standard headers that metadata carries."""
    return {name[1:]: value for name, value in metadata.items() if name.startswith(STANDARD)}


def carried(headers: Mapping[str, str], metadata: Mapping[str, str]) -> dict[str, str]:
    """Return what a rewrite or a copy carries over. headers, metadata: of a HEAD's response, as received."""
    standard = {f"{STANDARD}{name}": headers[name] for name in STANDARD_HEADERS if headers.get(name)}
    # A request takes no value that is not ASCII: encoded, it is carried over for mounts at least.
    user = {(RAW + name if value.isascii() else name): value for name, value in metadata.items()}
    return {
        **standard,
        **{name: _decode_value(user[name]) if name[0] != RAW else user[name] for name in user},
    }


def decode_metadata(headers: Mapping[str, str]) -> dict[str, str]:
    """Return the decoded values. A stray `%`, or bytes that are not UTF-8, stay as received."""
    return {name: _decode_value(value) for name, value in headers.items()}


def _decode_value(value: str) -> str:
    # http.client decodes headers as Latin-1, but a raw value from another client is nearly always UTF-8.
    with suppress(UnicodeError):
        value = value.encode("latin-1").decode("utf-8")
    try:
        return unquote(value, errors="strict")
    except UnicodeDecodeError:
        return value


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
