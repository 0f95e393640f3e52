"""The arguments of `pull`, `push` and `watch`. What the commands do is in `commands.py`, which needs the engine."""

import argparse
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path

from fusecache.cli.extras import require_extra
from fusecache.cli.say import say
from fusecache.config.options import FLAG_VALUES_TEXT, add_some_flags
from fusecache.config.values import Duration, as_argument

# A bucket that has answered nothing for this long ends a command.
GIVE_UP_SECONDS = 300.0
# Of the options of a mount, what the requests to the bucket need.
_OPTIONS = (
    "endpoint_url",
    "region",
    "profile",
    "credentials_file",
    "credentials_from",
    "requester_pays",
    "sse",
    "order_last",
)
_PULL_OPTIONS = (*_OPTIONS, "unsigned")
_PUSH_OPTIONS = (
    *_OPTIONS,
    "write_profile",
    "storage_class",
    "temp_names",
    "drain_timeout",
    "cache_dir",
    "cache_size",
)

PULL_STATUS = "0 everything is there, 1 something was left out (it is named) or an error"
PUSH_STATUS = (
    "0 the bucket has everything, 1 something was left out (it is named) or an error, 3 only conflicts"
)
WATCH_STATUS = f"{PUSH_STATUS}; after SIGTERM or SIGINT"


def add_pull_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `pull`."""
    _add_source(parser)
    parser.add_argument(
        "folder", type=Path, metavar="DIR", help="the folder to fetch into; made if it is missing"
    )
    parser.add_argument(
        "--follow", action="store_true",
        help="return when the names are known, and fetch in the background, first what the loader reads next; the "
        "loader waits for files that are not there yet. Messages go to DIR/.fusecache/pull.log",
    )  # fmt: skip
    parser.add_argument("--foreground", action="store_true", help="with --follow: stay in this terminal")
    parser.add_argument("--force", action="store_true", help="replace files that were changed here")
    parser.add_argument(
        "--give-up-after", type=as_argument(Duration(1)), default=GIVE_UP_SECONDS, metavar="DURATION",
        help="end once the bucket has answered nothing for this long; the next pull goes on where it was [5m]",
    )  # fmt: skip
    parser.add_argument("--ready-fd", type=int, help=argparse.SUPPRESS)
    _add_common(parser, _PULL_OPTIONS, "pull")


def add_push_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `push`."""
    parser.add_argument("folder", type=Path, metavar="DIR", help="the folder to publish")
    _add_source(parser)
    parser.add_argument(
        "--delete", action="store_true",
        help="remove objects whose files are gone here, if this folder pulled or pushed exactly that version",
    )  # fmt: skip
    parser.add_argument("--force", action="store_true", help="replace objects that another client changed")
    _add_common(parser, _PUSH_OPTIONS, "push")


def add_watch_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `watch`."""
    parser.add_argument(
        "folder", type=Path, metavar="DIR", help="the folder to publish from; made if it is missing"
    )
    _add_source(parser)
    parser.add_argument("--delete", action="store_true", help="remove objects too, as `push --delete` does")
    parser.add_argument(
        "--sync-deadline", type=as_argument(Duration()), default=25.0, metavar="DURATION",
        help="after SIGTERM or SIGINT, upload for at most this time, and name what is left [25s]",
    )  # fmt: skip
    _add_common(parser, _PUSH_OPTIONS, "watch")


def _add_source(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "source", metavar="SOURCE", help="the bucket or prefix: s3://BUCKET[/PREFIX], gs://… or az://…"
    )


def _add_common(parser: argparse.ArgumentParser, options: Sequence[str], command: str) -> None:
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    parser.add_argument(
        "--config", type=Path, metavar="FILE", help="TOML file with options of a mount [$FUSECACHE_CONFIG]"
    )
    add_some_flags(parser, options)
    parser.epilog = f"{FLAG_VALUES_TEXT} {parser.epilog}"
    parser.set_defaults(run=_runs(command), parser=parser)


def _runs(command: str) -> Callable[[argparse.Namespace, Sequence[str]], int]:
    def run(arguments: argparse.Namespace, words: Sequence[str]) -> int:
        require_extra("folder")
        # The other commands need neither trio nor boto3.
        try:
            status: int = getattr(import_module("fusecache.folder.commands"), command)(arguments, words)
        except KeyboardInterrupt:
            say(f"{command} was interrupted; the same command goes on from here")
            raise
        return status

    return run
