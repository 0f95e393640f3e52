"""R2's rules for single objects, each as a client meets it."""

import base64
import hashlib
import socket
from typing import TYPE_CHECKING, Any

import pytest

from tests.s3server import Rules, ServerProcess
from tests.unit.s3server.raw import RawClient
from tests.unit.s3server.refusals import refusal

if TYPE_CHECKING:
    from mypy_boto3_s3 import S3Client

BUCKET = "bucket"
GIB = 2**30
MIB = 2**20


def test_the_limits_are_r2s() -> None:
    rules = Rules()
    assert rules.max_put_bytes == 5 * GIB - 5 * MIB
    assert rules.max_object_bytes == int(4.995 * 2**40)
    assert (rules.max_key_bytes, rules.max_metadata_bytes, rules.write_interval_seconds) == (1024, 8192, 1)


def test_a_second_write_of_a_key_within_a_second_is_429(server: ServerProcess, client: "S3Client") -> None:
    server.control.set_rules(write_interval_seconds=1)
    source: Any = {"Bucket": BUCKET, "Key": "k"}
    client.put_object(Bucket=BUCKET, Key="k", Body=b"one")
    client.put_object(Bucket=BUCKET, Key="other", Body=b"one")
    upload_id = client.create_multipart_upload(Bucket=BUCKET, Key="k")["UploadId"]
    etag = client.upload_part(Bucket=BUCKET, Key="k", UploadId=upload_id, PartNumber=1, Body=b"two")["ETag"]
    finish: Any = {
        "Bucket": BUCKET,
        "Key": "k",
        "UploadId": upload_id,
        "MultipartUpload": {"Parts": [{"PartNumber": 1, "ETag": etag}]},
    }
    server.control.advance_clock(
        -0.5
    )  # however slow this machine, less than a second has passed in the bucket
    too_many = (429, "TooManyRequests")
    assert refusal(client.put_object, Bucket=BUCKET, Key="k", Body=b"two") == too_many
    assert refusal(client.copy_object, Bucket=BUCKET, Key="other", CopySource=source) == too_many
    assert refusal(client.complete_multipart_upload, **finish) == too_many
    assert server.control.read("k") == b"one"
    server.control.advance_clock(60)
    client.complete_multipart_upload(**finish)
    assert server.control.read("k") == b"two"


def test_a_put_without_a_length_is_411(server: ServerProcess) -> None:
    with RawClient(server) as raw:
        answer = raw.ask("PUT", "/bucket/k", {})
    assert (answer.status, b"MissingContentLength" in answer.body) == (411, True)


def test_a_chunked_put_is_411_and_ends_the_connection(server: ServerProcess) -> None:
    with RawClient(server) as raw:
        answer = raw.ask("PUT", "/bucket/k", {"Transfer-Encoding": "chunked"}, b"5\r\nhello\r\n0\r\n\r\n")
        assert (answer.status, answer.headers["connection"]) == (411, "close")
        with pytest.raises(EOFError):
            raw.answer()
    assert server.control.objects() == {}


@pytest.mark.parametrize(
    ("headers", "payload_hash"),
    [
        ({"Content-Encoding": "aws-chunked"}, "UNSIGNED-PAYLOAD"),
        ({"X-Amz-Trailer": "x-amz-checksum-crc32"}, "UNSIGNED-PAYLOAD"),
        ({}, "STREAMING-UNSIGNED-PAYLOAD-TRAILER"),
        ({}, "STREAMING-AWS4-HMAC-SHA256-PAYLOAD"),
    ],
)
def test_streaming_payloads_and_trailers_are_401(
    server: ServerProcess, headers: dict[str, str], payload_hash: str
) -> None:
    with RawClient(server) as raw:
        length = {"Content-Length": "5"}
        answer = raw.ask("PUT", "/bucket/k", length | headers, b"hello", payload_hash=payload_hash)
    assert (answer.status, b"<Code>Unauthorized</Code>" in answer.body) == (401, True)
    assert server.control.objects() == {}


def test_no_100_continue_is_ever_sent(server: ServerProcess) -> None:
    with RawClient(server) as raw:
        raw.sock.sendall(raw.head("PUT", "/bucket/k", {"Content-Length": "5", "Expect": "100-continue"}))
        raw.sock.settimeout(0.2)
        with pytest.raises(socket.timeout):
            raw.sock.recv(1)
        raw.sock.settimeout(20)
        raw.sock.sendall(b"hello")
        assert raw.answer().status == 200
    assert server.control.read("k") == b"hello"


def test_content_md5_is_verified(server: ServerProcess, client: "S3Client") -> None:
    def md5(body: bytes) -> str:
        return base64.b64encode(hashlib.md5(body).digest()).decode()

    put = client.put_object
    assert refusal(put, Bucket=BUCKET, Key="k", Body=b"body", ContentMD5=md5(b"bode")) == (400, "BadDigest")
    assert refusal(put, Bucket=BUCKET, Key="k", Body=b"body", ContentMD5="short") == (400, "InvalidDigest")
    assert server.control.objects() == {}
    put(Bucket=BUCKET, Key="k", Body=b"body", ContentMD5=md5(b"body"))


def test_a_body_that_is_not_the_one_signed_is_refused(server: ServerProcess) -> None:
    signed = hashlib.sha256(b"body").hexdigest()
    length = {"Content-Length": "4"}
    with RawClient(server) as raw:
        answer = raw.ask("PUT", "/bucket/k", length, b"bode", payload_hash=signed)
        assert (answer.status, b"XAmzContentSHA256Mismatch" in answer.body) == (400, True)
        head = raw.head("PUT", "/bucket/k", length, payload_hash=signed)
        raw.sock.sendall(head.replace(signed.encode(), b"UNSIGNED-PAYLOAD") + b"bode")
        assert raw.answer().status == 403  # the hash itself is signed too
        assert server.control.objects() == {}
        assert raw.ask("PUT", "/bucket/k", length, b"body", payload_hash=signed).status == 200


def test_two_spellings_of_a_key_are_two_objects_or_by_r2s_rule_one_that_is_listed_as_last_written(
    server: ServerProcess, client: "S3Client"
) -> None:
    decomposed, composed = "e\u0301", "\u00e9"
    client.put_object(Bucket=BUCKET, Key=decomposed, Body=b"x")
    assert refusal(client.get_object, Bucket=BUCKET, Key=composed) == (404, "NoSuchKey")
    server.control.set_rules(normalise_keys=True)
    assert client.get_object(Bucket=BUCKET, Key=composed)["ContentLength"] == 1
    assert list(server.control.objects()) == [decomposed]
    failed = (412, "PreconditionFailed")
    assert refusal(client.put_object, Bucket=BUCKET, Key=composed, Body=b"yy", IfNoneMatch="*") == failed
    client.put_object(Bucket=BUCKET, Key=composed, Body=b"yy")
    assert list(server.control.objects()) == [composed]
    assert client.get_object(Bucket=BUCKET, Key=decomposed)["ContentLength"] == 2
    client.copy_object(Bucket=BUCKET, Key=decomposed, CopySource={"Bucket": BUCKET, "Key": composed})
    assert list(server.control.objects()) == [decomposed]
    client.delete_object(Bucket=BUCKET, Key=composed)
    assert server.control.objects() == {}


def test_metadata_has_at_most_8192_bytes(client: "S3Client") -> None:
    client.put_object(Bucket=BUCKET, Key="k", Body=b"", Metadata={"ab": "x" * 8190})
    refused = refusal(client.put_object, Bucket=BUCKET, Key="k", Body=b"", Metadata={"ab": "x" * 8191})
    assert refused == (400, "MetadataTooLarge")
    refused = refusal(client.create_multipart_upload, Bucket=BUCKET, Key="k", Metadata={"ab": "x" * 8191})
    assert refused == (400, "MetadataTooLarge")


def test_metadata_is_rfc2047_decoded(server: ServerProcess, client: "S3Client") -> None:
    encoded = {"q": "=?utf-8?Q?caf=C3=A9?=", "percent": "caf%C3%A9"}
    client.put_object(Bucket=BUCKET, Key="k", Body=b"", Metadata=encoded)
    assert server.control.objects()["k"].metadata == {"q": "café", "percent": "caf%C3%A9"}
    assert client.head_object(Bucket=BUCKET, Key="k")["Metadata"]["percent"] == "caf%C3%A9"


def test_a_put_beyond_the_limit_is_refused_before_its_body(server: ServerProcess) -> None:
    with RawClient(server) as raw:
        answer = raw.ask("PUT", "/bucket/k", {"Content-Length": str(5 * GIB - 5 * MIB + 1)})
    assert (answer.status, b"EntityTooLarge" in answer.body) == (400, True)


def test_a_copy_of_more_than_five_gibibytes_is_refused(server: ServerProcess, client: "S3Client") -> None:
    server.control.add_synthetic("big", 5 * GIB + 1, seed=1)
    server.control.add_synthetic("fits", 5 * GIB, seed=1)
    for key, outcome in (("big", (400, "InvalidRequest")), ("fits", None)):
        source: Any = {"Bucket": BUCKET, "Key": key}
        if outcome is None:
            client.copy_object(Bucket=BUCKET, Key="copy", CopySource=source)
        else:
            assert refusal(client.copy_object, Bucket=BUCKET, Key="copy", CopySource=source) == outcome
    assert server.control.objects()["copy"].size == 5 * GIB


def test_a_body_cut_short_leaves_nothing(server: ServerProcess) -> None:
    with RawClient(server) as raw:
        raw.sock.sendall(raw.head("PUT", "/bucket/k", {"Content-Length": "1000"}) + b"not all")
    (entry,) = server.control.wait_requests(1, "PutObject")
    assert (entry.status, entry.bytes_in, entry.took_effect) == (0, 7, False)
    assert server.control.objects() == {}
