"""Scripted faults: each action, and which requests it meets."""

import gzip
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest
from botocore.exceptions import (
    ConnectionClosedError,
    ReadTimeoutError,
)

from tests.s3server import Fault, FaultAction, ServerProcess, boto_client
from tests.unit.s3server.refusals import refusal

if TYPE_CHECKING:
    from mypy_boto3_s3 import S3Client

BUCKET = "bucket"
BODY = bytes(range(256)) * 16


def script(server: ServerProcess, action: FaultAction, operation: str, **more: Any) -> None:
    server.control.put("k", BODY)
    server.control.faults(Fault(action, operation=operation, **more))


def read(client: "S3Client", **more: Any) -> bytes:
    return client.get_object(Bucket=BUCKET, Key="k", **more)["Body"].read()


def test_answer_after_the_effect(server: ServerProcess, client: "S3Client") -> None:
    script(server, FaultAction.ANSWER_AFTER, "PutObject", status=500, code="InternalError")
    assert refusal(client.put_object, Bucket=BUCKET, Key="new", Body=b"x") == (500, "InternalError")
    assert server.control.read("new") == b"x"


@pytest.mark.parametrize(
    ("action", "happened"), [(FaultAction.DROP_BEFORE, False), (FaultAction.DROP_AFTER, True)]
)
def test_dropped_connections(
    server: ServerProcess,
    client: "S3Client",
    action: FaultAction,
    happened: bool,  # noqa: FBT001 (a parameter set)
) -> None:
    script(server, action, "PutObject")
    with pytest.raises(ConnectionClosedError):
        client.put_object(Bucket=BUCKET, Key="new", Body=b"x")
    (entry,) = server.control.wait_requests(1, "PutObject")
    assert (entry.status, entry.took_effect) == (0, happened)
    assert ("new" in server.control.objects()) is happened


def test_silence_after_the_effect_ends_without_an_answer(server: ServerProcess) -> None:
    script(server, FaultAction.SILENT_AFTER, "PutObject", seconds=2.5)
    client = boto_client(server, read_timeout=0.2)
    try:
        with pytest.raises(ReadTimeoutError):
            client.put_object(Bucket=BUCKET, Key="new", Body=b"x")
    finally:
        client.close()
    (entry,) = server.control.wait_requests(1, "PutObject")
    assert (entry.status, entry.took_effect, entry.fault) == (0, True, "silent-after")
    assert entry.seconds >= 2.5
    assert server.control.read("new") == b"x"


def test_a_failure_midway_stores_nothing_and_destroys_the_earlier_part_of_that_number(
    server: ServerProcess, client: "S3Client"
) -> None:
    script(server, FaultAction.ANSWER_MIDWAY, "PutObject", status=500, code="InternalError", times=1)
    assert refusal(client.put_object, Bucket=BUCKET, Key="k", Body=b"new") == (500, "InternalError")
    assert server.control.read("k") == BODY
    upload_id = client.create_multipart_upload(Bucket=BUCKET, Key="big")["UploadId"]
    for number in (1, 2):
        client.upload_part(
            Bucket=BUCKET, Key="big", UploadId=upload_id, PartNumber=number, Body=b"x" * number
        )
    script(server, FaultAction.ANSWER_MIDWAY, "UploadPart", part=2, status=503)
    part: Any = {"Bucket": BUCKET, "Key": "big", "UploadId": upload_id, "Body": b"again"}
    client.upload_part(PartNumber=1, **part)
    assert refusal(client.upload_part, PartNumber=2, **part) == (503, "ServiceUnavailable")
    (upload,) = server.control.uploads()
    assert upload.parts == {1: 5}
    assert server.control.log("UploadPart")[-1].took_effect is False


def test_an_object_is_unpacked_on_its_way_only_if_it_is_stored_as_gzip(
    server: ServerProcess, client: "S3Client"
) -> None:
    packed = gzip.compress(BODY)
    client.put_object(Bucket=BUCKET, Key="packed", Body=packed, ContentEncoding="gzip")
    server.control.put("plain", packed)
    server.control.faults(Fault(FaultAction.DECOMPRESS, operation="GetObject"))
    for key, expected in (("packed", BODY), ("plain", packed)):
        answer = client.get_object(Bucket=BUCKET, Key=key, Range="bytes=0-9")
        assert answer["ResponseMetadata"]["HTTPStatusCode"] == 200
        assert (answer["ContentLength"], answer["Body"].read()) == (len(expected), expected)
        assert "ContentEncoding" not in answer
    server.control.clear_faults()
    answer = client.get_object(Bucket=BUCKET, Key="packed")
    assert (answer["ContentEncoding"], answer["Body"].read()) == ("gzip", packed)


def test_delay(server: ServerProcess, client: "S3Client") -> None:
    script(server, FaultAction.DELAY, "GetObject", seconds=0.2, nth=2)
    assert [read(client), read(client)] == [BODY, BODY]
    first, second = server.control.wait_requests(2, "GetObject")
    assert (first.fault, second.fault) == ("", "delay")
    assert second.seconds >= 0.2


def test_a_fault_is_removed_by_its_id_and_the_others_stay(server: ServerProcess, client: "S3Client") -> None:
    first, second = server.control.faults(
        Fault(FaultAction.HOLD, key="first"), Fault(FaultAction.HOLD, key="second")
    )
    threads = {
        key: threading.Thread(target=client.put_object, kwargs={"Bucket": BUCKET, "Key": key, "Body": b"x"})
        for key in ("first", "second")
    }
    for thread in threads.values():
        thread.start()
    server.control.wait_requests(2, "PutObject", finished=False)
    server.control.clear_faults(first)
    threads["first"].join()
    assert list(server.control.objects()) == ["first"]
    server.control.clear_faults(second)
    threads["second"].join()
    assert sorted(server.control.objects()) == ["first", "second"]


def test_faults_are_told_by_key_method_and_number(server: ServerProcess, client: "S3Client") -> None:
    for key in ("a/1", "a/2", "b/1"):
        server.control.put(key, b"x")
    server.control.faults(
        Fault(FaultAction.ANSWER, key="a/*", method="GET", nth=2, status=500, code="InternalError"),
        Fault(FaultAction.ANSWER, key="b/?", times=1, status=503, code="SlowDown"),
    )
    client.get_object(Bucket=BUCKET, Key="a/1")["Body"].read()
    client.head_object(Bucket=BUCKET, Key="a/1")
    assert refusal(client.get_object, Bucket=BUCKET, Key="a/2") == (500, "InternalError")
    assert refusal(client.get_object, Bucket=BUCKET, Key="b/1") == (503, "SlowDown")
    for key in ("a/1", "a/2", "b/1"):
        client.get_object(Bucket=BUCKET, Key=key)["Body"].read()


def test_probability_fires_sometimes(server: ServerProcess, client: "S3Client") -> None:
    script(server, FaultAction.WRONG_ETAG, "HeadObject", probability=0.5)
    etags = {client.head_object(Bucket=BUCKET, Key="k")["ETag"] for _ in range(40)}
    assert len(etags) == 2


def test_latency_delays_the_first_byte_and_bandwidth_the_rest(
    server: ServerProcess, client: "S3Client"
) -> None:
    server.control.add_synthetic("s", 1_000_000, seed=1)
    server.control.set(latency=0.1, jitter=0.2, bandwidth=5e6)
    began = time.monotonic()
    answer = client.get_object(Bucket=BUCKET, Key="s")
    first = time.monotonic() - began
    answer["Body"].read()
    whole = time.monotonic() - began
    assert first >= 0.08
    assert whole >= 0.08 + 0.2
