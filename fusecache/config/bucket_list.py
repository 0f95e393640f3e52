"""The buckets of one data set, with their keys, in one environment variable such as `R2_DATASET_BUCKET_LIST`. Pure.

It is JSON: a list of buckets, or an object from name to bucket. A bucket is
`{"account_id": …, "name": …, "credentials": {"read": {"access_key_id": …, "secret_access_key": …}, "write": …}}`. With
`endpoint_url` instead of `account_id` it lies elsewhere than on R2. Other fields are ignored.
"""

import json
from dataclasses import dataclass
from typing import Any

from fusecache.config.values import as_url
from fusecache.model.errors import ConfigError
from fusecache.remote.endpoints import Credentials, r2_url


@dataclass(frozen=True, slots=True)
class ListedBucket:
    """A bucket, and the keys for reading and writing it. None: the mount's own; no keys for writing, as for reading."""

    url: str
    bucket: str
    read_keys: Credentials | None = None
    write_keys: Credentials | None = None


def bucket_list(text: str, variable: str) -> tuple[ListedBucket, ...]:
    """Return the buckets of a list in JSON. variable: where it comes from. Raises ConfigError, without secrets."""
    try:
        value = json.loads(text)
    except ValueError as exc:
        raise ConfigError(f"{variable} is not valid JSON: {exc}") from None
    if isinstance(value, dict):
        found = tuple(_bucket(row, f"{variable}, {name!r}", name) for name, row in value.items())
    elif isinstance(value, list):
        found = tuple(_bucket(row, f"{variable}, bucket {number}") for number, row in enumerate(value, 1))
    else:
        raise ConfigError(
            f"{variable}: allowed is a list of buckets, or an object from name to bucket, in JSON"
        )
    if not found:
        raise ConfigError(f"{variable} lists no bucket; add one, or unset the variable")
    return found


def _bucket(row: Any, label: str, name: str = "") -> ListedBucket:
    if not isinstance(row, dict):
        raise ConfigError(f"{label}: allowed is an object with account_id, name and credentials")
    texts = {
        field: _text(row.get(field), f"{label}: {field}")
        for field in ("account_id", "endpoint_url", "bucket_name", "name")
    }
    bucket = texts["bucket_name"] or texts["name"] or name
    if not bucket:
        raise ConfigError(f"{label}: name is missing; add the bucket's name")
    url = _url(texts["endpoint_url"], texts["account_id"], f"{label}: endpoint_url", f"{label}: account_id")
    credentials = row.get("credentials") or {}
    if not isinstance(credentials, dict):
        raise ConfigError(f'{label}: credentials: allowed is an object with "read" and perhaps "write"')
    read, write = (_keys(credentials.get(kind), f"{label}: credentials.{kind}") for kind in ("read", "write"))
    return ListedBucket(url, bucket, read, write)


def _keys(value: Any, label: str) -> Credentials | None:
    if value is None:
        return None
    if not isinstance(value, dict):
        raise ConfigError(f"{label}: allowed is an object with access_key_id and secret_access_key")
    names = ("access_key_id", "secret_access_key")
    access, secret = (_text(value.get(name), f"{label}.{name}") for name in names)
    for name, text in zip(names, (access, secret), strict=True):
        if not text:
            raise ConfigError(f"{label}.{name} is missing; add it")
    return Credentials(access, secret)


def _text(value: Any, label: str) -> str:
    if value is not None and not isinstance(value, str):
        raise ConfigError(f"{label}: allowed is a string")  # the value may be a secret
    return value or ""


def _url(url: str, account: str, url_label: str, account_label: str) -> str:
    if url:
        try:
            return as_url(url)
        except ValueError as exc:
            raise ConfigError(f"{url_label} = {url!r}: allowed is {exc}") from None
    if not account:
        raise ConfigError(f"{account_label} is missing; add it, or {url_label.rpartition(': ')[2]}")
    return r2_url(account, label=account_label)
