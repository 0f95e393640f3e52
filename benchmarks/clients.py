"""Clients without a mount, as bounds: `python -m benchmarks.clients '{"task": …, "site": …}'` prints one JSON object.

`raw`: boto3, 32 threads, bodies read by `readinto` into reused buffers, nothing kept. `crt`: Mountpoint's engine.
"""

import base64
import hashlib
import http.client
import json
import os
import queue
import random
import ssl
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from benchmarks.origins import Site
from benchmarks.readers import PROOF_BYTES

if TYPE_CHECKING:
    from mypy_boto3_s3 import S3Client
    from mypy_boto3_s3.type_defs import CompletedPartTypeDef

MIB = 2**20
THREADS = 32
UPLOAD_THREADS = 16
RANGE_BYTES = 8 * MIB
# boto3's readinto makes a copy of each piece; 64 KiB to 8 MiB made no difference beyond the noise.
PIECE_BYTES = MIB
# Of 10, 50 and 100 Gbit/s with parts of 8 and 16 MiB these, the library's defaults, were the fastest here.
CRT_GIGABITS = 10.0
CRT_PART_BYTES = 8 * MIB


def _client(site: Site, connections: int, **config: Any) -> "S3Client":
    from tests.s3server import boto_client

    return boto_client(site, max_pool_connections=connections, **config)


def _read_range(client: "S3Client", site: Site, key: str, start: int, view: memoryview) -> None:
    stop = start + len(view)
    answer = client.get_object(Bucket=site.bucket, Key=key, Range=f"bytes={start}-{stop - 1}")
    done = 0
    with answer["Body"] as body:
        while done < len(view):
            got = body.readinto(view[done : done + PIECE_BYTES])  # type: ignore[arg-type]  # wrong in the stubs
            if not got:
                raise EOFError(f"body of {key} ended after {done} bytes")
            done += got


def raw_sequential(site: Site, key: str, size: int) -> dict[str, Any]:
    """Fetch one object whole."""
    client = _client(site, 64)
    buffers: queue.SimpleQueue[memoryview] = queue.SimpleQueue()
    for _ in range(THREADS):
        buffers.put(memoryview(bytearray(RANGE_BYTES)))
    proof: list[str] = []

    def fetch(start: int) -> int:
        buffer = buffers.get()
        view = buffer[: min(RANGE_BYTES, size - start)]
        _read_range(client, site, key, start, view)
        if start + len(view) == size:
            proof.append(hashlib.sha256(view[-PROOF_BYTES:]).hexdigest())
        count = len(view)
        buffers.put(buffer)
        return count

    with ThreadPoolExecutor(THREADS) as pool:
        began = time.monotonic()
        total = sum(pool.map(fetch, range(0, size, RANGE_BYTES)))
        seconds = time.monotonic() - began
    return {"bytes": total, "seconds": seconds, "proof": proof[0]}


def raw_upload(site: Site, key: str, path: str, part_bytes: int) -> dict[str, Any]:
    """Store a local file by a multipart upload with Content-MD5; whole_seconds: from its creation to its end.

    The body is not signed as well: one digest of each part, as over TLS.
    """
    client = _client(site, UPLOAD_THREADS, s3={"addressing_style": "path", "payload_signing_enabled": False})
    size = os.path.getsize(path)
    with open(path, "rb", buffering=0) as file:
        buffer = bytearray(PIECE_BYTES)
        while file.readinto(buffer):
            pass  # into the page cache, where a file that was just written is, too
        began = time.time()
        upload_id = client.create_multipart_upload(Bucket=site.bucket, Key=key)["UploadId"]

        def upload(number: int) -> "CompletedPartTypeDef":
            offset = (number - 1) * part_bytes
            body = os.pread(file.fileno(), min(part_bytes, size - offset), offset)
            digest = base64.b64encode(hashlib.md5(body, usedforsecurity=False).digest()).decode()
            answer = client.upload_part(
                Bucket=site.bucket,
                Key=key,
                UploadId=upload_id,
                PartNumber=number,
                Body=body,
                ContentMD5=digest,
            )
            return {"PartNumber": number, "ETag": answer["ETag"]}

        with ThreadPoolExecutor(UPLOAD_THREADS) as pool:
            parts = list(pool.map(upload, range(1, -(-size // part_bytes) + 1)))
    client.complete_multipart_upload(
        Bucket=site.bucket, Key=key, UploadId=upload_id, MultipartUpload={"Parts": parts}
    )
    return {"bytes": size, "whole_seconds": time.time() - began}


def raw_scattered(
    site: Site, key: str, size: int, read_bytes: int, threads: int, count: int, duration: float, seed: int
) -> dict[str, Any]:
    """Fetch `count` pieces at random aligned places, or as many as fit in `duration` seconds."""
    client = _client(site, threads)
    places = random.Random(seed).sample(range(size // read_bytes), count)
    took: list[float] = []
    failures: list[Exception] = []
    deadline = time.monotonic() + duration
    began = time.monotonic()

    def read() -> None:
        view = memoryview(bytearray(read_bytes))
        try:
            while time.monotonic() < deadline:
                try:
                    place = places.pop()
                except IndexError:
                    return
                start = time.monotonic()
                _read_range(client, site, key, place * read_bytes, view)
                took.append(time.monotonic() - start)
        except Exception as exc:  # noqa: BLE001 (handed over to the thread that asked)
            failures.append(exc)

    workers = [threading.Thread(target=read) for _ in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    elapsed = time.monotonic() - began
    if failures:
        raise failures[0]
    return {"reads": len(took), "seconds": elapsed, "mean_seconds": sum(took) / len(took)}


def first_byte(site: Site, key: str, size: int, read_bytes: int, count: int, seed: int) -> dict[str, Any]:
    """Return the mean seconds from a signed GET's first byte to the first byte of its answer, on one connection."""
    from botocore.auth import S3SigV4Auth
    from botocore.awsrequest import AWSRequest
    from botocore.credentials import Credentials

    parts = urlsplit(site.endpoint_url)
    assert parts.hostname is not None
    connection: http.client.HTTPConnection
    if site.ca_path is None:
        connection = http.client.HTTPConnection(parts.hostname, parts.port)
    else:
        context = ssl.create_default_context(cafile=site.ca_path)
        connection = http.client.HTTPSConnection(parts.hostname, parts.port, context=context)
    signer = S3SigV4Auth(Credentials(site.access_key, site.secret_key), "s3", "auto")
    took = []
    connection.connect()
    for place in random.Random(seed).sample(range(size // read_bytes), count):
        start = place * read_bytes
        url = f"{site.endpoint_url}/{site.bucket}/{key}"
        request = AWSRequest("GET", url, headers={"Range": f"bytes={start}-{start + read_bytes - 1}"})
        signer.add_auth(request)
        began = time.monotonic()
        connection.request("GET", f"/{site.bucket}/{key}", headers=dict(request.headers.items()))
        answer = connection.getresponse()
        took.append(time.monotonic() - began)
        if answer.status != 206 or len(answer.read()) != read_bytes:
            raise EOFError(f"status {answer.status}")
    connection.close()
    return {"reads": count, "mean_seconds": sum(took) / count}


def raw_names(site: Site, pages: int | None = None) -> dict[str, Any]:
    """List a bucket by boto3's paginator; `pages` limits how far."""
    client = _client(site, 4)
    began = time.monotonic()
    count, first = 0, 0.0
    paginator = client.get_paginator("list_objects_v2")
    for number, page in enumerate(paginator.paginate(Bucket=site.bucket, Delimiter="/"), 1):
        if not count:
            first = time.monotonic() - began
        count += len(page.get("Contents", []))
        if number == pages:
            break
    return {"names": count, "first_seconds": first, "seconds": time.monotonic() - began}


def crt_sequential(site: Site, key: str, size: int) -> dict[str, Any]:
    """Fetch one object whole, in order, by the CRT client that mountpoint-s3 is made of."""
    from s3torchconnectorclient._mountpoint_s3_client import MountpointS3Client

    client = MountpointS3Client(
        "auto",
        "benchmark",
        throughput_target_gbps=CRT_GIGABITS,
        part_size=CRT_PART_BYTES,
        endpoint=site.endpoint_url,
        force_path_style=True,
    )
    total, tail = 0, b""
    began = time.monotonic()
    for piece in client.get_object(site.bucket, key):
        total += len(piece)
        tail = piece
    seconds = time.monotonic() - began
    if total != size or len(tail) < PROOF_BYTES:
        raise EOFError(f"{total} of {size} bytes came, {len(tail)} in the last piece")
    return {"bytes": total, "seconds": seconds, "proof": hashlib.sha256(tail[-PROOF_BYTES:]).hexdigest()}


TASKS: dict[str, Callable[..., dict[str, Any]]] = {
    task.__name__: task
    for task in (raw_sequential, raw_upload, raw_scattered, first_byte, raw_names, crt_sequential)
}


def main() -> None:
    """Do one task."""
    request = json.loads(sys.argv[1])
    site = Site(**request.pop("site"))
    sys.stdout.write(json.dumps(TASKS[request.pop("task")](site, **request)) + "\n")


if __name__ == "__main__":
    main()
