"""Opens the store of a gs:// or az:// source, with the credentials that the environment names."""

import base64
import binascii
from collections.abc import Mapping
from urllib.parse import urlsplit

from fusecache.model.errors import ConfigError
from fusecache.remote.clouds.authorization import (
    AzureTokens,
    GoogleTokens,
    sign_by_shared_access,
    sign_by_shared_key,
    sign_by_token,
)
from fusecache.remote.clouds.azure import AzureStore, common_headers
from fusecache.remote.clouds.gcs import GcsStore
from fusecache.remote.endpoints import Endpoint, StoreKind, Transport, is_address
from fusecache.remote.http.signed_requests import SignedHttp, Site
from fusecache.remote.http.tls import trust
from fusecache.remote.protocol.signing import Sign, send_unsigned

AZURE_KEY_VARIABLES = ("AZURE_STORAGE_ACCOUNT_KEY", "AZURE_STORAGE_KEY")
AZURE_SAS_VARIABLES = ("AZURE_STORAGE_SAS_TOKEN", "AZURE_STORAGE_SAS_KEY")


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
