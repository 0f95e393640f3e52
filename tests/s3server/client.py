"""A botocore client as R2 needs it: no checksum trailers, no Expect header, path-style."""

from functools import cache
from typing import TYPE_CHECKING, Any, Protocol

from tests.s3server.manners import TEST_HAND

if TYPE_CHECKING:
    from mypy_boto3_s3 import S3Client


class Endpoint(Protocol):
    """What a client needs to know of a server; S3Server and ServerProcess are such."""

    @property
    def endpoint_url(self) -> str: ...
    @property
    def access_key(self) -> str: ...
    @property
    def secret_key(self) -> str: ...
    @property
    def ca_path(self) -> str | None: ...


def boto_client(
    server: Endpoint, *, access_key: str | None = None, secret_key: str | None = None, **config: Any
) -> "S3Client":
    """Return a client of `server` that tries once. `config` goes to botocore's Config and overrides."""
    # Imported here: the server's own process starts in half the time without.
    import botocore.session
    from botocore.config import Config
    from botocore.handlers import add_expect_header

    settings: dict[str, Any] = {
        "region_name": "auto",
        "signature_version": "s3v4",
        "s3": {"addressing_style": "path"},
        "request_checksum_calculation": "when_required",
        "response_checksum_validation": "when_required",
        "retries": {"mode": "standard", "total_max_attempts": 1},
        "connect_timeout": 10,
        "read_timeout": 60,
        "user_agent_extra": TEST_HAND,
        **config,
    }
    session = botocore.session.get_session()
    session.register_component("data_loader", _loader())
    client = session.create_client(
        "s3",
        endpoint_url=server.endpoint_url,
        aws_access_key_id=server.access_key if access_key is None else access_key,
        aws_secret_access_key=server.secret_key if secret_key is None else secret_key,
        verify=server.ca_path,
        config=Config(**settings),
    )
    client.meta.events.unregister("before-call.s3", add_expect_header)
    return client


@cache
def _loader() -> Any:
    """Return botocore's descriptions of services, megabytes of JSON, read once for all clients of a test run."""
    from botocore.loaders import create_loader

    return create_loader()
