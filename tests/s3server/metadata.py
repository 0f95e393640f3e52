"""User metadata: x-amz-meta-* headers in and out."""

from email.errors import HeaderParseError
from email.header import Header, decode_header, make_header
from urllib.parse import unquote

from tests.s3server.errors import S3Error
from tests.s3server.rules import Rules
from tests.s3server.wire import Request

_PREFIX = "x-amz-meta-"
_STORED = (
    "content-type",
    "content-encoding",
    "content-language",
    "content-disposition",
    "cache-control",
    "expires",
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
