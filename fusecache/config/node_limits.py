"""The memory and the processors that this process may use, and the daemon's share of them."""

import os
from collections.abc import Iterator
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

# With fewer, the loop, the readers and the network share them, and a mover only adds a switch of processes.
_LEAST_PROCESSORS = 6
# A mover carries about 1.4 GiB/s, and the loop decides for 6 (docs/decisions/0011-more-cores.md).
_MOST_MOVERS = 4


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
    for group in _groups(root, "memory"):
        for name in ("memory.max", "memory.limit_in_bytes"):
            with suppress(OSError, ValueError):  # "max" means no limit
                total = min(total, int((group / name).read_text()))
    return total


def default_movers() -> int:
    """Return the default of the option `movers`."""
    processors = usable_processors()
    return min(_MOST_MOVERS, int(processors - 2) // 4) if processors >= _LEAST_PROCESSORS else 0


def usable_processors(root: Path = Path("/")) -> float:
    """Return on how many processors this process may run, or the quota of its control groups, in processors, if less.

    root: of the file system; tests pass their own.
    """
    usable = float(len(os.sched_getaffinity(0)))
    for group in _groups(root, "cpu"):
        with suppress(OSError, ValueError, ZeroDivisionError):  # "max" means no limit
            quota, period = (group / "cpu.max").read_text().split()
            usable = min(usable, int(quota) / int(period))
        with suppress(OSError, ValueError, ZeroDivisionError):
            quota, period = ((group / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period"))
            if int(quota) > 0:  # -1 means no limit
                usable = min(usable, int(quota) / int(period))
    return usable


def _groups(root: Path, controller: str) -> Iterator[Path]:
    """Yield the control groups that limit this process, of either version: each group limits all below it."""
    with suppress(OSError):
        for line in (root / "proc/self/cgroup").read_text(errors="surrogateescape").splitlines():
            _, controllers, path = line.split(":", 2)
            top = root / "sys/fs/cgroup"
            if controller in controllers.split(","):  # version 1
                top /= controller
            elif controllers:
                continue
            # A container may see the path of its host, and its own group at the top.
            inner = PurePath(path.lstrip("/"))
            for group in (inner, *inner.parents):
                yield top / group
