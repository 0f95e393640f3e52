"""Signed PUTs of objects and parts, and signed DELETEs, without botocore.

botocore reads a body in pieces of 16 KiB through the interpreter, and over plain HTTP hashes it an extra time. Here a
small body is sent with its request in one call, and a large one straight from the page cache.
"""

import base64
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from urllib.parse import quote

from fusecache.model.errors import LocalDiskError, Unavailable
from fusecache.model.objects import KIB
from fusecache.remote.http.connection_pool import Connection, FileRange, ShortFile
from fusecache.remote.http.file_body import SliceBody
from fusecache.remote.http.signed_requests import SLOWEST_BYTES_PER_SECOND, SignedHttp, error_of, parse_head
from fusecache.remote.protocol.headers import bare_etag
from fusecache.remote.protocol.signing import UNSIGNED, SigningKeys

# Bodies up to this size are read, hashed and sent in one call each. For larger ones the extra copy costs more.
SMALL_BYTES = 64 * KIB
# Azure answers 201 to a PUT, and 202 to a DELETE.
SUCCESS = (200, 201, 202, 204)


@dataclass(frozen=True, slots=True)
class PutRequest:
    """One PUT. what: its name in errors. headers: names in lower case. query: percent-encoded, sorted by name."""

    what: str
    key: str
    headers: Mapping[str, str]
    query: str = ""


def part_query(upload_id: str, number: int) -> str:
    """Return the query that makes a PUT the upload of a part; number: from 1."""
    return f"partNumber={number}&uploadId={quote(upload_id, safe='-_.~')}"


class DirectPuts:
    """PUTs and DELETEs over a `SignedHttp`. Thread-safe."""

    def __init__(self, http: SignedHttp) -> None:
        self._http = http

    def put(self, put: PutRequest, stream: SliceBody, keys: SigningKeys | None) -> str:
        """Store an object or a part; return its ETag. Raises what `send` does."""
        etag = bare_etag(self.send(put, stream, keys).get("etag", ""))
        if not etag:
            raise Unavailable(f"{put.what}: the response has no ETag")
        return etag

    def send(self, put: PutRequest, stream: SliceBody, keys: SigningKeys | None) -> dict[str, str]:
        """Send a body; return the headers of the response.

        Raises RedirectedRequest, LocalDiskError, and the error of the response. After Unavailable the object may be
        stored or not.
        """
        body, file, md5 = b"", None, stream.known_md5
        if len(stream) <= SMALL_BYTES:
            body = stream.whole()
            md5 = md5 or hashlib.md5(body, usedforsecurity=False).digest()
        else:
            md5 = md5 or stream.md5()
            seconds = self._http.read_timeout + len(stream) / SLOWEST_BYTES_PER_SECOND
            file = stream.file_range(seconds)
        headers = {
            **put.headers,
            "content-length": str(len(stream)),
            "content-md5": base64.b64encode(md5).decode("ascii"),
        }
        head = self._http.request("PUT", put.key, headers, keys, query=put.query, payload=UNSIGNED)
        try:
            return self._http.lend(put.what, partial(self._ask, put.what, head + body, file))
        except ShortFile as exc:
            raise LocalDiskError(f"{stream.path}: {exc}: it was truncated during the upload") from exc

    def delete(self, what: str, key: str, keys: SigningKeys | None) -> None:
        """Delete an object. Raises RedirectedRequest, and the error of the response."""
        request = self._http.request("DELETE", key, {}, keys)
        self._http.lend(what, partial(self._ask, what, request, None))

    # ---- private

    def _ask(
        self, what: str, request: bytes, file: FileRange | None, connection: Connection
    ) -> dict[str, str]:
        """Exchange a request; return the headers of a response whose body does not matter."""
        head, rest = connection.exchange(request, file)
        status, headers = parse_head(head)
        if status not in SUCCESS:
            raise error_of(what, connection, head, rest, self._http.read_timeout)
        is_empty = status == 204 or headers.get("content-length") == "0"
        connection.is_clean = is_empty and not rest and headers.get("connection", "").lower() != "close"
        return headers
