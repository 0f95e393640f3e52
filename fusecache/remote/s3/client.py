"""Where an S3 bucket is, and the keys for it: botocore knows the environment, profiles and the sources of keys.

botocore sends no request to the bucket; for some sources it asks STS, SSO or the instance for keys.
"""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import botocore.exceptions
import botocore.httpsession
import botocore.session
from botocore.credentials import ReadOnlyCredentials

from fusecache.model.errors import ConfigError, CredentialsMissing
from fusecache.model.format_text import nearest_text
from fusecache.remote.endpoints import URL_VARIABLES, Credentials, Endpoint, RequestSettings, Transport
from fusecache.remote.http.signed_requests import HttpRequest, SignedHttp, Site
from fusecache.remote.http.tls import trust
from fusecache.remote.protocol.signing import SigningKeys, send_unsigned, sign_by_v4
from fusecache.remote.s3.credentials import FileCredentials, KeptCredentials, failure_text

CREDENTIALS_HELP = "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or name a profile of ~/.aws/credentials"
DEFAULT_REGION = "us-east-1"


@dataclass(frozen=True, slots=True)
class ClientAccess:
    """A bucket's place, and its keys: None for unsigned requests. url: None is AWS."""

    bucket: str
    session: botocore.session.Session
    url: str | None
    region: str
    kept_keys: KeptCredentials | None
    settings: RequestSettings

    def http(self, transport: Transport) -> SignedHttp:
        """Return the requests to the bucket. Raises ConfigError for a proxy, or for CAs that cannot be used."""
        options = partial(_option_headers, self.settings)
        return SignedHttp(self._site(self.region), transport, options=options, move=self._site)

    def keys(self) -> SigningKeys:
        """Return the current keys, renewed first if they are about to expire. Raises CredentialsMissing."""
        assert self.kept_keys is not None
        frozen = self.kept_keys.get_frozen_credentials()
        assert frozen.access_key
        assert frozen.secret_key
        return SigningKeys(frozen.access_key, frozen.secret_key, frozen.token)

    def _site(self, region: str) -> Site:
        url = self.url or _aws_url(self.session, region)
        tls = trust(_ca_path(self.session)) if url.startswith("https") else None
        sign = send_unsigned if self.kept_keys is None else sign_by_v4(region, self.keys)
        return Site(url, f"/{self.bucket}/", sign, region, tls)


def open_access(
    bucket: str,
    endpoint: Endpoint,
    *,
    credentials: Credentials | None,
    profile: str | None,
    credentials_file: Path | None,
    settings: RequestSettings,
) -> ClientAccess:
    """Find endpoint, region and keys. credentials_file: replaces the AWS chain; `profile` is then a section of it.

    Raises ConfigError for a profile that does not exist, or a bad file; CredentialsMissing if the keys' source fails.
    """
    if not re.fullmatch(r"[a-zA-Z0-9.\-_]{1,255}", bucket):
        raise ConfigError(f"s3://{bucket}: a bucket's name has letters, digits, '.', '-' and '_' only")
    session = botocore.session.get_session()
    try:
        if profile is not None and credentials_file is None:
            session.set_config_variable("profile", profile)
        region = endpoint.region or session.get_config_variable("region") or DEFAULT_REGION
        kept = None
        if not settings.is_unsigned:
            kept = _kept_keys(session, credentials, profile, credentials_file)
        return ClientAccess(bucket, session, endpoint.url or _configured_url(session), region, kept, settings)
    except botocore.exceptions.ProfileNotFound as exc:
        known = session.available_profiles
        hint = nearest_text(profile or "", known) or f": known are {', '.join(known) or 'none'}"
        raise ConfigError(
            f"profile = {profile!r}: ~/.aws/config and ~/.aws/credentials have no such profile{hint}"
        ) from exc
    except botocore.exceptions.BotoCoreError as exc:
        raise ConfigError(f"s3://{bucket}: {exc}") from exc


# ---- private


def _kept_keys(
    session: botocore.session.Session,
    credentials: Credentials | None,
    profile: str | None,
    credentials_file: Path | None,
) -> KeptCredentials:
    """Return the first keys that are set, kept in use while their source fails. Raises as `open_access` does."""
    if credentials_file is not None:
        file = FileCredentials(credentials_file, profile)
        kept = KeptCredentials(file.get_frozen_credentials, str(credentials_file))
        file.get_frozen_credentials()  # raises ConfigError
        kept.get_frozen_credentials()
        return kept
    if credentials is not None:
        session.set_credentials(credentials.access_key, credentials.secret_key, credentials.session_token)
    name = f"profile {profile}" if profile else "the AWS chain"
    try:
        found = session.get_credentials()
    except botocore.exceptions.ProfileNotFound:
        raise
    except Exception as exc:  # whatever a source meets: a file, a program's output, an answer of STS
        raise CredentialsMissing(failure_text(name, exc)) from exc
    return KeptCredentials(partial(_chain_keys, session), f"{name} ({found.method})" if found else name)


def _chain_keys(session: botocore.session.Session) -> ReadOnlyCredentials:
    found = session.get_credentials()
    frozen = None if found is None else found.get_frozen_credentials()
    if frozen is None or not frozen.access_key or not frozen.secret_key:
        raise CredentialsMissing(f"no credentials were found; {CREDENTIALS_HELP}")
    return frozen


def _configured_url(session: botocore.session.Session) -> str | None:
    """Return the endpoint that environment or profile name: for S3, else for all services. Raises ConfigError."""
    if session.get_config_variable("ignore_configured_endpoint_urls"):
        return None
    config = session.get_scoped_config()
    services = session.full_config.get("services", {}).get(config.get("services", ""), {})
    named = [os.environ.get(name) for name in URL_VARIABLES[1:]]
    named += [services.get("s3", {}).get("endpoint_url"), config.get("endpoint_url")]
    return next((Endpoint(url).url for url in named if url), None)


def _aws_url(session: botocore.session.Session, region: str) -> str:
    """Return the endpoint of a region of AWS."""
    partitions = session.get_component("data_loader").load_data("partitions")["partitions"]
    found = next((each for each in partitions if re.match(each["regionRegex"], region)), partitions[0])
    fips = "-fips" if session.get_config_variable("use_fips_endpoint") else ""
    dual = ".dualstack" if session.get_config_variable("use_dualstack_endpoint") else ""
    return f"https://s3{fips}{dual}.{region}.{found['outputs']['dnsSuffix']}"


def _ca_path(session: botocore.session.Session) -> str:
    """Return the trusted CAs: AWS_CA_BUNDLE or `ca_bundle`, else REQUESTS_CA_BUNDLE, else botocore's own."""
    named: str | None = session.get_config_variable("ca_bundle") or os.environ.get("REQUESTS_CA_BUNDLE")
    return named or str(botocore.httpsession.get_cert_path(True))  # noqa: FBT003 (botocore's signature)


def _option_headers(settings: RequestSettings, request: HttpRequest) -> Mapping[str, str]:
    return settings.headers(_operation(request))


def _operation(request: HttpRequest) -> str:
    """Return the name of a request in the S3 API, if it makes, reads or writes one object; else ""."""
    is_part, is_copy = "partNumber=" in request.query, "x-amz-copy-source" in request.headers
    match request.method:
        case "PUT":
            whole = "CopyObject" if is_copy else "PutObject"
            part = "UploadPartCopy" if is_copy else "UploadPart"
            return part if is_part else whole
        case "POST":
            return "CreateMultipartUpload" if request.query == "uploads=" else ""
        case "GET" | "HEAD" if request.key is not None:
            return "GetObject"
    return ""
