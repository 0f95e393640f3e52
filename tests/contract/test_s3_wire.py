"""What `S3Store` sends, and what it makes of bad answers, seen from the other end of real sockets."""

import base64
import hashlib
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from dataclasses import replace
from pathlib import Path

import pytest

from fusecache.model.errors import (
    AccessDenied,
    BucketMissing,
    ConfigError,
    CredentialsMissing,
    ObjectChanged,
    ObjectMissing,
    ReadOnly,
    Refused,
    RemoteError,
    Throttled,
    Unavailable,
    Untrusted,
)
from fusecache.model.objects import MIB, Extent, ObjectId
from fusecache.remote.endpoints import Credentials, Endpoint
from fusecache.remote.read_write_split import ReadWriteSplit
from fusecache.remote.s3.store import S3Store
from fusecache.remote.store import PROBE_NAME, Condition, ConditionalWrites, FileSlice
from tests.contract.conftest import HASTY, ONCE, SMALL_COPIES, closed_later, s3_store
from tests.s3server import Account, Fault, FaultAction, S3Server
from tests.support.peer import Peer

MakeBody = Callable[[bytes], FileSlice]

DATA = bytes(range(256)) * 4096  # 1 MiB
BODIES = {"empty": b"", "small": b"bytes", "large": DATA * 7}


@pytest.fixture
def server(shared_server: S3Server) -> Iterator[S3Server]:
    """The test server, without the marks of earlier tests."""
    shared_server.control.clear_log()
    yield shared_server
    shared_server.control.clear_faults()
    for key in shared_server.control.objects():
        shared_server.control.delete(key)


@pytest.fixture
def store(server: S3Server) -> S3Store:
    """A store that asks once."""
    return s3_store(server, ONCE)


def read(store: S3Store, object_id: ObjectId, extent: Extent) -> tuple[bytes, list[int]]:
    """The bytes, and the reports of progress."""
    buffer = bytearray(extent.size)
    reports: list[int] = []
    store.get_into(object_id, extent, memoryview(buffer), reports.append)
    return bytes(buffer), reports


# ---- what is sent


@pytest.mark.case(23)
def test_every_body_has_its_length_and_md5_and_nothing_that_r2_refuses(
    store: S3Store, server: S3Server, body: MakeBody
) -> None:
    store.put("a", body(b"bytes"), metadata={})
    store.put("empty", body(b""), metadata={})
    upload_id = store.create_multipart("big", metadata={})
    etag = store.upload_part("big", upload_id, 1, body(DATA))
    store.complete_multipart("big", upload_id, [etag])
    log = server.control.log()
    assert [entry.operation for entry in log] == [
        "PutObject",
        "PutObject",
        "CreateMultipartUpload",
        "UploadPart",
        "CompleteMultipartUpload",
    ]
    for entry in log:
        assert "expect" not in entry.headers
        assert "x-amz-trailer" not in entry.headers
        assert "transfer-encoding" not in entry.headers
        assert "aws-chunked" not in entry.headers.get("content-encoding", "")
        assert not [
            name for name in entry.headers if name.startswith(("x-amz-checksum", "x-amz-sdk-checksum"))
        ]
        assert entry.headers["accept-encoding"] == "identity"
    for entry, data in [(log[0], b"bytes"), (log[1], b""), (log[3], DATA)]:
        assert entry.headers["content-length"] == str(len(data))
        digest = hashlib.md5(data, usedforsecurity=False).digest()
        assert entry.headers["content-md5"] == base64.b64encode(digest).decode()


@pytest.mark.case(23)
def test_no_call_of_any_kind_sends_what_r2_refuses(server: S3Server, body: MakeBody) -> None:
    """Content-Length, no aws-chunked, no trailer, no Expect, identity: the server looks at each request."""
    store = s3_store(server, SMALL_COPIES)
    etags = {name: store.put(name, body(data), metadata={"a": "ü"}) for name, data in BODIES.items()}
    for name, data in BODIES.items():
        found = ObjectId(name, etags[name])
        assert store.head(name).etag == found.etag
        if data:
            assert read(store, found, Extent(0, len(data)))[0] == data
        store.copy(found, f"{name} copied", metadata={"b": "c"})
        store.copy(found, f"{name} copied again", condition=Condition(etag=None))
    upload_id = store.create_multipart("parts", metadata={"a": "b"})
    parts = [store.upload_part("parts", upload_id, number, body(BODIES["large"])) for number in (1, 2)]
    store.complete_multipart("parts", upload_id, parts, condition=Condition(etag=None))
    store.abort_multipart("dropped", store.create_multipart("dropped", metadata={}))
    assert len(store.list_page("", delimiter="/", limit=2).objects) == 2
    store.probe_write("somewhere/")
    for name in server.control.objects():
        store.delete(name)
    assert {entry.operation for entry in server.control.log()} == {
        "AbortMultipartUpload",
        "CompleteMultipartUpload",
        "CopyObject",
        "CreateMultipartUpload",
        "DeleteObject",
        "GetObject",
        "HeadObject",
        "ListObjectsV2",
        "PutObject",
        "UploadPart",
        "UploadPartCopy",
    }
    answered = server.control.wait_requests(len(server.control.log()))
    answered = [entry for entry in answered if PROBE_NAME not in entry.key]
    assert {entry.status for entry in answered if entry.operation != "HeadObject"} <= {200, 204, 206}
    assert server.control.offences() == []


@pytest.mark.case(22)
def test_a_small_body_follows_an_empty_one_on_the_same_connection_at_once(
    server: S3Server, body: MakeBody
) -> None:
    store = s3_store(server, ONCE)
    store.probe_write("")
    server.control.clear_log()
    for turn in range(5):
        store.put(f"empty-{turn}", body(b""), metadata={})
        store.put(f"small-{turn}", body(DATA[:1024]), metadata={})
    log = server.control.log()
    assert [entry.headers["content-length"] for entry in log] == ["0", "1024"] * 5
    assert len({entry.connection for entry in log}) == 1
    # A client that waits for `100 Continue` pauses a second before each body.
    assert log[-1].time - log[0].time < 4


def test_a_read_is_one_get_with_range_and_version(store: S3Store, server: S3Server) -> None:
    etag = server.control.put("a", DATA)
    assert read(store, ObjectId("a", etag), Extent(5, 1000))[0] == DATA[5:1000]
    [entry] = server.control.log()
    assert (entry.operation, entry.range) == ("GetObject", "bytes=5-999")
    assert entry.headers["if-match"] == f'"{etag}"'
    assert entry.headers["accept-encoding"] == "identity"


def test_many_reads_share_one_connection(server: S3Server) -> None:
    store = s3_store(server, ONCE)
    object_id = ObjectId("a", server.control.put("a", DATA))
    for _ in range(5):
        read(store, object_id, Extent(0, MIB))
    assert len({entry.connection for entry in server.control.log()}) == 1


def test_a_copy_names_both_versions_in_one_request(store: S3Store, server: S3Server) -> None:
    source = ObjectId("a ü", server.control.put("a ü", b"bytes"))
    store.copy(source, "b", condition=Condition(etag=None))
    store.copy(source, "b", condition=Condition(source.etag))
    first, second = server.control.log(operation="CopyObject")
    assert first.headers["x-amz-copy-source-if-match"] == f'"{source.etag}"'
    assert first.headers["cf-copy-destination-if-none-match"] == "*"
    assert second.headers["cf-copy-destination-if-match"] == f'"{source.etag}"'
    assert "cf-copy-destination-if-none-match" not in second.headers


def test_other_endpoints_get_no_header_of_cloudflare(server: S3Server) -> None:
    store = closed_later(
        S3Store(
            server.bucket,
            Endpoint(server.endpoint_url, "auto"),
            credentials=Credentials(server.access_key, server.secret_key),
        )
    )
    source = ObjectId("a", server.control.put("a", b"bytes"))
    store.copy(source, "b", condition=Condition(etag=None))
    with pytest.raises(ObjectChanged):
        store.copy(source, "b", condition=Condition(etag=None))
    assert not any(name.startswith("cf-") for entry in server.control.log() for name in entry.headers)


def test_metadata_of_others_survives_reading_and_copying(store: S3Store, server: S3Server) -> None:
    etag = server.control.put("a", b"x", metadata={"note": "100%", "bad": "%ff"})
    assert store.head("a").metadata == {"note": "100%", "bad": "%ff"}
    store.copy(ObjectId("a", etag), "b")
    assert server.control.objects()["b"].metadata == {"note": "100%", "bad": "%ff"}


@pytest.mark.case(31, 32)
def test_a_probe_asks_nothing_of_the_bucket_itself(server: S3Server) -> None:
    server.control.add_account(Account("narrow", "secret" * 5, prefix="mine/", bucket_calls=False))
    narrow = closed_later(
        S3Store(
            server.bucket,
            Endpoint(server.endpoint_url, "auto", is_r2=True),
            credentials=Credentials("narrow", "secret" * 5),
        )
    )
    narrow.probe_write("mine/")
    (asked,) = server.control.log()
    assert (asked.operation, asked.status, asked.took_effect) == ("PutObject", 412, False)


@pytest.mark.case(31)
@pytest.mark.parametrize("action", [FaultAction.DROP_AFTER, FaultAction.ANSWER_AFTER])
def test_a_probe_whose_answers_are_lost_leaves_nothing_behind(
    store: S3Store, server: S3Server, action: FaultAction
) -> None:
    server.control.faults(Fault(action))
    with suppress(Unavailable):
        store.probe_write("mine/")
    assert server.control.log()
    assert (server.control.objects(), server.control.uploads()) == ({}, [])


@pytest.mark.parametrize(
    ("conditions", "found"),
    [
        ("kept", ConditionalWrites.KEPT),
        ("ignored", ConditionalWrites.IGNORED),
        ("refused", ConditionalWrites.REFUSED),
    ],
)
def test_any_store_is_probed_and_left_as_it_was(
    server: S3Server, conditions: str, found: ConditionalWrites
) -> None:
    server.control.set_rules(conditional_writes=conditions)
    store = other_store(server, server.access_key, server.secret_key)
    try:
        store.probe_write("mine/")
        assert store.probe_conditions("mine/") is found
    finally:
        server.control.set_rules(conditional_writes="kept")
    assert (server.control.objects(), server.control.uploads()) == ({}, [])


def test_keys_that_may_write_but_not_compare_versions_may_write(server: S3Server) -> None:
    """As AWS answers keys without s3:GetObject."""
    denied = Fault(FaultAction.ANSWER, operation="PutObject", status=403, code="AccessDenied")
    server.control.faults(denied)
    other_store(server, server.access_key, server.secret_key).probe_write("")
    server.control.add_account(Account("reader", "secret" * 5, writable=False))
    with pytest.raises(AccessDenied, match=r"PUT .*fusecache-probe-"):
        other_store(server, "reader", "secret" * 5).probe_write("")


def other_store(server: S3Server, access_key: str, secret_key: str) -> S3Store:
    """Return a client of a store that is not R2."""
    return closed_later(
        S3Store(
            server.bucket,
            Endpoint(server.endpoint_url, "auto"),
            credentials=Credentials(access_key, secret_key),
            transport=ONCE,
        )
    )


@pytest.mark.case(32)
def test_a_redirect_asks_nothing_of_the_bucket_itself(store: S3Store, server: S3Server) -> None:
    """A HeadBucket would tell the bucket's region, but a token for objects may not make it."""
    server.control.put("a", DATA)
    server.control.faults(Fault(FaultAction.ANSWER, status=301, code="PermanentRedirect"))
    for ask in (store.head, store.delete, store.list_page):
        with pytest.raises(Refused, match="check the endpoint and the region"):
            ask("a")
    assert "HeadBucket" not in server.control.counts()


def test_requests_and_bytes_are_counted(server: S3Server, body: MakeBody) -> None:
    store = s3_store(server, ONCE)
    etag = store.put("a", body(DATA), metadata={})
    for _ in range(2):
        read(store, ObjectId("a", etag), Extent(0, 1000))
    with pytest.raises(ObjectMissing):
        store.head("none")
    counts = store.statistics()
    assert (counts.puts, counts.gets, counts.heads, counts.errors) == (1, 2, 1, 1)
    assert (counts.bytes_written, counts.bytes_read) == (len(DATA), 2000)
    assert (counts.class_a, counts.class_b) == (1, 3)


# ---- bad answers


@pytest.mark.parametrize(
    ("fault", "error", "words"),
    [
        (Fault(FaultAction.SHORT_BODY, after_bytes=300_000), Unavailable, "300000"),
        (Fault(FaultAction.LONG_BODY, extra_bytes=7), Unavailable, "announces"),
        (Fault(FaultAction.WRONG_RANGE), Unavailable, "asked for bytes 10-"),
        (Fault(FaultAction.IGNORE_RANGE), Unavailable, "got 200"),
        (Fault(FaultAction.WRONG_ETAG, etag="0" * 32), ObjectChanged, "version"),
        (Fault(FaultAction.DROP_BEFORE), Unavailable, "GET s3://bucket/a"),
        (Fault(FaultAction.STALL, after_bytes=10, seconds=10), Unavailable, "timed out"),
        (Fault(FaultAction.ANSWER, status=429, code="TooManyRequests"), Throttled, "429"),
        (Fault(FaultAction.ANSWER, status=503, code="SlowDown"), Throttled, "SlowDown"),
        (Fault(FaultAction.ANSWER, status=500, code="InternalError"), Unavailable, "InternalError"),
        (Fault(FaultAction.ANSWER, status=403, code="AccessDenied"), AccessDenied, "permission"),
    ],
)
def test_a_bad_answer_to_a_read_is_an_error_with_a_name(
    server: S3Server,
    fault: Fault,
    error: type[RemoteError],
    words: str,
) -> None:
    store = s3_store(server, HASTY if fault.action is FaultAction.STALL else ONCE)
    object_id = ObjectId("a", server.control.put("a", DATA))
    server.control.faults(fault)
    with pytest.raises(error, match=words):
        read(store, object_id, Extent(10, 800_000))
    server.control.clear_faults()
    assert read(store, object_id, Extent(10, 800_000))[0] == DATA[10:800_000]


def test_what_was_reported_before_a_body_broke_off_is_valid(store: S3Store, server: S3Server) -> None:
    object_id = ObjectId("a", server.control.put("a", DATA))
    server.control.faults(Fault(FaultAction.SHORT_BODY, after_bytes=600_000))
    buffer = bytearray(MIB)
    reports: list[int] = []
    with pytest.raises(Unavailable):
        store.get_into(object_id, Extent(0, MIB), memoryview(buffer), reports.append)
    assert 256 * 1024 <= reports[-1] <= 600_000
    assert buffer[: reports[-1]] == DATA[: reports[-1]]


def test_the_whole_object_in_one_answer_is_as_good_as_its_range(store: S3Store, server: S3Server) -> None:
    object_id = ObjectId("a", server.control.put("a", DATA))
    server.control.faults(Fault(FaultAction.IGNORE_RANGE))
    assert read(store, object_id, Extent(0, len(DATA)))[0] == DATA


def test_a_hiccup_is_asked_again_once_but_for_bodies_of_objects(server: S3Server, body: MakeBody) -> None:
    patient = s3_store(server)
    hiccup = Fault(FaultAction.ANSWER, status=500, code="InternalError")
    server.control.faults(replace(hiccup, times=1))
    upload_id = patient.create_multipart("a", metadata={})
    server.control.faults(hiccup)
    sends: dict[str, tuple[Callable[[], object], int]] = {
        "HeadObject": (lambda: patient.head("a"), 2),
        "ListObjectsV2": (lambda: patient.list_page(""), 2),
        "AbortMultipartUpload": (lambda: patient.abort_multipart("a", upload_id), 2),
        "PutObject": (lambda: patient.put("a", body(DATA), metadata={}), 1),
        "UploadPart": (lambda: patient.upload_part("a", upload_id, 1, body(DATA)), 1),
        "GetObject": (lambda: read(patient, ObjectId("a", "0" * 32), Extent(0, 1)), 1),
        "DeleteObject": (lambda: patient.delete("a"), 1),
    }
    for operation, (send, count) in sends.items():
        server.control.clear_log()
        with pytest.raises(Unavailable):
            send()
        assert server.control.counts() == {operation: count}


def test_a_bucket_that_cannot_be_reached_is_unavailable() -> None:
    with S3Server() as server:  # of its own: after the outage it listens on another socket
        store = s3_store(server, ONCE)
        server.control.pause("refuse")
        with pytest.raises(Unavailable, match="LIST s3://bucket/"):
            store.list_page("")
        server.control.resume()
        assert store.list_page("").objects == ()


def test_revoked_keys_are_denied_and_new_ones_are_taken(
    server: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = tmp_path / "credentials"
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(keys))
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    for name in ("one", "two"):
        server.control.add_account(Account(name, name * 10))
    keys.write_text(f"[default]\naws_access_key_id = one\naws_secret_access_key = {'one' * 10}\n")
    store = closed_later(S3Store(server.bucket, Endpoint(server.endpoint_url, "auto"), transport=ONCE))
    store.list_page("")
    server.control.revoke("one")
    with pytest.raises(AccessDenied):
        store.list_page("")
    keys.write_text(f"[default]\naws_access_key_id = two\naws_secret_access_key = {'two' * 10}\n")
    store.reload()
    store.list_page("")


def test_no_keys_anywhere_is_said_so(
    server: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    store = closed_later(S3Store(server.bucket, Endpoint(server.endpoint_url, "auto"), transport=ONCE))
    with pytest.raises(CredentialsMissing, match="AWS_ACCESS_KEY_ID"):
        store.list_page("")
    with pytest.raises(ConfigError, match="nobody"):
        S3Store(server.bucket, Endpoint(server.endpoint_url, "auto"), profile="nobody")


def test_another_bucket_is_missing_not_empty(server: S3Server) -> None:
    store = closed_later(
        S3Store(
            "elsewhere",
            Endpoint(server.endpoint_url, "auto"),
            credentials=Credentials(server.access_key, server.secret_key),
        )
    )
    with pytest.raises(BucketMissing, match="elsewhere"):
        store.list_page("")


def test_a_private_certificate_is_trusted_by_aws_ca_bundle(
    tmp_path: Path, body: MakeBody, monkeypatch: pytest.MonkeyPatch
) -> None:
    with S3Server(tmp_path / "bucket", tls=True) as server:
        with pytest.raises(Untrusted, match="AWS_CA_BUNDLE"):
            s3_store(server, ONCE).list_page("")
        monkeypatch.setenv("AWS_CA_BUNDLE", str(server.ca_path))
        store = s3_store(server, ONCE)
        etag = store.put("a", body(DATA), metadata={})
        assert read(store, ObjectId("a", etag), Extent(0, MIB))[0] == DATA
        # The connection and the MD5 protect the body already: no second pass over it to sign it.
        assert (
            server.control.log(operation="PutObject")[0].headers["x-amz-content-sha256"] == "UNSIGNED-PAYLOAD"
        )


@pytest.mark.parametrize("request_of", ["list", "complete", "copy"])
def test_an_error_behind_a_status_of_200_is_an_error(request_of: str) -> None:
    """S3 begins some answers before it knows their end, and keeps the connection busy with blanks."""
    error = b"<Error><Code>SlowDown</Code><Message>Please reduce your request rate.</Message></Error>"
    body = b'<?xml version="1.0"?>\n' + b" " * 9 + error
    with closing(
        Peer([[b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body)]], None, None)
    ) as peer:
        endpoint = Endpoint(f"http://127.0.0.1:{peer.port}", "auto")
        store = closed_later(
            S3Store("bucket", endpoint, credentials=Credentials("key", "secret"), transport=ONCE)
        )
        send: dict[str, Callable[[], object]] = {
            "list": lambda: store.list_page(""),
            "complete": lambda: store.complete_multipart("a", "upload", ["e" * 32]),
            "copy": lambda: store.copy(ObjectId("a", "e" * 32), "b", size=1),
        }
        with pytest.raises(Throttled, match="SlowDown") as caught:
            send[request_of]()
        assert caught.value.asks_to_slow_down


# ---- several keys for one bucket


def test_reads_use_the_reader_and_writes_the_writer(server: S3Server, body: MakeBody) -> None:
    server.control.add_account(Account("reader", "secret" * 5, writable=False))
    endpoint = Endpoint(server.endpoint_url, "auto", is_r2=True)
    reader = closed_later(
        S3Store(server.bucket, endpoint, credentials=Credentials("reader", "secret" * 5), transport=ONCE)
    )
    remote = ReadWriteSplit(reader, s3_store(server, ONCE))
    etag = remote.put("a", body(DATA), metadata={})
    with pytest.raises(AccessDenied):
        reader.put("a", body(DATA), metadata={})
    server.control.clear_log()
    assert remote.head("a").etag == etag
    assert [entry.access_key for entry in server.control.log()] == ["reader"]


def test_a_remote_without_writer_refuses_writes(server: S3Server, body: MakeBody) -> None:
    remote = ReadWriteSplit(s3_store(server, ONCE), None)
    with pytest.raises(ReadOnly):
        remote.put("a", body(b"x"), metadata={})
    assert server.control.log() == []
