"""The measured child process of `http_clients.py`: the ways to send GETs or PUTs take turns in one process.

So they meet the same machine, seconds apart. Connections are made before the clock starts.
"""

import base64
import hashlib
import json
import os
import resource
import socket
import ssl
import sys
import time
from collections.abc import Callable
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from threading import Barrier, local
from typing import Any
from urllib.parse import urlsplit

from benchmarks.http_origin import BLOCK, ETAG
from fusecache.model.objects import Extent, ObjectId
from fusecache.remote.endpoints import Credentials, Endpoint
from fusecache.remote.http import tls
from fusecache.remote.http.put import part_query
from fusecache.remote.protocol.signing import UNSIGNED, Signer, SigningKeys
from fusecache.remote.s3.store import S3Store
from fusecache.remote.store import FileSlice

KIB, MIB, GIB = 2**10, 2**20, 2**30
BUCKET, KEY, UPLOAD = "bucket", "object", "upload"
ACCESS_KEY, SECRET_KEY = "access-key", "secret-key"
PIECE_BYTES = MIB


@dataclass(frozen=True, slots=True)
class File:
    """A file to upload as one part, with its MD5."""

    path: str
    size: int
    md5: bytes

    @property
    def content_md5(self) -> str:
        """Return the header's value."""
        return base64.b64encode(self.md5).decode()


@dataclass(frozen=True, slots=True)
class Way:
    """How to fetch a range into a buffer, and to upload a file as a part with a number."""

    get: Callable[[memoryview, int], None]
    put: Callable[[File, int], None]


@dataclass(frozen=True, slots=True)
class Site:
    """Where the origin is; threads: how many requests are in flight."""

    url: str
    ca_path: str
    threads: int

    @property
    def netloc(self) -> str:
        """Return host and port."""
        return urlsplit(self.url).netloc

    @property
    def is_secure(self) -> bool:
        """Return whether there is TLS."""
        return self.url.startswith("https")


def fusecache(site: Site) -> Way:
    """The daemon's own client."""
    os.environ["AWS_CA_BUNDLE"] = site.ca_path
    store = S3Store(BUCKET, Endpoint(site.url, "auto"), credentials=Credentials(ACCESS_KEY, SECRET_KEY))

    def get(buffer: memoryview, start: int) -> None:
        store.get_into(ObjectId(KEY, ETAG), Extent(start, start + len(buffer)), buffer, lambda count: None)

    def put(file: File, number: int) -> None:
        store.upload_part(KEY, UPLOAD, number, FileSlice(file.path, 0, file.size, file.md5))

    return Way(get, put)


def fusecache_ssl(site: Site) -> Way:
    """The same with Python's `ssl`, as where OpenSSL's library is not found."""
    own, tls.library = tls.library, lambda: None  # type: ignore[assignment]
    try:
        return fusecache(site)
    finally:
        tls.library = own


def urllib3_pool(site: Site) -> Way:
    """urllib3, which boto3 sends its requests with; signed by our signer."""
    import urllib3

    pool = urllib3.PoolManager(maxsize=site.threads, block=True, ca_certs=site.ca_path, retries=False)
    signer = Signer("auto")
    keys = SigningKeys(ACCESS_KEY, SECRET_KEY)
    path = f"/{BUCKET}/{KEY}"

    def get(buffer: memoryview, start: int) -> None:
        extent = f"bytes={start}-{start + len(buffer) - 1}"
        asked = {"host": site.netloc, "range": extent, "if-match": f'"{ETAG}"'}
        headers = signer.headers(path, asked, keys, time.time())
        answer = pool.request("GET", site.url + path, headers=headers, preload_content=False)
        _fill(answer.readinto, buffer)
        answer.release_conn()

    def put(file: File, number: int) -> None:
        query = part_query(UPLOAD, number)
        sent = {"host": site.netloc, "content-md5": file.content_md5, "content-length": str(file.size)}
        headers = signer.headers(path, sent, keys, time.time(), method="PUT", query=query, payload=UNSIGNED)
        with open(file.path, "rb") as body:
            pool.request("PUT", f"{site.url}{path}?{query}", headers=headers, body=body)

    return Way(get, put)


def boto3(site: Site) -> Way:
    """boto3, set up as the daemon does it; bodies are not hashed."""
    from tests.s3server.client import boto_client

    s3 = {"addressing_style": "path", "payload_signing_enabled": False}
    known = _Known(site.url, ACCESS_KEY, SECRET_KEY, site.ca_path if site.is_secure else None)
    client = boto_client(known, max_pool_connections=site.threads, s3=s3)

    def get(buffer: memoryview, start: int) -> None:
        asked = f"bytes={start}-{start + len(buffer) - 1}"
        answer = client.get_object(Bucket=BUCKET, Key=KEY, Range=asked, IfMatch=f'"{ETAG}"')
        with answer["Body"] as body:
            _fill(body.readinto, buffer)  # type: ignore[arg-type]  # wrong in the stubs

    def put(file: File, number: int) -> None:
        with open(file.path, "rb") as body:
            client.upload_part(
                Bucket=BUCKET,
                Key=KEY,
                UploadId=UPLOAD,
                PartNumber=number,
                Body=body,
                ContentMD5=file.content_md5,
            )

    return Way(get, put)


def awscrt(site: Site) -> Way:
    """The AWS Common Runtime, which `boto3[crt]` uses; it copies into the caller's buffer by a callback."""
    from awscrt.auth import AwsCredentialsProvider, AwsSignedBodyValue, AwsSigningAlgorithm, AwsSigningConfig
    from awscrt.http import HttpHeaders, HttpRequest
    from awscrt.io import ClientTlsContext, TlsContextOptions
    from awscrt.s3 import S3Client, S3RequestTlsMode, S3RequestType

    options = TlsContextOptions()
    options.override_default_trust_store_from_path(None, site.ca_path)
    client = S3Client(
        region="auto",
        tls_mode=S3RequestTlsMode.ENABLED if site.is_secure else S3RequestTlsMode.DISABLED,
        tls_connection_options=ClientTlsContext(options).new_connection_options() if site.is_secure else None,
        signing_config=AwsSigningConfig(
            algorithm=AwsSigningAlgorithm.V4,
            service="s3",
            region="auto",
            use_double_uri_encode=False,
            signed_body_value=AwsSignedBodyValue.UNSIGNED_PAYLOAD,
            credentials_provider=AwsCredentialsProvider.new_static(ACCESS_KEY, SECRET_KEY),
        ),
        part_size=8 * MIB,
        throughput_target_gbps=50.0,
        max_active_connections_override=site.threads,
    )

    def send(method: str, query: str, headers: dict[str, str], **more: Any) -> None:
        listed = HttpHeaders([("host", site.netloc), *headers.items()])
        request = HttpRequest(method, f"/{BUCKET}/{KEY}{query}", listed)
        client.make_request(request=request, **more).finished_future.result()

    def get(buffer: memoryview, start: int) -> None:
        filled = 0

        def on_body(chunk: bytes, offset: int, **_: object) -> None:
            nonlocal filled
            at = offset - start
            buffer[at : at + len(chunk)] = chunk
            filled += len(chunk)

        asked = {"range": f"bytes={start}-{start + len(buffer) - 1}", "if-match": f'"{ETAG}"'}
        send("GET", "", asked, type=S3RequestType.GET_OBJECT, on_body=on_body)
        _expect(filled, len(buffer))

    def put(file: File, number: int) -> None:
        sent = {"content-md5": file.content_md5, "content-length": str(file.size)}
        send(
            "PUT", f"?{part_query(UPLOAD, number)}", sent,
            type=S3RequestType.DEFAULT, operation_name="UploadPart", send_filepath=file.path,
        )  # fmt: skip

    return Way(get, put)


def obstore(site: Site) -> Way:
    """obstore, on Rust's object_store: it returns memory of its own, and sends no Content-MD5."""
    import obstore as library
    from obstore.store import S3Store as RustStore

    store = RustStore(
        BUCKET,
        endpoint=site.url,
        region="auto",
        access_key_id=ACCESS_KEY,
        secret_access_key=SECRET_KEY,
        unsigned_payload=True,
        # rustls takes no server whose certificate is its own CA, as the origin's is.
        client_options={"allow_http": True, "allow_invalid_certificates": True},
    )

    def get(buffer: memoryview, start: int) -> None:
        data = memoryview(library.get_range(store, KEY, start=start, length=len(buffer)))
        _expect(len(data), len(buffer))
        buffer[:] = data

    def put(file: File, number: int) -> None:
        library.put(store, f"{KEY}-{number}", Path(file.path), use_multipart=False)

    return Way(get, put)


def raw(site: Site) -> Way:
    """A socket for each thread: `recv_into` and, without TLS, `sendfile`; over TLS by Python's `ssl`."""
    context = ssl.create_default_context(cafile=site.ca_path) if site.is_secure else None
    host, port = urlsplit(site.url).hostname, urlsplit(site.url).port
    mine = local()

    def connected() -> socket.socket:
        sock: socket.socket | None = getattr(mine, "socket", None)
        if sock is None:
            sock = socket.create_connection((host, port))
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            mine.socket = sock = sock if context is None else context.wrap_socket(sock, server_hostname=host)
        return sock

    def answered(sock: socket.socket) -> bytes:
        received = b""
        while b"\r\n\r\n" not in received:
            received += sock.recv(16 * KIB)
        return received.partition(b"\r\n\r\n")[2]

    def get(buffer: memoryview, start: int) -> None:
        sock = connected()
        asked = f"Range: bytes={start}-{start + len(buffer) - 1}"
        sock.sendall(f"GET /{BUCKET}/{KEY} HTTP/1.1\r\nHost: {site.netloc}\r\n{asked}\r\n\r\n".encode())
        rest = answered(sock)
        buffer[: len(rest)] = rest
        filled, flags = len(rest), 0 if context else socket.MSG_WAITALL
        while filled < len(buffer):
            filled += sock.recv_into(buffer[filled : filled + PIECE_BYTES], 0, flags)

    def put(file: File, number: int) -> None:
        sock = connected()
        target = f"/{BUCKET}/{KEY}?partNumber={number}"
        head = f"PUT {target} HTTP/1.1\r\nHost: {site.netloc}\r\nContent-Length: {file.size}\r\n\r\n"
        sock.sendall(head.encode())
        with open(file.path, "rb") as body:
            sock.sendfile(body) if context is None else _send_pieces(sock, body.fileno(), file.size)
        answered(sock)

    return Way(get, put)


WAYS: dict[str, Callable[[Site], Way]] = {
    "fusecache": fusecache,
    "fusecache, ssl": fusecache_ssl,
    "urllib3": urllib3_pool,
    "boto3": boto3,
    "awscrt": awscrt,
    "obstore": obstore,
    "raw": raw,
}


def measure(
    way: Way, pool: Executor, site: Site, size: int, count: int, file: File | None
) -> dict[str, float]:
    """Send `count` requests of `size` bytes by the site's threads; return the figures.

    file: what to upload; None to fetch. Raises ValueError if the fetched bytes differ from the origin's.
    """
    buffers = [memoryview(bytearray(size if file is None else 0)) for _ in range(site.threads)]
    together = Barrier(site.threads)

    def send(number: int, place: int) -> None:
        if file is None:
            way.get(buffers[number], place * size)
        else:
            way.put(file, place + 1)

    def warm(number: int) -> None:
        together.wait()  # a thread that is done would take over another's turn, and its connection
        send(number, 0)

    def run(number: int) -> None:
        together.wait()
        for place in range(number, count, site.threads):
            send(number, place)

    list(pool.map(warm, range(site.threads)))
    cpu, began = cpu_seconds(), time.monotonic()
    list(pool.map(run, range(site.threads)))
    seconds, cpu = time.monotonic() - began, cpu_seconds() - cpu
    if file is None and any(buffer != BLOCK[:size] for buffer in buffers):
        raise ValueError("other bytes came than the origin has")
    return {"bytes": size * count, "seconds": seconds, "cpu_seconds": cpu}


def cpu_seconds() -> float:
    """Return the CPU time of this process and its children so far."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in used)


@dataclass(frozen=True, slots=True)
class _Known:
    endpoint_url: str
    access_key: str
    secret_key: str
    ca_path: str | None


def _fill(readinto: Callable[[memoryview], int], buffer: memoryview) -> None:
    filled = 0
    while filled < len(buffer):
        count = readinto(buffer[filled : filled + PIECE_BYTES])
        if not count:
            raise EOFError(f"{filled} of {len(buffer)} bytes came")
        filled += count


def _send_pieces(sock: socket.socket, descriptor: int, size: int) -> None:
    piece, offset = memoryview(bytearray(PIECE_BYTES)), 0
    while offset < size:
        count = os.preadv(descriptor, [piece], offset)
        sock.sendall(piece[:count])
        offset += count


def _expect(count: int, wanted: int) -> None:
    if count != wanted:
        raise EOFError(f"{count} of {wanted} bytes came")


def main() -> None:
    """Let the ways take turns: a row for each round and way, on a line of its own as soon as it is measured."""
    asked = json.loads(sys.argv[1])
    site = Site(asked["url"], asked["ca_path"], asked["threads"])
    size, file = asked["size"], None
    if asked["path"] is not None:
        digest = hashlib.md5(Path(asked["path"]).read_bytes(), usedforsecurity=False).digest()
        file = File(asked["path"], size, digest)
    ways: dict[str, Way] = {}
    with ThreadPoolExecutor(site.threads) as pool:
        for round_number in range(1, asked["rounds"] + 1):
            first = round_number % len(asked["ways"])
            for name in (*asked["ways"][first:], *asked["ways"][:first]):
                row: dict[str, Any] = {"round": round_number, "way": name, "load": os.getloadavg()[0]}
                try:
                    ways[name] = ways.get(name) or WAYS[name](site)
                    row |= measure(ways[name], pool, site, size, asked["count"], file)
                except Exception as exc:  # noqa: BLE001 (whatever a library raises: its row says so)
                    row["error"] = repr(exc)[:300]
                sys.stdout.write(json.dumps(row) + "\n")
                sys.stdout.flush()
    os._exit(0)  # some clients' threads outlive their last request


if __name__ == "__main__":
    main()
