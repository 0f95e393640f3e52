"""Stores orders in a folder that the user names: one process of a machine writes them, all map them.

One file an epoch (and stream). Its name is a digest of everything that decides the order, so another dataset or setting
has another name. Files appear complete, by rename, so processes need no locks. One process of the machine (`writes`)
makes a file; the others wait for it, and after `wait_seconds` make the same bytes themselves. Within a process one
thread makes it, because the training loop and the hints request the same epochs. The writer deletes files of its own
order that are more than one epoch old. It never deletes anything else.
"""

import mmap
import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from loader.errors import OrderError
from loader.order.spec import Stored

ENDING = ".order"
# Ten times the time that 10**8 samples take on a slow processor.
DEFAULT_WAIT_SECONDS = 150.0
POLL_SECONDS = 0.05
# path -> lock of the thread of this process that makes the file. A forked child has none of those threads.
_making: dict[Path, threading.Lock] = {}
os.register_at_fork(after_in_child=_making.clear)


@dataclass(frozen=True, slots=True)
class OrderFiles:
    """folder: created if missing. identity: digest of dataset and settings. writes: whether this process makes files.

    wait_seconds: how long a process that does not write waits for a file before it makes the file itself.
    """

    folder: Path
    identity: str
    writes: bool = True
    wait_seconds: float = DEFAULT_WAIT_SECONDS

    def get(
        self, name: str, samples: int, dtype: type[np.integer[Any]], fill: Callable[[Stored], None]
    ) -> Stored:
        """Return the order `name`, (samples,) of dtype, read-only; `fill` writes it into an array if it is missing.

        name: the epoch, a dash, the stream. Raises OrderError if the folder cannot be written.
        """
        path = self.folder / f"{self.identity}-{name}{ENDING}"
        deadline = time.monotonic() + (0 if self.writes else self.wait_seconds)
        try:
            while not _is_complete(path, samples, dtype) and time.monotonic() < deadline:
                time.sleep(POLL_SECONDS)
            if not _is_complete(path, samples, dtype):
                with _making.setdefault(path, threading.Lock()):
                    if not _is_complete(path, samples, dtype):
                        self._write(path, samples, dtype, fill)
                _making.pop(path, None)
            return _mapped(path, samples, dtype) if samples else np.empty(0, dtype)
        except OSError as problem:
            raise OrderError(
                f"{path} cannot be written or mapped ({problem.strerror}): name another cache folder, or none"
            ) from problem

    def _write(
        self, path: Path, samples: int, dtype: type[np.integer[Any]], fill: Callable[[Stored], None]
    ) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        self._remove_older(int(path.name.removeprefix(f"{self.identity}-").partition("-")[0]))
        # Not the process id: containers that share the folder have equal process ids.
        partial = path.with_name(f"{path.name}.{os.urandom(8).hex()}.part")
        try:
            with partial.open("xb") as file:
                # Allocate blocks now: a full disk is an error here, not SIGBUS during the shuffle.
                os.posix_fallocate(file.fileno(), 0, max(samples * np.dtype(dtype).itemsize, 1))
            if samples:
                fill(_mapped(partial, samples, dtype, writable=True))
            partial.rename(path)
        finally:
            partial.unlink(missing_ok=True)

    def _remove_older(self, epoch: int) -> None:
        for path in self.folder.glob(f"{self.identity}-*{ENDING}"):
            number = path.name.removeprefix(f"{self.identity}-").partition("-")[0]
            if number.isdecimal() and int(number) < epoch - 1:
                with suppress(FileNotFoundError):
                    path.unlink()


def _mapped(path: Path, samples: int, dtype: type[np.integer[Any]], *, writable: bool = False) -> Stored:
    access = mmap.ACCESS_WRITE if writable else mmap.ACCESS_READ
    with path.open("r+b" if writable else "rb") as file:
        return np.ndarray(samples, dtype, mmap.mmap(file.fileno(), 0, access=access))


def release_pages(ids: Stored) -> None:
    """Release the pages of the mapped order that `ids` is a part of from this process's memory count.

    The kernel keeps them, with all writes, for all processes. Does nothing for an order in memory.
    """
    base = ids.base
    while isinstance(base, np.ndarray):
        base = base.base
    if isinstance(base, mmap.mmap):
        base.madvise(mmap.MADV_DONTNEED)


def _is_complete(path: Path, samples: int, dtype: type[np.integer[Any]]) -> bool:
    try:
        return path.stat().st_size == max(samples * np.dtype(dtype).itemsize, 1)
    except FileNotFoundError:
        return False
