"""A client of boto3 set up for R2 and any other S3, its credentials, and the short way that its requests show.

Not here: requests. `store.py` makes them.
"""

import os
import ssl
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import boto3
import botocore.exceptions
import botocore.handlers
import botocore.httpsession
import botocore.session
import botocore.utils
from botocore.config import Config

from fusecache.model.errors import ConfigError
from fusecache.model.format_text import nearest_text
from fusecache.remote.endpoints import Credentials, Endpoint, Transport
from fusecache.remote.http.put import DirectPuts
from fusecache.remote.http.ranged_get import DirectGets
from fusecache.remote.http.signed_requests import RequestTemplate, SignedHttp, request_template
from fusecache.remote.http.tls import TlsContext, library
from fusecache.remote.protocol.headers import (
    ask_for_identity,
    capture_headers,
    know_no_region,
    restore_headers,
)
from fusecache.remote.protocol.list_response import parse_listing
from fusecache.remote.protocol.signing import SigningKeys

if TYPE_CHECKING:
    from mypy_boto3_s3 import S3Client

# Where an answer to LIST carries the page that we read out of it.
PAGE = "FusecachePage"
_ANSWERED = "before-parse.s3.*"
# Requests that show the short way: those that go it later, and what a mount begins with.
SHOWING = ("GetObject", "PutObject", "UploadPart", "DeleteObject", "AbortMultipartUpload")


@dataclass(frozen=True, slots=True)
class DirectHttp:
    """What goes without botocore, over one wire."""

    http: SignedHttp
    gets: DirectGets
    puts: DirectPuts


@dataclass(eq=False, slots=True)
class ClientAccess:
    """A client, the credentials behind it, and the short way: None until it was shown, or if there is none."""

    session: botocore.session.Session
    client: "S3Client"
    transport: Transport
    count_read: Callable[[int], None]
    _direct_http: DirectHttp | None = None
    _is_shown: bool = False
    _sent: threading.local = field(default_factory=threading.local)

    def direct_http(self, key: str) -> DirectHttp | None:
        """Return the short way for an object; an empty key, which would be the bucket, has none."""
        return self._direct_http if key else None

    def on_sent(self, request: Any, **_: object) -> None:
        """After a request is signed: remember how it looks."""
        self._sent.request = request

    def show(self, key: str) -> None:
        """The request for this key that this thread just sent went well: make the short way like it, if none is yet."""
        if self._is_shown:
            return
        self._is_shown = True
        form = self._form(key)
        if form is not None:
            wire = SignedHttp(
                form, _tls_context(self.session) if form.scheme == "https" else None, self.transport
            )
            self._direct_http = DirectHttp(wire, DirectGets(wire, self.count_read), DirectPuts(wire))

    def forget(self) -> None:
        """The short way leads elsewhere: botocore follows where it can, which shows it anew, or says why it cannot."""
        self._direct_http, self._is_shown = None, False

    def close(self) -> None:
        """Close idle connections; requests under way go on."""
        self.client.close()
        if self._direct_http is not None:
            self._direct_http.http.close()

    def keys(self) -> SigningKeys:
        """Return the credentials of this moment, renewed if they are such."""
        credentials = self.session.get_credentials()
        if credentials is None:
            raise botocore.exceptions.NoCredentialsError
        frozen = credentials.get_frozen_credentials()
        if frozen.access_key is None or frozen.secret_key is None:
            raise botocore.exceptions.NoCredentialsError
        return SigningKeys(frozen.access_key, frozen.secret_key, frozen.token)

    def _form(self, key: str) -> RequestTemplate | None:
        """Return the form of the request just sent; None if a proxy stands between, or it is special."""
        request = self._sent.request
        url, authorization = request.url.partition("?")[0], _header(request, "Authorization")
        if botocore.utils.get_environ_proxies(url):
            return None
        return request_template(url, key, authorization, _header(request, "User-Agent"))


def open_access(
    endpoint: Endpoint,
    transport: Transport,
    *,
    credentials: Credentials | None,
    profile: str | None,
    count_read: Callable[[int], None],
) -> ClientAccess:
    """Return a new access. Makes no request.

    Raises ConfigError for a profile or endpoint that botocore refuses.
    """
    core = botocore.session.get_session()
    try:
        session = boto3.Session(
            botocore_session=core,
            profile_name=profile,
            aws_access_key_id=credentials.access_key if credentials else None,
            aws_secret_access_key=credentials.secret_key if credentials else None,
            aws_session_token=credentials.session_token if credentials else None,
        )
        client = session.client(
            "s3",
            endpoint_url=endpoint.url,
            config=_config(transport, endpoint.region or session.region_name or "us-east-1"),
        )
    except botocore.exceptions.ProfileNotFound as exc:
        known = core.available_profiles
        hint = nearest_text(profile or "", known) or f": known are {', '.join(known) or 'none'}"
        raise ConfigError(
            f"profile = {profile!r}: ~/.aws/config and ~/.aws/credentials have no such profile{hint}"
        ) from exc
    except (botocore.exceptions.BotoCoreError, ValueError) as exc:
        raise ConfigError(f"cannot reach {endpoint.url or 'the bucket'}: {exc}") from exc
    events = client.meta.events
    # Cloudflare never answers 100 Continue: each PUT would wait a second for it.
    events.unregister("before-call.s3", botocore.handlers.add_expect_header)
    events.register("before-parameter-build.s3.CopyObject", capture_headers)
    events.register("before-call.s3.CopyObject", restore_headers)
    _read_pages_once(events)
    events.register("before-call.s3.HeadBucket", know_no_region)  # type: ignore[arg-type]  # it answers
    # After signing: a proxy on the way may rewrite this header.
    events.register("before-send.s3", ask_for_identity)
    access = ClientAccess(core, client, transport, count_read)
    for operation in SHOWING:
        events.register(f"before-send.s3.{operation}", access.on_sent)
    return access


# ---- private


def _config(transport: Transport, region: str) -> Config:
    # Default checksums would send aws-chunked bodies with a trailer, which R2 answers with Unauthorized.
    return Config(
        region_name=region,
        signature_version="s3v4",
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
    """Have answers to LIST parsed by us alone.

    botocore parses each answer first to see whether it is an error: of a page of names that costs more than reading it.
    """
    for event, handler, *place in botocore.handlers.BUILTIN_HANDLERS:
        if event == _ANSWERED and place:
            events.unregister(event, handler)
            events.register(event, handler)
    events.register_first(_ANSWERED, _take_page)


def _take_page(
    operation_model: Any, response_dict: dict[str, Any], customized_response_dict: dict[str, Any], **_: object
) -> None:
    """Before botocore parses the answer to a LIST: read it ourselves, and leave it nothing but what we could not."""
    if operation_model.name == "ListObjectsV2" and response_dict["status_code"] == 200:
        with suppress(ValueError):
            customized_response_dict[PAGE] = parse_listing(response_dict["body"])
            response_dict["body"] = b""


def _header(request: Any, name: str) -> str:
    value = request.headers.get(name, "")
    return value.decode("latin-1") if isinstance(value, bytes) else str(value)


def _tls_context(session: botocore.session.Session) -> TlsContext | ssl.SSLContext:
    """Return a context that trusts whom botocore trusts: AWS_CA_BUNDLE or `ca_bundle`, else its own CAs."""
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
