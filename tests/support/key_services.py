"""The services that hand out access keys to machines, over loopback HTTP: instance metadata and STS."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, ClassVar, cast
from urllib.parse import parse_qs

ROLE = "trainer"
HOUR_SECONDS = 3600.0


class KeyService:
    """Hands out `keys` (access key, secret key). status: of its answers; not 200: it refuses. asked: requests seen."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.keys = ("", "")
        self.status = 200
        self.lifetime_seconds = HOUR_SECONDS
        self.asked: list[str] = []

    def expiry(self) -> str:
        """Return when keys that are handed out now expire."""
        return (datetime.now(UTC) + timedelta(seconds=self.lifetime_seconds)).strftime("%Y-%m-%dT%H:%M:%SZ")

    def metadata_variables(self) -> dict[str, str]:
        """Return the variables that make it the instance metadata service."""
        return {"AWS_EC2_METADATA_SERVICE_ENDPOINT": self.url, "AWS_EC2_METADATA_DISABLED": "false"}


@contextmanager
def key_service() -> Iterator[KeyService]:
    """Run the service on a port of its own."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    service = KeyService(f"http://127.0.0.1:{server.server_port}")
    server.service = service  # type: ignore[attr-defined]  # the handler's way to it
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield service
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


class _Handler(BaseHTTPRequestHandler):
    error_content_type: ClassVar[str] = "text/plain"

    @property
    def _service(self) -> KeyService:
        return cast("KeyService", cast("Any", self.server).service)

    def log_message(self, *_: object) -> None:
        """Say nothing."""

    def do_PUT(self) -> None:
        """Give the session token of IMDSv2."""
        self._answer(b"token")

    def do_GET(self) -> None:
        """Name the role, or give its keys, as the instance metadata service does."""
        if not self.path.endswith(f"/{ROLE}"):
            self._answer(ROLE.encode())
            return
        access_key, secret_key = self._service.keys
        keys = {
            "Code": "Success",
            "Type": "AWS-HMAC",
            "AccessKeyId": access_key,
            "SecretAccessKey": secret_key,
            "Token": "token",
            "Expiration": self._service.expiry(),
        }
        self._answer(json.dumps(keys).encode())

    def do_POST(self) -> None:
        """Answer AssumeRole and AssumeRoleWithWebIdentity, as STS does."""
        body = parse_qs(self.rfile.read(int(self.headers["Content-Length"])).decode())
        action = body["Action"][0]
        self._service.asked.append(action)
        if self._service.status != 200:
            self._answer(
                b"<ErrorResponse><Error><Type>Sender</Type><Code>ExpiredTokenException</Code>"
                b"<Message>Token expired</Message></Error></ErrorResponse>"
            )
            return
        access_key, secret_key = self._service.keys
        self._answer(
            f'<{action}Response xmlns="https://sts.amazonaws.com/doc/2011-06-15/"><{action}Result><Credentials>'
            f"<AccessKeyId>{access_key}</AccessKeyId><SecretAccessKey>{secret_key}</SecretAccessKey>"
            f"<SessionToken>token</SessionToken><Expiration>{self._service.expiry()}</Expiration>"
            f"</Credentials></{action}Result></{action}Response>".encode()
        )

    def _answer(self, body: bytes) -> None:
        self.send_response(self._service.status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
