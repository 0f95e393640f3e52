"""Objects: put, get, head, copy, delete, conditions, ranges."""

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


def test_delete_looks_at_no_condition(server: ServerProcess, client: "S3Client") -> None:
    put(client, "k")
    client.delete_object(Bucket=BUCKET, Key="k", IfMatch='"another"')
    assert server.control.objects() == {}


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
