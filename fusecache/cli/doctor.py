"""`fusecache doctor`: checks what a mount needs, one line each. `fusecache.daemon.checkup` does the work."""

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

from fusecache.cli.extras import require_extra
from fusecache.cli.say import print_line
from fusecache.cli.sources import config_path_of, mounts_of
from fusecache.config.options import FLAG_VALUES_TEXT, add_flags

if TYPE_CHECKING:
    from fusecache.daemon.checkup import CheckResult

_EXIT = {"ok": 0, "warning": 1, "action": 2}
EXIT_ACTION = _EXIT["action"]
# They stand for what the user has not chosen yet.
_NO_MOUNTPOINT, _NO_SOURCE = "/nonexistent", "s3://bucket"
# Options that are checked without a bucket, too.
_NODE_OPTIONS = ("cache_dir", "cache_size", "memory")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what `fusecache doctor` takes: the words of `fusecache mount`, all of them optional."""
    parser.add_argument(
        "source", nargs="?", help="the bucket or prefix to check too: s3://BUCKET[/PREFIX], gs://… or az://…"
    )
    parser.add_argument("mountpoint", nargs="?", help="the directory to check too")
    parser.add_argument(
        "--config", type=Path, metavar="FILE", help="TOML file with options of the mount [$FUSECACHE_CONFIG]"
    )
    add_flags(parser)
    parser.epilog = f"{FLAG_VALUES_TEXT} {parser.epilog}"
    parser.set_defaults(run=doctor, parser=parser, error_status=EXIT_ACTION)


def doctor(arguments: argparse.Namespace, _: Sequence[str]) -> int:
    """Print a line for each check; return the exit status of the gravest."""
    require_extra("mount")
    worst = 0
    for finding in _findings(arguments):
        worst = max(worst, _EXIT[finding.level])
        print_line(f"{finding.level:8} {finding.subject}: {finding.text}")
    return worst


def _findings(arguments: argparse.Namespace) -> "Iterator[CheckResult]":
    from fusecache.daemon import checkup  # the other commands need neither trio nor boto3

    config = config_path_of(arguments)
    has_bucket = arguments.source is not None or config is not None
    if not has_bucket and all(getattr(arguments, name) is None for name in _NODE_OPTIONS):
        yield from checkup.node_findings(allow_other=bool(arguments.allow_other))
        return
    if config is None:
        arguments.source = arguments.source or _NO_SOURCE
        arguments.mountpoint = arguments.mountpoint or _NO_MOUNTPOINT
    mounts = mounts_of(arguments, config)
    yield from checkup.node_findings(allow_other=any(each.allow_other for each in mounts.values()))
    for name, options in mounts.items():
        # The mount command makes the folder of each of several buckets.
        if not name and str(options.mountpoint) != _NO_MOUNTPOINT:
            yield checkup.mountpoint_finding(options)
        found = [checkup.cache_findings(options)]
        if has_bucket:
            found += [checkup.bucket_findings(options), checkup.peer_findings(options)]
        for each in chain.from_iterable(found):
            yield replace(each, subject=f"{name}: {each.subject}") if name else each
