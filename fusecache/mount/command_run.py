"""Runs a command beside a mount: passes signals on to it, and ends it in time after a notice.

A notice is the first SIGTERM, SIGINT or SIGHUP: the node goes away soon. Processes that the command leaves behind
become children of this process, so that they can be ended: a mount in use cannot be unmounted.
"""

import ctypes
import os
import select
import signal
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any, Self

NOTICES = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
PASSED_ON = (*NOTICES, signal.SIGUSR1, signal.SIGUSR2)
# The part of the time after a notice that the command gets. The rest is for the last uploads.
COMMAND_SHARE = 0.7
# What a process that the command left behind gets after SIGTERM, if there is no notice.
LEFT_BEHIND_SECONDS = 10.0
# The exit statuses of a shell for a command that cannot be started.
NOT_EXECUTABLE, NOT_FOUND = 126, 127
# linux/prctl.h
_PR_SET_CHILD_SUBREAPER = 36
_POLL_SECONDS = 0.05


class NoticeReceived(Exception):  # no error
    """A notice came during `CommandRun.interruptible`."""


class CommandRun:
    """Receives the signals of this process, and runs one command. Use it in a `with` block, in the main thread."""

    def __init__(self, sync_seconds: float) -> None:
        """sync_seconds: from a notice to the moment when all should be over."""
        self._sync_seconds = sync_seconds
        self._noticed: float | None = None
        self._notice = 0
        self._child: int | None = None
        self._is_interruptible = False
        self._before: dict[int, Any] = {}
        self._reader = self._writer = self._old_wakeup = -1

    def __enter__(self) -> Self:
        """Receive signals from now on."""
        self._reader, self._writer = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._old_wakeup = signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        self._before = {number: signal.signal(number, self._on_signal) for number in PASSED_ON}
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        return self

    def __exit__(self, *_: object) -> None:
        """Give the signals back."""
        for number, handler in self._before.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._old_wakeup)
        os.close(self._reader)
        os.close(self._writer)

    @property
    def notice(self) -> int:
        """The number of the first notice; 0 if none came."""
        return self._notice

    def seconds_left(self) -> float | None:
        """Return the seconds until all should be over; None without a notice."""
        return (
            None if self._noticed is None else max(0.0, self._noticed + self._sync_seconds - time.monotonic())
        )

    @contextmanager
    def interruptible(self) -> Iterator[None]:
        """Raise NoticeReceived in the block if the first notice comes in it."""
        self._is_interruptible = self._noticed is None
        try:
            yield
        finally:
            self._is_interruptible = False

    def run(self, command: Sequence[str]) -> int:
        """Run the command, end what it leaves behind, and return its exit status: 128 + the signal that ended it.

        After a notice, what still runs when the command's share of the time is over is killed. Processes that this one
        started before stay alive, with theirs: a daemon, or the keeper that starts daemons. Raises OSError if the
        command cannot be started.
        """
        spared = frozenset(descendants(os.getpid()))
        self._child = os.posix_spawnp(command[0], list(command), os.environ)
        if self._notice:  # it came before the command could get it
            self._pass_on(self._notice)
        handle = os.pidfd_open(self._child)
        try:
            status = self._wait(handle, spared)
        finally:
            os.close(handle)
        self._end_left_behind(spared)
        return 128 - status if status < 0 else status

    # ---- private

    def _on_signal(self, number: int, _: FrameType | None) -> None:
        if number in NOTICES and self._noticed is None:
            self._noticed, self._notice = time.monotonic(), number
        self._pass_on(number)
        if self._is_interruptible:
            self._is_interruptible = False
            raise NoticeReceived

    def _pass_on(self, number: int) -> None:
        # A terminal sends SIGINT to the command itself, too.
        if self._child is not None and not (number == signal.SIGINT and os.isatty(0)):
            os.kill(self._child, number)

    def _wait(self, handle: int, spared: Collection[int]) -> int:
        """Return the command's status, negative for a signal, once it has ended."""
        assert self._child is not None
        poll = select.poll()
        for descriptor in (handle, self._reader):
            poll.register(descriptor, select.POLLIN)
        while True:
            left = self._seconds_to_kill()
            ready = dict(poll.poll(None if left is None else left * 1000))
            if handle in ready:
                child, self._child = self._child, None
                return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            if self._reader in ready:
                os.read(self._reader, 4096)
            elif left is not None:
                _signal_all(descendants(os.getpid(), spared), signal.SIGKILL)
                time.sleep(_POLL_SECONDS)

    def _seconds_to_kill(self) -> float | None:
        left = self.seconds_left()
        return None if left is None else max(0.0, left - (1 - COMMAND_SHARE) * self._sync_seconds)

    def _end_left_behind(self, spared: Collection[int]) -> None:
        """End all other children of this process: first SIGTERM, then SIGKILL."""
        began = time.monotonic()
        _signal_all(descendants(os.getpid(), spared), signal.SIGTERM)
        while left := descendants(os.getpid(), spared):
            seconds = self._seconds_to_kill()
            if time.monotonic() - began > LEFT_BEHIND_SECONDS if seconds is None else not seconds:
                _signal_all(left, signal.SIGKILL)
            for process in left:
                with suppress(
                    ChildProcessError
                ):  # collect it, if it has ended and is a child of this process
                    os.waitpid(process, os.WNOHANG)
            time.sleep(_POLL_SECONDS)


def descendants(parent: int, spared: Collection[int] = ()) -> list[int]:
    """Return the processes that a process has started, directly or not. spared: left out, each with its own."""
    children: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            process, rest = int(stat.parent.name), stat.read_bytes().rpartition(b")")[2].split()
            children.setdefault(int(rest[1]), []).append(process)
    found, pending = [], [parent]
    while pending:
        below = [child for child in children.get(pending.pop(), []) if child not in spared]
        found += below
        pending += below
    return found


def _signal_all(processes: Sequence[int], number: int) -> None:
    for process in processes:
        with suppress(ProcessLookupError):
            os.kill(process, number)
