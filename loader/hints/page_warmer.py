"""Has the kernel read whole shards into its pages once the daemon has them, before their samples are asked for.

A sample in the kernel's pages costs some microseconds, one for which the daemon is asked a hundred times as much; and
a whole shard costs the daemon no more than some dozens of samples do, as it is asked for 1 MiB at a time.

What the daemon has of a job's plan it says itself (`docs/hints.md`: the plan, read back). Memory is bounded: shards
that are still needed take half of the machine's, or of the container's; more is not asked for before they are done.
The pages are the kernel's, clean, and the first that it takes back. Advice only: whatever fails is left to the reader.
"""

import json
import logging
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

log = logging.getLogger(__name__)

LOOK_SECONDS = 0.1
# So much is read before it is asked again whether to go on.
STRIDE_BYTES = 8 << 20
# 200 MB/s: whoever reads samples from such a disk meanwhile would wait for them.
SLOW_STRIDE_SECONDS = 0.04
# One that took longer stood still: an outage.
LONGEST_REST_SECONDS = 1.0
_CGROUP_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")


@dataclass(eq=False, slots=True)
class _WarmedPlan:
    """Shards of one window of the plan, (shards,) each, in the plan's order; those before `next` are done with."""

    shards: NDArray[np.int64]
    last: NDArray[np.int64]
    next: int = 0


class PageWarmer:
    """Follows one job's plan on one mount, on a thread of its own.

    facts: the file in which the daemon says what it has of the plan. file_of: a shard's file; None: of no use, as it
    is read whole by whoever needs it. room_bytes: for shards that are still needed.
    """

    def __init__(
        self, facts: Path, file_of: Callable[[int], str | None], *, room_bytes: int | None = None
    ) -> None:
        self._facts = facts
        self._file_of = file_of
        self._room = memory_bytes() // 2 if room_bytes is None else room_bytes
        self._lock = threading.Lock()
        self._windows: dict[int, _WarmedPlan] = {}
        self._step = 0
        # Of each shard in the pages: its bytes, and the step of its last read.
        self._held: dict[int, tuple[int, int]] = {}
        # Reading by sendfile(2) copies nothing. POSIX_FADV_WILLNEED would read one window of read-ahead only.
        self._nowhere = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None

    def plan(self, number: int, shards: NDArray[np.int64], last: NDArray[np.int64]) -> None:
        """Take a window as it was sent; it takes the place of all that had this number or a higher one."""
        with self._lock:
            self._windows = {key: window for key, window in self._windows.items() if key < number}
            self._windows[number] = _WarmedPlan(shards, last)
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="fusecache-pages", daemon=True)
            self._thread.start()

    def move(self, step: int) -> None:
        """All steps before this one are done."""
        with self._lock:
            self._step = step
            self._windows = {
                key: window
                for key, window in self._windows.items()
                if window.last.size and int(window.last.max()) >= step
            }
            self._held = {shard: held for shard, held in self._held.items() if held[1] >= step}

    def close(self) -> None:
        """Stop; what is being read in comes to an end within a stride."""
        self._stopped.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._nowhere >= 0:
            os.close(self._nowhere)
            self._nowhere = -1

    # ---- the thread

    def _run(self) -> None:
        while not self._stopped.wait(LOOK_SECONDS):
            try:
                self._look()
            except (OSError, ValueError, KeyError, TypeError) as problem:
                log.debug("the daemon does not say what it has: %s", problem)

    def _look(self) -> None:
        """Read in what the daemon has, as far as there is room."""
        with self._lock:
            is_done = all(window.next >= window.shards.size for window in self._windows.values())
        if is_done:
            return
        facts = json.loads(self._facts.read_bytes())
        for number, fetched in zip(facts["windows"], facts["fetched"], strict=True):
            while (shard := self._take(int(number), int(fetched))) is not None:
                if not self._read_in(shard):
                    return

    def _take(self, number: int, fetched: int) -> int | None:
        """Return the next shard of a window that the daemon has, None if there is none, or no room for any."""
        with self._lock:
            window = self._windows.get(number)
            if window is None or self._stopped.is_set() or self._held_bytes() >= self._room:
                return None
            while window.next < min(fetched, window.shards.size):
                shard, last = int(window.shards[window.next]), int(window.last[window.next])
                window.next += 1
                if last >= self._step:
                    size, until = self._held.get(shard, (0, -1))
                    self._held[shard] = size, max(until, last)
                    return shard
        return None

    def _held_bytes(self) -> int:
        return sum(size for size, _ in self._held.values())

    def _read_in(self, shard: int) -> bool:
        """Have the kernel read a shard; False if it is to stop."""
        path = self._file_of(shard)
        if path is None:
            return True
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError as problem:
            log.debug("not read ahead: %s", problem)
            return True
        try:
            size = os.fstat(descriptor).st_size
            with self._lock:
                if shard in self._held:
                    self._held[shard] = size, self._held[shard][1]
            for start in range(0, size, STRIDE_BYTES):
                if self._stopped.is_set():
                    return False
                began = time.monotonic()
                os.sendfile(self._nowhere, descriptor, start, STRIDE_BYTES)
                self._rest(time.monotonic() - began)
        except OSError as problem:
            log.debug("not read ahead: %s: %s", path, problem)
        finally:
            os.close(descriptor)
        return True

    def _rest(self, seconds: float) -> None:
        """Leave the disk to others for as long as a stride took, if it is a slow one, or they use it."""
        if seconds > SLOW_STRIDE_SECONDS:
            self._stopped.wait(min(seconds, LONGEST_REST_SECONDS))


def memory_bytes() -> int:
    """Return the memory of this machine, or of this container if that is less."""
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    for path in _CGROUP_LIMITS:
        try:
            text = Path(path).read_text().strip()
        except OSError:
            continue
        if text.isdigit():  # "max": no limit
            total = min(total, int(text))
    return total
