"""What a client of R2 must never send. Seen in every request, remembered until the server ends.

`boto_client` marks its requests with `TEST_HAND` in the User-Agent: they are the test's, not the client's under test.
"""

from tests.s3server.accounts import BUCKET_CALLS
from tests.s3server.wire import Request

TEST_HAND = "s3server-test-hand"
_BODIES = ("PutObject", "UploadPart", "DeleteObjects")


def bad_manners(request: Request, operation: str) -> list[str]:
    """Return what is wrong with a request, in words; nothing if it is a test's own."""
    header = request.header
    if TEST_HAND in (header("user-agent") or ""):
        return []
    found = []
    if operation in BUCKET_CALLS or operation == "Unknown":
        found.append("asks for more than objects, which a token for objects may not")
    if header("expect") is not None:
        found.append("waits for 100 Continue, which never comes")
    if request.chunked or (request.method in ("PUT", "POST") and request.content_length is None):
        found.append("a body without Content-Length")
    encoded = "aws-chunked" in (header("content-encoding") or "")
    if encoded or header("x-amz-trailer") or (header("x-amz-content-sha256") or "").startswith("STREAMING-"):
        found.append("aws-chunked, or a trailer")
    checksums = [
        name for name in request.headers if name.startswith(("x-amz-checksum", "x-amz-sdk-checksum"))
    ]
    # A HEAD may ask for the checksums that the bucket has.
    if checksums and not (operation == "HeadObject" and checksums == ["x-amz-checksum-mode"]):
        found.append("a checksum that the bucket does not know")
    if header("accept-encoding") != "identity":
        found.append("takes bodies in other encodings than they are stored in")
    if operation in _BODIES and header("content-md5") is None:
        found.append("a body without Content-MD5")
    return found
