"""Small reads from the disk without a thread: Linux's asynchronous I/O, through ctypes.

A thread costs ten times the processor time of the small read itself: two context switches, and four waits for the GIL
while the loop holds it. Measured with 8 KiB at random offsets on 2 cores: 330 microseconds per read with threads, 100
without.

Invariants:
1. No call waits for the disk. A file is opened only if the kernel has its path cached (RESOLVE_CACHED), and read only
   if that needs no other wait (RWF_NOWAIT). Reads that would wait are left to a thread.
2. Memory that is being filled is referenced from here until the kernel has finished with it.

Not thread-safe: used by one thread.

`AlignedBuffers`: a bounded pool of page-aligned memory, allocated once and reused for the life of the daemon.

Fresh pages cost more than the copy into them, as each is faulted in and zeroed 4 KiB at a time. Direct I/O needs
aligned memory. Not here: who uses which buffer, and when it may be reused.
"""

import contextlib
import ctypes
import errno
import mmap
import os
import struct
import threading
from collections.abc import Callable

from fusecache.disk.native import populate
from fusecache.model.objects import KIB, MIB

LARGE_BYTES = 8 * MIB
SMALL_BYTES = 128 * KIB
# Small random reads get 1/16 of the memory, so that 64 of them in flight do not hold 64 large buffers.
SMALL_SHARE = 16
MIN_BUFFER_BYTES = 3 * LARGE_BYTES
# The thread of `touch` can stop after each step, which takes about 20 ms if the host must find the pages first.
_STEP_BYTES = LARGE_BYTES


class AlignedBuffers:
    """Memory in two sizes: `large` (8 MiB) and `small` (128 KiB) views, each aligned to a page.

    fd: of the memory, if other processes are to map it, else -1. Then it has no huge pages on most systems.
    """

    def __init__(self, total_bytes: int, *, is_shared: bool = False) -> None:
        """Raises ValueError; OSError if it cannot be shared."""
        if total_bytes < MIN_BUFFER_BYTES:
            raise ValueError(f"the buffers need at least {MIN_BUFFER_BYTES} bytes, not {total_bytes}")
        small_bytes = max(MIB, total_bytes // SMALL_SHARE // LARGE_BYTES * LARGE_BYTES)
        large_count = (total_bytes - small_bytes) // LARGE_BYTES
        small_count = small_bytes // SMALL_BYTES
        nbytes = large_count * LARGE_BYTES + small_count * SMALL_BYTES
        self.fd = os.memfd_create("fusecache-buffers", os.MFD_CLOEXEC) if is_shared else -1
        try:
            memory = self._memory = _memory(nbytes, self.fd)
        except OSError:
            if is_shared:
                os.close(self.fd)
            raise
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        self._toucher: threading.Thread | None = None
        self._is_closed = False
        border = large_count * LARGE_BYTES
        self.large = [memory[i * LARGE_BYTES : (i + 1) * LARGE_BYTES] for i in range(large_count)]
        self.small = [
            memory[border + i * SMALL_BYTES : border + (i + 1) * SMALL_BYTES] for i in range(small_count)
        ]

    def offset_of(self, view: memoryview) -> int | None:
        """Return where a view begins in this memory, None if it is of other memory."""
        if view.readonly or not view.nbytes:
            return None
        offset = ctypes.addressof(ctypes.c_char.from_buffer(view)) - self._address
        return offset if 0 <= offset < self._memory.nbytes else None

    def touch(self) -> None:
        """Fault in all pages in a background thread.

        Faulting in 256 MiB takes up to half a second in a virtual machine whose host must find the pages first. Any
        thread that maps a file waits for it. So call this only after the journal has been read.
        """
        self._toucher = threading.Thread(target=self._populate, name="buffers", daemon=True)
        self._toucher.start()

    def close(self) -> None:
        """Stop the thread of `touch`, and return once it has ended: after one step at most. Idempotent."""
        self._is_closed = True
        if self._toucher is not None:
            self._toucher.join()
            self._toucher = None
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def _populate(self) -> None:
        for start in range(0, self._memory.nbytes, _STEP_BYTES):
            if self._is_closed:
                return
            populate(self._memory[start : start + _STEP_BYTES])


def _memory(nbytes: int, fd: int) -> memoryview:
    """Return zeroed memory, in huge pages where the kernel provides them. fd: of an empty memory file, or -1."""
    if fd >= 0:
        os.ftruncate(fd, nbytes)
        area = mmap.mmap(fd, nbytes)
    else:
        area = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # EINVAL: a kernel built without huge pages
        area.madvise(mmap.MADV_HUGEPAGE)
    return memoryview(area)


# Larger reads go to a thread: the loop verifies their checksums, and has other requests to serve.
LARGEST_BYTES = 128 * KIB

# asm/unistd.h: io_setup, io_destroy, io_submit, io_getevents.
_NUMBERS = {"x86_64": (206, 207, 209, 208), "aarch64": (0, 1, 2, 4)}
# The same number on both architectures. Linux 5.6; RESOLVE_CACHED needs 5.12.
_OPENAT2 = 437
_AT_FDCWD = -100
_RESOLVE_CACHED = 0x20
_RWF_NOWAIT = 0x08
_IOCB_FLAG_RESFD = 1
# linux/openat2.h: flags, mode, resolve.
_OPEN_HOW = struct.Struct("=QQQ")
# linux/aio_abi.h, little-endian: data, key, rw_flags, opcode (0: PREAD), reqprio, file, buffer, bytes, offset,
# reserved, flags, eventfd.
_CONTROL = struct.Struct("<QIiHhIQQqQII")
# data, control block, result (bytes, or a negative error), a second result.
_EVENT = struct.Struct("<QQqq")

# Errors that will not go away. EINVAL: the kernel does not know the flags; EPERM: a seccomp filter.
REFUSED = frozenset([errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP, errno.EPERM])

# PyDLL keeps the GIL: none of these calls waits, and releasing it would mean waiting for it afterwards.
_libc = ctypes.PyDLL(None, use_errno=True)


def _system_call(*types: type) -> Callable[..., int]:
    """Return syscall(2) for arguments of these types, the number first."""
    call = _libc["syscall"]
    call.argtypes, call.restype = (ctypes.c_long, *types), ctypes.c_long
    return call


_openat2 = _system_call(ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p, ctypes.c_size_t)
_io_setup = _system_call(ctypes.c_uint, ctypes.c_void_p)
_io_destroy = _system_call(ctypes.c_ulong)
_io_submit = _system_call(ctypes.c_ulong, ctypes.c_long, ctypes.c_void_p)
_io_getevents = _system_call(ctypes.c_ulong, ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p)


class DirectReads:
    """Up to `most` reads in flight. `events`: a descriptor that becomes readable when reads have ended."""

    def __init__(self, most: int) -> None:
        """Set up the kernel context. Raises OSError if the kernel lacks it, or the container forbids it."""
        numbers = _NUMBERS.get(os.uname().machine)
        if numbers is None or struct.calcsize("P") != 8:
            raise OSError(errno.ENOSYS, "the system call numbers of this machine's architecture are unknown")
        setup, self._destroy, self._submit, self._get = numbers
        context = ctypes.c_ulong(0)
        self.events = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        if _io_setup(setup, most, ctypes.byref(context)) < 0:
            code = ctypes.get_errno()
            os.close(self.events)
            raise OSError(code, os.strerror(code))
        self._context = context.value
        self._most = most
        self._controls = ctypes.create_string_buffer(_CONTROL.size * most)
        first = ctypes.addressof(self._controls)
        self._pointers = (ctypes.c_uint64 * most)(*(first + _CONTROL.size * slot for slot in range(most)))
        self._first_pointer = ctypes.addressof(self._pointers)
        self._found = ctypes.create_string_buffer(_EVENT.size * most)
        self._how = ctypes.create_string_buffer(
            _OPEN_HOW.pack(os.O_RDONLY | os.O_DIRECT | os.O_CLOEXEC, 0, _RESOLVE_CACHED)
        )
        self._free = list(range(most))
        self._running: dict[int, tuple[object, memoryview]] = {}

    def begin(self, path: bytes, offset: int, memory: memoryview, tag: object) -> bool:
        """Start filling page-aligned memory from `offset`; return False if a thread must do it. `ended` returns tag.

        Raises OSError if it can never work: an older kernel, an unsuitable file system, or a container that forbids it.
        """
        if not self._free:
            return False
        fd = _openat2(_OPENAT2, _AT_FDCWD, path, self._how, _OPEN_HOW.size)
        if fd < 0:
            _raise_refused()
            return False
        slot = self._free.pop()
        address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        what = fd, address, len(memory), offset, 0, _IOCB_FLAG_RESFD, self.events
        _CONTROL.pack_into(self._controls, _CONTROL.size * slot, slot, 0, _RWF_NOWAIT, 0, 0, *what)
        has_begun = _io_submit(self._submit, self._context, 1, self._first_pointer + 8 * slot) == 1
        if has_begun:
            self._running[slot] = tag, memory
        else:
            self._free.append(slot)
            _raise_refused(fd)
        _libc.close(fd)  # the kernel holds its own reference during the read
        return has_begun

    def ended(self) -> list[tuple[object, int]]:
        """Return the tags of reads that ended since the last call, each with its bytes or a negative errno."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self.events)
        count = _io_getevents(self._get, self._context, 0, self._most, self._found, None)
        found = []
        for index in range(count):
            slot, _, result, _ = _EVENT.unpack_from(self._found, _EVENT.size * index)
            found.append((self._running.pop(slot)[0], result))
            self._free.append(slot)
        return found

    def close(self) -> None:
        """Wait for the reads in flight, and free the kernel's memory."""
        _io_destroy(self._destroy, self._context)
        os.close(self.events)
        self._running.clear()


def _raise_refused(fd: int = -1) -> None:
    """Raise OSError, and close `fd`, if the last call's error means that no other call of its kind can succeed."""
    code = ctypes.get_errno()
    if code in REFUSED:
        if fd >= 0:
            _libc.close(fd)
        raise OSError(code, os.strerror(code))
