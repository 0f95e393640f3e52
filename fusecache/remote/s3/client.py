"""A botocore client configured for R2 and other S3 services, its credentials, and the direct HTTP path beside it.

The direct HTTP path sends requests without botocore. It copies URL, region and headers from a request that botocore
has sent successfully. Not here: requests. `store.py` makes them.
"""

import os
import ssl
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import botocore.exceptions
import botocore.handlers
import botocore.httpsession
import botocore.loaders
import botocore.session
import botocore.utils
from botocore import UNSIGNED
from botocore.config import Config

from fusecache.model.errors import ConfigError, CredentialsMissing
from fusecache.model.format_text import nearest_text
from fusecache.remote.endpoints import Credentials, Endpoint, Transport
from fusecache.remote.http.put import DirectPuts
from fusecache.remote.http.ranged_get import DirectGets
from fusecache.remote.http.signed_requests import NO_SETTINGS, RequestTemplate, SignedHttp, request_template
from fusecache.remote.http.tls import TlsContext, library
from fusecache.remote.protocol.headers import (
    capture_headers,
    refuse_head_bucket,
    request_identity_encoding,
    restore_headers,
    send_md5,
)
from fusecache.remote.protocol.list_response import parse_listing
from fusecache.remote.protocol.signing import SigningKeys
from fusecache.remote.request_settings import RequestSettings
from fusecache.remote.s3.credentials import FileCredentials, KeptCredentials, failure_text
from fusecache.remote.s3.errors import CREDENTIALS_HELP

if TYPE_CHECKING:
    from mypy_boto3_s3 import S3Client

# Key of the parsed page in botocore's response to a LIST.
PAGE = "FusecachePage"
_ANSWERED = "before-parse.s3.*"
# Requests that can set up the direct HTTP path: the ones that use it later, and the first ones of a mount.
TEMPLATE_OPERATIONS = ("GetObject", "PutObject", "UploadPart", "DeleteObject", "AbortMultipartUpload")


@dataclass(frozen=True, slots=True)
class DirectHttp:
    """The direct HTTP path: GETs, PUTs and DELETEs without botocore, over one connection pool."""

    http: SignedHttp
    gets: DirectGets
    puts: DirectPuts


@dataclass(eq=False, slots=True)
class ClientAccess:
    """A botocore client, its credentials, and the direct HTTP path: None until set up, or if it cannot be used."""

    session: botocore.session.Session
    client: "S3Client"
    transport: Transport
    count_read: Callable[[int], None]
    settings: RequestSettings = NO_SETTINGS
    _direct_http: DirectHttp | None = None
    _is_set_up: bool = False
    _last_sent: threading.local = field(default_factory=threading.local)

    def direct_http(self, key: str) -> DirectHttp | None:
        """Return the direct HTTP path for an object; None for an empty key, which would name the bucket itself."""
        return self._direct_http if key else None

    def on_signed_request(self, request: Any, **_: object) -> None:
        """Remember a request after botocore has signed it."""
        self._last_sent.request = request

    def set_up_direct_http(self, key: str) -> None:
        """Set up the direct HTTP path, once, from the request for `key` that this thread just sent successfully."""
        if self._is_set_up:
            return
        self._is_set_up = True
        template = self._template_of_last_request(key)
        if template is not None:
            tls = _tls_context(self.session) if template.scheme == "https" else None
            http = SignedHttp(template, tls, self.transport, self.settings)
            self._direct_http = DirectHttp(http, DirectGets(http, self.count_read), DirectPuts(http))

    def drop_direct_http(self) -> None:
        """Drop the direct HTTP path after a redirect. The next successful request of botocore sets it up again."""
        self._direct_http, self._is_set_up = None, False

    def close(self) -> None:
        """Close idle connections; requests in flight continue."""
        self.client.close()
        if self._direct_http is not None:
            self._direct_http.http.close()

    def check_keys(self) -> None:
        """Raise CredentialsMissing unless the source of the keys has some now."""
        try:
            self.keys()
        except botocore.exceptions.NoCredentialsError as exc:
            raise CredentialsMissing(f"{exc}; {CREDENTIALS_HELP}") from exc

    def keys(self) -> SigningKeys | None:
        """Return the current credentials, None for unsigned requests; refreshable ones are renewed first if needed."""
        if self.settings.is_unsigned:
            return None
        credentials = self.session.get_credentials()
        if credentials is None:
            raise botocore.exceptions.NoCredentialsError
        frozen = credentials.get_frozen_credentials()
        if frozen.access_key is None or frozen.secret_key is None:
            raise botocore.exceptions.NoCredentialsError
        return SigningKeys(frozen.access_key, frozen.secret_key, frozen.token)

    def _template_of_last_request(self, key: str) -> RequestTemplate | None:
        """Return the template of the request just sent; None if a proxy is configured or the request is unusual."""
        request = self._last_sent.request
        url, authorization = request.url.partition("?")[0], _header(request, "Authorization")
        if botocore.utils.get_environ_proxies(url):
            return None
        agent = _header(request, "User-Agent")
        return request_template(url, key, authorization, agent, is_unsigned=self.settings.is_unsigned)


def open_access(
    endpoint: Endpoint,
    transport: Transport,
    *,
    credentials: Credentials | None,
    profile: str | None,
    count_read: Callable[[int], None],
    credentials_file: Path | None = None,
    settings: RequestSettings = NO_SETTINGS,
) -> ClientAccess:
    """Create a client and its credentials. Makes no request to the bucket.

    credentials_file: replaces the AWS chain; `profile` is then a section of it.

    Raises ConfigError for a profile or endpoint that botocore rejects, CredentialsMissing if their source fails.
    """
    core = botocore.session.get_session()
    try:
        if profile is not None and credentials_file is None:
            core.set_config_variable("profile", profile)
        if credentials is not None:
            core.set_credentials(credentials.access_key, credentials.secret_key, credentials.session_token)
        core.register_component("data_loader", _loader(core.get_config_variable("data_path")))
        if credentials_file is not None:
            _keep_file_keys(core, FileCredentials(credentials_file, profile))
        elif not settings.is_unsigned:
            _keep_keys(core, profile)
        region = endpoint.region or core.get_config_variable("region") or "us-east-1"
        config = _config(transport, region, UNSIGNED if settings.is_unsigned else "s3v4")
        # As boto3's, whose import takes a tenth of a daemon's start.
        client = cast("S3Client", core.create_client("s3", endpoint_url=endpoint.url, config=config))
    except botocore.exceptions.ProfileNotFound as exc:
        known = core.available_profiles
        hint = nearest_text(profile or "", known) or f": known are {', '.join(known) or 'none'}"
        raise ConfigError(
            f"profile = {profile!r}: ~/.aws/config and ~/.aws/credentials have no such profile{hint}"
        ) from exc
    except (botocore.exceptions.BotoCoreError, ValueError) as exc:
        raise ConfigError(f"cannot reach {endpoint.url or 'the bucket'}: {exc}") from exc
    events = client.meta.events
    # Cloudflare never sends 100 Continue: each PUT would wait a second for it.
    events.unregister("before-call.s3", botocore.handlers.add_expect_header)
    events.register("before-parameter-build.s3.CopyObject", capture_headers)
    events.register("before-call.s3.CopyObject", restore_headers)
    # Last: another handler still changes the body.
    events.register_last("before-call.s3.DeleteObjects", send_md5)
    _read_pages_once(events)
    events.register("before-call.s3", partial(_add_headers, settings))
    events.register("before-call.s3.HeadBucket", refuse_head_bucket)  # type: ignore[arg-type]  # returns a response
    # After signing: a proxy may rewrite this header.
    events.register("before-send.s3", request_identity_encoding)
    access = ClientAccess(core, client, transport, count_read, settings)
    for operation in TEMPLATE_OPERATIONS:
        events.register(f"before-send.s3.{operation}", access.on_signed_request)
    return access


# ---- private


@cache
def _loader(data_path: str | None) -> botocore.loaders.Loader:
    """Return botocore's descriptions of services, read once and not for each client: they are megabytes of JSON."""
    return botocore.loaders.create_loader(data_path)


def _keep_keys(session: botocore.session.Session, profile: str | None) -> None:
    """Find the session's keys, and keep them in use while their source fails. Raises CredentialsMissing."""
    name = f"profile {profile}" if profile else "the AWS chain"
    try:
        found = session.get_credentials()
    except botocore.exceptions.ProfileNotFound:
        raise
    except Exception as exc:  # whatever a source meets: a file, a program's output, an answer of STS
        raise CredentialsMissing(failure_text(name, exc)) from exc
    if found is not None:
        # botocore has no public way to set credentials that renew themselves.
        session._credentials = KeptCredentials(found, f"{name} ({found.method})")  # type: ignore[attr-defined]


def _keep_file_keys(session: botocore.session.Session, source: FileCredentials) -> None:
    """Make a file the source of the session's keys. Raises ConfigError if it has none."""
    source.get_frozen_credentials()
    kept = KeptCredentials(source, str(source.path))
    kept.get_frozen_credentials()
    session._credentials = kept  # type: ignore[attr-defined]  # as above


def _config(transport: Transport, region: str, signature: Any) -> Config:
    # With default checksums botocore sends aws-chunked bodies with a trailer, which R2 rejects as Unauthorized.
    return Config(
        region_name=region,
        signature_version=signature,
        s3={"addressing_style": "path"},
        request_checksum_calculation="when_required",
        response_checksum_validation="when_required",
        retries={"mode": "standard", "total_max_attempts": transport.attempts},
        connect_timeout=transport.connect_timeout_seconds,
        read_timeout=transport.read_timeout_seconds,
        max_pool_connections=transport.max_connections,
        tcp_keepalive=True,
    )


def _read_pages_once(events: Any) -> None:
    """Make `parse_listing` the only parser of LIST responses.

    botocore first parses each response to see whether it is an error. For a page of names that costs more than reading
    the page.
    """
    for event, handler, *place in botocore.handlers.BUILTIN_HANDLERS:
        if event == _ANSWERED and place:
            events.unregister(event, handler)
            events.register(event, handler)
    events.register_first(_ANSWERED, _parse_page)


def _parse_page(
    operation_model: Any, response_dict: dict[str, Any], customized_response_dict: dict[str, Any], **_: object
) -> None:
    """Parse a LIST response before botocore does. Leave botocore an empty body, or all of it if parsing fails."""
    if operation_model.name == "ListObjectsV2" and response_dict["status_code"] == 200:
        with suppress(ValueError):
            customized_response_dict[PAGE] = parse_listing(response_dict["body"])
            response_dict["body"] = b""


def _add_headers(settings: RequestSettings, model: Any, params: dict[str, Any], **_: object) -> None:
    """Add the headers of the settings before the request is signed. What a request says itself comes first."""
    params["headers"] = {**settings.headers(model.name), **params["headers"]}


def _header(request: Any, name: str) -> str:
    value = request.headers.get(name, "")
    return value.decode("latin-1") if isinstance(value, bytes) else str(value)


def _tls_context(session: botocore.session.Session) -> TlsContext | ssl.SSLContext:
    """Return a TLS context with botocore's trusted CAs: AWS_CA_BUNDLE or `ca_bundle`, else botocore's own."""
    named: str | None = session.get_config_variable("ca_bundle") or os.environ.get("REQUESTS_CA_BUNDLE")
    path = named or str(botocore.httpsession.get_cert_path(True))  # noqa: FBT003 (botocore's signature)
    cafile, capath = (None, path) if os.path.isdir(path) else (path, None)
    openssl = library()
    if openssl is not None:
        return TlsContext(openssl, cafile=cafile, capath=capath)
    context: ssl.SSLContext = botocore.httpsession.create_urllib3_context()
    context.check_hostname = True  # urllib3 does this check itself
    context.load_verify_locations(cafile=cafile, capath=capath)
    return context
