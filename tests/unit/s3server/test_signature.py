"""Who may do what: signatures and access keys."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest

from tests.s3server import Account, ServerProcess, boto_client
from tests.unit.s3server.raw import RawClient
from tests.unit.s3server.refusals import refusal

if TYPE_CHECKING:
    from mypy_boto3_s3 import S3Client

BUCKET = "bucket"
DENIED = (403, "AccessDenied")


@contextmanager
def client_of(server: ServerProcess, account: Account) -> Iterator["S3Client"]:
    client = boto_client(server, access_key=account.access_key, secret_key=account.secret_key)
    try:
        yield client
    finally:
        client.close()


@pytest.mark.parametrize(
    ("access_key", "secret_key", "code"),
    [
        ("nobody", "test-secret-key", "InvalidAccessKeyId"),
        ("test-access-key", "wrong", "SignatureDoesNotMatch"),
    ],
)
def test_a_wrong_key_or_secret_is_403(
    server: ServerProcess, access_key: str, secret_key: str, code: str
) -> None:
    with client_of(server, Account(access_key, secret_key)) as client:
        assert refusal(client.put_object, Bucket=BUCKET, Key="k", Body=b"x") == (403, code)
        assert refusal(client.list_objects_v2, Bucket=BUCKET) == (403, code)
    assert server.control.objects() == {}


@pytest.mark.parametrize("skew", [901.0, -905.0])
def test_a_clock_15_minutes_off_is_403(server: ServerProcess, client: "S3Client", skew: float) -> None:
    server.control.set(clock_skew=skew)
    assert refusal(client.get_object, Bucket=BUCKET, Key="k") == (403, "RequestTimeTooSkewed")
    server.control.set(clock_skew=skew / 2)
    assert refusal(client.get_object, Bucket=BUCKET, Key="k") == (404, "NoSuchKey")


def test_an_unsigned_request_is_403(server: ServerProcess) -> None:
    with RawClient(server) as raw:
        raw.sock.sendall(b"GET /bucket/k HTTP/1.1\r\nHost: x\r\n\r\n")
        assert raw.answer().status == 403


@pytest.mark.parametrize(
    ("signed", "sent"),
    [
        (b"GET /bucket/k ", b"GET /bucket/other "),
        (b"GET /bucket/k ", b"HEAD /bucket/k "),
        (b"GET /bucket/k ", b"GET /bucket/k?x=1 "),
        (b"bytes=0-1", b"bytes=0-2"),
    ],
)
def test_what_was_signed_cannot_be_changed(server: ServerProcess, signed: bytes, sent: bytes) -> None:
    server.control.put("k", b"123")
    with RawClient(server) as raw:
        head = raw.head("GET", "/bucket/k", {"Range": "bytes=0-1"})
        raw.sock.sendall(head)
        assert raw.answer().status == 206
        raw.sock.sendall(head.replace(signed, sent))
        assert raw.answer("HEAD" if sent.startswith(b"HEAD") else "GET").status == 403


def test_an_amz_header_that_is_not_signed_is_refused(server: ServerProcess) -> None:
    with RawClient(server) as raw:
        head = raw.head("PUT", "/bucket/k", {"Content-Length": "0"})
        raw.sock.sendall(head[:-2] + b"x-amz-meta-a: b\r\n\r\n")
        assert raw.answer().status == 403


def test_a_read_only_key_reads_and_cannot_write(server: ServerProcess) -> None:
    server.control.put("k", b"x")
    account = Account("reader", "r", writable=False)
    server.control.add_account(account)
    source: Any = {"Bucket": BUCKET, "Key": "k"}
    with client_of(server, account) as client:
        assert client.get_object(Bucket=BUCKET, Key="k")["ContentLength"] == 1
        assert client.list_objects_v2(Bucket=BUCKET)["KeyCount"] == 1
        assert refusal(client.put_object, Bucket=BUCKET, Key="k", Body=b"y") == DENIED
        assert refusal(client.delete_object, Bucket=BUCKET, Key="k") == DENIED
        assert refusal(client.delete_objects, Bucket=BUCKET, Delete={"Objects": [{"Key": "k"}]}) == DENIED
        assert refusal(client.create_multipart_upload, Bucket=BUCKET, Key="k") == DENIED
        assert refusal(client.copy_object, Bucket=BUCKET, Key="c", CopySource=source) == DENIED
    assert server.control.read("k") == b"x"


def test_an_object_scoped_key_cannot_make_bucket_calls(server: ServerProcess) -> None:
    account = Account("objects", "o", bucket_calls=False)
    server.control.add_account(account)
    with client_of(server, account) as client:
        assert refusal(client.head_bucket, Bucket=BUCKET) == (403, "403")
        assert refusal(client.create_bucket, Bucket="more") == DENIED
        assert refusal(client.list_buckets) == DENIED
        assert client.list_objects_v2(Bucket=BUCKET, MaxKeys=1)["KeyCount"] == 0
        client.put_object(Bucket=BUCKET, Key="k", Body=b"x")


def test_a_prefix_scoped_key_sees_only_its_prefix(server: ServerProcess) -> None:
    for key in ("mine/a", "theirs/b"):
        server.control.put(key, b"x")
    account = Account("scoped", "s", prefix="mine/")
    server.control.add_account(account)
    source: Any = {"Bucket": BUCKET, "Key": "theirs/b"}
    with client_of(server, account) as client:
        assert client.list_objects_v2(Bucket=BUCKET, Prefix="mine/")["KeyCount"] == 1
        assert refusal(client.list_objects_v2, Bucket=BUCKET) == DENIED
        assert refusal(client.list_multipart_uploads, Bucket=BUCKET, Prefix="the") == DENIED
        assert refusal(client.head_bucket, Bucket=BUCKET) == (403, "403")
        assert refusal(client.get_object, Bucket=BUCKET, Key="theirs/b") == DENIED
        assert refusal(client.copy_object, Bucket=BUCKET, Key="mine/c", CopySource=source) == DENIED
        doomed: Any = {"Objects": [{"Key": "mine/a"}, {"Key": "theirs/b"}]}
        answer = client.delete_objects(Bucket=BUCKET, Delete=doomed)
    assert [row["Code"] for row in answer["Errors"]] == ["AccessDenied"]
    assert list(server.control.objects()) == ["theirs/b"]


def test_a_key_revoked_is_unknown_on_open_connections_too(server: ServerProcess) -> None:
    account = Account("passing", "p")
    server.control.add_account(account)
    with client_of(server, account) as client:
        client.put_object(Bucket=BUCKET, Key="k", Body=b"x")
        server.control.revoke("passing")
        assert refusal(client.get_object, Bucket=BUCKET, Key="k") == (403, "InvalidAccessKeyId")
        server.control.add_account(account)
        client.get_object(Bucket=BUCKET, Key="k")["Body"].read()
    entries = server.control.log(key="k")
    assert len({entry.connection for entry in entries}) == 1
    assert [entry.access_key for entry in entries] == ["passing", "", "passing"]
