"""`fusecache warm`, `evict` and `check`: requests and messages. The daemon does the work on the disk cache."""

import argparse
import json
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fusecache.cli.say import print_line, say_error
from fusecache.model.errors import MountError
from fusecache.model.format_text import count_text, size_text
from fusecache.mount.bucket_folders import mounts_in
from fusecache.mount.control_client import Mount, ask, command, request_stream
from fusecache.mount.launch import mount_of_this_node, resolve_in_mount
from fusecache.mount.progress import StepView, show_check, show_warm_up, warm_text


def warm(arguments: argparse.Namespace, _: Sequence[str]) -> int:
    """Warm paths. Return the exit status: 0 everything is cached (without --wait: started), 1 not everything."""
    failed = False
    for mount, paths in _by_mount(arguments.paths).items():
        request = {"command": "warm", "paths": paths, "wait": arguments.wait}
        with StepView(sys.stderr, verb="warming") as view:
            row = request_stream(
                mount,
                request,
                on_report=lambda row: show_warm_up(view, row["warm"]) if arguments.wait else None,
            )
        status_command = f"`fusecache status {shlex.quote(str(mount.root))}`"
        job = row.get("warm")
        if job is None:
            raise MountError(f"{mount.root}: {row.get('message')}")
        for line in job["failures"]:
            say_error(line)
        if job["files_failed"] > len(job["failures"]):
            say_error(f"and {count_text(job['files_failed'] - len(job['failures']), 'other file')}")
        if row["result"] != "ok":
            say_error(f"not everything is cached: {row['message'] or warm_text(job)}")
            failed = True
        elif arguments.wait:
            print_line(
                f"{count_text(job['files_total'], 'file')}, {size_text(job['bytes_total'])}: all cached"
            )
        elif job["state"] == "counting":
            print_line(f"still counting files; the warm-up continues in the background, see {status_command}")
        else:
            print_line(f"{warm_text(job)}; the warm-up continues in the background, see {status_command}")
    return int(failed)


def evict(arguments: argparse.Namespace, _: Sequence[str]) -> int:
    """Evict paths from the disk cache; return the exit status."""
    freed = left = 0
    for mount, paths in _by_mount(arguments.paths).items():
        details = command(mount, {"command": "evict", "paths": paths})["evict"]
        freed += details["freed_bytes"]
        left += details["left_bytes"]
    print_line(f"freed {size_text(freed)}" + (f"; {size_text(left)} in use, not evicted" if left else ""))
    return 0


def check(arguments: argparse.Namespace, _: Sequence[str]) -> int:
    """Verify cached data; return the exit status: 0 nothing found, 1 something found."""
    mount, inner = resolve_in_mount(arguments.path or mount_of_this_node(Path.cwd()))
    cached_bytes = None if inner else ask(mount, "status").status.get("cache", {}).get("used_bytes")
    with StepView(sys.stderr, verb="checking") as view:
        request = {"command": "check", "paths": [inner]}
        row = command(mount, request, on_report=lambda row: show_check(view, row["check"], cached_bytes))
    details = row["check"]
    if arguments.json:
        sys.stdout.write(json.dumps(details, indent=2) + "\n")
        return int(_is_bad(details))
    for path in details["damaged"]:
        print_line(f"damaged in the cache, evicted: {path}")
    if details["damaged_files"] > len(details["damaged"]):
        print_line(f"and {count_text(details['damaged_files'] - len(details['damaged']), 'other file')}")
    for each in details["unusable"]:
        print_line(f"not visible in the mount: the key {each['key']!r}: {each['why']}")
    if details["unusable_keys"] > len(details["unusable"]):
        print_line(f"and {count_text(details['unusable_keys'] - len(details['unusable']), 'other key')}")
    for each in details["unfollowed"]:
        print_line(f"symlink not followed: {each['path']} -> {each['target']}")
    links = details["unfollowed_links"]
    if links > len(details["unfollowed"]):
        print_line(f"and {count_text(links - len(details['unfollowed']), 'other symlink')}")
    print_line(
        f"{count_text(details['blocks'], 'cached block')}, {size_text(details['bytes'])} read: "
        f"{count_text(details['damaged_files'], 'damaged file')}; "
        f"{count_text(details['keys'], 'key')} listed: {details['unusable_keys']} not visible in the mount"
        + (f", {count_text(links, 'symlink')} not followed" if links else "")
    )
    return int(_is_bad(details))


def _is_bad(details: Mapping[str, Any]) -> bool:
    return bool(details["damaged_files"] or details["unusable_keys"] or details["unfollowed_links"])


def _by_mount(paths: Sequence[str]) -> dict[Mount, list[str]]:
    """Group paths by mount; return each mount with the paths inside it."""
    found: dict[Mount, list[str]] = {}
    for path in paths:
        for place in mounts_in(path) or (path,):
            mount, inner = resolve_in_mount(place)
            found.setdefault(mount, []).append(inner)
    return found
