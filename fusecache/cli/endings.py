"""`fusecache unmount` ends a mount, and `fusecache upgrade` its daemon."""

import argparse
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

from fusecache import __version__
from fusecache.cli.say import say
from fusecache.cli.sources import config_path_of, mounts_of
from fusecache.config.options import top_of
from fusecache.config.values import Duration, as_argument
from fusecache.model.errors import MountError
from fusecache.mount.bucket_folders import mounts_in, mounts_meant, remove_bucket_folder
from fusecache.mount.control_client import ask
from fusecache.mount.launch import (
    MountState,
    check_owner,
    clear_dead,
    clear_unserved,
    detach_and_wait,
    drain,
    mount_state,
    own_program,
    replace_daemon,
    resolve_in_mount,
)
from fusecache.mount.mount_table import DaemonAway, root_of
from fusecache.mount.progress import ProgressView, left_texts, unsent_text


def add_arguments(unmount: argparse.ArgumentParser, upgrade: argparse.ArgumentParser) -> None:
    """Add the arguments of both commands."""
    unmount.add_argument("mountpoint", type=Path, nargs="?", help="directory of the mount")
    unmount.add_argument(
        "--config",
        type=Path,
        metavar="FILE",
        help="configuration file that names the mountpoint [$FUSECACHE_CONFIG]",
    )
    unmount.add_argument(
        "--timeout", type=as_argument(Duration()), metavar="DURATION",
        help="stop waiting for uploads after this time, like 90, 90s, 10m or 2h, and leave it mounted [never]",
    )  # fmt: skip
    unmount.add_argument(
        "--force",
        action="store_true",
        help="do not wait for uploads or requests in flight; the next mount resumes them. A mount in use still stays "
        "mounted",
    )
    unmount.add_argument(
        "--if-dead", action="store_true", help="only clean up a mount whose daemon has exited"
    )
    unmount.set_defaults(run=_unmount, parser=unmount)
    upgrade.add_argument("mountpoint", type=Path, nargs="?", help="directory of the mount [the only mount]")
    upgrade.set_defaults(run=_upgrade, parser=upgrade)


def in_each(mounts: Sequence[Path], words: Sequence[str]) -> int:
    """Run a command for each of several mounts, side by side. Return the worst status."""
    running = {
        each.name: subprocess.Popen([*own_program(), *words, str(each)], stderr=subprocess.PIPE, text=True)
        for each in mounts
    }
    with ThreadPoolExecutor(len(running)) as pool:
        return max(pool.map(_outcome, running, running.values()))


def _outcome(name: str, process: "subprocess.Popen[str]") -> int:
    """Show what a command says of a mount, with its name, and return its exit status."""
    with process:
        assert process.stderr is not None
        for line in process.stderr:
            say(f"{name}: {line.removeprefix('fusecache: ').rstrip()}")
    return process.returncode if process.returncode >= 0 else 128 - process.returncode


def _unmount(arguments: argparse.Namespace, _: Sequence[str]) -> int:
    mountpoint = _mountpoint(arguments)
    if several := mounts_in(mountpoint):
        flags = ["--timeout", f"{arguments.timeout:g}"] if arguments.timeout is not None else []
        flags += ["--force"] * arguments.force + ["--if-dead"] * arguments.if_dead
        mounts = [each for each in several if root_of(each) is not None]
        for each in several:
            if each not in mounts:
                remove_bucket_folder(each)
        return in_each(mounts, ["unmount", *flags])
    try:
        return _unmount_one(arguments, mountpoint)
    finally:
        if root_of(mountpoint) is None:
            remove_bucket_folder(mountpoint)


def _unmount_one(arguments: argparse.Namespace, mountpoint: Path) -> int:
    if arguments.if_dead:
        with suppress(DaemonAway):  # its keeper holds it
            if mount_state(mountpoint) is MountState.DEAD:
                clear_dead(mountpoint)
        return 0
    if clear_unserved(mountpoint):
        say(
            f"no daemon served {mountpoint}: files not uploaded are in its cache directory, for the next mount"
        )
        return 0
    state = mount_state(mountpoint)
    if state is not MountState.LIVE:
        raise MountError(f"{mountpoint} is {state.value}: nothing to unmount")
    mount, _ = resolve_in_mount(mountpoint)
    check_owner(mountpoint, mount.owner)
    if arguments.force:
        answer = ask(mount, "status")
        if answer.progress.pending_files:
            say(unsent_text(answer))
    else:
        with ProgressView(sys.stderr, verb="uploading") as view:
            drain(mount, timeout_seconds=arguments.timeout, on_progress=view.show_upload)
        answer = ask(mount, "status")
    if not detach_and_wait(mount, forced=arguments.force):
        say(f"{mountpoint} is unmounted; its daemon is still shutting down")
    for line in left_texts(answer.status):
        say(line)
    return 0


def _upgrade(arguments: argparse.Namespace, _: Sequence[str]) -> int:
    mounts = [Path(each) for each in mounts_meant(arguments.mountpoint)[0]]
    if len(mounts) > 1:
        return in_each(mounts, ["upgrade"])
    mountpoint = mounts[0]
    replace_daemon(mountpoint, __version__)
    say(f"{mountpoint} is served by version {__version__} now")
    return 0


def _mountpoint(arguments: argparse.Namespace) -> Path:
    if arguments.mountpoint is not None:
        return Path(arguments.mountpoint)
    config_path = config_path_of(arguments)
    if config_path is None:
        raise MountError("no mountpoint given: name it, or the --config file that names it")
    return top_of(mounts_of({}, config_path))
