"""Checks AWS Signature Version 4 in the Authorization header. Not supported: presigned URLs, signed bodies."""

import hmac
import re
import time
from calendar import timegm
from collections.abc import Mapping, Sequence
from contextlib import suppress
from urllib.parse import quote

from fusecache.remote.protocol.headers import MOUNT_HEADER
from fusecache.remote.protocol.signing import ALGORITHM, PEER_KEY, Signer, SigningKeys
from fusecache.serve.errors import S3Error

# The access key of clients; the secret key is what `--key-file` holds.
CLIENT_KEY = "fusecache"
# S3 allows as much.
MOST_SKEW_SECONDS = 900.0
_AUTHORIZATION = re.compile(
    rf"{ALGORITHM} Credential=(?P<key>[^/,]+)/\d{{8}}/(?P<region>[a-z0-9-]*)/s3/aws4_request, ?"
    r"SignedHeaders=(?P<signed>[a-z0-9;-]+), ?Signature=(?P<signature>[0-9a-f]{64})"
)
# In the query of a presigned URL, by version 4 and version 2.
_PRESIGNED = frozenset({"x-amz-signature", "signature"})
_STAMP = "%Y%m%dT%H%M%SZ"


class SignatureCheck:
    """The keys that a server knows. secrets: by access key; empty: requests need no signature. mount: its digest."""

    def __init__(self, secrets: Mapping[str, str], *, needs_signature: bool = True, mount: str = "") -> None:
        self._secrets = secrets
        self._mount = mount
        self._needs_signature = needs_signature
        self._signers: dict[str, Signer] = {}

    def user_of(
        self, method: str, path: str, query: Sequence[tuple[str, str]], headers: Mapping[str, str], now: float
    ) -> str:
        """Return the access key that signed a request, "" for none. Raises S3Error.

        path: as sent. query: decoded. headers: names in lower case. now: in seconds since 1970.
        """
        _refuse_presigned(query)
        given = headers.get("authorization")
        if given is None and not self._needs_signature:
            return ""
        match = _AUTHORIZATION.fullmatch(given or "")
        if match is None:
            raise S3Error(403, "AccessDenied", "sign the request by AWS Signature Version 4, in its header")
        secret = self._secrets.get(match["key"])
        if secret is None:
            if not self._needs_signature:
                return ""  # clients have keys of other services, and sign with them unasked
            raise S3Error(403, "InvalidAccessKeyId", self._unknown_key(match["key"]))
        signed = match["signed"].split(";")
        stamp, payload = headers.get("x-amz-date", ""), _payload_of(headers)
        at = 0.0
        with suppress(ValueError):
            at = timegm(time.strptime(stamp, _STAMP))
        if abs(now - at) > MOST_SKEW_SECONDS:
            raise S3Error(
                403,
                "RequestTimeTooSkewed",
                f"the request is of {stamp or 'no time'}, this node's clock says "
                f"{time.strftime(_STAMP, time.gmtime(now))}: set both clocks",
            )
        if not {"host", *(name for name in headers if name.startswith("x-fusecache-"))} <= set(signed):
            raise S3Error(403, "AccessDenied", "the signature does not cover all headers that it must")
        own = ("x-amz-date", "x-amz-content-sha256", "x-amz-security-token")
        covered = {name: headers.get(name, "") for name in signed if name not in own}
        keys = SigningKeys(match["key"], secret, headers.get("x-amz-security-token"))
        if len(self._signers) > 16:  # of few regions
            self._signers.clear()
        signer = self._signers.setdefault(f"{match['key']} {match['region']}", Signer(match["region"]))
        encoded = sorted((quote(name, safe="~"), quote(value, safe="~")) for name, value in query)
        text = "&".join(f"{name}={value}" for name, value in encoded)
        expected = signer.headers(path, covered, keys, at, method=method, query=text, payload=payload)
        if not hmac.compare_digest(expected["authorization"].rpartition("=")[2], match["signature"]):
            told = "the secret key is not the one in this node's --key-file"
            if match["key"] == PEER_KEY:
                told = self._difference(headers.get(MOUNT_HEADER, ""))
            raise S3Error(403, "SignatureDoesNotMatch", told)
        return match["key"]

    def _unknown_key(self, key: str) -> str:
        if key == PEER_KEY:
            return "no nodes are served here: start this `fusecache serve` with --peers-key-file FILE"
        if CLIENT_KEY not in self._secrets:
            return (
                "only nodes are served here: for other programs, start `fusecache serve` with --key-file FILE"
            )
        return f"the access key is {CLIENT_KEY} here, not {key}"

    def _difference(self, mount: str) -> str:
        """Return what another node with another secret has different. mount: its `mount_digest`; "": it sends none."""
        (endpoint, _, source), (own_endpoint, _, own_source) = (
            mount.partition("-"),
            self._mount.partition("-"),
        )
        if not source:
            return "all nodes need the same key file, source and endpoint, and one of the three differs here"
        if source != own_source:
            return "this node mounts another source: all nodes need the same"
        if endpoint != own_endpoint:
            return "this node's mount has another endpoint: all nodes need the same"
        return (
            "this node's --peers-key-file holds another key: copy one file to all nodes, and start them again"
        )


def _payload_of(headers: Mapping[str, str]) -> str:
    if "x-amz-content-sha256" not in headers:
        raise S3Error(
            400,
            "InvalidRequest",
            "the header x-amz-content-sha256 is missing; with curl: -H 'x-amz-content-sha256: UNSIGNED-PAYLOAD'",
        )
    return headers["x-amz-content-sha256"]


def _refuse_presigned(query: Sequence[tuple[str, str]]) -> None:
    if any(name.lower() in _PRESIGNED for name, _ in query):
        raise S3Error.of_status(
            501, "presigned URLs are not supported: sign the request in its header Authorization"
        )
