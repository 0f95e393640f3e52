"""A bounded pool of page-aligned memory, allocated once and reused for the life of the daemon.

Fresh pages cost more than the copy into them, as each is faulted in and zeroed 4 KiB at a time. Direct I/O needs
aligned memory. This module does not decide who uses which buffer, or when it may be reused.
"""

import contextlib
import mmap
import threading

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
    """Memory in two sizes: `large` (8 MiB) and `small` (128 KiB) views, each aligned to a page."""

    def __init__(self, total_bytes: int) -> None:
        if total_bytes < MIN_BUFFER_BYTES:
            raise ValueError(f"the buffers need at least {MIN_BUFFER_BYTES} bytes, not {total_bytes}")
        small_bytes = max(MIB, total_bytes // SMALL_SHARE // LARGE_BYTES * LARGE_BYTES)
        large_count = (total_bytes - small_bytes) // LARGE_BYTES
        small_count = small_bytes // SMALL_BYTES
        memory = self._memory = _memory(large_count * LARGE_BYTES + small_count * SMALL_BYTES)
        self._toucher: threading.Thread | None = None
        self._is_closed = False
        border = large_count * LARGE_BYTES
        self.large = [memory[i * LARGE_BYTES : (i + 1) * LARGE_BYTES] for i in range(large_count)]
        self.small = [
            memory[border + i * SMALL_BYTES : border + (i + 1) * SMALL_BYTES] for i in range(small_count)
        ]

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

    def _populate(self) -> None:
        for start in range(0, self._memory.nbytes, _STEP_BYTES):
            if self._is_closed:
                return
            populate(self._memory[start : start + _STEP_BYTES])


def _memory(nbytes: int) -> memoryview:
    """Return zeroed memory, in huge pages where the kernel provides them."""
    area = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # EINVAL: a kernel built without huge pages
        area.madvise(mmap.MADV_HUGEPAGE)
    return memoryview(area)
