"""`fusecache uploads`: lists unfinished multipart uploads, and aborts old ones."""

import argparse
import json
import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from fusecache.cli.say import print_line
from fusecache.config.values import as_source
from fusecache.model.errors import ConfigError, FusecacheError, MountError
from fusecache.model.format_text import count_text, seconds_text
from fusecache.mount.control_client import request_stream
from fusecache.mount.launch import resolve_in_mount
from fusecache.mount.mount_table import our_entries

# Below an hour a difference of clocks, or an upload that a mount is just beginning, could count as left over.
SHORTEST_SECONDS = 3600.0


def uploads(arguments: argparse.Namespace, _: Sequence[str]) -> int:
    """List or abort unfinished uploads; return the exit status."""
    found = _in_bucket(arguments) if arguments.place.startswith("s3://") else _in_mount(arguments)
    if arguments.json:
        sys.stdout.write(json.dumps(found, indent=2) + "\n")
        return 0
    for each in found["uploads"]:
        state = (
            ": in use by a mount of this node" if each["in_use"] else ": aborted" if each["aborted"] else ""
        )
        print_line(f"{each['key']}  {seconds_text(each['age_seconds'])} old{state}")
    if found["count"] > len(found["uploads"]):
        print_line(f"and {count_text(found['count'] - len(found['uploads']), 'other upload')}")
    old = f"{found['old_count']} old enough to abort and not in use"
    print_line(f"{count_text(found['count'], 'unfinished upload')}, {old}" + _end_text(arguments, found))
    return 0


def _end_text(arguments: argparse.Namespace, found: Mapping[str, Any]) -> str:
    if not found["old_count"]:
        return ""
    if arguments.abort and arguments.yes:
        return f"; {found['aborted_count']} aborted"
    return "; nothing was aborted: add " + ("--yes" if arguments.abort else "--abort --yes")


def _in_mount(arguments: argparse.Namespace) -> dict[str, Any]:
    mount, inner = resolve_in_mount(arguments.place)
    request = {
        "command": "uploads",
        "paths": [inner],
        "older_than_seconds": arguments.older_than,
        "abort": arguments.abort and arguments.yes,
    }
    row = request_stream(mount, request)
    if row.get("result") != "ok":
        raise MountError(f"{mount.root}: {row.get('message') or row.get('result')}")
    found: dict[str, Any] = row["uploads"]
    return found


def _in_bucket(arguments: argparse.Namespace) -> dict[str, Any]:
    from fusecache.daemon.bucket_uploads import bucket_uploads  # other commands do not need boto3

    try:
        source = as_source(arguments.place)
    except ValueError as exc:
        raise ConfigError(f"{arguments.place!r}: allowed is {exc}") from None
    aborts = arguments.abort and arguments.yes
    return bucket_uploads(
        source,
        _in_use_here(source, is_needed=aborts),
        older_than_seconds=arguments.older_than,
        aborts=aborts,
        endpoint_url=arguments.endpoint_url,
        region=arguments.region,
        profile=arguments.profile,
        credentials_file=arguments.credentials_file,
    )


def _in_use_here(source: str, *, is_needed: bool) -> list[tuple[list[str], list[str]]]:
    """Return what each mount of this node on the same bucket needs: upload ids and keys.

    is_needed: raise MountError if a mount does not tell; else leave it out.
    """
    bucket = source.removeprefix("s3://").partition("/")[0]
    found = []
    for entry in our_entries():
        if entry.source.removeprefix("s3://").partition("/")[0] != bucket:
            continue
        try:
            mount, _ = resolve_in_mount(entry.point)
            row = request_stream(mount, {"command": "uploads-in-use"})
            if row.get("result") != "ok":
                raise MountError(f"{entry.point}: {row.get('message')}")
        except (FusecacheError, OSError) as exc:
            if is_needed:
                raise MountError(
                    f"nothing was aborted: the mount at {entry.point} does not tell which uploads it needs: {exc}; "
                    f"unmount it, or run this command as its user (uid {os.geteuid()} asks now)"
                ) from exc
            continue
        found.append((row["upload_ids"], row["keys"]))
    return found
