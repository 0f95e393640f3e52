"""Objects: put, get, head, copy, delete, conditions, ranges."""

import hashlib
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import pytest

from tests.s3server import ServerProcess
from tests.unit.s3server.refusals import refusal

if TYPE_CHECKING:
    from mypy_boto3_s3 import S3Client

BUCKET = "bucket"


def put(client: "S3Client", key: str, body: bytes = b"0123456789", **more: Any) -> str:
    return client.put_object(Bucket=BUCKET, Key=key, Body=body, **more)["ETag"]


@pytest.mark.parametrize(
    "key", ["plain", "a b+c%2F/é", "x" * 1024, "/lead", "end/", "a//b", "../up", "q?x=1&y#z", "日本"]
)
def test_what_was_put_is_what_is_got(server: ServerProcess, client: "S3Client", key: str) -> None:
    body = key.encode() * 3
    etag = put(client, key, body, ContentType="text/x-test", Metadata={"colour": "red"})
    answer = client.get_object(Bucket=BUCKET, Key=key)
    assert answer["Body"].read() == body
    assert answer["ETag"] == etag == f'"{hashlib.md5(body).hexdigest()}"'
    assert (answer["ContentType"], answer["Metadata"]) == ("text/x-test", {"colour": "red"})
    assert list(server.control.objects()) == [key]


def test_head_says_what_get_says_without_a_body(client: "S3Client") -> None:
    put(client, "k", Metadata={"a": "b"})
    head = client.head_object(Bucket=BUCKET, Key="k")
    got = client.get_object(Bucket=BUCKET, Key="k")
    got["Body"].read()
    for name in ("ETag", "ContentLength", "LastModified", "Metadata"):
        assert head[name] == got[name]


@pytest.mark.parametrize(
    ("asked", "body", "content_range"),
    [
        ("bytes=0-3", b"0123", "bytes 0-3/10"),
        ("bytes=4-", b"456789", "bytes 4-9/10"),
        ("bytes=8-99", b"89", "bytes 8-9/10"),
        ("bytes=-3", b"789", "bytes 7-9/10"),
        ("bytes=-99", b"0123456789", "bytes 0-9/10"),
    ],
)
def test_a_range_is_206_with_its_place(
    client: "S3Client", asked: str, body: bytes, content_range: str
) -> None:
    put(client, "k")
    answer = client.get_object(Bucket=BUCKET, Key="k", Range=asked)
    assert answer["Body"].read() == body
    assert answer["ContentRange"] == content_range
    assert answer["ResponseMetadata"]["HTTPStatusCode"] == 206


@pytest.mark.parametrize("asked", ["bytes=10-", "bytes=10-20", "bytes=-0"])
def test_a_range_behind_the_end_is_416(client: "S3Client", asked: str) -> None:
    put(client, "k")
    assert refusal(client.get_object, Bucket=BUCKET, Key="k", Range=asked) == (416, "InvalidRange")


def test_conditions_on_reads(client: "S3Client") -> None:
    etag = put(client, "k")
    later = datetime.now(UTC) + timedelta(hours=1)
    assert client.get_object(Bucket=BUCKET, Key="k", IfMatch=etag)["Body"].read() == b"0123456789"
    assert refusal(client.get_object, Bucket=BUCKET, Key="k", IfMatch='"x"') == (412, "PreconditionFailed")
    assert refusal(client.head_object, Bucket=BUCKET, Key="k", IfMatch='"x"') == (412, "412")
    assert refusal(client.get_object, Bucket=BUCKET, Key="k", IfNoneMatch=etag) == (304, "304")
    assert refusal(client.get_object, Bucket=BUCKET, Key="k", IfModifiedSince=later) == (304, "304")
    earlier = later - timedelta(days=1)
    assert refusal(client.get_object, Bucket=BUCKET, Key="k", IfUnmodifiedSince=earlier)[0] == 412
    assert client.get_object(Bucket=BUCKET, Key="k", IfModifiedSince=earlier)["ContentLength"] == 10


def test_delete_is_204_for_what_never_was(server: ServerProcess, client: "S3Client") -> None:
    put(client, "k")
    for _ in range(2):
        answer = client.delete_object(Bucket=BUCKET, Key="k")
        assert answer["ResponseMetadata"]["HTTPStatusCode"] == 204
    assert [entry.took_effect for entry in server.control.log("DeleteObject")] == [True, False]


def test_delete_looks_at_no_condition(server: ServerProcess, client: "S3Client") -> None:
    put(client, "k")
    client.delete_object(Bucket=BUCKET, Key="k", IfMatch='"another"')
    assert server.control.objects() == {}


def test_delete_objects_deletes_each(server: ServerProcess, client: "S3Client") -> None:
    for key in ("a", "b <&>", "keep"):
        put(client, key)
    answer = client.delete_objects(
        Bucket=BUCKET, Delete={"Objects": [{"Key": "a"}, {"Key": "b <&>"}, {"Key": "no"}]}
    )
    assert [row["Key"] for row in answer["Deleted"]] == ["a", "b <&>", "no"]
    assert list(server.control.objects()) == ["keep"]
    quiet = client.delete_objects(Bucket=BUCKET, Delete={"Objects": [{"Key": "keep"}], "Quiet": True})
    assert "Deleted" not in quiet


def test_copy_keeps_or_replaces_metadata(server: ServerProcess, client: "S3Client") -> None:
    etag = put(client, "from é", Metadata={"a": "1"})
    source: Any = {"Bucket": BUCKET, "Key": "from é"}
    answer = client.copy_object(Bucket=BUCKET, Key="kept", CopySource=source)
    assert answer["CopyObjectResult"]["ETag"] == etag
    client.copy_object(
        Bucket=BUCKET, Key="replaced", CopySource=source, Metadata={"b": "2"}, MetadataDirective="REPLACE"
    )
    client.delete_object(Bucket=BUCKET, Key="from é")
    objects = server.control.objects()
    assert (objects["kept"].metadata, objects["replaced"].metadata) == ({"a": "1"}, {"b": "2"})
    assert server.control.read("kept") == server.control.read("replaced") == b"0123456789"


def test_buckets_can_be_made_and_listed(client: "S3Client") -> None:
    client.head_bucket(Bucket=BUCKET)
    assert refusal(client.head_bucket, Bucket="second") == (404, "404")
    client.create_bucket(Bucket="second")
    assert refusal(client.create_bucket, Bucket="second") == (409, "BucketAlreadyOwnedByYou")
    assert [bucket["Name"] for bucket in client.list_buckets()["Buckets"]] == [BUCKET, "second"]
    client.put_object(Bucket="second", Key="k", Body=b"there")
    assert refusal(client.get_object, Bucket=BUCKET, Key="k") == (404, "NoSuchKey")


def test_what_is_not_done_says_so(client: "S3Client") -> None:
    put(client, "k")
    assert refusal(client.get_object_tagging, Bucket=BUCKET, Key="k") == (501, "NotImplemented")
    assert refusal(client.list_objects, Bucket=BUCKET) == (501, "NotImplemented")
