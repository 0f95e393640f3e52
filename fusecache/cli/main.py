"""The command line. Words and exit statuses only, no logic.

Exit status: 0 done, 1 an error (one line on stderr), 2 wrong usage.
Of `sync`: 0 durable, 1 time-out, 2 error, 3 conflict. Of `warm --wait`: 0 all is cached, 1 not all.
Of `check`: 0 nothing found, 1 something found, 2 error.
"""

import argparse
import json
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from fusecache import __version__
from fusecache.cli import cache_commands
from fusecache.cli.recover import parse_ids, recover
from fusecache.cli.status import status_of
from fusecache.cli.status_text import status_view
from fusecache.config.options import FIELDS, FLAG_VALUES_TEXT, add_flags, load_options
from fusecache.config.values import Duration
from fusecache.model.errors import FusecacheError, MountError
from fusecache.model.format_text import nearest_text
from fusecache.mount.control_client import ask
from fusecache.mount.launch import (
    READY,
    MountState,
    Parent,
    check_mountpoint,
    clear_dead,
    detach_and_wait,
    drain,
    log_tail,
    mount_of_this_node,
    mount_state,
    resolve_in_mount,
    start_in_background,
)
from fusecache.mount.leftover_text import left_texts
from fusecache.mount.progress import ProgressView, awaited_text, pending_text

SYNC_EXIT = {"durable": 0, "ok": 0, "timeout": 1, "error": 2, "conflict": 3}
INTERRUPTED = 130  # 128 + SIGINT, as shells say it


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; return its exit status."""
    words = list(sys.argv[1:] if argv is None else argv)
    parser = _parser()
    arguments, unknown = parser.parse_known_args(words)
    if unknown:
        flags = re.findall(r"--[a-z][a-z-]*", arguments.parser.format_help())
        arguments.parser.error(f"unknown: {unknown[0]}{nearest_text(unknown[0].partition('=')[0], flags)}")
    try:
        status: int = arguments.run(arguments, words)
    except FusecacheError as exc:
        _say_error(str(exc))
        return int(getattr(arguments, "error_status", 1))
    except OSError as exc:
        _say_error(f"{exc.filename or arguments.command}: {exc.strerror or exc}")
        return int(getattr(arguments, "error_status", 1))
    except KeyboardInterrupt:
        return INTERRUPTED
    return status


class _Parser(argparse.ArgumentParser):
    """Says in one line what is wrong, and which word was meant."""

    def error(self, message: str) -> NoReturn:
        """End the program with status 2."""
        choice = re.search(r"invalid choice: '([^']*)' \(choose from (.*)\)", message)
        if choice is not None:
            known = re.findall(r"[\w-]+", choice[2])
            message = (
                f"unknown: {choice[1]}{nearest_text(choice[1], known) or ': known are ' + ', '.join(known)}"
            )
        self.exit(2, f"{self.prog}: error: {message}; see {self.prog} --help\n")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="fusecache", description="A bucket as a local directory.")
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(metavar="COMMAND", dest="command", required=True)

    mount = _add(commands, "mount", "show a bucket as a directory")
    mount.add_argument("source", nargs="?", help="s3://BUCKET[/PREFIX]")
    mount.add_argument("mountpoint", nargs="?", help="an existing directory")
    mount.add_argument("--config", type=Path, metavar="FILE", help="a TOML file with any of these options")
    mount.add_argument("--foreground", action="store_true", help="stay in this terminal")
    mount.add_argument("--ready-fd", type=int, help=argparse.SUPPRESS)
    add_flags(mount)
    mount.epilog = f"{FLAG_VALUES_TEXT} {mount.epilog}"
    mount.set_defaults(run=_mount, parser=mount)

    unmount = _add(
        commands,
        "unmount",
        "upload what is left, carry out removals that delete_delay puts off, then unmount",
    )
    unmount.add_argument("mountpoint", type=Path, nargs="?", help="where the bucket is mounted")
    unmount.add_argument("--config", type=Path, metavar="FILE", help="the file that names the mountpoint")
    unmount.add_argument(
        "--timeout", type=_duration, metavar="DURATION",
        help="give up uploading after this long, as 90, 90s, 10m or 2h [never]",
    )  # fmt: skip
    unmount.add_argument(
        "--force",
        action="store_true",
        help="do not wait for uploads, nor for requests under way: the next mount goes on with them; a mount in use "
        "still stays",
    )
    unmount.add_argument("--if-dead", action="store_true", help="only clean up a mount whose daemon is gone")
    unmount.set_defaults(run=_unmount, parser=unmount)

    sync = _add(
        commands,
        "sync",
        "wait until what was written under a path is in the bucket",
        "0 the bucket has it, 1 not within --timeout, 2 an error: the path is in no mount, or the bucket refused a "
        "file, 3 a conflict: another client changed a file first",
    )
    sync.add_argument(
        "path", help="a file or directory of a mount; what is still open is named, not waited for"
    )
    sync.add_argument(
        "--timeout", type=_duration, metavar="DURATION",
        help="give up after this long, as 90, 90s, 10m or 2h [never]",
    )  # fmt: skip
    sync.set_defaults(run=_sync, parser=sync, error_status=SYNC_EXIT["error"])

    status = _add(commands, "status", "what a mount, directory or file is doing")
    status.add_argument("path", nargs="?", help="[the working directory, or the only mount]")
    status.add_argument("--json", action="store_true", help="everything, for programs")
    status.set_defaults(run=_status, parser=status)

    _add_cache_commands(commands)
    _add_recover(commands)

    version = _add(commands, "version", "print the version")
    version.set_defaults(run=_version, parser=version)
    return parser


def _add(
    commands: Any, name: str, does: str, exit_status: str = "0 done, 1 an error"
) -> argparse.ArgumentParser:
    """Add a command. exit_status: what its own statuses mean; that of a wrong command line is every command's."""
    parser: argparse.ArgumentParser = commands.add_parser(
        name,
        help=does,
        description=f"{does[0].upper()}{does[1:]}.",
        epilog=f"Exit status: {exit_status}; 2 also for a wrong command line, 130 after Ctrl-C.",
    )
    return parser


def _duration(text: str) -> float:
    try:
        return Duration()(text)
    except ValueError as exc:
        raise argparse.ArgumentTypeError(f"{text!r}: allowed is {exc}") from None


def _add_cache_commands(commands: Any) -> None:
    warm = _add(
        commands,
        "warm",
        "bring files and directories into the disk cache",
        "0 all is cached, without --wait: it was begun; 1 not all: the files are named, or an error",
    )
    warm.add_argument("paths", nargs="+", metavar="PATH", help="of a mount")
    warm.add_argument("--wait", action="store_true", help="show progress until all is there; Ctrl-C stops it")
    warm.set_defaults(run=cache_commands.warm, parser=warm)

    evict = _add(commands, "evict", "drop what is cached of files and directories")
    evict.add_argument("paths", nargs="+", metavar="PATH", help="of a mount; what is not uploaded stays")
    evict.set_defaults(run=cache_commands.evict, parser=evict)

    check = _add(
        commands,
        "check",
        "verify what is cached, and find keys that no path can name",
        "0 nothing found, 1 something found, 2 an error",
    )
    check.add_argument("path", nargs="?", help="[the working directory, or the only mount]")
    check.add_argument("--json", action="store_true", help="for programs")
    check.set_defaults(run=cache_commands.check, parser=check, error_status=2)


def _add_recover(commands: Any) -> None:
    recover = _add(
        commands,
        "recover",
        "files that were not closed, may be damaged, were refused, or are in conflict",
        "0 done, 1 something could not be done, or an error",
    )
    recover.add_argument(
        "place", nargs="?", help="a mount, or a cache directory without one [the only mount]"
    )
    recover.add_argument(
        "--restore", nargs="+", type=parse_ids, action="extend", default=[], metavar="ID",
        help="make it a file again, as NAME.recovered-1; a refused one is uploaded again; "
        "several: 3 4 or 3,4; all: all but conflicts",
    )  # fmt: skip
    recover.add_argument(
        "--to",
        metavar="PATH",
        help="where it comes back, from the working directory or absolute; outside the mount: a copy",
    )
    recover.add_argument(
        "--delete", nargs="+", type=parse_ids, action="extend", default=[], metavar="ID",
        help="free its room; several: 3 4 or 3,4; all: all that is listed",
    )  # fmt: skip
    recover.add_argument("--yes", action="store_true", help="really delete")
    recover.add_argument("--json", action="store_true", help="the listing, for programs")
    recover.set_defaults(run=_recover, parser=recover)


def _mount(arguments: argparse.Namespace, words: Sequence[str]) -> int:
    parent = Parent(arguments.ready_fd)
    try:
        options = load_options(
            {name: getattr(arguments, name) for name in FIELDS},
            os.environ,
            config_path=_config_path(arguments),
            user_id=os.geteuid(),
        )
        if arguments.foreground:
            from fusecache.daemon.main import run  # the other commands need neither FUSE nor boto3

            return run(options, lambda words: parent.tell(f"{READY} {words}"))
    except FusecacheError as exc:
        parent.tell(f"error: {exc}")
        raise
    check_mountpoint(options.mountpoint, allow_other=options.allow_other)

    def command(ready_fd: int) -> list[str]:
        hidden = ["--foreground", "--ready-fd", str(ready_fd)]
        return [sys.executable, "-m", "fusecache", "mount", *hidden, *words[1:]]

    try:
        options.cache_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        log_path = options.cache_dir / "fusecache.log"
        log_path.touch(mode=0o600)
    except OSError as exc:
        raise MountError(
            f"the cache directory {options.cache_dir} cannot be used: {exc.strerror}; choose another with --cache-dir"
        ) from exc
    try:
        words = start_in_background(command, log_path)
    except OSError as exc:
        raise MountError(f"cannot start the daemon: {exc}") from exc
    if words:
        _say(words)
    return 0


def _unmount(arguments: argparse.Namespace, _: Sequence[str]) -> int:
    mountpoint = _mountpoint(arguments)
    state = mount_state(mountpoint)
    if state is MountState.DEAD:
        clear_dead(mountpoint)
        return 0
    if arguments.if_dead:
        return 0
    if state is not MountState.LIVE:
        raise MountError(f"{mountpoint} is {state.value}: nothing to unmount")
    if arguments.force:
        answer = log_tail(mountpoint)
        if answer.progress.pending_files:
            _say(
                f"{pending_text(answer.progress)} not in the bucket yet; kept in the journal for the next mount"
            )
    else:
        with ProgressView(sys.stderr, verb="uploading") as view:
            drain(mountpoint, timeout_seconds=arguments.timeout, on_progress=view.show)
        answer = log_tail(mountpoint)
    if not detach_and_wait(mountpoint, forced=arguments.force):
        _say(f"{mountpoint} is unmounted; its daemon is still ending")
    for line in left_texts(answer.status):
        _say(line)
    return 0


def _mountpoint(arguments: argparse.Namespace) -> Path:
    if arguments.mountpoint is not None:
        return Path(arguments.mountpoint)
    config_path = _config_path(arguments)
    if config_path is None:
        raise MountError("which mount? give its mountpoint, or the --config file that names it")
    return load_options({}, os.environ, config_path=config_path, user_id=os.geteuid()).mountpoint


def _config_path(arguments: argparse.Namespace) -> Path | None:
    if arguments.config is None and os.environ.get("FUSECACHE_CONFIG"):
        return Path(os.environ["FUSECACHE_CONFIG"])
    path: Path | None = arguments.config
    return path


def _sync(arguments: argparse.Namespace, _: Sequence[str]) -> int:
    mount, inner = resolve_in_mount(arguments.path)
    with ProgressView(sys.stderr, verb="uploading") as view:
        answer = ask(mount, "sync", inner, timeout_seconds=arguments.timeout, on_progress=view.show)
    status = SYNC_EXIT.get(answer.result, SYNC_EXIT["error"])
    if status:
        words = [_without_name(answer.message, inner)] if answer.message else []
        if answer.result == "timeout" or not words:
            words.append(f"{awaited_text(answer.progress)} left")
        _say_error(f"{arguments.path}: {answer.result}: {', '.join(words)}")
    elif answer.message:
        _say(answer.message)
    return status


def _without_name(message: str, inner: str) -> str:
    """Return a daemon's message without the path in the mount that it begins with: the whole path is said already."""
    return message.removeprefix(f"{inner}: ") if inner else message


def _status(arguments: argparse.Namespace, _: Sequence[str]) -> int:
    status = status_of(arguments.path or mount_of_this_node(Path.cwd()))
    sys.stdout.write(json.dumps(status, indent=2) + "\n" if arguments.json else status_view(status))
    return 0


def _recover(arguments: argparse.Namespace, _: Sequence[str]) -> int:
    return recover(
        arguments.place,
        restore=arguments.restore,
        to=arguments.to,
        delete=arguments.delete,
        confirmed=arguments.yes,
        as_json=arguments.json,
    )


def _version(_: argparse.Namespace, __: Sequence[str]) -> int:
    sys.stdout.write(f"fusecache {__version__}\n")
    return 0


def _say(text: str) -> None:
    sys.stderr.write(f"fusecache: {text}\n")


def _say_error(text: str) -> None:
    sys.stderr.write(f"fusecache: error: {text}\n")
