"""The same server behind TLS."""

import io
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest
from botocore.exceptions import SSLError

from tests.s3server import Fault, FaultAction, ServerProcess, boto_client, synthetic_bytes
from tests.unit.s3server.refusals import refusal

if TYPE_CHECKING:
    from mypy_boto3_s3 import S3Client

BUCKET = "bucket"


@pytest.fixture(scope="module")
def secure() -> Iterator[ServerProcess]:
    with ServerProcess(tls=True) as server:
        yield server


@pytest.fixture
def secure_client(secure: ServerProcess) -> Iterator["S3Client"]:
    secure.control.reset()
    client = boto_client(secure, retries={"mode": "standard", "total_max_attempts": 2})
    yield client
    client.close()
    secure.control.close()


def test_bytes_go_both_ways(secure: ServerProcess, secure_client: "S3Client") -> None:
    body = os.urandom(3_000_000)
    secure_client.put_object(Bucket=BUCKET, Key="k", Body=body)
    assert secure.endpoint_url.startswith("https://")
    assert secure_client.get_object(Bucket=BUCKET, Key="k")["Body"].read() == body
    secure.control.add_synthetic("s", 10**12, seed=3)
    got = secure_client.get_object(Bucket=BUCKET, Key="s", Range="bytes=123456789-124456788")
    assert got["Body"].read() == synthetic_bytes(3, 123_456_789, 1_000_000)


def test_a_client_without_our_certificate_refuses(secure: ServerProcess) -> None:
    class Stranger:
        endpoint_url = secure.endpoint_url
        access_key = secure.access_key
        secret_key = secure.secret_key
        ca_path = None

    client = boto_client(Stranger())
    try:
        with pytest.raises(SSLError):
            client.list_objects_v2(Bucket=BUCKET)
    finally:
        client.close()


def test_boto3s_default_checksums_are_refused(secure: ServerProcess, secure_client: "S3Client") -> None:
    secure_client.put_object(Bucket=BUCKET, Key="k", Body=b"x")
    eager = boto_client(secure, request_checksum_calculation="when_supported")
    try:
        # Over TLS they are a trailer behind an aws-chunked body.
        refused = refusal(eager.put_object, Bucket=BUCKET, Key="new", Body=io.BytesIO(b"body"))
    finally:
        eager.close()
    assert refused == (401, "Unauthorized")
    assert list(secure.control.objects()) == ["k"]


def test_faults_and_outages_work_behind_tls(secure: ServerProcess, secure_client: "S3Client") -> None:
    secure.control.put("k", b"x")
    secure.control.faults(Fault(FaultAction.DROP_AFTER, operation="HeadObject", nth=1))
    secure_client.head_object(Bucket=BUCKET, Key="k")
    secure.control.pause("refuse")
    secure.control.resume()
    secure_client.head_object(Bucket=BUCKET, Key="k")
    assert secure.control.counts()["HeadObject"] == 3
