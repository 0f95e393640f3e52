"""Writes to the bucket without botocore on the way: one signed PUT of an object or a part, one signed DELETE.

botocore reads a body in pieces of 16 KiB, each through the interpreter, and over plain HTTP hashes it once more. Here
a small body travels with its request in one call, and a large one goes straight from the page cache.
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

# Up to this a body is read, hashed and sent by one call each; more would only be copied.
SMALL_BYTES = 64 * KIB


@dataclass(frozen=True, slots=True)
class PutRequest:
    """One PUT, named `what` in errors. headers: names in lower case. query: percent-encoded, sorted by name."""

    what: str
    key: str
    headers: Mapping[str, str]
    query: str = ""


def part_query(upload_id: str, number: int) -> str:
    """Return what makes a PUT that of a part; number: from 1."""
    return f"partNumber={number}&uploadId={quote(upload_id, safe='-_.~')}"


class DirectPuts:
    """PUTs and DELETEs over a wire. Safe for many threads."""

    def __init__(self, http: SignedHttp) -> None:
        self._http = http

    def put(self, put: PutRequest, stream: SliceBody, keys: SigningKeys) -> str:
        """Store an object or a part; return its ETag.

        Raises SentElsewhere, LocalDiskError, and what an answer says. After Unavailable it may be stored or not.
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
            answer = self._http.lend(put.what, partial(self._ask, put.what, head + body, file))
        except ShortFile as exc:
            raise LocalDiskError(f"{stream.path}: {exc}: it was cut while being uploaded") from exc
        etag = bare_etag(answer.get("etag", ""))
        if not etag:
            raise Unavailable(f"{put.what}: the answer names no ETag")
        return etag

    def delete(self, what: str, key: str, keys: SigningKeys) -> None:
        """Delete an object. Raises SentElsewhere, and what an answer says."""
        request = self._http.request("DELETE", key, {}, keys)
        self._http.lend(what, partial(self._ask, what, request, None))

    # ---- private

    def _ask(
        self, what: str, request: bytes, file: FileRange | None, connection: Connection
    ) -> dict[str, str]:
        """Return the headers of an answer that needs no body."""
        head, rest = connection.exchange(request, file)
        status, headers = parse_head(head)
        if status not in (200, 204):
            raise error_of(what, connection, head, rest, self._http.read_timeout)
        is_empty = status == 204 or headers.get("content-length") == "0"
        connection.is_clean = is_empty and not rest and headers.get("connection", "").lower() != "close"
        return headers
