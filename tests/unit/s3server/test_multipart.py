"""Multipart uploads, and R2's rules for them."""

from typing import TYPE_CHECKING, Any

import pytest

from tests.s3server import ServerProcess, synthetic_bytes
from tests.unit.s3server.refusals import refusal

if TYPE_CHECKING:
    from mypy_boto3_s3 import S3Client

BUCKET = "bucket"
SMALL = 1000  # bytes of a part, where the test lowers the limit of 5 MiB


@pytest.fixture
def small_parts(server: ServerProcess) -> None:
    """Parts of SMALL bytes are large enough."""
    server.control.set_rules(min_part_bytes=SMALL)


def begin(client: "S3Client", key: str = "k", **more: Any) -> str:
    return client.create_multipart_upload(Bucket=BUCKET, Key=key, **more)["UploadId"]


def part(client: "S3Client", upload_id: str, number: int, body: bytes, key: str = "k") -> dict[str, Any]:
    answer = client.upload_part(Bucket=BUCKET, Key=key, UploadId=upload_id, PartNumber=number, Body=body)
    return {"PartNumber": number, "ETag": answer["ETag"]}


def complete(client: "S3Client", upload_id: str, parts: list[dict[str, Any]], **more: Any) -> str:
    parts_argument: Any = {"Parts": parts}
    return client.complete_multipart_upload(
        Bucket=BUCKET, Key="k", UploadId=upload_id, MultipartUpload=parts_argument, **more
    )["ETag"]


def test_an_upload_of_another_key_is_no_such_upload(client: "S3Client") -> None:
    upload_id = begin(client, "k")
    refused = refusal(
        client.upload_part, Bucket=BUCKET, Key="other", UploadId=upload_id, PartNumber=1, Body=b""
    )
    assert refused == (404, "NoSuchUpload")


def test_uploads_and_parts_are_listed_in_pages(client: "S3Client") -> None:
    ids = {key: begin(client, key) for key in ("a", "b", "c/d")}
    for number in (5, 1, 3):
        part(client, ids["a"], number, bytes(number), key="a")
    uploads = [
        (row["Key"], row["UploadId"])
        for page in client.get_paginator("list_multipart_uploads").paginate(
            Bucket=BUCKET, PaginationConfig={"PageSize": 1}
        )
        for row in page.get("Uploads", [])
    ]
    assert uploads == list(ids.items())
    sizes = [
        (row["PartNumber"], row["Size"])
        for page in client.get_paginator("list_parts").paginate(
            Bucket=BUCKET, Key="a", UploadId=ids["a"], PaginationConfig={"PageSize": 2}
        )
        for row in page.get("Parts", [])
    ]
    assert sizes == [(1, 1), (3, 3), (5, 5)]
    assert client.list_multipart_uploads(Bucket=BUCKET, Prefix="c/")["Uploads"][0]["Key"] == "c/d"


@pytest.mark.usefixtures("small_parts")
def test_part_copies_take_ranges_and_obey_the_same_rules(server: ServerProcess, client: "S3Client") -> None:
    server.control.put("file", bytes(range(256)) * 10)
    server.control.add_synthetic("synthetic", 10**12, seed=5)
    upload_id = begin(client)
    parts = []
    for number, (key, start) in enumerate([("file", 700), ("synthetic", 10**11)], start=1):
        answer = client.upload_part_copy(
            Bucket=BUCKET,
            Key="k",
            UploadId=upload_id,
            PartNumber=number,
            CopySource={"Bucket": BUCKET, "Key": key},
            CopySourceRange=f"bytes={start}-{start + SMALL - 1}",
            CopySourceIfMatch='"not looked at"',
        )
        parts.append({"PartNumber": number, "ETag": answer["CopyPartResult"]["ETag"]})
    complete(client, upload_id, parts)
    expected = (bytes(range(256)) * 10)[700 : 700 + SMALL] + synthetic_bytes(5, 10**11, SMALL)
    assert server.control.read("k") == expected
    outside = f"bytes=0-{10**12}"
    refused = refusal(
        client.upload_part_copy,
        Bucket=BUCKET,
        Key="k",
        UploadId=begin(client),
        PartNumber=1,
        CopySource={"Bucket": BUCKET, "Key": "synthetic"},
        CopySourceRange=outside,
    )
    assert refused == (400, "InvalidArgument")


@pytest.mark.usefixtures("small_parts")
def test_a_missing_part_a_wrong_etag_and_a_wrong_order_are_refused(client: "S3Client") -> None:
    upload_id = begin(client)
    one, two = part(client, upload_id, 1, bytes(SMALL)), part(client, upload_id, 2, b"end")
    missing = {"PartNumber": 3, "ETag": one["ETag"]}
    wrong = {"PartNumber": 2, "ETag": one["ETag"]}
    assert refusal(complete, client=client, upload_id=upload_id, parts=[one, missing])[1] == "InvalidPart"
    assert refusal(complete, client=client, upload_id=upload_id, parts=[one, wrong])[1] == "InvalidPart"
    assert refusal(complete, client=client, upload_id=upload_id, parts=[two, one])[1] == "InvalidPartOrder"
    assert refusal(complete, client=client, upload_id=upload_id, parts=[])[1] == "MalformedXML"


def test_part_numbers_run_from_1_to_10000(client: "S3Client") -> None:
    upload_id = begin(client)
    for number in (0, 10_001):
        arguments = {"Bucket": BUCKET, "Key": "k", "UploadId": upload_id, "PartNumber": number, "Body": b""}
        assert refusal(client.upload_part, **arguments) == (400, "InvalidArgument")
    part(client, upload_id, 10_000, b"x")


def test_a_failed_second_upload_of_a_part_destroys_the_first(
    server: ServerProcess, client: "S3Client"
) -> None:
    upload_id = begin(client)
    good = part(client, upload_id, 1, b"good")
    arguments = {"Bucket": BUCKET, "Key": "k", "UploadId": upload_id, "PartNumber": 1, "Body": b"good"}
    assert refusal(client.upload_part, **arguments, ContentMD5="AAAAAAAAAAAAAAAAAAAAAA==") == (
        400,
        "BadDigest",
    )
    assert server.control.uploads()[0].parts == {}
    assert refusal(complete, client=client, upload_id=upload_id, parts=[good]) == (400, "InvalidPart")
    server.control.set_rules(reupload_destroys_part=False)
    good = part(client, upload_id, 1, b"good")
    assert refusal(client.upload_part, **arguments, ContentMD5="AAAAAAAAAAAAAAAAAAAAAA==") == (
        400,
        "BadDigest",
    )
    complete(client, upload_id, [good])


def test_a_failed_condition_at_complete_throws_all_parts_away(
    server: ServerProcess, client: "S3Client"
) -> None:
    upload_id = begin(client)
    row = part(client, upload_id, 1, b"mine")
    server.control.put("k", b"theirs")
    refused = refusal(complete, client=client, upload_id=upload_id, parts=[row], IfNoneMatch="*")
    assert refused == (412, "PreconditionFailed")
    assert server.control.uploads() == []
    assert server.control.read("k") == b"theirs"


def test_a_condition_given_at_create_is_checked_then(server: ServerProcess, client: "S3Client") -> None:
    server.control.put("k", b"theirs")

    def add(request: Any, **_: Any) -> None:
        request.headers["If-None-Match"] = "*"

    client.meta.events.register("before-sign.s3.CreateMultipartUpload", add, unique_id="condition")
    try:
        assert refusal(begin, client=client) == (412, "PreconditionFailed")
    finally:
        client.meta.events.unregister("before-sign.s3.CreateMultipartUpload", unique_id="condition")


def test_an_object_over_the_limit_is_refused_at_complete(server: ServerProcess, client: "S3Client") -> None:
    server.control.set_rules(max_object_bytes=7)
    upload_id = begin(client)
    row = part(client, upload_id, 1, bytes(8))
    assert refusal(complete, client=client, upload_id=upload_id, parts=[row]) == (400, "EntityTooLarge")
