"""CPU of one request to the test server, by kind: `python -m benchmarks.request_cost [TREE …]`.

Milliseconds of `time.process_time`, of the client alone. Each TREE is a checkout (default: this one); they take turns,
each round in a new process. Prints the median over the rounds.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from fusecache.model.errors import ObjectMissing
from fusecache.model.objects import KIB, Extent, ObjectId
from fusecache.remote.endpoints import Credentials, Endpoint
from fusecache.remote.s3.store import S3Store
from fusecache.remote.store import Condition, FileSlice

ROOT = Path(__file__).resolve().parents[1]
NAMES = 200
BODY_BYTES = 4 * KIB


def main() -> None:
    """Measure, and print a line for each kind of request."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("trees", nargs="*", type=Path, default=[ROOT], metavar="TREE")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--repeat", type=int, default=300, help="requests of each kind in a round")
    options = parser.parse_args()
    from tests.s3server import ServerProcess

    found: dict[str, dict[Path, list[float]]] = {}
    with ServerProcess() as server:
        server.control.set_rules(write_interval_seconds=0.0)
        for index in range(NAMES):
            server.control.put(f"names/{index:04}", b"x")
        where = [
            server.endpoint_url,
            server.bucket,
            server.access_key,
            server.secret_key,
            str(options.repeat),
        ]
        for number in range(options.rounds):
            for tree in options.trees if number % 2 else reversed(options.trees):
                child = [sys.executable, __file__, "--child", *where]
                shown = subprocess.run(
                    child, env={**os.environ, "PYTHONPATH": str(tree)}, check=True, capture_output=True
                )
                for kind, figure in json.loads(shown.stdout).items():
                    found.setdefault(kind, {}).setdefault(tree, []).append(figure)
    for kind, by_tree in found.items():
        figures = "  ".join(f"{statistics.median(by_tree[tree]):7.2f}" for tree in options.trees)
        print(f"{kind:28} {figures} ms")  # noqa: T201 (its only output)


def measure(url: str, bucket: str, access_key: str, secret_key: str, repeat: int) -> dict[str, float]:
    """Return milliseconds of CPU by kind of request."""

    def start() -> S3Store:
        store = S3Store(bucket, Endpoint(url, "auto"), credentials=Credentials(access_key, secret_key))
        store.list_page("names/", limit=1)
        store.probe_write("")
        return store

    def per_call(call: Callable[[int], object], times: int) -> float:
        began = time.process_time()
        for number in range(times):
            call(number)
        return (time.process_time() - began) * 1000 / times

    first = per_call(lambda _: start(), 1)
    store = start()
    body, buffer = FileSlice(__file__, 0, BODY_BYTES), memoryview(bytearray(BODY_BYTES))
    object_id = ObjectId("object", store.put("object", body, metadata={}))

    def head_of_nothing(_: int) -> None:
        with suppress(ObjectMissing):
            store.head("nothing")

    uploads: list[str] = []
    calls: dict[str, Callable[[int], object]] = {
        "HEAD": lambda _: store.head("object"),
        "HEAD of no object": head_of_nothing,
        f"LIST of {NAMES} names": lambda _: store.list_page("names/"),
        "GET 4 KiB": lambda _: store.get_into(object_id, Extent(0, BODY_BYTES), buffer, lambda _: None),
        "PUT 4 KiB": lambda n: store.put(f"new/{n}", body, metadata={"mode": "1"}, condition=Condition(None)),
        "COPY": lambda n: store.copy(object_id, f"copy/{n}", size=BODY_BYTES),
        "DELETE": lambda n: store.delete(f"new/{n}"),
        "CREATE UPLOAD": lambda n: uploads.append(store.create_multipart(f"up/{n}", metadata={"mode": "1"})),
        "ABORT UPLOAD": lambda n: store.abort_multipart(f"up/{n}", uploads[n]),
    }
    figures = {kind: per_call(call, repeat) for kind, call in calls.items()}
    for number in range(repeat):
        store.delete(f"copy/{number}")
    return {**figures, "first store of a process": first, "start of a store": per_call(lambda _: start(), 10)}


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        url, bucket, access_key, secret_key, count = sys.argv[2:]
        print(json.dumps(measure(url, bucket, access_key, secret_key, int(count))))  # noqa: T201 (read by its parent)
    else:
        main()
