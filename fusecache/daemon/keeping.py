"""Puts a keeper process around the daemon, so that the mount outlives it (`keeper.py`)."""

import logging
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

from fusecache.config.options import MountOptions, read_config
from fusecache.disk.native import forbid_core_dumps
from fusecache.fuse.kept_mount import FormatUnknown, KeptMount, await_turn
from fusecache.keeper import KEEPER_VARIABLE, KEPT_VARIABLE, STATUS_CANNOT_RESUME
from fusecache.model.errors import ConfigError, MountError
from fusecache.mount.launch import keeper_program, own_program
from fusecache.remote.store import ConditionalWrites

log = logging.getLogger(__name__)

# The row of the configuration that a mount has.
_CONFIG = "config"
_CONDITIONS = "bucket/"
# Options that a mount keeps until it ends.
_SHOWN = (
    "source",
    "mountpoint",
    "endpoint_url",
    "cache_dir",
    "read_only",
    "allow_other",
    "uid",
    "gid",
    "umask",
    "posix_metadata",
    "symlinks",
)


def become_keeper(options: MountOptions, words: Sequence[str], report: int | None) -> None:
    """Replace this process by a keeper that starts it again; return if that is of no use, or not wanted.

    words: of the command line, from the command on. report: the descriptor of `--ready-fd`.
    """
    if not options.session.has_keeper or KEEPER_VARIABLE in os.environ:
        return
    if report is not None:
        os.set_inheritable(report, True)  # noqa: FBT003  # takes no keyword
    os.execv(sys.executable, [*keeper_program(), *own_program(), *words])


def leave_standby(report: int | None) -> int | None:
    """Leave a copy of this process to the keeper, and return; the copy returns when the keeper needs it.

    report: the descriptor of `--ready-fd`, which is returned; None in a copy, as that has closed it. Ends a copy that
    the keeper does not need any more.
    """
    forbid_core_dumps()
    await_turn()
    while KeptMount.leave_standby(report):
        report = None
        await_turn()
    return report


@contextmanager
def failures_told() -> Iterator[None]:
    """If the block fails, tell the keeper why this process ends, so that it can tell the user."""
    try:
        yield
    except Exception as exc:
        KeptMount.tell_why(str(exc) or type(exc).__name__)
        raise


@dataclass(frozen=True, slots=True)
class DaemonStart:
    """What a daemon starts with. kept: a predecessor's mount, or memory for a new one; None without a keeper.

    not_applied: what the configuration file has that does not count for this mount; "" if it counts.
    is_one_of_several, is_beside_others: as for `connect`.
    """

    options: MountOptions
    kept: KeptMount | None
    not_applied: str
    is_one_of_several: bool = False
    is_beside_others: bool = False


def begin(load: Callable[[str], MountOptions], config: Path | None) -> DaemonStart:
    """Return what this process starts with. A successor shows what its predecessor showed, whatever the file says.

    load: returns the options with this text as the configuration file, or raises ConfigError. config: that file.
    Raises ConfigError, MountError. Ends this process if it cannot go on with the predecessor's mount.
    """
    kept = _kept_mount()
    before = None if kept is None or not kept.is_resumed else kept.table.get(_CONFIG)
    not_applied = ""
    try:
        text = "" if config is None else read_config(config)
        options = load(text)
        if before is not None:
            _refuse_changes(before["shown"], _shown(options), config)
    except ConfigError as exc:
        if before is None:
            raise
        text, not_applied = (
            before["text"],
            f"{exc}. This mount goes on with the configuration that it had before",
        )
        options = load(text)
    if kept is not None:
        kept.table.put(_CONFIG, {"text": text, "shown": _shown(options)})
        if kept.is_resumed:
            # Programs use the mount.
            options = replace(options, requests=replace(options.requests, start_without="keys"))
    return DaemonStart(options, kept, not_applied)


def _refuse_changes(before: dict[str, str], now: dict[str, str], config: Path | None) -> None:
    # An option that one of the two programs does not know says nothing.
    changed = [name for name, value in now.items() if before.get(name, value) != value]
    if changed:
        raise ConfigError(f"{config} changes {', '.join(changed)}: to apply it, unmount and mount again")


def _kept_mount() -> KeptMount | None:
    is_successor = KEPT_VARIABLE in os.environ
    try:
        return KeptMount.of_environment()
    except FormatUnknown as exc:
        KeptMount.tell_why(f"the daemon cannot go on with the mount of its predecessor: {exc}")
        sys.exit(STATUS_CANNOT_RESUME)
    except OSError as exc:
        if is_successor:
            raise MountError(f"cannot take over the mount: {exc.strerror}") from exc
        log.warning("the mount will end with this daemon, as it has no shared memory: %s", exc)
        return None


def _shown(options: MountOptions) -> dict[str, str]:
    """Return the options that say what a mount shows, and how."""
    return {
        **{name: str(getattr(options, name)) for name in _SHOWN},
        "fuse_library": options.session.fuse_library,
        "keep_mounted": str(options.session.keep_mounted),
    }


def prepare_successor(kept: KeptMount, program: str, mountpoint: str) -> None:
    """Return when a successor waits that runs the Python at `program`; blocks. Raises MountError if there is none."""
    if why := kept.name_program(program):
        raise MountError(
            f"{mountpoint}: {program} is not ready to serve, so the daemon goes on: {why}. Check it with "
            f"`{program} -m fusecache version`, and upgrade again"
        )


class BucketAnswers:
    """What the store does with the conditions of writes: a successor need not ask again.

    known: what an earlier daemon of this mount found out; None: nothing. is_in_use: there was an earlier daemon.
    """

    def __init__(self, kept: KeptMount | None) -> None:
        self.is_in_use = kept is not None and kept.is_resumed
        self._table = None if kept is None else kept.table
        self.known: ConditionalWrites | None = None
        if self._table is not None and (found := self._table.get(_CONDITIONS)):
            with suppress(ValueError):  # a later version's
                self.known = ConditionalWrites(found)

    def record(self, found: ConditionalWrites) -> None:
        """The bucket has answered what a start asks."""
        if self._table is not None:
            self._table.put(_CONDITIONS, found.value)
