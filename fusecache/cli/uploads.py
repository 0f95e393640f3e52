"""`fusecache uploads`: lists unfinished multipart uploads, and aborts old ones."""

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from fusecache.cli.say import print_line
from fusecache.cli.sources import ask_mounts, split_source
from fusecache.model.format_text import count_text, seconds_text
from fusecache.mount.control_client import command
from fusecache.mount.launch import resolve_in_mount

# Below an hour a difference of clocks, or an upload that a mount is just beginning, could count as left over.
SHORTEST_SECONDS = 3600.0


def uploads(arguments: argparse.Namespace, _: Sequence[str]) -> int:
    """List or abort unfinished uploads; return the exit status."""
    found = _in_bucket(arguments) if "://" in arguments.place else _in_mount(arguments)
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
    needed = getattr(arguments, "confirmation", "--yes" if arguments.abort else "--abort --yes")
    return f"; nothing was aborted: add {needed}"


def _in_mount(arguments: argparse.Namespace) -> dict[str, Any]:
    mount, inner = resolve_in_mount(arguments.place)
    request = {
        "command": "uploads",
        "paths": [inner],
        "older_than_seconds": arguments.older_than,
        "abort": arguments.abort and arguments.yes,
    }
    found: dict[str, Any] = command(mount, request)["uploads"]
    return found


def _in_bucket(arguments: argparse.Namespace) -> dict[str, Any]:
    from fusecache.bucket.address import (  # other commands do not need boto3
        BucketKeys,
        bucket_uploads,
        place_of,
    )

    bucket, prefix = split_source(arguments.place)
    aborts = arguments.abort and arguments.yes
    rows = ask_mounts(bucket, prefix, {"command": "uploads-in-use"}, is_needed=aborts)
    return bucket_uploads(
        place_of(bucket, prefix, endpoint_url=arguments.endpoint_url, region=arguments.region),
        BucketKeys(credentials_file=arguments.credentials_file, profile=arguments.profile),
        prefix,
        [(row["upload_ids"], row["keys"]) for row in rows],
        older_than_seconds=arguments.older_than,
        aborts=aborts,
    )
