"""What commands share: a mount's options, the flags that name a bucket, what mounts of this node need of it."""

import argparse
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from fusecache.config.options import FIELDS, MountOptions, load_mounts
from fusecache.config.values import as_source
from fusecache.model.errors import ConfigError, FusecacheError, MountError
from fusecache.model.format_text import printable
from fusecache.mount.control_client import command
from fusecache.mount.launch import resolve_in_mount
from fusecache.mount.mount_table import our_entries

SCHEME = "s3://"
_FLAGS = (
    ("--endpoint-url", str, "URL of the S3 endpoint"),
    ("--region", str, "region of the bucket"),
    ("--profile", str, "profile in ~/.aws with the credentials"),
    ("--credentials-file", Path, "file with the keys"),
)


def config_path_of(arguments: argparse.Namespace) -> Path | None:
    """Return the configuration file that a command line or the environment names."""
    named = arguments.config or os.environ.get("FUSECACHE_CONFIG")
    return Path(named) if named else None


def mounts_of(
    flags: argparse.Namespace | Mapping[str, object], config: Path | None, **more: Any
) -> dict[str, MountOptions]:
    """Return the options of each bucket's mount as `load_mounts` does, for the user of this process."""
    if isinstance(flags, argparse.Namespace):
        flags = {name: getattr(flags, name, None) for name in FIELDS}
    return load_mounts(flags, os.environ, config_path=config, user_id=os.geteuid(), **more)


def take_mountpoint(arguments: argparse.Namespace) -> None:
    """A single word of `mount` or `run` that is no URL is the mountpoint: options say what is mounted."""
    if arguments.mountpoint is None and "://" not in (arguments.source or "://"):
        arguments.source, arguments.mountpoint = None, arguments.source


def add_source_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags that say how a bucket is reached."""
    for flag, kind, text in _FLAGS:
        metavar = flag.rsplit("-", 1)[-1].upper()
        parser.add_argument(flag, type=kind, metavar=metavar, help=f"for SOURCE: {text}")


def split_source(text: str) -> tuple[str, str]:
    """Return the bucket and prefix of a source; the prefix as written. Raises ConfigError."""
    if text.startswith(("gs://", "az://")):
        raise ConfigError(
            f"{text}: this command knows s3:// only; use the provider's own tool. `fusecache uploads` takes a mount of "
            f"{text[:5]}, too"
        )
    try:
        bucket, _, prefix = as_source(text).removeprefix(SCHEME).partition("/")
    except ValueError as exc:
        raise ConfigError(f"{text!r}: allowed is {exc}") from None
    return bucket, prefix


def ask_mounts(
    bucket: str, prefix: str, request: Mapping[str, Any], *, is_needed: bool
) -> Iterator[dict[str, Any]]:
    """Yield the answer of each mount of this node that has, or may have, keys with a prefix in a bucket of this name.

    is_needed: raise MountError if a mount does not answer; else leave it out.
    """
    devices = set()
    for entry in our_entries():
        if entry.device in devices or not _may_have(entry.source, bucket, prefix):
            continue
        devices.add(entry.device)
        try:
            mount, _ = resolve_in_mount(entry.point)
            row = command(mount, {**request, "bucket": bucket})
        except (FusecacheError, OSError) as exc:
            if is_needed and entry in our_entries():  # else it was unmounted in the meantime
                raise MountError(
                    f"the mount at {entry.point} does not tell what it needs, so nothing is removed: {exc}; unmount "
                    f"it, or run this command as its user (uid {os.geteuid()} asks now)"
                ) from exc
            continue
        yield row


def _may_have(source: str, bucket: str, prefix: str) -> bool:
    """Return whether a mount of `source`, as the mount table has it, may have keys with this prefix in this bucket."""
    prefix = printable(prefix)
    mounted_bucket, _, mounted = source.removeprefix(SCHEME).partition("/")
    below = f"{mounted.strip('/')}/".removeprefix("/")
    return mounted_bucket == bucket and (below.startswith(prefix) or prefix.startswith(below))
