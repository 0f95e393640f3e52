"""User metadata: x-amz-meta-* headers in and out."""

import base64
import hashlib
from email.errors import HeaderParseError
from email.header import Header, decode_header, make_header
from urllib.parse import unquote

from tests.s3server.errors import S3Error
from tests.s3server.rules import Rules
from tests.s3server.wire import Request

_PREFIX = "x-amz-meta-"
# Of these, each request that makes an object has its own; a copy takes none from its source.
SETTINGS = (
    "x-amz-storage-class",
    "x-amz-server-side-encryption",
    "x-amz-server-side-encryption-aws-kms-key-id",
    "x-amz-server-side-encryption-customer-algorithm",
    "x-amz-server-side-encryption-customer-key-md5",
)
CUSTOMER_KEY = "x-amz-server-side-encryption-customer-key"
_STORED = (
    "content-type",
    "content-encoding",
    "content-language",
    "content-disposition",
    "cache-control",
    "expires",
    *SETTINGS,
)


def request_metadata(request: Request, rules: Rules) -> dict[str, str]:
    """Return the metadata a request carries, values RFC 2047-decoded. S3Error MetadataTooLarge."""
    found = {
        name.removeprefix(_PREFIX): _decode(value)
        for name, value in request.headers.items()
        if name.startswith(_PREFIX)
    }
    size = sum(len(name.encode()) + len(value.encode()) for name, value in found.items())
    if size > rules.max_metadata_bytes:
        raise S3Error("MetadataTooLarge", "Your metadata headers exceed the maximum allowed metadata size.")
    return found


def request_headers(request: Request) -> dict[str, str]:
    """Return the headers that are stored with an object."""
    return {name: value for name in _STORED if (value := request.header(name)) is not None}


def check_customer_key(stored: dict[str, str], request: Request, prefix: str = "") -> None:
    """Check that a request has the key that an object is encrypted with. prefix: `x-amz-copy-source` for a source.

    Raises S3Error InvalidRequest, AccessDenied.
    """
    name = CUSTOMER_KEY.replace("x-amz", prefix or "x-amz", 1)
    key, digest = request.header(name) or "", request.header(f"{name}-md5")
    if key and base64.b64encode(hashlib.md5(base64.b64decode(key)).digest()).decode() != digest:
        raise S3Error(
            "InvalidArgument", "The calculated MD5 hash of the key did not match the hash provided."
        )
    needed = stored.get(f"{CUSTOMER_KEY}-md5")
    if digest is None and needed is not None:
        raise S3Error("InvalidRequest", "The object was stored using a form of Server Side Encryption.")
    if digest != needed:
        raise S3Error("AccessDenied", "Access Denied")


def metadata_headers(metadata: dict[str, str]) -> list[tuple[str, str]]:
    """Return metadata as headers; what is not ASCII in RFC 2047's form."""
    return [
        (_PREFIX + name, value if value.isascii() else Header(value, "utf-8", maxlinelen=1 << 20).encode())
        for name, value in metadata.items()
    ]


def _decode(value: str) -> str:
    text = value.encode("latin-1").decode("utf-8", errors="replace")
    if "=?" not in text:
        return text
    try:
        return str(make_header(decode_header(text)))
    except (HeaderParseError, UnicodeDecodeError, LookupError):
        return text


def parse_tags(value: str) -> str:
    """Return an ETag without its quotes."""
    return unquote(value).strip().strip('"')
