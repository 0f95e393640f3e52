"""Which endpoint to talk to, how, and whether it is R2: decided from options and environment, without I/O.

The first that is set wins: the option; `S3_ENDPOINT_URL`; `AWS_ENDPOINT_URL_S3`; `AWS_ENDPOINT_URL`;
`R2_ACCOUNT_ID` (with `R2_JURISDICTION`). With none of them it is AWS, or what the AWS profile names.
Credentials are not chosen here: the usual AWS chain finds them, unless a store is given some.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from fusecache.model.errors import ConfigError
from fusecache.model.objects import GIB, MIB

R2_HOST = "r2.cloudflarestorage.com"
R2_JURISDICTIONS = ("eu", "fedramp")
URL_VARIABLES = ("S3_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL")


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where the bucket lives.

    url: None leaves it to the AWS profile. region: None leaves it to the AWS chain.
    is_r2: conditions on the destination of a copy go by Cloudflare's headers; elsewhere by a HEAD before it.
    """

    url: str | None
    region: str | None = None
    is_r2: bool = False

    def __post_init__(self) -> None:
        if self.url is not None:
            parts = urlsplit(self.url)
            if parts.scheme not in ("http", "https") or not parts.hostname:
                raise ConfigError(f"endpoint {self.url!r} is not a URL: write it as https://host[:port]")
            if parts.path not in ("", "/") or parts.query:
                raise ConfigError(
                    f"endpoint {self.url!r} has a path: name the bucket as s3://BUCKET[/PREFIX] instead"
                )


@dataclass(frozen=True, slots=True)
class Credentials:
    """Keys given by hand instead of the AWS chain. Never shown."""

    access_key: str
    secret_key: str = field(repr=False)
    session_token: str | None = field(default=None, repr=False)


@dataclass(frozen=True, slots=True)
class Transport:
    """How requests travel. A PUT, part or GET ends within its time-outs, twice where botocore repeats it."""

    max_connections: int = 64
    connect_timeout_seconds: float = 10.0
    read_timeout_seconds: float = 60.0
    attempts: int = 2
    # R2 and S3 copy at most 5 GiB in one request; larger objects go in equal parts of `copy_part_bytes`,
    # of which 10 000 hold 4.995 TiB.
    single_copy_bytes: int = 5 * GIB
    copy_part_bytes: int = 592 * MIB


def choose_endpoint(
    environment: Mapping[str, str],
    *,
    endpoint_url: str | None = None,
    region: str | None = None,
    is_r2: bool = False,
) -> Endpoint:
    """Return the endpoint that the option and the environment name.

    is_r2: treat the endpoint as R2 even if its name does not say so (a proxy, a test server).
    Raises ConfigError for a URL, account or jurisdiction that cannot be one.
    """
    url = endpoint_url or next((environment[name] for name in URL_VARIABLES if environment.get(name)), None)
    if url is None and environment.get("R2_ACCOUNT_ID"):
        url = _r2_url(environment["R2_ACCOUNT_ID"], environment.get("R2_JURISDICTION", ""))
    host = (urlsplit(url).hostname or "") if url else ""
    named_r2 = host == R2_HOST or host.endswith(f".{R2_HOST}")
    if named_r2 or is_r2:
        # R2 knows one region; an AWS_REGION meant for another cloud would be refused.
        return Endpoint(url, region or "auto", is_r2=True)
    return Endpoint(url, region)


def _r2_url(account: str, jurisdiction: str) -> str:
    if not re.fullmatch(r"[0-9A-Za-z-]+", account):
        raise ConfigError(f"R2_ACCOUNT_ID {account!r} is not an account id: letters and digits only")
    if jurisdiction in ("", "default"):
        return f"https://{account}.{R2_HOST}"
    if jurisdiction not in R2_JURISDICTIONS:
        raise ConfigError(
            f"R2_JURISDICTION {jurisdiction!r} is unknown: allowed are {', '.join(R2_JURISDICTIONS)}"
        )
    return f"https://{account}.{jurisdiction}.{R2_HOST}"
