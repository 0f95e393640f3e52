"""Where an S3 bucket is, and the keys for it: botocore knows the environment, profiles and the sources of keys.

botocore sends no request to the bucket; for some sources it asks STS, SSO or the instance for keys. Its chain is
environment, profiles, `credential_process`, web identity, SSO, instance roles. The sources renew keys that expire, and
may fail with any exception: what happens then is decided here.
"""

import logging
import os
import random
import re
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import botocore.exceptions
import botocore.httpsession
import botocore.session
from botocore.credentials import ReadOnlyCredentials

from fusecache.model.errors import ConfigError, CredentialsMissing
from fusecache.model.format_text import nearest_text
from fusecache.policy.backoff import backoff_seconds
from fusecache.remote.endpoints import (
    URL_VARIABLES,
    Credentials,
    Endpoint,
    RequestSettings,
    Transport,
    read_key_file,
)
from fusecache.remote.http.signed_requests import HttpRequest, SignedHttp, Site
from fusecache.remote.http.tls import trust
from fusecache.remote.protocol.signing import SigningKeys, send_unsigned, sign_by_v4

log = logging.getLogger(__name__)

# Longest pause before a failed source is asked again.
LONGEST_PAUSE_SECONDS = 30.0
_SECTION = re.compile(r"\[(?:profile\s+)?([^\]]+)\]")
_SETTING = re.compile(r"(?:export\s+)?([A-Za-z_]+)\s*=\s*(.*)")


@dataclass(eq=False, slots=True)
class FileCredentials:
    """The keys in a `credentials_file`, read again when the file changes. Thread-safe.

    The file is an AWS credentials file, or lines NAME=value as systemd's EnvironmentFile has them. profile: the
    section of the file; None is `default`, or a file without sections.
    """

    path: Path
    profile: str | None = None
    _state: tuple[int, ...] = ()
    _keys: ReadOnlyCredentials | None = None
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def get_frozen_credentials(self) -> ReadOnlyCredentials:
        """Return the keys. Raises ConfigError if the file has none, or if other users may read it."""
        with self._lock:
            try:
                if self._keys is None or _file_state(os.stat(self.path)) != self._state:
                    self._read()
            except OSError as exc:
                raise ConfigError(f"credentials_file = {self.path}: {exc.strerror}") from exc
            assert self._keys is not None
            return self._keys

    def _read(self) -> None:
        data, facts = read_key_file("credentials_file", self.path)
        text = data.decode("utf-8", "replace")
        found = _settings_of(text, self.profile or "default", needs_section=self.profile is not None)
        if found is None:
            raise ConfigError(
                f"credentials_file = {self.path}: it has no section [{self.profile or 'default'}]; add it, or name "
                "another one with `profile` or `write_profile`"
            )
        for name in ("aws_access_key_id", "aws_secret_access_key"):
            if not found.get(name):
                raise ConfigError(
                    f"credentials_file = {self.path}: it has no {name}; write `{name} = …`, or `{name.upper()}=…`"
                )
        self._keys = ReadOnlyCredentials(
            found["aws_access_key_id"],
            found["aws_secret_access_key"],
            found.get("aws_session_token") or None,
        )
        self._state = _file_state(facts)


def _file_state(facts: os.stat_result) -> tuple[int, ...]:
    """Return what changes whenever a file is written or replaced."""
    return facts.st_dev, facts.st_ino, facts.st_size, facts.st_mtime_ns, facts.st_mode


def _settings_of(text: str, section: str, *, needs_section: bool) -> dict[str, str] | None:
    """Return the settings of a section by name in lower case; None if the file has sections, but not this one.

    Lines before the first section belong to every one that is not asked for by name.
    """
    found: dict[str, str] = {}
    is_ours, has_ours, has_any = not needs_section, False, False
    for line in map(str.strip, text.splitlines()):
        if title := _SECTION.fullmatch(line):
            has_any, is_ours = True, title[1].strip() == section
            has_ours = has_ours or is_ours
        elif is_ours and (setting := _SETTING.fullmatch(line)):
            value = setting[2].strip()
            if len(value) >= 2 and value[0] == value[-1] and value[0] in "\"'":
                value = value[1:-1]
            found[setting[1].lower()] = value
    if not has_ours and (needs_section or (has_any and not found)):
        return None
    return found


class KeptCredentials:
    """Keys of a source that may fail: while it fails, the last keys stay in use. Thread-safe.

    botocore asks for renewal some minutes before keys expire, so the last keys often still work. If they do not, the
    bucket says so.
    """

    def __init__(self, read: Callable[[], ReadOnlyCredentials], name: str) -> None:
        """read: returns the source's keys. name: of the source, for messages."""
        self._read = read
        self._name = name
        self._lock = threading.Lock()
        self._last: ReadOnlyCredentials | None = None
        self._error: Exception | None = None
        self._failures = 0
        self._ask_again_at = float("-inf")

    def get_frozen_credentials(self) -> ReadOnlyCredentials:
        """Return the keys. Raises CredentialsMissing if the source fails and never gave any."""
        with self._lock:
            error = self._error if time.monotonic() < self._ask_again_at else None
        if error is not None:
            return self._last_or_raise(error)
        try:
            keys = self._read()
        except Exception as exc:  # noqa: BLE001  # botocore's sources raise anything: OSError, KeyError, ClientError, …
            self._on_failed(exc)
            return self._last_or_raise(exc)
        self._on_keys(keys)
        return keys

    def _last_or_raise(self, error: Exception) -> ReadOnlyCredentials:
        if self._last is None:
            if isinstance(error, CredentialsMissing):
                raise error
            raise CredentialsMissing(failure_text(self._name, error)) from error
        return self._last

    def _on_failed(self, error: Exception) -> None:
        with self._lock:
            if self._last is not None and str(error) != str(self._error or ""):
                log.warning(
                    "keys could not be renewed, the last ones stay in use, will retry source=%s error=%s",
                    self._name, error,
                )  # fmt: skip
            self._failures += 1
            pause = min(LONGEST_PAUSE_SECONDS, backoff_seconds(self._failures, random.random()))
            self._ask_again_at = time.monotonic() + pause
            self._error = error

    def _on_keys(self, keys: ReadOnlyCredentials) -> None:
        with self._lock:
            if self._last is not None and self._error is not None:
                log.info("keys renewed source=%s", self._name)
            self._last, self._error, self._failures = keys, None, 0


def failure_text(name: str, error: Exception) -> str:
    """Return why a source gave no keys."""
    if isinstance(error, botocore.exceptions.CredentialRetrievalError):
        reason = str(error.kwargs.get("error_msg", error))
    else:
        reason = str(error) or type(error).__name__
    return f"the keys from {name} could not be read: {' '.join(reason.split())}"


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
