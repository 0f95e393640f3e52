"""A program that uses the mounts of `benchmarks.session`: imports little, so that it starts fast.

`python -m benchmarks.session_client CASE PATH SECONDS` prints how many operations it completed.
"""

import mmap
import os
import random
import sys
import time
from collections.abc import Callable

MIB = 2**20
FILE_BYTES = 1024 * MIB

Step = Callable[[], object]


def _stat(path: str) -> Step:
    return lambda: os.stat(path)


def _open_close(path: str) -> Step:
    return lambda: os.close(os.open(path, os.O_RDONLY))


def _random_4k(path: str) -> Step:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECT)
    page = mmap.mmap(-1, 4096)
    pages = FILE_BYTES // 4096
    return lambda: os.preadv(fd, [page], random.randrange(pages) * 4096)


def _read_1m(path: str) -> Step:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECT)
    memory = mmap.mmap(-1, MIB)
    return lambda: os.preadv(fd, [memory], random.randrange(FILE_BYTES // MIB) * MIB)


def _write_1m(path: str) -> Step:
    fd = os.open(path, os.O_WRONLY | os.O_DIRECT)
    memory = mmap.mmap(-1, MIB)
    return lambda: os.pwritev(fd, [memory], random.randrange(FILE_BYTES // MIB) * MIB)


CASES: dict[str, tuple[Callable[[str], Step], int]] = {
    "stat": (_stat, 1),
    "open and close": (_open_close, 1),
    "random 4 KiB": (_random_4k, 1),
    "random 4 KiB, 4 processes": (_random_4k, 4),
    "1 MiB reads": (_read_1m, 1),
    "1 MiB writes": (_write_1m, 1),
}


def main() -> None:
    """Run one case."""
    case, path, seconds = sys.argv[1:]
    step = CASES[case][0](path)
    count, end = 0, time.perf_counter() + float(seconds)
    while time.perf_counter() < end:
        step()
        count += 1
    sys.stdout.write(f"{count}\n")


if __name__ == "__main__":
    main()
