"""Tells the daemon of a mount which byte ranges one process reads next. Advice only, as all hints are."""

import logging
import os
import weakref
from collections.abc import Sequence
from typing import NamedTuple

from fusecache.model.hints import CURSOR, PLAN, HintError, encode_cursor, encode_plan
from loader.base.mount_endpoint import MountEndpoint, find_endpoint
from loader.hints.job_name import hold_name, release_name
from loader.hints.plan_messages import REFUSED, path_on_mount

log = logging.getLogger(__name__)


class PlannedExtent(NamedTuple):
    """Bytes start … stop - 1 of a file, which are read in one step. path: below the directory of the hints."""

    step: int
    path: str
    start: int
    stop: int


class ExtentHints:
    """The hints for files below a directory, until they are closed or the last reference is gone.

    name: the beginning of the job's name in `fusecache status`. is_sending: False on a plain directory, where all
    calls do nothing. Failures are logged (DEBUG) and raise nothing.
    """

    def __init__(self, name: str, directory: str) -> None:
        place = find_endpoint(directory)
        self.is_sending = place is not None
        if place is None:
            return
        self._endpoint, self._folder = place
        self._job = hold_name(name, 0, directory)
        self._withdraw = weakref.finalize(self, _withdraw, self._endpoint, self._job, os.getpid())
        self._withdraw.atexit = (
            False  # the daemon sees the end of the process, and an exit must not wait for it
        )

    def send(self, extents: Sequence[PlannedExtent]) -> None:
        """Send what is read from now on, in the order of its steps, instead of what was sent before."""
        if not self.is_sending:
            return
        names = [path_on_mount(self._folder + extent.path) for extent in extents]
        rows = [(name, extent) for name, extent in zip(names, extents, strict=True) if name is not None]
        paths = sorted({name for name, _ in rows})
        number = {path: place for place, path in enumerate(paths)}
        try:
            message = encode_plan(
                window=0,
                step=0,
                paths=paths,
                path=[number[name] for name, _ in rows],
                start=[extent.start for _, extent in rows],
                length=[extent.stop - extent.start for _, extent in rows],
                first=[extent.step for _, extent in rows],
                span=[0] * len(rows),
            )
        except HintError as problem:  # more than one message holds
            log.debug(REFUSED, problem)
            return
        _send(self._endpoint, self._job + PLAN, message)
        self.move(0)  # a process that sends cursors is known to the daemon, which sees its end

    def move(self, step: int) -> None:
        """Tell the daemon that all steps before this one are done."""
        if self.is_sending:
            _send(self._endpoint, self._job + CURSOR, encode_cursor(step))

    def close(self) -> None:
        """Withdraw the hints."""
        if self.is_sending:
            self._withdraw()


def _withdraw(endpoint: MountEndpoint, job: str, process: int) -> None:
    if process == os.getpid():  # a forked child does not own the parent's hints
        _send(endpoint, job + PLAN, b"")
        release_name(job)


def _send(endpoint: MountEndpoint, file: str, message: bytes) -> None:
    try:
        endpoint.send(file, message)
    except OSError as problem:  # for example: the daemon has forgotten the job
        log.debug(REFUSED, problem)
