"""The options of a mount: one schema, three sources (a TOML file, the environment, flags), and their checks.

Flags override the environment, the environment the file, the file a profile, the profile the defaults.
Parsing reads only the configuration file, the environment mapping that the caller passes, and a disk's free space.

Invariants:
1. Every option is one field of `MountOptions` or of its group. File keys, variables and flags derive from its name
   alone, so no name occurs twice.
2. Every rejected value raises a ConfigError that names the key, the value and what is allowed.
"""

import argparse
import dataclasses
import hashlib
import json
import re
import shutil
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fusecache.config.bucket_options import bucket_tables, bucket_values, check_apart
from fusecache.config.endpoint_options import own_endpoint, resolve_endpoints, resolve_family
from fusecache.config.node_limits import SMALLEST_MEMORY_BYTES, default_memory
from fusecache.config.option_groups import (
    WHOLE_FILES,
    EndpointOptions,
    MonitoringOptions,
    RequestOptions,
    SessionOptions,
    WritebackOptions,
    option,
)
from fusecache.config.values import (
    Duration,
    as_flag,
    as_folder,
    as_id,
    as_names,
    as_octal,
    as_path,
    as_size_or_share,
    as_source,
    as_text,
    as_url,
    is_of_this_node,
    one_of,
    parse_size,
)
from fusecache.model.errors import ConfigError
from fusecache.model.format_text import nearest_text, size_text
from fusecache.model.objects import MIB
from fusecache.remote.endpoints import StoreKind, choose_endpoint

VARIABLE_PREFIX = "FUSECACHE_"
# Tables of the file, of which there may be several: [[bucket]], [[endpoint]].
TABLES = ("bucket", "endpoint")
# Variables with the prefix FUSECACHE_ that are not mount options.
OTHER_VARIABLES = re.compile(r"FUSECACHE_(CONFIG|SOCKET|TEST_.*|HINT_.*|LOADER_.*)")

SMALLEST_CACHE_BYTES = 64 * MIB
# Share of the disk's free space. The journal, the logs and other programs of the node need the rest.
DEFAULT_CACHE_SHARE = 0.8

# Placeholder of a flag's value in --help, by unit. Without a unit it derives from the option's name.
_METAVARS = {"bytes": "SIZE", "seconds": "DURATION", "octal": "BITS", "list": "NAME,..."}


@dataclass(frozen=True, slots=True, kw_only=True)
class MountOptions:
    """All options of a mount. `load_options` makes it, checks it and fills in the defaults."""

    source: str = option(
        as_source,
        "the bucket or prefix to mount, s3://BUCKET[/PREFIX], gs://BUCKET[/PREFIX] or az://CONTAINER[/PREFIX]",
    )
    mountpoint: Path = option(as_path, "an existing empty directory to mount on")  # noqa: RUF009  # a field
    endpoint_url: str | None = option(
        as_url,
        "URL of the endpoint",
        default=None,
        default_text="S3_ENDPOINT_URL, AWS_ENDPOINT_URL_S3, AWS_ENDPOINT_URL, R2_ACCOUNT_ID, else AWS; for gs:// and "
        "az:// Google and Azure",
    )
    region: str | None = option(
        as_text, "region of the bucket", default=None, default_text="auto for R2, else from the AWS chain"
    )
    profile: str | None = option(
        as_text, "profile in ~/.aws with the credentials", default=None, default_text="the AWS chain"
    )
    write_profile: str | None = option(
        as_text,
        "profile in ~/.aws for write requests, if they need other credentials",
        default=None,
        default_text="same as --profile",
    )
    credentials_file: Path | None = option(  # noqa: RUF009  # a field
        as_path,
        "file with the keys, read again when it changes: an AWS credentials file, whose sections are the profiles, or "
        "lines AWS_ACCESS_KEY_ID=…; only its owner may have access (chmod 600)",
        default=None,
        default_text="the AWS chain",
    )
    cache_dir: Path = option(  # noqa: RUF009  # a field
        as_path,
        "directory for cached data and for files that wait for upload",
        default_text="~/.cache/fusecache/…, for root /var/cache/fusecache/…",
    )
    cache_size: int = option(
        as_size_or_share,
        "disk space for cached data and files that wait for upload: 500GiB, or a share of the free space like 80%",
        unit="bytes",
        default_text="80% of the free space",
    )
    memory: int = option(
        parse_size,
        "memory for the buffers of reads in flight",
        unit="bytes",
        default_text="256 MiB, at most 1/8 of the memory of this node or control group",
    )
    read_only: bool = option(as_flag, "mount read-only: every change fails with EROFS", default=False)
    allow_other: bool = option(
        as_flag,
        "let other users access the mount; over its control socket they may only ask, wait and send hints",
        default=False,
    )
    uid: int | None = option(
        as_id, "user id that owns the files", default=None, default_text="the mountpoint's owner"
    )
    gid: int | None = option(
        as_id, "group id of the files", default=None, default_text="the mountpoint's group"
    )
    umask: int = option(
        as_octal, "permission bits to remove from files and directories", unit="octal", default=0o022
    )
    attribute_seconds: float = option(
        Duration(0, 3600),
        "how long cached names and sizes stay valid before the daemon asks the bucket again (TTL)",
        unit="seconds",
        default=1.0,
    )
    immutable: tuple[str, ...] = option(
        as_names,
        "names (globs, or prefixes ending in /) whose objects never change: the daemon looks them up once, as long as "
        "the kernel remembers them, and refuses new names below such a prefix",
        unit="list",
        default=(),
    )
    posix_metadata: bool = option(
        as_flag,
        "show the mode, time and (as root) owner that other nodes, rclone or s3fs stored with objects; costs one HEAD "
        "per object",
        default=False,
    )
    pin: tuple[str, ...] = option(
        as_names,
        "names (globs, or directories with all that is below them) whose cached data reads never evict, such as the "
        "newest checkpoint",
        unit="list",
        default=(),
    )
    whole_files: tuple[str, ...] = option(
        as_names,
        "weights of models: all of such a file is fetched once a program loads tensors of it, as of files that "
        "begin as safetensors or GGUF; your list replaces this one, an empty one turns it off",
        unit="list",
        default=WHOLE_FILES,
    )
    symlinks: str = option(
        one_of("inside", "all", "none"),
        "symlinks to follow: inside, only into the mount (a relative target, `..` only at its start); all; none. Other "
        "links are shown, and fail with EACCES",
        default="inside",
        metavar="inside|all|none",
    )
    session: SessionOptions
    writeback: WritebackOptions
    requests: RequestOptions
    monitoring: MonitoringOptions

    def own_endpoint(self, url: str | None) -> EndpointOptions:
        """Return the endpoint that the options of one bucket describe. url: of it, None for AWS."""
        return own_endpoint({name: getattr(self, name) for name in ("source", *_OF_ENDPOINT)}, url)

    @property
    def bucket(self) -> str:
        """The bucket's name."""
        return self.source.partition("://")[2].partition("/")[0]

    @property
    def kind(self) -> StoreKind:
        """The kind of the bucket."""
        return StoreKind.of(self.source)

    @property
    def prefix(self) -> str:
        """The key prefix of the mount: empty, or ending in `/`."""
        inner = self.source.partition("://")[2].partition("/")[2].rstrip("/")
        return f"{inner}/" if inner else ""


# Options that a status does not list: it shows them elsewhere, or only the owner of the mount may know them.
_NOT_SHOWN = frozenset(
    {
        "source",
        "mountpoint",
        "endpoint_url",
        "profile",
        "write_profile",
        "credentials_file",
        "http_token_file",
        "peers_key_file",
    }
)

# Options that other lines of `fusecache status` show.
_IN_OTHER_LINES = ("read_only", "fuse_library", "keep_mounted")

# Options of a mount that its own endpoint has.
_OF_ENDPOINT = ("region", "profile", "credentials_file")

# Options that only S3 knows.
_S3_OPTIONS = (
    "region",
    "profile",
    "write_profile",
    "credentials_file",
    "requester_pays",
    "sse",
    "storage_class",
)

# The groups by their field of `MountOptions`.
_GROUPS: dict[
    str, type[SessionOptions] | type[WritebackOptions] | type[RequestOptions] | type[MonitoringOptions]
] = {
    "session": SessionOptions,
    "writeback": WritebackOptions,
    "requests": RequestOptions,
    "monitoring": MonitoringOptions,
}
_GROUP_OF = {item.name: group for group, kind in _GROUPS.items() for item in dataclasses.fields(kind)}
# Every option by name. What has no parser follows from tables of the file.
FIELDS = {
    item.name: item
    for kind in (MountOptions, *_GROUPS.values())
    for item in dataclasses.fields(kind)
    if item.metadata
}

# The keys of a `[[bucket]]` table: a name, and every option of a mount of one bucket.
BUCKET_KEYS = {
    "name": option(
        as_folder, "name of the bucket's folder in the mount", default="", default_text="required"
    ),
    **{name: item for name, item in FIELDS.items() if name != "mountpoint"},
}

# The groups of `mount --help`, in the order in which a user meets them. What no group names is for experts.
HELP_GROUPS: dict[str, list[str]] = {
    "bucket and keys": [
        "endpoint_url", "region", "profile", "write_profile", "credentials_file", "credentials_from", "unsigned",
        "requester_pays",
    ],
    "cache": ["cache_dir", "cache_size", "pin", "whole_files", "immutable"],
    "writing": [
        "read_only", "order_last", "temp_names", "local_only", "delete_delay", "settle_seconds", "fsync", "conflict",
        "sse", "storage_class",
    ],
    "sharing": ["allow_other", "uid", "gid", "umask", "posix_metadata", "symlinks"],
    "operating": [
        "log_level", "log_format", "http_address", "http_token_file", "upload_rate", "download_rate",
        "start_without", "read_timeout", "drain_timeout",
    ],
    "other nodes": ["peers", "peers_key_file", "peer_address"],
}  # fmt: skip
HELP_GROUPS["expert"] = [name for name in FIELDS if not any(name in names for names in HELP_GROUPS.values())]

FLAG_VALUES_TEXT = (
    "SIZE: bytes, or like 500MiB, 50GiB, 500G. DURATION: seconds, or like 500ms, 90s, 10m, 2h, 1d. "
    "NAME,...: a comma-separated list; the flag can also be repeated."
)


def add_flags(parser: argparse.ArgumentParser) -> dict[str, argparse._ArgumentGroup]:
    """Add a flag for every option, except source and mountpoint, which are positional; return the groups of them."""
    groups = {title: parser.add_argument_group(title) for title in HELP_GROUPS}
    for title, group in groups.items():
        add_some_flags(group, HELP_GROUPS[title])
    return groups


def add_some_flags(parser: argparse._ActionsContainer, names: Iterable[str]) -> None:
    """Add a flag for each of these options."""
    for name in names:
        if name in ("source", "mountpoint"):
            continue
        item = FIELDS[name]
        flag = "--" + name.replace("_", "-")
        facts = item.metadata
        text = f"{facts['help']} [{facts['default_text'] or _default_text(item)}]".replace("%", "%%")
        metavar = facts["metavar"] or _METAVARS.get(facts["unit"]) or name.rsplit("_", 1)[-1].upper()
        if facts["parse"] is as_flag:
            parser.add_argument(
                flag, dest=name, action=argparse.BooleanOptionalAction, default=None, help=text
            )
        elif facts["parse"] is as_names:
            # A repeated flag adds to the list.
            parser.add_argument(
                flag, dest=name, metavar=metavar, action="extend", type=as_names, default=None, help=text
            )
        else:
            parser.add_argument(flag, dest=name, metavar=metavar, help=text)


def _default_text(item: dataclasses.Field[Any]) -> str:
    parse, unit = item.metadata["parse"], item.metadata["unit"]
    if isinstance(parse, Duration):
        return f"{item.default:g}s; {parse.range_text}"
    if parse is as_flag:
        return "yes" if item.default else "no"
    if isinstance(item.default, tuple):
        return ", ".join(item.default) or "none"
    return _shown(item.default, unit)


def shown_options(options: MountOptions) -> dict[str, Any]:
    """Return the options in force as plain values, for a status."""
    return {name: _plain(name, _value(options, name)) for name in FIELDS if name not in _NOT_SHOWN}


def changed_options(shown: Mapping[str, Any]) -> dict[str, Any]:
    """Return which of a status' options differ from their default.

    A value that the daemon determines at start, such as the cache size, counts as a default.
    """
    defaults = {
        name: _plain(name, item.default) for name, item in FIELDS.items() if name not in _IN_OTHER_LINES
    }
    unset = dataclasses.MISSING
    return {name: value for name, value in shown.items() if defaults.get(name, unset) not in (value, unset)}


def _value(options: MountOptions, name: str) -> Any:
    return getattr(getattr(options, _GROUP_OF[name]) if name in _GROUP_OF else options, name)


def _plain(name: str, value: object) -> object:
    if name == "sse" and isinstance(value, str):  # its kind: no key, and no name of a file
        return re.sub(r"^(aws:kms|customer):.*", r"\1", value)
    if isinstance(value, tuple):
        return list(value)
    if isinstance(value, Path):
        return str(value)
    return _shown(value, "octal") if FIELDS[name].metadata["unit"] == "octal" else value


def read_config(path: Path) -> str:
    """Return the text of a configuration file. Raises ConfigError."""
    try:
        return path.read_text(encoding="utf-8")
    except OSError as exc:
        raise ConfigError(f"cannot read the configuration file {path}: {exc.strerror}") from exc
    except UnicodeDecodeError as exc:
        raise ConfigError(f"{path} is not valid TOML: {exc}") from exc


def _parse_config(path: Path, text: str) -> dict[str, object]:
    """Return the values of a configuration file by key: options at its top level, and TABLES. Raises ConfigError."""
    try:
        content = tomllib.loads(text)
    except tomllib.TOMLDecodeError as exc:
        raise ConfigError(f"{path} is not valid TOML: {exc}") from exc
    known = (*FIELDS, *TABLES)
    for name in (each for each in content if each not in known):
        if isinstance(content[name], dict):
            raise ConfigError(
                f'{path}: [{name}] is a table; write the options at the top level of the file (source = "s3://…")'
            )
        raise ConfigError(f"{path}: unknown key {name!r}{_nearest(name, known)}")
    return content


def load_options(*given: Any, **named: Any) -> MountOptions:
    """Return the options of a mount of one bucket, as `load_mounts` does. Raises ConfigError for several."""
    mounts = load_mounts(*given, **named)
    if "" not in mounts:
        raise ConfigError("this is for one bucket: remove the [[bucket]] tables from the configuration")
    return mounts[""]


def load_mounts(
    flags: Mapping[str, object],
    environment: Mapping[str, str],
    *,
    config_path: Path | None = None,
    config_text: str | None = None,
    buckets: Sequence[str] = (),
    home: Path | None = None,
    user_id: int = 0,
    free_bytes: Callable[[Path], int] | None = None,
) -> dict[str, MountOptions]:
    """Merge flags, environment and file into the options of each bucket's mount, by the name of its folder.

    The only bucket of a mount has the name "".

    flags: by field name; None means not given. environment: all variables; those without the prefix are ignored.
    config_text: what counts instead of the file's content.
    buckets: NAME=SOURCE of each bucket that a flag names. home, user_id: of the user who mounts.
    free_bytes: returns the free bytes of a disk; tests pass their own.
    Raises ConfigError.
    """
    chosen: dict[str, tuple[object, str]] = {}
    content: dict[str, object] = {}
    if config_path is not None:
        text = read_config(config_path) if config_text is None else config_text
        content = _parse_config(config_path, text)
    chosen |= {
        name: (value, f"{config_path}: {name}") for name, value in content.items() if name not in TABLES
    }
    chosen |= {
        name: (value, VARIABLE_PREFIX + name.upper())
        for name, value in _read_environment(environment).items()
    }
    chosen |= {
        name: (value, name if name in ("source", "mountpoint") else "--" + name.replace("_", "-"))
        for name, value in flags.items()
        if value is not None
    }
    values: dict[str, Any] = {name: _parse(name, value, label) for name, (value, label) in chosen.items()}
    label = str(config_path or "the options")
    completion = _Completion(environment, home, user_id, free_bytes or free_bytes_at, label)
    rows = bucket_tables(values, content.get("bucket"), buckets, BUCKET_KEYS, label=f"{label}: [[bucket]]")
    endpoints = content.get("endpoint")
    if not rows:
        return {"": completion.of_one(values, endpoints)}
    if endpoints is not None:
        raise ConfigError(
            f"{label}: [[endpoint]] beside [[bucket]]: list a bucket's endpoints in a variable X_BUCKET_LIST, and "
            'set credentials_from = "X" in its table'
        )
    return completion.of_several(values, rows)


def top_of(mounts: Mapping[str, MountOptions]) -> Path:
    """Return what `mountpoint` was given as: the only mount's, or the folder of several. mounts: of `load_mounts`."""
    first = next(iter(mounts.values())).mountpoint
    return first if "" in mounts else first.parent


@dataclass(frozen=True, slots=True)
class _Completion:
    """Completes parsed values into the options of a mount, as `load_mounts` describes."""

    environment: Mapping[str, str]
    home: Path | None
    user_id: int
    free_bytes: Callable[[Path], int]
    label: str

    def of_several(
        self, values: dict[str, Any], rows: Mapping[str, dict[str, Any]]
    ) -> dict[str, MountOptions]:
        """Return the options of each bucket. rows: the values of the tables, by name."""
        _require(values, "mountpoint")
        # A bucket may be added later.
        source = f"buckets://buckets{values['mountpoint']}"
        values = {
            "cache_dir": self._cache_dir(source, ""),
            "cache_size": f"{DEFAULT_CACHE_SHARE:.0%}",
            **values,
        }
        found = {}
        for name in rows:
            try:
                own = bucket_values(
                    name,
                    rows,
                    values,
                    self.environment,
                    default_memory=max(default_memory(), SMALLEST_MEMORY_BYTES * len(rows)),
                    cache_bytes=self._cache_bytes,
                )
                found[name] = self.of_one(own, None)
            except ConfigError as exc:
                raise ConfigError(f"bucket {name}: {exc}") from exc
        check_apart(
            {name: (each.source, each.endpoint_url) for name, each in found.items()}, self.environment
        )
        return found

    def of_one(self, values: dict[str, Any], tables: object) -> MountOptions:
        """Return the options of one bucket. tables: [[endpoint]] of the file, or None."""
        values = values | self._places(values, tables)
        for name in ("source", "mountpoint"):
            _require(values, name)
        if "cache_dir" not in values:
            source, url = values["source"], values.get("endpoint_url")
            url = choose_endpoint(self.environment, source=source, endpoint_url=url).url
            values["cache_dir"] = self._cache_dir(source, url or "")
        chosen_size = values.get("cache_size", f"{DEFAULT_CACHE_SHARE:.0%}")
        values.setdefault("memory", default_memory())
        values["cache_size"] = self._cache_bytes(chosen_size, values["cache_dir"])
        groups: dict[str, Any] = {
            group: kind(
                **{name: values.pop(name) for name, of in _GROUP_OF.items() if of == group and name in values}
            )
            for group, kind in _GROUPS.items()
        }
        options = MountOptions(**values, **groups)
        _check_kind(options)
        _check_together(options, share=chosen_size if isinstance(chosen_size, str) else "")
        return options

    def _places(self, values: Mapping[str, Any], tables: object) -> dict[str, Any]:
        """Return the options that follow from a family of variables, and from tables of endpoints."""
        found: dict[str, Any] = {}
        if families := values.get("credentials_from"):
            found = resolve_family(values, families[0], self.environment)
        if "source" not in (known := {**values, **found}):
            return found
        if StoreKind.of(known["source"]) is StoreKind.S3:
            label = f"{self.label}: [[endpoint]]"
            return found | resolve_endpoints(known, tables, self.environment, label=label)
        if tables is not None:
            raise ConfigError(
                f"{self.label}: [[endpoint]]: only for s3:// sources; remove these tables to mount {known['source']}"
            )
        return found

    def _cache_dir(self, source: str, url: str) -> Path:
        return default_cache_dir(
            source, url, environment=self.environment, home=self.home or Path.home(), user_id=self.user_id
        )

    def _cache_bytes(self, value: int | str, cache_dir: Path) -> int:
        if isinstance(value, int):
            return value
        return int(self.free_bytes(cache_dir) * float(value.rstrip("%")) / 100)


def _require(values: Mapping[str, Any], name: str) -> None:
    if name not in values:
        raise ConfigError(
            f"{name} is missing: give {FIELDS[name].metadata['help']}, as an argument or in the configuration file"
        )


def _shown(value: object, unit: str) -> str:
    if isinstance(value, tuple):
        return ",".join(value)
    if unit == "octal":
        return f"{value:03o}"
    if unit == "bytes" and isinstance(value, int):
        return size_text(value).replace(".0 ", " ")
    return str(value)


def _parse(name: str, value: object, label: str) -> Any:
    try:
        return FIELDS[name].metadata["parse"](value)
    except ValueError as exc:
        raise ConfigError(f"{label} = {value!r}: allowed is {exc}") from None


def _read_environment(environment: Mapping[str, str]) -> dict[str, object]:
    values: dict[str, object] = {}
    for variable, value in environment.items():
        if not variable.startswith(VARIABLE_PREFIX) or OTHER_VARIABLES.fullmatch(variable):
            continue
        name = variable.removeprefix(VARIABLE_PREFIX).lower()
        if name not in FIELDS:
            known = [VARIABLE_PREFIX + each.upper() for each in FIELDS]
            raise ConfigError(f"unknown variable {variable}{_nearest(variable, known)}")
        values[name] = value
    return values


def _nearest(name: str, known: Sequence[str]) -> str:
    return nearest_text(name, known) or f": known are {', '.join(known)}"


def _check_kind(options: MountOptions) -> None:
    """Raise ConfigError for options of S3 at a bucket of another kind."""
    foreign = [name for name in _S3_OPTIONS if _value(options, name) != FIELDS[name].default]
    if options.kind is not StoreKind.S3 and foreign:
        raise ConfigError(
            f"{', '.join(foreign)}: only for s3:// sources; remove it to mount {options.source}"
        )


def _check_together(options: MountOptions, *, share: str) -> None:
    """Raise ConfigError if options contradict each other. share: the cache size as given in percent, else ""."""
    if options.memory < SMALLEST_MEMORY_BYTES:
        raise ConfigError(
            f"memory = {size_text(options.memory)}: allowed is {SMALLEST_MEMORY_BYTES // MIB} MiB or more for each "
            "bucket, so that a few buffers of each size fit"
        )
    floor = max(SMALLEST_CACHE_BYTES, options.memory)
    if options.cache_size < floor:
        size = f"cache_size = {size_text(options.cache_size)}"
        size += f" ({share} of the free space)" if share else ""
        ways = ["choose a larger cache_size"]
        if share:
            ways = [f"free space on the disk of {options.cache_dir}", "choose another cache_dir", *ways]
        if floor > SMALLEST_CACHE_BYTES:
            ways.append("choose a smaller memory")
        raise ConfigError(
            f"{size} is below the minimum of {size_text(floor)}, the larger of 64 MiB and "
            f"memory ({size_text(options.memory)}): {', or '.join(ways)}"
        )
    address = options.monitoring.http_address
    if address and not is_of_this_node(address) and options.monitoring.http_token_file is None:
        raise ConfigError(
            f"http_address = {address}: other machines can reach it: set http_token_file to a file with a token, or "
            "use 127.0.0.1 and `fusecache page`, which prints the command for ssh"
        )
    if options.requests.peers and options.requests.peers_key_file is None:
        raise ConfigError("peers: set peers_key_file too: a file with the key that all nodes have")
    if options.requests.peers and (options.requests.sse or "").startswith("customer:"):
        raise ConfigError(
            "peers: nodes send each other plain bytes, and sse = customer:… is for objects that no one else may read: "
            "remove one of the two"
        )
    if options.cache_dir == options.mountpoint or options.mountpoint in options.cache_dir.parents:
        raise ConfigError(
            f"cache_dir = {options.cache_dir} is inside the mountpoint {options.mountpoint}; choose another cache_dir"
        )


def default_cache_dir(
    source: str, endpoint: str, *, environment: Mapping[str, str], home: Path, user_id: int
) -> Path:
    """Return the cache directory of one source: stable for the same endpoint, bucket and prefix, and unique to them."""
    inner = source.partition("://")[2].rstrip("/")
    bucket = inner.partition("/")[0]
    digest = hashlib.sha256("\n".join((endpoint.rstrip("/"), inner)).encode()).hexdigest()[:12]
    if user_id == 0:
        base = Path("/var/cache/fusecache")
    else:
        base = Path(environment.get("XDG_CACHE_HOME") or home / ".cache") / "fusecache"
    return base / f"{bucket}-{digest}"


def free_bytes_at(path: Path) -> int:
    """Return the free bytes of a cache directory's disk, as recorded when the directory was made; else as of now.

    The recorded value keeps a limit in percent from shrinking while the cache fills. Raises ConfigError.
    """
    try:
        with suppress(FileNotFoundError, ValueError, TypeError, KeyError):
            return int(json.loads((path / "fusecache.json").read_text())["free_bytes"])
        while not path.exists():
            path = path.parent
        return shutil.disk_usage(path).free
    except OSError as exc:
        raise ConfigError(f"cache_dir = {path}: {exc.strerror}; choose another directory") from exc
