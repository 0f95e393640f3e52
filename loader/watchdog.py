"""Tells of reads that do not come back: which shard, which samples, and for how long already.

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
        self._told: dict[Reading, float] = {}
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
        """Log each read that has lasted too long, and again whenever its age has doubled."""
        reads = set(self._busy.copy().values())
        self._told = {read: age for read, age in self._told.items() if read in reads}
        for reading in reads:
            shard, together, since = reading
            age = now - since
            if age >= 2 * self._told.get(reading, self._stall_seconds / 2):
                self._told[reading] = age
                others = f" or_one_of_shards={together - 1}" if together > 1 else ""
                log.warning("read stalled age_seconds=%.0f %s%s", age, self._describe(shard), others)

    def forget(self) -> None:
        """Drop what other threads were reading: after a fork there are none."""
        self._busy.clear()


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
        for watchdog in list(_watched):
            watchdog.look(monotonic())


def _forget_thread() -> None:
    global _thread
    _thread = None
    for watchdog in _watched:
        watchdog.forget()


os.register_at_fork(after_in_child=_forget_thread)
