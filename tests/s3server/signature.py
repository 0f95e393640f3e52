"""Signature version 4 in the Authorization header, checked for real.

Follows the AWS General Reference, "Authenticating Requests: Using the Authorization Header".
Not supported: presigned URLs and the STREAMING-… payload forms.
"""

import functools
import hashlib
import hmac
import re
from datetime import UTC, datetime
from urllib.parse import parse_qsl, quote, unquote_to_bytes

from tests.s3server.accounts import Account, Accounts
from tests.s3server.errors import S3Error
from tests.s3server.wire import Request

_ALGORITHM = "AWS4-HMAC-SHA256"
_AUTHORIZATION = re.compile(
    rf"{_ALGORITHM} Credential=(?P<key>[^/,]+)/(?P<date>\d{{8}})/(?P<region>[^/,]+)/(?P<service>[^/,]+)"
    r"/aws4_request,\s*"
    r"SignedHeaders=(?P<signed>[^,]+),\s*Signature=(?P<signature>[0-9a-f]{64})"
)
_HEX_SHA256 = re.compile(r"[0-9a-f]{64}")


def check_signature(request: Request, accounts: Accounts, *, now: float, max_skew_seconds: float) -> Account:
    """Return the account that signed this request.

    Raises S3Error: AccessDenied (unsigned), Unauthorized (a streaming payload), InvalidAccessKeyId,
    RequestTimeTooSkewed, SignatureDoesNotMatch. The body's hash is checked later, as the body arrives.
    """
    match = _AUTHORIZATION.fullmatch(request.header("authorization") or "")
    if match is None:
        raise S3Error("AccessDenied", "Only signature version 4 in the Authorization header is understood.")
    account = accounts.find(match["key"])
    stamp = request.header("x-amz-date") or ""
    _check_date(stamp, match["date"], now, max_skew_seconds)
    signed = match["signed"].split(";")
    required = {"host", *(name for name in request.headers if name.startswith("x-amz-"))}
    if not required <= set(signed):
        raise S3Error("AccessDenied", "There were headers present in the request which were not signed.")
    payload_hash = request.header("x-amz-content-sha256") or ""
    if payload_hash != "UNSIGNED-PAYLOAD" and not _HEX_SHA256.fullmatch(payload_hash):
        raise S3Error("InvalidArgument", "x-amz-content-sha256 must be UNSIGNED-PAYLOAD or a SHA-256 in hex.")
    canonical = "\n".join(
        (
            request.method,
            quote(unquote_to_bytes(request.path), safe="/~"),
            _canonical_query(request.query_text),
            "".join(f"{name}:{' '.join((request.header(name) or '').split())}\n" for name in signed),
            match["signed"],
            payload_hash,
        )
    )
    scope = f"{match['date']}/{match['region']}/{match['service']}/aws4_request"
    # latin-1, because that is how the header bytes were decoded
    digest = hashlib.sha256(canonical.encode("latin-1")).hexdigest()
    to_sign = f"{_ALGORITHM}\n{stamp}\n{scope}\n{digest}"
    key = _signing_key(account.secret_key, match["date"], match["region"], match["service"])
    if not hmac.compare_digest(_mac(key, to_sign).hex(), match["signature"]):
        raise S3Error("SignatureDoesNotMatch", "The request signature does not match the secret of this key.")
    return account


def _check_date(stamp: str, scope_date: str, now: float, max_skew_seconds: float) -> None:
    try:
        signed_at = datetime.strptime(stamp, "%Y%m%dT%H%M%SZ").replace(tzinfo=UTC).timestamp()
    except ValueError as exc:
        raise S3Error("AccessDenied", f"No valid x-amz-date: {stamp!r}") from exc
    if not stamp.startswith(scope_date):
        raise S3Error("SignatureDoesNotMatch", "The credential's date is not the request's.")
    if abs(now - signed_at) > max_skew_seconds:
        raise S3Error("RequestTimeTooSkewed", "The request's time and the server's are too far apart.")


def _canonical_query(text: str) -> str:
    pairs = parse_qsl(text, keep_blank_values=True, encoding="utf-8", errors="surrogateescape")
    encoded = (
        (quote(name, safe="~", errors="surrogateescape"), quote(value, safe="~", errors="surrogateescape"))
        for name, value in pairs
    )
    return "&".join(f"{name}={value}" for name, value in sorted(encoded))


@functools.lru_cache(maxsize=64)  # a test uses a handful of keys; one entry per key and day
def _signing_key(secret: str, date: str, region: str, service: str) -> bytes:
    key = f"AWS4{secret}".encode()
    for word in (date, region, service, "aws4_request"):
        key = _mac(key, word)
    return key


def _mac(key: bytes, text: str) -> bytes:
    return hmac.new(key, text.encode(), hashlib.sha256).digest()
