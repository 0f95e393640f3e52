"""The memory that this process may use, and the daemon's share of it."""

import os
from contextlib import suppress
from pathlib import Path, PurePath

from fusecache.model.objects import MIB

# The least that the option `memory` allows.
SMALLEST_MEMORY_BYTES = 32 * MIB
_LARGEST_DEFAULT_BYTES = 256 * MIB
# The daemon needs about 100 MiB beside its buffers, and a container also has its programs and the page cache.
_DEFAULT_SHARE = 8

# Requests that wait: of a kernel that writes back, about 1/500 of the memory (FUSE's share of its dirty pages), and of
# each program that writes with O_DIRECT a MiB.
_REQUEST_SHARE = 32
_LEAST_REQUEST_BYTES = 16 * MIB
_MOST_REQUEST_BYTES = 256 * MIB


def default_memory() -> int:
    """Return the default of the option `memory`, in bytes."""
    return max(SMALLEST_MEMORY_BYTES, min(_LARGEST_DEFAULT_BYTES, memory_bytes() // _DEFAULT_SHARE))


def request_memory() -> int:
    """Return how many bytes requests may hold that wait for the bucket or the disk."""
    return min(_MOST_REQUEST_BYTES, max(_LEAST_REQUEST_BYTES, memory_bytes() // _REQUEST_SHARE))


def memory_bytes(root: Path = Path("/")) -> int:
    """Return the memory of this machine, or of a control group that holds this process if that is less, in bytes.

    root: of the file system; tests pass their own.
    """
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    with suppress(OSError):
        for line in (root / "proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if not controllers:  # version 2
                top, name = root / "sys/fs/cgroup", "memory.max"
            elif "memory" in controllers.split(","):
                top, name = root / "sys/fs/cgroup/memory", "memory.limit_in_bytes"
            else:
                continue
            # Each group limits all below it. A container may see the path of its host, and its own group at the top.
            inner = PurePath(path.lstrip("/"))
            for group in (inner, *inner.parents):
                with suppress(OSError, ValueError):  # "max" means no limit
                    total = min(total, int((top / group / name).read_text()))
    return total
