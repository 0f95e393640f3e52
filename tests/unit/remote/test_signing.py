"""Our signature against botocore's own."""

import hashlib
from datetime import UTC, datetime
from urllib.parse import quote

import botocore.auth
import botocore.awsrequest
import botocore.credentials
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fusecache.remote.http.signed_requests import parse_head, quoted_key
from fusecache.remote.protocol.signing import UNSIGNED, Signer, SigningKeys

HOST = "host.example:8333"
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
    expected = authorization(monkeypatch, f"http://{HOST}{path}", asked, keys, "auto")
    headers = signer.headers(path, {"host": HOST, **asked}, keys, NOW)
    assert (headers["authorization"], headers["x-amz-date"]) == expected
    assert headers.get("x-amz-security-token") == keys.token


@pytest.fixture(scope="module")
def signer() -> Signer:
    return Signer("auto")


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


@pytest.mark.parametrize("value", ['attachment; filename="a  b"', "no-cache,   private", "text/plain; a=ü"])
def test_values_with_blanks_are_signed_as_botocore_signs_them(
    signer: Signer, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys, sent = SigningKeys("AKIDEXAMPLE", "secret"), {"content-disposition": value}
    headers = signer.headers("/bucket/a", {"host": HOST, **sent}, keys, NOW)
    expected = authorization(monkeypatch, f"http://{HOST}/bucket/a", sent, keys, "auto")
    assert (headers["authorization"], headers["x-amz-date"]) == expected


def test_the_days_key_follows_the_day_and_the_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    signer = Signer("auto")
    for keys in (SigningKeys("one", "first"), SigningKeys("two", "second"), SigningKeys("one", "first")):
        check_one(monkeypatch, signer, "a", 0, keys)
    before = signer.headers("/bucket/a", {}, SigningKeys("one", "first"), NOW)
    after = signer.headers("/bucket/a", {}, SigningKeys("one", "first"), NOW + 86_400)
    assert before["authorization"][:50] != after["authorization"][:50]
    assert after["x-amz-date"] == datetime.fromtimestamp(NOW + 86_400, UTC).strftime("%Y%m%dT%H%M%SZ")


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
    request = botocore.awsrequest.AWSRequest("PUT", f"https://{HOST}{path}?{query}", headers=dict(signed))
    request.context["has_streaming_input"] = True
    with pytest.MonkeyPatch.context() as patch:
        moment = datetime.fromtimestamp(NOW, UTC)
        patch.setattr(botocore.auth, "get_current_datetime", lambda *_: moment)
        credentials = botocore.credentials.Credentials("key", "secret", None)
        botocore.auth.S3SigV4Auth(credentials, "s3", "auto").add_auth(request)
    named = {"host": HOST, **signed}
    headers = signer.headers(
        path, named, SigningKeys("key", "secret"), NOW, method="PUT", query=query, payload=UNSIGNED
    )
    assert request.headers["X-Amz-Content-SHA256"] == UNSIGNED
    assert headers["authorization"] == request.headers["Authorization"]
