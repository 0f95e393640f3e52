"""Opens the store of a gs:// or az:// source, with the credentials that the environment names.

A request shows who sends it by nothing, a token, or a signature. Tokens come from google-auth and azure-identity, which
are imported only if they are needed.
"""

import base64
import binascii
import hmac
import importlib
import ssl
import threading
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any
from urllib.parse import parse_qsl, urlsplit

import urllib3

from fusecache.installation import extra_command
from fusecache.model.errors import AccessDenied, ConfigError, CredentialsMissing, Unavailable
from fusecache.remote.clouds.azure import AzureStore, common_headers
from fusecache.remote.clouds.gcs import GcsStore
from fusecache.remote.endpoints import Endpoint, StoreKind, Transport, is_address
from fusecache.remote.http.signed_requests import SignedHttp, Site
from fusecache.remote.http.tls import trust
from fusecache.remote.protocol.signing import Sign, send_unsigned

AZURE_KEY_VARIABLES = ("AZURE_STORAGE_ACCOUNT_KEY", "AZURE_STORAGE_KEY")
AZURE_SAS_VARIABLES = ("AZURE_STORAGE_SAS_TOKEN", "AZURE_STORAGE_SAS_KEY")
GOOGLE_SCOPE = "https://www.googleapis.com/auth/devstorage.read_write"
AZURE_SCOPE = "https://storage.azure.com/.default"
GOOGLE_HELP = "set GOOGLE_APPLICATION_CREDENTIALS, or run `gcloud auth application-default login`"
AZURE_HELP = "set AZURE_STORAGE_ACCOUNT_KEY or AZURE_STORAGE_SAS_TOKEN, or run `az login`"
# The headers in the string that Azure's shared key signs, in its order.
_SIGNED = (
    "content-encoding",
    "content-language",
    "content-length",
    "content-md5",
    "content-type",
    "date",
    "if-modified-since",
    "if-match",
    "if-none-match",
    "if-unmodified-since",
    "range",
)


def open_cloud_store(
    bucket: str,
    endpoint: Endpoint,
    environment: Mapping[str, str],
    *,
    transport: Transport,
    is_unsigned: bool = False,
) -> GcsStore | AzureStore:
    """Create a store. Makes no request. Raises ConfigError."""
    assert endpoint.url is not None, "only S3 leaves its URL open"
    tls = trust(None) if endpoint.url.startswith("https") else None
    if endpoint.kind is StoreKind.GCS:
        tokens = None if is_unsigned else GoogleTokens()
        sign = send_unsigned if tokens is None else sign_by_token(tokens)
        http = SignedHttp(Site(endpoint.url, f"/{bucket}/", sign, tls=tls), transport)
        return GcsStore(
            f"gs://{bucket}", http, reload=lambda: tokens.reload() if tokens is not None else None
        )
    sign = send_unsigned if is_unsigned else _azure_sign(endpoint.account, environment)
    host = urlsplit(endpoint.url).hostname or ""
    # As Azurite does: an address, or a name without a dot, has the account in its path.
    account = f"/{endpoint.account}" if is_address(host) or "." not in host else ""
    site = Site(endpoint.url, f"{account}/{bucket}/", sign, tls=tls)
    http = SignedHttp(site, transport, options=lambda _: common_headers())
    return AzureStore(f"az://{bucket}", http)


def cloud_keys_from(kind: StoreKind, environment: Mapping[str, str]) -> str:
    """Return the source of the credentials as `daemon.connect.keys_from` does."""
    if kind is StoreKind.GCS:
        return environment.get("GOOGLE_APPLICATION_CREDENTIALS", "")
    names = (*AZURE_KEY_VARIABLES, *AZURE_SAS_VARIABLES)
    return next((f"environment ({name})" for name in names if environment.get(name)), "")


def _azure_sign(account: str, environment: Mapping[str, str]) -> Sign:
    key, signature = (
        next((environment[name] for name in names if environment.get(name)), "")
        for names in (AZURE_KEY_VARIABLES, AZURE_SAS_VARIABLES)
    )
    if key:
        try:
            return sign_by_shared_key(account, base64.b64decode(key, validate=True))
        except binascii.Error as exc:
            raise ConfigError(f"{AZURE_KEY_VARIABLES[0]} is no key of a storage account: {exc}") from exc
    return sign_by_shared_access(signature.lstrip("?")) if signature else sign_by_token(AzureTokens())


def sign_by_token(token: Callable[[], str]) -> Sign:
    """Return how to sign by OAuth tokens. token: returns one that is valid now."""
    return lambda _method, _path, query, headers, _payload: (
        query,
        {**headers, "authorization": f"Bearer {token()}"},
    )


def sign_by_shared_access(signature: str) -> Sign:
    """Return how to sign by a shared access signature (SAS) of Azure, a query that was signed beforehand."""
    return lambda _method, _path, query, headers, _payload: (
        f"{query}&{signature}".lstrip("&"),
        dict(headers),
    )


def sign_by_shared_key(account: str, key: bytes) -> Sign:
    """Return how to sign by the key of an Azure storage account: "Authorize with Shared Key" of Azure's reference."""

    def sign(
        method: str, path: str, query: str, headers: Mapping[str, str], _payload: str
    ) -> tuple[str, dict[str, str]]:
        values = {**headers, "content-length": headers.get("content-length", "").lstrip("0")}
        own = [
            f"{name}:{headers[name]}" for name in sorted(headers, key=_sort_key) if name.startswith("x-ms-")
        ]
        pairs = sorted(parse_qsl(query, keep_blank_values=True))
        resource = [f"/{account}{path}", *(f"{name}:{value}" for name, value in pairs)]
        text = "\n".join([method, *(values.get(name, "") for name in _SIGNED), *own, *resource])
        signature = base64.b64encode(hmac.digest(key, text.encode(), "sha256")).decode("ascii")
        return query, {**headers, "authorization": f"SharedKey {account}:{signature}"}

    return sign


def _sort_key(name: str) -> str:
    # Azure's order ignores hyphens, and has `_` before digits (azure-storage-blob emulates it with two tables).
    return name.replace("-", "").replace("_", "!")


class GoogleTokens:
    """Tokens of Google's application default credentials. Thread-safe."""

    def __init__(self) -> None:
        """Raises ConfigError without google-auth."""
        self._auth = _extra("google.auth", "gcs")
        http = urllib3.PoolManager(ssl_context=ssl.create_default_context())
        self._request: Any = _extra("google.auth.transport.urllib3", "gcs").Request(http)
        self._lock = threading.Lock()
        self._credentials: Any = None

    def __call__(self) -> str:
        """Return a valid token."""
        errors = self._auth.exceptions
        with self._lock:  # one thread fetches a token, the others wait for it
            try:
                if self._credentials is None:
                    self._credentials, _ = self._auth.default(scopes=[GOOGLE_SCOPE])
                if not self._credentials.valid:
                    self._credentials.refresh(self._request)
            except errors.TransportError as exc:
                raise Unavailable(f"no answer to the request for a token: {exc}") from exc
            except errors.RefreshError as exc:
                kind = Unavailable if exc.retryable else AccessDenied
                raise kind(f"the credentials get no token: {exc}; {GOOGLE_HELP}") from exc
            except (errors.GoogleAuthError, OSError, ValueError) as exc:
                raise CredentialsMissing(f"{str(exc).rstrip('.')}; {GOOGLE_HELP}") from exc
            return str(self._credentials.token)

    def reload(self) -> None:
        """Read the credentials again."""
        with self._lock:
            self._credentials = None


class AzureTokens:
    """Tokens of Azure's default chain: environment, workload and managed identities, `az login`. Thread-safe."""

    def __init__(self) -> None:
        """Raises ConfigError without azure-identity."""
        self._errors = _extra("azure.core.exceptions", "azure")
        self._credential: Any = _extra("azure.identity", "azure").DefaultAzureCredential()

    def __call__(self) -> str:
        """Return a valid token."""
        try:
            return str(self._credential.get_token(AZURE_SCOPE).token)
        except self._errors.ClientAuthenticationError as exc:
            raise CredentialsMissing(f"{exc.message}; {AZURE_HELP}") from exc
        except self._errors.AzureError as exc:
            raise Unavailable(f"no answer to the request for a token: {exc}") from exc


def _extra(name: str, extra: str) -> ModuleType:
    """Import a module of an optional dependency. Raises ConfigError that names the extra."""
    try:
        return importlib.import_module(name)
    except ImportError as exc:
        raise ConfigError(f"{exc}: {extra_command(extra)}") from exc
