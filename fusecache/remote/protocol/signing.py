"""Signatures of requests. AWS Signature Version 4 has the same result as botocore's, at a tenth of its cost.

Follows the AWS General Reference, "Create a signed AWS API request". `tests/unit/remote/test_signing.py` compares it
with botocore. Not here: the hash of a body, presigned URLs.
"""

import hashlib
import hmac
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

ALGORITHM = "AWS4-HMAC-SHA256"
EMPTY_SHA256 = hashlib.sha256(b"").hexdigest()
# Declares that the signature covers no hash of the body. The signed Content-MD5 protects it instead.
UNSIGNED = "UNSIGNED-PAYLOAD"
# Returns the query and the headers to send for (method, path, query, headers, payload). Path and query are
# percent-encoded, names of headers in lower case. payload: SHA-256 of the body in hex, or UNSIGNED.
Sign = Callable[[str, str, str, Mapping[str, str], str], tuple[str, dict[str, str]]]


# The access key of a node that asks another one.
PEER_KEY = "fusecache-peer"
_PORTS = {"http": ":80", "https": ":443"}


def peer_secret(shared: str, endpoint: str, source: str) -> str:
    """Return the secret key of the nodes that mount one source of one endpoint. shared: what their key file holds.

    Nodes of another bucket, or of another account's bucket of this name, have another one. How a URL is written makes
    no difference: a slash at the end, capital letters in a host's name, the scheme's own port.
    """
    endpoint, source = _plain_url(endpoint), source.rstrip("/")
    return hmac.digest(shared.encode(), f"peer {endpoint} {source}".encode(), "sha256").hex()


def mount_digest(endpoint: str, source: str) -> str:
    """Return what a node says of its mount, so that one that refuses it can say what differs: `endpoint-source`."""
    parts = _plain_url(endpoint), source.rstrip("/")
    return "-".join(hashlib.sha256(part.encode()).hexdigest()[:8] for part in parts)


def _plain_url(url: str) -> str:
    scheme, separator, rest = url.rstrip("/").partition("://")
    host, slash, path = rest.partition("/")
    scheme, host = scheme.lower(), host.lower().removesuffix(_PORTS.get(scheme.lower(), ":"))
    return f"{scheme}://{host}{slash}{path}" if separator else url


def send_unsigned(
    _method: str, _path: str, query: str, headers: Mapping[str, str], _payload: str
) -> tuple[str, dict[str, str]]:
    """Sign nothing: for a public bucket."""
    return query, dict(headers)


def sign_by_v4(region: str, keys: "Callable[[], SigningKeys]") -> Sign:
    """Return how to sign by AWS Signature Version 4. keys: returns the valid ones."""
    signer = Signer(region)

    def sign(
        method: str, path: str, query: str, headers: Mapping[str, str], payload: str
    ) -> tuple[str, dict[str, str]]:
        return query, signer.headers(
            path, headers, keys(), time.time(), method=method, query=query, payload=payload
        )

    return sign


@dataclass(frozen=True, slots=True)
class SigningKeys:
    """The current credentials. Their repr hides the secrets."""

    access_key: str
    secret_key: str = field(repr=False)
    token: str | None = field(default=None, repr=False)


class Signer:
    """Signs requests in one region. Thread-safe."""

    def __init__(self, region: str) -> None:
        self._region = region
        # Cached while secret and day stay the same: deriving the day's key takes four of the five HMACs.
        self._derived: tuple[str, str, bytes] = ("", "", b"")

    def headers(
        self,
        path: str,
        headers: Mapping[str, str],
        keys: SigningKeys,
        now: float,
        *,
        method: str = "GET",
        query: str = "",
        payload: str = EMPTY_SHA256,
    ) -> dict[str, str]:
        """Return all headers of a request, with the signature.

        path: percent-encoded, as sent. headers: to sign, with the host, names in lower case. now: seconds since the
        epoch. query: percent-encoded, sorted by name. payload: SHA-256 of the body in hex, or UNSIGNED.
        """
        stamp = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime(now))
        signed = {**headers, "x-amz-content-sha256": payload, "x-amz-date": stamp}
        if keys.token is not None:
            signed["x-amz-security-token"] = keys.token
        names = sorted(signed)
        listed = ";".join(names)
        # A signature has one blank where a value has several.
        lines = "".join([f"{name}:{signed[name]}\n" for name in names])
        if " " in lines:
            lines = "".join([f"{name}:{' '.join(signed[name].split())}\n" for name in names])
        canonical = f"{method}\n{path}\n{query}\n{lines}\n{listed}\n{payload}"
        scope = f"{stamp[:8]}/{self._region}/s3/aws4_request"
        digest = hashlib.sha256(canonical.encode()).hexdigest()
        text = f"{ALGORITHM}\n{stamp}\n{scope}\n{digest}"
        signature = hmac.digest(self._day_key(keys.secret_key, stamp[:8]), text.encode(), "sha256").hex()
        signed["authorization"] = (
            f"{ALGORITHM} Credential={keys.access_key}/{scope}, SignedHeaders={listed}, Signature={signature}"
        )
        return signed

    def _day_key(self, secret: str, day: str) -> bytes:
        derived = self._derived
        if derived[:2] == (secret, day):
            return derived[2]
        key = b"AWS4" + secret.encode()
        for word in (day, self._region, "s3", "aws4_request"):
            key = hmac.digest(key, word.encode(), "sha256")
        # One assignment: a race between threads only derives the key twice.
        self._derived = (secret, day, key)
        return key
