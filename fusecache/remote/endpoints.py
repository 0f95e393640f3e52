"""Choice of the endpoint from options and environment, and the settings of its connections and requests. No I/O.

For S3, the first one that is set wins: the option; `S3_ENDPOINT_URL`; `AWS_ENDPOINT_URL_S3`; `AWS_ENDPOINT_URL`;
`R2_ACCOUNT_ID` (with `R2_JURISDICTION`). If none is set, the AWS profile's endpoint applies, else AWS.
Not here: credentials. The usual AWS chain finds them, unless the caller passes some to the store.

Reads files that hold keys: only if no other user may access them.
"""

import base64
import enum
import hashlib
import ipaddress
import os
import re
import stat
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

from fusecache.model.errors import ConfigError
from fusecache.model.objects import GIB, MIB
from fusecache.policy.backoff import Pace

# Longer files hold no keys.
_BYTES_MAX = 1 << 20


# Keys that can be guessed protect nothing.
SHORTEST_SECRET = 16


def read_key_file(option: str, path: Path) -> tuple[bytes, os.stat_result]:
    """Return the bytes of a file and its facts. Raises ConfigError. option: the one that names the file."""
    try:
        with open(path, "rb") as file:
            facts = os.fstat(file.fileno())
            data = file.read(_BYTES_MAX)
    except OSError as exc:
        raise ConfigError(f"{option} = {path}: {exc.strerror}") from exc
    if stat.S_IMODE(facts.st_mode) & 0o077:
        raise ConfigError(f"{option} = {path}: other users may access the keys in it; run `chmod 600 {path}`")
    return data, facts


def read_secret(option: str, path: Path) -> str:
    """Return the key, or token, in a file. Raises ConfigError."""
    data, _ = read_key_file(option, path)
    secret = data.decode("utf-8", "replace").strip()
    if len(secret) < SHORTEST_SECRET or not secret.isascii() or not secret.isprintable():
        raise ConfigError(
            f"{option} = {path}: what is in it has fewer than {SHORTEST_SECRET} characters, others than ASCII, or "
            f"several lines; make one with `openssl rand -hex 32 > {path}`"
        )
    return secret


R2_HOST = "r2.cloudflarestorage.com"
R2_JURISDICTIONS = ("eu", "fedramp")
URL_VARIABLES = ("S3_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL")
GCS_URL = "https://storage.googleapis.com"
AZURE_HOST = "blob.core.windows.net"
AZURE_ACCOUNT_VARIABLES = ("AZURE_STORAGE_ACCOUNT_NAME", "AZURE_STORAGE_ACCOUNT")


class StoreKind(enum.Enum):
    """The kind of a bucket. The value is the scheme of its source."""

    S3 = "s3"
    GCS = "gs"
    AZURE = "az"

    @classmethod
    def of(cls, source: str) -> "StoreKind":
        """Return the kind of a source like s3://BUCKET/PREFIX. Raises ValueError."""
        return cls(source.partition("://")[0])


@dataclass(frozen=True, slots=True)
class Endpoint:
    """The endpoint of a bucket.

    url: None leaves it to the AWS profile. region: None leaves it to the AWS chain.
    is_r2: a precondition on a copy's destination travels in Cloudflare's headers; elsewhere a HEAD checks it first.
    account: the storage account, for Azure.
    """

    url: str | None
    region: str | None = None
    is_r2: bool = False
    kind: StoreKind = StoreKind.S3
    account: str = ""

    def __post_init__(self) -> None:
        if self.url is not None:
            parts = urlsplit(self.url)
            if parts.scheme not in ("http", "https") or not parts.hostname:
                raise ConfigError(f"endpoint {self.url!r} is not a URL; write it as https://host[:port]")
            if parts.path not in ("", "/") or parts.query:
                raise ConfigError(
                    f"endpoint {self.url!r} contains a path; name the bucket as s3://BUCKET[/PREFIX] instead"
                )


@dataclass(frozen=True, slots=True)
class Credentials:
    """Credentials passed explicitly instead of by the AWS chain. Their repr hides the secrets."""

    access_key: str
    secret_key: str = field(repr=False)
    session_token: str | None = field(default=None, repr=False)


class UploadPace:
    """The limit of all uploads of a mount. Bodies take turns piece by piece, so none of them stands still for long."""

    def __init__(self, bytes_per_second: float | None = None) -> None:
        """bytes_per_second: None sets no limit."""
        self._pace = Pace(bytes_per_second)
        self._lock = threading.Lock()

    def take(self, nbytes: int) -> None:
        """A piece of a body was sent: sleep until another one may be. nbytes: negative if it counts no more."""
        if nbytes > 0:
            with self._lock:
                seconds = self._pace.charge(time.monotonic(), nbytes)
            if seconds > 0:
                time.sleep(seconds)


@dataclass(frozen=True, slots=True)
class Transport:
    """Connection limits and timeouts. A request ends within them; `attempts` counts what `remote.http` retries."""

    max_connections: int = 64
    connect_timeout_seconds: float = 10.0
    read_timeout_seconds: float = 60.0
    attempts: int = 2
    # Whether proxies of the environment do not count.
    is_direct: bool = False
    # R2 and S3 copy at most 5 GiB in one request. Larger objects are copied in equal parts of `copy_part_bytes`;
    # 10 000 parts, the maximum, hold 5.6 TiB, and R2's largest object has 4.995 TiB.
    single_copy_bytes: int = 5 * GIB
    copy_part_bytes: int = 592 * MIB
    upload_pace: UploadPace = field(default_factory=UploadPace)
    # Has another process fetch a body: `Carry` in `remote.http.ranged_get`.
    carry: Callable[[Any, Any, bytes], Literal[True] | None] | None = None


def choose_endpoint(
    environment: Mapping[str, str],
    *,
    source: str = "s3://",
    endpoint_url: str | None = None,
    region: str | None = None,
) -> Endpoint:
    """Return the endpoint of a source from the option and the environment.

    Raises ConfigError for a malformed URL, account or jurisdiction.
    """
    kind = StoreKind.of(source)
    if kind is StoreKind.GCS:
        return Endpoint(endpoint_url or GCS_URL, kind=kind)
    if kind is StoreKind.AZURE:
        return _azure_endpoint(environment, endpoint_url)
    url = endpoint_url or next((environment[name] for name in URL_VARIABLES if environment.get(name)), None)
    if url is None and environment.get("R2_ACCOUNT_ID"):
        url = r2_url(environment["R2_ACCOUNT_ID"], environment.get("R2_JURISDICTION", ""))
    host = (urlsplit(url).hostname or "") if url else ""
    if host == R2_HOST or host.endswith(f".{R2_HOST}"):
        # R2 has one region, `auto`, and would refuse an AWS_REGION meant for another cloud.
        return Endpoint(url, region or "auto", is_r2=True)
    return Endpoint(url, region)


def r2_url(account: str, jurisdiction: str = "", *, label: str = "R2_ACCOUNT_ID") -> str:
    """Return the URL of an R2 account. label: where its id comes from. Raises ConfigError."""
    if not re.fullmatch(r"[0-9A-Za-z-]+", account):
        raise ConfigError(
            f"{label} {account!r} is not an account id; allowed are letters, digits and hyphens"
        )
    if jurisdiction in ("", "default"):
        return f"https://{account}.{R2_HOST}"
    if jurisdiction not in R2_JURISDICTIONS:
        raise ConfigError(
            f"R2_JURISDICTION {jurisdiction!r} is unknown: allowed are {', '.join(R2_JURISDICTIONS)}"
        )
    return f"https://{account}.{jurisdiction}.{R2_HOST}"


def _azure_endpoint(environment: Mapping[str, str], url: str | None) -> Endpoint:
    account = next((environment[name] for name in AZURE_ACCOUNT_VARIABLES if environment.get(name)), "")
    host = (urlsplit(url).hostname or "") if url else ""
    if not account and "." in host and not is_address(host):
        account = host.partition(".")[0]
    if not re.fullmatch(r"[0-9a-z]{3,24}", account):
        raise ConfigError(
            f"az:// needs a storage account, not {account!r}: set {AZURE_ACCOUNT_VARIABLES[0]} to its name, 3 to 24 "
            "lower-case letters and digits"
        )
    return Endpoint(url or f"https://{account}.{AZURE_HOST}", kind=StoreKind.AZURE, account=account)


def is_address(host: str) -> bool:
    """Return whether a host is an IP address instead of a name."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


_SSE = "x-amz-server-side-encryption"
_PAYER = "x-amz-request-payer"
_STORAGE_CLASS = "x-amz-storage-class"
_KMS_KEY = f"{_SSE}-aws-kms-key-id"
_CUSTOMER = ("customer-algorithm", "customer-key", "customer-key-md5")
_COPY_SOURCE = "x-amz-copy-source-server-side-encryption"

# Requests that make an object.
_CREATES = frozenset({"PutObject", "CreateMultipartUpload", "CopyObject"})
# Requests that read or write bytes under a customer's key.
_WITH_CUSTOMER_KEY = _CREATES | {"GetObject", "UploadPart", "UploadPartCopy"}
_COPIES = frozenset({"CopyObject", "UploadPartCopy"})

CUSTOMER_KEY_BYTES = 32


@dataclass(frozen=True, slots=True)
class RequestSettings:
    """Settings of all requests to a bucket.

    sse: server-side encryption, AES256 or aws:kms; "" leaves it to the bucket. customer_key: 32 bytes that encrypt each
    object (SSE-C); the bucket does not keep them. is_unsigned: requests without credentials.
    """

    sse: str = ""
    kms_key_id: str = ""
    customer_key: bytes = field(default=b"", repr=False)
    storage_class: str = ""
    requester_pays: bool = False
    is_unsigned: bool = False

    def headers(self, operation: str) -> dict[str, str]:
        """Return the headers of a request, names in lower case. operation: its name in the S3 API; "" is any other."""
        found: dict[str, str] = {}
        if self.requester_pays:
            found[_PAYER] = "requester"
        if operation in _CREATES:
            if self.sse:
                found[_SSE] = self.sse
            if self.kms_key_id:
                found[_KMS_KEY] = self.kms_key_id
            if self.storage_class:
                found[_STORAGE_CLASS] = self.storage_class
        if self.customer_key and operation in _WITH_CUSTOMER_KEY:
            found |= self._customer_headers(_SSE)
        if self.customer_key and operation in _COPIES:
            found |= self._customer_headers(_COPY_SOURCE)
        return found

    def _customer_headers(self, prefix: str) -> dict[str, str]:
        digest = hashlib.md5(self.customer_key, usedforsecurity=False).digest()
        values = (
            "AES256",
            *(base64.b64encode(value).decode("ascii") for value in (self.customer_key, digest)),
        )
        return {f"{prefix}-{name}": value for name, value in zip(_CUSTOMER, values, strict=True)}


NO_SETTINGS = RequestSettings()
