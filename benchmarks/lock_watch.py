"""How long a daemon held its interpreter's lock (GIL), by samples that neither stop nor slow it.

About every millisecond, `LockWatch` reads the word of the daemon's memory that names the thread with the lock
(process_vm_readv). The share of samples with a thread, times the seconds, is the time held. Its standard error comes
with it. A thread that the kernel has stopped while it has the lock counts, so compare on one machine, in turns.
py-spy stops a process of 90 threads for each sample: at 400 a second, a read took three times as long.
"""

import ctypes
import os
import random
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

# On average; jittered, so that the samples do not follow a rhythm of the daemon.
SAMPLE_SECONDS = 0.001
_WORD_BYTES = 8
# The word is near the front of `_PyRuntimeState`.
_SEARCHED_BYTES = 4096


class LockWatch:
    """Samples the lock of a process of this interpreter's file, from construction until `stop`."""

    def __init__(self, pid: int, path: str, offset: int) -> None:
        self._pid, self._address = pid, _front(pid, path) + offset
        self._held = self._samples = 0
        self._began = time.monotonic()
        self._seconds = 0.0
        self._is_stopped = False
        self._thread = threading.Thread(target=self._run, name="lock", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the thread."""
        self._is_stopped = True
        self._thread.join()
        self._seconds = time.monotonic() - self._began

    def figures(self, suffix: str, units: float) -> dict[str, float]:
        """Return the seconds held for each unit of work, and their standard error; nothing without samples."""
        if not self._samples:
            return {}
        share = self._held / self._samples
        error = (share * (1 - share) / self._samples) ** 0.5
        scale = self._seconds / units
        return {f"lock{suffix}": share * scale, f"lock_error{suffix}": error * scale}

    def _run(self) -> None:
        library = ctypes.CDLL(None)
        while not self._is_stopped:
            word = _word_at(library, self._pid, self._address)
            if word is None:
                return
            self._samples += 1
            self._held += word != 0
            time.sleep(SAMPLE_SECONDS * random.uniform(0.5, 1.5))


class NoWatch:
    """Instead of a `LockWatch`, for a process without such a lock."""

    def figures(self, suffix: str, units: float) -> dict[str, float]:
        """Return nothing."""
        return {}


@contextmanager
def watched_lock(pid: int) -> Iterator[LockWatch | NoWatch]:
    """Watch the lock of a process within the block, if it runs this interpreter; known for Python 3.11 only."""
    found = _holder_word() if sys.version_info[:2] == (3, 11) else None
    if found is None or not _front(pid, found[0]):
        yield NoWatch()
        return
    watch = LockWatch(pid, *found)
    try:
        yield watch
    finally:
        watch.stop()


class _Span(ctypes.Structure):
    _fields_ = (("start", ctypes.c_void_p), ("size", ctypes.c_size_t))


def _word_at(library: Any, pid: int, address: int) -> int | None:
    """Return the word at an address of a process, None if it cannot be read."""
    word = ctypes.c_uint64()
    here, there = _Span(ctypes.addressof(word), _WORD_BYTES), _Span(address, _WORD_BYTES)
    count = library.process_vm_readv(pid, ctypes.byref(here), 1, ctypes.byref(there), 1, 0)
    return word.value if count == _WORD_BYTES else None


def _holder_word() -> tuple[str, int] | None:
    """Return the interpreter's file, and how far behind its front in memory the lock's holder is named.

    That word names this thread while it runs Python, and is 0 during a call that releases the lock.
    """
    start = ctypes.addressof(ctypes.c_char.in_dll(ctypes.pythonapi, "_PyRuntime"))
    ctypes.pythonapi.PyThreadState_Get.restype = ctypes.c_void_p
    this_thread = ctypes.pythonapi.PyThreadState_Get()
    keeping, releasing, own = ctypes.PyDLL(None), ctypes.CDLL(None), os.getpid()
    for address in range(start, start + _SEARCHED_BYTES, _WORD_BYTES):
        if _word_at(keeping, own, address) == this_thread and _word_at(releasing, own, address) == 0:
            for line in _maps(own):
                first, _, last = line.split()[0].partition("-")
                if int(first, 16) <= start < int(last, 16) and "/" in line:
                    path = line[line.index("/") :]
                    return path, address - _front(own, path)
    return None


def _front(pid: int, path: str) -> int:
    """Return where a file begins in a process's memory; 0 if it is not there."""
    starts = [int(line.split("-")[0], 16) for line in _maps(pid) if line.endswith(f" {path}")]
    return min(starts, default=0)


def _maps(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/maps").read_text(encoding="utf-8").splitlines()
