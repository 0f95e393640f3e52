"""Encoding of user metadata values in headers: percent-encoded UTF-8.

R2 decodes RFC 2047 words in values, and S3 allows ASCII only. A value is therefore sent as plain unreserved ASCII.
Values written by other clients are returned unchanged, unless they happen to be valid percent-encoding.
"""

import re
from collections.abc import Mapping
from contextlib import suppress
from urllib.parse import quote, unquote

# Excluded: `%` (our escape), `=` and `?` (RFC 2047 words), space (proxies trim it at the ends).
SAFE_CHARACTERS = "/:+,;@!$&'()*~"
METADATA_PREFIX = "x-amz-meta-"
# A header's name (RFC 9110, 5.6.2), in lower case.
_NAME = re.compile(r"[a-z0-9!#$%&'*+.^_`|~-]+")


def encode_metadata(metadata: Mapping[str, str]) -> dict[str, str]:
    """Return the values as ASCII; names must be lower-case ASCII already.

    Raises ValueError for a name that is not valid in a header, or that would change there.
    """
    for name in metadata:
        if not _NAME.fullmatch(name):
            raise ValueError(f"metadata name {name!r}: allowed are lower-case ASCII names valid in a header")
    return {name: quote(value, safe=SAFE_CHARACTERS) for name, value in metadata.items()}


def metadata_headers(encoded: Mapping[str, str]) -> dict[str, str]:
    """Return the headers for encoded metadata."""
    return {f"{METADATA_PREFIX}{name}": value for name, value in encoded.items()}


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
