"""Our signature against botocore's own, and the form of a GET that botocore shows."""

import hashlib
import hmac
from datetime import UTC, datetime
from urllib.parse import quote

import botocore.auth
import botocore.awsrequest
import botocore.credentials
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fusecache.remote.http.signed_requests import RequestTemplate, parse_head, quoted_key, request_template
from fusecache.remote.protocol.signing import UNSIGNED, Signer, SigningKeys

NOW = 1_790_000_000.0
KEYS = st.text(st.characters(exclude_categories=("Cs", "Cc")), min_size=1, max_size=60)
# An UploadId may hold anything that a header can.
KEYS_OF_UPLOADS = st.characters(min_codepoint=33, max_codepoint=126)
AWKWARD_KEYS = [
    "a//b/../c/./d",
    "/leading",
    "trailing/",
    "blank in it + plus & and = ? # % %41 %%",
    "ü/日本語/😀",
    "~!@$^*()_-'\",;:<>[]{}|\\",
]


def authorization(
    monkeypatch: pytest.MonkeyPatch, url: str, headers: dict[str, str], keys: SigningKeys, region: str
) -> tuple[str, str]:
    """What botocore signs for this GET at NOW: its Authorization and date."""
    moment = datetime.fromtimestamp(NOW, UTC)
    monkeypatch.setattr(botocore.auth, "get_current_datetime", lambda *_: moment)
    request = botocore.awsrequest.AWSRequest("GET", url, headers=dict(headers))
    credentials = botocore.credentials.Credentials(keys.access_key, keys.secret_key, keys.token)
    botocore.auth.S3SigV4Auth(credentials, "s3", region).add_auth(request)
    return request.headers["Authorization"], request.headers["X-Amz-Date"]


def check_one(
    monkeypatch: pytest.MonkeyPatch, signer: Signer, key: str, start: int, keys: SigningKeys
) -> None:
    asked = {
        "if-match": f'"{hashlib.md5(key.encode()).hexdigest()}-3"',
        "range": f"bytes={start}-{start + 99}",
    }
    path = f"/bucket/{quoted_key(key)}"
    expected = authorization(monkeypatch, f"http://host.example:8333{path}", asked, keys, "auto")
    headers = signer.headers(path, asked, keys, NOW)
    assert (headers["authorization"], headers["x-amz-date"]) == expected
    assert headers.get("x-amz-security-token") == keys.token


@pytest.fixture(scope="module")
def signer() -> Signer:
    return Signer("host.example:8333", "auto")


@given(key=KEYS, start=st.integers(0, 2**43), token=st.none() | st.text("abcXYZ0/+=", min_size=1))
def test_any_key_and_range_is_signed_as_botocore_signs_it(
    signer: Signer, key: str, start: int, token: str | None
) -> None:
    with pytest.MonkeyPatch.context() as monkeypatch:
        check_one(monkeypatch, signer, key, start, SigningKeys("AKIDEXAMPLE", "secret/with+signs", token))


@pytest.mark.parametrize("key", AWKWARD_KEYS)
def test_awkward_keys_are_signed_as_botocore_signs_them(
    signer: Signer, key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_one(monkeypatch, signer, key, 0, SigningKeys("AKIDEXAMPLE", "secret"))


def test_the_days_key_follows_the_day_and_the_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    signer = Signer("host.example:8333", "auto")
    for keys in (SigningKeys("one", "first"), SigningKeys("two", "second"), SigningKeys("one", "first")):
        check_one(monkeypatch, signer, "a", 0, keys)
    before = signer.headers("/bucket/a", {}, SigningKeys("one", "first"), NOW)
    after = signer.headers("/bucket/a", {}, SigningKeys("one", "first"), NOW + 86_400)
    assert before["authorization"][:50] != after["authorization"][:50]
    assert after["x-amz-date"] == datetime.fromtimestamp(NOW + 86_400, UTC).strftime("%Y%m%dT%H%M%SZ")


def signed_by(region: str, signed: str = "host;if-match;range;x-amz-content-sha256;x-amz-date") -> str:
    digest = hmac.new(b"k", b"m", hashlib.sha256).hexdigest()
    return (
        f"AWS4-HMAC-SHA256 Credential=AKID/20260101/{region}/s3/aws4_request, "
        f"SignedHeaders={signed}, Signature={digest}"
    )


@pytest.mark.parametrize(
    ("url", "form"),
    [
        (
            "http://127.0.0.1:9000/bucket/dir/a%20b",
            RequestTemplate("http", "127.0.0.1", 9000, "127.0.0.1:9000", "/bucket/", "auto", "agent"),
        ),
        (
            "https://bucket.s3.eu-west-1.amazonaws.com/dir/a%20b",
            RequestTemplate(
                "https",
                "bucket.s3.eu-west-1.amazonaws.com",
                443,
                "bucket.s3.eu-west-1.amazonaws.com",
                "/",
                "auto",
                "agent",
            ),
        ),
        (
            "http://[::1]:9000/b/dir/a%20b",
            RequestTemplate("http", "::1", 9000, "[::1]:9000", "/b/", "auto", "agent"),
        ),
    ],
)
def test_the_form_is_what_botocore_sent_without_the_key(url: str, form: RequestTemplate) -> None:
    assert request_template(url, "dir/a b", signed_by("auto"), "agent") == form


@pytest.mark.parametrize(
    ("url", "authorization"),
    [
        ("http://host/bucket/another", signed_by("auto")),
        ("http://host/bucket/a?versionId=1", signed_by("auto")),
        ("http://host/bucket/a", signed_by("auto", "host;x-amz-s3session-token")),
        ("http://host/bucket/a", signed_by("auto").replace("/s3/", "/s3express/")),
        ("http://host/bucket/a", "AWS AKID:signature"),
        ("http://host/bucket/a", ""),
    ],
)
def test_a_request_of_another_kind_stays_botocores(url: str, authorization: str) -> None:
    assert request_template(url, "a", authorization, "agent") is None


def test_a_header_that_came_twice_is_no_number_any_more() -> None:
    status, headers = parse_head(b'HTTP/1.1 206 OK\r\nContent-Length: 5\r\ncontent-length: 6\r\nETag:  "e" ')
    assert status == 206
    assert headers == {"content-length": "5, 6", "etag": '"e"'}


@given(key=KEYS, number=st.integers(1, 10_000), upload_id=st.text(KEYS_OF_UPLOADS, min_size=1, max_size=80))
def test_any_part_is_signed_as_botocore_signs_it(
    signer: Signer, key: str, number: int, upload_id: str
) -> None:
    path = f"/bucket/{quoted_key(key)}"
    query = f"partNumber={number}&uploadId={quote(upload_id, safe='-_.~')}"
    signed = {"content-length": "5", "content-md5": "1B2M2Y8AsgTpgAmY7PhCfg=="}
    # Over TLS botocore leaves the hash of a body that has a Content-MD5 out.
    request = botocore.awsrequest.AWSRequest(
        "PUT", f"https://host.example:8333{path}?{query}", headers=dict(signed)
    )
    request.context["has_streaming_input"] = True
    with pytest.MonkeyPatch.context() as patch:
        moment = datetime.fromtimestamp(NOW, UTC)
        patch.setattr(botocore.auth, "get_current_datetime", lambda *_: moment)
        credentials = botocore.credentials.Credentials("key", "secret", None)
        botocore.auth.S3SigV4Auth(credentials, "s3", "auto").add_auth(request)
    headers = signer.headers(
        path, signed, SigningKeys("key", "secret"), NOW, method="PUT", query=query, payload=UNSIGNED
    )
    assert request.headers["X-Amz-Content-SHA256"] == UNSIGNED
    assert headers["authorization"] == request.headers["Authorization"]
