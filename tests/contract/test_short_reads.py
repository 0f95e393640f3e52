"""Reads: against the strict server, and a peer that says exactly what it is told."""

import threading
import time
from collections.abc import Iterator
from contextlib import closing
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from fusecache.model.errors import Throttled, Unavailable
from fusecache.model.objects import MIB, Extent, ObjectId
from fusecache.remote.endpoints import Credentials, Endpoint, Transport
from fusecache.remote.http.ranged_get import GetRequest, fill
from fusecache.remote.http.signed_requests import SignedHttp
from fusecache.remote.s3.store import S3Store
from fusecache.remote.store import Interruption
from tests.contract.conftest import ONCE, closed_later, s3_store
from tests.s3server import Account, Fault, FaultAction, S3Server
from tests.support.peer import HANG_UP, HELD, PAUSE, MakePeer, Peer

PATIENT = Transport(attempts=1, connect_timeout_seconds=20, read_timeout_seconds=20)
DATA = bytes(range(256)) * 4096  # 1 MiB
OBJECT = ObjectId("dir/a", "e" * 32)
GOOD = (
    b'HTTP/1.1 206 Partial Content\r\nContent-Range: bytes 0-4/9\r\nContent-Length: 5\r\nETag: "'
    + OBJECT.etag.encode()
    + b'"\r\n\r\n12345'
)


def gets_from(peer: Peer, transport: Transport = ONCE) -> SignedHttp:
    return peer.wire(transport)


def ask(gets: SignedHttp, size: int = 5) -> bytes:
    buffer = bytearray(size)
    get = GetRequest(
        "GET it", OBJECT, Extent(0, size), memoryview(buffer), lambda count: None, Interruption()
    )
    fill(gets, get, lambda count: None)
    return bytes(buffer)


def read(store: S3Store, object_id: ObjectId, size: int, interruption: Interruption | None = None) -> bytes:
    buffer = bytearray(size)
    store.get_into(object_id, Extent(0, size), memoryview(buffer), lambda count: None, interruption)
    return bytes(buffer)


@pytest.fixture
def server(shared_server: S3Server) -> Iterator[S3Server]:
    shared_server.control.clear_log()
    yield shared_server
    shared_server.control.clear_faults()
    for key in shared_server.control.objects():
        shared_server.control.delete(key)


# ---- connections


def test_a_connection_that_the_peer_has_closed_meanwhile_is_replaced_at_once(
    peer: MakePeer,
) -> None:
    # The first connection closes without a word when its second request has arrived: too late for a look at it.
    there = peer([[GOOD], [GOOD]])
    gets = gets_from(there)
    assert [ask(gets), ask(gets)] == [b"12345"] * 2
    assert len(there.requests) == 3


def test_a_new_connection_that_ends_without_an_answer_is_an_error(peer: MakePeer) -> None:
    there = peer([[], [GOOD]])
    with pytest.raises(Unavailable, match="GET it: the connection ended before a response"):
        ask(gets_from(there))
    assert len(there.requests) == 1


def test_dropped_idle_connections_cost_no_read(server: S3Server) -> None:
    store = s3_store(server, ONCE)
    object_id = ObjectId("a", server.control.put("a", DATA))
    for _ in range(3):
        assert read(store, object_id, len(DATA)) == DATA
        server.control.drop_connections()


@pytest.mark.parametrize(
    "answer",
    [
        GOOD + b"HTTP/1.1 206 bytes that nobody asked for",
        GOOD.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n"),
    ],
)
def test_a_connection_with_an_unclear_end_is_not_used_again(peer: MakePeer, answer: bytes) -> None:
    there = peer([[answer], [GOOD]])
    gets = gets_from(there)
    assert [ask(gets), ask(gets)] == [b"12345"] * 2
    assert len(there.requests) == 2


# ---- answers


ERROR = b"<?xml version='1.0'?><Error><Code>SlowDown</Code><Message>a &lt; b</Message></Error>"


@pytest.mark.parametrize(
    ("framing", "body"),
    [
        (b"Content-Length: %d" % len(ERROR), ERROR),
        (b"Transfer-Encoding: chunked", b"%x\r\n%b\r\n0\r\n\r\n" % (len(ERROR), ERROR)),
        (b"Connection: close", ERROR),
    ],
)
def test_an_error_answer_is_understood_however_it_is_framed(
    peer: MakePeer, framing: bytes, body: bytes
) -> None:
    answer = b"HTTP/1.1 503 Slow\r\nRetry-After: 7\r\n" + framing + b"\r\n\r\n" + body
    gets = gets_from(peer([[answer, HANG_UP]]))
    with pytest.raises(Throttled, match=r"GET it: SlowDown \(503\): a < b") as caught:
        ask(gets)
    assert caught.value.asks_to_slow_down
    assert caught.value.retry_after_seconds == 7


@pytest.mark.parametrize("framing", [b"Content-Length: %d" % len(ERROR), b"Transfer-Encoding: chunked"])
def test_an_error_answer_is_known_as_soon_as_its_body_has_come(peer: MakePeer, framing: bytes) -> None:
    body = ERROR if framing.startswith(b"Content") else b"%x\r\n%b\r\n0\r\n\r\n" % (len(ERROR), ERROR)
    gets = gets_from(peer([[b"HTTP/1.1 503 Slow\r\n" + framing + b"\r\n\r\n" + PAUSE + body]]), PATIENT)
    began = time.monotonic()
    with pytest.raises(Throttled, match="SlowDown"):
        ask(gets)
    assert time.monotonic() - began < 10  # the peer closes after ten seconds


def test_bytes_that_have_come_are_reported_while_the_rest_is_still_awaited(
    peer: MakePeer,
) -> None:
    there = peer([[GOOD.removesuffix(b"12345") + PAUSE + b"123" + HELD + b"45"]])
    gets = gets_from(there)
    buffer = bytearray(5)

    def progress(count: int) -> None:
        if count < 5:
            there.may_go_on.set()

    get = GetRequest("GET it", OBJECT, Extent(0, 5), memoryview(buffer), progress, Interruption())
    fill(gets, get, lambda count: None)
    assert there.may_go_on.is_set()
    assert bytes(buffer) == b"12345"


def test_a_small_request_hears_the_same_of_slowing_down() -> None:
    answer = b"HTTP/1.1 503 Slow\r\nRetry-After: 7\r\nContent-Length: 0\r\n\r\n"
    with closing(Peer([[answer]], None, None)) as there:
        store = closed_later(
            S3Store(
                "bucket",
                Endpoint(f"http://127.0.0.1:{there.port}", "auto"),
                credentials=Credentials("key", "secret"),
                transport=ONCE,
            )
        )
        with pytest.raises(Unavailable) as caught:
            store.head("a")
    assert caught.value.asks_to_slow_down
    assert caught.value.retry_after_seconds == 7


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (b"SSH-2.0-OpenSSH\r\n\r\n", "SSH"),
        (b"HTTP/1.1 \xb2\xb3\xb9 OK\r\n\r\n", "HTTP/1.1"),
        (GOOD.replace(b"Content-Length: 5", b"Content-Length: " + b"5" * 5000), "announces None"),
        (b"HTTP/1.1 206 OK\r\n" + b"a: b\r\n" * 4000, "longer than"),
        (GOOD.replace(b"Content-Length: 5", b"Transfer-Encoding: chunked"), "announces None"),
        (GOOD.replace(b"Content-Length: 5", b"Content-Length: 5\r\nContent-Length: 6"), "announces None"),
        (GOOD.replace(b"Content-Length: 5", b"Content-Length: -5"), "announces None"),
    ],
)
def test_an_answer_that_is_no_clear_http_is_refused(peer: MakePeer, answer: bytes, words: str) -> None:
    with pytest.raises(Unavailable, match=words):
        ask(gets_from(peer([[answer]])))


# ---- who asks, and for what


@pytest.mark.parametrize(
    "name", ["a//b/../c/./d", "/a", "a b+c&d=e?f#g%41", "ü/日本/😀", "~!@$^*()'\",;:<>[]{}|"]
)
def test_any_key_is_read(server: S3Server, name: str) -> None:
    store = s3_store(server, ONCE)
    object_id = ObjectId(name, server.control.put(name, b"bytes of it"))
    for _ in range(2):
        assert read(store, object_id, 11) == b"bytes of it"
    assert [entry.key for entry in server.control.log("GetObject")] == [name] * 2


def test_keys_that_are_renewed_by_themselves_are_used_by_the_next_read(
    server: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = tmp_path / "keys.json"

    def issue(name: str) -> None:
        server.control.add_account(Account(name, name * 10))
        # Within their last ten minutes keys are renewed before each use.
        end = (datetime.now(UTC) + timedelta(seconds=60)).isoformat()
        keys.write_text(
            f'{{"Version": 1, "AccessKeyId": "{name}", "SecretAccessKey": "{name * 10}", "Expiration": "{end}"}}'
        )

    config = tmp_path / "config"
    config.write_text(f"[default]\ncredential_process = cat {keys}\n")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(config))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    issue("one")
    store = closed_later(S3Store(server.bucket, Endpoint(server.endpoint_url, "auto"), transport=ONCE))
    object_id = ObjectId("a", server.control.put("a", b"bytes"))
    for _ in range(2):
        read(store, object_id, 5)
    issue("two")
    server.control.revoke("one")
    assert read(store, object_id, 5) == b"bytes"
    assert [entry.access_key for entry in server.control.log("GetObject")] == ["one", "one", "two"]


def test_tls_trusts_no_stranger_and_reads_by_aws_ca_bundle(monkeypatch: pytest.MonkeyPatch) -> None:
    with S3Server(tls=True) as server:
        object_id = ObjectId("a", server.control.put("a", DATA))
        monkeypatch.setenv("AWS_CA_BUNDLE", str(server.ca_path))
        store = s3_store(server, ONCE)
        assert [read(store, object_id, len(DATA)) for _ in range(3)] == [DATA] * 3
        assert len({entry.connection for entry in server.control.log("GetObject")}) == 1
        # The system's own CAs do not know the server.
        monkeypatch.delenv("AWS_CA_BUNDLE")
        monkeypatch.delenv("REQUESTS_CA_BUNDLE", raising=False)
        stranger = s3_store(server, ONCE)
        with pytest.raises(Unavailable, match="certificate verify failed"):
            read(stranger, object_id, 5)


# ---- being ended


@pytest.mark.parametrize("reads_before", [0, 1, 2], ids=["first read", "new connection", "kept connection"])
def test_a_silent_read_ends_as_soon_as_it_is_interrupted(server: S3Server, reads_before: int) -> None:
    store = s3_store(server, PATIENT)
    object_id = ObjectId("a", server.control.put("a", DATA))
    for _ in range(reads_before):
        read(store, object_id, len(DATA))
    server.control.faults(Fault(FaultAction.STALL, operation="GetObject", after_bytes=600_000, seconds=15))
    interruption, buffer = Interruption(), bytearray(MIB)
    reports: list[int] = []

    def progress(count: int) -> None:
        reports.append(count)
        if count >= 384 * 1024:
            threading.Timer(0.2, interruption.interrupt).start()

    began = time.monotonic()
    with pytest.raises(Unavailable):
        store.get_into(object_id, Extent(0, MIB), memoryview(buffer), progress, interruption)
    assert time.monotonic() - began < 10
    assert 512 * 1024 <= reports[-1] <= 600_000
    assert buffer[: reports[-1]] == DATA[: reports[-1]]
    server.control.clear_faults()
    assert read(store, object_id, MIB) == DATA


@pytest.mark.parametrize("reads_before", [0, 1], ids=["first read", "later read"])
def test_a_read_that_waits_for_its_answer_can_be_interrupted(server: S3Server, reads_before: int) -> None:
    store = s3_store(server, PATIENT)
    object_id = ObjectId("a", server.control.put("a", DATA))
    for _ in range(reads_before):
        read(store, object_id, 5)
    server.control.faults(Fault(FaultAction.HOLD, operation="GetObject"))
    interruption = Interruption()
    threading.Timer(0.2, interruption.interrupt).start()
    began = time.monotonic()
    with pytest.raises(Unavailable):
        read(store, object_id, 5, interruption)
    assert time.monotonic() - began < 10
    server.control.clear_faults()
    assert read(store, object_id, 5) == DATA[:5]


def test_a_read_that_was_interrupted_before_it_began_asks_nothing(server: S3Server) -> None:
    store = s3_store(server, ONCE)
    object_id = ObjectId("a", server.control.put("a", DATA))
    read(store, object_id, 5)
    server.control.clear_log()
    interruption = Interruption()
    interruption.interrupt()
    with pytest.raises(Unavailable, match="interrupted"):
        read(store, object_id, 5, interruption)
    assert server.control.log() == []


def test_an_interruption_that_comes_too_late_changes_nothing(server: S3Server) -> None:
    store = s3_store(server, ONCE)
    object_id = ObjectId("a", server.control.put("a", DATA))
    interruption = Interruption()
    for _ in range(2):
        assert read(store, object_id, len(DATA), interruption) == DATA
    interruption.interrupt()
    assert read(store, object_id, len(DATA)) == DATA
