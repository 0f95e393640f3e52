"""The command line: mount, unmount, sync, status, version. Words and exit statuses only, no logic.

Exit status: 0 done, 1 an error (one line on stderr), 2 wrong usage.
Of `sync`: 0 durable, 1 time-out, 2 error, 3 conflict.
"""

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from fusecache import __version__
from fusecache.config import FIELDS, add_flags, load_options
from fusecache.control_client import ask, find_mount
from fusecache.model.errors import FusecacheError, MountError
from fusecache.mounting import (
    MountState,
    Parent,
    check_mountpoint,
    clear_dead,
    detach_and_wait,
    drain,
    mount_state,
    pending,
    start_in_background,
)
from fusecache.report import ProgressView, pending_text, status_table

SYNC_EXIT = {"durable": 0, "ok": 0, "timeout": 1, "error": 2, "conflict": 3}
INTERRUPTED = 130  # 128 + SIGINT, as shells say it


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; return its exit status."""
    words = list(sys.argv[1:] if argv is None else argv)
    arguments = _parser().parse_args(words)
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


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="fusecache", description="A bucket as a local directory.")
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(metavar="COMMAND", dest="command", required=True)

    mount = commands.add_parser("mount", help="show a bucket as a directory")
    mount.add_argument("source", nargs="?", help="s3://BUCKET[/PREFIX]")
    mount.add_argument("mountpoint", nargs="?", help="an existing directory")
    mount.add_argument("--config", type=Path, metavar="FILE", help="a TOML file with any of these options")
    mount.add_argument("--foreground", action="store_true", help="stay in this terminal")
    mount.add_argument("--ready-fd", type=int, help=argparse.SUPPRESS)
    add_flags(mount)
    mount.set_defaults(run=_mount)

    unmount = commands.add_parser("unmount", help="upload what is left, then unmount")
    unmount.add_argument("mountpoint", type=Path, nargs="?")
    unmount.add_argument("--config", type=Path, metavar="FILE", help="the file that names the mountpoint")
    unmount.add_argument("--timeout", type=float, metavar="SECONDS", help="give up uploading after this long")
    unmount.add_argument(
        "--force",
        action="store_true",
        help="do not wait for uploads: the next mount goes on with them; a mount in use still stays",
    )
    unmount.add_argument("--if-dead", action="store_true", help="only clean up a mount whose daemon is gone")
    unmount.set_defaults(run=_unmount)

    sync = commands.add_parser("sync", help="wait until what was written under a path is in the bucket")
    sync.add_argument("path")
    sync.add_argument("--timeout", type=float, metavar="SECONDS", help="give up after this long")
    sync.set_defaults(run=_sync, error_status=SYNC_EXIT["error"])

    status = commands.add_parser("status", help="what a mount, directory or file is doing")
    status.add_argument("path")
    status.add_argument("--json", action="store_true", help="for programs")
    status.set_defaults(run=_status)

    version = commands.add_parser("version", help="print the version")
    version.set_defaults(run=_version)
    return parser


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
            from fusecache.daemon import run  # the other commands need neither FUSE nor boto3

            return run(options, lambda: parent.tell("ready"))
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
        start_in_background(command, log_path)
    except OSError as exc:
        raise MountError(f"cannot start the daemon: {exc}") from exc
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
        left = pending(mountpoint)
        if left.pending_files:
            _say(f"{pending_text(left)} not in the bucket yet; kept in the journal for the next mount")
    else:
        with ProgressView(sys.stderr, verb="uploading") as view:
            drain(mountpoint, timeout_seconds=arguments.timeout, on_progress=view.show)
    if not detach_and_wait(mountpoint, forced=arguments.force):
        _say(f"{mountpoint} is unmounted; its daemon is still ending")
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
    mount, inner = find_mount(arguments.path, os.environ)
    with ProgressView(sys.stderr, verb="uploading") as view:
        answer = ask(mount, "sync", inner, timeout_seconds=arguments.timeout, on_progress=view.show)
    status = SYNC_EXIT.get(answer.result, SYNC_EXIT["error"])
    if status:
        _say_error(
            f"{arguments.path}: {answer.result}: {answer.message or pending_text(answer.progress) + ' left'}"
        )
    elif answer.message:
        _say(answer.message)
    return status


def _status(arguments: argparse.Namespace, _: Sequence[str]) -> int:
    mount, inner = find_mount(arguments.path, os.environ)
    answer = ask(mount, "status", inner)
    if answer.result not in ("ok", "durable"):
        raise MountError(f"{arguments.path}: {answer.message or answer.result}")
    if arguments.json:
        sys.stdout.write(json.dumps(answer.status, indent=2) + "\n")
    else:
        sys.stdout.write(status_table(answer.status))
    return 0


def _version(_: argparse.Namespace, __: Sequence[str]) -> int:
    sys.stdout.write(f"fusecache {__version__}\n")
    return 0


def _say(text: str) -> None:
    sys.stderr.write(f"fusecache: {text}\n")


def _say_error(text: str) -> None:
    sys.stderr.write(f"fusecache: error: {text}\n")
