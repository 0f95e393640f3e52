"""Puts a keeper process around the daemon, so that the mount outlives it (`keeper.py`)."""

import logging
import os
import sys
from collections.abc import Sequence
from contextlib import suppress

from fusecache import keeper
from fusecache.config.options import MountOptions
from fusecache.disk.native import forbid_core_dumps
from fusecache.fuse.kept_mount import KEEPER_VARIABLE, STATUS_CANNOT_RESUME, KeptMount, await_turn
from fusecache.fuse.kept_table import FormatUnknown
from fusecache.mount.own_program import own_program
from fusecache.remote.store import ConditionalWrites

log = logging.getLogger(__name__)


def become_keeper(options: MountOptions, words: Sequence[str], report: int | None) -> None:
    """Replace this process by a keeper that starts it again; return if that is of no use, or not wanted.

    words: of the command line, from the command on. report: the descriptor of `--ready-fd`.
    """
    if not _can_outlive(options) or KEEPER_VARIABLE in os.environ:
        return
    if report is not None:
        os.set_inheritable(report, True)  # noqa: FBT003  # takes no keyword
    # Without site-packages: the keeper is to be small.
    start = [sys.executable, "-I", "-S", keeper.__file__]
    # A successor must not look for modules in the working directory, which its own mount may cover.
    os.execv(sys.executable, [*start, *own_program(), *words])


def wait_as_standby() -> None:
    """Return when the keeper needs this process. Ends it if the keeper never does."""
    forbid_core_dumps()
    await_turn()


def kept_mount(options: MountOptions) -> KeptMount | None:
    """Return what outlives this process: a predecessor's mount, or memory for a new one; None without a keeper.

    Ends this process if it cannot go on with the predecessor's mount.
    """
    if not _can_outlive(options):
        return None
    try:
        kept = KeptMount.of_environment()
    except FormatUnknown as exc:
        log.error("cannot go on with the mount: %s", exc)
        sys.exit(STATUS_CANNOT_RESUME)
    except OSError as exc:
        log.warning("the mount will end with this daemon, as it has no shared memory: %s", exc)
        return None
    if kept is not None:
        kept.offer_standby()
    return kept


def _can_outlive(options: MountOptions) -> bool:
    # pyfuse3 hides what a successor needs.
    return options.session.keep_mounted and options.session.fuse_library != "pyfuse3"


class BucketAnswers:
    """What each bucket's store does with the conditions of writes: a successor need not ask again.

    known: what an earlier daemon of this mount found out, by the name of the bucket's folder. is_in_use: the mount has
    had an earlier daemon.
    """

    def __init__(self, kept: KeptMount | None) -> None:
        self.is_in_use = kept is not None and kept.is_resumed
        self._table = None if kept is None else kept.table
        self.known: dict[str, ConditionalWrites] = {}
        for name, value in () if self._table is None else self._table.items("bucket/"):
            with suppress(ValueError):  # a later version's
                self.known[name] = ConditionalWrites(value)

    def record(self, name: str, found: ConditionalWrites) -> None:
        """A bucket has answered what a start asks."""
        if self._table is not None:
            self._table.put(f"bucket/{name}", found.value)
