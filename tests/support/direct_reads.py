"""Whether the kernel and a file system offer direct reads that never wait."""

import mmap
import os
from pathlib import Path

import pytest

from fusecache.disk.direct_reads import DirectReads


def skip_without_direct_reads(path: Path) -> None:
    """Skip the test if a file with at least 4 KiB cannot be read so, as on a tmpfs, which only opens it."""
    try:
        reads = DirectReads(1)
        try:
            reads.begin(os.fsencode(path), 0, memoryview(mmap.mmap(-1, 4096)), "probe")
        finally:
            reads.close()
    except OSError as exc:
        pytest.skip(f"no direct reads in {path.parent}: {exc}")
