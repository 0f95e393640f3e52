"""Reads many small records of one size into one block of memory, up to 256 of them in one system call.

`io_submit` takes a list of reads. For files opened without O_DIRECT, each read is complete when it returns, so this is
preadv without the interpreter's overhead: a tenth to a third less CPU a read. The interpreter's lock is released once
a call instead of once a sample (8 KiB from the page cache: 1.9 against 2.6 µs, 2 cores, Linux 6.18). preadv is the
fallback if io_submit is unavailable (another system, a sandbox, no contexts left), and for records that it did not
read completely. Unlike a mapped file, neither kills the process when a read fails.
"""

import ctypes
import os
import platform
import sys
import threading

import numpy as np
from numpy.typing import NDArray

# linux/aio_abi.h; the numbers are from arch/x86/entry/syscalls/syscall_64.tbl and asm-generic/unistd.h.
_NUMBERS = {"x86_64": (206, 207, 208, 209), "aarch64": (0, 1, 4, 2)}
_IOCB = np.dtype(
    [("data", "<u8"), ("key", "<u8"), ("opcode", "<u2"), ("priority", "<i2"), ("file", "<u4"), ("buffer", "<u8"),
     ("bytes", "<u8"), ("offset", "<i8"), ("reserved", "<u8"), ("flags", "<u8")]
)  # fmt: skip
_EVENT = np.dtype([("data", "<u8"), ("iocb", "<u8"), ("result", "<i8"), ("result2", "<i8")])
# Events a context. The kernel limits the sum over all contexts of a machine, to 65 536 by default.
_PLACES = 256


def read_batched(
    files: NDArray[np.int32], offsets: NDArray[np.int64], block: NDArray[np.uint8]
) -> NDArray[np.intp]:
    """Fill each row of a block from its file at its offset; return (rows,) the rows that this could not fill.

    files, offsets: (rows,). block: (rows, bytes), C-contiguous. To get the error of a returned row, read it singly.
    Raises nothing of its own.
    """
    context = _context()
    if context is None:
        return _read_by_preadv(files, offsets, block)
    bad = [np.empty(0, np.intp)]
    for first in range(0, len(block), _PLACES):
        part = slice(first, first + _PLACES)
        bad.append(first + context.read(files[part], offsets[part], block[part]))
    return np.concatenate(bad)


def _read_by_preadv(
    files: NDArray[np.int32], offsets: NDArray[np.int64], block: NDArray[np.uint8]
) -> NDArray[np.intp]:
    size = block.shape[1]
    view = memoryview(block.reshape(-1).data)
    rows = zip([view[start : start + size] for start in range(0, len(view), size)])
    reads = zip(files.tolist(), rows, offsets.tolist(), strict=True)
    got: list[int] = []
    for file, row, offset in reads:
        try:
            got.append(os.preadv(file, row, offset))
        except OSError:
            got.append(-1)
    return np.flatnonzero(np.array(got, np.int64) != size)


class _Context:
    """The io_context of one thread. Raises OSError if the kernel gives none."""

    def __init__(self) -> None:
        self._setup, self._destroy, self._getevents, self._submit = _NUMBERS[platform.machine()]
        self._process = os.getpid()
        self._handle = ctypes.c_ulong(0)
        self._call(self._setup, _PLACES, ctypes.byref(self._handle))
        self._calls = np.zeros(_PLACES, _IOCB)
        self._first_number = 0
        self._rows = np.arange(_PLACES, dtype=np.uint64)
        self._pointers = self._calls.ctypes.data + _IOCB.itemsize * self._rows
        self._events = np.zeros(_PLACES, _EVENT)
        # Asking numpy for an address takes a microsecond.
        self._pointers_address, self._events_address = self._pointers.ctypes.data, self._events.ctypes.data

    def __del__(self) -> None:
        # A forked child does not own its parent's contexts.
        if self._handle.value and self._process == os.getpid():
            _syscall(ctypes.c_long(self._destroy), self._handle)

    @property
    def is_ours(self) -> bool:
        """Whether it belongs to this process: a forked child does not own its parent's contexts."""
        return self._process == os.getpid()

    def read(
        self, files: NDArray[np.int32], offsets: NDArray[np.int64], block: NDArray[np.uint8]
    ) -> NDArray[np.intp]:
        """Fill at most _PLACES rows; return the rows that were not filled."""
        rows, size = block.shape
        calls = self._calls[:rows]
        calls["file"], calls["offset"], calls["bytes"] = files, offsets, size
        calls["buffer"] = block.ctypes.data + size * self._rows[:rows]
        # Number the reads, so that events left by an interrupted call are recognised.
        self._first_number += _PLACES
        calls["data"] = self._first_number + self._rows[:rows]
        filled = np.zeros(rows, bool)
        done = 0
        while done < rows:
            address = ctypes.c_void_p(self._pointers_address + 8 * done)
            try:
                taken = self._call(self._submit, self._handle, ctypes.c_long(rows - done), address)
                self._collect(taken, filled, size)
            except OSError:
                taken = 1  # the kernel rejected the first read (for example: a closed file)
            done += taken
        return np.flatnonzero(~filled)

    def _collect(self, count: int, filled: NDArray[np.bool_], size: int) -> None:
        while count:
            try:
                got = self._call(
                    self._getevents, self._handle, ctypes.c_long(1), ctypes.c_long(count),
                    ctypes.c_void_p(self._events_address), None,
                )  # fmt: skip
            except InterruptedError:
                continue
            found = self._events[:got]
            found = found[found["data"] >= self._first_number]
            filled[(found["data"][found["result"] == size] - self._first_number).astype(np.intp)] = True
            count -= len(found)

    def _call(self, number: int, *arguments: object) -> int:
        found = int(_syscall(ctypes.c_long(number), *arguments))
        if found < 0:
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code))
        return found


_threads = threading.local()


def _context() -> _Context | None:
    found: _Context | None = getattr(_threads, "context", None)
    if found is not None and found.is_ours:
        return found
    if getattr(_threads, "refused_in", 0) == os.getpid():
        return None
    try:
        _threads.context = _Context()
    except (OSError, KeyError):
        _threads.refused_in = os.getpid()
        return None
    made: _Context = _threads.context
    return made


if sys.platform == "linux" and sys.byteorder == "little" and ctypes.sizeof(ctypes.c_long) == 8:
    _syscall = ctypes.CDLL(None, use_errno=True).syscall
    _syscall.restype = ctypes.c_long
else:
    _NUMBERS.clear()
