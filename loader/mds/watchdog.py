"""Logs reads that do not return: how many, which shard and samples, and for how long.

A read on a mount can wait for the network, and a hanging training loop does not show what it waits for. One daemon
thread a process checks once a second what is being read. It starts with the first read, and a forked child starts its
own. It never interrupts a read: only the file system decides whether and when a read fails.
"""

import logging
import os
import threading
import weakref
from collections.abc import Callable
from threading import get_ident
from time import monotonic, sleep

STALL_SECONDS = 30.0  # longer than any retry of a healthy bucket, shorter than the user's patience
TICK_SECONDS = 1.0
# Interval between two log lines while reads stay stalled.
REPEAT_SECONDS = 60.0

log = logging.getLogger("loader")

Reading = tuple[int, int, float]  # shard, number of shards read together, time.monotonic() at the beginning


class Watchdog:
    """Watches the reads of one dataset. describe: returns a text that names a shard and its samples."""

    def __init__(self, describe: Callable[[int], str], *, stall_seconds: float = STALL_SECONDS) -> None:
        self._describe = describe
        self._stall_seconds = stall_seconds
        self._busy: dict[int, Reading] = {}
        # The time at which the present stall began, which may include pauses; None if no read is stalled.
        self._stalled_since: float | None = None
        self._last_stalled = self._last_logged = 0.0
        _watched.add(self)

    def begin(self, shard: int, together: int = 1) -> None:
        """Record that this thread starts to read a shard; `end` must follow.

        together: the number of shards if one call reads several; then it is unknown which of them it waits for.
        """
        if _thread is None:
            _start()
        self._busy[get_ident()] = shard, together, monotonic()

    def end(self) -> None:
        """Record that this thread's read has returned."""
        del self._busy[get_ident()]

    def check(self, now: float) -> None:
        """Log when reads begin to stall, then once a minute, and when the stall is over.

        A loop that retries failed reads starts new ones. So a stall is over only when no read has stalled for twice
        stall_seconds.
        """
        stalled = [each for each in set(self._busy.copy().values()) if now - each[2] >= self._stall_seconds]
        if stalled:
            self._last_stalled = now
            oldest = min(stalled, key=lambda each: each[2])
            if self._stalled_since is None:
                self._stalled_since = oldest[2]
                self._warn(stalled, oldest, now)
            elif now - self._last_logged >= REPEAT_SECONDS:
                self._warn(stalled, oldest, now)
        elif self._stalled_since is not None and now - self._last_stalled > 2 * self._stall_seconds:
            log.warning(
                "reads no longer stalled after_seconds=%.0f", self._last_stalled - self._stalled_since
            )
            self._stalled_since = None

    def _warn(self, stalled: list[Reading], oldest: Reading, now: float) -> None:
        self._last_logged = now
        shard, together, since = oldest
        others = f", or one of the {together - 1} shards read with it" if together > 1 else ""
        log.warning(
            "reads stalled count=%d longest_seconds=%.0f (%s%s); they keep waiting; on a mount, `fusecache status "
            "MOUNTPOINT` shows the cause",
            len(stalled),
            now - since,
            self._describe(shard),
            others,
        )

    def reset(self) -> None:
        """Drop the reads of other threads: after a fork they do not exist."""
        self._busy.clear()
        self._stalled_since = None


_watched: "weakref.WeakSet[Watchdog]" = weakref.WeakSet()
_thread: threading.Thread | None = None


def _start() -> None:
    # Two threads may start two watchdogs concurrently. At worst, each line is logged twice.
    global _thread
    _thread = threading.Thread(target=_run, name="loader-watchdog", daemon=True)
    _thread.start()


def _run() -> None:
    while True:
        sleep(TICK_SECONDS)
        _check_all()


def _check_all() -> None:
    # Not inlined into `_run`: its local variable would keep the last dataset, and its open files, alive for ever.
    for watchdog in list(_watched):
        watchdog.check(monotonic())


def _reset_after_fork() -> None:
    global _thread
    _thread = None
    for watchdog in _watched:
        watchdog.reset()


os.register_at_fork(after_in_child=_reset_after_fork)
