"""Where the examples run: the store that FUSECACHE_TEST_* name, or the tests' S3 server on this machine."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.s3server import ServerProcess


@dataclass(frozen=True, slots=True)
class Store:
    """A bucket, its keys, and the server if it is ours."""

    endpoint_url: str
    bucket: str
    access_key: str
    secret_key: str
    server: ServerProcess | None = None


@contextmanager
def open_store(directory: Path | None = None) -> Iterator[Store]:
    """Yield the store. directory: for the objects of the server of this machine."""
    if endpoint := os.environ.get("FUSECACHE_TEST_ENDPOINT"):
        names = ("BUCKET", "ACCESS_KEY", "SECRET_KEY")
        yield Store(endpoint, *(os.environ[f"FUSECACHE_TEST_{name}"] for name in names))
        return
    with ServerProcess(directory) as server:
        yield Store(server.endpoint_url, server.bucket, server.access_key, server.secret_key, server)
