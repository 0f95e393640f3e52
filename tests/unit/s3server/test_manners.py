"""The memory for what a client of R2 must never send."""

from tests.s3server import ServerProcess, boto_client
from tests.s3server.manners import bad_manners
from tests.s3server.wire import Request
from tests.unit.s3server.raw import RawClient

GOOD = {"accept-encoding": "identity", "content-length": "1", "content-md5": "x", "user-agent": "Boto3"}


def complaints(
    operation: str = "PutObject", *, method: str = "PUT", chunked: bool = False, **headers: str | None
) -> int:
    """Return how many complaints a good request gets after these changes of headers (None: without it)."""
    changed = {**GOOD, **{name.replace("_", "-"): value for name, value in headers.items()}}
    sent = {name: value for name, value in changed.items() if value is not None}
    length = sent.get("content-length")
    request = Request(method, "/", "", sent, None if length is None else int(length), chunked)
    return len(bad_manners(request, operation))


def test_each_thing_that_r2_refuses_or_stumbles_over_is_one_complaint() -> None:
    assert complaints() == 0
    assert complaints("GetObject", method="GET", content_length=None, content_md5=None) == 0
    for operation in ("HeadBucket", "ListBuckets", "CreateBucket", "Unknown"):
        assert complaints(operation, method="GET") == 1
    assert complaints(expect="100-continue") == 1
    assert complaints(content_length=None) == 1
    assert complaints(chunked=True) == 1
    assert complaints(content_encoding="aws-chunked") == 1
    assert complaints(x_amz_trailer="x-amz-checksum-crc32") == 1
    assert complaints(x_amz_content_sha256="STREAMING-UNSIGNED-PAYLOAD-TRAILER") == 1
    assert complaints(x_amz_checksum_crc32="AAAAAA==") == 1
    assert complaints(accept_encoding="gzip") == 1
    assert complaints(accept_encoding=None) == 1
    assert complaints(content_md5=None) == 1


def test_offences_are_remembered_through_resets_and_a_tests_own_requests_are_none() -> None:
    with ServerProcess() as server:
        client = boto_client(server)
        client.head_bucket(Bucket=server.bucket)
        client.close()
        assert server.control.offences() == []
        with RawClient(server) as raw:
            raw.ask("HEAD", "/bucket", {"Accept-Encoding": "identity"})
        server.control.reset()
        (offence,) = server.control.offences()
        assert offence.startswith("HeadBucket ")
        assert server.control.log() == []
