"""Stored orders in a folder that the user names: written once on a machine, mapped by all its processes.

One file an epoch (and stream), named by a digest of all that decides it: another dataset or setting has another
name. A file appears by rename, complete, so processes do not lock: one of the machine (`writes`) makes it, the others
wait until it is there, and after `wait_seconds` make it themselves: the bytes are the same. Within a process one thread
makes it, as the training loop and the hints ask for the same epochs. The writer removes files of its order that are
more than one epoch old. Nothing else is ever deleted.
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
# Ten times what 10**8 samples take on a slow processor.
DEFAULT_WAIT_SECONDS = 150.0
POLL_SECONDS = 0.05
# Held by the thread of this process that makes the file of this path. A forked child has none of those threads.
_making: dict[Path, threading.Lock] = {}
os.register_at_fork(after_in_child=_making.clear)


@dataclass(frozen=True, slots=True)
class OrderFiles:
    """folder: made if missing. identity: digest of dataset and settings. writes: whether this process makes files."""

    folder: Path
    identity: str
    writes: bool = True
    wait_seconds: float = DEFAULT_WAIT_SECONDS

    def get(
        self, name: str, samples: int, dtype: type[np.integer[Any]], fill: Callable[[Stored], None]
    ) -> Stored:
        """Return the order `name`, (samples,) of dtype, read-only; `fill` writes it into an array if need be.

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
        # No process's number: containers that share the folder have the same ones.
        partial = path.with_name(f"{path.name}.{os.urandom(8).hex()}.part")
        try:
            with partial.open("xb") as file:
                # Blocks are taken now: a full disk is an error here, not SIGBUS in the middle of a shuffle.
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
    """Take the pages of a mapped order, of which `ids` is a part, out of this process's count.

    The kernel keeps them, and what was written to them, for all. Does nothing to an order in memory.
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
