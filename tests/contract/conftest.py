"""The stores that the contract is run on: memory, S3 over the project's test server, any S3 by environment, Google
Cloud Storage as a fake of its XML API, and Azure over Azurite where that is installed.

FUSECACHE_TEST_ENDPOINT, _BUCKET, _ACCESS_KEY and _SECRET_KEY name another S3, which is then the only store. No test
asks it for R2's own rules. All tests of other stores have the mark `s3server_only`: `make test` runs them.
"""

import os
import ssl
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

import pytest

from fusecache.model.objects import ObjectId
from fusecache.remote.endpoint_group import EndpointGroup, EndpointReader
from fusecache.remote.endpoints import Credentials, Endpoint, Transport, choose_endpoint
from fusecache.remote.read_write_split import ReadWriteSplit
from fusecache.remote.s3.store import S3Store
from fusecache.remote.store import FileSlice, Store
from tests.s3server import S3Server
from tests.s3server.certificate import make_certificate
from tests.support.azurite import Azurite
from tests.support.clouds import azure_store, gcs_store, running_azurite
from tests.support.gcs_server import GcsServer
from tests.support.marks import is_below
from tests.support.memory_store import MemoryStore
from tests.support.peer import MakePeer, Peer, Script, openssl_trust

# One attempt: what a single answer does, without the pause before the second. More patient than a busy machine
# stands still.
ONCE = Transport(attempts=1, connect_timeout_seconds=15, read_timeout_seconds=15)
# For tests that wait for the end of its patience.
HASTY = replace(ONCE, read_timeout_seconds=3)
# Small enough to see the copy in parts without moving gigabytes; parts as small as buckets allow.
SMALL_COPIES = Transport(single_copy_bytes=6 * 2**20, copy_part_bytes=5 * 2**20)


@dataclass(frozen=True, slots=True)
class Subject:
    """A store under test, a prefix of its own in it, and whether the bucket keeps R2's rules.

    lacks: what the store does not have of S3: "uploads" to list and drop, a "part minimum", "MD5" as ETag; or only the
    emulator: "limits" of keys and ranges.
    """

    store: Store
    prefix: str
    is_r2: bool
    lacks: frozenset[str] = frozenset()

    def key(self, name: str) -> str:
        """Return a key that no other test uses."""
        return self.prefix + name


class EqualEndpoints(EndpointGroup):
    """Two endpoints of one bucket: each has at once what was written through the other."""

    def on_written(self, object_id: ObjectId) -> None:
        """The other endpoint has it, too."""


STORES = (
    ["external"]
    if os.environ.get("FUSECACHE_TEST_ENDPOINT")
    else ["memory", "s3", "endpoints", "gcs", "azure"]
)
T = TypeVar("T", bound=Store)

# Stores of the test that runs, and of the session.
_STORES: list[Store] = []
# The session's servers, which run in this process with a thread for each connection.
_SERVERS: list[S3Server] = []


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave the other stores' tests out of a run on an external store: its answers change nothing in them."""
    here = Path(__file__).parent
    for item in items:
        callspec = getattr(item, "callspec", None)
        is_external = callspec is not None and callspec.params.get("subject") == "external"
        if is_below(item, here) and not is_external:
            item.add_marker(pytest.mark.s3server_only)


@pytest.fixture(autouse=True)
def closed_connections() -> Iterator[None]:
    """Close at the end of a test what its stores opened, and see the servers' threads for that end."""
    count = len(_STORES)
    yield
    for store in _STORES:
        store.close()
    del _STORES[count:]
    for server in _SERVERS:
        server.control.clear_faults()  # some hold a request until then
        server.control.drop_connections()


def closed_later(store: T) -> T:
    """Return the store; it is closed at the end of the test."""
    _STORES.append(store)
    return store


@pytest.fixture(scope="session")
def shared_server() -> Iterator[S3Server]:
    """The test server with R2's rules but the one write a second on a key, which would only slow tests."""
    with S3Server() as server:
        server.control.set_rules(write_interval_seconds=0.0)
        _SERVERS.append(server)
        yield server
        assert server.control.offences() == []


@pytest.fixture(scope="session", params=[False, True], ids=["http", "tls"])
def both_servers(request: pytest.FixtureRequest) -> Iterator[S3Server]:
    """A plain test server, then one with TLS, each for all tests of `server`."""
    with S3Server(tls=request.param) as server:
        _SERVERS.append(server)
        yield server
        assert server.control.offences() == []


@pytest.fixture
def server(both_servers: S3Server, monkeypatch: pytest.MonkeyPatch) -> S3Server:
    """A server as new, and trusted."""
    if both_servers.ca_path is not None:
        monkeypatch.setenv("AWS_CA_BUNDLE", both_servers.ca_path)
    both_servers.control.reset()
    both_servers.control.drop_connections()  # what a test left on its way has taken effect by then
    both_servers.control.reset()
    both_servers.control.set_rules(write_interval_seconds=0.0)
    return both_servers


@pytest.fixture(scope="session")
def both_stores(both_servers: S3Server) -> Iterator[S3Store]:
    """A client of each server, which asks once."""
    with pytest.MonkeyPatch.context() as patch:
        if both_servers.ca_path is not None:
            patch.setenv("AWS_CA_BUNDLE", both_servers.ca_path)
        yield s3_store(both_servers, ONCE)


@pytest.fixture
def store(server: S3Server, both_stores: S3Store) -> S3Store:
    """A store that has shown that it may write, as every mount has, on new connections."""
    both_stores.probe_write("")
    server.control.drop_connections()
    server.control.clear_log()
    return both_stores


@pytest.fixture
def hasty_store(server: S3Server) -> S3Store:
    """A store that has shown that it may write, and waits little for an answer."""
    store = s3_store(server, HASTY)
    store.probe_write("")
    return store


def s3_store(server: S3Server, transport: Transport | None = None) -> S3Store:
    """Return a store on a test server; it is closed at the end of the test."""
    return closed_later(
        S3Store(
            server.bucket,
            Endpoint(server.endpoint_url, "auto", is_r2=True),
            credentials=Credentials(server.access_key, server.secret_key),
            transport=transport,
        )
    )


@pytest.fixture(scope="session")
def gcs_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GcsServer]:
    """A fake of Google Cloud Storage, and the key file of a service account of it in the environment."""
    with GcsServer() as server, pytest.MonkeyPatch.context() as patch:
        key_file = server.key_file(tmp_path_factory.mktemp("gcs") / "key.json")
        patch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(key_file))
        yield server
        assert server.offences == []


@pytest.fixture(scope="session")
def azurite() -> Iterator[Azurite]:
    """Azurite with a container."""
    with running_azurite() as server:
        yield server


@pytest.fixture
def kept_by_the_session(request: pytest.FixtureRequest) -> None:
    """Start a server of the session before the first look: it outlives the test."""
    if "azurite" in request.fixturenames:
        request.getfixturevalue("azurite")
    callspec = getattr(request.node, "callspec", None)
    name = {"gcs": "gcs_server", "azure": "azurite"}.get(callspec.params.get("subject")) if callspec else None
    if name is not None:
        request.getfixturevalue(name)


@pytest.fixture(params=STORES)
def subject(request: pytest.FixtureRequest, shared_server: S3Server) -> Subject:
    """Each store in turn."""
    prefix = f"{uuid.uuid4().hex}/"
    if request.param == "memory":
        return Subject(MemoryStore(), prefix, is_r2=True)
    if request.param == "s3":
        return Subject(s3_store(shared_server, SMALL_COPIES), prefix, is_r2=True)
    if request.param == "endpoints":
        readers = [s3_store(shared_server, SMALL_COPIES) for _ in range(2)]
        group = EqualEndpoints([EndpointReader(f"endpoint-{n}", each) for n, each in enumerate(readers)])
        return Subject(ReadWriteSplit(group, readers[0], prefix=prefix), prefix, is_r2=True)
    if request.param == "gcs":
        store = gcs_store(request.getfixturevalue("gcs_server"))
        return Subject(closed_later(store), prefix, is_r2=False)
    if request.param == "azure":
        lacks = frozenset({"uploads", "part minimum", "MD5", "limits"})
        return Subject(
            closed_later(azure_store(request.getfixturevalue("azurite"))), prefix, is_r2=False, lacks=lacks
        )
    environment = os.environ
    endpoint = choose_endpoint({}, endpoint_url=environment["FUSECACHE_TEST_ENDPOINT"])
    external = closed_later(
        S3Store(
            environment["FUSECACHE_TEST_BUCKET"],
            endpoint,
            credentials=Credentials(
                environment["FUSECACHE_TEST_ACCESS_KEY"], environment["FUSECACHE_TEST_SECRET_KEY"]
            ),
            transport=SMALL_COPIES,
        )
    )
    return Subject(external, prefix, is_r2=endpoint.is_r2)


@pytest.fixture
def body(tmp_path: Path) -> Callable[[bytes], FileSlice]:
    """Make the body of a PUT: the bytes in the middle of a file, so that offsets matter."""

    def make(data: bytes) -> FileSlice:
        path = tmp_path / uuid.uuid4().hex
        path.write_bytes(b"before" + data + b"after")
        return FileSlice(str(path), len(b"before"), len(data))

    return make


@pytest.fixture(scope="session")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, ssl.SSLContext]:
    """A certificate for loopback, and a server's context with it."""
    return make_certificate(tmp_path_factory.mktemp("certificate"))


@pytest.fixture(params=["plain", "openssl", "ssl"])
def peer(request: pytest.FixtureRequest, certificate: tuple[Path, ssl.SSLContext]) -> Iterator[MakePeer]:
    """Make peers: plain, and with the TLS of either library."""
    peers: list[Peer] = []
    context, tls = None, None
    if request.param != "plain":
        path, context = certificate
        tls = openssl_trust(path)
        if request.param == "ssl":
            tls = ssl.create_default_context(cafile=path)

    def make(script: Script) -> Peer:
        peers.append(Peer(script, context, tls))
        return peers[-1]

    yield make
    for each in peers:
        each.close()
