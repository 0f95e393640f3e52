"""How fast the test server delivers: GETs of 8 MiB ranges by parallel clients on loopback.

Prints one JSON line. It bounds what any benchmark against this server can show: a figure near it measures the
server, not the client. Clients are raw sockets with signed requests, in one process with threads.
"""

import argparse
import json
import platform
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from urllib.parse import urlsplit

from botocore.auth import S3SigV4Auth
from botocore.awsrequest import AWSRequest
from botocore.credentials import Credentials

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # so that the script runs from anywhere

from tests.s3server import ServerProcess  # noqa: E402 (the path comes first)

MIB = 2**20
GIB = 2**30
KEY = "speed"


def signed_request(server: ServerProcess, start: int, stop: int) -> bytes:
    """Return the head of a signed GET of bytes [start, stop)."""
    url = f"{server.endpoint_url}/{server.bucket}/{KEY}"
    headers = {"Range": f"bytes={start}-{stop - 1}"}
    request = AWSRequest(method="GET", url=url, headers=headers)
    S3SigV4Auth(Credentials(server.access_key, server.secret_key), "s3", "auto").add_auth(request)
    host = urlsplit(url).netloc
    lines = [f"GET /{server.bucket}/{KEY} HTTP/1.1", f"Host: {host}"]
    lines += [f"{name}: {value}" for name, value in request.headers.items()]
    return ("\r\n".join(lines) + "\r\n\r\n").encode()


def read_ranges(server: ServerProcess, ranges: list[tuple[int, int]], failures: list[str]) -> None:
    """Fetch ranges one after the other over one connection, into one buffer."""
    address = urlsplit(server.endpoint_url)
    buffer = memoryview(bytearray(max(stop - start for start, stop in ranges) + 65_536))
    with socket.create_connection((address.hostname, address.port)) as sock:
        for start, stop in ranges:
            sock.sendall(signed_request(server, start, stop))
            count, wanted = 0, -1
            while wanted < 0 or count < wanted:
                received = sock.recv_into(buffer[count:])
                if not received:
                    failures.append(f"connection closed after {count} bytes")
                    return
                count += received
                if wanted < 0 and (end := bytes(buffer[:4096]).find(b"\r\n\r\n")) >= 0:
                    if not bytes(buffer[:12]).endswith(b"206"):
                        failures.append(bytes(buffer[:200]).decode("latin-1"))
                        return
                    wanted = end + 4 + stop - start


def measure(server: ServerProcess, total: int, range_bytes: int, clients: int) -> float:
    """Return the seconds that `clients` threads take for `total` bytes. RuntimeError if a GET fails."""
    ranges = [(start, start + range_bytes) for start in range(0, total, range_bytes)]
    failures: list[str] = []
    threads = [
        threading.Thread(target=read_ranges, args=(server, ranges[n::clients], failures))
        for n in range(clients)
    ]
    began = time.monotonic()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    seconds = time.monotonic() - began
    if failures:
        raise RuntimeError(failures[0])
    return seconds


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gib", type=int, default=2)
    parser.add_argument("--clients", type=int, default=4)
    parser.add_argument("--range-mib", type=int, default=8)
    parser.add_argument("--body", choices=["file", "synthetic"], default="synthetic")
    options = parser.parse_args()
    total, range_bytes = options.gib * GIB, options.range_mib * MIB
    with ServerProcess() as server:
        if options.body == "synthetic":
            server.control.add_synthetic(KEY, total, seed=1)
        else:
            server.control.put(KEY, bytes(total))
        measure(server, min(total, 256 * MIB), range_bytes, options.clients)  # warm caches and threads
        seconds = measure(server, total, range_bytes, options.clients)
    revision = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    result = {
        "benchmark": "origin_speed",
        "revision": revision.stdout.strip(),
        "machine": platform.platform(),
        "body": options.body,
        "clients": options.clients,
        "range_bytes": range_bytes,
        "bytes": total,
        "seconds": round(seconds, 3),
        "gigabytes_per_second": round(total / seconds / 1e9, 3),
    }
    sys.stdout.write(json.dumps(result) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
