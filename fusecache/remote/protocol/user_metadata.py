"""User metadata values as they travel in headers: percent-encoded UTF-8.

R2 decodes RFC 2047 words in values and S3 allows ASCII only, so a value leaves as plain unreserved ASCII.
Values which others wrote come back as they are, unless they happen to be valid percent-encoding.
"""

import re
from collections.abc import Mapping
from contextlib import suppress
from urllib.parse import quote, unquote

# Not in the list: `%` (ours), `=` and `?` (RFC 2047 words), space (proxies trim it at the ends).
SAFE_CHARACTERS = "/:+,;@!$&'()*~"
METADATA_PREFIX = "x-amz-meta-"
# A header's name (RFC 9110, 5.6.2), in lower case.
_NAME = re.compile(r"[a-z0-9!#$%&'*+.^_`|~-]+")


def encode_metadata(metadata: Mapping[str, str]) -> dict[str, str]:
    """Return the values as ASCII; names must be lower-case ASCII already.

    Raises ValueError for a name that a header would change or cannot have.
    """
    for name in metadata:
        if not _NAME.fullmatch(name):
            raise ValueError(f"a metadata name is lower-case ASCII that a header can have, not {name!r}")
    return {name: quote(value, safe=SAFE_CHARACTERS) for name, value in metadata.items()}


def metadata_headers(encoded: Mapping[str, str]) -> dict[str, str]:
    """Return the headers in which encoded metadata travels."""
    return {f"{METADATA_PREFIX}{name}": value for name, value in encoded.items()}


def decode_metadata(headers: Mapping[str, str]) -> dict[str, str]:
    """Return the values as text. A stray `%`, or bytes that are no UTF-8, stay as they came."""
    return {name: _decode_value(value) for name, value in headers.items()}


def _decode_value(value: str) -> str:
    # http.client decodes headers as Latin-1; a value written raw by others is nearly always UTF-8.
    with suppress(UnicodeError):
        value = value.encode("latin-1").decode("utf-8")
    try:
        return unquote(value, errors="strict")
    except UnicodeDecodeError:
        return value
