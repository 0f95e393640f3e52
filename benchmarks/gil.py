"""How long a process held its interpreter's lock: samples of the lock's holder, read from outside.

Every millisecond the watcher reads, with process_vm_readv(2), the word of the interpreter's state that names the thread
with the lock. It neither stops nor slows the process. The held share of the samples, times the seconds of the watch, is
the result. A thread that holds the lock while the kernel runs another process counts as holding it.

Error: with n samples and a share p, the standard error of p is sqrt(p (1 - p) / n), about 1.5 % for 1 000 samples.
"""

import ctypes
import os
import random
import sys
import threading
import time
from pathlib import Path

from benchmarks.processes import BenchmarkError

# Jittered, so that the samples do not follow a rhythm of the process.
SAMPLE_SECONDS = 0.001
_WORD = 8
# _PyRuntimeState of 3.11 has about 100 KiB, with the main interpreter in it; the word is near its front.
_SEARCHED_BYTES = 4096


class _Iovec(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))


def _word_at(library: "ctypes.CDLL | ctypes.PyDLL", pid: int, address: int) -> int:
    """Return the word at an address of a process. Raises OSError."""
    word = ctypes.c_uint64()
    here, there = _Iovec(ctypes.addressof(word), _WORD), _Iovec(address, _WORD)
    if library.process_vm_readv(pid, ctypes.byref(here), 1, ctypes.byref(there), 1, 0) != _WORD:
        raise OSError(ctypes.get_errno(), "process_vm_readv")
    return word.value


def _base(pid: int, path: str) -> int:
    """Return where a file is mapped first in a process."""
    for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
        if line.endswith(f" {path}"):
            return int(line.split("-")[0], 16)
    raise BenchmarkError(f"{pid} does not run {path}")


def _mapped_file(address: int) -> str:
    for line in Path("/proc/self/maps").read_text().splitlines():
        start, stop = (int(text, 16) for text in line.split()[0].split("-"))
        if start <= address < stop and "/" in line:
            # The data behind a file's pages may be anonymous, but its first page is of the file.
            return line[line.index("/") :]
    raise BenchmarkError("the interpreter's state is in no file")


def _holder_word() -> tuple[str, int]:
    """Return the interpreter's file, and where in its memory the lock's holder is named.

    That word holds this thread's state while Python runs here, and nothing during a call that releases the lock.
    """
    if sys.version_info[:2] != (3, 11):
        raise BenchmarkError("the interpreter's lock can be watched in Python 3.11 only")
    start = ctypes.addressof(ctypes.c_char.in_dll(ctypes.pythonapi, "_PyRuntime"))
    ctypes.pythonapi.PyThreadState_Get.restype = ctypes.c_void_p
    state = ctypes.pythonapi.PyThreadState_Get()
    keeping, releasing = ctypes.PyDLL(None, use_errno=True), ctypes.CDLL(None, use_errno=True)
    for address in range(start, start + _SEARCHED_BYTES, _WORD):
        if _word_at(keeping, os.getpid(), address) == state and not _word_at(releasing, os.getpid(), address):
            path = _mapped_file(start)
            return path, address - _base(os.getpid(), path)
    raise BenchmarkError("no word of the interpreter's state names the lock's holder")


class GilWatch:
    """Samples the lock of a Python process that runs the same interpreter; `take` returns what it held since."""

    def __init__(self, pid: int) -> None:
        path, offset = _holder_word()
        self._pid, self._address = pid, _base(pid, path) + offset
        self._held = self._samples = 0
        self._began = time.monotonic()
        self._is_stopped = False
        self._thread = threading.Thread(target=self._run, name="gil", daemon=True)
        self._thread.start()

    def take(self) -> tuple[float, float]:
        """Return the seconds that the lock was held since the last call, and their standard error."""
        seconds = time.monotonic() - self._began
        samples, held = max(1, self._samples), self._held
        self._began, self._held, self._samples = time.monotonic(), 0, 0
        share = held / samples
        return share * seconds, (share * (1 - share) / samples) ** 0.5 * seconds

    def stop(self) -> None:
        """End the thread."""
        self._is_stopped = True
        self._thread.join()

    def _run(self) -> None:
        library = ctypes.CDLL(None, use_errno=True)
        word = ctypes.c_uint64()
        here, there = _Iovec(ctypes.addressof(word), _WORD), _Iovec(self._address, _WORD)
        arguments = (self._pid, ctypes.byref(here), 1, ctypes.byref(there), 1, 0)
        while not self._is_stopped:
            if library.process_vm_readv(*arguments) != _WORD:
                return
            self._samples += 1
            self._held += word.value != 0
            time.sleep(SAMPLE_SECONDS * random.uniform(0.5, 1.5))
