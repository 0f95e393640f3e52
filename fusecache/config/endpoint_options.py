"""The endpoints of a mount's data set: `[[endpoint]]` tables of the file, or a bucket list in the environment. Pure.

The mount's own source at its endpoint is the first endpoint. Without an endpoint URL, the first table takes its place.

The buckets of one data set, with their keys, in one environment variable such as `R2_DATASET_BUCKET_LIST`. Pure.

It is JSON: a list of buckets, or an object from name to bucket. A bucket is
`{"account_id": …, "name": …, "credentials": {"read": {"access_key_id": …, "secret_access_key": …}, "write": …}}`. With
`endpoint_url` instead of `account_id` it lies elsewhere than on R2. Other fields are ignored.

Key families: the variables of one bucket and its keys, which begin with the same name.

`R2_DATASET_BUCKET_NAME`, `R2_DATASET_READ_ACCESS_KEY_ID` and others are the family `R2_DATASET`. No I/O.
"""

import dataclasses
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from fusecache.config.option_groups import EndpointOptions
from fusecache.config.values import as_prefix, as_url
from fusecache.model.errors import ConfigError
from fusecache.model.format_text import nearest_text
from fusecache.remote.endpoints import Credentials, choose_endpoint, r2_url


@dataclass(frozen=True, slots=True)
class KeyedBucket:
    """A bucket, and the keys for reading and writing it. None: the mount's own; no keys for writing, as for reading.

    missing: the variables of a family that are not set or empty. The values of these are "" or None. Of ENDPOINT_URL
    and ACCOUNT_ID one is enough. Without both, both are missing.
    """

    url: str
    bucket: str
    read_keys: Credentials | None = None
    write_keys: Credentials | None = None
    missing: tuple[str, ...] = ()


def bucket_list(text: str, variable: str) -> tuple[KeyedBucket, ...]:
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


def _bucket(row: Any, label: str, name: str = "") -> KeyedBucket:
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
    return KeyedBucket(url, bucket, read, write)


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


BUCKET_NAME, ACCOUNT_ID, ENDPOINT_URL = "BUCKET_NAME", "ACCOUNT_ID", "ENDPOINT_URL"
READ_KEYS = ("READ_ACCESS_KEY_ID", "READ_SECRET_ACCESS_KEY")
WRITE_KEYS = ("WRITE_ACCESS_KEY_ID", "WRITE_SECRET_ACCESS_KEY")


def family_names(environment: Mapping[str, str]) -> list[str]:
    """Return the families of the environment that have a bucket and a key, such as R2_DATASET, sorted."""
    ends = f"_{BUCKET_NAME}"
    names = [
        each.removesuffix(ends)
        for each, value in environment.items()
        if each.endswith(ends) and value.strip()
    ]
    keys = (READ_KEYS[0], WRITE_KEYS[0])
    return sorted(name for name in names if name and any(environment.get(f"{name}_{each}") for each in keys))


def key_family(name: str, environment: Mapping[str, str]) -> KeyedBucket:
    """Return the family `name` of the environment. Raises ConfigError for a malformed URL or account id."""
    values = {
        each: environment.get(f"{name}_{each}", "").strip()
        for each in (BUCKET_NAME, ACCOUNT_ID, ENDPOINT_URL, *READ_KEYS, *WRITE_KEYS)
    }
    missing = [each for each, value in values.items() if not value]
    if len({ACCOUNT_ID, ENDPOINT_URL} & set(missing)) == 1:
        missing = [each for each in missing if each not in (ACCOUNT_ID, ENDPOINT_URL)]
    url, account = values[ENDPOINT_URL], values[ACCOUNT_ID]
    return KeyedBucket(
        _url(url, account, f"{name}_{ENDPOINT_URL}", f"{name}_{ACCOUNT_ID}") if url or account else "",
        values[BUCKET_NAME],
        _credentials(values, READ_KEYS),
        _credentials(values, WRITE_KEYS),
        tuple(f"{name}_{each}" for each in missing),
    )


def _credentials(values: Mapping[str, str], names: tuple[str, str]) -> Credentials | None:
    access_key, secret_key = (values[each] for each in names)
    return Credentials(access_key, secret_key) if access_key and secret_key else None


TABLE_KEYS = {item.name: item for item in dataclasses.fields(EndpointOptions) if item.metadata}


def own_endpoint(values: Mapping[str, Any], url: str | None) -> EndpointOptions:
    """Return the endpoint that a mount's own options describe. values: by name, with its source."""
    bucket, _, prefix = values["source"].removeprefix("s3://").partition("/")
    return EndpointOptions(
        url=url or "",
        bucket=bucket,
        prefix=as_prefix(prefix),
        region=values.get("region"),
        profile=values.get("profile"),
        credentials_file=values.get("credentials_file"),
    )


def resolve_family(values: Mapping[str, Any], family: str, environment: Mapping[str, str]) -> dict[str, Any]:
    """Return the options of a mount of one bucket that a family of variables names. Raises ConfigError.

    values: the mount's parsed options by name; its source, if it has one, is in the family's bucket.
    """
    given: dict[str, Any] = {}
    if "source" in values:
        bucket, _, prefix = values["source"].partition("://")[2].partition("/")
        given = {"bucket": bucket, "prefix": as_prefix(prefix)}
    if "endpoint_url" in values:
        given["url"] = values["endpoint_url"]
    if environment.get(f"{family}_BUCKET_LIST"):
        given.pop("bucket", None)
    first, *others = family_endpoints(family, given, environment, needs_bucket=True)
    first = dataclasses.replace(first, prefix=first.prefix or "", credentials_from=family)
    # Several endpoints come from `resolve_endpoints`.
    endpoints = {} if others else {"endpoints": (first,)}
    return {"source": first.source, "endpoint_url": first.url, **endpoints}


def resolve_endpoints(
    values: Mapping[str, Any], tables: object, environment: Mapping[str, str], *, label: str
) -> dict[str, Any]:
    """Return the options of a mount that follow from its endpoints; none if it names no other than its own.

    They are `endpoints`, the primary first, and the primary's own options.
    values: the mount's parsed options by name, with its source. tables: the value of `endpoint` in the file, or None.
    label: where it comes from. Raises ConfigError.
    """
    own = own_endpoint(values, choose_endpoint(environment, endpoint_url=values.get("endpoint_url")).url)
    places: dict[str, EndpointOptions] = {}
    for each in _listed(tables, values, environment, label):
        known = _with_defaults(each, own)
        if known.place in places:
            raise ConfigError(f"{label}: two endpoints are the same, {known.place}; remove one of them")
        places[known.place] = known
    if not places or ("endpoints" in values and tables is None):
        return {}
    if own.url:
        if list(places) == [own.place]:
            raise ConfigError(
                f"{label}: {own.place} is the mount's own endpoint; add another one, or remove this table"
            )
        # A table for the mount's own endpoint says what is special about it.
        places = {own.place: own, **places}
    if len(primaries := [each.place for each in places.values() if each.primary]) > 1:
        raise ConfigError(
            f"{label}: two endpoints are primary, {' and '.join(primaries)}; only one can take the writes"
        )
    endpoints = sorted(places.values(), key=lambda each: not each.primary)
    first = endpoints[0]
    primary = {
        "source": first.source,
        "endpoint_url": first.url,
        "region": first.region,
        "profile": first.profile,
        "credentials_file": first.credentials_file,
    }
    return {"endpoints": tuple(endpoints), **({} if first.place == own.place else primary)}


def _listed(
    tables: object, values: Mapping[str, Any], environment: Mapping[str, str], label: str
) -> Iterator[EndpointOptions]:
    """Yield the endpoints of the tables, and of the bucket list that the mount's own keys come with."""
    for family in values.get("credentials_from", ()):
        if environment.get(f"{family}_BUCKET_LIST"):
            yield from family_endpoints(family, {}, environment)
    if tables is None:
        return
    if not isinstance(tables, list) or not all(isinstance(table, dict) for table in tables):
        raise ConfigError(f"{label}: allowed are tables [[endpoint]], each with a url")
    for number, table in enumerate(tables, 1):
        parsed = parse_table(table, TABLE_KEYS, f"{label} {number}")
        if "credentials_from" in parsed:
            yield from family_endpoints(parsed["credentials_from"], parsed, environment)
        elif "url" not in parsed:
            raise ConfigError(f'{label} {number}: url is missing; add url = "https://…"')
        else:
            yield EndpointOptions(**parsed)


def parse_table(
    table: Mapping[str, object], known: Mapping[str, "dataclasses.Field[Any]"], label: str
) -> dict[str, Any]:
    """Return the values of a table of the file. known: the keys that it may have. Raises ConfigError."""
    parsed: dict[str, Any] = {}
    for key, value in table.items():
        if key not in known:
            hint = nearest_text(key, tuple(known)) or f": known are {', '.join(known)}"
            raise ConfigError(f"{label}: unknown key {key!r}{hint}")
        try:
            parsed[key] = known[key].metadata["parse"](value)
        except ValueError as exc:
            raise ConfigError(f"{label}: {key} = {value!r}: allowed is {exc}") from None
    return parsed


def family_endpoints(
    family: str, parsed: Mapping[str, Any], environment: Mapping[str, str], *, needs_bucket: bool = False
) -> Iterator[EndpointOptions]:
    """Yield the bucket of a family of variables, or those of its list. parsed: what a table says besides.

    needs_bucket: the bucket's name must come from the family, unless `parsed` has it.
    Raises ConfigError for variables that are missing.
    """
    variable = f"{family}_BUCKET_LIST"
    text = environment.get(variable)
    for each in bucket_list(text, variable) if text else [_only_bucket(family, environment)]:
        if needs_bucket and not (parsed.get("bucket") or each.bucket):
            raise ConfigError(f"credentials_from = {family!r}: not set are {family}_{BUCKET_NAME}; set it")
        facts = {name: getattr(each, name) for name in ("url", "bucket", "read_keys", "write_keys")}
        yield EndpointOptions(**{**facts, **parsed})


def _only_bucket(family: str, environment: Mapping[str, str]) -> KeyedBucket:
    found = key_family(family, environment)
    if not found.url or found.read_keys is None:
        needed = [name for name in found.missing if not name.endswith((BUCKET_NAME, *WRITE_KEYS))]
        raise ConfigError(
            f"credentials_from = {family!r}: not set are {', '.join(needed)}; set them, or {family}_BUCKET_LIST"
        )
    return found


def _with_defaults(each: EndpointOptions, own: EndpointOptions) -> EndpointOptions:
    """Return an endpoint with the mount's own values where it has none."""
    changes: dict[str, Any] = {
        "bucket": each.bucket or own.bucket,
        "prefix": own.prefix if each.prefix is None else each.prefix,
        # R2 has a region of its own.
        "region": each.region or (None if choose_endpoint({}, endpoint_url=each.url).is_r2 else own.region),
    }
    if not (each.profile or each.credentials_file or each.read_keys):
        changes |= {"profile": own.profile, "credentials_file": own.credentials_file}
    return dataclasses.replace(each, **changes)
