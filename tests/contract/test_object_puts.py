"""Whole objects that are put, read and deleted: the same requests, every failure named, none taken twice."""

import hashlib
import threading
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from fusecache.model.errors import (
    AccessDenied,
    BucketMissing,
    FusecacheError,
    LocalDiskError,
    ObjectChanged,
    Refused,
    Throttled,
    Unavailable,
)
from fusecache.model.objects import MIB, Extent, ObjectId
from fusecache.remote.endpoints import Credentials, Endpoint
from fusecache.remote.http.put import SMALL_BYTES, SliceBody, delete, send_body
from fusecache.remote.http.signed_requests import HttpRequest, SignedHttp
from fusecache.remote.protocol.headers import bare_etag
from fusecache.remote.s3.store import S3Store
from fusecache.remote.store import Condition, FileSlice
from tests.contract.conftest import ONCE, closed_later
from tests.s3server import Account, Fault, FaultAction, S3Server
from tests.support.peer import HANG_UP, MakePeer, Peer

MakeBody = Callable[[bytes], FileSlice]

NEW = Condition(etag=None)
DATA = b"".join(index.to_bytes(8, "big") for index in range(MIB // 8))
# One that travels with its request, and one that follows it.
BODIES = {"small": DATA[:4096], "large": DATA}
METADATA = {"fusecache-generation": "7" * 32, "symlink-target": "größe/データ =?utf-8?q?x?=\r\n", "empty": ""}


@pytest.fixture(params=list(BODIES))
def data(request: pytest.FixtureRequest) -> bytes:
    return BODIES[request.param]


# ---- what is sent


@pytest.mark.parametrize(
    "key", ["model", "a//b/../c/./d", "/a", "blank + & = ? # % %41/ü/日本語/😀", "~!@$^*()_-'\",;:<>[]{}|\\"]
)
def test_objects_arrive_as_they_are_by_requests_without_chunks_or_hash(
    server: S3Server, store: S3Store, body: MakeBody, key: str
) -> None:
    for size in (0, 1, SMALL_BYTES, SMALL_BYTES + 1, MIB):
        etag = store.put(key, body(DATA[:size]), metadata=METADATA)
        assert etag == hashlib.md5(DATA[:size]).hexdigest()
        assert server.control.read(key) == DATA[:size]
        assert store.head(key).metadata == METADATA
    store.delete(key)
    assert server.control.objects() == {}
    sent = server.control.log("PutObject")
    assert [entry.key for entry in sent] == [key] * 5
    for entry in sent:
        assert entry.headers["x-amz-content-sha256"] == "UNSIGNED-PAYLOAD"
        assert "content-md5" in entry.headers
        assert not {"expect", "transfer-encoding", "content-encoding", "content-type", "x-amz-trailer"} & set(
            entry.headers
        )
    deleted = server.control.log("DeleteObject")
    assert len({entry.connection for entry in [*sent, *deleted]}) == 1


def test_a_condition_is_a_header_that_the_bucket_obeys(
    server: S3Server, store: S3Store, body: MakeBody, data: bytes
) -> None:
    first = store.put("a", body(data), metadata={}, condition=NEW)
    second = store.put("a", body(b"second"), metadata={}, condition=Condition(first))
    for condition in (NEW, Condition(first)):
        with pytest.raises(ObjectChanged, match="PUT s3://bucket/a: PreconditionFailed"):
            store.put("a", body(data), metadata={}, condition=condition)
    store.put("a", body(b"any"), metadata={})
    conditions = [
        (entry.headers.get("if-none-match"), entry.headers.get("if-match"))
        for entry in server.control.log("PutObject")
    ]
    assert conditions[:3] == [("*", None), (None, f'"{first}"'), ("*", None)]
    assert conditions[-1] == (None, None)
    assert second != first


def test_an_object_and_what_was_sent_of_it_are_counted(store: S3Store, body: MakeBody, data: bytes) -> None:
    before = store.statistics()
    store.put("a", body(data), metadata={})
    store.delete("a")
    after = store.statistics()
    assert (after.puts, after.deletes) == (before.puts + 1, before.deletes + 1)
    assert (after.errors, after.bytes_written) == (before.errors, before.bytes_written + len(data))


def test_an_empty_key_is_no_request_for_the_bucket_itself(
    server: S3Server, store: S3Store, body: MakeBody
) -> None:
    with pytest.raises(Refused):
        store.put("", body(b"x"), metadata={})
    with pytest.raises(Refused):
        store.delete("")
    assert server.control.log() == []


@pytest.mark.parametrize("name", ["a b", "a:b", "a\r\nhost", "ü", "A", ""])
def test_a_metadata_name_that_no_header_can_have_is_never_sent(
    server: S3Server, store: S3Store, body: MakeBody, name: str
) -> None:
    with pytest.raises(ValueError, match="metadata name"):
        store.put("a", body(b"x"), metadata={name: "value"})
    assert server.control.log() == []


def test_many_puts_at_once_do_not_mix(server: S3Server, store: S3Store, tmp_path: Path) -> None:
    contents = {f"{number}": f"{number}".encode() * (number * 1000) for number in range(24)}
    for name, content in contents.items():
        (tmp_path / name).write_bytes(content)

    def send(name: str) -> None:
        body = FileSlice(str(tmp_path / name), 0, len(contents[name]))
        store.put(name, body, metadata={"name": name}, condition=NEW)

    threads = [threading.Thread(target=send, args=(name,)) for name in contents]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {name: server.control.read(name) for name in contents} == contents
    assert {name: view.metadata for name, view in server.control.objects().items()} == {
        name: {"name": name} for name in contents
    }


# ---- who asks


def read(store: S3Store, etag: str) -> bytes:
    """Return the first five bytes of the object `a`."""
    buffer = bytearray(5)
    store.get_into(ObjectId("a", etag), Extent(0, 5), memoryview(buffer), lambda count: None)
    return bytes(buffer)


@pytest.mark.parametrize(("status", "code"), [(301, "PermanentRedirect"), (307, "TemporaryRedirect")])
def test_an_answer_that_sends_elsewhere_and_names_no_region_is_refused(
    server: S3Server, store: S3Store, body: MakeBody, data: bytes, status: int, code: str
) -> None:
    etag = store.put("a", body(data), metadata={})
    for operation in ("PutObject", "GetObject", "DeleteObject"):
        server.control.faults(Fault(FaultAction.ANSWER, operation=operation, status=status, code=code))
    for _ in range(2):
        with pytest.raises(Refused, match="check the endpoint and the region"):
            read(store, etag)
        with pytest.raises(Refused, match="check the endpoint and the region"):
            store.put("a", body(data), metadata={})
        with pytest.raises(Refused, match="check the endpoint and the region"):
            store.delete("a")
    server.control.clear_faults()
    store.put("a", body(data), metadata={})
    assert server.control.read("a") == data


def test_a_session_token_is_sent_and_signed(server: S3Server, body: MakeBody) -> None:
    store = closed_later(
        S3Store(
            server.bucket,
            Endpoint(server.endpoint_url, "auto"),
            credentials=Credentials(server.access_key, server.secret_key, "token/of+a=session"),
        )
    )
    store.probe_write("")
    assert read(store, store.put("a", body(b"bytes"), metadata={}, condition=NEW)) == b"bytes"
    store.delete("a")
    assert [entry.status for entry in server.control.wait_requests(4)] == [412, 200, 206, 204]


def test_keys_that_are_revoked_or_may_only_read_are_denied(server: S3Server, body: MakeBody) -> None:
    server.control.add_account(Account("short", "secret" * 5))
    store = closed_later(
        S3Store(
            server.bucket,
            Endpoint(server.endpoint_url, "auto"),
            credentials=Credentials("short", "secret" * 5),
        )
    )
    etag = store.put("a", body(b"bytes"), metadata={})
    server.control.revoke("short")
    for _ in range(2):
        with pytest.raises(AccessDenied, match="InvalidAccessKeyId"):
            read(store, etag)
        with pytest.raises(AccessDenied, match="InvalidAccessKeyId"):
            store.put("a", body(b"bytes"), metadata={})
        with pytest.raises(AccessDenied, match="InvalidAccessKeyId"):
            store.delete("a")


# ---- bad answers, bad connections, bad files


ANSWERS: list[tuple[int, str, type[FusecacheError]]] = [
    (412, "PreconditionFailed", ObjectChanged),
    (409, "ConditionalRequestConflict", Unavailable),
    (403, "AccessDenied", AccessDenied),
    (404, "NoSuchBucket", BucketMissing),
    (429, "TooManyRequests", Throttled),
    (503, "SlowDown", Throttled),
    (500, "InternalError", Unavailable),
    (400, "EntityTooLarge", Refused),
]


@pytest.mark.parametrize(("status", "code", "error"), ANSWERS)
def test_an_error_answer_is_told_and_the_next_request_goes_well(
    server: S3Server,
    store: S3Store,
    body: MakeBody,
    data: bytes,
    status: int,
    code: str,
    error: type[FusecacheError],
) -> None:
    for operation in ("PutObject", "DeleteObject"):
        server.control.faults(
            Fault(FaultAction.ANSWER, operation=operation, times=1, status=status, code=code)
        )
    with pytest.raises(error, match=f"PUT s3://bucket/a: {code}"):
        store.put("a", body(data), metadata={}, condition=NEW)
    with pytest.raises(error, match=f"DELETE s3://bucket/a: {code}"):
        store.delete("a")
    store.put("a", body(data), metadata={}, condition=NEW)
    assert server.control.read("a") == data
    store.delete("a")
    assert server.control.objects() == {}


def test_an_answer_that_is_lost_on_a_new_connection_leaves_it_open_what_is_there(
    server: S3Server, store: S3Store, body: MakeBody, data: bytes
) -> None:
    server.control.faults(Fault(FaultAction.DROP_AFTER, operation="PutObject", times=1))
    with pytest.raises(Unavailable, match="PUT s3://bucket/a"):
        store.put("a", body(data), metadata=METADATA, condition=NEW)
    assert len(server.control.log("PutObject")) == 1
    with pytest.raises(ObjectChanged):
        store.put("a", body(data), metadata=METADATA, condition=NEW)
    assert store.head("a").metadata == METADATA


def test_a_kept_connection_that_ends_without_a_byte_is_replaced_once(
    server: S3Server, store: S3Store, body: MakeBody, data: bytes
) -> None:
    """Closed while idle, or its answer lost: the second request's condition tells which."""
    for number, action in enumerate((FaultAction.DROP_BEFORE, FaultAction.DROP_AFTER)):
        store.put("first", body(b"1"), metadata={})
        server.control.clear_log()
        server.control.faults(Fault(action, operation="PutObject", times=1))
        if action is FaultAction.DROP_BEFORE:
            store.put(f"{number}", body(data), metadata={}, condition=NEW)
        else:
            with pytest.raises(ObjectChanged):
                store.put(f"{number}", body(data), metadata={}, condition=NEW)
        assert len(server.control.log("PutObject")) == 2
        assert server.control.read(f"{number}") == data


def test_connections_that_were_closed_while_nobody_used_them_cost_nothing(
    server: S3Server, store: S3Store, body: MakeBody, data: bytes
) -> None:
    errors = store.statistics().errors
    for number in range(3):
        store.put(f"{number}", body(data), metadata={}, condition=NEW)
        server.control.drop_connections()
    for number in range(3):
        store.delete(f"{number}")
        server.control.drop_connections()
    assert store.statistics().errors == errors


def test_a_bucket_that_answers_nothing_is_given_up_and_not_asked_again(
    server: S3Server, hasty_store: S3Store, body: MakeBody
) -> None:
    hasty_store.put("first", body(b"1"), metadata={})
    server.control.clear_log()
    server.control.faults(Fault(FaultAction.HOLD, operation="PutObject", key="a", times=1))
    with pytest.raises(Unavailable, match="timed out"):
        hasty_store.put("a", body(b"bytes"), metadata={}, condition=NEW)
    assert [entry.key for entry in server.control.log("PutObject")] == ["a"]


def test_a_file_that_was_cut_is_no_body_and_harms_no_other(
    server: S3Server, store: S3Store, tmp_path: Path, data: bytes
) -> None:
    path = tmp_path / "body"
    path.write_bytes(data)
    digest = hashlib.md5(data).digest()
    path.write_bytes(data[: len(data) // 2])
    for md5 in (b"", digest):
        with pytest.raises(LocalDiskError, match="truncated during the upload"):
            store.put("a", FileSlice(str(path), 0, len(data), md5), metadata={})
    path.unlink()
    with pytest.raises(LocalDiskError, match="cannot open"):
        store.put("a", FileSlice(str(path), 0, len(data), digest), metadata={})
    assert server.control.objects() == {}
    path.write_bytes(data)
    store.put("a", FileSlice(str(path), 0, len(data)), metadata={})
    assert server.control.read("a") == data


def test_bytes_that_changed_since_their_digest_are_refused(
    server: S3Server, store: S3Store, body: MakeBody, data: bytes
) -> None:
    whole = body(data)
    with pytest.raises(Unavailable, match="BadDigest"):
        store.put(
            "a", FileSlice(whole.path, whole.offset, whole.size, hashlib.md5(b"").digest()), metadata={}
        )
    assert server.control.objects() == {}


# ---- a peer that says exactly what it is told


ETAG = "e" * 32
GOOD = f'HTTP/1.1 200 OK\r\nETag: "{ETAG}"\r\nContent-Length: 0\r\n\r\n'.encode()
GONE = b"HTTP/1.1 204 No Content\r\n\r\n"


def put(puts: SignedHttp, whole: FileSlice) -> str:
    with SliceBody(whole) as stream:
        headers = send_body(puts, HttpRequest("PUT it", "PUT", "dir/a", {"if-none-match": "*"}), stream)
        return bare_etag(headers.get("etag", ""))


def bodies(there: Peer) -> list[bytes]:
    return [request.partition(b"\r\n\r\n")[2] for request in there.requests]


def test_a_kept_connection_that_closes_on_a_put_is_replaced_with_its_whole_body(
    peer: MakePeer, body: MakeBody, data: bytes
) -> None:
    there = peer([[GOOD], [GOOD]])
    puts = there.wire(ONCE)
    assert [put(puts, body(data)), put(puts, body(data))] == [ETAG] * 2
    assert bodies(there) == [data] * 3


def test_a_new_connection_that_closes_on_a_put_is_an_error(peer: MakePeer, body: MakeBody) -> None:
    there = peer([[], [GOOD]])
    with pytest.raises(Unavailable, match="PUT it: the connection ended before a response"):
        put(there.wire(ONCE), body(b"bytes"))
    assert len(there.requests) == 1


@pytest.mark.parametrize("cut", [GOOD[:5], GOOD[:40]])
def test_a_put_whose_answer_is_cut_is_not_sent_again(peer: MakePeer, body: MakeBody, cut: bytes) -> None:
    there = peer([[GOOD, cut, HANG_UP], [GOOD]])
    puts = there.wire(ONCE)
    put(puts, body(b"first"))
    with pytest.raises(Unavailable, match="PUT it: the connection ended before a response"):
        put(puts, body(b"second"))
    assert put(puts, body(b"third")) == ETAG
    assert bodies(there) == [b"first", b"second", b"third"]


@pytest.mark.parametrize(
    "interim", [b"HTTP/1.1 100 Continue\r\n\r\n", b"HTTP/1.1 103 Early Hints\r\nLink: </a>\r\n\r\n"]
)
def test_what_comes_unasked_before_an_answer_is_not_the_answer(
    peer: MakePeer, body: MakeBody, data: bytes, interim: bytes
) -> None:
    there = peer([[interim * 3 + GOOD, interim + GOOD]])
    puts = there.wire(ONCE)
    assert [put(puts, body(data)) for _ in range(2)] == [ETAG] * 2
    assert bodies(there) == [data] * 2


def test_an_answer_without_an_etag_is_no_success(body: MakeBody) -> None:
    with closing(Peer([[b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n"]], None, None)) as there:
        keys = Credentials("key", "secret")
        endpoint = Endpoint(f"http://127.0.0.1:{there.port}", "auto")
        store = closed_later(S3Store("bucket", endpoint, credentials=keys, transport=ONCE))
        with pytest.raises(Unavailable, match="no ETag"):
            store.put("a", body(b"bytes"), metadata={})


@pytest.mark.parametrize(
    "answer",
    [
        GOOD.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n"),
        GOOD.replace(b"Content-Length: 0\r\n\r\n", b"Content-Length: 5\r\n\r\n12345"),
        GOOD.replace(b"Content-Length: 0\r\n\r\n", b"Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n"),
        GOOD + b"HTTP/1.1 200 that nobody asked for",
    ],
)
def test_a_connection_with_an_unclear_end_is_not_used_again(
    peer: MakePeer, body: MakeBody, answer: bytes
) -> None:
    there = peer([[answer], [GOOD]])
    puts = there.wire(ONCE)
    assert [put(puts, body(b"first")), put(puts, body(b"second"))] == [ETAG] * 2
    assert bodies(there) == [b"first", b"second"]


def test_a_refusal_says_how_long_to_wait_and_spoils_no_later_put(
    peer: MakePeer, body: MakeBody, data: bytes
) -> None:
    error = b"<Error><Code>SlowDown</Code><Message>a &lt; b</Message></Error>"
    refusal = b"HTTP/1.1 429 Slow\r\nRetry-After: 7\r\nContent-Length: %d\r\n\r\n%b" % (len(error), error)
    there = peer([[refusal], [GOOD]])
    puts = there.wire(ONCE)
    with pytest.raises(Throttled, match=r"PUT it: SlowDown \(429\): a < b") as caught:
        put(puts, body(data))
    assert caught.value.asks_to_slow_down
    assert caught.value.retry_after_seconds == 7
    assert put(puts, body(data)) == ETAG
    assert bodies(there) == [data] * 2


def test_deletes_and_puts_take_turns_on_one_connection(peer: MakePeer, body: MakeBody) -> None:
    there = peer([[GOOD, GONE, GOOD, GONE]])
    puts = there.wire(ONCE)
    for _ in range(2):
        assert put(puts, body(b"bytes")) == ETAG
        delete(puts, "DELETE it", "dir/a")
    assert [request.partition(b" HTTP")[0] for request in there.requests] == [
        b"PUT /bucket/dir/a",
        b"DELETE /bucket/dir/a",
    ] * 2
