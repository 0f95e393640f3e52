"""A bucket of Google Cloud Storage for tests: its XML API as Google documents it, over real sockets, in memory.

Written from cloud.google.com/storage/docs/xml-api and /request-preconditions, not from a recording. Preconditions:
`If-Match` counts for reads alone; writes know `x-goog-if-generation-match`; multipart requests know none, and get a
400 for one. What the client under test must never send is an offence.
"""

import base64
import gzip
import hashlib
import json
import re
import ssl
import threading
import time
import uuid
from dataclasses import dataclass, field
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self
from urllib.parse import parse_qsl, unquote, urlsplit
from xml.sax.saxutils import escape

from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa

if TYPE_CHECKING:
    from collections.abc import Callable

PART_MINIMUM_BYTES = 5 << 20
METADATA = "x-goog-meta-"
KEPT = ("content-type", "content-encoding", "cache-control", "content-disposition", "content-language")


@dataclass
class _Object:
    data: bytes
    etag: str
    generation: int
    headers: dict[str, str]
    modified: float = field(default_factory=time.time)


@dataclass
class _Upload:
    key: str
    headers: dict[str, str]
    parts: dict[int, bytes] = field(default_factory=dict)


class _Failure(Exception):
    def __init__(self, status: int, code: str) -> None:
        super().__init__(code)
        self.status, self.code = status, code


class GcsServer:
    """A server with one bucket, "bucket". Use it in a `with` block.

    allowed: the tokens that it accepts. offences: what the client should not have sent.
    """

    bucket = "bucket"

    def __init__(self, context: ssl.SSLContext | None = None) -> None:
        self.objects: dict[str, _Object] = {}
        self.uploads: dict[str, _Upload] = {}
        self.allowed: set[str] = set()
        self.offences: list[str] = []
        self.requests: list[str] = []
        self.refuses_writes = self.ignores_conditions = False
        self.lock = threading.RLock()
        self._generation = int(time.time() * 1e6)
        self._http = ThreadingHTTPServer(
            ("127.0.0.1", 0), type("Handler", (_Handler,), {"server_state": self})
        )
        self._http.daemon_threads = True
        if context is not None:
            self._http.socket = context.wrap_socket(self._http.socket, server_side=True)
        scheme = "http" if context is None else "https"
        self.endpoint_url = f"{scheme}://127.0.0.1:{self._http.server_address[1]}"

    def __enter__(self) -> Self:
        self._thread = threading.Thread(target=self._http.serve_forever, args=(0.05,), daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._http.shutdown()
        self._http.server_close()
        self._thread.join(10)

    def key_file(self, path: Path) -> Path:
        """Write the key file of a service account whose tokens come from this server; return its path."""
        key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
        pem = key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
        facts = {
            "type": "service_account",
            "project_id": "test",
            "private_key_id": "1",
            "private_key": pem.decode(),
            "client_email": "test@test.iam.gserviceaccount.com",
            "token_uri": f"{self.endpoint_url}/token",
        }
        path.write_text(json.dumps(facts))
        path.chmod(0o600)
        return path

    def put(self, key: str, data: bytes, headers: dict[str, str] | None = None, *, etag: str = "") -> _Object:
        """Store an object, as a client without preconditions would."""
        with self.lock:
            self._generation += 1
            etag = etag or hashlib.md5(data, usedforsecurity=False).hexdigest()
            self.objects[key] = _Object(data, etag, self._generation, dict(headers or {}))
            return self.objects[key]


class _Handler(BaseHTTPRequestHandler):
    server_state: GcsServer
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    wbufsize = -1

    def log_message(self, format: str, *args: Any) -> None:  # http.server's name
        """Stay silent."""

    def _serve(self) -> None:
        state = self.server_state
        parts = urlsplit(self.path)
        self.query = dict(parse_qsl(parts.query, keep_blank_values=True))
        self.names = {name.lower(): value for name, value in self.headers.items()}
        self.body = self.rfile.read(int(self.names.get("content-length", "0")))
        state.requests.append(f"{self.command} {self.path}")
        try:
            if parts.path == "/token":
                token = uuid.uuid4().hex
                state.allowed.add(token)
                answer = json.dumps(
                    {"access_token": token, "expires_in": 3600, "token_type": "Bearer"}
                ).encode()
                self._answer(200, {"Content-Type": "application/json"}, answer)
                return
            self._check_manners()
            if self.names.get("authorization", "").removeprefix("Bearer ") not in state.allowed:
                raise _Failure(401, "AuthenticationRequired")
            found = re.fullmatch(r"/([^/]+)(?:/(.*))?", parts.path, re.DOTALL)
            if found is None or found[1] != state.bucket:
                raise _Failure(404, "NoSuchBucket")
            self.key = unquote(found[2] or "")
            if len(self.key.encode()) > 1024:
                raise _Failure(400, "KeyTooLongError")
            if state.refuses_writes and self.command not in ("GET", "HEAD"):
                raise _Failure(403, "AccessDenied")
            with state.lock:
                self._operate(state)
        except _Failure as exc:
            text = f"<?xml version='1.0'?><Error><Code>{exc.code}</Code><Message>Message.</Message></Error>"
            self._answer(exc.status, {"Content-Type": "application/xml"}, text.encode())

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = _serve

    def _check_manners(self) -> None:
        wrong = [name for name in self.names if name.startswith(("x-amz-", "x-ms-")) or name == "expect"]
        if self.command in ("PUT", "POST") and "content-length" not in self.names:
            wrong.append("no content-length")
        if self.command not in ("GET", "HEAD"):
            wrong += [name for name in ("if-match", "if-none-match") if name in self.names]
        if self.names.get("accept-encoding") != "identity":
            wrong.append("accept-encoding")
        self.server_state.offences += [f"{self.command} {self.path}: {name}" for name in wrong]

    def _operate(self, state: GcsServer) -> None:
        is_multipart = "uploads" in self.query or "uploadId" in self.query
        if is_multipart and "x-goog-if-generation-match" in self.names:
            raise _Failure(400, "InvalidArgument")
        operations: dict[tuple[str, bool, bool], Callable[[GcsServer], None]] = {
            ("GET", False, True): self._list_uploads,
            ("GET", False, False): self._list,
            ("GET", True, False): self._get,
            ("HEAD", True, False): self._get,
            ("PUT", True, True): self._put_part,
            ("PUT", True, False): self._put,
            ("POST", True, True): self._complete if "uploadId" in self.query else self._create,
            ("DELETE", True, True): self._abort,
            ("DELETE", True, False): self._delete,
        }
        operation = operations.get((self.command, bool(self.key), is_multipart))
        if operation is None:
            raise _Failure(405, "MethodNotAllowed")
        operation(state)

    # ---- operations

    def _list(self, state: GcsServer) -> None:
        assert self.query.get("list-type") == "2"
        prefix, delimiter = self.query.get("prefix", ""), self.query.get("delimiter", "")
        token = self.query.get("continuation-token")
        after = base64.b64decode(token).decode() if token else self.query.get("start-after", "")
        limit = int(self.query.get("max-keys", "1000"))
        is_encoded = self.query.get("encoding-type") == "url"
        rows: list[str] = []
        last, is_truncated = "", False
        for key in sorted(state.objects, key=str.encode):
            head, found, _ = key[len(prefix) :].partition(delimiter) if delimiter else ("", "", "")
            name = prefix + head + found if found else key
            if not key.startswith(prefix) or name <= after or name == last:
                continue
            if len(rows) == limit:
                is_truncated = True
                break
            last = name
            shown = "".join(f"%{byte:02X}" for byte in name.encode()) if is_encoded else escape(name)
            if found:
                rows.append(f"<CommonPrefixes><Prefix>{shown}</Prefix></CommonPrefixes>")
                continue
            item = state.objects[key]
            modified = time.strftime("%Y-%m-%dT%H:%M:%S.000Z", time.gmtime(item.modified))
            rows.append(
                f"<Contents><Key>{shown}</Key><Generation>{item.generation}</Generation>"
                f"<MetaGeneration>1</MetaGeneration><LastModified>{modified}</LastModified>"
                f"<ETag>&quot;{item.etag}&quot;</ETag><Size>{len(item.data)}</Size></Contents>"
            )
        following = base64.b64encode(last.encode()).decode()
        self._xml(
            "ListBucketResult",
            f"<Name>bucket</Name><KeyCount>{len(rows)}</KeyCount>"
            + ("<EncodingType>url</EncodingType>" if is_encoded else "")
            + f"<IsTruncated>{str(is_truncated).lower()}</IsTruncated>"
            + (f"<NextContinuationToken>{following}</NextContinuationToken>" if is_truncated else "")
            + "".join(rows),
        )

    def _list_uploads(self, state: GcsServer) -> None:
        prefix = self.query.get("prefix", "")
        now = time.strftime("%Y-%m-%dT%H:%M:%S.000Z", time.gmtime())
        rows = [
            f"<Upload><Key>{escape(each.key)}</Key><UploadId>{name}</UploadId><Initiated>{now}</Initiated></Upload>"
            for name, each in sorted(state.uploads.items(), key=lambda item: (item[1].key, item[0]))
            if each.key.startswith(prefix)
        ]
        self._xml("ListMultipartUploadsResult", "<IsTruncated>false</IsTruncated>" + "".join(rows))

    def _get(self, state: GcsServer) -> None:
        item = self._find(state, self.key)
        wanted = self.names.get("if-match")
        if wanted is not None and wanted.strip('"') != item.etag:
            raise _Failure(412, "PreconditionFailed")
        headers = {
            "ETag": f'"{item.etag}"',
            "Last-Modified": formatdate(item.modified, usegmt=True),
            "x-goog-generation": str(item.generation),
            "x-goog-stored-content-length": str(len(item.data)),
            **item.headers,
        }
        found = re.fullmatch(r"bytes=(\d+)-(\d+)", self.names.get("range", ""))
        if item.headers.get("content-encoding") == "gzip":
            # "Decompressive transcoding": no client here says that it takes gzip. It ignores ranges.
            headers = {name: value for name, value in headers.items() if name != "content-encoding"}
            self._answer(200, headers, gzip.decompress(item.data))
            return
        if found is None:
            self._answer(200, headers, item.data)
            return
        first, last = int(found[1]), min(int(found[2]), len(item.data) - 1)
        if first > last:
            raise _Failure(416, "InvalidRange")
        headers["Content-Range"] = f"bytes {first}-{last}/{len(item.data)}"
        self._answer(206, headers, item.data[first : last + 1])

    def _put(self, state: GcsServer) -> None:
        source = self.names.get("x-goog-copy-source")
        headers = self._object_headers()
        data, etag = self.body, ""
        if source is not None:
            item = self._find(state, unquote(source).removeprefix(f"{state.bucket}/"))
            if self.names.get("x-goog-copy-source-if-generation-match") not in (None, str(item.generation)):
                raise _Failure(412, "PreconditionFailed")
            data, etag = item.data, item.etag
            if self.names.get("x-goog-metadata-directive") != "REPLACE":
                headers = item.headers
        else:
            self._check_md5()
        wanted = self.names.get("x-goog-if-generation-match")
        present = state.objects.get(self.key)
        generation = present.generation if present else 0
        if wanted is not None and int(wanted) != generation and not state.ignores_conditions:
            raise _Failure(412, "PreconditionFailed")
        item = state.put(self.key, data, headers, etag=etag)
        facts = {"ETag": f'"{item.etag}"', "x-goog-generation": str(item.generation)}
        if source is None:
            self._answer(200, facts)
        else:
            self._xml("CopyObjectResult", f"<ETag>&quot;{item.etag}&quot;</ETag>", facts)

    def _create(self, state: GcsServer) -> None:
        name = uuid.uuid4().hex + "+/="
        state.uploads[name] = _Upload(self.key, self._object_headers())
        self._xml("InitiateMultipartUploadResult", f"<UploadId>{name}</UploadId>")

    def _put_part(self, state: GcsServer) -> None:
        self._check_md5()
        self._upload(state).parts[int(self.query["partNumber"])] = self.body
        digest = hashlib.md5(self.body, usedforsecurity=False).hexdigest()
        self._answer(200, {"ETag": f'"{digest}"'})

    def _complete(self, state: GcsServer) -> None:
        upload = self._upload(state)
        chosen = re.findall(r'<PartNumber>(\d+)</PartNumber><ETag>"([0-9a-f]+)"</ETag>', self.body.decode())
        parts = [upload.parts.get(int(number), b"") for number, _ in chosen]
        for data, (_, etag) in zip(parts, chosen, strict=True):
            if hashlib.md5(data, usedforsecurity=False).hexdigest() != etag:
                raise _Failure(400, "InvalidPart")
        if any(len(data) < PART_MINIMUM_BYTES for data in parts[:-1]):
            raise _Failure(400, "EntityTooSmall")
        del state.uploads[self.query["uploadId"]]
        # No MD5, unlike that of an object stored whole.
        etag = base64.b64encode(uuid.uuid4().bytes[:10]).decode()
        item = state.put(self.key, b"".join(parts), upload.headers, etag=etag)
        facts = {"x-goog-generation": str(item.generation)}
        self._xml("CompleteMultipartUploadResult", f"<ETag>&quot;{item.etag}&quot;</ETag>", facts)

    def _abort(self, state: GcsServer) -> None:
        self._upload(state)
        del state.uploads[self.query["uploadId"]]
        self._answer(204)

    def _delete(self, state: GcsServer) -> None:
        if state.objects.pop(self.key, None) is None:
            raise _Failure(404, "NoSuchKey")
        self._answer(204)

    # ---- private

    def _find(self, state: GcsServer, key: str) -> _Object:
        if key not in state.objects:
            raise _Failure(404, "NoSuchKey")
        return state.objects[key]

    def _upload(self, state: GcsServer) -> _Upload:
        upload = state.uploads.get(self.query["uploadId"])
        if upload is None or upload.key != self.key:
            raise _Failure(404, "NoSuchUpload")
        return upload

    def _object_headers(self) -> dict[str, str]:
        return {
            name: value for name, value in self.names.items() if name.startswith(METADATA) or name in KEPT
        }

    def _check_md5(self) -> None:
        digest = base64.b64encode(hashlib.md5(self.body, usedforsecurity=False).digest()).decode()
        if self.body and self.names.get("content-md5") != digest:
            raise _Failure(400, "BadDigest")

    def _xml(self, root: str, inner: str, headers: dict[str, str] | None = None) -> None:
        space = "http://doc.s3.amazonaws.com/2006-03-01"
        text = f"<?xml version='1.0' encoding='UTF-8'?><{root} xmlns='{space}'>{inner}</{root}>"
        self._answer(200, {"Content-Type": "application/xml", **(headers or {})}, text.encode())

    def _answer(self, status: int, headers: dict[str, str] | None = None, body: bytes = b"") -> None:
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        if status != 204:
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)
