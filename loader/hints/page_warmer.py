"""Reads whole shards into the kernel's page cache once the daemon has them, before their samples are needed.

A sample in the page cache costs some microseconds, a request to the daemon a hundred times as much. A whole shard
costs the daemon no more than some dozens of samples, because it is read 1 MiB at a time.

The daemon reports what it has fetched of a job's plan (`docs/hints.md`: read the plan file). Memory is bounded: shards
that are still needed take at most half the memory of the machine or container; then the warmer waits. The pages are
clean page cache, which the kernel reclaims first. Advice only: a failed read is left to the reader.
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

from fusecache.config.node_limits import memory_bytes
from loader.base.cached_files import CachedFiles

log = logging.getLogger(__name__)

# How often the daemon's report is read.
POLL_SECONDS = 0.1
# Bytes read between two checks whether to stop.
STRIDE_BYTES = 8 << 20
# Slower than 200 MB/s: readers of samples on such a disk would wait for the warmer.
SLOW_STRIDE_SECONDS = 0.04
# A stride that took longer was an outage, so rest no longer than this.
LONGEST_REST_SECONDS = 1.0


@dataclass(eq=False, slots=True)
class _WarmedPlan:
    """The shards of one plan window, (shards,) each, in the plan's order; those before `next` are done."""

    shards: NDArray[np.int64]
    last: NDArray[np.int64]
    next: int = 0


class PageWarmer:
    """Follows one job's plan on one mount, on a thread of its own.

    report: the file in which the daemon reports what it has of the plan. file_of: a shard's file; None for a shard that
    is read as a whole anyway. limit_bytes: the limit for shards that are still needed.
    """

    def __init__(
        self, report: Path, file_of: Callable[[int], str | None], *, limit_bytes: int | None = None
    ) -> None:
        self._report = report
        self._file_of = file_of
        self._limit_bytes = memory_bytes() // 2 if limit_bytes is None else limit_bytes
        self._cached_files = CachedFiles()
        self._lock = threading.Lock()
        self._windows: dict[int, _WarmedPlan] = {}
        self._step = 0
        # shard in the page cache -> its bytes, and the step of its last read.
        self._held: dict[int, tuple[int, int]] = {}
        # sendfile(2) copies nothing. POSIX_FADV_WILLNEED would read only one read-ahead window.
        self._null_fd = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None

    def plan(self, number: int, shards: NDArray[np.int64], last: NDArray[np.int64]) -> None:
        """Accept a plan window as sent; it replaces all windows with this number or a higher one."""
        with self._lock:
            self._windows = {key: window for key, window in self._windows.items() if key < number}
            self._windows[number] = _WarmedPlan(shards, last)
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="fusecache-pages", daemon=True)
            self._thread.start()

    def move(self, step: int) -> None:
        """Record that all steps before this one are done."""
        with self._lock:
            self._step = step
            self._windows = {
                key: window
                for key, window in self._windows.items()
                if window.last.size and int(window.last.max()) >= step
            }
            self._held = {shard: held for shard, held in self._held.items() if held[1] >= step}

    def close(self) -> None:
        """Stop; a read in flight ends within one stride."""
        self._stopped.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._null_fd >= 0:
            os.close(self._null_fd)
            self._null_fd = -1

    # ---- the thread

    def _run(self) -> None:
        while not self._stopped.wait(POLL_SECONDS):
            try:
                self._poll()
            except (OSError, ValueError, KeyError, TypeError) as problem:
                log.debug("the daemon's report of fetched shards is unreadable: %s", problem)

    def _poll(self) -> None:
        """Read the shards that the daemon has, up to the memory limit."""
        with self._lock:
            is_done = all(window.next >= window.shards.size for window in self._windows.values())
        if is_done:
            return
        report = json.loads(self._report.read_bytes())
        for number, fetched in zip(report["windows"], report["fetched"], strict=True):
            while (shard := self._next_shard(int(number), int(fetched))) is not None:
                if not self._read_in(shard):
                    return

    def _next_shard(self, number: int, fetched: int) -> int | None:
        """Return the next shard of a window that the daemon has; None if there is none, or the memory limit is hit."""
        with self._lock:
            window = self._windows.get(number)
            if window is None or self._stopped.is_set() or self._held_bytes() >= self._limit_bytes:
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
        """Read a shard into the page cache; return False if the warmer is to stop."""
        path = self._file_of(shard)
        if path is None:
            return True
        try:
            # Readers that have it open through the mount, from before it was whole, use the pages of the mount.
            given = self._cached_files.open(path, unless_open=True)
            descriptor = given[0] if given else os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError as problem:
            log.debug("shard not warmed: %s", problem)
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
                os.sendfile(self._null_fd, descriptor, start, STRIDE_BYTES)
                self._rest(time.monotonic() - began)
        except OSError as problem:
            log.debug("shard not warmed: %s: %s", path, problem)
        finally:
            os.close(descriptor)
        return True

    def _rest(self, seconds: float) -> None:
        """After a slow stride (a slow disk, or other readers), leave the disk to others for as long as it took."""
        if seconds > SLOW_STRIDE_SECONDS:
            self._stopped.wait(min(seconds, LONGEST_REST_SECONDS))
