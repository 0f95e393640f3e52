"""The command line: arguments, messages and exit statuses. The daemon and `fusecache.mount` do the work.

Exit status: 0 success, 1 an error (one line on stderr), 2 wrong usage.
`sync`: 0 durable, 1 timeout, 2 error, 3 conflict. `warm --wait`: 0 everything is cached, 1 not everything.
`health`: 0 OK, 1 DEGRADED, 2 ACTION.
`check`: 0 nothing found, 1 something found, 2 error.
`doctor`: 0 all is ok, 1 a warning, 2 something to do first.
`clean`: 0 all that was selected is gone, 1 some of it stays. `access`: 0 as it should be, 1 not, 2 not known.
"""

import argparse
import os
import re
import sys
from collections.abc import Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any, NoReturn

from fusecache import __version__
from fusecache.cli import (
    access,
    cache_commands,
    clean,
    doctor,
    endings,
    monitoring,
    recordings,
    recover,
    run,
    uploads,
)
from fusecache.cli import (
    serve as serve_objects,
)
from fusecache.cli.bucket_daemons import BucketDaemons, named_error, start_in_folders
from fusecache.cli.endings import in_each
from fusecache.cli.extras import missing_package, require_extra, require_mount_extras, serve, stand_by
from fusecache.cli.health import health
from fusecache.cli.say import print_line, say, say_error
from fusecache.cli.sources import add_source_flags, config_path_of, mounts_of, take_mountpoint
from fusecache.cli.status import status
from fusecache.cli.top import top
from fusecache.config.options import FLAG_VALUES_TEXT, MountOptions, add_flags, read_config
from fusecache.config.values import Duration, as_argument, as_count
from fusecache.folder import arguments as folder_arguments
from fusecache.keeper import KEPT_VARIABLE
from fusecache.model.errors import ConfigError, FusecacheError
from fusecache.model.format_text import nearest_text, size_text
from fusecache.mount.bucket_folders import mounts_in
from fusecache.mount.control_client import ask
from fusecache.mount.launch import (
    LOG_NAME,
    READY,
    Parent,
    check_mountpoint,
    own_program,
    resolve_in_mount,
    start_daemon,
)
from fusecache.mount.progress import ProgressView, awaited_text, missing_texts

SYNC_EXIT = {"durable": 0, "ok": 0, "timeout": 1, "error": 2, "conflict": 3}
INTERRUPTED = 130  # 128 + SIGINT, the convention of shells


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; return its exit status."""
    words = list(sys.argv[1:] if argv is None else argv)
    parser = make_parser()
    own = words[: _own_words(words)]
    arguments, unknown = parser.parse_known_args(own)
    if unknown and not (own == words and arguments.command == "run"):  # which names the missing `--`
        flags = re.findall(r"--[a-z][a-z-]*", arguments.parser.format_help())
        arguments.parser.error(
            f"unknown argument {unknown[0]}{nearest_text(unknown[0].partition('=')[0], flags)}"
        )
    try:
        status: int = arguments.run(arguments, words)
    except FusecacheError as exc:
        say_error(exc)
        return int(getattr(arguments, "error_status", 1))
    except OSError as exc:
        say_error(f"{exc.filename or arguments.command}: {exc.strerror or exc}")
        return int(getattr(arguments, "error_status", 1))
    except ModuleNotFoundError as exc:
        missing = missing_package(exc)
        if missing is None:
            raise
        say_error(missing)
        return int(getattr(arguments, "error_status", 1))
    except KeyboardInterrupt:
        return INTERRUPTED
    return status


def _own_words(words: Sequence[str]) -> int:
    """Return how many words are this program's. What follows `run … --`, and `dataset`, is another program's."""
    if words[:1] == ["dataset"] and words[1:2] not in (["--help"], ["-h"]):
        return 1
    return words.index("--") if words[:1] == ["run"] and "--" in words else len(words)


class _Parser(argparse.ArgumentParser):
    """An argument parser whose errors are one line, with the nearest known word."""

    def __init__(self, **options: Any) -> None:
        super().__init__(formatter_class=_HelpFormatter, **options)
        # A value like -1d reaches the option, which says what is allowed. Else argparse takes it for an unknown option.
        self._negative_number_matcher = re.compile(r"-\.?\d")

    def error(self, message: str) -> NoReturn:
        """Print the message and exit with status 2."""
        choice = re.search(r"invalid choice: '([^']*)' \(choose from (.*)\)", message)
        if choice is not None:
            known = re.findall(r"[\w-]+", choice[2])
            message = (
                f"unknown command {choice[1]}"
                f"{nearest_text(choice[1], known) or ': known are ' + ', '.join(known)}"
            )
        self.exit(2, f"{self.prog}: error: {message}; see {self.prog} --help\n")


class _HelpFormatter(argparse.HelpFormatter):
    """Keeps a paragraph of examples as it is: one whose lines are indented."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        fill = super()._fill_text
        parts = text.split("\n\n")
        return "\n\n".join(part if part.startswith(" ") else fill(part, width, indent) for part in parts)


_MOUNT_EXAMPLES = """

    fusecache mount s3://my-bucket /data --cache-dir /nvme/fusecache
    fusecache mount s3://my-bucket /data --read-only --allow-other"""


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of all commands."""
    parser = _Parser(
        prog="fusecache", description="Mount a bucket of S3, R2, Google or Azure as a local directory."
    )
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(metavar="COMMAND", dest="command")
    parser.set_defaults(run=_help, parser=parser)

    mount = _add(commands, "mount", "mount a bucket as a directory")
    mount.add_argument(
        "source", nargs="?", help="the bucket or prefix to mount: s3://BUCKET[/PREFIX], gs://… or az://…"
    )
    mount.add_argument("mountpoint", nargs="?", help="an existing empty directory")
    mount.usage = "fusecache mount SOURCE DIRECTORY [options]"
    mount.description = f"{mount.description}{_MOUNT_EXAMPLES}"
    groups = add_flags(mount)
    groups["bucket and keys"].add_argument(
        "--bucket",
        action="append",
        default=[],
        metavar="NAME=SOURCE",
        help="instead of SOURCE: mount several buckets, each in the folder NAME of the mountpoint; may be repeated",
    )
    mount.add_argument(
        "--config", type=Path, metavar="FILE", help="TOML file with any of these options [$FUSECACHE_CONFIG]"
    )
    mount.add_argument(
        "--foreground", action="store_true", help="run in this terminal instead of in the background"
    )
    mount.add_argument("--ready-fd", type=int, help=argparse.SUPPRESS)
    # Of the daemon of one of several buckets: which one, and whether it may wait for its bucket, as others answer.
    mount.add_argument("--only", default="", help=argparse.SUPPRESS)
    mount.add_argument("--beside-others", action="store_true", help=argparse.SUPPRESS)
    mount.epilog = f"{FLAG_VALUES_TEXT} {mount.epilog}"
    mount.set_defaults(run=_mount, parser=mount)

    run.add_arguments(
        _add(
            commands,
            "run",
            "mount a bucket, run a command, upload what it wrote, and unmount",
            "that of the command (128 + the signal that ended it; 126 or 127 if it cannot be started), else 1 if the "
            "bucket lacks something, or for an error of the mount",
        )
    )

    endings.add_arguments(
        _add(
            commands,
            "unmount",
            "upload pending files, apply delayed deletions, and unmount",
            aliases=["umount"],
        ),
        _add(
            commands,
            "upgrade",
            "replace the daemon of a mount by the installed version; programs that use it wait",
        ),
    )
    sync = _add(
        commands,
        "sync",
        "wait until the bucket has all changes under a path",
        "0 the bucket has them, 1 not within --timeout, 2 an error: the path is in no mount, or the bucket rejected a "
        "file, 3 a conflict: another client changed a file first",
    )
    sync.add_argument(
        "path", help="a file or directory in a mount; files still open are listed but not waited for"
    )
    sync.add_argument(
        "--timeout", type=as_argument(Duration()), metavar="DURATION",
        help="stop waiting after this time, like 90, 90s, 10m or 2h [never]",
    )  # fmt: skip
    sync.set_defaults(run=_sync, parser=sync, error_status=SYNC_EXIT["error"])

    shows = _add(commands, "status", "show the state of a mount, directory or file")
    shows.add_argument("path", nargs="?", help="a path in a mount [the working directory, or the only mount]")
    shows.add_argument("--json", action="store_true", help="print all fields as JSON")
    shows.set_defaults(run=status, parser=shows)

    live = _add(
        commands,
        "top",
        "show live what the mounts of this node do: rates, jobs, files; q quits",
        "0 success, 1 a mount does not answer (with -n), or an error",
    )
    live.add_argument("paths", nargs="*", metavar="PATH", help="paths in the mounts to show [all mounts]")
    live.add_argument(
        "-n", dest="times", type=as_argument(as_count), metavar="N", help="print it N times, for a log"
    )
    live.add_argument(
        "-d", dest="interval", type=as_argument(Duration(0.2, 3600)), default=2.0, metavar="DURATION",
        help="pause between two views [2s]",
    )  # fmt: skip
    live.set_defaults(run=top, parser=live)

    healthy = _add(
        commands,
        "health",
        "print the verdict on a mount in one line, for probes; answers within 5 s",
        "0 OK, 1 DEGRADED: it works, but something is wrong, 2 ACTION: you must act, or the daemon does not answer",
    )
    healthy.add_argument(
        "mount", nargs="?", help="a path in a mount [the working directory, or the only mount]"
    )
    healthy.set_defaults(run=health, parser=healthy)

    doctor.add_arguments(
        _add(
            commands,
            "doctor",
            "check what a mount needs: this node, and with SOURCE the cache's disk, the keys and the bucket",
            "0 all is ok, 1 a warning, 2 something to do first, or an error",
        )
    )
    monitoring.add_arguments(
        _add(commands, "metrics", "print the numbers of a mount as OpenMetrics, for Prometheus"),
        _add(
            commands,
            "page",
            "print where the web pages of mounts are, and the ssh command to open them from another machine",
            "0 success, 1 a mount has no page or does not answer, or an error",
        ),
    )
    _add_cache_commands(commands)
    recover.add_arguments(
        _add(
            commands,
            "recover",
            "list files that did not reach the bucket; restore or delete them",
            "0 success, 1 an entry could not be restored or deleted, or an error",
        )
    )
    _add_uploads(commands)
    clean.add_arguments(
        _add(
            commands,
            "clean",
            "list what is old in a bucket, and remove it with --delete",
            "0 all that was selected is gone (without --delete: is listed), 1 some of it stays, or an error",
        )
    )
    access.add_arguments(
        _add(
            commands,
            "access",
            "test what keys can do in buckets, beside what they should; leaves nothing behind",
            "0 as it should be, 1 a key has a right too many or too few, 2 not known, or an error",
        )
    )

    folder_arguments.add_pull_arguments(
        _add(
            commands,
            "pull",
            "fetch a bucket into a plain folder, without FUSE; again only what is missing",
            folder_arguments.PULL_STATUS,
        )
    )
    folder_arguments.add_push_arguments(
        _add(
            commands,
            "push",
            "publish what changed in a plain folder, without FUSE",
            folder_arguments.PUSH_STATUS,
        )
    )
    folder_arguments.add_watch_arguments(
        _add(
            commands,
            "watch",
            "publish each file of a plain folder once it is closed, without FUSE, until SIGTERM",
            folder_arguments.WATCH_STATUS,
        )
    )

    _add_dataset(commands)
    version = _add(commands, "version", "print the version")
    version.set_defaults(run=_version, parser=version)
    return parser


def _add(
    commands: Any,
    name: str,
    does: str,
    exit_status: str = "0 success, 1 an error",
    aliases: Sequence[str] = (),
) -> argparse.ArgumentParser:
    """Add a command. exit_status: the meaning of its own statuses; 2 for wrong usage and 130 apply to all."""
    parser: argparse.ArgumentParser = commands.add_parser(
        name,
        aliases=aliases,
        help=does,
        description=f"{does[0].upper()}{does[1:]}.",
        epilog=f"Exit status: {exit_status}; 2 also for a wrong command line, 130 after Ctrl-C.",
    )
    return parser


def _add_dataset(commands: Any) -> None:
    dataset = _add(
        commands,
        "dataset",
        "inspect, check, merge and convert MDS datasets; `fusecache dataset COMMAND --help` says how",
        "0 success, 1 the dataset has a problem, or an error",
    )
    dataset.usage = "fusecache dataset ls|head|stats|verify|merge|convert|simulate …"
    dataset.set_defaults(run=_dataset, parser=dataset)


def _add_cache_commands(commands: Any) -> None:
    warm = _add(
        commands,
        "warm",
        "fetch files and directories into the disk cache",
        "0 everything is cached (without --wait: the warm-up has started), 1 not everything (failed files are listed) "
        "or an error",
    )
    warm.add_argument("paths", nargs="+", metavar="PATH", help="a file or directory in a mount")
    warm.add_argument(
        "--wait",
        action="store_true",
        help="show progress until everything is cached; Ctrl-C stops the warm-up",
    )
    warm.set_defaults(run=cache_commands.warm, parser=warm)

    evict = _add(commands, "evict", "evict files and directories from the disk cache")
    evict.add_argument(
        "paths", nargs="+", metavar="PATH", help="a file or directory in a mount; data not uploaded yet stays"
    )
    evict.set_defaults(run=cache_commands.evict, parser=evict)

    check = _add(
        commands,
        "check",
        "verify the checksums of cached data, and find object keys that cannot be file names",
        "0 nothing found, 1 something found, 2 an error",
    )
    check.add_argument("path", nargs="?", help="a path in a mount [the working directory, or the only mount]")
    check.add_argument("--json", action="store_true", help="print the result as JSON")
    check.set_defaults(run=cache_commands.check, parser=check, error_status=2)

    serve_objects.add_arguments(
        _add(
            commands,
            "serve",
            "serve a mount's objects over S3's protocol, read-only, from its cache, until SIGTERM",
        )
    )
    recordings.add_arguments(
        _add(commands, "record", "record what is read from a mount, for `replay`, until a signal ends it"),
        _add(commands, "replay", "prefetch what a recording names, in its order, in the background"),
    )


def _add_uploads(commands: Any) -> None:
    parser = _add(commands, "uploads", "list multipart uploads that were never finished; abort old ones")
    parser.add_argument("place", metavar="SOURCE|MOUNT", help="s3://BUCKET[/PREFIX], or a path in a mount")
    parser.add_argument(
        "--abort",
        action="store_true",
        help="abort uploads that are old enough, and that no mount of this node needs; needs --yes",
    )
    parser.add_argument("--yes", action="store_true", help="confirm --abort")
    parser.add_argument(
        "--older-than", type=as_argument(Duration(uploads.SHORTEST_SECONDS)), default=86400.0, metavar="DURATION",
        help="age from which an upload is old, at least 1h [1d]",
    )  # fmt: skip
    parser.add_argument("--json", action="store_true", help="print the list as JSON")
    add_source_flags(parser)
    parser.set_defaults(run=uploads.uploads, parser=parser)


def _mount(arguments: argparse.Namespace, words: Sequence[str]) -> int:
    arguments.ready_fd = stand_by(arguments.ready_fd)
    parent = Parent(arguments.ready_fd)
    config = config_path_of(arguments)
    take_mountpoint(arguments)
    load = cache(partial(_load, arguments, config))
    try:
        # The options of a successor may come from its predecessor.
        is_successor = arguments.only or KEPT_VARIABLE in os.environ
        mounts = {} if is_successor else load("" if config is None else read_config(config))
        if mounts and "" not in mounts:
            return _mount_several(mounts, words[1:], foreground=arguments.foreground)
        if arguments.foreground:
            return serve(
                lambda text: _own_options(arguments.only, load(text)),
                config,
                words,
                arguments.ready_fd,
                lambda message: parent.report(f"{READY} {message}"),
                is_one_of_several=bool(arguments.only),
                is_beside_others=arguments.beside_others,
            )
    except FusecacheError as exc:
        parent.report(f"error: {exc}")
        if arguments.only and arguments.ready_fd is None:  # else the parent adds the name
            named_error(arguments.only, exc)
        raise
    options = mounts[""]
    check_mountpoint(options.mountpoint, allow_other=options.allow_other)
    started = start_daemon(options.cache_dir, words[1:], has_keeper=options.session.has_keeper)
    message = started.wait()
    if message:
        say(message)
    _say_mounted(options)
    return 0


def _say_mounted(options: MountOptions) -> None:
    say(
        f"{options.source} is at {options.mountpoint}; cache {options.cache_dir}, up to "
        f"{size_text(options.cache_size)}; log {options.cache_dir}/{LOG_NAME}"
    )


def _load(arguments: argparse.Namespace, config: Path | None, config_text: str) -> dict[str, MountOptions]:
    """Return the options of each bucket of a mount. config_text: the file's content. Raises ConfigError."""
    mounts = mounts_of(arguments, config, config_text=config_text, buckets=arguments.bucket)
    for options in mounts.values():
        require_mount_extras(options)
    return mounts


def _own_options(name: str, mounts: Mapping[str, MountOptions]) -> MountOptions:
    """Return the options of the bucket that this daemon mounts. Raises ConfigError."""
    if name not in mounts:
        raise ConfigError(f"bucket {name}: no [[bucket]] table has this name any more")
    return mounts[name]


def _mount_several(mounts: Mapping[str, MountOptions], words: Sequence[str], *, foreground: bool) -> int:
    if foreground:
        return BucketDaemons(mounts, words).run()
    messages, errors = start_in_folders(mounts, words)
    for name, message in messages.items():
        if message:
            say(f"bucket {name}: {message}")
        _say_mounted(mounts[name])
    for name, error in errors.items():
        say_error(named_error(name, error))
    return int(bool(errors))


def _help(arguments: argparse.Namespace, _: Sequence[str]) -> int:
    """Print what there is to a user who gave no command. For a script that is a wrong command line."""
    arguments.parser.print_help(sys.stderr)
    return 2


def _sync(arguments: argparse.Namespace, _: Sequence[str]) -> int:
    if several := mounts_in(arguments.path):
        flags = [] if arguments.timeout is None else ["--timeout", f"{arguments.timeout:g}"]
        return in_each(several, ["sync", *flags])
    mount, inner = resolve_in_mount(arguments.path)
    with ProgressView(sys.stderr, verb="uploading") as view:
        answer = ask(mount, "sync", inner, timeout_seconds=arguments.timeout, on_progress=view.show_upload)
    status = SYNC_EXIT.get(answer.result, SYNC_EXIT["error"])
    if status:
        words = [_without_name(answer.message, inner)] if answer.message else []
        left = awaited_text(answer.progress)
        if left and (answer.result == "timeout" or not words):
            words.append(f"{left} left")
        say_error(": ".join(filter(None, (str(arguments.path), answer.result, ", ".join(words)))))
        for line in missing_texts(answer):
            say(line)
    elif answer.message:
        say(answer.message)
    return status


def _without_name(message: str, inner: str) -> str:
    """Return a daemon's message without its leading path inside the mount: the error shows the full path already."""
    return message.removeprefix(f"{inner}: ") if inner else message


def _dataset(_: argparse.Namespace, words: Sequence[str]) -> int:
    """Become the loader's program, whatever modules the working directory has."""
    require_extra("loader")
    *python, _package = own_program()
    sys.stdout.flush()
    os.execv(python[0], [*python, "loader", *words[1:]])


def _version(_: argparse.Namespace, __: Sequence[str]) -> int:
    print_line(f"fusecache {__version__}")
    return 0
