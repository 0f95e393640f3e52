"""Tells of reads that do not come back: how many, which shard and samples, and for how long already.

A read of a mount can wait for a network, and a training loop that hangs does not say on what. One daemon
thread a process looks once a second at what is being read; it begins with the first read, and a forked child
begins its own. It never interrupts a read: whether that fails, and when, is the file system's to say.
"""

import logging
import os
import threading
import weakref
from collections.abc import Callable
from threading import get_ident
from time import monotonic, sleep

STALL_SECONDS = 30.0  # longer than any retry of a healthy bucket, shorter than a patience
TICK_SECONDS = 1.0
# Between two lines of what goes on all the same.
AGAIN_SECONDS = 60.0

log = logging.getLogger("loader")

Reading = tuple[
    int, int, float
]  # shard, how many shards are read together, time.monotonic() of the beginning


class Watchdog:
    """Watches the reads of one dataset. describe: names a shard and its samples."""

    def __init__(self, describe: Callable[[int], str], *, stall_seconds: float = STALL_SECONDS) -> None:
        self._describe = describe
        self._stall_seconds = stall_seconds
        self._busy: dict[int, Reading] = {}
        # Since when reads have been stalled, with pauses: None if they are not.
        self._since: float | None = None
        self._last_stalled = self._last_told = 0.0
        _watched.add(self)

    def begin(self, shard: int, together: int = 1) -> None:
        """Say that this thread waits for a shard from now on; `end` must follow.

        together: the number of shards, if more are read by the same call: then which one it waits for is not known.
        """
        if _thread is None:
            _start()
        self._busy[get_ident()] = shard, together, monotonic()

    def end(self) -> None:
        """Say that this thread waits no more."""
        del self._busy[get_ident()]

    def look(self, now: float) -> None:
        """Log that reads last too long when that begins, each minute with how many there are, and when it is over.

        A loop that tries again what has failed begins new reads: it is over when none has lasted too long for as long
        as two of them may.
        """
        stalled = [each for each in set(self._busy.copy().values()) if now - each[2] >= self._stall_seconds]
        if stalled:
            self._last_stalled = now
            oldest = min(stalled, key=lambda each: each[2])
            if self._since is None:
                self._since = oldest[2]
                self._warn(stalled, oldest, now)
            elif now - self._last_told >= AGAIN_SECONDS:
                self._warn(stalled, oldest, now)
        elif self._since is not None and now - self._last_stalled > 2 * self._stall_seconds:
            log.warning("reads come back again, after %.0f s", self._last_stalled - self._since)
            self._since = None

    def _warn(self, stalled: list[Reading], oldest: Reading, now: float) -> None:
        self._last_told = now
        shard, together, since = oldest
        others = f", or one of the {together - 1} shards read with it" if together > 1 else ""
        log.warning(
            "reads do not come back: %d of them now, the longest for %.0f s (%s%s); they go on waiting; "
            "on a mount, `fusecache status MOUNTPOINT` says for what",
            len(stalled),
            now - since,
            self._describe(shard),
            others,
        )

    def forget(self) -> None:
        """Drop what other threads were reading: after a fork there are none."""
        self._busy.clear()
        self._since = None


_watched: "weakref.WeakSet[Watchdog]" = weakref.WeakSet()
_thread: threading.Thread | None = None


def _start() -> None:
    # Two threads that come at once start two: both look, and one line is logged twice at worst.
    global _thread
    _thread = threading.Thread(target=_run, name="loader-watchdog", daemon=True)
    _thread.start()


def _run() -> None:
    while True:
        sleep(TICK_SECONDS)
        _look_at_all()


def _look_at_all() -> None:
    # Apart from `_run`: a local variable there would keep the last dataset, and its open files, for ever.
    for watchdog in list(_watched):
        watchdog.look(monotonic())


def _forget_thread() -> None:
    global _thread
    _thread = None
    for watchdog in _watched:
        watchdog.forget()


os.register_at_fork(after_in_child=_forget_thread)
