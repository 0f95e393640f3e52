"""Signed requests on a bare socket, for what boto3 will not send."""

import socket
from dataclasses import dataclass
from urllib.parse import urlsplit

from botocore.auth import S3SigV4Auth
from botocore.awsrequest import AWSRequest
from botocore.credentials import Credentials

from tests.s3server.client import Endpoint


@dataclass(frozen=True, slots=True)
class RawAnswer:
    """One answer, body included."""

    status: int
    headers: dict[str, str]
    body: bytes


class _Signer(S3SigV4Auth):
    """Signs whatever payload hash it is told."""

    def __init__(self, server: Endpoint, payload_hash: str) -> None:
        super().__init__(Credentials(server.access_key, server.secret_key), "s3", "auto")
        self._payload_hash = payload_hash

    def payload(self, request: AWSRequest) -> str:
        return self._payload_hash


class RawClient:
    """One connection. Header values are sent as given, and none is added but Host and the signature's."""

    def __init__(self, server: Endpoint) -> None:
        self._server = server
        address = urlsplit(server.endpoint_url)
        self.sock = socket.create_connection((address.hostname, address.port), timeout=20)

    def __enter__(self) -> "RawClient":
        return self

    def __exit__(self, *_: object) -> None:
        self.sock.close()

    def head(
        self, method: str, path: str, headers: dict[str, str], *, payload_hash: str = "UNSIGNED-PAYLOAD"
    ) -> bytes:
        """Return a signed head for `path`, as it stands in the URL."""
        url = self._server.endpoint_url + path
        request = AWSRequest(method=method, url=url, headers=headers)
        _Signer(self._server, payload_hash).add_auth(request)
        lines = [f"{method} {path} HTTP/1.1", f"Host: {urlsplit(url).netloc}"]
        lines += [f"{name}: {value}" for name, value in request.headers.items()]
        return ("\r\n".join(lines) + "\r\n\r\n").encode()

    def ask(
        self,
        method: str,
        path: str,
        headers: dict[str, str],
        body: bytes = b"",
        *,
        payload_hash: str = "UNSIGNED-PAYLOAD",
    ) -> RawAnswer:
        """Send a request whole and return its answer."""
        self.sock.sendall(self.head(method, path, headers, payload_hash=payload_hash) + body)
        return self.answer(method)

    def answer(self, method: str = "GET") -> RawAnswer:
        """Receive one answer. EOFError if the connection ends inside it."""
        data = b""
        while b"\r\n\r\n" not in data:
            data += self._receive()
        head, _, body = data.partition(b"\r\n\r\n")
        status, *lines = head.decode("latin-1").split("\r\n")
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
        wanted = 0 if method == "HEAD" else int(headers.get("content-length", "0"))
        while len(body) < wanted:
            body += self._receive()
        return RawAnswer(int(status.split(" ")[1]), headers, body)

    def _receive(self) -> bytes:
        data = self.sock.recv(1 << 20)
        if not data:
            raise EOFError
        return data
