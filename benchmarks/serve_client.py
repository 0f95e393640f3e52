"""One client of `fusecache serve`, and the bare loop beside it: prints bytes a second."""

import os
import socket
import sys
import threading
import time
from collections.abc import Callable

from tests.mount.serving import client_of


def get(url: str, bucket: str, secret: str, size: str) -> float:
    """Read an object through the server: signed by boto3, received by a plain socket."""
    client = client_of(url, secret)
    signed: dict[str, str] = {}
    client.meta.events.register(
        "before-send.s3.GetObject", lambda request, **_: signed.update(_text(request))
    )
    client.get_object(Bucket=bucket, Key="model")["Body"].close()
    client.close()
    host, _, port = url.removeprefix("http://").rpartition(":")
    with socket.create_connection((host, int(port))) as connection:
        began = time.monotonic()
        lines = "".join(f"{name}: {value}\r\n" for name, value in signed.items())
        connection.sendall(f"GET /{bucket}/model HTTP/1.1\r\nhost: {host}:{port}\r\n{lines}\r\n".encode())
        return _received(connection, int(size), began)


def bare(path: str, size: str) -> float:
    """Receive a file that another thread sends by sendfile, and nothing else."""
    listener = socket.create_server(("127.0.0.1", 0))

    def send() -> None:
        connection, _ = listener.accept()
        with connection, open(path, "rb") as file:
            at = 0
            while at < int(size):
                at += os.sendfile(connection.fileno(), file.fileno(), at, min(1 << 20, int(size) - at))

    thread = threading.Thread(target=send)
    thread.start()
    with socket.create_connection(listener.getsockname()) as connection:
        rate = _received(connection, int(size), time.monotonic())
    thread.join()
    listener.close()
    return rate


def _text(request: object) -> dict[str, str]:
    headers: dict[str, bytes | str] = dict(request.headers)  # type: ignore[attr-defined]
    return {
        name: value.decode() if isinstance(value, bytes) else value
        for name, value in headers.items()
        if name.lower() != "host"
    }


def _received(connection: socket.socket, size: int, began: float) -> float:
    buffer, received = bytearray(1 << 20), 0
    while received < size:
        count = connection.recv_into(buffer)
        if not count:
            raise SystemExit(f"{received} of {size} bytes came")
        received += count
    return received / (time.monotonic() - began)


if __name__ == "__main__":
    ways: dict[str, Callable[..., float]] = {"get": get, "bare": bare}
    sys.stdout.write(f"{ways[sys.argv[1]](*sys.argv[2:])}\n")
