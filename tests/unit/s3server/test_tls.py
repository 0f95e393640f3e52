"""The same server behind TLS."""

import io
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest
from botocore.exceptions import SSLError

from tests.s3server import ServerProcess, boto_client
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
