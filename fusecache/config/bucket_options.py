"""Where the objects of a mount lie: in one bucket, or in several (`[[bucket]]` tables, --bucket). Pure.

Each of several buckets has the options of the mount, except for what its table says.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import Any
from urllib.parse import urlsplit

from fusecache.config.endpoint_options import (
    WRITE_KEYS,
    family_endpoints,
    key_family,
    parse_table,
    resolve_endpoints,
    resolve_family,
)
from fusecache.config.option_groups import BucketOptions
from fusecache.config.values import as_prefix
from fusecache.model.errors import ConfigError
from fusecache.remote.endpoints import StoreKind, choose_endpoint

TABLE_KEYS = {item.name: item for item in dataclasses.fields(BucketOptions) if item.metadata}
# What says by which keys a bucket is reached. A bucket that has one of these has none of the mount's.
_KEYS = ("profile", "credentials_file", "credentials_from")
_S3_KEYS = ("region", "write_profile", *_KEYS)


def resolve_places(
    values: Mapping[str, Any],
    content: Mapping[str, object],
    flags: Sequence[str],
    environment: Mapping[str, str],
    *,
    label: str,
) -> dict[str, Any]:
    """Return the options of a mount that follow from its tables and families of variables.

    values: the parsed options by name. content: of the file, with its tables. flags: NAME=SOURCE of each --bucket.
    label: where the tables come from. Raises ConfigError.
    """
    tables = content.get("endpoint")
    buckets = _several(values, content.get("bucket"), flags, environment, f"{label}: [[bucket]]")
    if buckets:
        if tables is not None:
            raise ConfigError(
                f"{label}: [[endpoint]] beside [[bucket]]: list a bucket's endpoints in a variable X_BUCKET_LIST, and "
                'set credentials_from = "X" in its table'
            )
        return {"source": f"buckets:{','.join(each.name for each in buckets)}", "buckets": buckets}
    found: dict[str, Any] = {}
    if families := values.get("credentials_from"):
        found = resolve_family(values, families[0], environment)
    if "source" not in (known := {**values, **found}):
        return found
    if StoreKind.of(known["source"]) is StoreKind.S3:
        return found | resolve_endpoints(known, tables, environment, label=f"{label}: [[endpoint]]")
    if tables is not None:
        raise ConfigError(
            f"{label}: [[endpoint]]: only for s3:// sources; remove these tables to mount {known['source']}"
        )
    return found


def _several(
    values: Mapping[str, Any],
    tables: object,
    flags: Sequence[str],
    environment: Mapping[str, str],
    label: str,
) -> tuple[BucketOptions, ...]:
    """Return the buckets of a mount, in the order of their names; none if it is a mount of one bucket."""
    rows = _tables(tables, label)
    families = values.get("credentials_from", ())
    given = [("--bucket", "source", text) for text in flags]
    given += [("credentials_from", "credentials_from", text) for text in families]
    for flag, key, text in given:
        name, equals, value = text.partition("=")
        if equals:
            row = parse_table({"name": name, key: value}, TABLE_KEYS, f"{flag} {text}")
            rows.setdefault(name, {}).update(row)
        elif key == "source" or rows or len(families) > 1:
            raise ConfigError(f"{flag} {text}: write NAME={text}; NAME is the bucket's folder in the mount")
    if rows and "source" in values:
        raise ConfigError(
            f"source = {values['source']}: a mount has one source, or several buckets; add this one as a [[bucket]] "
            "table, or as --bucket NAME=SOURCE"
        )
    found = [_bucket(rows[name], values, environment) for name in sorted(rows)]
    for one, other in combinations(found, 2):
        _check_apart(one, other, values, environment)
    return tuple(found)


def _tables(tables: object, label: str) -> dict[str, dict[str, Any]]:
    """Return the values of each table by its name."""
    if tables is not None and not (
        isinstance(tables, list) and tables and all(isinstance(table, dict) for table in tables)
    ):
        raise ConfigError(f"{label}: allowed are tables [[bucket]], each with a name and a source")
    rows: dict[str, dict[str, Any]] = {}
    for number, table in enumerate(tables if isinstance(tables, list) else (), 1):
        row = parse_table(table, TABLE_KEYS, f"{label} {number}")
        if "name" not in row:
            raise ConfigError(
                f'{label} {number}: name is missing; add name = "…", the bucket\'s folder in the mount'
            )
        if row["name"] in rows:
            raise ConfigError(
                f"{label}: two buckets have the name {row['name']!r}; give one of them another name"
            )
        rows[row["name"]] = row
    return rows


def _bucket(
    row: Mapping[str, Any], values: Mapping[str, Any], environment: Mapping[str, str]
) -> BucketOptions:
    """Return a bucket with its keys, and with the mount's options where it has none of its own."""
    label, family = f"bucket {row['name']}", row.get("credentials_from")
    changes: dict[str, Any] = {}
    inherited: tuple[str, ...]
    if family is not None:
        changes = _of_family(row, family, values, environment, label)
    elif "source" not in row:
        raise ConfigError(f'{label}: source is missing; add source = "s3://…", or credentials_from')
    source = row.get("source") or changes["source"]
    if StoreKind.of(source) is StoreKind.S3:
        inherited = () if "endpoint_url" in {**row, **changes} else ("endpoint_url", "region")
        if not any(key in row for key in _KEYS):
            inherited = (*inherited, "profile", "credentials_file", "write_profile")
        changes = {**{key: values[key] for key in inherited if values.get(key)}, **changes}
    elif foreign := [key for key in _S3_KEYS if key in row]:
        raise ConfigError(
            f"{label}: {', '.join(foreign)}: only for s3:// sources; remove it to mount {source}"
        )
    changes["read_only"] = bool(row.get("read_only") or values.get("read_only"))
    return BucketOptions(**{**changes, **row, "source": source, "read_only": changes["read_only"]})


def _of_family(
    row: Mapping[str, Any],
    family: str,
    values: Mapping[str, Any],
    environment: Mapping[str, str],
    label: str,
) -> dict[str, Any]:
    """Return source, URL and endpoints of a family of variables. Raises ConfigError that names the bucket."""
    given: dict[str, Any] = {}
    if "source" in row:
        bucket, _, prefix = row["source"].partition("://")[2].partition("/")
        given = {"prefix": as_prefix(prefix)}
        if not environment.get(f"{family}_BUCKET_LIST"):
            given["bucket"] = bucket
    if "endpoint_url" in row:
        given["url"] = row["endpoint_url"]
    try:
        endpoints = tuple(family_endpoints(family, given, environment, needs_bucket=True))
        missing = key_family(family, environment).missing
    except ConfigError as exc:
        raise ConfigError(f"{label}: {exc}") from exc
    missing = tuple(name for name in missing if name.endswith(WRITE_KEYS))
    is_read_only = row.get("read_only") or values.get("read_only")
    if missing and not is_read_only and all(each.write_keys is None for each in endpoints[:1]):
        raise ConfigError(
            f"{label}: credentials_from = {family!r}: not set are {', '.join(missing)}; set them, or read_only = true"
        )
    endpoints = tuple(
        dataclasses.replace(each, prefix=each.prefix or "", credentials_from=family) for each in endpoints
    )
    return {"source": endpoints[0].source, "endpoint_url": endpoints[0].url, "endpoints": endpoints}


def _check_apart(
    one: BucketOptions, other: BucketOptions, values: Mapping[str, Any], environment: Mapping[str, str]
) -> None:
    """Raise ConfigError if two buckets show the same objects."""
    (bucket, prefix), (other_bucket, other_prefix) = _place(one, environment), _place(other, environment)
    if bucket != other_bucket:
        return
    names = f"buckets {one.name} and {other.name}"
    if prefix == other_prefix:
        raise ConfigError(f"{names} have the same source {one.source}; remove one of them")
    if prefix.startswith(other_prefix) or other_prefix.startswith(prefix):
        raise ConfigError(
            f"{names}: {one.source} and {other.source} lie one inside the other, so a change in one would show late in "
            "the other; mount the outer one alone, or two prefixes that lie apart"
        )


def _place(bucket: BucketOptions, environment: Mapping[str, str]) -> tuple[tuple[str, str], str]:
    """Return endpoint and bucket, and the prefix in it."""
    endpoint = choose_endpoint(environment, source=bucket.source, endpoint_url=bucket.endpoint_url)
    name, _, prefix = bucket.source.partition("://")[2].partition("/")
    url = urlsplit(endpoint.url or "")
    port = url.port or {"http": 80, "https": 443}.get(url.scheme)
    return (f"{url.scheme}://{url.hostname}:{port}", f"{endpoint.kind.value}://{name}"), as_prefix(prefix)
