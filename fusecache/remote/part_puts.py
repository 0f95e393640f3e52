"""Parts of uploads without botocore on the way: one signed PUT, its body straight from the page cache.

botocore reads a body in pieces of 16 KiB, each through the interpreter, and over plain HTTP hashes it once more. Not
here, as in `ranged_get.py`: which URL, region and certificates are right. botocore shows them with its first request
for an upload.
"""

import base64
import http.client
import os
import ssl
import time
from dataclasses import dataclass
from urllib.parse import quote

from fusecache.model.errors import LocalDiskError, Unavailable
from fusecache.remote.connections import (
    Connection,
    ConnectionPool,
    FileRange,
    Peer,
    ShortFile,
    StaleConnection,
)
from fusecache.remote.endpoints import Transport
from fusecache.remote.headers import bare_etag
from fusecache.remote.openssl import TlsContext
from fusecache.remote.ranged_get import SLOWEST_BYTES_PER_SECOND, Form, error_of, parse_head, quoted_key
from fusecache.remote.signing import UNSIGNED, Keys, Signer
from fusecache.remote.store import FileSlice


@dataclass(frozen=True, slots=True)
class PartPut:
    """One part, named `what` in errors; number: from 1; the body's MD5 is known."""

    what: str
    key: str
    upload_id: str
    number: int
    body: FileSlice


class PartPuts:
    """PUTs of parts. Safe for many threads. tls: with the certificates to trust; None for plain HTTP."""

    def __init__(self, form: Form, tls: TlsContext | ssl.SSLContext | None, transport: Transport) -> None:
        self._form = form
        self._read_timeout = transport.read_timeout_seconds
        self._signer = Signer(form.host_header, form.region)
        peer = Peer(form.host, form.port, tls, transport.connect_timeout_seconds, self._read_timeout)
        self._pool = ConnectionPool(peer, transport.max_connections)

    def send(self, put: PartPut, keys: Keys) -> str:
        """Store a part; return its ETag. Raises SentElsewhere, LocalDiskError, and what an answer says."""
        body = put.body
        try:
            descriptor = os.open(body.path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as exc:
            raise LocalDiskError(f"cannot open the bytes to upload: {exc}") from exc
        seconds = self._read_timeout + body.size / SLOWEST_BYTES_PER_SECOND
        file = FileRange(descriptor, body.offset, body.size, seconds)
        connection = self._pool.take()
        try:
            try:
                return self._ask(put, file, keys, connection)
            except StaleConnection:
                connection.close()
                connection = self._pool.new()
                return self._ask(put, file, keys, connection)
        finally:
            os.close(descriptor)
            self._pool.give_back(connection)

    def close(self) -> None:
        """Close idle connections; requests under way go on."""
        self._pool.close()

    # ---- private

    def _request(self, put: PartPut, keys: Keys) -> bytes:
        path = self._form.base_path + quoted_key(put.key)
        query = f"partNumber={put.number}&uploadId={quote(put.upload_id, safe='-_.~')}"
        signed = {
            "content-length": str(put.body.size),
            "content-md5": base64.b64encode(put.body.md5).decode("ascii"),
        }
        headers = self._signer.headers(
            path, signed, keys, time.time(), method="PUT", query=query, payload=UNSIGNED
        )
        lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        # Not signed: a proxy on the way may rewrite these two.
        lines += f"accept-encoding: identity\r\nuser-agent: {self._form.user_agent}\r\n"
        return f"PUT {path}?{query} HTTP/1.1\r\n{lines}\r\n".encode("ascii")

    def _ask(self, put: PartPut, file: FileRange, keys: Keys, connection: Connection) -> str:
        try:
            head, rest = connection.exchange(self._request(put, keys), file)
            status, headers = parse_head(head)
            if status != 200:
                raise error_of(put.what, connection, head, rest, self._read_timeout)
            etag = bare_etag(headers.get("etag", ""))
            if not etag:
                raise Unavailable(f"{put.what}: the answer names no ETag")
            connection.is_clean = (
                headers.get("content-length") == "0"
                and not rest
                and headers.get("connection", "").lower() != "close"
            )
            return etag
        except ShortFile as exc:
            raise LocalDiskError(f"{put.body.path}: {exc}: it was cut while being uploaded") from exc
        except (OSError, http.client.HTTPException) as exc:
            raise Unavailable(f"{put.what}: {str(exc) or type(exc).__name__}") from exc
