"""`fusecache run`: mounts a bucket, runs a command beside it, and ends both in time when the node is taken away."""

import argparse
import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from threading import Thread

from fusecache.cli.bucket_daemons import named_error, start_in_folders
from fusecache.cli.extras import require_mount_extras
from fusecache.cli.say import say, say_error
from fusecache.cli.sources import config_path_of, mounts_of, take_mountpoint
from fusecache.config.options import FLAG_VALUES_TEXT, MountOptions, add_flags
from fusecache.config.values import Duration, as_argument
from fusecache.model.errors import MountError
from fusecache.model.format_text import size_text, split_questions
from fusecache.mount.bucket_folders import remove_bucket_folder
from fusecache.mount.command_run import NOT_EXECUTABLE, NOT_FOUND, CommandRun, NoticeReceived
from fusecache.mount.control_client import Mount, ask, find_mount
from fusecache.mount.launch import (
    MountState,
    check_mountpoint,
    clear_unserved,
    detach_and_wait,
    drain,
    mount_state,
    start_daemon,
)
from fusecache.mount.mount_table import DaemonAway
from fusecache.mount.progress import ProgressView, unsent_text

# Words of the command line that are not the mount's, with the number of their values.
_OWN_FLAGS = {"--mount": 2, "--sync-deadline": 1}
_NAMES_SHOWN = 20


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.usage = "fusecache run [SOURCE] [DIRECTORY] [options] -- COMMAND [ARGUMENT …]"
    parser.allow_abbrev = False  # the words are handed to `fusecache mount`, without those of this command
    parser.add_argument("source", nargs="?", metavar="SOURCE", help="the bucket or prefix, as of `mount`")
    parser.add_argument(
        "mountpoint", nargs="?", metavar="DIRECTORY", help="where to mount it; created if it does not exist"
    )
    parser.add_argument(
        "--mount",
        nargs=2,
        metavar=("SOURCE", "DIRECTORY"),
        dest="mount",
        help="the same two words, as an option",
    )
    parser.add_argument(
        "--sync-deadline", type=as_argument(Duration()), default=25.0, metavar="DURATION",
        help="after SIGTERM, SIGINT or SIGHUP all is over within this time. The command gets the signal and 70 percent "
        "of the time, then SIGKILL; the rest is for the last uploads [25s]",
    )  # fmt: skip
    parser.add_argument(
        "--config", type=Path, metavar="FILE", help="TOML file with options of the mount [$FUSECACHE_CONFIG]"
    )
    add_flags(parser)
    parser.epilog = f"{FLAG_VALUES_TEXT} {parser.epilog}"
    parser.set_defaults(run=run, parser=parser)


def run(arguments: argparse.Namespace, words: Sequence[str]) -> int:
    """Mount, run the command, upload, unmount; return the exit status."""
    program = list(words[words.index("--") + 1 :]) if "--" in words else []
    if not program or (arguments.mount and arguments.source):
        arguments.parser.error(
            "the command must follow `--`: fusecache run SOURCE DIRECTORY [options] -- COMMAND [ARGUMENT …]"
        )
    if arguments.mount:
        arguments.source, arguments.mountpoint = arguments.mount
    take_mountpoint(arguments)
    mounts = mounts_of(arguments, config_path_of(arguments))
    for options in mounts.values():
        require_mount_extras(options)
    words = [*(arguments.mount or ()), *_words_of_mount(words)]
    with CommandRun(arguments.sync_deadline) as running:
        questions = _start(mounts, words)
        mounted = [(find_mount(options.mountpoint, os.environ)[0], options) for options in mounts.values()]
        status = _run_program(running, program)
        if status:  # a command that succeeds has what it needs: the prefix is new
            for question in questions:
                say(question)
        for mount, _ in mounted[1:]:  # all upload at once; each is waited for below
            Thread(target=_begin_upload, args=(mount,), daemon=True).start()
        is_complete = {mount: _upload(running, mount) for mount, _ in mounted}
        for mount, options in mounted:
            try:
                _unmount(mount, options, is_complete=is_complete[mount])
            except MountError as exc:
                if len(mounted) == 1:
                    raise
                say_error(exc)
                is_complete[mount] = False
            remove_bucket_folder(mount.root)
    return status or int(not all(is_complete.values()))


def _start(mounts: Mapping[str, MountOptions], words: Sequence[str]) -> list[str]:
    """Mount all buckets; return what to ask the user about them. Raises MountError if one is not mounted."""
    if "" in mounts:
        options = mounts[""]
        with suppress(FileExistsError):
            options.mountpoint.mkdir(parents=True)
        check_mountpoint(options.mountpoint, allow_other=options.allow_other)
        started = start_daemon(options.cache_dir, words, has_keeper=options.session.has_keeper)
        messages = {"": started.wait()}
    else:
        messages, errors = start_in_folders(mounts, words)
        if errors:
            for name, error in errors.items():
                say_error(named_error(name, error))
            for name in messages:
                detach_and_wait(find_mount(mounts[name].mountpoint, os.environ)[0], forced=False)
            for each in mounts.values():
                remove_bucket_folder(each.mountpoint)
            raise MountError(f"not mounted: {', '.join(errors)}; the command was not started")
    questions = []
    for name, text in messages.items():
        message, question = split_questions(text)
        label = f"bucket {name}: " if name else ""
        if message:
            say(label + message)
        questions += [label + question] if question else []
    return questions


def _words_of_mount(words: Sequence[str]) -> list[str]:
    """Return the flags that are the mount's: without the command, and without the flags of `run` itself."""
    flags = list(words[1 : words.index("--")])
    found = []
    while flags:
        flag = flags.pop(0)
        name, _, value = flag.partition("=")
        if name in _OWN_FLAGS:
            del flags[: 0 if value else _OWN_FLAGS[name]]
        else:
            found.append(flag)
    return found


def _run_program(running: CommandRun, program: Sequence[str]) -> int:
    if running.notice:
        return 128 + running.notice  # it came before the mount was ready
    try:
        return running.run(program)
    except OSError as exc:
        say_error(f"cannot start {program[0]}: {exc.strerror}")
        return NOT_FOUND if isinstance(exc, FileNotFoundError) else NOT_EXECUTABLE


def _begin_upload(mount: Mount) -> None:
    with suppress(MountError, OSError):  # `_upload` says why
        drain(mount, timeout_seconds=None, on_progress=lambda _: None)


def _upload(running: CommandRun, mount: Mount) -> bool:
    """Wait until the bucket has everything, after a notice only to the end of its time; return whether it has."""
    while True:
        try:
            with running.interruptible(), ProgressView(sys.stderr, verb="uploading") as view:
                drain(mount, timeout_seconds=running.seconds_left(), on_progress=view.show_upload)
            return True
        except NoticeReceived:
            continue
        except DaemonAway:
            return False  # `_unmount` says so
        except MountError as exc:
            if mount_state(mount.root) is MountState.DEAD:
                return False
            say_error(str(exc).partition("; wait longer")[0].replace(" stays mounted", ""))
            return False


def _unmount(mount: Mount, options: MountOptions, *, is_complete: bool) -> None:
    """Unmount, and name what the bucket lacks."""
    is_ended = is_dead = clear_unserved(mount.root)
    if not is_dead:
        answer = ask(mount, "status")
        is_ended = detach_and_wait(mount, forced=not is_complete)
    if is_complete:
        return
    if is_dead:
        say_error(
            f"{mount.root}: the daemon has died, see {options.cache_dir}/fusecache.log; the next mount with "
            f"--cache-dir {options.cache_dir} uploads what it left"
        )
    elif answer.progress.pending_files:
        say(unsent_text(answer))
    if not is_ended:
        say(f"{mount.root} is unmounted; its daemon is still shutting down")
        return
    from fusecache.engine.recovery.offline import OfflineCache  # other commands do not need the engine

    with OfflineCache(options.cache_dir) as cache:
        for row in [row for row in cache.listing()["entries"] if row["kind"] == "waiting"][-_NAMES_SHOWN:]:
            say(f"not in the bucket: {row['path']}, {size_text(row['bytes'])}")
