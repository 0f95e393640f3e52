"""PUTs of objects and parts, and DELETEs of objects.

A small body is sent with its request in one call, and a large one straight from the page cache.
"""

import base64
import hashlib
from functools import partial
from urllib.parse import quote

from fusecache.model.errors import LocalDiskError
from fusecache.model.objects import KIB
from fusecache.remote.http.connection_pool import Connection, FileRange, ShortFile
from fusecache.remote.http.file_body import SliceBody
from fusecache.remote.http.signed_requests import (
    SLOWEST_BYTES_PER_SECOND,
    SUCCESS,
    HttpRequest,
    SignedHttp,
    error_of,
    parse_head,
)
from fusecache.remote.protocol.signing import UNSIGNED

# Bodies up to this size are read, hashed and sent in one call each. For larger ones the extra copy costs more.
SMALL_BYTES = 64 * KIB


def part_query(upload_id: str, number: int) -> str:
    """Return the query that makes a PUT the upload of a part; number: from 1."""
    return f"partNumber={number}&uploadId={quote(upload_id, safe='-_.~')}"


def send_body(http: SignedHttp, put: HttpRequest, stream: SliceBody) -> dict[str, str]:
    """Send a body; return the headers of the response. Its length, MD5 and payload are added to the request.

    Raises LocalDiskError, and the error of the response. After Unavailable the object may be stored or not.
    """
    body, file, md5 = b"", None, stream.known_md5
    if len(stream) <= SMALL_BYTES:
        body = stream.whole()
        md5 = md5 or hashlib.md5(body, usedforsecurity=False).digest()
    else:
        md5 = md5 or stream.md5()
        file = stream.file_range(http.read_timeout + len(stream) / SLOWEST_BYTES_PER_SECOND)
    headers = {
        **put.headers,
        "content-length": str(len(stream)),
        "content-md5": base64.b64encode(md5).decode("ascii"),
    }
    request = HttpRequest(put.what, "PUT", put.key, headers, put.query, UNSIGNED)
    try:
        return http.exchange(request, partial(_ask, http, put.what, body, file))
    except ShortFile as exc:
        raise LocalDiskError(f"{stream.path}: {exc}: it was truncated during the upload") from exc


def delete(http: SignedHttp, what: str, key: str) -> None:
    """Delete an object. Raises the error of the response."""
    http.exchange(HttpRequest(what, "DELETE", key), partial(_ask, http, what, b"", None))


def _ask(
    http: SignedHttp, what: str, body: bytes, file: FileRange | None, connection: Connection, head: bytes
) -> dict[str, str]:
    """Exchange a request; return the headers of a response whose body does not matter."""
    head, rest = connection.exchange(head + body, file)
    status, headers = parse_head(head)
    if status not in SUCCESS:
        raise error_of(what, connection, head, rest, http.read_timeout)
    is_empty = status == 204 or headers.get("content-length") == "0"
    connection.is_clean = is_empty and not rest and headers.get("connection", "").lower() != "close"
    return headers
