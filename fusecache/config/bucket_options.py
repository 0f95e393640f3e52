"""The buckets of a mount of several (`[[bucket]]` tables, --bucket), and which options each of them has. Pure.

Each bucket is mounted by itself: with the options of the mount, except for what its table says, and with its share of
what the mount may take.
"""

from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from fusecache.config.endpoint_options import WRITE_KEYS, key_family, parse_table
from fusecache.config.node_limits import default_movers
from fusecache.config.values import SLOWEST_RATE, as_prefix
from fusecache.model.errors import ConfigError
from fusecache.remote.endpoints import StoreKind, choose_endpoint

if TYPE_CHECKING:
    from dataclasses import Field

# What says by which keys a bucket is reached. A bucket that has one of these has none of the mount's.
_KEYS = ("profile", "credentials_file", "credentials_from")
_OF_S3 = ("endpoint_url", "region", "profile", "write_profile", "credentials_file")
# Options of the mount whose names begin with a bucket's folder, if they have a slash.
_NAMES = ("immutable", "pin", "local_only")
_RATES = ("upload_rate", "download_rate")

Values = Mapping[str, Any]


def bucket_tables(
    values: Values,
    tables: object,
    flags: Sequence[str],
    known: Mapping[str, "Field[Any]"],
    *,
    label: str,
) -> dict[str, dict[str, Any]]:
    """Return the parsed values of each table, in the order of the buckets' names; none if one bucket is mounted.

    values: the mount's options. flags: NAME=SOURCE of each --bucket. known: the keys of a table. label: of the tables.
    Raises ConfigError.
    """
    rows = _tables(tables, known, label)
    families = values.get("credentials_from", ())
    given = [("--bucket", "source", text) for text in flags]
    given += [("credentials_from", "credentials_from", text) for text in families]
    for flag, key, text in given:
        name, equals, value = text.partition("=")
        if equals:
            row = parse_table({"name": name, key: value}, known, f"{flag} {text}")
            rows.setdefault(name, {}).update(row)
        elif key == "source" or rows or len(families) > 1:
            raise ConfigError(f"{flag} {text}: write NAME={text}; NAME is the bucket's folder in the mount")
    if rows and "source" in values:
        raise ConfigError(
            f"source = {values['source']}: a mount has one source, or several buckets; add this one as a [[bucket]] "
            "table, or as --bucket NAME=SOURCE"
        )
    if rows and "http_address" in values:
        raise ConfigError(
            f"http_address = {values['http_address']}: each bucket has a daemon, and so a port, of its own: set "
            "http_address in the [[bucket]] tables"
        )
    return {name: rows[name] for name in sorted(rows)}


def _tables(tables: object, known: Mapping[str, "Field[Any]"], label: str) -> dict[str, dict[str, Any]]:
    """Return the values of each table by its name."""
    if tables is not None and not (
        isinstance(tables, list) and tables and all(isinstance(table, dict) for table in tables)
    ):
        raise ConfigError(f"{label}: allowed are tables [[bucket]], each with a name and a source")
    rows: dict[str, dict[str, Any]] = {}
    for number, table in enumerate(tables if isinstance(tables, list) else (), 1):
        row = parse_table(table, known, f"{label} {number}")
        if "name" not in row:
            raise ConfigError(
                f'{label} {number}: name is missing; add name = "…", the bucket\'s folder in the mount'
            )
        if len(row.get("credentials_from", ())) > 1:
            raise ConfigError(
                f"{label} {number}: credentials_from names one family: a bucket has keys of one"
            )
        if row["name"] in rows:
            raise ConfigError(
                f"{label}: two buckets have the name {row['name']!r}; give one of them another name"
            )
        rows[row["name"]] = row
    return rows


def bucket_values(
    name: str,
    rows: Mapping[str, Values],
    values: Values,
    environment: Mapping[str, str],
    *,
    default_memory: int,
    cache_bytes: Callable[[Any, Path], int],
) -> dict[str, Any]:
    """Return the options of the mount of one bucket. Raises ConfigError.

    rows: of all buckets, by name. values: the mount's, with `mountpoint` and `cache_dir`. cache_bytes: returns a size,
    or a share of the free space at a path, in bytes.
    """
    row = rows[name]
    found = {key: value for key, value in values.items() if key not in _not_inherited(name, row)}
    found |= {key: value for key, value in row.items() if key != "name"}
    found["mountpoint"] = values["mountpoint"] / name
    found["read_only"] = bool(row.get("read_only") or values.get("read_only"))
    if "cache_dir" not in row:
        found["cache_dir"] = values["cache_dir"] / name
        found["cache_size"] = row.get("cache_size") or _cache_share(
            found["cache_dir"], rows, values, cache_bytes
        )
    elif "cache_size" not in row:
        found.pop("cache_size", None)
    if "memory" not in row:
        found["memory"] = int(_share("memory", rows, values.get("memory", default_memory)))
    found.setdefault("movers", default_movers() // len(rows))
    for key in _RATES:
        if key in values and key not in row:
            found[key] = _share(key, rows, values[key])
            if found[key] < SLOWEST_RATE:
                raise ConfigError(f"{key}: its share is less than {SLOWEST_RATE // 1000**2}MB/s; raise {key}")
    for key in _NAMES:
        found[key] = (*_names_of(name, values.get(key, ())), *row.get(key, ()))
    _check_write_keys(found, environment)
    return found


def _not_inherited(name: str, row: Values) -> set[str]:
    """Return the options of the mount that do not hold for a bucket."""
    dropped = {"credentials_from"}
    if any(key in row for key in _KEYS):
        dropped |= {"profile", "credentials_file", "write_profile"}
    if "endpoint_url" in row or "credentials_from" in row:
        dropped |= {"endpoint_url", "region"}
    if "credentials_from" in row:
        return dropped
    if "source" not in row:
        raise ConfigError('source is missing; add source = "s3://…", or credentials_from')
    if StoreKind.of(row["source"]) is not StoreKind.S3:
        dropped |= set(_OF_S3)
    return dropped


def _cache_share(
    cache_dir: Path, rows: Mapping[str, Values], values: Values, cache_bytes: Callable[[Any, Path], int]
) -> int:
    """Return the part of the mount's cache that a table gets which names no size of its own."""
    inside = {name: row for name, row in rows.items() if "cache_dir" not in row}
    sizes = {
        name: {"cache_size": cache_bytes(row["cache_size"], cache_dir)} if "cache_size" in row else {}
        for name, row in inside.items()
    }
    return int(_share("cache_size", sizes, cache_bytes(values["cache_size"], cache_dir)))


def _share(key: str, rows: Mapping[str, Values], total: float) -> float:
    """Return the equal part of what the tables leave that have a value of their own. Raises ConfigError."""
    own: list[float] = [row[key] for row in rows.values() if key in row]
    if sum(own) >= total:
        raise ConfigError(f"{key}: the tables take all that the mount has; raise {key} of the mount")
    return (total - sum(own)) / (len(rows) - len(own))


def _names_of(name: str, patterns: Sequence[str]) -> list[str]:
    """Return the patterns of the mount that hold for a bucket. Those with a slash begin with a bucket's folder."""
    found = []
    for pattern in patterns:
        folder, slash, inner = pattern.partition("/")
        if not slash:
            found.append(pattern)
        elif fnmatchcase(name, folder):
            found.append(inner or "*")
    return found


def _check_write_keys(found: Values, environment: Mapping[str, str]) -> None:
    """Raise ConfigError if a bucket that is written lacks the variables of the keys for that."""
    for family in found.get("credentials_from", ()):
        if found["read_only"] or environment.get(f"{family}_BUCKET_LIST"):
            continue
        missing = [each for each in key_family(family, environment).missing if each.endswith(WRITE_KEYS)]
        if missing:
            raise ConfigError(
                f"credentials_from = {family!r}: not set are {', '.join(missing)}; set them, or read_only = true"
            )


def check_apart(sources: Mapping[str, tuple[str, str | None]], environment: Mapping[str, str]) -> None:
    """Raise ConfigError if two buckets show the same objects. sources: source and endpoint's URL of each."""
    for (one, (source, url)), (other, (other_source, other_url)) in combinations(sources.items(), 2):
        bucket, prefix = _place(source, url, environment)
        other_bucket, other_prefix = _place(other_source, other_url, environment)
        if bucket != other_bucket:
            continue
        names = f"buckets {one} and {other}"
        if prefix == other_prefix:
            raise ConfigError(f"{names} have the same source {source}; remove one of them")
        if prefix.startswith(other_prefix) or other_prefix.startswith(prefix):
            raise ConfigError(
                f"{names}: {source} and {other_source} lie one inside the other, so a change in one would show late in "
                "the other; mount the outer one alone, or two prefixes that lie apart"
            )


def _place(source: str, url: str | None, environment: Mapping[str, str]) -> tuple[tuple[str, str], str]:
    """Return endpoint and bucket, and the prefix in it."""
    endpoint = choose_endpoint(environment, source=source, endpoint_url=url)
    name, _, prefix = source.partition("://")[2].partition("/")
    parts = urlsplit(endpoint.url or "")
    port = parts.port or {"http": 80, "https": 443}.get(parts.scheme)
    return (f"{parts.scheme}://{parts.hostname}:{port}", f"{endpoint.kind.value}://{name}"), as_prefix(prefix)
