"""Buffers that other processes are to share, where the system gives no memory for them."""

import logging
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from fusecache.engine.cache.block_cache import BlockCache, CacheOptions
from fusecache.model.objects import MIB

# The files of this process may have 8 MiB.
PROGRAM = """
import os, resource, sys
from pathlib import Path
from fusecache.engine.cache.block_cache import BlockCache, CacheOptions
resource.setrlimit(resource.RLIMIT_FSIZE, (2**23, 2**23))
BlockCache(None, None, CacheOptions(Path(sys.argv[1]), 2**30, buffer_bytes=2**28, are_buffers_shared=True), None)
descriptors = [f"/proc/self/fd/{each}" for each in os.listdir("/proc/self/fd")]
print([name for name in map(os.readlink, filter(os.path.islink, descriptors)) if "memfd" in name])
"""


def test_they_are_not_shared_then_and_no_descriptor_is_left(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path)], capture_output=True, text=True, check=True
    )
    assert "the daemon works without movers, as it gets no shared memory" in done.stderr
    assert done.stdout == "[]\n"


def test_a_lack_of_memory_is_not_said_to_be_of_movers_that_nobody_wants(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    before = resource.getrlimit(resource.RLIMIT_AS)
    options = CacheOptions(tmp_path, 1 << 30, buffer_bytes=4096 * MIB)
    resource.setrlimit(resource.RLIMIT_AS, (pages * os.sysconf("SC_PAGE_SIZE") + 64 * MIB, before[1]))
    try:
        with caplog.at_level(logging.WARNING), pytest.raises(OSError, match="Cannot allocate memory"):
            BlockCache(None, None, options, None)  # type: ignore[arg-type]  # it does not come so far
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)
    assert caplog.messages == []
