"""`python -m tests.s3server`: the server from the shell. One JSON line on standard output once it listens."""

import argparse
import json
import multiprocessing
import os
import secrets
import signal
import sys
import threading
from multiprocessing.connection import Connection, Listener
from typing import Any

from tests.s3server.accounts import Account
from tests.s3server.control import Control
from tests.s3server.process import CONTROL_METHODS
from tests.s3server.rules import Rules, Settings
from tests.s3server.server import DEFAULT_ACCESS_KEY, DEFAULT_SECRET_KEY, S3Server


def main() -> int:
    """Run until SIGTERM or SIGINT, or until standard input closes if so asked."""
    options = _parse(sys.argv[1:])
    ended = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: ended.set())
    server = S3Server(
        options.directory,
        bucket=options.bucket,
        tls=options.tls,
        port=options.port,
        access_key=options.access_key,
        secret_key=options.secret_key,
        rules=Rules(write_interval_seconds=options.write_interval),
        settings=Settings(
            latency=options.latency,
            jitter=options.jitter,
            bandwidth=options.bandwidth,
            upload_bandwidth=options.upload_bandwidth,
        ),
    )
    for account in options.account:
        server.control.add_bucket(account.buckets[0])
        server.control.add_account(account)
    server.host = options.host
    with server:
        facts: dict[str, Any] = {
            "endpoint_url": server.endpoint_url,
            "access_key": server.access_key,
            "secret_key": server.secret_key,
            "bucket": server.bucket,
            "ca_path": server.ca_path,
            "port": server.port,
            "pid": os.getpid(),
        }
        if options.with_control:
            secret = secrets.token_bytes(32)
            listener = Listener(("127.0.0.1", 0), backlog=64, authkey=secret)
            threading.Thread(target=_accept, args=(listener, server.control), daemon=True).start()
            facts["control"] = (listener.address, secret.hex())
        if options.exit_with_stdin:
            threading.Thread(target=_watch_stdin, args=(ended,), daemon=True).start()
        sys.stdout.write(json.dumps(facts) + "\n")
        sys.stdout.flush()
        ended.wait()
    return 0


def _parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.s3server", description=__doc__)
    parser.add_argument("--bucket", default="bucket")
    parser.add_argument("--directory", help="where objects are kept (default: a temporary one)")
    parser.add_argument("--port", type=int, default=0, help="0: any free one")
    parser.add_argument("--host", default="127.0.0.1", help="the address of this machine to listen on")
    parser.add_argument("--access-key", default=DEFAULT_ACCESS_KEY)
    parser.add_argument("--secret-key", default=DEFAULT_SECRET_KEY)
    parser.add_argument(
        "--account", type=_account, action="append", default=[], metavar="KEY:SECRET:read|write:BUCKET",
        help="another key, for this bucket alone, which is made; may be repeated",
    )  # fmt: skip
    parser.add_argument("--tls", action="store_true", help="https with a certificate made at start")
    parser.add_argument("--latency", type=float, default=0.0, help="seconds before an answer's first byte")
    parser.add_argument("--jitter", type=float, default=0.0, help="it varies by ± this fraction")
    parser.add_argument("--bandwidth", type=float, help="bytes a second down each connection")
    parser.add_argument("--upload-bandwidth", type=float, help="bytes a second up each connection")
    parser.add_argument("--write-interval", type=float, default=1.0, help="seconds between writes of one key")
    parser.add_argument("--exit-with-stdin", action="store_true", help="end when standard input closes")
    parser.add_argument("--with-control", action="store_true", help="listen for a RemoteControl")
    return parser.parse_args(arguments)


def _account(text: str) -> Account:
    access_key, secret_key, rights, bucket = text.split(":")
    if rights not in ("read", "write"):
        raise ValueError(rights)
    return Account(access_key, secret_key, writable=rights == "write", buckets=(bucket,))


def _watch_stdin(ended: threading.Event) -> None:
    while os.read(sys.stdin.fileno(), 4096):
        pass
    ended.set()


def _accept(listener: Listener, control: Control) -> None:
    while True:
        try:
            connection = listener.accept()
        except (multiprocessing.AuthenticationError, EOFError, OSError):
            continue  # somebody without the secret, or gone again
        threading.Thread(target=_obey, args=(connection, control), daemon=True).start()


def _obey(connection: "Connection[Any, Any]", control: Control) -> None:
    """Carry out one client's calls until it closes."""
    with connection:
        while True:
            try:
                name, arguments, options = connection.recv()
            except (EOFError, OSError):
                return
            try:
                if name not in CONTROL_METHODS:
                    raise AttributeError(name)
                outcome = (True, getattr(control, name)(*arguments, **options))
            except Exception as exc:  # noqa: BLE001 (whatever it is, the caller raises it)
                outcome = (False, exc)
            connection.send(outcome)


if __name__ == "__main__":
    sys.exit(main())
