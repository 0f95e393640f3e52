"""The buckets that benchmarks read and write: the project's own test server, near and far, with and without TLS.

A data set is a bucket of its own, so that the root of a mount is the folder under test. Origins A, B, D, E and F are
one server process with other settings; C is a second one that speaks TLS. A `twin` is another process with the same
settings, for a data set at two endpoints.
"""

import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.s3server import Control, ServerProcess, boto_client

MEMORY = Path("/dev/shm")


@dataclass(frozen=True, slots=True)
class Origin:
    """How far away a bucket seems: seconds to the first byte ± a fraction, bytes/s a connection, each way.

    total_bandwidth: bytes/s down all connections together.
    """

    name: str
    title: str
    latency_seconds: float = 0.0
    jitter: float = 0.0
    bandwidth: float | None = None
    tls: bool = False
    total_bandwidth: float | None = None


ORIGINS: Mapping[str, Origin] = {
    origin.name: origin
    for origin in (
        Origin("A", "no delay"),
        Origin("B", "40 ms ± 50 %, 80 MB/s a connection", 0.040, 0.5, 80e6),
        Origin("C", "as B, over TLS", 0.040, 0.5, 80e6, tls=True),
        Origin("D", "100 ms", 0.100),
        Origin("E", "300 MB/s in all", total_bandwidth=300e6),
        Origin("F", "100 MB/s in all", total_bandwidth=100e6),
    )
}


@dataclass(frozen=True, slots=True)
class Site:
    """Where a client finds one data set: endpoint, keys, bucket; ca_path is None without TLS."""

    endpoint_url: str
    access_key: str
    secret_key: str
    ca_path: str | None
    bucket: str

    def environment(self) -> dict[str, str]:
        """Return the variables of a process that reads it; nothing of this machine's own AWS set-up is asked."""
        others = {
            name: value
            for name, value in os.environ.items()
            # What is installed has its bytecode, and does not compile itself at each start.
            if not name.startswith(("FUSECACHE_", "AWS_", "RCLONE_", "S3_", "PYTHONDONTWRITEBYTECODE"))
        }
        trust = {}
        if self.ca_path is not None:
            # boto3 and fusecache; libcurl in s3fs; the TLS library of the CRT client.
            trust = dict.fromkeys(("AWS_CA_BUNDLE", "CURL_CA_BUNDLE", "SSL_CERT_FILE"), self.ca_path)
        return {
            **others,
            "AWS_ACCESS_KEY_ID": self.access_key,
            "AWS_SECRET_ACCESS_KEY": self.secret_key,
            "AWS_CONFIG_FILE": "/dev/null",
            "AWS_SHARED_CREDENTIALS_FILE": "/dev/null",
            "AWS_EC2_METADATA_DISABLED": "true",
            **trust,
        }


class Origins:
    """The servers of one run, each started when first asked for; a context manager that ends them all.

    memory_bytes: what is stored lies in memory if there is room for so much, and not on the disk of the caches:
    a bucket elsewhere does not write there.
    """

    def __init__(self, *, memory_bytes: int = 0) -> None:
        self._memory_bytes = memory_bytes
        self._stack = ExitStack()
        self._servers: dict[tuple[bool, bool], ServerProcess] = {}
        self._buckets: set[tuple[bool, bool, str]] = set()

    def __enter__(self) -> "Origins":
        return self

    def __exit__(self, *failure: object) -> None:
        self._stack.close()
        self._servers.clear()

    def control(self, origin: Origin, *, twin: bool = False) -> Control:
        """Return the hand behind an origin's server."""
        return self._server(origin, twin=twin).control

    def reset(self, origin: Origin) -> None:
        """Forget every object, upload and request of an origin's server; the buckets stay."""
        self._server(origin).control.reset()

    def add_bucket(self, origin: Origin, bucket: str, *, twin: bool = False) -> bool:
        """Make a bucket unless it is there; return whether it is new, and so without its objects."""
        if (origin.tls, twin, bucket) in self._buckets:
            return False
        client = boto_client(self._server(origin, twin=twin))
        try:
            client.create_bucket(Bucket=bucket)
        finally:
            client.close()
        self._buckets.add((origin.tls, twin, bucket))
        return True

    @contextmanager
    def answering(self, origin: Origin, bucket: str, *, twin: bool = False) -> Iterator[Site]:
        """Let the server seem as far away as `origin` says, with an empty request log, and near again at the end."""
        server = self._server(origin, twin=twin)
        server.control.set(
            latency=origin.latency_seconds,
            jitter=origin.jitter,
            bandwidth=origin.bandwidth,
            upload_bandwidth=origin.bandwidth,
            total_bandwidth=origin.total_bandwidth,
        )
        server.control.clear_log()
        try:
            yield Site(server.endpoint_url, server.access_key, server.secret_key, server.ca_path, bucket)
        finally:
            server.control.set(
                latency=0.0, jitter=0.0, bandwidth=None, upload_bandwidth=None, total_bandwidth=None
            )

    def _server(self, origin: Origin, *, twin: bool = False) -> ServerProcess:
        server = self._servers.get((origin.tls, twin))
        if server is None:
            server = self._stack.enter_context(ServerProcess(self._directory(), tls=origin.tls))
            self._servers[origin.tls, twin] = server
        return server

    def _directory(self) -> Path | None:
        """Return a new folder in memory, None if nothing is to be, or fits, there."""
        if not self._memory_bytes or free_memory_bytes() < self._memory_bytes:
            return None
        folder = Path(tempfile.mkdtemp(prefix="fusecache-bench-", dir=MEMORY))
        self._stack.callback(shutil.rmtree, folder, ignore_errors=True)
        return folder


def free_memory_bytes() -> int:
    """Return how much a folder in memory may take: what its file system and the machine have left."""
    if not MEMORY.is_dir():
        return 0
    line = next(
        line for line in Path("/proc/meminfo").read_text().splitlines() if line.startswith("MemAvailable:")
    )
    return min(shutil.disk_usage(MEMORY).free, int(line.split()[1]) * 1024)
